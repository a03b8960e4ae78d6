"""Sizes and fillings of the Gram form; its picks, which need Triton's interpreter or a GPU, are in checks.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gstep.selection.gpu.gram import default_tuning, gram_width, no_bar, prepare_task


def test_rows_of_a_gram_matrix_are_read_16_at_a_time() -> None:
    assert [gram_width(n_tokens) for n_tokens in (1, 16, 17, 6272)] == [16, 16, 32, 6272]


def test_every_token_passes_no_bar() -> None:
    key, place = no_bar(torch.device("cpu"))
    assert (key.tolist(), key.dtype, place.tolist(), place.dtype) == ([-torch.inf], torch.float64, [0], torch.int32)


def test_tiles_follow_the_dtype_and_rounds_the_number_of_tokens() -> None:
    assert default_tuning(torch.float32, 100).block < default_tuning(torch.bfloat16, 100).block
    assert default_tuning(torch.bfloat16, 65537).candidates > default_tuning(torch.bfloat16, 65536).candidates


def test_float64_is_not_for_the_kernels() -> None:
    tokens = torch.ones(3, 4, dtype=torch.float64)
    assert prepare_task(tokens, torch.ones(3), 2, alpha=0.5, beta=1e-6, start="density") is None
