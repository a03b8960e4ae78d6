"""The forms of the towers for GPUs: on a CPU beside the stock towers; checks.py has their kernels."""

import math
import sys
from contextlib import nullcontext

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from gstep.backbones import ModelSource, Runtime, family_of, gpu_forms
from gstep.backbones.gpu_forms import FusedSteps, attend_in_pieces, optimize_qwen
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, MERGED, QWEN, asked_of, frames_for, load_stock, parts
from tests.gstep.synthetic import needs_cuda

MODELS = ["tiny", *QWEN, "tiny-internvl"]
ROUNDING = 2e-5  # of the largest value, in float32: of all layers together


def loaded(name, runtime=FLOAT32):
    """Load the stock tower and one in the form for GPUs, both on the CPU; a second change must change nothing."""
    stock, suited = (family_of(ModelSource.resolve(name)).load(runtime) for _ in range(2))
    for _ in range(2):
        suited.steps = suited._suit_gpu()
    return stock, suited


@pytest.mark.parametrize("name", MODELS)
def test_the_form_for_gpus_gives_the_stock_tokens_of_videos_alone_and_in_one_pass(name):
    stock, suited = loaded(name)
    assert (stock.form, suited.form) == ("stock", "gpu")
    videos = [frames_for(stock.family.source, n, shape) for n, shape in ((3, (18, 26)), (2, (9, 14)))]
    pairs = [tuple(backbone.encode(frames, asked_of(name)) for backbone in (suited, stock)) for frames in videos]
    pairs += zip(suited.encode_pass(videos, {}), stock.encode_pass(videos, {}), strict=True)
    for ours, theirs in pairs:
        for mine, expected in zip(parts(ours), parts(theirs), strict=True):
            assert (mine - expected).abs().max() <= ROUNDING * expected.abs().max()


def least_similarity(tokens, others):
    """Return the least cosine of two videos' tokens, each from the mean of the others."""
    mean = others.mean(0)
    return torch.nn.functional.cosine_similarity(tokens - mean, others - mean, dim=-1).min()


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2-5-vl"])
def test_the_form_for_gpus_gives_the_stock_tokens_in_bfloat16(name):
    stock, suited = loaded(name, BFLOAT16)
    frames = frames_for(stock.family.source, 3)
    expected, ours = (backbone.encode(frames).tokens.float().flatten(0, 1) for backbone in (stock, suited))
    assert least_similarity(ours, expected) > 0.995


def test_eager_attention_stays_the_stock_one():
    suited = family_of(ModelSource.resolve("tiny-qwen2-5-vl")).load(Runtime("cpu", torch.float32, "eager"))
    stock = suited.model.blocks[0].attn.forward
    optimize_qwen(suited.model)
    assert suited.model.blocks[0].attn.forward == stock


