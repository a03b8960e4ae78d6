"""Weights from disk into modules without memory: what is missing or of another shape is named."""

import re

import pytest
import torch
from torch import nn

from gstep.backbones import ModelSource, family_of
from gstep.backbones.runtime import check_loaded, rebuild_position_ids
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import FLOAT32, QWEN, STOCK
from tests.gstep.reading import changed_json, changed_tensors


def load(folder):
    return family_of(ModelSource.resolve(folder)).load(FLOAT32)


@pytest.mark.parametrize("name", STOCK)
def test_missing_weights_are_named(name, folder):
    end = "visual.blocks.1.attn.qkv.bias" if name in QWEN else "multi_modal_projector.linear_1.bias"
    with changed_tensors(folder) as tensors:
        (gone,) = [key for key in tensors if key.endswith(end)]
        del tensors[gone]
    with pytest.raises(ModelError, match=f"has no {re.escape(end)}"):
        load(folder)
    if name == "tiny":
        with changed_tensors(folder) as tensors:
            for key in [key for key in tensors if "vision_tower" in key]:
                del tensors[key]
        with pytest.raises(ModelError, match=r"vision_tower\.\S+ and \d+ more"):  # not all are named
            load(folder)


@pytest.mark.parametrize("name", QWEN)
def test_weights_of_another_shape_than_the_config_says_are_named(folder):
    with changed_json(folder / "config.json") as config:
        config["vision_config"]["out_hidden_size"] = 32
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
