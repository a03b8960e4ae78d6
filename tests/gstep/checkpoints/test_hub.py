"""Checkpoints by their Hugging Face id: the local cache, the order of downloads, networks that fail."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from gstep.families import FAMILIES as TYPES
from gstep.language import prompt_builder
from gstep.language.prompt import _load_tokenizer, chat_template
from gstep.language.weights import read_generation_config
from tests.builders import stores
from tests.gstep.checkpoints.conftest import COMMIT
from tests.gstep.llms import FAMILIES
from tests.gstep.reading import changed_json, decode_newline
from tests.interpreter import run_python

REPO = "some-owner/tiny-llava"


@pytest.fixture
def offline_hub(hub_cache, monkeypatch):
    """An empty Hugging Face cache, and no network."""
    _load_tokenizer.cache_clear()  # a commit has one tokenizer, but a test another checkpoint
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return hub_cache


FOLDER = f"models--{REPO.replace('/', '--')}"
SNAPSHOT = f"{FOLDER}/snapshots/{COMMIT}"


def put_in_hub_cache(cache: Path, folder: Path) -> None:
    """Lay a checkpoint down as the hub's client does: contents by hash, a snapshot of links, a branch."""
    root = cache / FOLDER
    for part in ("blobs", f"snapshots/{COMMIT}", "refs"):
        (root / part).mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for path in folder.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, root / "blobs" / digest)
        (root / "snapshots" / COMMIT / path.name).symlink_to(f"../../blobs/{digest}")


def use_all(repo: str = REPO) -> None:
    """Read what pruning and answering read of a checkpoint besides weights."""
    source = ModelSource.resolve(repo)
    family_of(source).preprocessor()
    read_generation_config(source, prompt_builder(source).config)


def note(cache: Path, *absent: str, present: tuple[str, ...] | None = None) -> None:
    """Leave the notes of the hub's client: files that it requested in vain, the listing of a whole download."""
    root = cache / FOLDER
    for name in absent:
        path = root / ".no_exist" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if present is not None:
        (root / "trees").mkdir()
        files = {name: {"size": 1, "blob_id": "b" * 40} for name in present}
        (root / "trees" / f"{COMMIT}.json").write_text(json.dumps({"format_version": 1, "files": files}))


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl"])
def test_a_download_by_the_hubs_client_is_complete(hub_cache, folder, monkeypatch):
    with stores.HubServer(folder) as server:
        snapshot_download(stores.REPO, endpoint=server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    use_all(stores.REPO)
    (snapshot,) = hub_cache.glob("*/snapshots/*")
    (snapshot / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match=r"chat_template\.jinja .*is not in the cache"):
        use_all(stores.REPO)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_that_the_family_publishes_and_the_cache_lacks_is_not_taken_for_absent(offline_hub, folder, name):
    family = TYPES[ModelSource.resolve(name).model_type]
    published = (*family.files, *family.usual_files)
    put_in_hub_cache(offline_hub, folder)
    snapshot = offline_hub / SNAPSHOT
    unused = {"preprocessor_config.json"} if "video_preprocessor_config.json" in published else set()
    for missing in {*published, "chat_template.jinja", "model.safetensors"} - unused:
        content = (snapshot / missing).rename(snapshot / "elsewhere")
        with pytest.raises(ModelError, match=rf"{missing} .*is not in the cache.*HF_HUB_OFFLINE is set"):
            use_all()
        (snapshot / ".gitattributes").touch()  # the whole repository was downloaded
        _load_tokenizer.cache_clear()
        if missing in family.usual_files:
            use_all()
        else:
            with pytest.raises(ModelError, match=rf"{missing} .*not in the cache|no safetensors|no chat template"):
                use_all()
        (snapshot / ".gitattributes").unlink()
        content.rename(snapshot / missing)
    use_all()


@pytest.mark.parametrize("name", ["tiny-qwen3-vl"])
def test_notes_of_the_hubs_client_say_whether_a_file_is_absent(offline_hub, folder):
    for filename in ("video_preprocessor_config.json", "generation_config.json", "chat_template.jinja"):
        (folder / filename).unlink()
    with changed_json(folder / "tokenizer_config.json") as settings:
        settings["chat_template"] = "of the tokenizer"
    put_in_hub_cache(offline_hub, folder)
    names = tuple(path.name for path in folder.iterdir())
    note(offline_hub, "video_preprocessor_config.json")
    assert ModelSource.resolve(REPO).preprocessor == json.loads((folder / "preprocessor_config.json").read_text())
    with pytest.raises(ModelError, match=r"chat_template\.jinja .*is not in the cache"):
        chat_template(ModelSource.resolve(REPO))
    _load_tokenizer.cache_clear()
    note(offline_hub, present=names)
    assert chat_template(ModelSource.resolve(REPO)) == "of the tokenizer"


def test_an_optional_file_that_the_listing_has_is_not_absent(offline_hub, folder):
    (folder / "processor_config.json").unlink()
    put_in_hub_cache(offline_hub, folder)
    note(offline_hub, present=("config.json", "processor_config.json", "adapter_config.json"))
    with pytest.raises(ModelError, match=r"has an adapter \(adapter_config.json\)"):
        ModelSource.resolve(REPO)


def test_a_network_out_of_reach_is_as_no_network_for_a_whole_download(folder, fake_hub, hub_cache):
    put_in_hub_cache(hub_cache, folder)
    fake_hub.folder, gone = folder, LocalEntryNotFoundError("no network")
    fake_hub.errors = dict.fromkeys(("adapter_config.json", "chat_template.json"), gone)
    source = ModelSource.resolve(REPO)
    assert source.files.find("chat_template.json") is None
    (hub_cache / SNAPSHOT / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"chat_template\.json"):  # the network failed in the middle of a download
        source.files.find("chat_template.json")


@pytest.mark.parametrize("missing", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_a_shard_that_the_index_names_is_missed_only_where_it_is_needed(offline_hub, sharded, missing):
    (sharded / missing).unlink()
    put_in_hub_cache(offline_hub, sharded)
    source = ModelSource.resolve(REPO)
    if missing.startswith("model-00002"):  # the language model's
        assert family_of(source).static()
    else:
        with pytest.raises(ModelError, match=rf"{missing} .*is not in the cache"):
            family_of(source).static()


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


def test_hf_home_and_hf_hub_offline_are_honoured(tmp_path, folder):
    put_in_hub_cache(tmp_path / "home" / "hub", folder)
    code = f"from gstep.backbones import ModelSource; print(ModelSource.resolve({REPO!r}).identity)"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE_"))}
    environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    assert run_python("-c", code, env=environment, check=True).stdout.strip() == f"hub:{REPO}@{COMMIT}"


def test_a_hub_whose_name_is_unknown_here_is_not_tried_again_and_again(hub_cache, folder, monkeypatch, caplog):
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    with pytest.raises(ModelError, match=r"config\.json .*is not in the cache.*the Hugging Face Hub is out of reach"):
        ModelSource.resolve(REPO)
    assert "Retrying" not in caplog.text
    put_in_hub_cache(hub_cache, folder)
    assert ModelSource.resolve(REPO).identity == f"hub:{REPO}@{COMMIT}"


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
