"""The closed forms of the encoders' work, held to what PyTorch counts in towers that run."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gstep.backbones import BACKBONES, ModelSource, Runtime, family_of
from tests.gstep.backbones.encoders import STOCK, frames_for

EAGER = Runtime("cpu", torch.float32, "eager")  # whose products are plain ones: the counter does not know CPU's sdpa

# What decides the work of the published 7B and 8B models' towers.
LLAVA = {"vision_config": {}, "text_config": {"hidden_size": 3584}}
QWEN2_5 = {"vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}}
QWEN3 = {"vision_config": {"out_hidden_size": 4096}}


@pytest.mark.parametrize("model", STOCK)
def test_the_closed_form_is_what_a_tower_computes(model):
    source = ModelSource.resolve(model)
    frames = frames_for(source, 4)
    backbone = family_of(source).load(EAGER)
    with FlopCounterMode(display=False) as counter:
        backbone.encode(frames)
    assert family_of(source).flops(*frames.shape[:3]) == counter.get_total_flops() > 1e6


@pytest.mark.parametrize(
    ("model_type", "config", "frames", "tera"),
    [
        ("llava_onevision", LLAVA, (32, 384, 384), 21.33),  # SigLIP 20.54, the projector 0.79
        ("qwen2_5_vl", QWEN2_5, (32, 26 * 14, 46 * 14), 25.22),
        ("qwen3_vl", QWEN3, (32, 22 * 16, 40 * 16), 14.30),
    ],
)
def test_the_published_models_take_what_was_counted(model_type, config, frames, tera):
    family = BACKBONES[model_type](SimpleNamespace(config=config))
    assert round(family.flops(*frames) / 1e12, 2) == tera
