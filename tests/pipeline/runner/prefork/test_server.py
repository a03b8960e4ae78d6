"""Workers that are forked: what they are started with, and what happens where the server cannot fork them."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.runner.prefork.server import SOCKET
from pipeline.runner.prefork.worker import request_worker
from tests.interpreter import run_python
from tests.jobs.jobs import environment, fork_server
from tests.jobs.processes import assert_all_gone, family
from tests.paths import ROOT
from tests.waiting import wait_until

# A driver that starts Ray as commands do; a worker says what it is.
DRIVER = """
import json, os, signal, subprocess, sys
from pathlib import Path
import ray
from pipeline.runner.cluster import connect

def child(program):
    for task in Path("/proc").glob("[0-9]*/cmdline"):
        parts = task.read_text().split(chr(0))
        if any(part.endswith(program) for part in parts) and mine(task.parent):
            return int(task.parent.name)

def mine(process):
    return int((process / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()

@ray.remote(num_cpus=0)
def say():
    import os, sys
    print("a line of its log", flush=True)
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    found = dict(forked="prefork/server.py" in parent, loaded="transformers" in sys.modules)
    found |= dict(group=os.getpgid(0) == os.getpid(), word=os.environ.get("A_WORD"), pid=os.getpid())
    return found | dict(threads=os.environ.get("OMP_NUM_THREADS"),
        oom=Path("/proc/self/oom_score_adj").read_text().strip(), folder=os.getcwd())

if "gpu" in sys.argv:
    import torch
    torch.cuda.device_count = lambda: 1
connect()
own = ray.get(say.options(runtime_env={"env_vars": {"A_WORD": "of its own"}}).remote()) if "own" in sys.argv else None
if "kill" in sys.argv:
    os.kill(child("prefork/server.py"), signal.SIGKILL)
found = ray.get(say.remote())
logs = Path(ray._private.worker._global_node.get_logs_dir_path())
logged = sum("a line of its log" in path.read_text() for path in logs.glob("worker*.out"))
programs = dict(server=child("prefork/server.py"), monitor=child("/monitor.py"), raylet=child("/raylet"))
print(json.dumps(dict(found=found, own=own, logged=logged, **programs)), flush=True)
signal.pause()
"""

# Two forks of a process that has imported what workers use, each with ids that it draws in its two threads.
FORKS = """
import json, os, threading
from pipeline.runner.prefork.server import import_ray

def ids():
    from ray import ObjectRef
    drawn = [ObjectRef.from_random().hex()]
    thread = threading.Thread(target=lambda: drawn.append(ObjectRef.from_random().hex()))
    thread.start()
    thread.join()
    return drawn

import_ray()
read, write = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        os.write(write, json.dumps(ids()).encode() + b"\\n")
        os._exit(0)
os.close(write)
print(open(read).read(), flush=True)
"""


@contextmanager
def drive(tmp_path: Path, *words: str, **more: str | None) -> Iterator[dict]:
    """Yield what the driver says, and kill it afterwards."""
    script = tmp_path / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    command = [sys.executable, str(script), *words]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(**more), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
def test_a_worker_is_forked_with_the_environment_that_ray_gives_it_and_ends_with_its_driver(tmp_path):
    """Also on a node that has a GPU."""
    with drive(tmp_path, "gpu", **{SOCKET: None}, A_WORD="here") as document:
        found = document["found"]
        assert found["forked"] and found["loaded"] and found["group"], found
        assert found["word"] == "here" and found["folder"] == str(tmp_path)
        assert int(found["oom"]) > 0  # the kernel ends workers first, as Ray asks it to
        assert document["logged"] == 1
        assert document["raylet"] and document["server"] and not document["monitor"]
    assert_all_gone([document["server"], found["pid"]])


@pytest.mark.slow
def test_ray_sets_workers_up_that_have_an_environment_of_their_own_or_no_server(tmp_path):
    with drive(tmp_path, "own", "kill", **{SOCKET: None}) as document:
        assert not document["own"]["forked"] and document["own"]["word"] == "of its own"
        assert not document["found"]["forked"] and not document["found"]["loaded"]


@pytest.mark.slow
def test_forked_workers_draw_ids_of_their_own():
    command = [sys.executable, "-c", FORKS]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    drawn = [drawn for line in done.stdout.splitlines() if line for drawn in json.loads(line)]
    assert len(drawn) == len(set(drawn)) == 4


@pytest.mark.parametrize(("file", "code"), [("nvidia-uvm", 1), ("nvidiactl", 0)])
def test_a_process_that_started_cuda_forks_nothing(tmp_path, file, code):
    """CUDA opens a device that NVML leaves alone; here a file has its name."""
    (tmp_path / file).touch()
    script = f"import pipeline.runner.prefork.server as s; opened = open({str(tmp_path / file)!r}); s._import(())"
    done = run_python("-c", script, env=environment())
    assert (done.returncode, "has started CUDA" in done.stderr) == (code, bool(code)), done.stderr


@pytest.fixture
def program(tmp_path, monkeypatch) -> list[str]:
    """A program that makes a file ``ran`` in its folder, for a server that this process asks."""
    (tmp_path / "program.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # as the server has it
    return [str(tmp_path / "program.py")]


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "PYTHONPATH"])
def test_a_server_of_other_variables_that_imports_read_forks_nothing(program, monkeypatch, variable):
    assert request_worker(fork_server(), program)
    wait_until(Path("ran").exists, "the program runs")
    monkeypatch.setenv(variable, "default")
    assert not request_worker(fork_server(), program)


def test_of_raylets_that_have_ended_the_server_keeps_no_process(program, monkeypatch):
    place, before = fork_server(), family(os.getpid())
    with subprocess.Popen(["sleep", "600"]) as raylet:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        assert request_worker(place, program)
        raylet.kill()
    of_it = [pid for pid, title in family(os.getpid()).items() - before.items() if "server.py" in title]
    assert of_it
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    assert request_worker(place, program)
    assert_all_gone(of_it)
