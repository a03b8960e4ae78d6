"""The forms of the towers for GPUs: on a CPU beside the stock towers, and their kernels in Triton's interpreter."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

from gstep.backbones import ModelSource, Runtime, family_of, gpu_forms
from gstep.backbones.gpu_forms import FusedSteps, attend, suit_qwen
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, QWEN, asked_of, frames_for
from tests.gstep.synthetic import needs_cuda, needs_triton
from tests.interpreter import run_python

MODELS = ["tiny", *QWEN, "tiny-internvl"]
ROUNDING = 2e-5  # of the largest value, in float32: of all layers together


def loaded(name, runtime=FLOAT32):
    """Load the stock tower and one in the form for GPUs, both on the CPU; a second change must change nothing."""
    stock, suited = (family_of(ModelSource.resolve(name)).load(runtime) for _ in range(2))
    for _ in range(2):
        suited.steps = suited._suit_gpu()
    return stock, suited


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(18, 26), (9, 14), (24, 24)])
def test_the_form_for_gpus_gives_the_stock_tokens_in_float32(name, shape):
    stock, suited = loaded(name)
    assert (stock.form, suited.form) == ("stock", "gpu")
    frames = frames_for(stock.family.source, 3, shape)
    expected, found = (backbone.encode(frames, asked_of(name)) for backbone in (stock, suited))
    for ours, theirs in zip(
        (found.tokens, *found.deepstack, *found.evidence.values()),
        (expected.tokens, *expected.deepstack, *expected.evidence.values()),
        strict=True,
    ):
        assert (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_the_form_for_gpus_gives_the_stock_tokens_in_bfloat16(name):
    stock, suited = loaded(name, BFLOAT16)
    frames = frames_for(stock.family.source, 3)
    expected, found = (backbone.encode(frames).tokens.float().flatten(0, 1) for backbone in (stock, suited))
    mean = expected.mean(0)
    assert torch.nn.functional.cosine_similarity(found - mean, expected - mean, dim=-1).min() > 0.995


@pytest.mark.parametrize("name", MODELS)
def test_videos_of_several_sizes_share_a_pass(name):
    stock, suited = loaded(name)
    videos = [frames_for(stock.family.source, n, shape) for n, shape in ((3, (18, 26)), (2, (9, 14)))]
    for ours, theirs in zip(suited.encode_pass(videos, {}), stock.encode_pass(videos, {}), strict=True):
        assert (ours.tokens - theirs.tokens).abs().max() <= ROUNDING * theirs.tokens.abs().max()


def test_eager_attention_stays_the_stock_one():
    suited = family_of(ModelSource.resolve("tiny-qwen2-5-vl")).load(Runtime("cpu", torch.float32, "eager"))
    stock = suited.model.blocks[0].attn.forward
    suit_qwen(suited.model)
    assert suited.model.blocks[0].attn.forward == stock


def test_a_gated_mlp_is_padded_once():
    """The published width, 3,420, is no multiple of 8; matrix units take 3,456."""
    stock, suited = (family_of(ModelSource.resolve("tiny-qwen2-5-vl")).load(FLOAT32).model for _ in range(2))
    for tower in (stock, suited):
        mlp = tower.blocks[0].mlp
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight, part.bias = (torch.nn.Parameter(x[:-4], requires_grad=False) for x in (part.weight, part.bias))
        mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :-4], requires_grad=False)
    narrow = stock.blocks[0].mlp
    for part in (suited.blocks[0].mlp.gate_proj, suited.blocks[0].mlp.up_proj):
        part.out_features = len(part.weight)
    width = len(narrow.gate_proj.weight)
    for _ in range(2):
        suit_qwen(suited)
        mlp = suited.blocks[0].mlp
        assert len(mlp.gate_proj.weight) == len(mlp.up_proj.weight) == mlp.down_proj.weight.shape[1]
        assert len(mlp.gate_proj.weight) == -(-width // 128) * 128 > width
        x = torch.randn(7, mlp.gate_proj.weight.shape[1], generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(mlp(x), narrow(x), atol=1e-6, rtol=1e-5)


def pieces(lengths, heads=2, width=8, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, heads, width, generator=generator).to(device, dtype)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return qkv.unbind(1), bounds


def piece_by_piece(parts, bounds):
    split = zip(*(part.split(bounds.diff().tolist()) for part in parts), strict=True)
    return torch.cat([gpu_forms._attend_batch(q[None], k[None], v[None])[0] for q, k, v in split])


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [4, 2, 4, 1, 2], [1, 64, 64, 16]])
def test_pieces_attend_to_themselves(lengths):
    parts, bounds = pieces(lengths)
    torch.testing.assert_close(attend(*parts, bounds, max(lengths)), piece_by_piece(parts, bounds))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 2, 64, 1, 2]])
def test_pieces_attend_to_themselves_on_a_gpu(lengths, dtype):
    parts, bounds = pieces(lengths, width=80, dtype=dtype, device="cuda")
    found = attend(*parts, bounds, max(lengths)).float()
    torch.testing.assert_close(found, piece_by_piece(parts, bounds).float(), atol=2e-2, rtol=2e-2)


@needs_cuda
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gets_the_form_for_gpus_with_kernels(name, dtype):
    family = family_of(ModelSource.resolve(name))
    frames = frames_for(family.source, 3)
    expected = family.load(FLOAT32).encode(frames).tokens.flatten(0, 1)
    backbone = family.load(Runtime("cuda", dtype, "sdpa"))
    assert backbone.form == "gpu, kernels"
    found = backbone.encode(frames).tokens.float().cpu().flatten(0, 1)
    mean = expected.mean(0)
    least = 0.99 if dtype == torch.bfloat16 else 0.9999
    assert torch.nn.functional.cosine_similarity(found - mean, expected - mean, dim=-1).min() > least


@pytest.mark.parametrize(
    ("by_kernels", "said"), [(RuntimeError("PassManager::run failed"), "PassManager::run failed"), (2.0, "off by")]
)
def test_kernels_that_fail_or_give_other_values_are_warned_of_and_torch_serves(by_kernels, said, monkeypatch):
    steps = FusedSteps()

    def step():
        if steps.kernels and isinstance(by_kernels, Exception):
            raise by_kernels
        return torch.full((2, 8), by_kernels if steps.kernels else 1.0)

    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    with pytest.warns(RuntimeWarning, match=said):
        steps.prove(torch.device("cpu"), step)
    assert not steps.kernels


KERNELS = """
import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm, apply_rotary_pos_emb_vision
from gstep.backbones.gpu_forms import FusedSteps

