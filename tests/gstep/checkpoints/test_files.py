"""Files of a checkpoint in a folder or of the model that comes with the package, and what a model argument means."""

import dataclasses
import hashlib
import json
import pickle
import re
import shutil

import pytest

from gstep.backbones import ModelSource
from gstep.checkpoints.files import SHIPPED, CheckpointFiles
from gstep.errors import ModelError
from tests.gstep.reading import count_reading


def test_files_of_a_folder_are_found_by_name_and_ending(folder):
    files = CheckpointFiles.locate(str(folder))
    assert (files.kind, files.location, files.revision) == ("folder", str(folder.resolve()), None)
    assert files.find("config.json") == folder / "config.json" and files.has("config.json")
    assert files.find("other.json") is None and not files.has("other.json")
    (folder / "shards").mkdir()
    assert files.find("shards") is None
    assert files.names(".safetensors") == ["model.safetensors"] and files.names(".bin") == []
    assert pickle.loads(pickle.dumps(files)) == files  # noqa: S301 - our own bytes


def test_a_tiny_models_name_comes_before_a_folder_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert CheckpointFiles.locate("tiny").kind == "tiny"
    assert CheckpointFiles.locate("./tiny").kind == "folder"


def test_a_json_file_that_holds_no_object_is_refused(folder):
    files = CheckpointFiles.locate(str(folder))
    assert files.read_json("other.json") is None
    for content, why in (("{", "is no JSON"), ("\xff", "is no JSON"), ("[1]", "holds no JSON object")):
        (folder / "other.json").write_text(content, encoding="latin-1")
        with pytest.raises(ModelError, match=f"{why}.*copy it again"):
            files.read_json("other.json")


def test_a_folder_that_does_not_exist():
    for model in ("/no/such/folder", "./nowhere", "a/b/c", ""):
        with pytest.raises(ModelError, match="no folder on this machine"):
            ModelSource.resolve(model)


def test_a_folder_resolves_without_reading_weights(folder, monkeypatch):
    read = count_reading(monkeypatch)
    source = ModelSource.resolve(folder)
    assert not read
    assert (source.model_type, source.files.kind, source.files.revision) == ("llava_onevision", "folder", None)
    assert source.config["vision_config"]["image_size"] == 384
    assert source.preprocessor["video_processor_type"] == "LlavaOnevisionVideoProcessor"
    assert pickle.loads(pickle.dumps(source)) == source  # noqa: S301 - our own bytes
    assert source.pretrained() == (str(folder), None)


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
    for filename in ("video_preprocessor_config.json", "preprocessor_config.json", "processor_config.json"):
        (folder / filename).unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ModelSource.resolve(folder)


def test_another_model_is_refused_and_its_code_never_run(folder):
    (folder / "odd.py").write_text("raise SystemExit('ran')")
    for config, message in (
        ({"model_type": "llava"}, "'llava'; known: llava_onevision"),
        ({"model_type": "odd", "auto_map": {"AutoModel": "odd.Odd"}}, "never run"),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=message):
            ModelSource.resolve(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        ModelSource.resolve(folder)


def test_the_trained_model_is_found_by_its_name_and_a_copy_of_it_is_a_folder_with_the_same_hash(tmp_path):
    source = ModelSource.resolve("shapes")
    assert source.model_type == "llava_onevision" and re.fullmatch(r"shapes:[0-9a-f]{32}", source.identity)
    assert source.weight_files == ("model.safetensors",)
    assert source.pretrained() == (str(SHIPPED["shapes"]), None)
    copy = shutil.copytree(SHIPPED["shapes"], tmp_path / "copy")
    assert ModelSource.resolve(copy).identity == source.identity.replace("shapes:", "folder:")


def test_a_node_with_another_one_is_refused_and_so_is_a_revision(folder):
    for name in ("shapes", "tiny"):
        source = dataclasses.replace(ModelSource.resolve(name), identity=f"{name}:other")
        with pytest.raises(ModelError, match=rf"this node has {name}:.*the same version of this package"):
            source.file("config.json")
    for model, kind in (("shapes", "shipped"), (str(folder), "folder")):
        with pytest.raises(ModelError, match=f"is for a Hugging Face id; '{model}' is a {kind} model"):
            ModelSource.resolve(model, "main")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_card_is_of_these_weights(name):
    folder = SHIPPED[name]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    assert not [path for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pkl", ".py"}]
