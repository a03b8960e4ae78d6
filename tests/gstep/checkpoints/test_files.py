"""Files of a checkpoint in a folder or of the model that comes with the package, and what a model argument means."""

import dataclasses
import hashlib
import json
import pickle
import re
import shutil
from functools import reduce
from operator import getitem

import pytest

from gstep.backbones import ModelSource, family_of
from gstep.checkpoints.files import SHIPPED, CheckpointFiles
from gstep.errors import ModelError
from gstep.language import prompt_builder
from gstep.language.weights import read_generation_config
from tests.gstep.reading import INDEX, changed_json, count_reading


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


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        *((model, {}, "no folder on this machine") for model in ("/no/such/folder", "./nowhere", "a/b/c", "")),
        ("tiny-qwen3-vl", {"family": "qwen3_vl"}, "'qwen3_vl' is neither generic nor your own class"),
        ("shapes", {"revision": "main"}, "is for a Hugging Face id; 'shapes' is a shipped model"),
        (str(SHIPPED["shapes"]), {"revision": "main"}, "is for a Hugging Face id; .* is a folder model"),
    ],
)
def test_a_model_that_is_not_there_and_options_that_it_does_not_take_are_refused(model, options, words):
    with pytest.raises(ModelError, match=words):
        ModelSource.resolve(model, **options)


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


WRONG_SETTINGS = (
    *(("config.json", ("vision_config",), "x"), ("config.json", ("text_config",), None)),
    *(("config.json", ("vision_config", "patch_size"), value) for value in (0, "14", True)),
    ("config.json", ("vision_config", "image_size"), 10**30),
    *(("config.json", ("text_config", "num_hidden_layers"), value) for value in (-1, 10**9)),  # which fills the memory
    *(("config.json", ("text_config", "model_type"), value) for value in ({"a": 1}, "x")),
    *(("config.json", ("image_grid_pinpoints",), "x"), ("config.json", ("torch_dtype",), [])),
    *(("config.json", ("video_token_index",), -1), ("generation_config.json", ("pad_token_id",), "x")),
    ("tokenizer_config.json", ("added_tokens_decoder",), {"x": 5}),
    *(("video_preprocessor_config.json", ("size", "height"), value) for value in ("x", [], 0)),
    ("processor_config.json", ("video_processor",), [1]),
)


@pytest.mark.parametrize(("filename", "keys", "value"), WRONG_SETTINGS)
def test_a_setting_of_a_wrong_type_is_refused_by_name(folder, filename, keys, value):
    with changed_json(folder / filename) as content:
        *parents, key = keys
        reduce(getitem, parents, content)[key] = value
    with pytest.raises(ModelError, match=r"valid|object|no tokenizer|setting height"):
        source = ModelSource.resolve(folder)
        family = family_of(source)
        family.preprocessor()
        family.static()
        read_generation_config(source, prompt_builder(source).config)


@pytest.mark.parametrize("value", [5, None, "", "..", "x.bin", "../x.safetensors", "/x.safetensors"])
def test_an_index_that_names_no_files_beside_it_is_refused(sharded, value):
    with changed_json(sharded / INDEX) as content:
        content["weight_map"]["image_newline"] = value
    with pytest.raises(ModelError, match=rf"{INDEX} (says that image_newline is in|names files outside)"):
        ModelSource.resolve(sharded)
    for weight_map in (value, [value], None):
        with changed_json(sharded / INDEX) as content:
            content["weight_map"] = weight_map
        with pytest.raises(ModelError, match=f"{INDEX} has no weight_map"):
            ModelSource.resolve(sharded)


