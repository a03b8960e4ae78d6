"""The driver's Ray cluster: how it is joined or started, its resources, and how its errors are described."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
import torch

from gstep.backbones import choose_runtime
from gstep.lazy import pause_garbage_collector, repeat_line
from pipeline.errors import RunFailed, UsageError, convert_usage_errors, make_printable
from pipeline.options import RunOptions
from pipeline.rows import Json
from pipeline.runner.cluster.address import (
    check_answers,
    describe_startup_failure,
    find_address,
    make_package_importable,
    set_cluster_token,
)
from pipeline.runner.cluster.nodes import read_fraction_of_cpu
from pipeline.runner.cluster.prefork.server import fork_workers_from_server
from pipeline.runner.cluster.session_folder import lock_session, make_ray_folder
from pipeline.runner.stages import OOM_RETRIES, configure_ray_data
from pipeline.runner.worker_reports import NodeTally

_LOOK_S = 1.0
# A start that fails after this long has waited for a process of Ray in vain, as on a busy machine, and is tried again.
# Faults of the machine itself show earlier.
SLOW_START_S = 20.0
# A forked process can use a GPU if its parent never did. The fork server ensures that.
FORKS_ON_GPU_NODES = True
_connecting = threading.Lock()
# Log lines of Ray's Python code that no user can do anything about.
_KNOWN_LINES = ("_StatsActor", "SIGTERM handler is not set")
NODE_LABEL = "ray.io/node-id"  # a label that Ray itself sets on every node
_NO_GPU = (
    "the cluster has no GPU now. The model runs on CPUs in {}, and later runs keep that dtype. --min-gpus waits for "
    "GPUs that still join; --device cuda refuses to start without one"
)


def connect(say: Callable[[str], object] = lambda line: None) -> dict[str, float]:
    """Join the cluster that RAY_ADDRESS or a running head names, or start Ray here; return the total resources.

    A process that has joined stays joined. Ray Data is configured for runs. Threads may call this concurrently.

    Args:
        say: gets a line before and after joining, which may take half a minute.

    Raises:
        RunFailed: Ray cannot be joined or started.
    """
    with _connecting:
        if not ray.is_initialized():
            _join_or_start(say)
    configure_ray_data()
    return dict(ray.cluster_resources())


def _join_or_start(say: Callable[[str], object]) -> None:
    """Join the cluster that ``find_address`` returns, or start Ray here if it returns None.

    This sets Ray's variables in this process's environment, filters its log lines, keeps this process's SIGTERM
    handler, and registers an exit handler that shuts Ray down. A session that is started is locked against deletion. A
    start that fails after SLOW_START_S or later is tried once more.

    Raises:
        RunFailed: Ray cannot be joined or started.
        KeyboardInterrupt: the wait was interrupted; Ray is shut down.
    """
    # Ray's C++ core reports harmless events as errors on this terminal. Its log files contain everything.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # By default, Ray forever retries a task that it killed because the node was low on memory.
    os.environ.setdefault("RAY_task_oom_retries", str(OOM_RETRIES))
    address = find_address()
    if address is None:
        say("starting Ray on this machine")
        set_cluster_token()
    else:
        say(f"joining the Ray cluster at {address}")
        with explain_native_exit(address), _mute_stderr():
            check_answers(address)
    logging.getLogger("ray._private.worker").addFilter(is_worth_showing)
    for last in (False, True):
        began = time.monotonic()
        try:
            with explain_native_exit(address):
                _run_ray_init(say, _make_start_options(say) if address is None else {})
            break
        except Exception as error:  # Ray raises plain exceptions if one of its processes does not start
            took_s = time.monotonic() - began
            if last or address is not None or took_s < SLOW_START_S:
                raise RunFailed(describe_startup_failure(error, address)) from error
            say(f"note: Ray did not start in {took_s:.0f} s; trying once more")
    if address is None:
        lock_session(ray._private.worker._global_node.get_session_dir_path())
    # Only Python handles SIGTERM: the handler of Ray's core prints a stack, and aborts the process after 3 s.
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, handler)
    say(_describe_cluster())
    atexit.unregister(_shut_down)  # so that it runs once, however often this process connects
    atexit.register(_shut_down)


def _make_start_options(say: Callable[[str], object]) -> dict[str, Any]:
    """Create the folder for Ray, and return the options of ``ray.init()``: it, and one CPU if Ray would count none."""
    options: dict[str, Any] = {"_temp_dir": str(make_ray_folder())}
    if fraction := read_fraction_of_cpu():
        say(f"note: this container may use {fraction:g} CPUs, which Ray would count as none. They count as one CPU")
        options["num_cpus"] = 1
    return options


def _run_ray_init(say: Callable[[str], object], start_options: Mapping[str, Any]) -> None:
    """Call ``ray.init()``, which starts Ray with ``start_options``, or joins a cluster if they are empty.

    It runs in its own thread, which never ends, since the kernel kills Ray's processes with the thread that started
    them. Ray Data is imported meanwhile, stderr is muted, and ``say`` gets lines during a long wait. Errors of both are
    raised.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM interrupted the wait. Ray is shut down first.
    """
    start_result, import_result = Future[None](), Future[None]()
    forks = bool(start_options) and sys.platform == "linux" and (FORKS_ON_GPU_NODES or not torch.cuda.device_count())
    # Prestarted workers belong to no job, so the server would import Ray for them alone.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

    def initialise() -> None:
        """Call ``ray.init()``, pass its result or error on, and stay: Ray's processes end with this thread."""
        try:
            options = {"include_dashboard": False, "job_config": job, **start_options}
            with keep_ray_private(), fork_workers_from_server() if forks else nullcontext():
                ray.init(logging_level="warning", log_to_driver=False, **options)
        except BaseException as error:  # noqa: BLE001 - it is the main thread's
            start_result.set_exception(error)
        else:
            start_result.set_result(None)
        threading.Event().wait()

    def import_ray_data() -> None:  # in a thread, as an interrupted import may keep its lock forever
        """Import Ray Data while Ray starts, and pass an error on."""
        try:
            with pause_garbage_collector():
                import_module("ray.data")
        except BaseException as error:  # noqa: BLE001 - it is the main thread's
            import_result.set_exception(error)
        else:
            import_result.set_result(None)

    starter = threading.Thread(target=initialise, name="ray-init", daemon=True)
    try:
        with _mute_stderr(), make_package_importable() as job:
            starter.start()
            # Importing takes a core a second, while Ray's processes start.
            threading.Thread(target=import_ray_data, name="import-ray-data", daemon=True).start()
            with repeat_line(say, "Ray's processes are still starting"):
                start_result.result()
                import_result.result()
        return
    except KeyboardInterrupt:
        pass
    say("interrupted while Ray starts. Ray is shut down first. Rerun the same command to resume")
    if starter.ident is not None:
        with _mute_stderr():
            wait([start_result])
            ray.shutdown()
    raise KeyboardInterrupt


