"""What single families have of their own: quantized language models, layouts of keys, settings; and a new family."""

import json
import os
import re
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from gstep.backbones import ModelSource, SampledVideo, family_of
from gstep.errors import ModelError
from gstep.language import load_language_model, prompt_builder
from tests.builders.clips import sample
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, QWEN, frames_for, settings_file, stock_features
from tests.gstep.quantized import CONFIGS, quantize
from tests.gstep.reading import changed_json, changed_tensors
from tests.interpreter import run_python
from tests.paths import ROOT, python_path


@pytest.mark.parametrize(("name", "method"), [*(("tiny", method) for method in CONFIGS), ("tiny-qwen3-vl", "fp8")])
def test_a_quantized_checkpoint_gives_the_tokens_of_its_plain_tower_and_no_answers(name, method, tmp_path):
    source = ModelSource.resolve(quantize(name, method, tmp_path / "q"), quantized=True)
    frames = frames_for(source, 2)
    assert family_of(source).check_tensors()
    ours, plain = (family_of(s).load(FLOAT32).encode(frames).tokens for s in (source, ModelSource.resolve(name)))
    assert torch.equal(ours, plain) and source.identity != ModelSource.resolve(name).identity
    with pytest.raises(ModelError, match="is quantized"):
        load_language_model(source, FLOAT32)
    with pytest.raises(ModelError, match="is quantized"):
        ModelSource.resolve(source.name)


@pytest.mark.parametrize("name", ["tiny-qwen3-5"])
def test_a_tower_whose_weights_have_scales_is_refused(folder):
    """Also where the weights themselves are plain numbers."""
    with changed_tensors(folder) as tensors:
        tensors["model.visual.blocks.0.attn.qkv.weight_scale"] = torch.ones(1)
    family = family_of(ModelSource.resolve(folder))
    for call in (lambda: family.load(FLOAT32), family.check_tensors):
        with pytest.raises(ModelError, match=r"blocks\.0\.attn\.qkv\.weight is stored as a product with .*_scale"):
            call()


def test_what_is_missing_of_a_vision_part_is_told_by_names_alone(folder):
    assert family_of(ModelSource.resolve(folder)).check_tensors()
    with changed_tensors(folder) as tensors:
        gone = next(key for key in tensors if "visual" in key or "vision" in key)
        del tensors[gone]
    with pytest.raises(ModelError, match="download the whole checkpoint"):
        family_of(ModelSource.resolve(folder)).check_tensors()


@pytest.mark.parametrize("name", ["tiny-qwen3-5"])
def test_qwen4_is_encoded_by_the_tower_of_qwen3_5_and_not_asked(folder):
    with changed_json(folder / "config.json") as config:
        config.update({"model_type": "qwen4_exp", "text_config": {"model_type": "qwen4_exp_text", "hidden_size": 64}})
        config["vision_config"]["model_type"] = "qwen4_exp"
    source = ModelSource.resolve(folder)
    frames = frames_for(source, 3)
    ours, others = (family_of(s).load(FLOAT32).encode(frames) for s in (source, ModelSource.resolve("tiny-qwen3-5")))
    assert torch.equal(ours.tokens, others.tokens) and not ours.deepstack
    for ask in (lambda: prompt_builder(source), lambda: load_language_model(source, FLOAT32)):
        with pytest.raises(ModelError, match=r"qwen4_exp cannot answer questions, .*: prune with --family generic"):
            ask()


