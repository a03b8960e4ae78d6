"""Trained checkpoints that come with this package, in folders beside this file; each has its model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

#: The card beside each model describes how it was made.
SHIPPED: Mapping[str, Path] = {"shapes": Path(__file__).parent / "shapes"}
