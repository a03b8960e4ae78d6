"""The benchmark of resuming: run on real files of a few hundred videos; nothing here asserts a time."""

import json

import pytest

from jobs.benchmark import __main__ as benchmark


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv"])
def test_resume_is_measured_on_real_files_and_names_its_first_limit(tmp_path, capsys, kind):
    file = tmp_path / "resume.json"
    argv = ["resume", "--videos", "300", "--videos-per-shard", "22", "--manifest", kind, "--folder", str(tmp_path)]
    assert benchmark.main([*argv, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["videos"], record["shards"], record["ledger_bytes"]) == (300, 13, 64)
    assert all(seconds > 0 for seconds in record["seconds"].values()) and record["manifest_bytes"] > 64
    assert record["first_limit"]["videos"] > 300
    assert "first limit" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [file]
