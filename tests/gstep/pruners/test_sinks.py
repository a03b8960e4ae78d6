"""SToP by hand: sink scores, and what they change in each of the four methods; 0 changes nothing."""

from typing import Any

import numpy as np
import pytest
import torch

import gstep
from gstep.pruners.fastvid import choose_tokens
from gstep.pruners.flashvid import pick_diverse
from gstep.pruners.holitom import choose_windows
from gstep.pruners.segments import compute_scaled_distances, score_density_peaks
from gstep.pruners.sinks import compute_sink_scores, find_sinks, move_off_sinks
from gstep.pruners.vectors import normalize_rows
from tests.gstep.synthetic import assert_same, evidence_for, prune, video

HOSTS = ("visionzip", "fastvid", "flashvid", "holitom")


def plain_scores(attention: torch.Tensor) -> list[float]:
    """The rule position by position."""
    n_frames, per_frame = attention.shape
    power = [float(np.mean([float(attention[t, i]) for t in range(n_frames)])) ** 1.1 for i in range(per_frame)]
    return [(value - min(power)) / (max(power) - min(power) + 1e-12) for value in power]


def attended(n_frames: int, per_frame: int, sinks: list[int]) -> torch.Tensor:
    """Attention of sum 1 that differs from frame to frame, but is large at the sinks always."""
    weight = torch.from_numpy(np.random.default_rng(5).random((n_frames, per_frame)))
    weight[:, sinks] += 4
    return (weight / weight.sum(dim=1, keepdim=True)).float()


def test_a_sink_score_grows_with_the_mean_attention_over_frames() -> None:
    attention = attended(5, 12, [3, 7])
    score = compute_sink_scores(attention)
    assert torch.allclose(score, torch.tensor(plain_scores(attention), dtype=torch.float64), atol=1e-12)
    assert sorted(score.topk(2).indices.tolist()) == [3, 7] and (score.min(), score.max() > 0.999) == (0, True)
    assert compute_sink_scores(torch.ones(2, 3)).tolist() == [0, 0, 0]
    assert compute_sink_scores(torch.tensor([[-3.0, 0.0, 1.0]])).tolist()[:2] == [0, 0]  # no power of a negative number
    assert find_sinks(torch.arange(30.0)).nonzero().flatten().tolist() == list(range(10, 30))
    assert find_sinks(torch.arange(7.0)).all()


@pytest.mark.parametrize(
    ("targets", "sinks", "expected"),
    [
        ([0, 4, 8], [], [0, 4, 8]),
        ([0, 4, 8], [4, 5], [0, 6, 8]),
        ([0, 4, 8], [4, 5, 6, 7], [0, 8, 9]),  # 8 is taken by what was 4
        ([0, 4, 8], [8, 9], [0, 1, 4]),  # on from the first
        ([0, 1], list(range(10)), [0, 1]),
    ],
)
def test_targets_move_off_sinks(targets: list[int], sinks: list[int], expected: list[int]) -> None:
    assert move_off_sinks(targets, [number in sinks for number in range(10)]) == expected


@pytest.mark.parametrize("method", HOSTS)
def test_zero_changes_neither_the_selection_nor_the_recorded_parameters(method: str) -> None:
    pruner = gstep.make_pruner(method)
    params: dict[str, Any] = {"mu_s": 0.0} | ({"mu_t": 0} if method == "holitom" else {})
    assert gstep.make_pruner(method, **params) == pruner
    assert not pruner.params().keys() & {"mu_s", "mu_t"}
    assert gstep.make_pruner(method, mu_s=0.02).params()["mu_s"] == 0.02
    tokens = video(8, 25, 16)
    assert_same(prune(tokens, 0.2, method, **params), prune(tokens, 0.2, method))


@pytest.mark.parametrize("method", HOSTS)
def test_sinks_are_kept_less(method: str) -> None:
    """Their attention is the highest, so that they are kept of most frames unless they are ranked lower."""
    sinks = [3, 11, 17]
    tokens, attention = video(8, 25, 16), attended(8, 25, sinks)
    kept = {}
    for mu_s in (0.0, 0.3):
        pruner = gstep.make_pruner(method, mu_s=mu_s)
        evidence = {**evidence_for(pruner, tokens), "token_attention": attention}
        pruned = pruner.prune(gstep.VisualTokens(tokens, evidence), 0.25)
        assert pruned.merged is not None
        position = pruned.index[~pruned.merged] % 25
        kept[mu_s] = sum(int((position == sink).sum()) for sink in sinks)
    assert kept[0.0] > 3 * kept[0.3]


def test_negative_weights_and_variants_without_a_rule_are_refused() -> None:
    for method, name in (*((method, "mu_s") for method in HOSTS), ("holitom", "mu_t")):
        with pytest.raises(ValueError, match=f"{name} must be a number at least 0"):
            gstep.make_pruner(method, **{name: -0.1})
    for method in ("visionzip", "fastvid"):
        assert gstep.make_pruner(method, variant="qwen", mu_s=0.0) == gstep.make_pruner(method, variant="qwen")
        with pytest.raises(ValueError, match="mu_s is defined for variant llava alone"):
            gstep.make_pruner(method, variant="qwen", mu_s=0.1)


