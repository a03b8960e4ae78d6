"""Watch which tensors of a checkpoint are read, read the newline of one, and change the files of one."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource, family_of
from gstep.checkpoints import tensors

INDEX = "model.safetensors.index.json"


class Counting:
    """An open safetensors file that records the bytes of every tensor read, by name."""

    def __init__(self, opened, read: dict[str, int]):
        self._opened, self._read = opened, read

    def __getattr__(self, name):
        return getattr(self._opened, name)

    def get_tensor(self, key):
        tensor = self._opened.get_tensor(key)
        self._read[key] = tensor.nbytes
        return tensor


def count_reading(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count from here on, by name, the bytes that are read out of safetensors files."""
    read: dict[str, int] = {}
    real = tensors.safe_open

    @contextmanager
    def counting(path, **kwargs):
        with real(path, **kwargs) as opened:
            yield Counting(opened, read)

    patch.setattr(tensors, "safe_open", counting)
    return read


@contextmanager
def changed_json(path):
    """Read the object in a JSON file, to be changed in this context, and write it again."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


@contextmanager
def changed_tensors(folder):
    """Read the tensors of a checkpoint of one file by name, to be changed in this context, and write them again."""
    tensors = load_file(folder / "model.safetensors")
    yield tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def decode_newline(model: str | Path) -> torch.Tensor:
    newline = family_of(ModelSource.resolve(model)).static().newline
    assert newline is not None
    return newline
