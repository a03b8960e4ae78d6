"""Files and tensors of a checkpoint, whole or in shards, and their hash; what a model argument means; refusals."""

import dataclasses
import hashlib
import json
import pickle
import re
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gstep.backbones import ModelSource, family_of, read_tensors
from gstep.checkpoints.files import SHIPPED, CheckpointFiles
from gstep.checkpoints.tensors import compute_tower_hash, refuse_quantized
from gstep.errors import ModelError
from gstep.language import load_language_model, prompt_builder
from gstep.language.weights import read_generation_config
from tests.gstep.backbones.encoders import FLOAT32
from tests.gstep.llms import KINDS
from tests.gstep.reading import INDEX, changed_json, changed_tensors, count_reading, decode_newline


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


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
USE = "Use the unquantized checkpoint that it was made from"


def test_shards_give_the_same_tensors_and_only_those_with_a_wanted_one_are_opened(sharded):
    language, index = sharded / "model-00002-of-00002.safetensors", sharded / INDEX
    assert len(ModelSource.resolve(sharded).weight_files) == 2
    assert torch.equal(decode_newline(sharded), decode_newline("tiny"))
    kept = index.rename(sharded / "kept")  # shards are found without their index too
    assert torch.equal(decode_newline(sharded), decode_newline("tiny"))
    kept.rename(index)
    language.unlink()
    assert torch.equal(decode_newline(sharded), decode_newline("tiny"))
    (sharded / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        decode_newline(sharded)


def test_tensors_are_renamed_cast_and_independent_of_the_file(folder):
    source = ModelSource.resolve(folder)
    read = read_tensors(source, lambda key: "row" if key == "image_newline" else None, dtype=torch.bfloat16)
    assert list(read) == ["row"] and read["row"].dtype == torch.bfloat16
    stored = read_tensors(source, lambda key: key if key == "image_newline" else None)["image_newline"]
    (folder / "model.safetensors").write_bytes(b"")
    assert torch.equal(stored.bfloat16(), read["row"])


ADAPTER = "base_model.model.visual.blocks.0.attn.qkv.lora_A.weight"
MERGE = "which is not applied here: merge it into the weights"


@pytest.mark.parametrize("filename", ["adapter_config.json", "non_lora_trainables.bin"])
def test_an_adapter_beside_the_weights_is_refused(folder, filename):
    (folder / filename).write_text("{}")
    with pytest.raises(ModelError, match=rf"has an adapter \({filename}\), {MERGE}"):
        ModelSource.resolve(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=MERGE):
        ModelSource.resolve(folder)


@pytest.mark.parametrize("ending", ["base_layer.weight", "lora_B.default.weight"])
def test_an_adapter_among_the_weights_is_refused_in_one_file_and_in_an_index(sharded, ending):
    shard = sharded / "model-00002-of-00002.safetensors"
    name = f"language_model.model.layers.0.self_attn.q_proj.{ending}"
    tensors = load_file(shard)
    save_file({**tensors, name: torch.ones(2)}, shard)
    with pytest.raises(ModelError, match=rf"holds an adapter \({name}\), {MERGE}"):
        ModelSource.resolve(sharded)
    save_file(tensors, shard)
    with changed_json(sharded / INDEX) as index:
        index["weight_map"][name] = shard.name
    with pytest.raises(ModelError, match=rf"holds an adapter \({name}\), {MERGE}"):
        ModelSource.resolve(sharded)


def test_tensors_of_the_vision_side_in_a_file_that_is_not_read_are_refused(sharded):
    save_file({"optimizer.step": torch.ones(2)}, sharded / "other.safetensors")
    (sharded / "damaged.safetensors").write_bytes(b"git lfs")
    assert len(ModelSource.resolve(sharded).weight_files) == 2
    for key in (ADAPTER, "model.vision_tower.encoder.layers.9.norm.weight", "image_newline.extra"):
        save_file({key: torch.ones(2)}, sharded / "other.safetensors")
        with pytest.raises(ModelError, match=rf"other.safetensors holds {key}, which no weight file has: merge it"):
            ModelSource.resolve(sharded)


def test_pickles_are_refused_and_never_opened(folder):
    weights = folder / "model.safetensors"
    for pickled in ("pytorch_model.bin", "weights.pt", "weights.pth"):
        weights = weights.rename(folder / pickled)
        with pytest.raises(ModelError, match=rf"{pickled}\) are refused.*save_pretrained"):
            ModelSource.resolve(folder)


def test_a_truncated_download_and_a_git_lfs_pointer(folder):
    weights = folder / "model.safetensors"
    source = ModelSource.resolve(folder)
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="not a complete safetensors"):
        family_of(source).static()
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        ModelSource.resolve(folder)


of_qwen = pytest.mark.parametrize("name", ["tiny-qwen3-vl"])


def store_quantized(folder, dtype, ending) -> None:
    """As the hub's FP8 and int8 checkpoints: matrices in 8 bits, and beside each its scale, under a name of its own."""
    with changed_tensors(folder) as tensors:
        for key in [key for key in tensors if key.endswith(ending) and tensors[key].ndim == 2]:
            scale = tensors[key].abs().max() / 100
            tensors[key] = (tensors[key] / scale).to(dtype)
            tensors[f"{key}_scale_inv"] = scale[None]


