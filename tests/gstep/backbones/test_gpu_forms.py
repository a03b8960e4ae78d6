"""The forms of the towers for GPUs: on a CPU beside the stock towers; checks.py has their kernels."""

from contextlib import nullcontext

import pytest
import torch

from gstep.backbones import ModelSource, Runtime, family_of
from gstep.backbones.gpu_forms import FusedSteps, optimize_qwen
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, QWEN, asked_of, frames_for
from tests.gstep.synthetic import needs_cuda

MODELS = ["tiny", *QWEN, "tiny-internvl"]
ROUNDING = 2e-5  # of the largest value, in float32: of all layers together


def loaded(name, runtime=FLOAT32):
    """Load the stock tower and one in the form for GPUs, both on the CPU; a second change must change nothing."""
    stock, suited = (family_of(ModelSource.resolve(name)).load(runtime) for _ in range(2))
    for _ in range(2):
        suited.steps = suited._suit_gpu()
    return stock, suited


def parts(visual):
    return visual.tokens, *visual.deepstack, *visual.evidence.values()


@pytest.mark.parametrize("name", MODELS)
def test_the_form_for_gpus_gives_the_stock_tokens_of_videos_alone_and_in_one_pass(name):
    stock, suited = loaded(name)
    assert (stock.form, suited.form) == ("stock", "gpu")
    videos = [frames_for(stock.family.source, n, shape) for n, shape in ((3, (18, 26)), (2, (9, 14)), (3, (24, 24)))]
    pairs = [tuple(backbone.encode(frames, asked_of(name)) for backbone in (suited, stock)) for frames in videos]
    pairs += zip(suited.encode_pass(videos, {}), stock.encode_pass(videos, {}), strict=True)
    for ours, theirs in pairs:
        for mine, expected in zip(parts(ours), parts(theirs), strict=True):
            assert (mine - expected).abs().max() <= ROUNDING * expected.abs().max()


def least_similarity(tokens, others):
    """Return the least cosine of two videos' tokens, each from the mean of the others."""
    mean = others.mean(0)
    return torch.nn.functional.cosine_similarity(tokens - mean, others - mean, dim=-1).min()


@pytest.mark.parametrize("name", MODELS)
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
