"""Tests that need packages which this environment cannot have, run in one that has them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.paths import ROOT

_OWN = ("GSTEP_VLLM_PYTHON", "GSTEP_LMMS_PYTHON", "PYTHONPATH")


def files_marked(mark: str) -> list[str]:
    """Return the test files with ``pytest.mark.<mark>``, below the root."""
    needle = f"pytest.mark.{mark}"
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if needle in path.read_text()]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.parent != ROOT / "tests")


def passes_there(python: str, path: str, **more: str) -> None:
    """Assert that a test file passes with another interpreter, and that none of it is skipped.

    Each file gets a process: what is tested looks into whatever modules are loaded, and trips over some that other
    tests use. ``more`` is set in its environment.
    """
    environ = {**{name: value for name, value in os.environ.items() if name not in _OWN}, **more}
    command = [str(Path(python).absolute()), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout.splitlines()[-1]
