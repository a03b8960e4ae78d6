"""Checkpoints by their Hugging Face id: the local cache, the order of downloads, networks that fail."""

import hashlib
import os
import shutil
from pathlib import Path
from urllib.request import getproxies

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from tests.gstep.checkpoints.conftest import COMMIT
from tests.gstep.reading import decode_newline
from tests.interpreter import run_python

REPO = "some-owner/tiny-llava"


@pytest.fixture
def offline_hub(hub_cache, monkeypatch):
    """An empty Hugging Face cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub_cache


def put_in_hub_cache(cache: Path, folder: Path) -> None:
    """Lay a checkpoint down as the hub's client does: contents by hash, a snapshot of links, a branch."""
    root = cache / f"models--{REPO.replace('/', '--')}"
    for part in ("blobs", f"snapshots/{COMMIT}", "refs"):
        (root / part).mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, root / "blobs" / digest)
        (root / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{digest}")


def test_a_hub_id_resolves_offline_to_its_commit(offline_hub, folder):
    put_in_hub_cache(offline_hub, folder)
    source = ModelSource.resolve(REPO)
    assert source.identity == f"hub:{REPO}@{COMMIT}"
    assert source.files.revision == COMMIT and source.pretrained() == (REPO, COMMIT)
    assert ModelSource.resolve(REPO, revision=COMMIT).identity == source.identity
    assert torch.equal(decode_newline(REPO), decode_newline("tiny"))
    for model, revision in (("some-owner/never-downloaded", None), (REPO, "v2")):
        with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set.*pass the folder"):
            ModelSource.resolve(model, revision)


def test_an_adapter_on_the_hub_is_refused(offline_hub, folder):
    (folder / "adapter_config.json").write_text("{}")
    put_in_hub_cache(offline_hub, folder)
    with pytest.raises(ModelError, match=r"some-owner/tiny-llava' has an adapter \(adapter_config.json\)"):
        ModelSource.resolve(REPO)


def test_a_hub_whose_name_is_unknown_here_is_not_tried_again_and_again(hub_cache, folder, monkeypatch, caplog):
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    for name in getproxies():
        for variable in (f"{name}_proxy", f"{name.upper()}_PROXY"):
            monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ModelError, match="could neither be fetched from the Hugging Face Hub nor found in its cache"):
        ModelSource.resolve(REPO)
    assert "Retrying" not in caplog.text
    put_in_hub_cache(hub_cache, folder)
    assert ModelSource.resolve(REPO).identity == f"hub:{REPO}@{COMMIT}"


def test_hf_home_and_hf_hub_offline_are_honoured(tmp_path, folder):
    put_in_hub_cache(tmp_path / "home" / "hub", folder)
    code = f"from gstep.backbones import ModelSource; print(ModelSource.resolve({REPO!r}).identity)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    assert run_python("-c", code, env=environment, check=True).stdout.strip() == f"hub:{REPO}@{COMMIT}"


def test_json_first_then_only_the_shards_with_wanted_tensors(sharded, fake_hub):
    fake_hub.folder = sharded
    source = ModelSource.resolve(REPO)
    assert source.identity == f"hub:{REPO}@{COMMIT}"
    assert all(filename.endswith(".json") for filename in fake_hub.downloaded)
    family_of(source).static()
    assert {f for f in fake_hub.downloaded if not f.endswith(".json")} == {"model-00001-of-00002.safetensors"}


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want a response of whichever HTTP client the hub's client uses
    error.args = ("refused",)
    return error


def test_a_hub_that_cannot_be_reached_and_settings_lost_to_it_are_no_absent_ones(folder, fake_hub):
    fake_hub.folder, gone = folder, LocalEntryNotFoundError("no network")
    for error in (gone, http_error(RepositoryNotFoundError)):
        fake_hub.errors = {"config.json": error}
        with pytest.raises(ModelError, match=r"check the name, the network and, for a gated model, HF_TOKEN"):
            ModelSource.resolve(REPO)
    fake_hub.errors = {"video_preprocessor_config.json": gone}
    with pytest.raises(ModelError, match=r"video_preprocessor_config\.json"):
        ModelSource.resolve(REPO)
