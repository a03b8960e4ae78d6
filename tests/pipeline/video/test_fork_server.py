"""The server of decode processes that a worker forks ahead: it is used once, shows no secret, and may be lost."""

import json
import os
from pathlib import Path

import pytest

from tests.builders.runs import assert_all_gone
from tests.interpreter import run_python
from tests.paths import ROOT

# As a worker that is forked from prefork/server.py does: its variables are set anew, and it has no threads yet.
WORKER = """
import json, os, signal, sys
from pathlib import Path
import torch
from pipeline.errors import VideoFault
from pipeline.video import fork_server
from pipeline.video.decode import DecodeRequest
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.clips import KeepSize

variables = dict(os.environ)
os.environ.clear()
os.environ.update(variables)
fork_server.fork_standby()
waits = fork_server._standing_by.pid
if "killed" in sys.argv:
    os.kill(waits, signal.SIGKILL)
    os.waitid(os.P_PID, waits, os.WEXITED | os.WNOWAIT)
for _ in range(2):
    with DecodeSandbox(timeout_s=300) as sandbox:
        try:
            request = DecodeRequest(sys.argv[1], Sampling(2), KeepSize(), decoder="tests.builders.clips:Revealing")
            sandbox.decode(request)
        except VideoFault as fault:
            seen = json.loads(fault.message)
            parent = Path(f"/proc/{seen['pid']}/stat").read_text().rpartition(")")[2].split()[1]
            seen["ahead"] = int(parent) == waits
            seen["title"] = Path(f"/proc/{parent}/cmdline").read_text().strip(chr(0))
            video = sandbox.decode(DecodeRequest(sys.argv[1], Sampling(2), KeepSize()))
            seen["decodes"] = video.record["source_frames"]
            print(json.dumps(seen), flush=True)
if "waits" in sys.argv:
    print(waits, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def worker(tmp_path: Path, clip: Path, *words: str) -> list[str]:
    """Run it, and return the lines that it prints."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    done = run_python(
        script, clip, *words, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_TOKEN": "x", "PLAIN": "y"}, timeout=300
    )
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_children_are_forked_from_it_and_neither_shows_a_secret(tmp_path, clip):
    *seen, waits = worker(tmp_path, clip, "waits")
    for child in map(json.loads, seen):
        assert child["ahead"] and "forkserver" in child["title"] and child["decodes"] == 30
        assert child["env"] == child["first"] == [] and child["threads"] == 1
    assert len(seen) == 2
    assert_all_gone([int(waits)])  # with the worker, however that ends


@pytest.mark.slow
def test_another_is_started_where_it_was_killed(tmp_path, clip):
    for child in map(json.loads, worker(tmp_path, clip, "killed")):
        assert not child["ahead"] and child["decodes"] == 30 and child["env"] == []
