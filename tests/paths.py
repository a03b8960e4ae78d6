"""Where the tests find the repository and what official code selected."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests/gstep/golden"
