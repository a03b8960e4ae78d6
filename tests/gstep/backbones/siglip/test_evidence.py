"""Evidence of a SigLIP tower, each kind against what the stock tower and the stock head give."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import interpolate
from transformers import LlavaOnevisionForConditionalGeneration, SiglipVisionConfig, SiglipVisionModel

from gstep.backbones import Runtime, family_of
from gstep.checkpoints import tiny
from gstep.evidence import LAST_LAYER, POOLING_HEAD, SINGLE_PATCHES
from tests.gstep.backbones.encoders import AT_LAST, FLOAT32, frames_for

ASKED = {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}


@pytest.fixture
def frames(source):
    return frames_for(source, 3, (24, 24))


@torch.no_grad()
def stock_last_layer(source, frames):
    """Attention [T,196] and keys [T,196,E] from the weights that the eager tower returns."""
    stock, keys = (
        LlavaOnevisionForConditionalGeneration.from_pretrained(source.pretrained()[0], attn_implementation="eager"),
        [],
    )
    tower = stock.model.vision_tower
    layer = tower.encoder.layers[-1].self_attn
    handle = layer.k_proj.register_forward_hook(lambda module, args, output: keys.append(output))
    pixels = family_of(source).preprocessor().normalise(frames, "cpu", torch.float32)
    weights_THSS = tower(pixels, output_attentions=True, return_dict=True).attentions[-1]
    handle.remove()
    assert weights_THSS.shape[1:] == (2, 729, 729)
    key_TSE = keys[0].view(len(frames), 729, 2, -1).mean(dim=2)

    def pooled(values_TSE):
        grid = values_TSE.reshape(len(frames), 27, 27, -1).permute(0, 3, 1, 2)
        return interpolate(grid, (14, 14), mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)

    return pooled(weights_THSS.mean(dim=(1, 2))).squeeze(2), pooled(key_TSE)


@pytest.mark.parametrize("frame_batch", [32, 3, 1])
def test_last_layer_of_llava_onevision_equals_eager_attention_weights(source, frame_batch):
    frames = frames_for(source)
    attention_TN, key_TNE = stock_last_layer(source, frames)
    evidence = family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames, AT_LAST).evidence
    assert evidence["token_attention"].shape == (5, 196) and evidence["token_key"].shape == (5, 196, 32)
    assert attention_TN.std() > 0.1 * attention_TN.mean()  # of flat attention any mistake would look right
    torch.testing.assert_close(evidence["token_attention"], attention_TN, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(evidence["token_key"], key_TNE, rtol=0, atol=1e-5)


def test_one_name_from_two_places_is_two_things(source, frames):
    backbone = family_of(family_of(source).with_pooling_head("tiny")).load(Runtime("cpu", torch.bfloat16, "sdpa"))
    probe = backbone.encode(frames, ASKED).evidence
    mixed = backbone.encode(frames, {**ASKED, "token_attention": LAST_LAYER}).evidence
    assert torch.equal(probe["frame_feature"], mixed["frame_feature"])
    assert probe["token_attention"].dtype == torch.float32
    assert len(probe["token_attention"].unique()) > 0.9 * 3 * 196  # 16 bits would make ties of neighbours
    assert not torch.allclose(probe["token_attention"], mixed["token_attention"])


@torch.no_grad()
def test_a_patch_is_what_the_stock_head_makes_of_it_alone(source, frames):
    backbone = family_of(family_of(source).with_pooling_head("tiny")).load(FLOAT32)
    embedded_TNC = backbone.encode(frames, {"image_embedding": SINGLE_PATCHES}).evidence["image_embedding"]
    assert embedded_TNC.shape == (3, 196, 64) and embedded_TNC.dtype == torch.float32
    tower = LlavaOnevisionForConditionalGeneration.from_pretrained(source.pretrained()[0]).model.vision_tower
    pixels = family_of(source).preprocessor().normalise(frames, "cpu", torch.float32)
    features_TSC = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states[-1]
    config = json.loads((tiny.build("tiny-siglip") / "config.json").read_text())["vision_config"]
    stock = SiglipVisionModel(SiglipVisionConfig(**config)).eval()
    tensors = load_file(tiny.build("tiny-siglip") / "model.safetensors")
    stock.load_state_dict({name.removeprefix("vision_model."): value for name, value in tensors.items()}, strict=False)
    alone = stock.head(stock.post_layernorm(features_TSC).reshape(-1, 1, 64))  # as pictures of one patch
    grid_TC = alone.view(3, 27, 27, 64).permute(0, 3, 1, 2)
    expected = interpolate(grid_TC, (14, 14), mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)
    assert expected.std(dim=1).mean() > 0.1  # of equal patches any mistake would look right
    torch.testing.assert_close(embedded_TNC, expected, rtol=1e-4, atol=1e-5)


def test_asking_changes_no_token_and_no_frame_another(source, frames):
    asked = {"image_embedding": SINGLE_PATCHES, "frame_feature": POOLING_HEAD}
    runtime = Runtime("cpu", torch.bfloat16, "sdpa")
    visual = family_of(family_of(source).with_pooling_head("tiny")).load(runtime, frame_batch=2).encode(frames, asked)
    assert torch.equal(visual.tokens, family_of(source).load(runtime, frame_batch=2).encode(frames).tokens)
    assert visual.evidence["image_embedding"].dtype == torch.float32 and visual.evidence["frame_feature"].ndim == 2
    assert len(visual.evidence["image_embedding"].flatten(0, 1).unique(dim=0)) == 3 * 196
