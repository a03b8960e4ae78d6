"""Runs an example script of the repository in this process, as ``python SCRIPT ARGUMENTS`` would."""

from __future__ import annotations

import runpy
import sys
from unittest.mock import patch

from tests.paths import ROOT


def run_example(script: str, *arguments: object) -> dict[str, object]:
    """Run ``script``, a path in the repository, and return the names that it has at its end."""
    with patch.object(sys, "argv", [script, *map(str, arguments)]):
        return runpy.run_path(str(ROOT / script), run_name="__main__")
