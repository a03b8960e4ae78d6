"""What an encoder gives besides tokens equals what the stock tower's own eager attention says, whatever runs it."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from transformers import (
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)
from transformers.vision_utils import get_vision_window_index

from gstep.backbones import ModelSource, Runtime, family_of
from gstep.errors import ModelError
from gstep.evidence import LAST_LAYER, MERGED_QUERIES

FLOAT32 = Runtime("cpu", torch.float32, "sdpa")
BFLOAT16 = Runtime("cpu", torch.bfloat16, "sdpa")
STOCK = {
    "tiny": LlavaOnevisionForConditionalGeneration,
    "tiny-qwen2-5-vl": Qwen2_5_VLForConditionalGeneration,
    "tiny-qwen3-vl": Qwen3VLForConditionalGeneration,
}
QWEN = ["tiny-qwen2-5-vl", "tiny-qwen3-vl"]
AT_LAST = {"token_attention": LAST_LAYER, "token_key": LAST_LAYER}
MERGED = {"token_attention": MERGED_QUERIES}


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))


def asked_of(model):
    return AT_LAST if model == "tiny" else MERGED


def frames_for(source, n_frames=5):
    """[T,h,w,3] uint8: noise that is coarse enough for patches to differ in brightness; 9 x 13 tokens on Qwen."""
    blocks = np.random.default_rng(0).integers(0, 256, (n_frames, 18, 26, 3), dtype=np.uint8)
    frames = blocks.repeat(16, axis=1).repeat(16, axis=2)
    preprocessor = family_of(source).preprocessor()
    return preprocessor.resize(frames, preprocessor.target_size(*frames.shape[:3]))


def stock_model(source):
    return STOCK[source.name].from_pretrained(source.pretrained()[0], attn_implementation="eager")


def hooks_of(backbone):
    """Of our kind: transformers leaves forward hooks of its own in towers whose hidden states were asked for."""
    return sum(len(module._forward_pre_hooks) for module in backbone.model.modules())


@torch.no_grad()
def stock_last_layer(source, frames):
    """Attention [T,196] and keys [T,196,E] from the weights that the eager tower returns."""
    stock, keys = stock_model(source), []
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


@torch.no_grad()
def stock_merged_queries(source, frames, monkeypatch):
    """[T,N] in float64 from the queries and keys that the eager tower's last block attends with."""
    tower = stock_model(source).model.visual
    module, seen = sys.modules[type(tower).__module__], []
    eager = module.eager_attention_forward

    def recording(layer, query, key, *args, **kwargs):
        if layer is tower.blocks[-1].attn:
            seen.append((query[0].double(), key[0].double()))
        return eager(layer, query, key, *args, **kwargs)

    monkeypatch.setattr(module, "eager_attention_forward", recording)
    preprocessor = family_of(source).preprocessor()
    grid = preprocessor.grid_thw(*frames.shape[:3])
    tower(preprocessor.patches(frames, "cpu", torch.float32), grid_thw=torch.tensor([grid]))
    assert len(seen) == grid[0]  # each temporal patch by itself
    place = torch.arange(grid[1] * grid[2] // 4)
    if source.name == "tiny-qwen2-5-vl":
        vision = tower.config
        place, _ = get_vision_window_index(torch.tensor([[1, *grid[1:]]]), 2, vision.window_size, vision.patch_size)
        assert not torch.equal(place, place.sort().values)  # the trap is there
    expected_TN = torch.zeros(grid[0], len(place), dtype=torch.float64)
    for t, (query_HSE, key_HSE) in enumerate(seen):
        for query_SE, key_SE in zip(query_HSE, key_HSE, strict=True):
            mean = query_SE.mean(dim=0)
            scores = [key_SE[4 * j : 4 * j + 4].mean(dim=0) @ mean / math.sqrt(len(mean)) for j in range(len(place))]
            expected_TN[t, place] += torch.stack(scores).softmax(dim=0) / len(query_HSE)
    return expected_TN


@pytest.mark.parametrize("frame_batch", [32, 3, 1])
def test_last_layer_of_llava_onevision_equals_eager_attention_weights(frame_batch):
    source = ModelSource.resolve("tiny")
    frames = frames_for(source)
    attention_TN, key_TNE = stock_last_layer(source, frames)
    evidence = family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames, AT_LAST).evidence
    assert evidence["token_attention"].shape == (5, 196) and evidence["token_key"].shape == (5, 196, 32)
    assert attention_TN.std() > 0.1 * attention_TN.mean()  # of flat attention any mistake would look right
    torch.testing.assert_close(evidence["token_attention"], attention_TN, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(evidence["token_key"], key_TNE, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", QWEN)
def test_merged_queries_of_qwen_equal_the_stock_towers_own_queries_and_keys(model, monkeypatch):
    source = ModelSource.resolve(model)
    frames = frames_for(source)
    expected_TN = stock_merged_queries(source, frames, monkeypatch)
    assert expected_TN.std() > 0.1 * expected_TN.mean()
    for frame_batch in (32, 3, 1):
        visual = family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames, MERGED)
        assert visual.evidence["token_attention"].shape == visual.tokens.shape[:2] == expected_TN.shape
        torch.testing.assert_close(visual.evidence["token_attention"].double(), expected_TN, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("runtime", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", STOCK)
def test_asking_changes_no_token_and_not_asking_hangs_no_hook(model, runtime, monkeypatch):
    source = ModelSource.resolve(model)
    frames, backbone = frames_for(source), family_of(source).load(runtime, frame_batch=2)
    visual = backbone.encode(frames, asked_of(model))
    assert hooks_of(backbone) == 0
    for name, value in visual.evidence.items():
        assert value.dtype == torch.float32 and value.shape[:2] == visual.tokens.shape[:2], name
        assert value.isfinite().all()
    assert (visual.evidence["token_attention"] > 0).all()
    monkeypatch.setattr(torch.nn.Module, "register_forward_pre_hook", None)
    without = backbone.encode(frames)
    assert not without.evidence
    for ours, plain in zip((visual.tokens, *visual.deepstack), (without.tokens, *without.deepstack), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("model", STOCK)
def test_bfloat16_stays_near_float32(model):
    source = ModelSource.resolve(model)
    frames = frames_for(source, 2)
    exact, coarse = (family_of(source).load(r).encode(frames, asked_of(model)).evidence for r in (FLOAT32, BFLOAT16))
    for name, value in exact.items():
        assert torch.corrcoef(torch.stack([value.flatten(), coarse[name].flatten()]))[0, 1] > 0.98, name


@pytest.mark.parametrize("model", STOCK)
def test_a_tower_that_fails_is_left_without_hooks(model, monkeypatch):
    source = ModelSource.resolve(model)
    backbone = family_of(source).load(FLOAT32)

    def fail(*args, **kwargs):
        raise RuntimeError("no")

    last = backbone._last_attention().q_proj if model == "tiny" else backbone.model.blocks[-1].attn.qkv
    monkeypatch.setattr(last, "forward", fail)
    with pytest.raises(RuntimeError, match="no"):
        backbone.encode(frames_for(source, 2), asked_of(model))
    assert hooks_of(backbone) == 0


def test_the_layer_is_the_one_that_the_tokens_come_from():
    backbone = family_of(ModelSource.resolve("tiny")).load(FLOAT32)
    layers = backbone.model.vision_tower.encoder.layers
    for index, place in ((-1, 1), (2, 1), (-2, 0), (1, 0)):
        backbone.model.config.vision_feature_layer = index
        assert backbone._last_attention() is layers[place].self_attn


def test_windows_are_in_the_order_of_the_stock_tower():
    backbone = family_of(ModelSource.resolve("tiny-qwen2-5-vl")).load(FLOAT32)
    for rows, columns in ((4, 4), (5, 4), (8, 8), (9, 16), (3, 2), (1, 13)):
        expected, _ = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, 112, 14)
        assert torch.equal(backbone.family.tower_order(rows, columns, backbone.model.config), expected)


@pytest.mark.parametrize("model", STOCK)
def test_what_an_encoder_cannot_give_is_refused(model):
    source = ModelSource.resolve(model)
    with pytest.raises(ModelError, match=f"{source.model_type} does not give llm_attention from the language model"):
        family_of(source).load(FLOAT32).encode(frames_for(source, 2), {"llm_attention": "the language model"})
    other = MERGED if model == "tiny" else AT_LAST
    with pytest.raises(ModelError, match=source.model_type):
        family_of(source).check_gives(other)
