"""What a caller has set in torch for all its work (dtype, device, precision of products) changes no selection."""

from typing import Any

import pytest
import torch

import gstep
from gstep.selection.dispatch import MAX_PLAIN_PRODUCTS
from tests.gstep.pruners.test_contract import CASES
from tests.gstep.selection.videos import video
from tests.gstep.synthetic import assert_same, defaults, evidence_for

DTYPES = [torch.bfloat16, torch.bfloat16, torch.float64]
SAMPLING = [(method, params) for method, params in CASES if method in ("gstep", "fps", "novelty")]


@pytest.mark.parametrize(
    ("method", "params", "hidden"),
    [*((*case, 256) for case in CASES), *((*case, 2**12) for case in SAMPLING)],  # wide ones are sampled lazily
)
def test_default_dtype_and_device_change_no_selection(method: str, params: dict[str, Any], hidden: int) -> None:
    """Whatever is made on the default device fails: "meta" holds no values."""
    pruner, ratio = gstep.make_pruner(method, **params), 1.0 if method == "none" else 0.2
    for dtype, default in zip(DTYPES, (torch.float64, torch.float16, torch.bfloat16), strict=True):
        tokens = video("low rank", 10, 40, hidden).to(dtype)
        assert (tokens.numel() * 80 > MAX_PLAIN_PRODUCTS) == (hidden > 256)
        visual = gstep.VisualTokens(tokens, evidence_for(pruner, tokens))
        expected = pruner.prune(visual, ratio)
        with defaults(default, "meta"):
            pruned = pruner.prune(visual, ratio)
            positions = pruned.compute_selection_order()
        assert_same(pruned, expected)
        assert torch.equal(positions, expected.compute_selection_order())
