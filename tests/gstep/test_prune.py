"""gstep.prune: the controls, parameters and what is refused; what every method promises is in test_contract."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gstep
from tests.gstep.synthetic import FLOATS, video

RATIOS = [0.1, 0.15, 0.2, 0.25, 0.5, 1.0]


def test_a_static_video_keeps_its_first_frame() -> None:
    """Without density the start is index 0, and copies of a token are taken last."""
    tokens = video(1, 37, 33, seed=3).expand(5, 37, 33)
    for dtype in FLOATS:
        assert gstep.prune(tokens.to(dtype), 0.2).index.tolist() == list(range(37))


def test_parameters_reach_the_method() -> None:
    tokens = video(8, 20, 16)
    default = gstep.prune(tokens).index.tolist()
    assert gstep.prune(tokens, alpha=1).index.tolist() == gstep.prune(tokens, method="fps").index.tolist() != default
    assert gstep.prune(tokens, alpha=0).index.tolist() == gstep.prune(tokens, method="topk").index.tolist() != default
    assert gstep.prune(tokens, beta=1.0).index.tolist() != default


def test_unknown_names_say_what_is_known() -> None:
    for method in ("gsteb", None, ["gstep"]):
        with pytest.raises(ValueError, match=r"unknown method .*none, random, uniform, topk, fps, gstep"):
            gstep.make_pruner(method)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown parameter alhpa .*'gstep'.*alpha, beta"):
        gstep.prune(video(2, 3, 4), alhpa=0.5)
    with pytest.raises(ValueError, match=r"unknown parameter alpha of method 'random'; it accepts: none"):
        gstep.make_pruner("random", alpha=0.5)
    with pytest.raises(ValueError, match="unknown parameter name"):
        gstep.make_pruner("gstep", name="mine")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gstep.nonsense  # type: ignore[attr-defined]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), method=st.sampled_from(["gstep", "topk", "fps"]), ratio=st.sampled_from(RATIOS))
def test_permuting_tokens_within_frames_permutes_the_selection(seed: int, method: str, ratio: float) -> None:
    rng = np.random.default_rng(seed)
    tokens = torch.from_numpy(rng.normal(0.3, 1.0, (5, 12, 16)))
    source = np.stack([rng.permutation(12) + 12 * frame for frame in range(5)]).reshape(-1)
    shuffled = tokens.flatten(0, 1)[torch.from_numpy(source)].reshape(tokens.shape)
    ours = gstep.prune(shuffled, ratio, method)
    expected = gstep.prune(tokens, ratio, method)
    order = source[ours.index[ours.compute_selection_order()].numpy()]
    assert order.tolist() == expected.index[expected.compute_selection_order()].tolist()
