"""Made-up videos, made-up evidence for any method from the names that it asks for, and what some machines lack."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.evidence import EVIDENCE_SHAPES
from gstep.pruners.base import Pruner

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
FREE_AXES = {"Dv": 6, "Dk": 5, "De": 7, "Q": 2}


def video(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0.3, 1.0, shape)).float()


def edge_videos() -> dict[str, torch.Tensor]:
    constant_frame, zero_token, zero_frame = video(4, 9, 8), video(4, 9, 8), video(4, 9, 8)
    constant_frame[1] = constant_frame[1, :1]
    zero_token[2, 3] = 0
    zero_frame[1] = 0
    return {
        "plain": video(6, 9, 16),
        "one frame": video(1, 16, 8),
        "one token a frame": video(12, 1, 8),
        "one token": video(1, 1, 8),
        "one channel": video(4, 9, 1),
        "equal tokens": video(1, 1, 8).expand(4, 9, 8),
        "static": video(1, 9, 8).expand(12, 9, 8),
        "constant frame": constant_frame,
        "zero token": zero_token,
        "zero frame": zero_frame,
        "zero": torch.zeros(4, 9, 8),
        "huge": video(4, 9, 8) * 1e30,
        "tiny": video(4, 9, 8) * 1e-30,
    }


def evidence_for(pruner: Pruner, tokens: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw all that ``pruner`` needs beside ``tokens`` [T,N,D]: attention is positive, anything else is not."""
    n_frames, per_frame, _ = tokens.shape
    lengths = {"T": n_frames, "N": per_frame, "T*N": n_frames * per_frame, **FREE_AXES}
    rng = np.random.default_rng(seed)
    made = {}
    for name in sorted(pruner.needs):
        shape = [lengths[axis] for axis in EVIDENCE_SHAPES[name]]
        values = rng.random(shape) if "attention" in name else rng.normal(0.2, 1.0, shape)
        made[name] = torch.from_numpy(values).to(tokens.device, torch.float32)
    return made


def assert_same(ours: gstep.PrunedTokens, expected: gstep.PrunedTokens) -> None:
    for name in ("tokens", "index", "rank", "merged", "density", "temporal_density", "order"):
        got, wanted = getattr(ours, name), getattr(expected, name)
        assert (got is None) == (wanted is None), name
        assert got is None or torch.equal(got, wanted), name
    assert (ours.n_total, ours.retention_ratio) == (expected.n_total, expected.retention_ratio)


def prune(
    tokens: torch.Tensor, retention_ratio: float = 0.25, method: str = "gstep", *, seed: int = 0, **params: Any
) -> gstep.PrunedTokens:
    """Call ``gstep.prune`` with made-up evidence for what the method needs."""
    budget = params.pop("budget", None)
    evidence = evidence_for(gstep.make_pruner(method, **params), tokens)
    return gstep.prune(tokens, retention_ratio, method, evidence=evidence, budget=budget, seed=seed, **params)


@contextmanager
def defaults(dtype: torch.dtype = torch.float32, device: str | None = None) -> Iterator[None]:
    """Set what a caller may have set for all tensors that it makes; of the device "meta" nothing can be read."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