@pytest.mark.parametrize("entry", [{}, {"dtype": 5}, {"data_offsets": ["a", "b"]}, {"data_offsets": [-4, 0]}, 5])
def test_a_header_of_a_weight_file_that_describes_no_tensors_is_refused(folder, entry):
    path = folder / "model.safetensors"
    content = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"x": {**content, **entry} if entry and isinstance(entry, dict) else entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ModelError, match=r"is no safetensors file"):
        ModelSource.resolve(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "odd", "auto_map": {"AutoModel": "odd.Odd"}}, r"'odd', which transformers .* never run"),
        ({"model_type": "qwen3_vl_mini"}, "does not know: .* The nearest is qwen3_vl_moe: Qwen/Qwen3-VL-30B-A3B"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM .* sees no videos"),
        ({"model_type": "llama"}, "no class of llama that takes videos"),
        (
            {"model_type": "qwen2_vl", "architectures": ["Mine"], "auto_map": {"AutoModel": "odd.Mine"}},
            "architectures Mine, of which transformers .* has none.* never run.* often has -hf",
        ),
        (None, r"no config\.json"),
    ],
)
def test_another_model_is_refused_and_its_code_never_run(folder, config, words):
    (folder / "odd.py").write_text("raise SystemExit('ran')")
    (folder / "config.json").unlink()
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        ModelSource.resolve(folder)


@pytest.mark.parametrize(
    ("model_type", "architectures", "config", "cls"),
    [
        ("glm4v", ["Glm4vForConditionalGeneration"], {"auto_map": {"AutoModel": "odd.Odd"}}, "Glm4vForCond"),
        ("glm4v", [], {"text_config": None, "vision_config": {"image_size": [56, 56]}}, "Glm4vForCond"),
        ("qwen2_5_omni", ["Qwen2_5OmniModel"], {"audio_config": None}, "Qwen2_5OmniThinkerForCond"),
        ("qwen3_vl", ["Qwen3VLForConditionalGeneration"], {}, "Qwen3VLForCond"),
    ],
)
def test_a_type_outside_the_table_is_of_the_family_generic(folder, model_type, architectures, config, cls):
    (folder / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": architectures, **config})
    )
    (folder / "preprocessor_config.json").rename(folder / "video_preprocessor_config.json")
    processor = {"chat_template": "{{ 1 }}", "video_processor": {"size": 5}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    source = ModelSource.resolve(folder, family="generic", gate=False)
    assert (source.model_type, source.family, source.layout) == (model_type, "generic", None)
    assert source.find_stock_class()[0].__name__.startswith(cls)
    assert source.preprocessor["processor_config.json"] == {"video_processor": {"size": 5}}
    assert source.preprocessor.keys() == {"processor_config.json", "video_preprocessor_config.json"}
    if model_type != "qwen3_vl":
        assert ModelSource.resolve(folder, gate=False) == source
    for filename in ("processor_config.json", "video_preprocessor_config.json"):
        (folder / filename).unlink()
    with pytest.raises(ModelError, match="has neither processor_config"):
        ModelSource.resolve(folder, family="generic", gate=False)


def test_the_trained_model_is_found_by_its_name_and_a_copy_of_it_is_a_folder_with_the_same_hash(tmp_path):
    source = ModelSource.resolve("shapes")
    assert source.model_type == "llava_onevision" and re.fullmatch(r"shapes:[0-9a-f]{32}", source.identity)
    assert source.weight_files == ("model.safetensors",)
    assert source.pretrained() == (str(SHIPPED["shapes"]), None)
    copy = shutil.copytree(SHIPPED["shapes"], tmp_path / "copy")
    assert ModelSource.resolve(copy).identity == source.identity.replace("shapes:", "folder:")


def test_a_node_with_another_model_of_the_package_is_refused():
    for name in ("shapes", "tiny"):
        source = dataclasses.replace(ModelSource.resolve(name), identity=f"{name}:other")
        with pytest.raises(ModelError, match=rf"this node has {name}:.*the same version of this package"):
            source.file("config.json")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_card_is_of_these_weights(name):
    folder = SHIPPED[name]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (folder / "README.md").read_text(encoding="utf-8")
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    assert not [path for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pkl", ".py"}]
