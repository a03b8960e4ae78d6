"""The benchmark of workers that share rows: both ways give each worker all of them."""

import json

import pytest

from jobs.benchmark.__main__ import main
from jobs.benchmark.read.cache import ReadJob
from jobs.benchmark.serving.workers import measure_workers


@pytest.mark.slow
def test_both_ways_move_all_rows():
    each, one = measure_workers(2, 2, ReadJob(videos=3, tokens=200, hidden=256, videos_per_shard=2, repeats=1))
    assert (each.way, one.way, each.workers, one.workers) == ("each reads", "one reads and broadcasts", 2, 2)
    assert each.mb == one.mb == 200 * 512 / 1e6
    assert min(each.ms, each.cpu_ms, one.ms, one.cpu_ms) > 0


@pytest.mark.slow
def test_the_command_shows_both(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["serving", "--workers", "2", "--repeats", "1", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())["workers"]) == 2 and "broadcasts" in capsys.readouterr().out
