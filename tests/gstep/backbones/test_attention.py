"""Attention of a frame by hand and by the stock towers' eager one; observing it changes nothing and leaves no hook."""

import math
import sys

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from gstep.backbones import ModelSource, family_of
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, MERGED, QWEN, asked_of, frames_for, load_stock


def hooks_of(backbone):
    """Of our kind: transformers leaves forward hooks of its own in towers whose hidden states were asked for."""
    return sum(len(module._forward_pre_hooks) for module in backbone.model.modules())


@torch.no_grad()
def stock_merged_queries(source, frames, monkeypatch):
    """[T,N] in float64 from the queries and keys that the eager tower's last block attends with."""
    tower = load_stock(source.pretrained()[0], torch.float32, "eager").model.visual
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


@pytest.mark.parametrize("model", ["tiny", *QWEN])
def test_asking_changes_no_token_and_hangs_one_hook_and_bfloat16_stays_near_float32(model):
    source, evidence = ModelSource.resolve(model), []
    frames = frames_for(source)
    for runtime in (FLOAT32, BFLOAT16):
        backbone, hooks = family_of(source).load(runtime, frame_batch=2), set()
        first = next(part for part in backbone.model.modules() if isinstance(part, torch.nn.Conv2d | torch.nn.Conv3d))
        first.register_forward_hook(lambda *call, backbone=backbone, hooks=hooks: hooks.add(hooks_of(backbone)))
        visual = backbone.encode(frames, asked_of(model))
        assert hooks == {1} and hooks_of(backbone) == 0
        for name, value in visual.evidence.items():
            assert value.dtype == torch.float32 and value.shape[:2] == visual.tokens.shape[:2], name
            assert value.isfinite().all() and (name == "token_key" or (value > 0).all()), name
        hooks.clear()
        without = backbone.encode(frames)
        assert hooks == {0} and not without.evidence
        for ours, plain in zip((visual.tokens, *visual.deepstack), (without.tokens, *without.deepstack), strict=True):
            assert torch.equal(ours, plain)
        evidence.append(visual.evidence)
    for name, exact in evidence[0].items():
        assert torch.corrcoef(torch.stack([exact.flatten(), evidence[1][name].flatten()]))[0, 1] > 0.98, name


@pytest.mark.parametrize("model", ["tiny", *QWEN])
def test_a_tower_that_fails_is_left_without_hooks(model):
    source = ModelSource.resolve(model)
    backbone = family_of(source).load(FLOAT32)

    def fail(*call):
        raise RuntimeError("no")

    last = backbone.layers[-1].self_attn.q_proj if model == "tiny" else backbone.model.blocks[-1].attn.qkv
    last.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        backbone.encode(frames_for(source, 2), asked_of(model))
    assert hooks_of(backbone) == 0