def test_a_gated_mlp_is_padded_once():
    """The published width, 3,420, is no multiple of 8; matrix units take 3,456."""
    stock, suited = (family_of(ModelSource.resolve("tiny-qwen2-5-vl")).load(FLOAT32).model for _ in range(2))
    for tower in (stock, suited):
        mlp = tower.blocks[0].mlp
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight, part.bias = (torch.nn.Parameter(x[:-4], requires_grad=False) for x in (part.weight, part.bias))
            part.out_features = width = len(part.weight)
        mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :-4], requires_grad=False)
    for _ in range(2):
        optimize_qwen(suited)
        mlp = suited.blocks[0].mlp
        assert len(mlp.gate_proj.weight) == len(mlp.up_proj.weight) == mlp.down_proj.weight.shape[1]
        assert len(mlp.gate_proj.weight) == -(-width // 128) * 128 > width
        x = torch.randn(7, mlp.gate_proj.weight.shape[1], generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(mlp(x), stock.blocks[0].mlp(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 1e-5),
        pytest.param("cuda", torch.float32, 2e-2, marks=needs_cuda),
        pytest.param("cuda", torch.bfloat16, 2e-2, marks=needs_cuda),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [4, 2, 4, 1, 2], [4, 2, 64, 1, 2]])
def test_pieces_attend_to_themselves(lengths, device, dtype, tolerance):
    """With heads as wide as in the published towers, which not every kernel of attention takes."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(sum(lengths), 3, 2, 80, generator=generator).to(device, dtype).unbind(1)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    split = zip(*(part.split(lengths) for part in parts), strict=True)
    alone = torch.cat([gpu_forms._attend_batch(q[None], k[None], v[None])[0] for q, k, v in split])
    found = attend_in_pieces(*parts, bounds, max(lengths))
    torch.testing.assert_close(found.float(), alone.float(), atol=tolerance, rtol=tolerance)


@needs_cuda
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gets_the_form_for_gpus_with_kernels(name, dtype):
    family = family_of(ModelSource.resolve(name))
    frames = frames_for(family.source, 3)
    expected = family.load(FLOAT32).encode(frames).tokens.flatten(0, 1)
    backbone = family.load(Runtime("cuda", dtype, "sdpa"))
    assert backbone.form == "gpu, kernels"
    ours = backbone.encode(frames).tokens.float().cpu().flatten(0, 1)
    assert least_similarity(ours, expected) > (0.99 if dtype == torch.bfloat16 else 0.9999)


@pytest.mark.parametrize(
    ("by_kernels", "outcome"),
    [
        (RuntimeError("PassManager::run failed"), pytest.warns(RuntimeWarning, match="PassManager::run failed")),
        (2.0, pytest.warns(RuntimeWarning, match="off by")),
        (torch.OutOfMemoryError("no memory for the second run"), pytest.raises(torch.OutOfMemoryError)),
    ],
)
def test_kernels_that_fail_or_give_other_values_are_warned_of_and_torch_serves(by_kernels, outcome, monkeypatch):
    steps = FusedSteps()

    def step():
        if steps.kernels and isinstance(by_kernels, Exception):
            raise by_kernels
        return torch.full((2, 8), by_kernels if steps.kernels else 1.0)

    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    with outcome:
        steps.check_kernels_on(torch.device("cpu"), step)
    assert not steps.kernels


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


@pytest.mark.parametrize("name", QWEN)
def test_merged_queries_of_qwen_equal_the_stock_towers_own_queries_and_keys(source, monkeypatch):
    frames = frames_for(source)
    expected_TN = stock_merged_queries(source, frames, monkeypatch)
    assert expected_TN.std() > 0.1 * expected_TN.mean()
    for frame_batch in (32, 3, 1):
        visual = family_of(source).load(FLOAT32, frame_batch=frame_batch).encode(frames, MERGED)
        assert visual.evidence["token_attention"].shape == visual.tokens.shape[:2] == expected_TN.shape
        torch.testing.assert_close(visual.evidence["token_attention"].double(), expected_TN, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["tiny", *QWEN])
def test_asking_changes_no_token_and_hangs_one_hook_and_bfloat16_stays_near_float32(source):
    frames, evidence = frames_for(source), []
    for runtime in (FLOAT32, BFLOAT16):
        backbone, hooks = family_of(source).load(runtime, frame_batch=2), set()
        first = next(part for part in backbone.model.modules() if isinstance(part, torch.nn.Conv2d | torch.nn.Conv3d))
        first.register_forward_hook(lambda *call, backbone=backbone, hooks=hooks: hooks.add(hooks_of(backbone)))
        visual = backbone.encode(frames, asked_of(source.name))
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


@pytest.mark.parametrize("name", ["tiny", *QWEN])
def test_a_tower_that_fails_is_left_without_hooks(name, source):
    backbone = family_of(source).load(FLOAT32)

    def fail(*call):
        raise RuntimeError("no")

    last = backbone.layers[-1].self_attn.q_proj if name == "tiny" else backbone.model.blocks[-1].attn.qkv
    last.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        backbone.encode(frames_for(source, 2), asked_of(name))
    assert hooks_of(backbone) == 0
