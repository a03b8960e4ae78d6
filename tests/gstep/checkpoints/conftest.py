"""Checkpoints to find: a tiny one in a folder of its own, whole and in shards."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gstep.checkpoints import tiny
from tests.gstep.reading import INDEX


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(tiny.build("tiny"), tmp_path / "model"))


@pytest.fixture
def sharded(folder):
    """Write the checkpoint in two shards: the vision part, and the language model."""
    tensors = load_file(folder / "model.safetensors")
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    vision, language = shards.values()
    for key, tensor in tensors.items():
        (language if key.startswith("language_model.") else vision)[key] = tensor
    for filename, shard in shards.items():
        save_file(shard, folder / filename)
    weight_map = {key: filename for filename, shard in shards.items() for key in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder
