"""For tests that need lmms-eval: its command on a local task. Importing this skips a module where it is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Before anything of Hugging Face is imported: it looks at these then.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
pytest.importorskip("lmms_eval", reason="lmms-eval is not installed here: see tests/test_lmms.py")

TASK = "videomme_here"
_STARTED = """
import json, os, runpy, signal
from pipeline.generate import run

commit, replies = run.commit_answers, json.loads(os.environ["REPLIES"])

def dying(store, run_id, number, *more):
    if number == int(os.environ.get("DIE_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
    commit(store, run_id, number, *more)

run.commit_answers = dying
if replies is not None:
    from pipeline.evaluate.lmms.plugin import GstepCached

    GstepCached.generate_until = lambda self, requests: [replies[str(one.args[3])] for one in requests]
runpy.run_module("lmms_eval", run_name="__main__", alter_sys=True)
"""


def write_task(folder: Path, annotations: Path, stock: str = "videomme/videomme.yaml", name: str = TASK) -> Path:
    """Write a task that is one of lmms-eval's but for its name and the place of its rows; return its folder."""
    spec = find_spec("lmms_eval")
    assert spec is not None and spec.origin is not None
    folder.mkdir()
    lines = [
        f"include: {Path(spec.origin).parent / 'tasks' / stock}",
        f"task: {name}",
        "dataset_path: parquet",
        "dataset_name: null",
        f"dataset_kwargs: {{data_files: {{test: {annotations}}}}}",
    ]
    (folder / f"{name}.yaml").write_text("\n".join(lines))
    return folder


def lmms_eval_of(
    tasks: Path,
    out: Path,
    *options: str,
    task: str = TASK,
    die_at: int = -1,
    replies: dict[int, str] | None = None,
    **model_args: object,
) -> str:
    """Run ``python -m lmms_eval`` on the task in a process that reaches neither Ray nor a judge; return what it says.

    Args:
        die_at: the process is killed as it commits its answers for that time, counted from 0.
        replies: by the number of a document, instead of those that the model gives.
    """
    said = ",".join(f"{name}={value}" for name, value in model_args.items())
    argv = ["--model", "gstep_cached", "--model_args", said, "--include_path", str(tasks), "--tasks", task]
    argv += ["--log_samples", "--output_path", str(out), *options]
    environ = {
        **os.environ,
        "HF_HOME": str(tasks / "hf"),
        "RAY_ADDRESS": "127.0.0.1:1",
        "OPENAI_API_URL": "http://127.0.0.1:1",  # nobody listens there
        "DIE_AT": str(die_at),
        "REPLIES": json.dumps(replies),
    }
    is_plain = die_at < 0 and replies is None
    command = [sys.executable, *(["-m", "lmms_eval"] if is_plain else ["-c", _STARTED])]
    done = subprocess.run([*command, *argv], env=environ, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == (0 if die_at < 0 else -9), done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout + done.stderr


def replies_in(out: Path, task: str = TASK) -> dict[int, str]:
    """Return the reply to each document, as lmms-eval logged it."""
    (file,) = out.rglob(f"*_samples_{task}.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    return {sample["doc_id"]: sample["filtered_resps"] for sample in samples}


def results_in(out: Path, task: str = TASK) -> dict[str, object]:
    """Return the metrics of the task, as lmms-eval wrote them."""
    (file,) = out.rglob("*_results.json")
    found: dict[str, object] = json.loads(file.read_text())["results"][task]
    return found
