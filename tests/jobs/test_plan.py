"""A run that ends at a limit and goes on, and what its record says that it took."""

import json

import pytest

from jobs import prune
from pipeline import TokenCache
from tests.jobs.jobs import clips


def record_of(cache):
    return json.loads(max((cache / "runs").iterdir()).read_text())


@pytest.mark.slow
def test_a_run_ends_at_its_limit_goes_on_and_records_what_it_took(one_ray, tmp_path, capsys):
    cache = tmp_path / "cache"
    argv = [str(clips()[0].parent), "--out", str(cache), "--num-frames", "4", "--device", "cpu", "--json"]
    quick = ["--decode-timeout", "1", "--stall-timeout", "2"]  # looked at each fifth of a second
    assert prune.main([*argv, *quick, "--max-hours", "1e-6"]) == 1  # no video is done
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["n_ok"] == 0 and stopped["n_missing"] == 0 and stopped["n_waiting"] == 4
    assert record_of(cache)["ended_by"] == "--max-hours 1e-06 is reached"
    assert prune.main(argv) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["n_ok"] == done["n_new"] == 4 and len(TokenCache(cache).video_ids) == 4
    summary = record_of(cache)["summary"]
    for key in ("wall_s", "decode_core_s", "output_bytes", "encoder_busy"):
        assert summary[key] == done[key] > 0
    files = sum(file.stat().st_size for file in (cache / "tokens").iterdir())
    assert done["output_bytes"] < files < done["output_bytes"] + 4 * 8192  # and the footer of each shard
    assert done["encoder_busy"] < 1
