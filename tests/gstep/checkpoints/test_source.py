"""Finding a model: folders, the Hugging Face cache, what is refused; and reading single tensors."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource, family_of, read_tensors
from gstep.checkpoints import hub, tensors, tiny
from gstep.errors import ModelError
from tests.paths import ROOT

REPO = "some-owner/tiny-llava"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(tiny.build("tiny"), tmp_path / "model"))


@pytest.fixture
def sharded(folder):
    """The checkpoint in two shards: the vision part, and the language model."""
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


def newline_of(model: str | Path) -> torch.Tensor:
    newline = family_of(ModelSource.resolve(model)).static().newline
    assert newline is not None
    return newline


# Folders


def test_a_folder_resolves_without_reading_weights(folder, monkeypatch):
    monkeypatch.setattr(tensors, "safe_open", None)
    source = ModelSource.resolve(folder)
    assert (source.model_type, source.files.kind, source.files.revision) == ("llava_onevision", "folder", None)
    assert source.config["vision_config"]["image_size"] == 384
    assert source.preprocessor["video_processor_type"] == "LlavaOnevisionVideoProcessor"
    assert pickle.loads(pickle.dumps(source)) == source  # noqa: S301 - our own bytes
    assert source.pretrained() == (str(folder), None)


def test_a_folders_identity_is_its_content(folder, tmp_path):
    identity = ModelSource.resolve(folder).identity
    assert identity.startswith("folder:")
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    assert ModelSource.resolve(copy).identity == identity
    (copy / "config.json").write_text(json.dumps({**config, "vision_feature_layer": -2}))
    assert ModelSource.resolve(copy).identity != identity


def test_a_fine_tune_of_the_same_shapes_has_another_identity(folder):
    identity = ModelSource.resolve(folder).identity
    tensors = load_file(folder / "model.safetensors")
    tensors["multi_modal_projector.linear_2.weight"] *= 1.001
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert ModelSource.resolve(folder).identity != identity


def test_preprocessor_files_have_the_stock_precedence(folder):
    def mean_with(filename: str, content: dict) -> object:
        (folder / filename).write_text(json.dumps(content))
        return ModelSource.resolve(folder).preprocessor["image_mean"]

    (folder / "video_preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()
    assert mean_with("preprocessor_config.json", {"image_mean": "image"}) == "image"
    assert mean_with("video_preprocessor_config.json", {"image_mean": "video"}) == "video"
    assert mean_with("processor_config.json", {"image_token": "<image>"}) == "video"
    assert mean_with("processor_config.json", {"video_processor": {"image_mean": "nested"}}) == "nested"


def test_shards_give_the_same_tensors(folder, sharded):
    source = ModelSource.resolve(sharded)
    assert len(source.weight_files) == 2
    assert torch.equal(newline_of(sharded), newline_of("tiny"))


def test_shards_without_their_index_are_found_too(sharded):
    (sharded / INDEX).unlink()
    assert torch.equal(newline_of(sharded), newline_of("tiny"))


def test_only_shards_with_a_wanted_tensor_are_opened(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(newline_of(sharded), newline_of("tiny"))


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        newline_of(sharded)


def test_tensors_are_renamed_cast_and_independent_of_the_file(folder):
    source = ModelSource.resolve(folder)
    read = read_tensors(source, lambda key: "row" if key == "image_newline" else None, dtype=torch.bfloat16)
    assert list(read) == ["row"] and read["row"].dtype == torch.bfloat16
    stored = read_tensors(source, lambda key: key if key == "image_newline" else None)["image_newline"]
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(stored.bfloat16(), read["row"])


# What is refused


def test_a_folder_that_does_not_exist():
    for model in ("/no/such/folder", "./nowhere", "a/b/c", ""):
        with pytest.raises(ModelError, match="no folder on this machine"):
            ModelSource.resolve(model)


def test_a_revision_of_something_that_has_none(folder):
    with pytest.raises(ModelError, match="revision"):
        ModelSource.resolve(folder, revision="main")


def test_no_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelSource.resolve(folder)


def test_an_unknown_model_type_lists_the_known(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ModelError, match=r"'llava'; known: llava_onevision"):
        ModelSource.resolve(folder)


def test_remote_code_is_never_run(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": {"AutoModel": "odd.Odd"}}))
    (folder / "odd.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="never run"):
        ModelSource.resolve(folder)


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "weights.pt", "weights.pth"])
def test_pickles_are_refused_and_never_opened(folder, pickled):
    (folder / "model.safetensors").rename(folder / pickled)
    with pytest.raises(ModelError, match=rf"{pickled}\) are refused.*save_pretrained"):
        ModelSource.resolve(folder)


def test_a_truncated_download_and_a_git_lfs_pointer(folder):
    weights = folder / "model.safetensors"
    source = ModelSource.resolve(folder)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="no complete safetensors"):
        family_of(source).static()
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        ModelSource.resolve(folder)


def test_an_index_that_points_outside(sharded):
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"image_newline": "../other.safetensors"}}))
    with pytest.raises(ModelError, match="outside"):
        ModelSource.resolve(sharded)


def test_no_preprocessor_files(folder):
    for filename in ("video_preprocessor_config.json", "preprocessor_config.json"):
        (folder / filename).unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ModelSource.resolve(folder)


# The Hugging Face Hub


def test_a_hub_id_resolves_offline_to_its_commit(offline_hub, folder):
    put_in_hub_cache(offline_hub, folder)
    source = ModelSource.resolve(REPO)
    assert source.identity == f"hub:{REPO}@{COMMIT}"
    assert source.files.revision == COMMIT and source.pretrained() == (REPO, COMMIT)
    assert ModelSource.resolve(REPO, revision=COMMIT).identity == source.identity
    assert torch.equal(newline_of(REPO), newline_of("tiny"))


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

    def __call__(self, repo: str, filename: str, *, revision: str | None, dry_run: bool) -> object:
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
