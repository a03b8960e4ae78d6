"""What a program or a notebook calls: ``pipeline.prune_videos`` and the rest, and that they leave nothing behind."""

import json
import shutil

import pytest
import ray
from ray.data import DataContext

import pipeline
from tests.builders.answers import tiny_cache
from tests.builders.clips import sample
from tests.builders.clusters import ray_here
from tests.builders.runs import environment
from tests.examples import run_example
from tests.interpreter import run_python
from tests.paths import ROOT

NOTEBOOK = ROOT / "pipeline" / "examples" / "first_hour.ipynb"

# Before and after the notebook's own cells, in a process of its own.
BEFORE = """
import logging, os, signal
import ray, ray.data

def state():
    loggers = {name: logging.getLogger(name).level for name in ("ray", "ray.data")}
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    kept = "RAY_AUTH_TOKEN"  # of the next cluster that this process starts
    variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_") and name != kept}
    return loggers, signals, variables, dict(vars(ray.data.DataContext.get_current()))

was = state()
"""
AFTER = """
assert state() == was, "something was changed"
assert not ray.is_initialized()
assert not Path(f"/proc/self/task/{os.getpid()}/children").read_text(), "processes were left"
tokens = pipeline.read_answers(answered.out)["n_visual_tokens"].to_pylist()
print("ALL", summary.n_ok, summary.failed, len(cache), answered.n_ok, *tokens)
"""


CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_small_and_ran_from_top_to_bottom():
    assert NOTEBOOK.stat().st_size < 150_000
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert not any(output["output_type"] == "error" for cell in CELLS for output in cell["outputs"])


@pytest.mark.slow
def test_the_notebook_runs_and_leaves_the_process_as_it_was(tmp_path):
    code = "\n".join([BEFORE, *("".join(cell["source"]) for cell in CELLS), AFTER])
    done = run_python("-c", code, cwd=tmp_path, env=environment(MPLBACKEND="agg"), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    tenth = 8 * 196 // 10 + 1  # and the newline
    assert done.stdout.split("ALL ")[1].split() == ["4", "{}", "4", "2", str(tenth), str(tenth)]


@pytest.mark.slow
@ray_here({"num_cpus": 2})
def test_stages_and_questions_use_the_ray_that_is_there_and_leave_it_as_it_was(tmp_path, monkeypatch, capsys):
    (tmp_path / "videos").mkdir()
    shutil.copy(sample("bikes.mp4"), tmp_path / "videos")
    (tmp_path / "videos" / "text.mp4").write_text("this is no video\n" * 50)
    monkeypatch.chdir(tmp_path)
    run_example("pipeline/examples/own_stages.py", "videos")
    good, bad = sorted(capsys.readouterr().out.strip().split("\n"))  # Ray gives what is ready first
    assert good.startswith(f"bikes.mp4 ({4 * 196 // 4}, 64) [") and bad.startswith("text.mp4 unsupported ")

    tiny_cache(tmp_path / "cache", ("a",))
    asked = [{"question_id": i, "video_id": "ab"[i % 2], "prompt": "What?"} for i in range(4)]
    told, before = [], dict(vars(DataContext.get_current()))
    summary = pipeline.answer_questions("cache", asked, out=tmp_path / "o", max_new_tokens=2, progress=told.append)
    assert (summary.n_ok, summary.failed) == (2, {"1": "unknown-video", "3": "unknown-video"})
    assert summary.out == str(tmp_path / "o") and "2 answered, 2 failed" in str(summary)
    assert (told[-1].item, told[-1].ok, told[-1].total) == ("question", 2, 2)
    assert vars(DataContext.get_current()) == before and ray.is_initialized()

    def stop(progress: pipeline.Progress) -> None:
        if not progress.note:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeline.answer_questions("cache", asked[:1], out=tmp_path / "other", progress=stop)
    assert ray.get(ray.remote(num_cpus=2)(lambda: "free").remote(), timeout=60) == "free"
