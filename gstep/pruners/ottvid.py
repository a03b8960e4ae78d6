"""OTT-Vid: tokens that cover each frame, then merges between neighboring frames by optimal transport.

Shapes: K tokens that the first step picks of a frame, P = T-1 pairs of neighboring frames, R merges in all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from gstep.density import scale_to_work_dtype
from gstep.evidence import LAST_LAYER
from gstep.pruners.base import Pruner, Selection
from gstep.pruners.checks import check_integer, check_number
from gstep.pruners.vectors import normalize_rows
from gstep.selection.reference import find_largest
from gstep.types import VisualTokens

_MIN_EPS = 0.005  # costs lie in [0, 1], so exp(-cost / eps) and the scalings stay in the range of float64
_BLOCK = 2**23  # similarities in memory at a time: 32 MB


@dataclass(frozen=True, kw_only=True)
class OTTVid(Pruner):
    """Facility location within frames, and optimal transport between them, for LLaVA: arXiv 2605.11803.

    Source: github.com/minseokii/OTT-Vid at 12a6d26, the functions for LLaVA-Video, with the settings of its README.

    Each frame picks K = round(N * r^(1-gamma)) tokens that cover its attention. A transport plan between neighboring
    frames is computed from the masses of the picked tokens and the costs of their pairs. R = T*K - B merges are divided
    among the pairs of frames, with more for cheaper pairs. In a pair, the tokens of the later frame that receive the
    most from a single token are merged into it; over several frames, merges form trees. A token whose merge costs more
    than ``theta`` is dropped together with all that is merged into it. A tree becomes the plain mean of its tokens, at
    the index of its root in the earliest frame.

    The method always keeps B tokens, while the official code rounds by its own rule. Therefore K is at least B/T, and
    at most B-T+1, so that R merges leave each frame a token. With fewer tokens than frames, K is 1, and frames may
    become empty. A single frame picks B tokens. The official code assumes 13 x 13 tokens; here the grid is the video's.

    Attributes:
        gamma: The exponent's share of the reduction that merging does, in [0, 1].
        tau_m: The temperature of the masses, > 0.
        tau_b: The temperature at which merges are divided among pairs of frames, > 0.
        theta: A merge that costs more drops the token, >= 0.
        eps: The entropic regularization of the transport, >= 0.005.
        iterations: The number of Sinkhorn iterations, at least 1.
    """

    name: ClassVar[str] = "ottvid"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"token_attention"})
    sources: ClassVar[Mapping[str, str]] = MappingProxyType({"token_attention": LAST_LAYER})

    gamma: float = 0.3
    tau_m: float = 0.3
    tau_b: float = 0.3
    theta: float = 0.3
    eps: float = 0.01
    iterations: int = 200

    def __post_init__(self) -> None:
        """Raise ValueError for an invalid parameter, and convert numbers to floats or ints."""
        temperatures = {"tau_m": self.tau_m, "tau_b": self.tau_b}
        self._set(
            gamma=check_number("gamma", self.gamma, "in [0, 1]", lambda x: 0 <= x <= 1),
            theta=check_number("theta", self.theta, "at least 0", lambda x: x >= 0),
            eps=check_number("eps", self.eps, f"at least {_MIN_EPS}", lambda x: x >= _MIN_EPS),
            iterations=check_integer("iterations", self.iterations, 1),
            **{name: check_number(name, value, "above 0", lambda x: x > 0) for name, value in temperatures.items()},
        )

    def select(self, visual: VisualTokens, budget: int, ratio: float, seed: int) -> Selection:
        """Pick tokens of each frame, and merge them over frames to exactly ``budget`` tokens; ``seed`` is not used.

        If the frames' picks are already B tokens, none is changed. Otherwise the later tokens of the strongest
        transports are removed: merged into their target, or dropped if that costs more than ``theta``. The indices
        ascend. ``merged`` marks tokens that merging changed.
        """
        n_frames, per_frame, _ = visual.tokens.shape
        n_picks = self._count_picks(n_frames, per_frame, budget, ratio)
        direction_TND = normalize_rows(scale_to_work_dtype(visual.tokens))
        attention_TN = visual.evidence["token_attention"].double().clamp(min=0)
        pick_TK, similarity_TNK = pick_covering(direction_TND, attention_TN, n_picks)
        index_TK = pick_TK + torch.arange(n_frames, device=pick_TK.device)[:, None] * per_frame
        tokens_TKD = visual.tokens.flatten(0, 1)[index_TK]
        n_merges = n_frames * n_picks - budget
        if n_merges == 0:
            return Selection(
                index_TK.flatten(),
                tokens=tokens_TKD.flatten(0, 1),
                merged=torch.zeros(budget, dtype=torch.bool, device=pick_TK.device),
            )
        mass_TK = weigh_picks(similarity_TNK, attention_TN, pick_TK, self.tau_m)
        picked_TKD = direction_TND.flatten(0, 1)[index_TK]
        alikeness_P = (direction_TND[:-1] * direction_TND[1:]).sum(dim=-1).double().mean(dim=1)
        cost_PKK = compute_costs(picked_TKD, pick_TK, alikeness_P, visual.known_grid)
        plan_PKK = plan_transport(mass_TK, cost_PKK, self.eps, self.iterations)
        price_P = (plan_PKK * cost_PKK).sum(dim=(1, 2))
        counts = divide_merges(price_P, n_merges, max(1, n_picks - 1), self.tau_b)
        strength_PK, parent_PK = plan_PKK.max(dim=1)
        order_PK = find_largest(strength_PK, n_picks)
        rank_PK = torch.empty_like(order_PK).scatter_(
            1, order_PK, torch.arange(n_picks, device=order_PK.device).expand_as(order_PK)
        )
        is_merge_PK = rank_PK < torch.tensor(counts, device=rank_PK.device)[:, None]
        is_near_PK = cost_PKK.gather(1, parent_PK[:, None]).squeeze(1) <= self.theta
        mean_TKD = merge_trees(tokens_TKD, parent_PK.masked_fill(~(is_merge_PK & is_near_PK), -1))
        is_kept_TK = torch.cat([torch.ones_like(is_merge_PK[:1]), ~is_merge_PK])
        is_changed_TK = (mean_TKD != tokens_TKD).any(dim=-1)
        return Selection(index_TK[is_kept_TK], tokens=mean_TKD[is_kept_TK], merged=is_changed_TK[is_kept_TK])

    def _count_picks(self, n_frames: int, per_frame: int, budget: int, ratio: float) -> int:
        """Compute K, the number of tokens that each frame picks: round(N * r^(1-gamma)), but at least B/T.

        It is also at most N and at most B-T+1, which wins over B/T, but at least 1.
        """
        share: float = ratio ** (1 - self.gamma)
        n_picks = max(round(per_frame * share), math.ceil(budget / n_frames))
        return max(1, min(per_frame, n_picks, budget - n_frames + 1))


def pick_covering(direction_TND: Tensor, attention_TN: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Pick ``count`` tokens of each frame that cover its attention, greedily: facility location.

    Each pick is the token that raises the most the sum, weighted by attention, of each token's largest similarity to a
    pick (0 without picks). Ties go to the lowest index.

    Args:
        direction_TND: Unit tokens.
        attention_TN: At least 0.

    Returns:
        The picks' indices in their frame, [T,K], ascending, and the similarity of each token to each pick, [T,N,K].
    """
    weight_TN = attention_TN / (attention_TN.sum(dim=1, keepdim=True) + 1e-8)
    n_frames, per_frame, _ = direction_TND.shape
    step = max(1, _BLOCK // per_frame**2)
    picks, similarities = [], []
    for start in range(0, n_frames, step):
        direction_BND = direction_TND[start : start + step]
        # Symmetric, so that row [:, j] is what token j covers.
        similarity_BNN = direction_BND @ direction_BND.mT
        weight_B1N = weight_TN[start : start + step, None].to(similarity_BNN.dtype)
        covered_B1N = torch.zeros_like(weight_B1N)
        is_pick_BN = torch.zeros_like(weight_B1N[:, 0], dtype=torch.bool)
        gain_BNN = torch.empty_like(similarity_BNN)
        for _ in range(count):
            torch.sub(similarity_BNN, covered_B1N, out=gain_BNN).clamp_(min=0)
            gain_BN = (gain_BNN @ weight_B1N.mT).squeeze(-1)
            best_B1 = gain_BN.masked_fill(is_pick_BN, -torch.inf).argmax(dim=1, keepdim=True)
            is_pick_BN.scatter_(1, best_B1, True)
            covered_B1N = torch.maximum(covered_B1N, similarity_BNN.take_along_dim(best_B1[:, :, None], dim=1))
        pick_BK = is_pick_BN.nonzero()[:, 1].view(-1, count)
        picks.append(pick_BK)
        similarities.append(similarity_BNN.take_along_dim(pick_BK[:, None], dim=2))
    return torch.cat(picks), torch.cat(similarities)


def weigh_picks(similarity_TNK: Tensor, attention_TN: Tensor, pick_TK: Tensor, tau: float) -> Tensor:
    """Compute the mass of each picked token, [T,K] float64 with sum 1 in a frame: more for a token that covers less.

    For each token of the frame that is nearest to it, a pick covers the lead of its similarity over that of the second
    nearest pick (over 0 if it is the only pick). Picked tokens are weighted by their attention, and all others by the
    mean attention of the picks. The mass is the softmax of minus the coverage, as a share of the frame's largest, over
    ``tau``.
    """
    picked_TK = attention_TN.gather(1, pick_TK)
    weight_TN = picked_TK.mean(dim=1, keepdim=True).repeat(1, attention_TN.shape[1]).scatter(1, pick_TK, picked_TK)
    weight_TN = weight_TN / (weight_TN.sum(dim=1, keepdim=True) + 1e-8)
    best = similarity_TNK.double().topk(min(2, pick_TK.shape[1]), dim=2)
    second_TN = best.values[..., 1] if pick_TK.shape[1] > 1 else 0.0
    lead_TN1 = (weight_TN * (best.values[..., 0] - second_TN).clamp(min=0))[..., None]
    is_nearest_TNK = best.indices[..., :1] == torch.arange(pick_TK.shape[1], device=pick_TK.device)
    added_TK = (lead_TN1 * is_nearest_TNK).sum(dim=1)
    return torch.softmax(-added_TK / (added_TK.amax(dim=1, keepdim=True) + 1e-8) / tau, dim=1)


def compute_costs(picked_TKD: Tensor, pick_TK: Tensor, alikeness_P: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compute the cost of merging each token of a frame into each token of the previous frame, float64.

    The cost is alpha times the cosine distance (at most 1) plus 1 - alpha times the Euclidean distance in the frame,
    with rows and columns each scaled to [0, 1], divided by sqrt(2). alpha falls from 1 for pairs of frames with
    ``alikeness_P`` <= 0 to 1/2 at 1.

    Args:
        picked_TKD: The picked tokens as unit vectors.
        pick_TK: Their indices in the frame.
        alikeness_P: The mean cosine at equal positions of the two frames.
        grid: (rows, columns) of a frame.

    Returns:
        [P,K,K]: the pair of frames, the token of the previous frame, the token of the later frame.
    """
    rows, columns = grid
    place_TK2 = torch.stack(
        [pick_TK // columns / max(1, rows - 1), pick_TK % columns / max(1, columns - 1)], dim=-1
    ).double()
    distance_PKK = torch.linalg.vector_norm(place_TK2[:-1, :, None] - place_TK2[1:, None], dim=-1) / math.sqrt(2)
    cosine_PKK = (picked_TKD[:-1] @ picked_TKD[1:].mT).double().clamp(min=0)
    alpha_P11 = (0.5 + 0.5 * (1 - alikeness_P).clamp(0, 1))[:, None, None]
    cost_PKK: Tensor = alpha_P11 * (1 - cosine_PKK) + (1 - alpha_P11) * distance_PKK
    return cost_PKK


def plan_transport(mass_TK: Tensor, cost_PKK: Tensor, eps: float, iterations: int) -> Tensor:
    """Compute the transport of each frame's masses to the next frame's, by Sinkhorn iterations: [P,K,K] float64.

    The axes are those of ``cost_PKK``: the pair, the token of the previous frame (source), the token of the later frame
    (target). ``eps`` is the entropic regularization, >= 0.005 for costs in [0, 1].
    """
    kernel_PKK = torch.exp(-cost_PKK / eps)
    source_PK1, target_PK1 = mass_TK[:-1, :, None], mass_TK[1:, :, None]
    left_PK1 = torch.ones_like(source_PK1)
    for _ in range(iterations):
        right_PK1 = target_PK1 / (kernel_PKK.mT @ left_PK1)
        left_PK1 = source_PK1 / (kernel_PKK @ right_PK1)
    return left_PK1 * kernel_PKK * right_PK1.mT


def divide_merges(price_P: Tensor, n_merges: int, most: int, tau: float) -> list[int]:
    """Divide merges among pairs of frames by a softmax of -price / tau, at most ``most`` per pair.

    Shares are rounded down, and the remainder goes one by one to the largest fractions, the earlier pair first. What
    exceeds a pair's limit is divided again among the pairs that are not full.

    Args:
        price_P: The cost of each pair's transport plan.
        n_merges: At most ``most`` times the number of pairs.
    """
    counts = torch.zeros(len(price_P), dtype=torch.int64, device="cpu")
    price_P, left = price_P.cpu(), n_merges
    while left:
        open_Q = (counts < most).nonzero().squeeze(1)
        share_Q = torch.softmax(-price_P[open_Q] / tau, dim=0) * left
        count_Q = share_Q.floor().long()
        count_Q[find_largest(share_Q - count_Q, left - int(count_Q.sum()))] += 1
        taken_Q = torch.minimum(count_Q, most - counts[open_Q])
        counts[open_Q] += taken_Q
        left -= int(taken_Q.sum())
    return [int(count) for count in counts]


def merge_trees(tokens_TKD: Tensor, parent_PK: Tensor) -> Tensor:
    """Average each token with all tokens merged into it, directly or not, from later frames: [T,K,D] float64.

    ``parent_PK`` has, for each token of the later frame of a pair, the number of a token in the previous frame; -1 for
    none.
    """
    n_frames, n_picks, _ = tokens_TKD.shape
    size_TK = torch.ones(n_frames, n_picks, dtype=torch.float64, device=tokens_TKD.device)
    sums = []
    sum_KD = tokens_TKD[-1].double()
    for frame in range(n_frames - 1, 0, -1):
        sums.append(sum_KD)
        child_KK = (torch.arange(n_picks, device=parent_PK.device)[:, None] == parent_PK[frame - 1]).double()
        size_TK[frame - 1] += child_KK @ size_TK[frame]
        sum_KD = tokens_TKD[frame - 1].double() + child_KK @ sum_KD
    return torch.stack([sum_KD, *sums[::-1]]) / size_TK[..., None]
