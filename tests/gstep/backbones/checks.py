"""The kernels of the towers against the stock steps: run by tests/gstep/test_kernels.py in Triton's interpreter."""

import os

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm, apply_rotary_pos_emb_vision

from gstep.backbones.gpu_forms import FusedSteps

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="for the interpreter alone")
PLAIN, FUSED = FusedSteps(kernels=False), FusedSteps(kernels=True)
ONE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}  # an error of the last place, of the largest value


@pytest.fixture(params=ONE, ids=str)
def dtype(request):
    return request.param


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(ours, expected, *, exact=False):
    exact = exact and expected.dtype == torch.float32  # the interpreter cuts bfloat16 off where a GPU rounds it
    error = (ours.float() - expected.float()).abs().max()
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    assert error <= (0 if exact else ONE[expected.dtype] * expected.float().abs().max())


@pytest.mark.parametrize("norm_of", [lambda width: nn.LayerNorm(width, eps=1e-6), Qwen2_5_VLRMSNorm])
@pytest.mark.parametrize(("rows", "width"), [(1, 72), (5, 1152), (5, 1280)])
def test_sums_and_norms(rows, width, norm_of, dtype):
    x, added, norm = (3 + 4 * draw(rows, width)).to(dtype), draw(width, rows).T.to(dtype).contiguous(), norm_of(width)
    norm.weight.data = 1 + draw(width) / 4
    norm.to(dtype).requires_grad_(False)
    for more in (None, added):
        total, normed = FUSED.norm(norm, x, more)
        assert_close(total, x if more is None else x + more, exact=True)
        assert_close(normed, norm(total))


@pytest.mark.parametrize(("heads", "width"), [(16, 80), (16, 72), (3, 24)])
def test_rotations(heads, width, dtype):
    qkv, half = draw(3, 3, heads, width).to(dtype), 3 * draw(3, width // 2)
    angles = torch.cat([half, half], dim=-1)
    expected = apply_rotary_pos_emb_vision(*qkv.clone().unbind(1)[:2], angles.cos(), angles.sin())
    for part, stock in zip(PLAIN.rotate(qkv.clone(), angles.cos(), angles.sin()), expected, strict=False):
        assert_close(part, stock, exact=True)
    value = qkv[:, 2].clone()
    *rotated, kept = FUSED.rotate(qkv, angles.cos(), angles.sin())
    for part, stock in zip(rotated, expected, strict=True):
        assert_close(part, stock)
    assert_close(kept, value, exact=True)


@pytest.mark.parametrize("inner", [24, 3456])
def test_gates(inner, dtype):
    x = 3 * draw(4, 2 * inner).to(dtype)
    expected = nn.functional.silu(x[:, :inner]) * x[:, inner:]
    assert_close(FUSED.gate(x), expected)
    assert_close(PLAIN.gate(x), expected, exact=True)
