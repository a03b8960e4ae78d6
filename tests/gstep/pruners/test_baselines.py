"""The rules of the baselines where golden cases do not reach: edges, documented deviations, each part by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners.cdpruner import greedy_map, relevance
from gstep.pruners.fastvid import cut, density_peaks, even_shares, keep, llava_counts, merge, qwen_counts
from gstep.pruners.vidcom2 import calm_channels, frame_budgets
from gstep.pruners.visionzip import evenly_strided, kept_of_frame
from tests.gstep.synthetic import prune, video


def test_vidcom2_gives_more_tokens_to_the_frame_that_differs() -> None:
    tokens = video(1, 40, 32).expand(6, 40, 32) + 0.05 * video(6, 40, 32, seed=1)
    tokens[4] = video(40, 32, seed=2) * 2
    kept = torch.bincount(prune(tokens, 0.25, "vidcom2").index // 40, minlength=6)
    assert kept.argmax() == 4
    assert kept.max() > kept.min()


def test_vidcom2_rounds_half_to_even_and_keeps_at_least_one() -> None:
    typical = torch.ones(3, 10, dtype=torch.float64)
    assert frame_budgets(typical, 0.25).tolist() == [2, 2, 2]
    assert frame_budgets(typical, 0.35).tolist() == [4, 4, 4]
    assert frame_budgets(typical, 0.001).tolist() == [1, 1, 1]
    assert frame_budgets(torch.cat([typical, typical[:1] - 1]), 1.0).tolist() == [8, 8, 8, 10]


def test_vidcom2_keeps_the_calm_half_of_the_channels() -> None:
    tokens = video(4, 50, 7) * torch.tensor([5.0, 1.0, 4.0, 0.1, 3.0, 6.0, 2.0])
    assert calm_channels(tokens).tolist() == [1, 3, 6]
    assert calm_channels(tokens[..., :1]).tolist() == [0]


@pytest.mark.parametrize(
    ("size", "ratio", "kept"),
    [
        *[(196, 0.25, 50), (196, 0.2, 40), (196, 0.15, 30), (196, 0.1, 20), (196, 0.5, 98), (196, 784 / 3136, 50)],
        *[(100, 0.25, 25), (16, 0.1, 2), (16, 0.001, 2), (1, 0.5, 1), (1, 1.0, 1), (49, 1.0, 49)],
    ],
)
def test_visionzip_per_frame(size: int, ratio: float, kept: int) -> None:
    assert kept_of_frame(size, ratio) == kept


def test_visionzip_by_hand() -> None:
    """Six tokens a frame, three kept: the two most attended to, and a sum."""
    tokens = torch.arange(12.0).view(1, 6, 2).repeat(2, 1, 1)
    tokens[1] *= 10
    attention = torch.tensor([[0.1, 0.9, 0.2, 0.1, 0.8, 0.0]] * 2)
    evidence = {"token_attention": attention, "token_key": torch.ones(2, 6, 3)}
    pruned = gstep.prune(tokens, 0.5, "visionzip", evidence=evidence)
    assert pruned.index.tolist() == [0, 1, 4, 6, 7, 10]
    assert pruned.merged is not None and pruned.order is not None
    assert pruned.merged.tolist() == [True, False, False] * 2
    # Each frame's dominant tokens in ascending index, then its contextual one: itself plus the mean of 2, 3 and 5.
    assert pruned.order.tolist() == [1, 2, 0, 4, 5, 3]
    mean = tokens[:, [2, 3, 5]].mean(dim=1)
    assert torch.allclose(pruned.tokens[[0, 3]], tokens[:, 0] + mean)


def test_visionzip_sums_end_at_the_largest_number() -> None:
    tokens = torch.full((1, 8, 4), 60000.0, dtype=torch.float16)
    pruned = prune(tokens, method="visionzip", budget=2)
    assert pruned.merged is not None
    assert (pruned.tokens[pruned.merged] == torch.finfo(torch.float16).max).all()


def test_visionzip_targets_are_evenly_strided() -> None:
    cpu = torch.device("cpu")
    assert evenly_strided(10, 3, cpu).tolist() == [0, 3, 6]
    assert evenly_strided(3, 3, cpu).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("ratio", "kept"), [(0.15, 10), (0.2, 13), (0.001, 1), (1.0, 64)])
def test_fastv_rounds(ratio: float, kept: int) -> None:
    attention = torch.from_numpy(np.random.default_rng(0).permutation(64)).float()
    pruned = gstep.prune(video(4, 16, 8), ratio, "fastv", evidence={"llm_attention": attention})
    assert pruned.index.tolist() == sorted(attention.argsort(descending=True)[:kept].tolist())


@pytest.mark.parametrize("seed", range(3))
def test_cdpruner_takes_the_largest_determinant_at_each_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    direction = torch.nn.functional.normalize(torch.from_numpy(rng.normal(size=(30, 8))), dim=1)
    quality = torch.from_numpy(rng.uniform(0.1, 1.0, 30))
    kernel = quality[:, None] * (direction @ direction.T) * quality
    picks: list[int] = []
    for _ in range(8):
        rest = [j for j in range(30) if j not in picks]
        volumes = [torch.linalg.det(kernel[[*picks, j]][:, [*picks, j]]) for j in rest]
        picks.append(rest[int(torch.stack(volumes).argmax())])
    assert greedy_map(direction, quality, 8).tolist() == picks
    assert greedy_map(direction.float(), quality.float(), 8).tolist() == picks


def test_cdpruner_ends_where_tokens_repeat_each_other() -> None:
    """B above D, B above the number of different tokens, tokens that are all zero."""
    assert prune(video(6, 10, 8), 1.0, "cdpruner").n_kept == 8
    assert prune(video(6, 10, 8), 1.0, "cdpruner", mode="per_frame").n_kept == 6 * 8
    copies = video(1, 5, 32).expand(6, 5, 32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        index = prune(copies.to(dtype), 0.5, "cdpruner").index
        assert sorted((index % 5).tolist()) == [0, 1, 2, 3, 4]
    images = torch.nn.functional.one_hot(torch.tensor([[0, 0, 1, 0]]), 4).float()
    evidence = {"image_embedding": images, "text_embedding": -images[:, 2]}
    assert gstep.prune(torch.zeros(1, 4, 8), 1.0, "cdpruner", evidence=evidence).index.tolist() == [2]


def test_cdpruner_relevance() -> None:
    images = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[-3.0, 0.0], [0.0, 0.0]]])
    text = torch.tensor([[1.0, 0.0]])
    expected = torch.tensor([[5e-7, 0.5], [1.0, 0.5]])  # low where the cosine is high, as in the official code
    assert torch.allclose(relevance(images, text), expected, atol=1e-6)
    assert relevance(images[:1, :1], text).tolist() == [[1.0]]


def test_cdpruner_embeddings_must_be_of_one_size() -> None:
    evidence = {"image_embedding": torch.ones(2, 3, 5), "text_embedding": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"'text_embedding' must be \[Q,De\] = \[Q, 5\] .*; got shape \[2, 4\]"):
        gstep.prune(video(2, 3, 4), method="cdpruner", evidence=evidence)


def test_fastvid_cuts_at_the_lowest_and_below_a_threshold() -> None:
    similarity = [0.95, 0.5, 0.99, 0.8, 0.97]
    assert list(cut(similarity, 1, 0.4)) == [(0, 6)]
    assert list(cut(similarity, 1, 0.9)) == [(0, 2), (2, 4), (4, 6)]
    assert list(cut(similarity, 4, 0.9)) == [(0, 1), (1, 2), (2, 4), (4, 6)]
    assert list(cut(similarity, 9, 0.9)) == [(i, i + 1) for i in range(6)]
    assert list(cut([0.9, 0.9, 0.9], 2, 0.5)) == [(0, 1), (1, 4)]
    assert list(cut([], 8, 0.9)) == [(0, 1)]


def test_fastvid_llava_counts() -> None:
    # Six frames of K = 5 (2 anchors a frame): 12 anchors on the last frame and the one four before it.
    assert llava_counts(6, 100, 5, 0.4, 4) == [(3, 0), (3, 6), (3, 0), (3, 0), (3, 0), (3, 6)]
    assert llava_counts(3, 100, 2, 0.4, 4) == [(2, 0)] * 3  # C = 0
    assert llava_counts(4, 10, 10, 0.4, 4) == [(6, 0), (6, 0), (6, 0), (6, 4)]  # 16 anchors do not fit
    assert llava_counts(2, 10, 1, 1.0, 4) == [(0, 0), (0, 2)]


def test_fastvid_qwen_counts() -> None:
    # One inner segment: all of the segment's tokens go to its last frame.
    assert qwen_counts(3, [2], 100, 5, 0.4, 4) == [(0, 0), (0, 0), (9, 6)]
    # Five of them: salient tokens to each, the odd one to the first; anchors to every second from the end.
    assert qwen_counts(5, range(5), 100, 5, 0.4, 2) == [(3, 3), (3, 0), (3, 3), (3, 0), (3, 4)]
    assert qwen_counts(6, [1, 5], 100, 3, 0.4, 1) == [(0, 0), (6, 3), (0, 0), (0, 0), (0, 0), (5, 4)]
    # No more than the frame has, half of it anchors.
    assert qwen_counts(8, [7], 10, 5, 0.4, 4)[-1] == (5, 5)
    assert qwen_counts(1, [0], 10, 1, 0.4, 4) == [(0, 1)]
    assert qwen_counts(4, [3], 1, 1, 1.0, 4)[-1] == (0, 1)


def test_even_shares() -> None:
    assert even_shares(7, 3) == [3, 2, 2]
    assert even_shares(1, 3) == [1, 0, 0]


def test_fastvid_density_peaks() -> None:
    """Of two bunches the middle of the denser one has the farthest to go to a denser token: it gets the largest."""
    tokens = torch.tensor([0.0, 0.1, 0.2, 0.3, 5.0, 5.5, 6.0, 6.5])[:, None].expand(8, 4)
    distance = (tokens[:, :1] - tokens[:, 0]).abs()
    density = torch.exp(-distance.sort(dim=1).values[:, :4].square().mean(dim=1)).tolist()
    noise = torch.linspace(0, 1, 8)
    denser = [[j for j in range(8) if density[j] + 1e-6 * noise[j] > density[i] + 1e-6 * noise[i]] for i in range(8)]
    expected = [density[i] * min((float(distance[i, j]) for j in denser[i]), default=6.5) for i in range(8)]
    assert np.allclose(density_peaks(tokens, noise).numpy(), expected, atol=1e-5)


def test_fastvid_merge() -> None:
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 0.1], [0.1, 5.0], [0.2, 4.0], [-1.0, 0.0]])
    giving = torch.tensor([False, False, True, True, True, False])
    direction = torch.nn.functional.normalize(tokens, dim=1)
    merged = merge(tokens, direction, giving, torch.tensor([0, 1, 5]), beta=0.4)
    assert torch.allclose(merged[0], 0.5 * tokens[0] + 0.5 * tokens[2])
    assert torch.allclose(merged[1], 0.4 * tokens[1] + 0.6 * tokens[3:5].mean(dim=0))
    assert torch.equal(merged[2], tokens[5])


@pytest.mark.parametrize("variant", ["llava", "qwen"])
def test_fastvid_of_few_frames_and_few_tokens(variant: str) -> None:
    """Where the official code ends with an error: T <= c, K = 1 (no salient token for qwen, no anchor for llava)."""
    for n_frames in (1, 2, 7, 8, 9):
        pruned = prune(video(n_frames, 25, 16), 0.2, "fastvid", variant=variant)
        assert pruned.n_kept == 5 * n_frames
        assert pruned.merged is not None
        assert 0 < int(pruned.merged.sum()) <= 2 * n_frames
        fewest = prune(video(n_frames, 25, 16), 0.04, "fastvid", variant=variant)
        assert fewest.n_kept == n_frames
        assert fewest.merged is not None
        assert fewest.merged.any() == (variant == "qwen")


@pytest.mark.parametrize("variant", ["llava", "qwen"])
def test_fastvid_noise_overrides_the_seed(variant: str) -> None:
    tokens = torch.eye(20).expand(4, 20, 20)  # all as dense and as far from each other: the noise decides
    attention = torch.arange(20.0).expand(4, 20)
    evidence: dict[str, Any] = {"token_attention": attention, "frame_feature": torch.eye(4)}
    drawn = [gstep.prune(tokens, 0.5, "fastvid", evidence=evidence, seed=seed, variant=variant) for seed in range(4)]
    assert len({tuple(pruned.index.tolist()) for pruned in drawn}) > 1
    evidence["noise"] = torch.from_numpy(np.random.default_rng(0).random(80))
    given = [gstep.prune(tokens, 0.5, "fastvid", evidence=evidence, seed=seed, variant=variant) for seed in range(4)]
    assert len({tuple(pruned.index.tolist()) for pruned in given}) == 1
    assert given[0].index.tolist() == drawn[0].index.tolist()
    evidence["noise"] = torch.zeros(79)
    with pytest.raises(ValueError, match=r"'noise' must be \[T\*N\] = \[80\] .*; got shape \[79\]"):
        gstep.prune(tokens, 0.5, "fastvid", evidence=evidence, variant=variant)


@pytest.mark.parametrize(("every_frame_draws", "first"), [(True, 20), (False, 0)])
def test_fastvid_uses_the_noise_up_as_the_official_variants_do(every_frame_draws: bool, first: int) -> None:
    noise = torch.from_numpy(np.random.default_rng(1).random(40)).float()
    tokens = torch.eye(20).expand(2, 20, 20)
    kept = keep(tokens, torch.ones(2, 20), noise, [(0, 0), (0, 1)], every_frame_draws=every_frame_draws)
    assert [len(frame.anchors) for frame in kept] == [0, 1]
    assert kept[1].anchors.tolist() == [int(noise[first : first + 20].argmax())]


def test_fastvid_variants_need_and_assume_different_things() -> None:
    llava, qwen = gstep.make_pruner("fastvid"), gstep.make_pruner("fastvid", variant="qwen")
    assert llava.needs == gstep.PRUNERS["fastvid"].needs == {"frame_feature", "token_attention"}
    assert qwen.needs == {"token_attention"}
    assert (llava.params()["tau"], qwen.params()["tau"]) == (0.9, 0.84)
    assert gstep.make_pruner("fastvid", variant="qwen", tau=0.5).params()["tau"] == 0.5


def test_fastvid_qwen_keeps_the_last_of_similar_frames() -> None:
    tokens = video(1, 40, 32).repeat(10, 1, 1) + 0.01 * video(10, 40, 32, seed=1)
    tokens[6:] += 3 * video(1, 40, 32, seed=2)
    pruned = prune(tokens, 0.1, "fastvid", variant="qwen", c=2)
    kept = torch.bincount(pruned.index // 40, minlength=10).tolist()
    assert [frame for frame, count in enumerate(kept) if count] == [5, 9]
    assert kept[5] == 4 * 6 and kept[9] == 4 * 4


def test_real_and_nominal_numbers() -> None:
    pruned = prune(video(3, 50, 8), 0.25, "visionzip")
    assert (pruned.n_kept, pruned.budget, pruned.retention_ratio) == (3 * 12, 37, 0.25)
    assert math.isclose(pruned.kept_ratio, 0.24)
