"""SigLIP's pooling head beside LLaVA-OneVision: the stock head's own numbers, and heads that do not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import interpolate, scaled_dot_product_attention
from transformers import LlavaOnevisionForConditionalGeneration, SiglipVisionConfig, SiglipVisionModel

from gstep.backbones import family_of
from gstep.checkpoints import tiny
from gstep.errors import ModelError
from gstep.evidence import POOLING_HEAD
from tests.gstep.backbones.encoders import FLOAT32, frames_for
from tests.gstep.reading import changed_json, changed_tensors

ASKED = {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}


@pytest.fixture
def frames(source):
    return frames_for(source, 5, (24, 24))


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


def test_another_head_on_another_node_is_refused(source, siglip):
    resolved = family_of(source).with_pooling_head(siglip)
    with changed_tensors(siglip) as tensors:
        tensors["vision_model.head.probe"] = torch.zeros(1, 1, 64)
    with pytest.raises(ModelError, match="another pooling head on this node"):
        family_of(resolved).load(FLOAT32)


def test_a_config_that_does_not_fit_the_head_is_refused(source, siglip):
    with changed_json(siglip / "config.json") as config:
        config["vision_config"]["intermediate_size"] = 100
    with pytest.raises(ModelError, match=r"config\.json does not fit the pooling head"):
        family_of(family_of(source).with_pooling_head(siglip)).load(FLOAT32)
