"""Where the tests find the repository and golden selections, what their processes import, and the files of a folder."""

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


def read_all(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder and of those below it, by relative path; linked folders are left out."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
