"""Checkpoints to find: a tiny one in a folder of its own, whole and in shards, and a hub that serves one."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from gstep.checkpoints import files
from tests.gstep.reading import INDEX

COMMIT = "0123456789abcdef0123456789abcdef01234567"


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


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


class FakeHub:
    """Stands in for hf_hub_download: serves a folder as any repository, and records what was downloaded.

    A file in ``errors`` raises that.
    """

    def __init__(self, snapshot: Path) -> None:
        self.folder, self.snapshot = Path(), snapshot
        self.downloaded: list[str] = []
        self.errors: dict[str, Exception] = {}

    def __call__(
        self, repo: str, filename: str, *, revision: str | None, dry_run: bool, local_files_only: bool
    ) -> object:
        if filename in self.errors:
            raise self.errors[filename]
        if not (self.folder / filename).is_file():
            raise files.EntryNotFoundError(filename)
        if dry_run:
            return object()
        self.downloaded.append(filename)
        return str(shutil.copy(self.folder / filename, self.snapshot / filename))


@pytest.fixture
def fake_hub(hub_cache, tmp_path, monkeypatch):
    snapshot = tmp_path / COMMIT
    snapshot.mkdir()
    fake = FakeHub(snapshot)
    monkeypatch.setattr(files, "hf_hub_download", fake)
    return fake
