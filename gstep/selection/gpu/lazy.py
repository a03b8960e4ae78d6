"""Density-guided farthest point sampling on a GPU in O(M * D) memory, for videos of many tokens.

``launch`` takes this form where the distances of all pairs are too many for the first one (``gram``), which is faster.

Distances only shrink, so that a key computed against earlier picks is an upper bound. A round takes the K best such
keys, brings them up to date, and runs the exact greedy among them for as long as it beats the best other one.

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
        mark_M: int32.
        order_B: int64, of which ``count_1`` (int32) are valid.
    """

    def __init__(self, task: Task) -> None:
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
        """Select the picks, [B] int64 in order of selection.

        Raises RuntimeError where rounds stop making progress, which finite tokens and densities rule out.
        """
        tuning = self.task.tuning
        known, idle = 1, 0  # picks that the host knows of, and rounds without a new one
        while known < self.task.budget:
            for ahead in range(tuning.rounds):
                self._round(min(self.task.budget, known + ahead * tuning.candidates))
            before, known = known, int(self.count_1)
            idle = idle + tuning.rounds if known == before else 0
            # A round without a pick has brought at least one stale token up to date.
            if idle > len(self.distance_M) + tuning.rounds:
                raise RuntimeError(f"no token selected in {idle} rounds, after {known} of {self.task.budget}")
        return self.order_B

    def _round(self, most_picks: int) -> None:
        """Run one round: choose candidates, refresh their distances, and pick as many as are certain.

        ``most_picks`` is an upper bound of the picks made so far, known without waiting for the GPU.
        """
        task = self.task
        row_K, bar = self._candidates()
        # Sorted by mark, so that each tile updates its tokens from their own smallest mark on.
        self._refresh(row_K[self.mark_M[row_K].argsort()], most_picks)
        distance_K = run_greedy(task, row_K, self.distance_M[row_K], bar, self.order_B, self.count_1)
        # Their distances now include all picks: earlier ones by the refresh, those of this round by the greedy.
        self.distance_M[row_K] = distance_K
        self.mark_M[row_K] = self.count_1

    def _candidates(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Find the K best tokens by stale key, ties by lowest index, in ascending order, and the best other as the bar.

        The best of all is among them, so that it is picked or refreshed.
        """
        n_tokens, n_rows = len(self.distance_M), self.task.tuning.candidates
        if n_tokens <= n_rows:
            return self._every_M, no_bar(self.distance_M.device)
        key_M = (self.distance_M + self.task.constants[0]) * self.task.weight
        level = torch.topk(key_M, n_rows, sorted=False).values.amin()
        above_M, level_M = key_M > level, key_M == level
        chosen_M = above_M | (level_M & (level_M.cumsum(0) <= n_rows - above_M.sum()))
        # Tokens that are not chosen are all written to one place beyond the end.
        place_M = torch.where(chosen_M, chosen_M.cumsum(0) - 1, n_rows)
        row_K = self._every_M.new_empty(n_rows + 1).scatter_(0, place_M, self._every_M)[:n_rows]
        key, best = key_M.masked_fill(chosen_M, -torch.inf).max(dim=0)
        before = (row_K < best).sum() * (key > -torch.inf)
        return row_K, (key[None], before.to(torch.int32)[None])

    def _refresh(self, row_R: Tensor, most_picks: int) -> None:
        """Update the distances of ``row_R`` with all picks; their marks are the caller's to move."""
        task, block = self.task, self.task.tuning.block
        kernels.refresh_kernel[(triton.cdiv(len(row_R), block), triton.cdiv(most_picks, block))](
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