def is_worth_showing(record: logging.LogRecord) -> bool:
    """Return True if a log line of Ray should be shown; known harmless lines go to a file among Ray's logs."""
    message = record.getMessage()
    if not any(line in message for line in _KNOWN_LINES):
        return True
    with suppress(AttributeError, OSError):  # Ray has no log folder yet, or its disk is full
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        with (folder / f"driver-{os.getpid()}.log").open("a", encoding="utf-8") as log:
            log.write(f"{record.levelname} {message}\n")
    return False


def _shut_down() -> None:
    """Shut Ray down before Ray's own exit handler runs, which waits half a second to flush output."""
    ray.shutdown()


@contextmanager
def keep_ray_private() -> Iterator[None]:
    """Make a Ray that starts in this context private to this process: few processes, in their own sessions.

    The monitor, which adds nodes, and the dashboard are left out, since starting and stopping Ray would wait for them.
    SIGTERM to the group of this process does not reach Ray, so that finished work can still be written. Leaving the
    context undoes the changes to Ray's modules.
    """
    from ray._private import node, parameter, utils  # noqa: PLC0415 - loaded by now

    end_with_parent = utils.set_kill_on_parent_death_linux

    def start_session() -> None:
        """Let the kernel end this process with its parent, as Ray does, and start a session. Runs in the child."""
        end_with_parent()
        os.setsid()

    not_needed = ImportError("no dashboard is needed")
    changes: list[tuple[object, str, object]] = [
        (parameter, "RayParams", partial(parameter.RayParams, no_monitor=True)),
        (node.Node, "start_api_server", lambda *_, **__: None),
        (utils, "get_dashboard_dependency_error", lambda: not_needed),
        (utils, "set_kill_on_parent_death_linux", start_session),
    ]
    originals = [getattr(owner, name) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(changes, originals, strict=True):
            setattr(owner, name, value)


def wait_for_gpus(n_gpus: int, wait_s: float, say: Callable[[str], object]) -> dict[str, float]:
    """Return the joined cluster's resources once it has ``n_gpus`` GPUs.

    If it has fewer, ``say`` gets a line, and an autoscaler is asked for the GPUs until the wait ends.

    Raises:
        UsageError: the GPUs have not joined after ``wait_s`` seconds.
    """
    cluster = dict(ray.cluster_resources())
    deadline = time.monotonic() + wait_s
    if cluster.get("GPU", 0.0) >= n_gpus:
        return cluster
    from ray.autoscaler.sdk import request_resources  # noqa: PLC0415 - seldom needed, and slow to import

    say(f"note: the cluster has {cluster.get('GPU', 0.0):g} GPUs; waiting {wait_s:g} s for {n_gpus}")
    request_resources(bundles=[{"GPU": 1}] * n_gpus)
    try:
        while cluster.get("GPU", 0.0) < n_gpus:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--min-gpus {n_gpus}: the cluster has {cluster.get('GPU', 0.0):g} GPUs after {wait_s:g} s: look "
                    "at its nodes, or raise --stall-timeout"
                )
            time.sleep(_LOOK_S)
            cluster = dict(ray.cluster_resources())
    finally:
        request_resources(bundles=[])  # from now on, the workers' demand keeps the nodes
    return cluster


