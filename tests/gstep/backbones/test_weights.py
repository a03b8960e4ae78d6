"""Weights from disk into modules without memory: what is missing or of another shape is named."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gstep.backbones import ModelSource, family_of
from gstep.backbones.weights import check_loaded, rebuild_position_ids
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import FLOAT32, QWEN, STOCK


def load(folder):
    return family_of(ModelSource.resolve(folder)).load(FLOAT32)


@pytest.mark.parametrize("name", STOCK)
def test_missing_weights_are_named(name, folder):
    tensors = load_file(folder / "model.safetensors")
    end = "multi_modal_projector.linear_1.bias" if name == "tiny" else "visual.blocks.1.attn.qkv.bias"
    (gone,) = [key for key in tensors if key.endswith(end)]
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"has no {re.escape(end)}"):
        load(folder)


@pytest.mark.parametrize("name", ["tiny"])
def test_many_missing_weights_are_not_all_named(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({key: t for key, t in tensors.items() if "vision_tower" not in key}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"vision_tower\.\S+ and \d+ more"):
        load(folder)


@pytest.mark.parametrize("name", ["tiny"])
def test_weights_of_another_shape_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["image_newline"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"image_newline \[32\] instead of \[64\]"):
        load(folder)


@pytest.mark.parametrize("name", QWEN)
def test_weights_of_another_shape_than_the_config_says_are_named(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["out_hidden_size"] = 32
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"does not fit the weights: visual\.\S+ \[64, 256\] instead of \[32, 256\]"):
        load(folder)


class Placed(nn.Module):
    """A weight, and position ids that are computed, never stored."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("position_ids", torch.arange(5)[None], persistent=False)


def test_position_ids_are_made_where_they_were_never_stored():
    with torch.device("meta"):
        module = Placed()
    with pytest.raises(AssertionError, match=r"position_ids.*weight"):
        check_loaded(module)
    with pytest.raises(AssertionError, match="weight"):
        rebuild_position_ids(module, "cpu")
    module.weight = nn.Parameter(torch.zeros(2))
    rebuild_position_ids(module, "cpu")
    assert module.position_ids.tolist() == [[0, 1, 2, 3, 4]]
