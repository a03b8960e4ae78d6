"""The benchmark of merging and comparing caches: run on a thousand videos; nothing here asserts a time."""

import json

from jobs.benchmark import __main__ as benchmark


def test_merging_by_links_and_copies_and_comparing_are_measured(tmp_path, capsys):
    file = tmp_path / "sharing.json"
    argv = ["sharing", "--videos", "1000", "--shard-kb", "1", "--folder", str(tmp_path), "--json", str(file)]
    assert benchmark.main(argv) == 0
    record = json.loads(file.read_text())
    assert (record["videos"], record["shards"], record["shard_bytes"]) == (1000, 92, 92_000)
    assert 46_000 < record["copied_bytes"] <= 92_000  # shards of which no row counts stay behind
    assert all(record[name] > 0 for name in ("link_s", "copy_s", "diff_s", "diff_merged_s"))
    assert "diff of the two" in capsys.readouterr().out and list(tmp_path.iterdir()) == [file]
