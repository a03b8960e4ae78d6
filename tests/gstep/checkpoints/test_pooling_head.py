"""The pooling head of a SigLIP checkpoint as files: its identity, what is read, and checkpoints that do not fit."""

import json
import shutil

import pytest
import torch
from transformers import SiglipVisionConfig

from gstep.backbones import family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.source import DEFAULTS
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import FLOAT32
from tests.gstep.reading import changed_tensors, count_reading


@pytest.mark.parametrize(("prefix", "others"), [("vision_model.", ("text_model.head.weight", "logit_scale")), ("", ())])
def test_every_layout_gives_the_same_head_and_identity(source, siglip, prefix, others):
    def identity(model):
        return family_of(source).with_pooling_head(model).pooling_head.identity

    with changed_tensors(siglip) as tensors:
        for key in list(tensors):
            tensors[f"{prefix}{key.removeprefix('vision_model.')}"] = tensors.pop(key)
        tensors.update({key: torch.zeros(3) for key in others})
    assert identity(siglip) == identity("tiny")
    with changed_tensors(siglip) as tensors:  # a head of another training
        next(tensor for name, tensor in tensors.items() if name.endswith("head.mlp.fc2.bias"))[-1] += 1e-3
    assert identity(siglip) != identity("tiny")


def test_what_no_tensor_shows_is_part_of_the_identity(source, siglip):
    """Other numbers of heads give the same shapes and another attention; a default may be said or left out."""
    stock = SiglipVisionConfig()
    assert {name: getattr(stock, name) for name in DEFAULTS} == DEFAULTS
    config = json.loads((siglip / "config.json").read_text())

    def identity(**settings):
        vision = {k: v for k, v in (config["vision_config"] | settings).items() if v is not None}
        (siglip / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
        return family_of(source).with_pooling_head(siglip).pooling_head.identity

    usual = identity()
    assert identity(layer_norm_eps=1e-6) == identity(layer_norm_eps=None) == usual
    heads = config["vision_config"]["num_attention_heads"]
    assert len({usual, identity(num_attention_heads=2 * heads), identity(layer_norm_eps=1e-3)}) == 3


def test_only_the_head_is_read_and_only_where_it_is_asked_for(source, siglip, monkeypatch):
    with changed_tensors(siglip) as tensors:
        wanted = {name for name in tensors if name.startswith("vision_model.")}
        tensors["vision_model.encoder.big"] = torch.zeros(9, 9)
    read = count_reading(monkeypatch)
    resolved = family_of(source).with_pooling_head(siglip)
    assert set(read) == wanted
    assert family_of(resolved).load(FLOAT32).pooling_head is not None
    assert family_of(source).load(FLOAT32).pooling_head is None


def test_checkpoints_without_a_head_that_fits_are_refused(source, siglip):
    def refused(match):
        with pytest.raises(ModelError, match=match):
            family_of(source).with_pooling_head(siglip)

    with changed_tensors(siglip) as tensors:
        del tensors["vision_model.head.probe"]
    refused(r"has no head\.probe: name a SigLIP checkpoint with its pooling head")
    with changed_tensors(siglip) as tensors:
        tensors["vision_model.head.probe"] = torch.zeros(1, 1, 96)
    refused("96 channels wide, the vision tower 64: name the SigLIP checkpoint")
    (siglip / "config.json").write_text(json.dumps({"model_type": "clip"}))
    refused("not a SigLIP checkpoint .*'clip'.*google/siglip-so400m-patch14-384")
    shutil.rmtree(siglip)
    refused("is no folder on this machine")


def test_the_tiny_head_is_the_same_everywhere(source):
    assert tiny.compute_tiny_identity("tiny-siglip") == "tiny-siglip:2-187f7aaff2fc"
    head = family_of(source).with_pooling_head("tiny").pooling_head
    assert head.identity == "siglip-head:7b963bec5b8dd2c515fa759670345771"
