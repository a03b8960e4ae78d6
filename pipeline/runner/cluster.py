"""The Ray cluster of a driver: joining or starting it, its nodes, its errors."""

from __future__ import annotations

import atexit
import logging
import os
import platform
import signal
import socket
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

import ray
import torch

from gstep.backbones import choose_runtime
from gstep.lazy import pause_garbage_collector, repeat_line
from pipeline.errors import RunFailed, UsageError, printable, usage_errors
from pipeline.options import RunOptions
from pipeline.rows import Json
from pipeline.runner.access import (
    address_to_join,
    check_answers,
    set_cluster_token,
    startup_failure,
    workers_import_this,
)
from pipeline.runner.heartbeats import NodeTally
from pipeline.runner.prefork.server import forking_workers
from pipeline.runner.stages import OOM_RETRIES, configure_ray_data

_LOOK_S = 1.0
# A start that fails later than this has waited for a process of Ray's in vain, as on a machine that is busy for a
# moment. What is wrong with the machine itself shows earlier.
SLOW_START_S = 20.0
# A process that was forked can use a GPU as long as the one it was forked from never did, which the server sees to.
FORKS_ON_GPU_NODES = True
_connecting = threading.Lock()
# Log lines of Ray's Python code that no user can do anything about.
_KNOWN_LINES = ("_StatsActor", "SIGTERM handler is not set")
NODE_LABEL = "ray.io/node-id"  # a label that Ray itself sets on every node
_NO_GPU = (
    "the cluster has no GPU now, so the model runs on CPUs, in {}, which what is written here stays with; if GPUs are "
    "still to join, --min-gpus waits for them, and --device cuda refuses to start without"
)


def connect(say: Callable[[str], object] = lambda line: None) -> dict[str, float]:
    """Return the resources of the cluster that RAY_ADDRESS or a running head names, else of one that is started here.

    Several threads may call it. It may take half a minute, so ``say`` gets a line before and after. Raises RunFailed.
    """
    with _connecting:
        if not ray.is_initialized():
            _join_or_start(say)
    configure_ray_data()
    return dict(ray.cluster_resources())


def _join_or_start(say: Callable[[str], object]) -> None:
    """Join the cluster found by ``address_to_join``, or start Ray here."""
    # Ray's C++ core reports harmless matters as errors on this terminal; its log files keep the rest.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # By default Ray retries a task for ever that it killed because the node was short of memory.
    os.environ.setdefault("RAY_task_oom_retries", str(OOM_RETRIES))
    address = address_to_join()
    if address is None:
        say("starting Ray on this machine")
        set_cluster_token()
    else:
        say(f"joining the Ray cluster at {address}")
        with _muted_stderr():
            check_answers(address)
    logging.getLogger("ray._private.worker").addFilter(is_worth_showing)
    for last in (False, True):
        began = time.monotonic()
        try:
            _initialise(say, starts=address is None)
            break
        except Exception as error:  # Ray raises plain exceptions if one of its processes does not start
            took_s = time.monotonic() - began
            if last or address is not None or took_s < SLOW_START_S:
                raise RunFailed(startup_failure(error, address)) from error
            say(f"note: Ray did not start in {took_s:.0f} s; trying once more")
    _take_back_sigterm()
    say(_connected_to())
    atexit.unregister(_shut_down)  # so that it runs once, however often this process connects
    atexit.register(_shut_down)


def _initialise(say: Callable[[str], object], *, starts: bool) -> None:
    """Call ``ray.init()``, which ``starts`` a cluster or joins one.

    Ctrl-C and SIGTERM interrupt the wait for it, and shut down what it started.

    It runs in a thread of its own: on the main one it would replace the handler of SIGTERM by one that ends the process
    on the spot, and an exception in the middle of it may leave a core that aborts at exit. The thread never ends, since
    the kernel kills Ray's processes with the thread that started them.
    """
    ended, imported = Future[None](), Future[None]()
    forks = starts and sys.platform == "linux" and (FORKS_ON_GPU_NODES or not torch.cuda.device_count())
    # Workers that are started ahead belong to no job, and the server would import Ray for them alone.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

    def initialise() -> None:
        try:
            with _without_monitor(), forking_workers() if forks else nullcontext():
                ray.init(logging_level="warning", log_to_driver=False, include_dashboard=False, job_config=job)
        except BaseException as error:  # noqa: BLE001 - it is the main thread's
            ended.set_exception(error)
        else:
            ended.set_result(None)
        threading.Event().wait()

    def import_ray_data() -> None:  # an interrupt in the middle of an import may leave its lock taken for ever
        try:
            with pause_garbage_collector():
                import_module("ray.data")
        except BaseException as error:  # noqa: BLE001 - it is the main thread's
            imported.set_exception(error)
        else:
            imported.set_result(None)

    with _muted_stderr(), workers_import_this() as job:
        threading.Thread(target=initialise, name="ray-init", daemon=True).start()
        # Importing takes a core a second, while Ray's processes start.
        threading.Thread(target=import_ray_data, name="import-ray-data", daemon=True).start()
        try:
            with repeat_line(say, "Ray's processes are still starting"):
                ended.result()
                imported.result()
            return
        except KeyboardInterrupt:
            pass
    say("interrupted while Ray starts, which is shut down first; the same command goes on from here")
    with _muted_stderr():
        wait([ended])
        ray.shutdown()
    raise KeyboardInterrupt


