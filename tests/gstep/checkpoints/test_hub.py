"""Checkpoints by their Hugging Face id: the local cache, the order of downloads, networks that fail."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from gstep.backbones import ModelSource, family_of
from gstep.checkpoints import hub
from gstep.errors import ModelError
from tests.gstep.reading import newline_of
from tests.paths import ROOT

REPO = "some-owner/tiny-llava"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """An empty Hugging Face cache, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put_in_hub_cache(cache: Path, folder: Path, *, without: str = "nothing") -> None:
    """Lay a checkpoint down as the hub's client does: contents by hash, a snapshot of links, a branch."""
    root = cache / f"models--{REPO.replace('/', '--')}"
    for part in ("blobs", f"snapshots/{COMMIT}", "refs"):
        (root / part).mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        if without not in path.name:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, root / "blobs" / digest)
            (root / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{digest}")


def test_a_hub_id_resolves_offline_to_its_commit(offline_hub, folder):
    put_in_hub_cache(offline_hub, folder)
    source = ModelSource.resolve(REPO)
    assert source.identity == f"hub:{REPO}@{COMMIT}"
    assert source.files.revision == COMMIT and source.pretrained() == (REPO, COMMIT)
    assert ModelSource.resolve(REPO, revision=COMMIT).identity == source.identity
    assert torch.equal(newline_of(REPO), newline_of("tiny"))


def test_a_hub_whose_name_is_unknown_here_is_not_tried_again_and_again(offline_hub, folder, monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr(hub, "getproxies", dict)
    hub._is_named.cache_clear()
    try:
        with pytest.raises(
            ModelError, match="could neither be fetched from the Hugging Face Hub nor found in its cache"
        ):
            ModelSource.resolve(REPO)
        assert "Retrying" not in caplog.text
        put_in_hub_cache(offline_hub, folder)
        assert ModelSource.resolve(REPO).identity == f"hub:{REPO}@{COMMIT}"
    finally:
        hub._is_named.cache_clear()


def test_a_hub_cache_needs_no_shard_of_the_language_model(offline_hub, sharded):
    put_in_hub_cache(offline_hub, sharded, without="model-00002")
    assert torch.equal(newline_of(REPO), newline_of("tiny"))


def test_hf_home_and_hf_hub_offline_are_honoured(tmp_path, folder):
    put_in_hub_cache(tmp_path / "home" / "hub", folder)
    code = (
        "from gstep.backbones import ModelSource, family_of\n"
        f"source = ModelSource.resolve({REPO!r})\n"
        "print(source.identity, len(family_of(source).static().newline))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    assert run.stdout.split() == [f"hub:{REPO}@{COMMIT}", "64"]


def test_an_id_that_is_not_in_the_cache(offline_hub):
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set.*pass the folder"):
        ModelSource.resolve("some-owner/never-downloaded")


def test_a_revision_that_is_not_in_the_cache(offline_hub, folder):
    put_in_hub_cache(offline_hub, folder)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        ModelSource.resolve(REPO, revision="v2")


def test_a_hub_id_with_pickles_only(offline_hub, folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    put_in_hub_cache(offline_hub, folder)
    with pytest.raises(ModelError, match="refused"):
        ModelSource.resolve(REPO)


class FakeHub:
    """Stands in for hf_hub_download: serves a folder as a repository, and records what was downloaded."""

    def __init__(self, folder: Path, snapshot: Path) -> None:
        self.folder, self.snapshot = folder, snapshot
        self.downloaded: list[str] = []

    def __call__(
        self, repo: str, filename: str, *, revision: str | None, dry_run: bool, local_files_only: bool
    ) -> object:
        if not (self.folder / filename).is_file():
            raise hub.EntryNotFoundError(filename)
        if dry_run:
            return object()
        self.downloaded.append(filename)
        return str(shutil.copy(self.folder / filename, self.snapshot / filename))


def test_json_first_then_only_the_shards_with_wanted_tensors(sharded, tmp_path, monkeypatch):
    snapshot = tmp_path / COMMIT
    snapshot.mkdir()
    fake = FakeHub(sharded, snapshot)
    monkeypatch.setattr(hub, "hf_hub_download", fake)
    source = ModelSource.resolve(REPO)
    assert source.identity == f"hub:{REPO}@{COMMIT}"
    assert all(filename.endswith(".json") for filename in fake.downloaded)
    family_of(source).static()
    assert {f for f in fake.downloaded if not f.endswith(".json")} == {"model-00001-of-00002.safetensors"}


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)  # their constructors want a response of whichever HTTP client the hub's client uses
    error.args = ("refused",)
    return error


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network"), http_error(RepositoryNotFoundError)])
def test_a_hub_that_cannot_be_reached(error, monkeypatch, tmp_path):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"check the name, the network and, for a gated model, HF_TOKEN"):
        ModelSource.resolve(REPO)


def test_settings_lost_to_a_failing_network_are_no_absent_settings(folder, tmp_path, monkeypatch):
    snapshot = tmp_path / COMMIT
    snapshot.mkdir()
    fake = FakeHub(folder, snapshot)

    def flaky(repo: str, filename: str, **kwargs: object) -> object:
        if filename == "video_preprocessor_config.json":
            raise LocalEntryNotFoundError("the network went away")
        return fake(repo, filename, **kwargs)

    monkeypatch.setattr(hub, "hf_hub_download", flaky)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"video_preprocessor_config\.json"):
        ModelSource.resolve(REPO)
