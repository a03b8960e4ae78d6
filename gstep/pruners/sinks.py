"""SToP: sink scores, which four methods use to rank attention sinks lower.

A sink is a position that gets much attention in all frames, whatever they show. Shapes: X unselected tokens of a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gstep.pruners.base import Pruner
from gstep.pruners.checks import check_number
from gstep.selection.reference import find_largest

_GAMMA = 1.1  # exponent of the mean attention
_PEAK_WEIGHT = 0.3  # weight of a sink score against a density peak's score
_N_SINKS = 20  # positions that count as sinks where a method distinguishes only sinks and other positions


@dataclass(frozen=True, kw_only=True)
class SinkPruner(Pruner):
    """The base class of the methods that can rank attention sinks lower, as SToP does (arXiv 2604.20937).

    Source: the rules of github.com/rlqja1107/SToP at 3bf998c, for LLaVA; it has no license, so none of its code is
    used. The authors' values of ``mu_s`` at 10 % are 0.03 for VisionZip, 0.02 for FastVID and FlashVID, and 0.04 (with
    ``mu_t`` 0.07) for HoliTom. They fit attention as the encoder's softmax gives it.

    Attributes:
        mu_s: The weight of a position's sink score, which is subtracted from its attention, >= 0. With 0, the method is
            unchanged.
    """

    mu_s: float = 0.0

    def __post_init__(self) -> None:
        """Check ``mu_s`` and convert it to a float; raise ValueError if it is negative or not a finite number."""
        self._set(mu_s=check_number("mu_s", self.mu_s, "at least 0", lambda x: x >= 0))

    def params(self) -> dict[str, Any]:
        """Return the hyper-parameters by name, without ``mu_s`` and ``mu_t`` where they are 0.

        This preserves the identity of caches that are older than these parameters.
        """
        return {name: value for name, value in super().params().items() if value or name not in ("mu_s", "mu_t")}

    def _check_llava(self, variant: str) -> None:
        """Raise ValueError if ``mu_s`` is not 0 in a variant other than llava."""
        if self.mu_s and variant != "llava":
            raise ValueError(f"mu_s is defined for variant llava alone; set it to 0 for variant {variant}")

    def _suppress_sinks(self, attention_TN: Tensor) -> Tensor:
        """Return the attention minus ``mu_s`` times each position's sink score, in float64, or unchanged for 0."""
        if self.mu_s == 0:
            return attention_TN
        return attention_TN.double() - self.mu_s * compute_sink_scores(attention_TN)

    def _compute_peak_penalty(self, attention_TN: Tensor) -> Tensor | None:
        """Compute the amount to subtract from each position's score as a density peak, [N]; None if ``mu_s`` is 0."""
        return None if self.mu_s == 0 else _PEAK_WEIGHT * compute_sink_scores(attention_TN)


def compute_sink_scores(attention_TN: Tensor) -> Tensor:
    """Compute each position's sink score, [N] float64 in [0, 1].

    It is the mean attention over frames (at least 0) to the power 1.1, rescaled so that the lowest is 0 and the highest
    about 1; all are 0 if the means are equal.
    """
    power_N = attention_TN.double().mean(dim=0).clamp(min=0) ** _GAMMA
    return (power_N - power_N.min()) / (power_N.max() - power_N.min() + 1e-12)


def find_sinks(score_N: Tensor) -> Tensor:
    """Return [N] bool, True for the 20 positions of largest sink score (all, if N is smaller)."""
    return torch.zeros_like(score_N, dtype=torch.bool).index_fill(0, find_largest(score_N, _N_SINKS), True)


def move_off_sinks(targets: Sequence[int], is_sink_X: Sequence[bool]) -> list[int]:
    """Replace each target that is a sink by the next number that is neither a sink nor chosen for an earlier target.

    The search wraps around from the last number to 0. If all free numbers are sinks, the first free number from the
    target on is chosen. The result has different numbers, ascending.
    """
    chosen: list[int] = []
    for target in targets:
        free = [number for number in (*range(target, len(is_sink_X)), *range(target)) if number not in chosen]
        chosen.append(next((number for number in free if not is_sink_X[number]), free[0]))
    return sorted(chosen)
