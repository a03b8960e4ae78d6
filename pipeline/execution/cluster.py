"""The Ray cluster as a driver meets it: joining or starting it, what it has, what its errors mean."""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import ray

from gstep.backbones import choose_runtime
from pipeline.errors import RunFailed, UsageError, printable
from pipeline.execution.request import refusing
from pipeline.execution.run_record import RunRecord
from pipeline.execution.stages import OOM_RETRIES, configure_ray_data


def connect() -> dict[str, float]:
    """The resources of the cluster: the one that RAY_ADDRESS or a running head names, else one started here."""
    if not ray.is_initialized():
        # Ray's C++ core reports harmless matters as errors on this terminal; its log files keep the rest.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        # A task that Ray ends because its node is short of memory is tried again for ever otherwise.
        os.environ.setdefault("RAY_task_oom_retries", str(OOM_RETRIES))
        on_terminate = signal.getsignal(signal.SIGTERM)
        try:
            with _muted_stderr():
                ray.init(logging_level="warning", log_to_driver=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = os.environ.get("RAY_ADDRESS", "on this machine")
            raise RunFailed(f"Ray ({where}) cannot be reached or started: {error}") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)  # Ray's own handler ends the process on the spot
    configure_ray_data()
    return dict(ray.cluster_resources())


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """Hold back what native code writes to stderr, and show it only if an exception leaves the block."""
    sys.stderr.flush()
    descriptor = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(descriptor, held.read())
            raise
        finally:
            os.dup2(descriptor, 2)
            os.close(descriptor)


def settle(cluster: dict[str, float], device: str, dtype: str, attn: str) -> tuple[str, str]:
    """(device, dtype) for what the flags say. Raises UsageError where the cluster or the machine cannot give it."""
    if cluster.get("CPU", 0.0) <= 0:
        raise UsageError("the Ray cluster has no CPUs at this moment: start its worker nodes first")
    gpus = cluster.get("GPU", 0.0)
    if device == "cuda" and gpus < 1:
        raise UsageError("--device cuda: the Ray cluster has no GPU")
    device = "cuda" if device != "cpu" and gpus >= 1 else "cpu"
    dtype = dtype if dtype != "auto" else {"cuda": "bfloat16", "cpu": "float32"}[device]
    if device == "cpu":  # what a GPU node can run is known there only
        with refusing():
            choose_runtime(device, dtype, attn)
    return device, dtype


def provenance(run_id: str, packages: Sequence[str]) -> RunRecord:
    """What the record of a run says of this machine."""
    return {
        "run_id": run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cause(error: BaseException) -> str:
    """The innermost error of a Ray task or actor, in one line: Ray wraps it in tracebacks of its own."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return printable(f"{type(error.cause).__name__}: {error.cause}")
    if isinstance(error, ray.exceptions.RayError):
        return printable(str(error).strip().splitlines()[-1])
    return printable(f"{type(error).__name__}: {error}")
