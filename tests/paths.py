"""Where the tests find the repository and what official code selected, and what their processes import."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests/gstep/golden"
#: The folder of a torchvision that can also be imported beside torch's CPU wheel.
TORCHVISION = ROOT / "tests/torchvision_here"


def python_path(*folders: Path) -> str:
    """Return the PYTHONPATH of a process that imports its modules from these folders."""
    return os.pathsep.join(map(str, (*folders, TORCHVISION)))
