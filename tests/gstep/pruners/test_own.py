"""This project's methods and controls: random, uniform, none, topk, fps and novelty."""

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners.novelty import Novelty, compute_token_novelty
from tests.gstep.oracle import exact_tokens, oracle
from tests.gstep.synthetic import FLOATS, video


def test_random_is_the_start_of_one_permutation() -> None:
    tokens = video(5, 13, 8)
    pruned = gstep.prune(tokens, method="random", budget=20, seed=7)
    expected = np.random.default_rng(7).permutation(65)[:20]
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected.tolist()
    assert pruned.index.tolist() != gstep.prune(tokens, method="random", budget=20, seed=8).index.tolist()


def test_uniform_takes_the_centres_of_the_strata() -> None:
    for budget in range(1, 66):
        index = gstep.prune(video(5, 13, 2), method="uniform", budget=budget).index.tolist()
        assert index == [int(np.floor((k + 0.5) * 65 / budget)) for k in range(budget)]


def test_none_refuses_a_smaller_budget() -> None:
    with pytest.raises(ValueError, match="keeps all 6 tokens; got budget 5"):
        gstep.prune(video(2, 3, 4), method="none", budget=5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tokens_novelty_is_its_distance_to_the_one_before(dtype: torch.dtype) -> None:
    for n_frames in (2, 8, 9, 20):  # frames are taken 8 at a time
        tokens = video(n_frames, 13, 24).to(dtype)
        exact, novelty = tokens.double(), compute_token_novelty(tokens)
        expected = 1 - torch.cosine_similarity(exact[1:], exact[:-1], dim=-1)
        assert novelty.dtype == torch.float64
        torch.testing.assert_close(novelty[1:], expected, rtol=0, atol=1e-12)
        assert (novelty[0] == novelty[1:].max()).all()


def test_it_does_not_depend_on_the_scale_of_tokens_or_on_what_comes_later() -> None:
    tokens = video(9, 13, 24).double()
    for scale in (1e-300, 1e-180, 1e160, 1e300):
        torch.testing.assert_close(
            compute_token_novelty(tokens * scale), compute_token_novelty(tokens), rtol=1e-12, atol=1e-12
        )
    assert torch.equal(compute_token_novelty(tokens)[1:5], compute_token_novelty(tokens[:5])[1:])


def test_the_density_is_its_equation() -> None:
    tokens = video(7, 13, 24)
    novelty, spatial = compute_token_novelty(tokens), gstep.prune(tokens, 1.0, "topk", fusion="spatial")
    assert spatial.density is not None
    expected = (novelty / (novelty.mean() + 1e-6) + 0.3).flatten() * spatial.density.double()
    pruned = gstep.prune(tokens, 1.0, "novelty", floor=0.3)
    assert pruned.density is not None and pruned.temporal_density is not None
    torch.testing.assert_close(pruned.density.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pruned.temporal_density.double().mean().item(), 1.0, rtol=1e-5, atol=0)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_tokens_are_taken_by_that_density_as_gstep_takes_them_by_its_own(alpha: float) -> None:
    tokens = exact_tokens(48, seed=3)
    tokens_TND = torch.from_numpy(tokens).reshape(6, 8, 12)
    pruned = gstep.prune(tokens_TND, method="novelty", budget=20, alpha=alpha)
    expected, _ = oracle(tokens, Novelty().density(tokens_TND)[0].numpy(), 20, alpha=alpha)
    assert pruned.index[pruned.compute_selection_order()].tolist() == expected


def arrivals(at: int, n_frames: int = 12, per_frame: int = 16, cut: int = 8) -> torch.Tensor:
    """A thing comes to place 3 in frame ``at`` and stays; the ground behind it changes in frame ``cut``; [T,N,D]."""
    rng = torch.Generator().manual_seed(0)
    before, after, thing = (torch.randn(count, 24, generator=rng) for count in (per_frame, per_frame, 1))
    tokens = torch.cat([before.repeat(cut, 1, 1), after.repeat(n_frames - cut, 1, 1)])
    tokens[at:, 3] = thing
    return tokens + 0.02 * torch.randn(tokens.shape, generator=rng)


def test_of_a_thing_that_comes_and_stays_the_first_sight_is_kept() -> None:
    for at in range(1, 6):
        tokens = arrivals(at)
        kept = set(gstep.prune(tokens, method="novelty", budget=32).index.tolist())  # what there is to see, once each
        assert 16 * at + 3 in kept
        assert {index % 16 for index in kept if index < 16 * 8} == set(range(16))
        # GSTEP takes it from beside the cut, where the frames change most.
        assert 16 * at + 3 not in gstep.prune(tokens, budget=32).index


def test_a_video_in_which_nothing_changes_keeps_its_first_frame() -> None:
    frame = video(1, 13, 24)
    still = gstep.prune(frame.repeat(6, 1, 1), method="novelty", budget=13)
    assert still.index.tolist() == list(range(13))
    assert still.temporal_density is not None and (still.temporal_density == 0).all()
    alone = gstep.prune(frame, method="novelty", budget=5)
    assert torch.equal(alone.index, gstep.prune(frame, budget=5).index)
    assert torch.equal(gstep.prune(frame.repeat(6, 1, 1), method="novelty", budget=5).index, alone.index)
