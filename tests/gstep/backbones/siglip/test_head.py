"""SigLIP's pooling head beside LLaVA-OneVision: the stock head's own numbers, and checkpoints that do not fit."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate, scaled_dot_product_attention
from transformers import LlavaOnevisionForConditionalGeneration, SiglipVisionConfig, SiglipVisionModel

from gstep.backbones import ModelSource, Runtime, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.pooling_head import DEFAULTS
from gstep.errors import ModelError
from gstep.evidence import LAST_LAYER, POOLING_HEAD
from tests.gstep.reading import count_reading

FLOAT32 = Runtime("cpu", torch.float32, "sdpa")
ASKED = {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))


@pytest.fixture
def source():
    return ModelSource.resolve("tiny")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(tiny.build("tiny-siglip"), tmp_path / "siglip"))


@pytest.fixture(scope="module")
def frames():
    blocks = np.random.default_rng(0).integers(0, 256, (5, 24, 24, 3), dtype=np.uint8)
    return torch.from_numpy(blocks.repeat(16, axis=1).repeat(16, axis=2))


@torch.no_grad()
def stock_head(source, frames):
    """The stock head's output [T,C] on the stock tower's, and its attention worked out head by head, [T,196]."""
    folder, _ = source.pretrained()
    tower = LlavaOnevisionForConditionalGeneration.from_pretrained(folder).model.vision_tower
    pixels = family_of(source).preprocessor().normalise(frames, "cpu", torch.float32)
    features = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states[-1]
    config = json.loads((tiny.build("tiny-siglip") / "config.json").read_text())["vision_config"]
    tensors = load_file(tiny.build("tiny-siglip") / "model.safetensors")
    stock = SiglipVisionModel(SiglipVisionConfig(**config)).eval()
    _, unexpected = stock.load_state_dict(
        {k.removeprefix("vision_model."): v for k, v in tensors.items() if k.startswith("vision_model.")}, strict=False
    )
    assert not unexpected
    normed_TSC = stock.post_layernorm(features)
    attention, n_heads = stock.head.attention, config["num_attention_heads"]
    weight_q, weight_k, _ = attention.in_proj_weight.chunk(3)
    bias_q, bias_k, _ = attention.in_proj_bias.chunk(3)
    query_HE = (stock.head.probe[0, 0] @ weight_q.T + bias_q).view(n_heads, -1)
    key_TSHE = (normed_TSC @ weight_k.T + bias_k).unflatten(-1, (n_heads, -1))
    # Attention as what sdpa makes of the unit vectors as values.
    one_hot = torch.eye(normed_TSC.shape[1]).expand(len(frames), n_heads, -1, -1)
    query = query_HE[None, :, None].expand(len(frames), -1, -1, -1)
    weights_TS = scaled_dot_product_attention(query, key_TSHE.transpose(1, 2), one_hot).mean(dim=(1, 2))
    pooled = interpolate(weights_TS.view(-1, 1, 27, 27), (14, 14), mode="bilinear").flatten(1)
    return stock.head(normed_TSC), pooled


@pytest.mark.parametrize("frame_batch", [32, 2])
def test_feature_and_attention_equal_the_stock_head(source, frames, frame_batch):
    feature_TC, attention_TN = stock_head(source, frames)
    backbone = family_of(family_of(source).with_pooling_head("tiny")).load(FLOAT32, frame_batch=frame_batch)
    visual = backbone.encode(frames, ASKED)
    assert visual.evidence["token_attention"].shape == (5, 196) and visual.evidence["frame_feature"].shape == (5, 64)
    assert attention_TN.std() > 0.1 * attention_TN.mean()
    torch.testing.assert_close(visual.evidence["token_attention"], attention_TN, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(visual.evidence["frame_feature"], feature_TC, rtol=1e-5, atol=1e-5)
    assert torch.equal(visual.tokens, family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames).tokens)


def test_one_name_from_two_places_is_two_things(source, frames):
    backbone = family_of(family_of(source).with_pooling_head("tiny")).load(Runtime("cpu", torch.bfloat16, "sdpa"))
    probe = backbone.encode(frames, ASKED).evidence
    mixed = backbone.encode(frames, {**ASKED, "token_attention": LAST_LAYER}).evidence
    assert torch.equal(probe["frame_feature"], mixed["frame_feature"])
    assert probe["token_attention"].dtype == torch.float32
    assert len(probe["token_attention"].unique()) > 0.9 * 5 * 196  # 16 bits would make ties of neighbours
    assert not torch.allclose(probe["token_attention"], mixed["token_attention"])


def rename_whole_model(tensors):
    return {**tensors, "text_model.head.weight": torch.zeros(3, 3), "logit_scale": torch.zeros(1)}


def rename_without_vision_model(tensors):
    return {key.removeprefix("vision_model."): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize("rename", [rename_whole_model, rename_without_vision_model])
def test_every_layout_gives_the_same_head_and_identity(source, folder, rename):
    save_file(rename(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    assert (
        family_of(source).with_pooling_head(folder).pooling_head.identity
        == family_of(source).with_pooling_head("tiny").pooling_head.identity
    )


def test_a_head_of_another_training_has_another_identity(source, folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_model.head.mlp.fc2.bias"][-1] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    assert (
        family_of(source).with_pooling_head(folder).pooling_head.identity
        != family_of(source).with_pooling_head("tiny").pooling_head.identity
    )


def test_what_no_tensor_shows_is_part_of_the_identity(source, folder):
    """Other numbers of heads give the same shapes and another attention; a default may be said or left out."""
    stock = SiglipVisionConfig()
    assert {name: getattr(stock, name) for name in DEFAULTS} == DEFAULTS
    config = json.loads((folder / "config.json").read_text())

    def identity(**settings):
        vision = {k: v for k, v in (config["vision_config"] | settings).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
        return family_of(source).with_pooling_head(folder).pooling_head.identity

    usual = identity()
    assert identity(layer_norm_eps=1e-6) == identity(layer_norm_eps=None) == usual
    heads = config["vision_config"]["num_attention_heads"]
    assert len({usual, identity(num_attention_heads=2 * heads), identity(layer_norm_eps=1e-3)}) == 3


def test_only_the_head_is_read_and_only_where_it_is_asked_for(source, folder, monkeypatch):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "vision_model.encoder.big": torch.zeros(9, 9)}, folder / "model.safetensors")
    read = count_reading(monkeypatch)
    resolved = family_of(source).with_pooling_head(folder)
    assert set(read) == {name for name in tensors if name.startswith("vision_model.")}
    assert family_of(resolved).load(FLOAT32).pooling_head is not None
    assert family_of(source).load(FLOAT32).pooling_head is None


def test_checkpoints_without_a_head_that_fits_are_refused(source, folder):
    def refused(match):
        with pytest.raises(ModelError, match=match):
            family_of(source).with_pooling_head(folder)

    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "probe" not in k}, folder / "model.safetensors")
    refused(r"has no head\.probe: name a SigLIP checkpoint with its pooling head")
    save_file({**tensors, "vision_model.head.probe": torch.zeros(1, 1, 96)}, folder / "model.safetensors")
    refused("96 channels wide, the vision tower 64: name the SigLIP checkpoint")
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
    refused("no SigLIP checkpoint .*'clip'.*google/siglip-so400m-patch14-384")
    shutil.rmtree(folder)
    refused("is no folder on this machine")


def test_another_head_on_another_node_is_refused(source, folder):
    resolved = family_of(source).with_pooling_head(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "vision_model.head.probe": torch.zeros(1, 1, 64)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match="another pooling head on this node"):
        family_of(resolved).load(FLOAT32)


def test_a_config_that_does_not_fit_the_head_is_refused(source, folder):
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["intermediate_size"] = 100
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"config\.json does not fit the pooling head"):
        family_of(family_of(source).with_pooling_head(folder)).load(FLOAT32)


def test_who_needs_a_head_is_told_to_name_one(source, frames):
    family_of(family_of(source).with_pooling_head("tiny")).check_evidence(ASKED)
    for refuse in (
        lambda: family_of(source).check_evidence(ASKED),
        lambda: family_of(source).load(FLOAT32).encode(frames, ASKED),
    ):
        with pytest.raises(ModelError, match=r"frame_feature, token_attention from SigLIP's .* --siglip"):
            refuse()
    for model in ("tiny-qwen2-5-vl", "tiny-qwen3-vl"):
        with pytest.raises(ModelError, match="for LLaVA-OneVision"):
            family_of(ModelSource.resolve(model)).with_pooling_head("tiny")


def test_the_tiny_head_is_the_same_everywhere(source):
    assert tiny.identity("tiny-siglip") == "tiny-siglip:1-a1343233e81a"
    assert (
        family_of(source).with_pooling_head("tiny").pooling_head.identity
        == "siglip-head:e1f5f934d1885b747a2ddf87d9be4931"
    )
