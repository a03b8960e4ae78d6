"""The benchmark of the table: run on real files of a few thousand videos; nothing here asserts a time."""

import json

from jobs.benchmark import __main__ as benchmark


def test_opening_finding_resuming_and_merging_are_measured_on_real_files(tmp_path, capsys):
    file = tmp_path / "table.json"
    argv = ["table", "--videos", "9000", "--request-ms", "1", "--folder", str(tmp_path), "--json", str(file)]
    assert benchmark.main(argv) == 0
    record = json.loads(file.read_text())
    assert (record["videos"], record["files"]) == (9000, 1)
    assert all(record[name] > 0 for name in ("open_s", "find_s", "far_open_s", "far_find_s", "resume_s", "merge_s"))
    assert (record["far_open_requests"], record["far_find_requests"]) == (2, 2)
    assert "find a video and read its row" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
