"""What a model argument means: its config, its settings of frames, and what is refused."""

import json
import pickle

import pytest

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from tests.gstep.reading import count_reading


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


def test_no_preprocessor_files(folder):
    for filename in ("video_preprocessor_config.json", "preprocessor_config.json"):
        (folder / filename).unlink()
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ModelSource.resolve(folder)
