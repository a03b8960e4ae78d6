"""Watch which tensors of a checkpoint are read, and read the newline of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gstep.backbones import ModelSource, family_of
from gstep.checkpoints import tensors

INDEX = "model.safetensors.index.json"


class CountingSafeOpen:
    """safe_open that records the bytes of every tensor read, by name."""

    read: dict[str, int] = {}  # noqa: RUF012 - reset by ``count_reading``

    def __init__(self, path, **kwargs):
        self._opened = self._safe_open(path, **kwargs)

    def __enter__(self):
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def keys(self):
        return self._file.keys()

    def get_slice(self, key):
        return self._file.get_slice(key)  # reads the header alone

    def get_tensor(self, key):
        tensor = self._file.get_tensor(key)
        self.read[key] = tensor.nbytes
        return tensor


def count_reading(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count from here on, by name, the bytes that are read out of safetensors files."""
    patch.setattr(CountingSafeOpen, "_safe_open", staticmethod(tensors.safe_open), raising=False)
    patch.setattr(CountingSafeOpen, "read", {})
    patch.setattr(tensors, "safe_open", CountingSafeOpen)
    return CountingSafeOpen.read


def newline_of(model: str | Path) -> torch.Tensor:
    newline = family_of(ModelSource.resolve(model)).static().newline
    assert newline is not None
    return newline
