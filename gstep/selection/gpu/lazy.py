"""Density-guided farthest point sampling on a GPU in O(M * D) memory, for videos of many tokens.

A round takes the K tokens of highest known key, which is an upper bound, updates their keys, and runs the exact greedy
selection among them as long as they beat the best key outside. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gstep.selection.gpu import kernels
from gstep.selection.gpu.gram import Task, make_open_bar, make_tile_options, run_greedy
from gstep.selection.reference import NO_DISTANCE


class LazyForm:
    """The state of one video's selection between rounds.

    Attributes:
        distance_M: float64, each token's distance to the nearest of the first ``mark_M`` picks; -inf once it is picked.
        mark_M: int32, the number of picks that a token's distance includes.
        order_B: int64, the picks in order; only the first ``count_1`` (int32) are valid.
    """

    def __init__(self, task: Task) -> None:
        """Select the task's start as the first pick, and compute the distance of every token to it."""
        self.task = task
        n_tokens = len(task.tokens)
        device = task.tokens.device
        self.distance_M = torch.full_like(task.inverse, NO_DISTANCE).index_fill_(0, task.start, -torch.inf)
        self.mark_M = torch.zeros(n_tokens, dtype=torch.int32, device=device)
        self.order_B = torch.zeros(task.budget, dtype=torch.int64, device=device)
        self.order_B[:1] = task.start
        self.count_1 = torch.ones(1, dtype=torch.int32, device=device)
        self._every_M = torch.arange(n_tokens, device=device)
        self._refresh(self._every_M, 1)
        self.mark_M.fill_(1)

    def select(self) -> Tensor:
        """Run rounds until the budget is spent, and return the picks, [B] int64 in order of selection.

        Raises:
            RuntimeError: Rounds make no progress, which cannot happen with finite tokens and densities.
        """
        tuning = self.task.tuning
        n_picks = 1  # the number that the host knows
        idle = 0  # rounds without a new pick
        while n_picks < self.task.budget:
            for ahead in range(tuning.rounds):
                self._run_round(min(self.task.budget, n_picks + ahead * tuning.candidates))
            n_previous, n_picks = n_picks, int(self.count_1)
            idle = idle + tuning.rounds if n_picks == n_previous else 0
            # A round without a pick has updated at least one stale token.
            if idle > len(self.distance_M) + tuning.rounds:
                raise RuntimeError(f"no token selected in {idle} rounds, after {n_picks} of {self.task.budget}")
        return self.order_B

    def _run_round(self, max_picks: int) -> None:
        """Run one round: choose candidates, update their distances, and pick those that are certain.

        ``max_picks`` is an upper bound of the number of picks so far, so that the launch need not wait for the GPU.
        """
        task = self.task
        row_K, bar = self._choose_candidates()
        # Sorted by mark, so that each tile skips the picks before its tokens' smallest mark.
        self._refresh(row_K[self.mark_M[row_K].argsort()], max_picks)
        distance_K = run_greedy(task, row_K, self.distance_M[row_K], bar, self.order_B, self.count_1)
        # Their distances now include all picks: earlier picks by the refresh, this round's picks by the greedy.
        self.distance_M[row_K] = distance_K
        self.mark_M[row_K] = self.count_1

    def _choose_candidates(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the K tokens with the highest known keys, in ascending index, and the best other token as the bar.

        Ties go to the lowest index. If there are at most K tokens, all are candidates and every token passes the bar.

        Returns:
            The indices, and the bar as (its key, the number of candidates with a lower index).
        """
        n_tokens = len(self.distance_M)
        n_rows = self.task.tuning.candidates
        if n_tokens <= n_rows:
            return self._every_M, make_open_bar(self.distance_M.device)
        key_M = (self.distance_M + self.task.constants[0]) * self.task.weight
        level = torch.topk(key_M, n_rows, sorted=False).values.amin()
        above_M = key_M > level
        level_M = key_M == level
        is_candidate_M = above_M | (level_M & (level_M.cumsum(0) <= n_rows - above_M.sum()))
        # Tokens that are not candidates are all written to the same index beyond the end.
        target_M = torch.where(is_candidate_M, is_candidate_M.cumsum(0) - 1, n_rows)
        row_K = self._every_M.new_empty(n_rows + 1).scatter_(0, target_M, self._every_M)[:n_rows]
        key, best = key_M.masked_fill(is_candidate_M, -torch.inf).max(dim=0)
        n_before = (row_K < best).sum() * (key > -torch.inf)
        return row_K, (key[None], n_before.to(torch.int32)[None])

    def _refresh(self, row_R: Tensor, max_picks: int) -> None:
        """Lower the distances of the tokens ``row_R`` in place to include all picks; the caller updates the marks.

        ``max_picks`` is an upper bound of the number of picks, which sizes the launch.
        """
        task = self.task
        block = self.task.tuning.block
        kernels.refresh_kernel[(triton.cdiv(len(row_R), block), triton.cdiv(max_picks, block))](
            task.tokens,
            row_R,
            self.distance_M.view(torch.int64),
            task.inverse,
            self.mark_M,
            self.order_B,
            self.count_1,
            task.constants,
            len(row_R),
            **make_tile_options(task.tokens.shape[1], task.tuning),
        )
