"""A run beside its plan, limits that end it, and the plan of an evaluation."""

import json

import pytest

from jobs import evaluate, prune
from pipeline import TokenCache
from tests.jobs.jobs import clips
from tests.pipeline.rays import ray_here

FACTS = {"wall_s", "decode_core_s", "output_bytes", "encoder_busy"}


def record_of(cache):
    (file,) = sorted((cache / "runs").iterdir())[-1:]
    return json.loads(file.read_text())


@pytest.mark.slow
def test_a_run_keeps_its_forecast_beside_what_it_took_and_ends_at_a_limit(tmp_path, capsys):
    cache = tmp_path / "cache"
    argv = [str(clips()[0].parent), "--out", str(cache), "--num-frames", "4", "--device", "cpu", "--json"]
    with ray_here({"num_cpus": 2}):
        quick = ["--decode-timeout", "1", "--stall-timeout", "2"]  # looked at each fifth of a second
        assert prune.main([*argv, *quick, "--core-hour", "1000", "--max-cost", "1e-6"]) == 1  # no video is done
        stopped = json.loads(capsys.readouterr().out)
        assert stopped["n_ok"] == 0 and stopped["n_missing"] == 0 and stopped["n_waiting"] == 4
        assert record_of(cache)["ended_by"] == "--max-cost 1e-06 is reached"
        assert prune.main([*argv, "--probe", "4", "--core-hour", "0.05"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["n_ok"] == done["n_new"] == 4 and len(TokenCache(cache).video_ids) == 4
    record = record_of(cache)
    assert record["plan"] == record["summary"]["plan"] == done["plan"]
    assert done.keys() >= FACTS and done.items() >= {key: record["summary"][key] for key in FACTS}.items()
    plan = done["plan"]
    assert plan["videos"] == 4 and "4 of 4 videos were decoded" in plan["notes"][0]
    assert plan["output_bytes"]["expected"] == pytest.approx(done["output_bytes"])
    files = sum(file.stat().st_size for file in (cache / "tokens").iterdir())
    assert done["output_bytes"] < files < done["output_bytes"] + 4 * 8192  # and the footer of each shard
    assert 0 < done["encoder_busy"] < 1 and 0 < done["cost"] < 1


def test_an_evaluation_is_planned_without_being_begun(tmp_path, capsys):
    from jobs.testbed.__main__ import main as testbed  # noqa: PLC0415

    shapes, out = tmp_path / "shapes", tmp_path / "results"
    assert testbed(["make", str(shapes), "--videos", "2"]) == 0
    capsys.readouterr()
    argv = ["--benchmark", "shapes", "--data", str(shapes), "--model", "shapes", "--method", "gstep", "--out", str(out)]
    assert evaluate.main([*argv, "--plan", "--json", "--gpus", "8", "--gpu-type", "A100", "--gpu-hour", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not out.exists() and plan["videos"] == 2
    assert set(plan["parts_s"]) == {"encode", "prune", "answer"}
    total = sum(part["expected"] for part in plan["parts_s"].values())
    assert plan["gpu_s"]["expected"] == pytest.approx(total) and plan["cost"]["total"]["expected"] > 0
    one = json.loads(json.dumps(plan["parts_s"]["answer"]["expected"]))
    assert evaluate.main([*argv, "--plan", "--json", "--gpus", "8", "--gpu-type", "A100", "--limit", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parts_s"]["answer"]["expected"] < one / 5
    assert plan["break_even_questions"] is None and "it pays" not in " ".join(plan["notes"])
    assert evaluate.main(["--score", "x", "--plan", "--json"]) == 2
    pytest.importorskip("simpy")
    assert evaluate.main([*argv, "--plan", "--json", "--gpus", "8", "--gpu-type", "A100", "--simulate"]) == 0
    assert "--simulate is not for evaluations" in capsys.readouterr().out
