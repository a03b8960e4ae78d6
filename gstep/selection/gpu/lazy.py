"""Density-guided farthest point sampling on a GPU in O(M * D) memory, for videos of many tokens.

``launch`` takes this form if the distances of all pairs do not fit into memory; else ``gram``, which is faster.

Distances only shrink, so that a key computed against earlier picks is an upper bound. A round takes the K best keys,
brings them up to date, and runs the exact greedy among them for as long as they beat the best key outside.

Importing this needs Triton. Shapes: M tokens, D hidden size, B budget, K candidates of a round.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gstep.selection.gpu import kernels
from gstep.selection.gpu.gram import Task, no_bar, run_greedy, tile_options
from gstep.selection.reference import NO_DISTANCE


class LazyForm:
    """The state of one video's selection between rounds.

    Attributes:
        distance_M: float64, each token's distance to the first ``mark_M`` picks, -inf once it is picked.
        mark_M: int32, the number of picks that a token's distance includes.
        order_B: int64, the picks in order; the first ``count_1`` (int32) are valid.
    """

    def __init__(self, task: Task) -> None:
        """Take the task's start as the first pick, and measure the distance of every token to it."""
        self.task = task
        n_tokens, device = len(task.tokens), task.tokens.device
        self.distance_M = torch.full_like(task.inverse, NO_DISTANCE).index_fill_(0, task.start, -torch.inf)
        self.mark_M = torch.zeros(n_tokens, dtype=torch.int32, device=device)
        self.order_B = torch.zeros(task.budget, dtype=torch.int64, device=device)
        self.order_B[:1] = task.start
        self.count_1 = torch.ones(1, dtype=torch.int32, device=device)
        self._every_M = torch.arange(n_tokens, device=device)
        self._refresh(self._every_M, 1)
        self.mark_M.fill_(1)

    def select(self) -> Tensor:
        """Run rounds until the budget is spent; return the picks, [B] int64 in order of selection.

        Raises RuntimeError if rounds make no progress, which finite tokens and densities rule out.
        """
        tuning = self.task.tuning
        n_picks, idle = 1, 0  # picks that the host knows of, and rounds without a new one
        while n_picks < self.task.budget:
            for ahead in range(tuning.rounds):
                self._round(min(self.task.budget, n_picks + ahead * tuning.candidates))
            n_previous, n_picks = n_picks, int(self.count_1)
            idle = idle + tuning.rounds if n_picks == n_previous else 0
            # A round without a pick has brought at least one stale token up to date.
            if idle > len(self.distance_M) + tuning.rounds:
                raise RuntimeError(f"no token selected in {idle} rounds, after {n_picks} of {self.task.budget}")
        return self.order_B

    def _round(self, max_picks: int) -> None:
        """Run one round: choose candidates, refresh their distances, and pick as many as are certain.

        ``max_picks`` is an upper bound of the number of picks so far, for a launch that does not wait for the GPU.
        """
        task = self.task
        row_K, bar = self._choose_candidates()
        # Sorted by mark, so that each tile updates its tokens from their own smallest mark on.
        self._refresh(row_K[self.mark_M[row_K].argsort()], max_picks)
        distance_K = run_greedy(task, row_K, self.distance_M[row_K], bar, self.order_B, self.count_1)
        # Their distances now include all picks: earlier picks by the refresh, this round's picks by the greedy.
        self.distance_M[row_K] = distance_K
        self.mark_M[row_K] = self.count_1

    def _choose_candidates(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Find the K best tokens by stale key, in ascending index, and the best token outside of them as the bar.

        Ties go to the lowest index. The best token of all is a candidate, so that it is picked or refreshed.
        """
        n_tokens, n_rows = len(self.distance_M), self.task.tuning.candidates
        if n_tokens <= n_rows:
            return self._every_M, no_bar(self.distance_M.device)
        key_M = (self.distance_M + self.task.constants[0]) * self.task.weight
        level = torch.topk(key_M, n_rows, sorted=False).values.amin()
        above_M, level_M = key_M > level, key_M == level
        is_candidate_M = above_M | (level_M & (level_M.cumsum(0) <= n_rows - above_M.sum()))
        # Tokens that are no candidates are all written to one index beyond the end.
        target_M = torch.where(is_candidate_M, is_candidate_M.cumsum(0) - 1, n_rows)
        row_K = self._every_M.new_empty(n_rows + 1).scatter_(0, target_M, self._every_M)[:n_rows]
        key, best = key_M.masked_fill(is_candidate_M, -torch.inf).max(dim=0)
        n_before = (row_K < best).sum() * (key > -torch.inf)
        return row_K, (key[None], n_before.to(torch.int32)[None])

    def _refresh(self, row_R: Tensor, max_picks: int) -> None:
        """Update the distances of ``row_R`` with all picks; the caller moves their marks."""
        task, block = self.task, self.task.tuning.block
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
            **tile_options(task.tokens.shape[1], task.tuning),
        )