@pytest.mark.parametrize("name", ["tiny-qwen3-5"])
def test_a_tower_of_qwen3_5_has_no_levels_whatever_its_file_lists(folder):
    with changed_json(folder / "config.json") as config:
        assert config["vision_config"]["deepstack_visual_indexes"] == []  # as on the hub
        config["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    family = family_of(ModelSource.resolve(folder))
    assert family.static().deepstack_levels == 0
    assert family.load(FLOAT32).encode(frames_for(family.source, 2)).deepstack == ()


LLAVA, INTERNVL = "tiny", "tiny-internvl"
FAST, PIXELS = "LlavaOnevisionVideoProcessor", "video_preprocessor_config.json"


@pytest.mark.parametrize(
    ("name", "filename", "setting", "value", "words"),
    [
        (LLAVA, PIXELS, "size", {"height": 336, "width": 336}, "size"),
        (LLAVA, PIXELS, "do_center_crop", True, "do_center_crop"),
        (LLAVA, PIXELS, "video_processor_type", "Some", "Some"),
        (LLAVA, "config.json", "vision_feature_layer", [-2, -1], r"vision_feature_layer .* \[-2, -1\]; only a single"),
        (INTERNVL, PIXELS, "size", {"height": 384, "width": 384}, "384 x 384, does not fit the vision tower of 224"),
        (INTERNVL, PIXELS, "video_processor_type", "Other", "'Other', which is not implemented"),
        (INTERNVL, "config.json", "vision_feature_layer", -2, "vision_feature_layer=-2"),
        *((name, None, "patch_size", 7, "patch_size=7 does not fit") for name in QWEN),
        *((name, None, "merge_size", 4, "merge_size=4 does not fit") for name in QWEN),
        *((name, None, "video_processor_type", FAST, FAST) for name in QWEN),
    ],
)
def test_settings_that_would_change_the_pixels_are_refused(name, folder, filename, setting, value, words):
    with changed_json(folder / filename if filename else settings_file(folder)) as content:
        content[setting] = value
    with pytest.raises(ModelError, match=words):
        family_of(ModelSource.resolve(folder)).preprocessor()


SECTION = (ROOT / "gstep/README.md").read_text().split("## Add a model family\n")[1].split("\n## ")[0]
EXAMPLE = ROOT / "gstep/examples/family"
SIDE, PATCH, HIDDEN = 32, 8, 6
USE = """
import sys
import torch
import pipeline
from gstep.backbones import ModelSource, choose_runtime, family_of

model, clip, out = sys.argv[1:]
video = pipeline.encode_video(clip, model=model, num_frames=4, retention_ratio=0.25)
family = family_of(ModelSource.resolve(model))
frames = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)
tokens = family.load(choose_runtime("cpu", "float32", "auto")).encode(frames).tokens
torch.save({"frames": frames, "tokens": tokens, "kept": video.kept().shape, "n": len(video.pruned.tokens)}, out)
assert family.token_bytes(4, 32, 32) == 2 * 4 * 16 * 6 and family.flops(1, 32, 32) == 2 * 16 * 192 * 6
from gstep.language import BUILDERS, PromptBuilder
assert issubclass(BUILDERS["patches"], PromptBuilder) and not BUILDERS["patches"].__abstractmethods__
"""


def test_two_files_and_a_line_make_a_family(tmp_path):
    """In a copy of the checkout; tokens are those of plain loops in numpy."""
    copy = tmp_path / "copy"
    for room in ("gstep", "pipeline"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(EXAMPLE / "backbone.py", copy / "gstep/backbones/patches.py")
    shutil.copy(EXAMPLE / "prompts.py", copy / "gstep/language/patches.py")
    (line,) = re.findall(r'`("patches": Family.*?,)`', SECTION, re.DOTALL)
    table = copy / "gstep/families.py"
    table.write_text(table.read_text().replace("] = {\n", f"] = {{\n    {line}\n", 1))
    model = tmp_path / "model"
    model.mkdir()
    matrix = torch.randn(HIDDEN, 3 * PATCH**2, generator=torch.Generator().manual_seed(0))
    save_file({"matrix": matrix}, model / "model.safetensors")
    config = {"model_type": "patches", "patch_size": PATCH, "hidden_size": HIDDEN}
    (model / "config.json").write_text(json.dumps(config))
    pixels = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (model / "preprocessor_config.json").write_text(json.dumps(pixels))
    script = tmp_path / "use.py"
    script.write_text(USE)  # a plain script: encode_video needs no main guard
    given = model, sample("bikes.mp4"), tmp_path / "made.pt"
    done = run_python(script, *given, cwd=copy, env={**os.environ, "PYTHONPATH": python_path(copy)})
    assert done.returncode == 0, done.stderr
    made = torch.load(tmp_path / "made.pt", weights_only=True)
    assert (tuple(made["kept"]), made["n"]) == ((4, 4, 4), 16)
    pixels = (made["frames"].double().numpy() / 255 - 0.5) / 0.5
    for t, row, column in np.ndindex(2, 4, 4):
        patch = pixels[t, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        wanted = matrix.double().numpy() @ patch.transpose(2, 0, 1).reshape(-1)
        assert np.allclose(made["tokens"][t, 4 * row + column].numpy(), wanted, atol=1e-4)


@pytest.fixture
def frames(source):
    return frames_for(source, 2, (24, 24))


def test_the_newline_and_the_grid_are_the_stock_models(source):
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(source.pretrained()[0], dtype=torch.bfloat16)
    backbone = family_of(source).load(BFLOAT16)
    assert torch.equal(backbone.newline(), stock.model.image_newline)
    assert torch.equal(family_of(source).static().newline.to(torch.bfloat16), backbone.newline())
    video = SampledVideo(384, 384, [0.0, 0.5, 1.0, 1.5], None, 30.0, 60)
    assert backbone.model_extra(video) == {"grid": [14, 14]}


def test_every_layout_of_keys_gives_the_same_tokens(source, folder, frames):
    """Those of the hub and those in memory, with the prefixes of several library versions."""
    (expected,) = stock_features(source, frames, torch.float32, at_once=1)
    stored = load_file(folder / "model.safetensors")
    for model, vision_model in product(("", "model."), ("vision_model.", "")):
        tower = f"vision_tower.{vision_model}"
        renamed = {f"{model}{k.replace('vision_tower.vision_model.', tower)}": v for k, v in stored.items()}
        save_file(renamed, folder / "model.safetensors")
        family = family_of(ModelSource.resolve(folder))
        assert torch.equal(family.load(FLOAT32).encode(frames).tokens.flatten(0, 1), expected)
        assert torch.equal(family.static().newline, family_of(source).static().newline)


@pytest.mark.parametrize(("part", "shard_size"), [("whole", "200KB"), ("without the head", "1GB")])
def test_what_save_pretrained_writes_loads(source, folder, frames, part, shard_size):
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (stock if part == "whole" else stock.model).save_pretrained(folder, max_shard_size=shard_size)
    other = ModelSource.resolve(folder)
    assert (len(other.weight_files) > 1) == (shard_size == "200KB")
    tokens = family_of(other).load(FLOAT32).encode(frames).tokens
    assert torch.equal(tokens.flatten(0, 1), *stock_features(source, frames, torch.float32, at_once=1))


def test_what_a_preprocessor_file_leaves_out_is_the_class_default(folder):
    (folder / PIXELS).write_text(json.dumps({"image_mean": None}))
    preprocessor = family_of(ModelSource.resolve(folder)).preprocessor()
    assert preprocessor.image_mean == (0.48145466, 0.4578275, 0.40821073)
    assert preprocessor.target_size(32, 1080, 1920) == (384, 384)


def test_a_checkpoint_without_newline_is_refused(folder):
    with changed_tensors(folder) as tensors:
        del tensors["image_newline"]
    with pytest.raises(ModelError, match="image_newline"):
        family_of(ModelSource.resolve(folder)).static()


def test_the_layer_is_the_one_that_the_tokens_come_from():
    backbone = family_of(ModelSource.resolve("tiny")).load(FLOAT32)
    layers = backbone.model.vision_tower.encoder.layers
    for index, place in ((-1, 1), (2, 1), (-2, 0), (1, 0)):
        backbone.model.config.vision_feature_layer = index
        assert backbone.layers[-1] is layers[place]
