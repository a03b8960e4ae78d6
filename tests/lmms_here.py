"""For tests that need lmms-eval: its command on a local task. Importing this skips a module where it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before anything of Hugging Face is imported: it looks at these then.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
pytest.importorskip("lmms_eval", reason="lmms-eval is not installed here: see tests/test_lmms.py")

TASK = "videomme_here"
_STARTED = """
import os, runpy, signal
from pipeline.generate import run

commit = run.commit_answers

def dying(store, run_id, number, *more):
    if number == int(os.environ.get("DIE_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    commit(store, run_id, number, *more)

run.commit_answers = dying
runpy.run_module("lmms_eval", run_name="__main__", alter_sys=True)
"""


def write_task(folder: Path, annotations: Path) -> Path:
    """Write a task that is VideoMME's but for its name and the place of its rows; return its folder."""
    import lmms_eval  # noqa: PLC0415 - seconds

    stock = Path(lmms_eval.__file__).parent / "tasks" / "videomme" / "videomme.yaml"
    folder.mkdir()
    lines = [
        f"include: {stock}",
        f"task: {TASK}",
        "dataset_path: parquet",
        f"dataset_kwargs: {{data_files: {{test: {annotations}}}}}",
    ]
    (folder / "videomme_here.yaml").write_text("\n".join(lines))
    return folder


def lmms_eval_of(tasks: Path, out: Path, *options: str, die_at: int = -1, **model_args: object) -> str:
    """Run ``python -m lmms_eval`` on the task in a process that cannot reach Ray; return what it says.

    With ``die_at`` it is killed as it commits its answers for that time, counted from 0.
    """
    said = ",".join(f"{name}={value}" for name, value in model_args.items())
    argv = ["--model", "gstep_cached", "--model_args", said, "--include_path", str(tasks), "--tasks", TASK]
    argv += ["--log_samples", "--output_path", str(out), *options]
    environ = {**os.environ, "HF_HOME": str(tasks / "hf"), "RAY_ADDRESS": "127.0.0.1:1", "DIE_AT": str(die_at)}
    command = [sys.executable, "-c", _STARTED] if die_at >= 0 else [sys.executable, "-m", "lmms_eval"]
    done = subprocess.run([*command, *argv], env=environ, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == (0 if die_at < 0 else -9), done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def replies_in(out: Path) -> dict[int, str]:
    """Return the reply to each document, as lmms-eval logged it."""
    (file,) = out.rglob(f"*_samples_{TASK}.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return {sample["doc_id"]: sample["filtered_resps"] for sample in samples}


def results_in(out: Path) -> dict[str, object]:
    """Return the metrics of the task, as lmms-eval wrote them."""
    (file,) = out.rglob("*_results.json")
    found: dict[str, object] = json.loads(file.read_text())["results"][TASK]
    return found
