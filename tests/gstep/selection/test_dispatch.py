"""Which form serves which video."""

from __future__ import annotations

import pytest
from torch import Tensor

import gstep
from gstep.selection.dispatch import fast_density_guided_fps
from gstep.selection.lazy import lazy_density_guided_fps
from gstep.selection.reference import density_guided_fps
from tests.gstep.selection.videos import density, video


def test_prune_takes_it_for_large_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = video("low rank", n_frames=24, hidden=512), video("low rank", n_frames=2, hidden=32)
    for tokens, lazily in ((large, True), (small, False)):
        taken: list[int] = []

        def lazy(*args: object, taken: list[int] = taken, **named: object) -> Tensor:
            taken.append(1)
            return lazy_density_guided_fps(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr("gstep.selection.dispatch.lazy_density_guided_fps", lazy)
        pruned = gstep.prune(tokens, 0.25)
        assert bool(taken) == lazily
        expected = density_guided_fps(tokens.flatten(0, 1), density(tokens), len(pruned.index))
        assert pruned.index.tolist() == sorted(expected.tolist())
        assert fast_density_guided_fps(tokens.flatten(0, 1), density(tokens), 5).tolist() == expected[:5].tolist()