def _take_back_sigterm() -> None:
    """Let Python alone handle SIGTERM: the handler of Ray's core prints a stack, and aborts the process after 3 s."""
    if threading.current_thread() is threading.main_thread() and (handler := signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, handler)


def is_worth_showing(record: logging.LogRecord) -> bool:
    """Return whether to show a log line of Ray; known harmless ones are written to a file beside Ray's logs instead."""
    message = record.getMessage()
    if not any(known in message for known in _KNOWN_LINES):
        return True
    with suppress(AttributeError, OSError):  # before Ray has a folder for logs, or where its disk is full
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())
        with (folder / f"driver-{os.getpid()}.log").open("a", encoding="utf-8") as log:
            log.write(f"{record.levelname} {message}\n")
    return False


def _shut_down() -> None:
    """Shut Ray down before Ray's own exit handler, which waits half a second to flush output that nobody reads."""
    ray.shutdown()


@contextmanager
def _without_monitor() -> Iterator[None]:
    """Let a Ray that starts in this context start no monitor: one machine does not grow, and the end waits for it."""
    parameters = ray._private.parameter.RayParams
    vars(ray._private.parameter)["RayParams"] = partial(parameters, no_monitor=True)
    try:
        yield
    finally:
        vars(ray._private.parameter)["RayParams"] = parameters


def wait_for_gpus(wanted: int, wait_s: float, say: Callable[[str], object]) -> dict[str, float]:
    """Wait until the cluster that this process has joined has ``wanted`` GPUs, and return its resources.

    An autoscaling cluster is asked for them. Raises UsageError if they have not joined after ``wait_s`` seconds.
    """
    cluster, deadline = dict(ray.cluster_resources()), time.monotonic() + wait_s
    if cluster.get("GPU", 0.0) >= wanted:
        return cluster
    from ray.autoscaler.sdk import request_resources  # noqa: PLC0415 - seldom needed, and slow to import

    say(f"note: the cluster has {cluster.get('GPU', 0.0):g} GPUs; waiting {wait_s:g} s for {wanted}")
    request_resources(bundles=[{"GPU": 1}] * wanted)
    try:
        while cluster.get("GPU", 0.0) < wanted:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"--min-gpus {wanted}: the cluster has {cluster.get('GPU', 0.0):g} GPUs after {wait_s:g} s: look "
                    "at its nodes, or raise --stall-timeout"
                )
            time.sleep(_LOOK_S)
            cluster = dict(ray.cluster_resources())
    finally:
        request_resources(bundles=[])  # from now on the demand of the workers keeps the nodes
    return cluster


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """Drop what native code writes to stderr inside the context: Ray's log files keep it."""
    sys.stderr.flush()
    descriptor = os.dup(2)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - no file of ours
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)


def _connected_to() -> str:
    """Describe the joined cluster and its resources in one line."""
    has, nodes = ray.cluster_resources(), [node for node in ray.nodes() if node["Alive"]]
    here = f"Ray at {ray.get_runtime_context().gcs_address}"
    where = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{here}: {has.get('CPU', 0.0):g} CPUs and {has.get('GPU', 0.0):g} GPUs on {where}"