def test_visionzip_ranks_by_what_is_left_and_moves_its_targets() -> None:
    """Of 40 positions the 20 in the middle are sinks. Of 10 kept tokens of a frame 8 are dominant, 2 contextual."""
    attention, tokens = attended(3, 40, list(range(10, 30))), video(3, 40, 8)
    score = torch.tensor(plain_scores(attention), dtype=torch.float64)
    evidence = {"token_attention": attention, "token_key": video(3, 40, 4, seed=1)}
    pruned = gstep.prune(tokens, 0.25, "visionzip", evidence=evidence, mu_s=0.01)
    index, order = pruned.index[pruned.compute_selection_order()].view(3, 10), []
    for t in range(3):
        value = (attention[t].double() - 0.01 * score).tolist()
        dominant = sorted(sorted(range(40), key=value.__getitem__)[-8:])
        plain = [n for n in range(40) if n not in dominant]
        assert plain[0] == 0 and 10 <= plain[16] < 30  # the targets are the plain tokens 0 and 16; the second is a sink
        order.append([*dominant, 0, 30])
    assert (index % 40).tolist() == order


def test_fastvid_subtracts_from_the_scores_of_anchors_once_or_twice() -> None:
    tokens, attention = video(1, 12, 16), torch.zeros(1, 12)
    penalty, noise = torch.linspace(0, 3, 12, dtype=torch.float64).flip(0), torch.zeros(12)
    peak = score_density_peaks(compute_scaled_distances(tokens[0]), noise, 4)
    for share, times in ((2, 1), (1, 2)):
        (frame,) = choose_tokens(
            tokens, attention, noise, [(0, 2)], every_frame_draws=True, penalty_N=penalty, frame_share=share
        )
        assert frame.anchors.tolist() == sorted((peak - times * penalty).topk(2).indices.tolist())


def test_flashvid_weighs_by_what_is_left_of_the_attention_in_each_segment() -> None:
    tokens, attention = video(4, 20, 8), attended(4, 20, [2, 9])
    params: dict[str, Any] = {"alpha": 1.0, "min_segment_num": 2, "segment_threshold": -1.0, "mu_s": 0.05}
    pruned = gstep.prune(tokens, 0.2, "flashvid", evidence={"token_attention": attention}, **params)
    mean = normalize_rows(tokens.mean(dim=1))
    cut = int((mean[:-1] * mean[1:]).sum(dim=1).argmin()) + 1
    expected = torch.zeros(4, 20, dtype=torch.bool)
    for part in (slice(0, cut), slice(cut, 4)):
        left = attention[part].double() - 0.05 * torch.tensor(plain_scores(attention[part]), dtype=torch.float64)
        relevance = tokens[part] @ tokens[part].mean(dim=(0, 1))
        expected[part] = pick_diverse(normalize_rows(tokens[part]), left * relevance, 4)
    assert pruned.index.tolist() == expected.flatten().nonzero().flatten().tolist()


def test_holitom_takes_sinks_for_static_but_plans_without_them() -> None:
    tokens = video(1, 10, 8).repeat(4, 1, 1) + 0.35 * video(4, 10, 8, seed=1)
    attention = attended(4, 10, [0, 1, 2, 3])
    direction = normalize_rows(tokens)
    similarity = (direction[:-1] * direction[1:]).sum(dim=-1)
    windows, saved = choose_windows(similarity > 0.8, 1024)
    score = torch.tensor(plain_scores(attention), dtype=torch.float64)
    share = min(1.0, 0.5 / ((40 - saved) / 40))
    expected = []
    for start, end in windows:
        near = similarity[start : end - 1] + 0.3 * score > 0.8
        static = [n for n in range(10) if end - start > 1 and near[:, n].all()]
        moving = [n for n in range(10) if n not in static]
        for t in range(start, end):
            value = {n: float(attention[t, n] - 0.1 * score[n]) for n in moving}
            n_kept = int(np.ceil(len(moving) * share))
            expected += [10 * t + n for n in sorted(moving, key=value.__getitem__)[len(moving) - n_kept :]]
        n_static = max(round(len(static) * share), 0 if moving else 1)
        if n_static:
            mean = tokens[start:end, static].mean(dim=0)
            peak = score_density_peaks(compute_scaled_distances(mean), torch.zeros(len(static)), min(7, n_static))
            best = (peak - 0.3 * score[static]).topk(n_static).indices.tolist()
            expected += [10 * start + static[place] for place in best]
    evidence = {"token_attention": attention, "noise": torch.zeros(40)}
    plain = gstep.prune(tokens, 0.5, "holitom", evidence=evidence)
    pruned = gstep.prune(tokens, 0.5, "holitom", evidence=evidence, mu_s=0.1, mu_t=0.3)
    assert pruned.index.tolist() == sorted(expected)
    assert pruned.n_kept < plain.n_kept