@contextmanager
def _mute_stderr() -> Iterator[None]:
    """Discard what any thread writes to file descriptor 2 inside the context. Ray's own lines are in its log files."""
    sys.stderr.flush()
    descriptor = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - no file of ours
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)


@contextmanager
def explain_native_exit(address: str | None) -> Iterator[None]:
    """Print an error with advice if Ray's native code ends this process inside the context, without a message.

    It does so if a raylet does not answer for half a minute. A shell, which outlives this process, prints the error;
    without a shell nothing is printed.
    """
    message = f"error: {describe_startup_failure(None, address)}"
    command = ["sh", "-c", 'read -r _ || printf "%s\\n" "$0" >&2', message]
    try:
        shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C does not end it
    except OSError:  # an image without a shell
        yield
        return
    try:
        yield
    finally:
        shell.communicate(b"joined, or failed with words\n")


def _describe_cluster() -> str:
    """Return one line with the joined cluster's address, CPUs, GPUs and number of nodes."""
    resources = ray.cluster_resources()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    address = f"Ray at {ray.get_runtime_context().gcs_address}"
    where = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{address}: {resources.get('CPU', 0.0):g} CPUs and {resources.get('GPU', 0.0):g} GPUs on {where}"


def choose_device(options: RunOptions, dtype: str, say: Callable[[str], object]) -> tuple[str, str]:
    """Join or start the cluster, wait for ``--min-gpus``, and return the (device, dtype) to compute with.

    The wait lasts at most ``--stall-timeout`` seconds. The device is "cuda" or "cpu". If ``--device auto`` finds no
    GPU, the user is told.

    Args:
        dtype: the dtype of the flags or of earlier rows; "auto" means bfloat16 on a GPU and float32 on CPUs.

    Raises:
        UsageError: the cluster lacks the GPUs of the flags or has no CPU, or a CPU cannot run this dtype or attention.
        RunFailed: no cluster can be joined or started.
    """
    connect(say)
    cluster = wait_for_gpus(options.min_gpus, options.stall_timeout, say)
    device = options.device
    if cluster.get("CPU", 0.0) <= 0:
        raise UsageError(
            "the Ray cluster has no CPUs at this moment: start its worker nodes first. Ray counts none on a node whose "
            "container may use less than one CPU: give it one, or start the node by ray start --num-cpus=1"
        )
    gpus = cluster.get("GPU", 0.0)
    if device == "cuda" and gpus < 1:
        raise UsageError("--device cuda: the Ray cluster has no GPU")
    on_cpu = device == "auto" and gpus < 1
    device = "cuda" if device != "cpu" and gpus >= 1 else "cpu"
    dtype = dtype if dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    if on_cpu:
        say(f"note: {_NO_GPU.format(dtype)}")
    if device == "cpu":  # only a GPU node knows what its GPU can run
        with convert_usage_errors():
            choose_runtime(device, dtype, options.attn)
    return device, dtype