def choose_device(options: RunOptions, dtype: str, say: Callable[[str], object]) -> tuple[str, str]:
    """Join or start the cluster, and choose the (device, dtype) to compute with.

    Args:
        dtype: that of the flags or of earlier rows; "auto" leaves it to the device.
        say: prints notes for the user.

    Raises UsageError where the cluster or the machine cannot give what the flags ask for, RunFailed where there is no
    cluster.
    """
    connect(say)
    cluster, device = wait_for_gpus(options.min_gpus, options.stall_timeout, say), options.device
    if cluster.get("CPU", 0.0) <= 0:
        raise UsageError("the Ray cluster has no CPUs at this moment: start its worker nodes first")
    gpus = cluster.get("GPU", 0.0)
    if device == "cuda" and gpus < 1:
        raise UsageError("--device cuda: the Ray cluster has no GPU")
    on_cpu = device == "auto" and gpus < 1
    device = "cuda" if device != "cpu" and gpus >= 1 else "cpu"
    dtype = dtype if dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    if on_cpu:
        say(f"note: {_NO_GPU.format(dtype)}")
    if device == "cpu":  # only a GPU node itself knows what its GPU can run
        with usage_errors():
            choose_runtime(device, dtype, options.attn)
    return device, dtype


def gpus_can_be_had() -> bool:
    """Return whether a run may get a GPU: this machine has one, or a cluster is joined, whatever that has.

    Ray is not started for this. Raises RunFailed where RAY_ADDRESS names no cluster.
    """
    return _joins_a_cluster() or torch.cuda.device_count() > 0


def _joins_a_cluster() -> bool:
    """Return whether a run computes on a cluster that is there. Raises RunFailed as ``address_to_join``."""
    return ray.is_initialized() or address_to_join() is not None


def check_device(options: RunOptions, say: Callable[[str], object]) -> None:
    """Raise UsageError where ``--device cuda`` cannot be had, for a run that has nothing left to compute.

    Ray is not started for this check.
    """
    if options.device == "cuda" and _joins_a_cluster():
        choose_device(options, "auto", say)
    elif options.device == "cuda" and not torch.cuda.device_count():
        raise UsageError("--device cuda: this machine has no GPU, and no Ray cluster is named or runs here")


def provenance(run_id: str, packages: Sequence[str]) -> dict[str, Json]:
    """Return the run record's facts about this process: host, process id and versions of packages."""
    return {
        "run_id": run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in packages},
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def root_cause(error: BaseException) -> str:
    """Return the innermost error of a Ray task or actor in one line: Ray wraps it in tracebacks of its own."""
    if is_out_of_disk(error):  # Ray's own text has the bytes of an address
        return "OutOfDiskError: the object store of a node is full, and the disk that it spills to"
    if isinstance(error, ray.exceptions.RayTaskError):
        return printable(f"{type(error.cause).__name__}: {error.cause}")
    if isinstance(error, ray.exceptions.RayError):
        return printable(str(error).strip().splitlines()[-1])
    return printable(f"{type(error).__name__}: {error}")


def is_out_of_disk(error: BaseException) -> bool:
    """Return whether Ray found neither memory nor disk for an object on some node."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return isinstance(cause, ray.exceptions.OutOfDiskError)


def failing_nodes(tried: Mapping[str, Mapping[str, NodeTally]]) -> dict[str, str]:
    """Return the nodes on which a stage fails more often than elsewhere, as node id -> host.

    A file that no node can read fails on all nodes alike, so a node is only left out if others do better.
    """
    found: dict[str, str] = {}
    for nodes in tried.values():
        n_failed = sum(node.failed for node in nodes.values())
        n_all = n_failed + sum(node.done for node in nodes.values())
        for name, node in nodes.items():
            if node.failed * n_all > n_failed * (node.failed + node.done):
                found[name] = node.host
    return found


def resources_without(nodes: Collection[str], max_gpus: int | None = None) -> dict[str, float]:
    """Add up the resources of the living nodes that are not among ``nodes``, with at most ``max_gpus`` GPUs."""
    there: Counter[str] = Counter()
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in nodes:
            there.update(node["Resources"])
    return at_most(dict(there), max_gpus)


def at_most(resources: dict[str, float], max_gpus: int | None) -> dict[str, float]:
    """Return the resources with at most ``max_gpus`` GPUs."""
    gpus = resources.get("GPU", 0.0)
    return resources if max_gpus is None or gpus <= max_gpus else {**resources, "GPU": float(max_gpus)}


def node_selector(nodes: Collection[str]) -> dict[str, str]:
    """Return the label selector that keeps workers off these nodes."""
    return {NODE_LABEL: f"!in({','.join(sorted(nodes))})"} if nodes else {}
