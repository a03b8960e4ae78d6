"""The files of a checkpoint in a folder: which one is meant, what is found, and JSON that is none."""

import pickle

import pytest

from gstep.backbones import ModelSource
from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError


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


def test_a_revision_of_something_that_has_none(folder):
    with pytest.raises(ModelError, match="revision"):
        ModelSource.resolve(folder, revision="main")