def can_have_gpus() -> bool:
    """Return True if this machine has a GPU, or the run joins a cluster, with or without GPUs. Ray is not started.

    Raises:
        RunFailed: the address of the cluster cannot be used.
    """
    return _will_join_cluster() or torch.cuda.device_count() > 0


def _will_join_cluster() -> bool:
    """Return True if this process has joined a cluster or would join a running one.

    Raises:
        RunFailed: the address of the cluster cannot be used.
    """
    return ray.is_initialized() or find_address() is not None


def check_device(options: RunOptions, say: Callable[[str], object]) -> None:
    """Raise UsageError if ``--device cuda`` finds no GPU, for a run that has nothing left to compute.

    A running cluster is joined and checked by ``choose_device``, but Ray is not started.
    """
    if options.device == "cuda" and _will_join_cluster():
        choose_device(options, "auto", say)
    elif options.device == "cuda" and not torch.cuda.device_count():
        raise UsageError("--device cuda: this machine has no GPU, and no Ray cluster is named or runs here")


def collect_provenance(run_id: str, packages: Sequence[str] = ("gstep-cache", "pyarrow")) -> dict[str, Json]:
    """Return the facts about this process for a run's record: host, process id, Python, versions of packages.

    The version of a package that is not installed is None. The default packages are those of runs without models.
    """
    return {
        "run_id": run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": {name: find_package_version(name) for name in packages},
    }


def find_package_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_cause(error: BaseException) -> str:
    """Return one line that describes an error: its class and message, for a failed Ray task those of its cause.

    Other errors of Ray are described by the last line of their text, and OutOfDiskError by a text of this project.
    """
    if is_out_of_disk(error):  # Ray's own text contains raw bytes
        return "OutOfDiskError: the object store of a node is full, and the disk that it spills to"
    if isinstance(error, ray.exceptions.RayTaskError):
        return make_printable(f"{type(error.cause).__name__}: {error.cause}")
    if isinstance(error, ray.exceptions.RayError):
        return make_printable(str(error).strip().splitlines()[-1])
    return make_printable(f"{type(error).__name__}: {error}")


def is_out_of_disk(error: BaseException) -> bool:
    """Return True if the error, or its cause in a Ray task, is Ray's OutOfDiskError."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return isinstance(cause, ray.exceptions.OutOfDiskError)


def find_failing_nodes(tallies: Mapping[str, Mapping[str, NodeTally]]) -> dict[str, str]:
    """Return the nodes on which a stage fails more often than on average over all nodes, node id -> host.

    Args:
        tallies: stage -> node id -> the counts of its items.
    """
    hosts: dict[str, str] = {}
    for nodes in tallies.values():
        n_failed = sum(node.n_failed for node in nodes.values())
        n_all = n_failed + sum(node.n_ok for node in nodes.values())
        for name, node in nodes.items():
            if node.n_failed * n_all > n_failed * (node.n_failed + node.n_ok):
                hosts[name] = node.host
    return hosts


def sum_resources(nodes: Collection[str], max_gpus: int | None = None) -> dict[str, float]:
    """Return the total resources of the living nodes that are not in ``nodes``, with at most ``max_gpus`` GPUs."""
    total: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in nodes:
            total.update(node["Resources"])
    return cap_gpus(dict(total), max_gpus)


def cap_gpus(resources: dict[str, float], max_gpus: int | None) -> dict[str, float]:
    """Return the resources with at most ``max_gpus`` GPUs; None sets no limit."""
    gpus = resources.get("GPU", 0.0)
    return resources if max_gpus is None or gpus <= max_gpus else {**resources, "GPU": float(max_gpus)}


def make_node_selector(nodes: Collection[str]) -> dict[str, str]:
    """Return the Ray label selector that keeps workers off these nodes; {} without nodes."""
    return {NODE_LABEL: f"!in({','.join(sorted(nodes))})"} if nodes else {}
