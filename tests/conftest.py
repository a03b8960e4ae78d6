"""How a run of the tests uses the machine: threads, the order of the files, and the same draws each time."""

from __future__ import annotations

import gc
import getpass
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT, python_path

# Where PYTHONDONTWRITEBYTECODE is set each worker of -n would rewrite the assertions of all files in every run. Code
# that a test writes and changes within a second must not be kept, so the setting holds again behind the collection.
_KEEPS_NO_BYTECODE, sys.dont_write_bytecode = sys.dont_write_bytecode, False
# Before torch loads. Threads of several processes that share the cores wait for each other longer than they compute.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As in processes of their own (tests.builders.runs.environment). Ray reads it once in a process: after a cluster with a
# token every other one would be refused.

os.environ["RAY_AUTH_MODE"] = "disabled"
# PyTorch sets it as soon as it compiles anything. Workers are forked from a server where both have the same variables.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
# Results of the check of generic models are kept there, and not in the cache of whoever runs the tests.
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/cache_{getpass.getuser()}"
# Decoders, DuckDB and Ray abort or hang in a forked child that collects what they left in the parent, with its threads.
os.register_at_fork(after_in_child=gc.freeze)
# Processes that inherit the environment of the tests import torchvision as the tests do.
os.environ["PYTHONPATH"] = python_path(ROOT)
# Nothing that a finished run left behind may start a cluster.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Files that start clusters of their own. They take long, and most of them end the cluster that other files share. So
# they go first, and each worker of -n starts the shared cluster once.
OWN_CLUSTERS = {
    *("jobs/cluster/test_heads.py", "jobs/test_doctor.py", "jobs/test_faults_kills.py", "jobs/test_faults_node.py"),
    "jobs/test_submit.py",
    *("pipeline/prune/test_memory.py", "pipeline/runner/test_autoscaler.py"),
}
_SLOW: Counter[Path] = Counter()  # slow tests of a file
_ALL: Counter[Path] = Counter()


def pytest_configure() -> None:
    """Let Hypothesis, where it is installed, draw the same examples in every run, however long a busy machine takes."""
    with suppress(ImportError):
        from hypothesis import HealthCheck, settings  # noqa: PLC0415

        slow = [HealthCheck.too_slow]
        settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=slow)
        settings.load_profile("seeded")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with the most slow tests first, then the longest: the workers of ``-n`` end at about the same time."""
    own = {Path(__file__).parent / name for name in OWN_CLUSTERS}
    _SLOW.update(item.path for item in items if item.get_closest_marker("slow"))
    _ALL.update(item.path for item in items)
    items.sort(key=lambda item: (item.path not in own, -_SLOW[item.path], -_ALL[item.path], item.path))


def pytest_collection_finish() -> None:
    """Keep bytecode as the environment says, and keep what is imported out of garbage collections, from here on."""
    sys.dont_write_bytecode = _KEEPS_NO_BYTECODE
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch, and end the Ray that slow tests share before the first file without any.

    The tests of such a file start no Ray, and look whether.
    """
    if (torch := sys.modules.get("torch")) is not None:
        # torch.manual_seed would format a stack for a GPU that is never used, which takes longer than most tests.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
    if not _SLOW[item.path] and (rays := sys.modules.get("tests.builders.clusters")) is not None:
        rays.end_plain()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that returns the folder with the tiny checkpoint of a family; do not change files there."""
    from tests.builders.checkpoints import make  # noqa: PLC0415 - loads transformers

    return cache(lambda name: make(name, tmp_path_factory.mktemp("tiny") / name))
