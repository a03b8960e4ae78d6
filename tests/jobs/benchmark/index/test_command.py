"""The benchmark of the index: run on real files of a few hundred videos; nothing here asserts a time."""

import json

from jobs.benchmark import __main__ as benchmark


def test_opening_finding_and_resuming_are_measured_on_a_real_index(tmp_path, capsys):
    file = tmp_path / "index.json"
    argv = ["index", "--videos", "300", "--videos-per-shard", "22", "--folder", str(tmp_path), "--json", str(file)]
    assert benchmark.main(argv) == 0
    record = json.loads(file.read_text())
    assert (record["videos"], record["shards"]) == (300, 14)
    assert all(record[name] > 0 for name in ("open_s", "first_s", "find_s", "row_s", "compact_s", "resume_s"))
    assert "find another" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
