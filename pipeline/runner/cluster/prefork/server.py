"""The fork server: a process that has imported the modules of Ray's workers, and forks a worker on request of a raylet.

A worker still runs Ray's own program in its own process, but saves up to five seconds of imports. Raylets run
``worker.py``, which requests a forked worker, and becomes Ray's own worker if the server does not answer. The server
forks a process for each job and raylet, since Ray reads their ids from the environment when it is imported; that
process imports Ray and forks the workers.
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
from typing import NamedTuple

#: The variable that names the socket of a running server, so that several commands can share a server.
SOCKET = "GSTEP_FORK_SERVER"
_WITHOUT_RAY = (
    "av",
    "pandas",
    "rich.console",
    "pyarrow.dataset",
    "pyarrow.json",
    "pyarrow.parquet",
    "gstep.backbones.llava_onevision",
    "gstep.language.llava_onevision",
    "gstep.language.model",
    "gstep.pruners.gstep",
    "pipeline.cache.writer",
    "pipeline.video.decode",
    "transformers.models.llava_onevision.modeling_llava_onevision",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.siglip.modeling_siglip",
)
# Modules that Ray and Ray Data also import: each job's process would otherwise import them again.
_BEFORE_RAY = (
    "click",
    "google.protobuf.descriptor_pb2",
    "google.protobuf.internal.builder",
    "google.protobuf.json_format",
    "jsonschema",
    "prometheus_client",
    "pydantic",
    "pydantic.v1",
    "requests",
)
_WITH_RAY = (
    "ray",
    "ray.autoscaler.sdk",
    "ray.data",
    "pipeline.generate.answerer",
    "pipeline.prune.decode_stage",
    "pipeline.prune.encode_stage",
    "pipeline.generate.engines.transformers",
    "pipeline.prune.write_stage",
)
# Each worker would otherwise import these itself, which takes as long as the rest of its start. Other versions of Ray
# may lack some of them.
_OF_RAY = (
    "ray._common.pydantic_compat",
    "ray._private.arrow_serialization",
    "ray.data._internal.issue_detection",
    "ray.data._internal.execution.node_trackers.actor_location",
    "ray.data._internal.execution.operators.actor_pool_map_operator",
    "ray.data._internal.execution.operators.hash_shuffle",
    "ray.data._internal.planner.plan_udf_map_op",
    "ray.util.state",
)
# Libraries choose their number of threads when they load, before Ray sets one thread for its workers.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Prefixes of the variables that libraries read when they load. A worker with other values starts without the server.
_READ_BY_IMPORTS = (
    *("ATEN_", "CUDA_", "HF_", "HUGGINGFACE_", "LD_", "MKL_", "NPY_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONPATH"),
    *("PYTORCH_", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_"),
)
# CUDA opens this device when it starts; NVML, which only counts GPUs, does not.
_OPENED_BY_CUDA = "nvidia-uvm"
_HARMLESS_THREADS = {"jemalloc_bg_thd"}  # the thread of Arrow's allocator survives forks
_REQUEST_BYTES = 2**20


class WorkerRequest(NamedTuple):
    """A request for a forked worker: its Python, folder, OOM score, program with arguments, and environment."""

    python: str
    folder: str
    oom_score: str
    program: list[str]
    environment: dict[str, str]

    @classmethod
    def parse(cls, message: bytes) -> WorkerRequest:
        """Parse the message that ``worker.request_worker`` sends.

        Raises:
            ValueError: the message is malformed.
        """
        python, folder, oom_score, n_arguments, *rest = os.fsdecode(message).split("\0")
        variables = (variable.partition("=") for variable in rest[int(n_arguments) :])
        environment = {name: value for name, _, value in variables}
        return cls(python, folder, oom_score, rest[: int(n_arguments)], environment)


@contextmanager
def fork_workers_from_server() -> Iterator[None]:
    """Let a Ray that starts in this context fork its workers from a server.

    The server is the one that SOCKET names, otherwise one that this process starts and keeps for later contexts. If
    none can be started (OSError), Ray starts its workers as usual. On exit, Ray's constant and SOCKET are restored.
    """
    from ray._private import ray_constants  # noqa: PLC0415 - the server itself runs without Ray

    server_socket = os.environ.get(SOCKET)
    setup_file = vars(ray_constants).get("SETUP_WORKER_FILENAME")
    try:
        os.environ[SOCKET] = server_socket or start_server()
    except OSError:
        yield
        return
    try:
        vars(ray_constants)["SETUP_WORKER_FILENAME"] = str(Path(__file__).with_name("worker.py"))
        yield
    finally:
        vars(ray_constants)["SETUP_WORKER_FILENAME"] = setup_file
        if server_socket is None:
            del os.environ[SOCKET]


@cache
def start_server() -> str:
    """Return the socket path of this process's fork server, which the first call starts as a child process.

    The server ends with this process, even if this process is killed. Workers end with their raylet, as usual.

    Raises:
        OSError: the folder of the socket or the process cannot be created.
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
        start_new_session=True,  # Ctrl-C must reach the driver only
    )
    listening.close()

    def end() -> None:
        """Kill the server and delete the folder of its socket."""
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return f"{folder}/socket"


