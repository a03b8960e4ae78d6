"""LLaVA-OneVision's own: its newline, every layout of keys on disk, settings of frames that do not fit."""

import json
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from gstep.backbones import ModelSource, SampledVideo, family_of
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, frames_for, stock_features
from tests.gstep.reading import changed_tensors


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


def test_a_checkpoint_without_newline_is_refused(folder):
    with changed_tensors(folder) as tensors:
        del tensors["image_newline"]
    with pytest.raises(ModelError, match="image_newline"):
        family_of(ModelSource.resolve(folder)).static()


def test_what_a_preprocessor_file_leaves_out_is_the_class_default(folder):
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"image_mean": None}))
    preprocessor = family_of(ModelSource.resolve(folder)).preprocessor()
    assert preprocessor.image_mean == (0.48145466, 0.4578275, 0.40821073)
    assert preprocessor.target_size(32, 1080, 1920) == (384, 384)


def test_the_layer_is_the_one_that_the_tokens_come_from():
    backbone = family_of(ModelSource.resolve("tiny")).load(FLOAT32)
    layers = backbone.model.vision_tower.encoder.layers
    for index, place in ((-1, 1), (2, 1), (-2, 0), (1, 0)):
        backbone.model.config.vision_feature_layer = index
        assert backbone.layers[-1] is layers[place]