plain, fused = FusedSteps(kernels=False), FusedSteps(kernels=True)
generator = torch.Generator().manual_seed(0)
draw = lambda *shape: torch.randn(*shape, generator=generator)
for dtype in (torch.float32, torch.bfloat16):
    one = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    def same(found, expected, what, exact=False):
        exact = exact and dtype == torch.float32  # the interpreter cuts bfloat16 off where a GPU rounds it
        error = (found.float() - expected.float()).abs().max()
        assert found.dtype == expected.dtype == dtype and found.shape == expected.shape, what
        assert error <= (0 if exact else one * expected.float().abs().max()), (what, dtype, float(error))
        print(what, dtype)
    for width in (72, 1152, 1280):
        for rows in (1, 5):
            x, added = 3 + 4 * draw(rows, width).to(dtype), draw(rows, width).to(dtype)
            for norm in (nn.LayerNorm(width, eps=1e-6), Qwen2_5_VLRMSNorm(width)):
                norm.weight.data = 1 + draw(width) / 4
                norm.to(dtype).requires_grad_(False)
                for more in (None, added):
                    total, normed = fused.norm(norm, x, more)
                    same(total, x if more is None else x + more, "sum", exact=True)
                    same(normed, norm(total), type(norm).__name__)
    for heads, width in ((16, 80), (16, 72), (3, 24)):
        qkv, half = draw(3, 3, heads, width).to(dtype), 3 * draw(3, width // 2)
        angles = torch.cat([half, half], dim=-1)
        expected = apply_rotary_pos_emb_vision(*qkv.clone().unbind(1)[:2], angles.cos(), angles.sin())
        for part, stock in zip(plain.rotate(qkv.clone(), angles.cos(), angles.sin()), expected):
            same(part, stock, "plain rotation", exact=True)
        value = qkv[:, 2].clone()
        *found, kept = fused.rotate(qkv, angles.cos(), angles.sin())
        for part, stock in zip(found, expected):
            same(part, stock, "rotation")
        same(kept, value, "values", exact=True)
    for inner in (24, 3456):
        x = 3 * draw(4, 2 * inner).to(dtype)
        same(fused.gate(x), nn.functional.silu(x[:, :inner]) * x[:, inner:], "gate")
        same(plain.gate(x), nn.functional.silu(x[:, :inner]) * x[:, inner:], "plain gate", exact=True)
"""


@needs_triton
def test_kernels_equal_the_stock_steps_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = run_python("-c", KERNELS, env=environment)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert "rotation torch.bfloat16" in done.stdout


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gstep.backbones import gpu_kernels

ROWS = {"WIDTH": 1152, "BLOCK": 2048, "ROWS": 2, "ADDED": True, "CENTRED": True}
CASES = {
    "norm_kernel": (["*bf16"] * 6 + ["i32", "fp32"], ROWS),
    "rotate_kernel": (["*bf16", "*fp32", "*fp32"], {"HEADS": 16, "HALF": 40, "BLOCK_HEADS": 32, "BLOCK_HALF": 64}),
    "gate_kernel": (["*bf16", "*bf16"], {"WIDTH": 3456, "BLOCK": 1024}),
}
for name, (types, constants) in CASES.items():
    kernel = getattr(gpu_kernels, name)
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    for capability in (80, 90):
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
        assert compiled.asm["cubin"]
        print(name, capability)
"""


@needs_triton
def test_every_kernel_compiles_for_gpus_that_are_not_here(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_python("-c", COMPILED, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * 2  # kernels x GPUs
