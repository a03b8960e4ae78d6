"""This interpreter in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.paths import ROOT


def run_python(*argv: object, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python <argv>`` in the checkout, or where ``options`` of subprocess.run say; its output is text."""
    given = {"cwd": ROOT, "capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, argv)], check=check, **given)