def test_a_config_that_names_a_quantization_is_refused():
    for part in (None, "text_config", "vision_config"):
        config, where = {"quantization_config": FP8}, rf"{part}\.quantization_config" if part else "quantization_config"
        with pytest.raises(ModelError, match=rf"'x' is quantized \({where} in config\.json: fp8.*{USE}"):
            refuse_quantized("x", {part: config} if part else config)
    refuse_quantized("none", {"quantization_config": None, "text_config": {"quantization_config": {}}})
    with pytest.raises(ModelError, match="an unnamed method"):
        refuse_quantized("x", {"quantization_config": {"bits": 4}})


@of_qwen
@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_a_vision_part_in_8_bits_is_refused_before_it_is_read(folder, dtype, monkeypatch):
    """Its config says nothing, as of some that were converted by hand."""
    store_quantized(folder, dtype, "mlp.linear_fc1.weight")
    read = count_reading(monkeypatch)
    with pytest.raises(ModelError, match=rf"visual\..*fc1\.weight is stored as [FIU]8.*{USE}"):
        family_of(ModelSource.resolve(folder)).load(FLOAT32)
    assert not [name for name in read if name.endswith("fc1.weight")]


@of_qwen
def test_a_language_part_in_8_bits_is_refused_and_its_vision_part_is_not(folder):
    store_quantized(folder, torch.float8_e4m3fn, "mlp.up_proj.weight")
    source = ModelSource.resolve(folder)
    family_of(source).load(FLOAT32)
    with pytest.raises(ModelError, match=rf"up_proj\.weight is stored as F8_E4M3.*{USE}"):
        load_language_model(source, FLOAT32)


def test_a_quantized_model_is_refused_and_from_the_hub_before_its_weights_are_downloaded(folder, fake_hub):
    with changed_json(folder / "config.json") as config:
        config["quantization_config"] = FP8
    fake_hub.folder = folder
    for model in (folder, "Qwen/Qwen3-VL-8B-Instruct-FP8"):
        with pytest.raises(ModelError, match=rf"{model}' is quantized.*{USE}"):
            ModelSource.resolve(model)
    assert set(fake_hub.downloaded) == {"config.json"}


def test_a_siglip_checkpoint_is_refused_too(siglip):
    family = family_of(ModelSource.resolve("tiny"))
    store_quantized(siglip, torch.int8, "head.mlp.fc1.weight")
    with pytest.raises(ModelError, match=r"head\.mlp\.fc1\.weight is stored as I8"):
        family.with_pooling_head(siglip)
    with changed_json(siglip / "config.json") as config:
        config["vision_config"]["quantization_config"] = FP8
    with pytest.raises(ModelError, match=r"vision_config\.quantization_config"):
        family.with_pooling_head(siglip)


TOWER = {name: "visual" if "qwen" in name else "vision_tower" for name in KINDS}


def test_a_folders_identity_is_its_content(folder, tmp_path):
    identity = ModelSource.resolve(folder).identity
    assert identity.startswith("folder:")
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    with changed_json(copy / "config.json") as config:
        config["transformers_version"] = "9"
    assert ModelSource.resolve(copy).identity == identity
    with changed_json(copy / "config.json") as config:
        config["vision_feature_layer"] = -2
    assert ModelSource.resolve(copy).identity != identity
    with changed_tensors(folder) as tensors:  # a fine-tune of the same shapes
        tensors["multi_modal_projector.linear_2.weight"] *= 1.001
    assert ModelSource.resolve(folder).identity != identity


every_family = pytest.mark.parametrize(("name", "tower"), TOWER.items())


def changed(folder, change, **options):
    """The hash of a folder's model after ``change`` of each (name, tensor)."""
    path = folder / "model.safetensors"
    save_file(dict(change(*item) for item in load_file(path).items()), path)
    return compute_tower_hash(ModelSource.resolve(folder, **options))


@every_family
def test_a_towers_hash_is_that_of_its_weights_and_in_the_family_generic_of_all_but_the_language_model(folder, tower):
    def renamed(name, tensor):  # names of other library versions, and another language model
        plain = name.removeprefix("model.")
        used = tower in name or "proj" in name or "newline" in name
        return (plain if "language_model" not in plain else name), tensor if used else -tensor

    def retrained(name, tensor):
        return name, -tensor if "language_model" in name or "lm_head" in name else tensor

    for options, another in (({"family": "generic", "gate": False}, retrained), ({}, renamed)):
        known = changed(folder, lambda name, tensor: (name, tensor), **options)
        assert known.startswith("blake2b-f16:") and len(known) == len("blake2b-f16:") + 32
        assert changed(folder, another, **options) == known
        names = [name for name in load_file(folder / "model.safetensors") if tower in name]
        last = max(name for name in names if not name.endswith("position_ids"))
        with changed_tensors(folder) as tensors:
            tensors[last] += 1
        assert compute_tower_hash(ModelSource.resolve(folder, **options)) != known


@every_family
def test_a_float16_copy_of_bfloat16_weights_has_the_same_hash_and_a_quantized_tower_none(folder, tower):
    coarse = changed(folder, lambda name, t: (name, t.to(torch.bfloat16)))
    assert changed(folder, lambda name, t: (name, t.to(torch.float16))) == coarse
    with pytest.raises(ModelError, match="is stored as F8_E4M3"):
        changed(folder, lambda name, t: (name, t.to(torch.float8_e4m3fn) if tower in name and t.ndim == 2 else t))