def serve(listening: socket.socket, path: list[str]) -> None:
    """Pass each request to the process of its job and raylet, until stdin closes; also return in each forked worker.

    A request from another Python, or with other variables that imports read, gets no answer.

    Args:
        path: the driver's ``sys.path``, so that the same packages are imported.
    """
    server_path = sys.path[1:]
    server_variables = _select_import_variables(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # lets imports look for a GPU without starting CUDA
    sys.path[:] = path
    _import(_WITHOUT_RAY, optional=_BEFORE_RAY)
    sys.path[:] = server_path
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    forkers: dict[tuple[str, ...], socket.socket] = {}
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        connection, _ = listening.accept()
        with connection, suppress(OSError, ValueError):  # without an answer worker.py starts Ray's own worker
            _, descriptors, *_ = socket.recv_fds(connection, 1, 2)
            with connection.makefile("rb") as stream:
                message = stream.read()
            request = WorkerRequest.parse(message)
            environment = request.environment
            numbers = tuple(environment.get(name, "") for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"))
            fits = request.python == sys.executable and _select_import_variables(environment) == server_variables
            for ended_numbers in [of for of in forkers if not Path("/proc", of[1]).exists()]:
                forkers.pop(ended_numbers).close()  # ends the forker
            if fits and numbers not in forkers:
                forkers[numbers], forker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                if os.fork() == 0:
                    for descriptor_owner in (listening, connection, *forkers.values()):
                        descriptor_owner.close()
                    return _fork_workers(forker_socket, environment, path)
                forker_socket.close()
            if fits:
                socket.send_fds(forkers[numbers], [message], [connection.fileno(), *descriptors])
            for descriptor in descriptors:
                os.close(descriptor)


def _fork_workers(requests: socket.socket, environment: dict[str, str], path: list[str]) -> None:
    """Import Ray in an environment that names a job and a raylet, then fork a worker for each request.

    The process ends when ``requests`` closes. The function returns only in a forked worker, after its program.
    """
    _set_environment(environment)
    server_path, sys.path[:] = sys.path[:], path
    import_ray()
    sys.path[:] = server_path
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        if not message:
            os._exit(0)
        answer, *output = descriptors
        if os.fork() == 0:
            requests.close()
            return _become_worker(answer, output, WorkerRequest.parse(message))
        for descriptor in (answer, *output):
            os.close(descriptor)


def _become_worker(answer: int, output: list[int], request: WorkerRequest) -> None:
    """Turn this forked process into the requested worker, and return if the worker's program ends without an exit.

    This takes over the request's environment, folder and output, and writes b"1" to ``answer`` before the program runs
    as ``__main__``. The exit code is 0 even if the program fails. Exit handlers of imported modules do not run.

    Args:
        answer: the descriptor on which the requesting process waits; it is closed.
        output: the descriptors for stdout and stderr, which are duplicated and closed.
    """
    # Runs after the program's own exit handlers. Python would then tear down all modules, which copies shared memory.
    # Nobody reads the exit code: the parent ignores SIGCHLD. Python has flushed stdout before exit handlers run.
    atexit.register(os._exit, 0)
    os.setpgid(0, 0)  # as in Ray's own workers: a raylet kills the process group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, descriptor in zip((0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *output), strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    _set_environment(request.environment)
    os.chdir(request.folder)
    Path("/proc/self/oom_score_adj").write_text(request.oom_score, encoding="ascii")
    os.write(answer, b"1")
    os.close(answer)
    import_module("pipeline.video.fork_server").fork_standby()  # in case this worker becomes a decoder
    program, *arguments = request.program
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")


@contextmanager
def leave_ray_rng_unseeded() -> Iterator[None]:
    """Keep Ray's generator of random ids unseeded inside the context, in which classes of actors may be defined.

    The id of such a class would seed it, and forks with the same state would draw the same ids.
    """
    import ray.actor  # noqa: PLC0415 - the server itself runs without Ray

    class_id = ray.actor.ActorClassID
    vars(ray.actor)["ActorClassID"] = SimpleNamespace(from_random=lambda: class_id(os.urandom(class_id.size())))
    try:
        yield
    finally:
        vars(ray.actor)["ActorClassID"] = class_id


def import_ray() -> None:
    """Import the workers' Ray modules so that forks start fast, and still draw different random ids.

    Raises:
        SystemExit: the process then has threads or has started CUDA, so it cannot be forked.
    """
    with leave_ray_rng_unseeded():
        _import(_WITH_RAY, optional=_OF_RAY)


def _import(modules: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Import the modules, and those optional modules that exist, with the garbage collector paused.

    Raises:
        ImportError: one of ``modules`` is missing.
        SystemExit: this process then has threads or has started CUDA, which a fork could not use.
    """
    from gstep.lazy import pause_garbage_collector  # noqa: PLC0415 - found by the driver's path only

    with pause_garbage_collector():
        for module in modules:
            import_module(module)
        for module in optional:
            with suppress(ImportError):
                import_module(module)
    tasks = Path("/proc/self/task")
    names = {(task / "comm").read_text().strip() for task in tasks.iterdir() if task.name != str(os.getpid())}
    if not names <= _HARMLESS_THREADS:
        raise SystemExit(f"a fork would lose threads: {', '.join(sorted(names))}")
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this listing is closed already
            if descriptor.readlink().name == _OPENED_BY_CUDA:
                raise SystemExit("a fork could not use the GPU: an import has started CUDA")


def _set_environment(environment: dict[str, str]) -> None:
    """Replace this process's environment."""
    os.environ.clear()
    os.environ.update(environment)


def _select_import_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they load, including the defaults of _ONE_THREAD."""
    return {name: value for name, value in {**_ONE_THREAD, **environment}.items() if name.startswith(_READ_BY_IMPORTS)}


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
