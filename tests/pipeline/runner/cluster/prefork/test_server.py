"""Workers that are forked: what they are started with, and what happens where the server cannot fork them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.runner.cluster.prefork import worker
from pipeline.runner.cluster.prefork.server import SOCKET
from tests.builders.runs import assert_all_gone, environment, family, fork_server
from tests.interpreter import run_python
from tests.paths import ROOT, python_path
from tests.waiting import wait_until

# A driver that starts Ray as commands do, on a node with a GPU. Two workers say what they are: one of the server, and
# one that has an environment of its own. A third is a stage of Ray Data, and lists its modules.
DRIVER = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
import ray, torch
from pipeline.runner.cluster.connection import connect

@ray.remote(num_cpus=0)
class Worker:
    def describe(self):
        print("a line of its log", flush=True)
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text()
        return dict(forked="prefork/server.py" in parent, loaded="transformers" in sys.modules, pid=os.getpid(),
            leads=os.getpgid(0) == os.getpid(), word=os.environ.get("A_WORD"), folder=os.getcwd(),
            oom=int(Path("/proc/self/oom_score_adj").read_text()))

class Stage:
    def __call__(self, batch):
        return {"modules": np.array([" ".join(sys.modules)])}

torch.cuda.device_count = lambda: 1
connect()
logs = Path(ray._private.worker._global_node.get_logs_dir_path())
workers = [Worker.remote(), Worker.options(runtime_env={"env_vars": {"A_WORD": "of its own"}}).remote()]
forked, own = ray.get([worker.describe.remote() for worker in workers])
logged = sum("a line of its log" in path.read_text() for path in logs.glob(f"worker*-{forked['pid']}.out"))
(row,) = ray.data.range(1).map_batches(Stage, concurrency=1).take_all()
said = dict(forked=forked, own=own, logged=logged, locked=(logs.parent / "gstep.lock").exists())
print(json.dumps(dict(said, modules=row["modules"].split())), flush=True)
signal.pause()
"""


@pytest.fixture
def request_program(tmp_path, monkeypatch):
    """Let the server that this process shares fork a program, which runs in the test's folder; returns whether."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))  # as the server has it

    def request(program: str) -> bool:
        (tmp_path / "program.py").write_text(program)
        return worker.request_worker(fork_server(), [str(tmp_path / "program.py")])

    return request


# The modules that a worker finds.
MODULES = """
import sys
from pathlib import Path
Path("modules.new").write_text(" ".join(sys.modules))
Path("modules.new").rename("modules")
"""


@pytest.mark.slow
def test_a_worker_is_forked_as_ray_would_start_it_or_started_by_ray_and_ends_with_its_driver(tmp_path, request_program):
    (tmp_path / "driver.py").write_text(DRIVER)
    command, more = [sys.executable, "driver.py"], {SOCKET: None, "A_WORD": "of the driver"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment(**more), stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            document = json.loads(driver.stdout.readline())
            programs = family(driver.pid)
        finally:
            driver.kill()
    forked, own = document["forked"], document["own"]
    assert forked["forked"] and forked["loaded"] and forked["leads"], forked
    assert request_program(MODULES)
    before = wait_until((tmp_path / "modules").exists, "modules") and (tmp_path / "modules").read_text().split()
    own_imports = set(document["modules"]) - set(before)
    dear = ("pyarrow", "pydantic", "ray._", "ray.data._internal.execution", "ray.data._internal.planner", "ray.util")
    assert not [name for name in own_imports if name.startswith(dear)]
    assert (forked["word"], forked["folder"], document["logged"]) == ("of the driver", str(tmp_path), 1)
    assert document["locked"]  # the session, which no other run deletes then
    assert forked["oom"] > 0  # the kernel ends workers first, as Ray asks it to
    assert not own["forked"] and not own["loaded"] and own["word"] == "of its own"
    servers = [pid for pid, title in programs.items() if "prefork/server.py" in title]
    assert servers and any("/raylet" in title for title in programs.values())
    assert not [title for title in programs.values() if "/monitor.py" in title or "/dashboard.py" in title]
    assert_all_gone([*servers, forked["pid"]])


# Ids that a worker draws in its two threads.
IDS = """
import os, threading
from pathlib import Path
from ray import ObjectRef
drawn = [ObjectRef.from_random().hex()]
thread = threading.Thread(target=lambda: drawn.append(ObjectRef.from_random().hex()))
thread.start()
thread.join()
Path(f"{os.getpid()}.new").write_text(" ".join(drawn))
Path(f"{os.getpid()}.new").rename(f"{os.getpid()}.ids")
"""


def test_forked_workers_draw_ids_of_their_own(request_program, tmp_path):
    assert request_program(IDS) and request_program(IDS)
    files = wait_until(lambda: len(files := [*tmp_path.glob("*.ids")]) == 2 and files, "the ids of two workers")
    assert len({drawn for file in files for drawn in file.read_text().split()}) == 4


def test_a_process_that_started_cuda_forks_nothing(tmp_path):
    """CUDA opens a device that NVML leaves alone; here a file has its name."""
    script = (
        "import pipeline.runner.cluster.prefork.server as server\n"
        "opened = [open('nvidiactl', 'w')]\n"
        "server._import(())\n"
        "print('forks', flush=True)\n"
        "opened.append(open('nvidia-uvm', 'w'))\n"
        "server._import(())"
    )
    done = run_python("-c", script, env=environment(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "forks\n") and "has started CUDA" in done.stderr, done.stderr


RUNS = "open('ran', 'w')"


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "PYTHONPATH"])
def test_a_server_of_other_variables_that_imports_read_forks_nothing(request_program, monkeypatch, variable):
    assert request_program(RUNS)
    wait_until(Path("ran").exists, "the program runs")
    monkeypatch.setenv(variable, "default")
    assert not request_program(RUNS)


@pytest.mark.parametrize("hangs", [False, True])
def test_where_the_server_has_ended_or_hangs_ray_sets_its_worker_up(tmp_path, monkeypatch, hangs):
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setattr(worker, "_ANSWER_S", 0.5)
    monkeypatch.setenv(SOCKET, str(tmp_path / "socket"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        if hangs:
            listening.listen()
        worker.main(["-u", "workers/default_worker.py", "--language=PYTHON"])
    assert [command[1] for command in commands] == ["workers/setup_worker.py"]


def test_of_raylets_that_have_ended_the_server_keeps_no_process(request_program, monkeypatch):
    fork_server()  # which stays, so that what is new below is of the raylet
    before = family(os.getpid())
    with subprocess.Popen(["sleep", "600"]) as raylet:
        monkeypatch.setenv("RAY_RAYLET_PID", str(raylet.pid))
        assert request_program(RUNS)
        raylet.kill()
    of_it = [pid for pid, title in family(os.getpid()).items() - before.items() if "server.py" in title]
    assert of_it
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    assert request_program(RUNS)
    assert_all_gone(of_it)
