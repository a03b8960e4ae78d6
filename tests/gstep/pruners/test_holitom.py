"""HoliTom where golden cases do not reach: its windows by hand and by trying all, what stands still."""

from collections.abc import Iterator

import numpy as np
import torch

import gstep
from gstep.pruners.holitom import choose_windows


def divisions(n_frames: int, longest: int) -> Iterator[list[tuple[int, int]]]:
    if n_frames == 0:
        yield []
    for size in range(1, min(n_frames, longest) + 1):
        for before in divisions(n_frames - size, longest):
            yield [*before, (n_frames - size, n_frames)]


def test_windows_save_the_most_that_any_division_does() -> None:
    rng = np.random.default_rng(0)
    for longest in (1, 2, 3, 9):
        for _ in range(10):
            still = torch.from_numpy(rng.random((6, 5)) < 0.7)
            windows, saved = choose_windows(still, longest)

            def count(division: list[tuple[int, int]], still: torch.Tensor = still) -> int:
                return sum(int(still[a : b - 1].all(dim=0).sum()) * (b - a - 1) for a, b in division if b - a > 1)

            assert saved == count(windows) == max(map(count, divisions(7, longest)))
            assert [frame for a, b in windows for frame in range(a, b)] == list(range(7))


def test_a_still_video_keeps_a_token_at_any_budget() -> None:
    tokens = torch.ones(3, 16, 4)
    pruned = gstep.prune(tokens, budget=1, method="holitom", evidence={"token_attention": torch.ones(3, 16)})
    assert pruned.n_kept == 1
