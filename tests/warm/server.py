"""A process that has imported what Ray's workers use, and forks one for each that a raylet asks for.

A worker is Ray's own program in a process of its own, as ever; only its imports, five seconds of a core for one with a
model, are done once. ``tests/warm/worker.py`` asks for it in place of what Ray would start.

Ray's core reads the numbers of the job and of the raylet from the environment when it is imported. So for each of these
the server forks a process that imports Ray, and that one forks the workers.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import TypedDict

from tests.paths import ROOT

_DECODING = ("numpy", "torch", "av", "pipeline.video.decode")
_WITHOUT_RAY = (
    *_DECODING,
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "gstep.language.model",
    "gstep.pruners.gstep",
    "pipeline.cache.writer",
    "transformers.models.llava_onevision.modeling_llava_onevision",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.siglip.modeling_siglip",
)
_WITH_RAY = (
    "ray._private.workers.default_worker",
    "ray.autoscaler.sdk",
    "ray.data._internal.execution.operators.actor_pool_map_operator",
    "pipeline.generate.answer_stage",
    "pipeline.prune.decode_stage",
    "pipeline.prune.encode_stage",
    "pipeline.prune.write_stage",
)


class Request(TypedDict):
    """What a process would have been started with; its output goes to descriptors that come along."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str


@cache
def warm_workers() -> str:
    """Start a server as a child of this process, which it ends with; return its socket, the same for all clusters."""
    folder = tempfile.mkdtemp(prefix="warm-", dir="/tmp")
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{folder}/socket")
    server.listen(64)
    command = [sys.executable, "-m", __name__, str(server.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[server.fileno()])
    server.close()

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder)

    atexit.register(end)
    return f"{folder}/socket"


def serve(listening: socket.socket) -> None:
    """Hand each request to the process of its job and raylet; returns in a worker that has ended, and at the end."""
    _import(_WITHOUT_RAY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    helpers: dict[tuple[str, ...], socket.socket] = {}
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asked, _ = listening.accept()
        with asked:
            _, descriptors, *_ = socket.recv_fds(asked, 1, 2)
            with asked.makefile() as lines:
                line = lines.readline()
            environment = json.loads(line)["environment"]
            numbers = tuple(environment.get(name, "") for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"))
            if numbers not in helpers:
                helpers[numbers], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    listening.close()
                    for ours in helpers.values():
                        ours.close()
                    return _fork_workers(theirs, environment)
                theirs.close()
            socket.send_fds(helpers[numbers], [line.encode()], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_workers(requests: socket.socket, environment: dict[str, str]) -> None:
    """Import Ray in an environment that names a job and a raylet, then fork a worker for each request."""
    _take(environment)
    _import(_WITH_RAY)
    forkserver.set_forkserver_preload(list(_DECODING))
    forkserver.ensure_running()
    while True:
        line, descriptors, *_ = socket.recv_fds(requests, 2**20, 2)
        if not line:
            return
        if os.fork() == 0:
            requests.close()
            return _become_worker(descriptors, json.loads(line))
        for descriptor in descriptors:
            os.close(descriptor)


def _become_worker(descriptors: list[int], request: Request) -> None:
    """Run Ray's program of a worker as if this process had been started for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *descriptors), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # Decoders use the fork server that runs already; only its parent can ask the system whether it does.
    forkserver._forkserver.ensure_running = lambda: None
    _take(request["environment"])
    os.chdir(request["folder"])
    spec = find_spec("ray._private.workers.default_worker")
    assert spec is not None and spec.origin is not None
    sys.argv, sys.path[0] = [spec.origin, *request["arguments"]], str(Path(spec.origin).parent)
    runpy.run_path(spec.origin, run_name="__main__")


def _import(modules: Iterable[str]) -> None:
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()
    gc.enable()
    threads = {(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()}
    # That of Arrow's allocator knows of forks.
    assert threads <= {"python", "jemalloc_bg_thd"}, f"a fork would lose threads: {threads}"


def _take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
