"""A process that has imported what Ray's workers use, and forks one for each that a raylet starts.

A worker is Ray's own program in a process of its own, as ever; only its imports, up to five seconds of a core, are done
once, and while Ray's own processes start. ``worker.py`` asks for it in place of what Ray would start, and starts that
itself where the server does not answer.

Ray's core reads the numbers of the job and of the raylet from the environment when it is imported. So for each of these
the server forks a process that imports Ray, and that one forks the workers.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TypedDict

#: The variable that names the socket of a server that runs already, for one command after another.
SOCKET = "GSTEP_FORK_SERVER"
_WITHOUT_RAY = (
    "av",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
    "gstep.language.model",
    "gstep.pruners.gstep",
    "pipeline.cache.writer",
    "pipeline.video.decode",
    "transformers.models.llava_onevision.modeling_llava_onevision",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.siglip.modeling_siglip",
)
_WITH_RAY = (
    "ray",
    "ray.autoscaler.sdk",
    "ray.data",
    "pipeline.generate.answerer",
    "pipeline.prune.decode_stage",
    "pipeline.prune.encode_stage",
    "pipeline.prune.write_stage",
)
# Libraries choose their threads when they load. Ray's own choice for its workers comes later, and is one.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Beginnings of the variables that libraries read when they load: with others a worker starts by itself.
_READ_BY_IMPORTS = (
    *("ATEN_", "CUDA_", "HF_", "HUGGINGFACE_", "LD_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONPATH"),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_"),
)
# What CUDA opens when it starts, and NVML, which only counts GPUs, does not.
_OPENED_BY_CUDA = "nvidia-uvm"
_HARMLESS_THREADS = {"jemalloc_bg_thd"}  # that of Arrow's allocator knows of forks
_REQUEST_BYTES = 2**20


class WorkerRequest(TypedDict):
    """The program, environment and folder that a worker would have been started with.

    Its output goes to descriptors that come along.
    """

    python: str
    program: list[str]
    environment: dict[str, str]
    folder: str
    oom_score: str


@contextmanager
def forking_workers() -> Iterator[None]:
    """Let a Ray that starts in this context ask a server for its workers; where none is named, start one.

    Raylets run ``worker.py`` in place of Ray's program that sets a worker up, which imports Ray to no use here. Where
    no server can be started, for lack of a place for its socket say, Ray starts workers as ever.
    """
    from ray._private import ray_constants  # noqa: PLC0415 - the server itself runs without Ray

    named, kept = os.environ.get(SOCKET), vars(ray_constants).get("SETUP_WORKER_FILENAME")
    try:
        os.environ[SOCKET] = named or start_server()
    except OSError:
        yield
        return
    try:
        vars(ray_constants)["SETUP_WORKER_FILENAME"] = str(Path(__file__).with_name("worker.py"))
        yield
    finally:
        vars(ray_constants)["SETUP_WORKER_FILENAME"] = kept
        if named is None:
            del os.environ[SOCKET]


@cache
def start_server() -> str:
    """Start a server as a child of this process, which it ends with; return its socket. Raises OSError.

    It ends by itself too where this process is killed, and the workers end with their raylet, as ever.
    """
    folder = tempfile.mkdtemp(prefix="workers-", dir="/tmp")  # a socket's path has at most 107 bytes
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{folder}/socket")
    listening.listen(64)
    process = subprocess.Popen(
        [sys.executable, __file__, str(listening.fileno()), json.dumps(sys.path)],
        env=_ONE_THREAD | os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listening.fileno()],
        start_new_session=True,  # Ctrl-C is the driver's
    )
    listening.close()

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return f"{folder}/socket"


def serve(listening: socket.socket, path: list[str]) -> None:
    """Hand each request to the process of its job and raylet; return in a worker that has ended, and at the end.

    Args:
        path: the driver's ``sys.path``, so that the same packages are imported.
    """
    own_path, own_variables = sys.path[1:], _read_by_imports(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that what asks for a GPU while it loads does not start CUDA
    sys.path[:] = path
    _import(_WITHOUT_RAY)
    sys.path[:] = own_path
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    forkers: dict[tuple[str, ...], socket.socket] = {}
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asked, _ = listening.accept()
        with asked, suppress(OSError, ValueError):  # who gets no answer starts by itself
            _, descriptors, *_ = socket.recv_fds(asked, 1, 2)
            with asked.makefile() as lines:
                line = lines.readline()
            request: WorkerRequest = json.loads(line)
            environment = request["environment"]
            numbers = tuple(environment.get(name, "") for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"))
            fits = request["python"] == sys.executable and _read_by_imports(environment) == own_variables
            for ended in [of for of in forkers if not Path("/proc", of[1]).exists()]:
                forkers.pop(ended).close()  # which ends it
            if fits and numbers not in forkers:
                forkers[numbers], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for ours in (listening, asked, *forkers.values()):
                        ours.close()
                    return _fork_workers(theirs, environment, path)
                theirs.close()
            if fits:
                socket.send_fds(forkers[numbers], [line.encode()], [asked.fileno(), *descriptors])
            for descriptor in descriptors:
                os.close(descriptor)


def _fork_workers(requests: socket.socket, environment: dict[str, str], path: list[str]) -> None:
    """Import Ray in an environment that names a job and a raylet, then fork a worker for each request."""
    _take(environment)
    own_path, sys.path[:] = sys.path[:], path
    import_ray()
    sys.path[:] = own_path
    while True:
        line, descriptors, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not line:
            os._exit(0)
        asked, *output = descriptors
        if os.fork() == 0:
            requests.close()
            return _become_worker(asked, output, json.loads(line))
        for descriptor in (asked, *output):
            os.close(descriptor)


def _become_worker(asked: int, output: list[int], request: WorkerRequest) -> None:
    """Run the program of a worker as if this process had been started for it, after an answer to who asked."""
    atexit.register(os._exit, 0)  # last, before Python takes apart all modules: that copies what is shared of them
    os.setpgid(0, 0)  # as Ray's own workers: a raylet kills the group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *output), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    _take(request["environment"])
    os.chdir(request["folder"])
    Path("/proc/self/oom_score_adj").write_text(request["oom_score"], encoding="ascii")
    os.write(asked, b"1")
    os.close(asked)
    import_module("pipeline.video.fork_server").stand_by()  # if this becomes a decoder
    program, *arguments = request["program"]
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def import_ray() -> None:
    """Import what workers use of Ray without drawing an id: each fork would inherit the state of Ray's random numbers.

    Ray seeds them at the first draw, which is the id of a class of actors. Workers that draw alike meet in the object
    store: two that warmed it up at once, with an object of one id, aborted, and Ray waited a minute for them.
    """
    import ray.actor  # noqa: PLC0415 - the server itself runs without Ray

    class_id = ray.actor.ActorClassID
    vars(ray.actor)["ActorClassID"] = SimpleNamespace(from_random=lambda: class_id(os.urandom(class_id.size())))
    _import(_WITH_RAY)
    vars(ray.actor)["ActorClassID"] = class_id


def _import(modules: Iterable[str]) -> None:
    """Import the modules. End this process where that has started threads or CUDA, of which a fork can use neither."""
    from gstep.lazy import pause_garbage_collector  # noqa: PLC0415 - found by the driver's path only

    with pause_garbage_collector():
        for module in modules:
            import_module(module)
    tasks = Path("/proc/self/task")
    names = {(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())}
    if not names <= _HARMLESS_THREADS:
        raise SystemExit(f"a fork would lose threads: {', '.join(sorted(names))}")
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one by which the folder is read is closed by now
            if descriptor.readlink().name == _OPENED_BY_CUDA:
                raise SystemExit("a fork could not use the GPU: an import has started CUDA")


def _take(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they load."""
    return {name: value for name, value in {**_ONE_THREAD, **environment}.items() if name.startswith(_READ_BY_IMPORTS)}


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
