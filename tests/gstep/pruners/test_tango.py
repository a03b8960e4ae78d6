"""Tango where golden cases do not reach: rotation by hand, groups, blocks, sinks, times, counts."""

import pytest
import torch

import gstep
from gstep.pruners import tango
from gstep.pruners.tango import find_groups, rotate_directions
from tests.gstep.synthetic import video


def test_tango_sections_are_those_of_the_official_code_at_its_width() -> None:
    """1196 channels of time, 1194 of row and of column; at the origin of all three nothing turns."""
    direction = torch.ones(2, 2, 3584, dtype=torch.float64)
    moved = rotate_directions(direction, (0.0, 1.0), columns=2) != direction
    assert not moved[0, 0].any()
    assert moved[1, 0].nonzero().flatten().tolist() == list(range(1196))
    assert moved[0, 1].nonzero().flatten().tolist() == list(range(2390, 3584))


def test_tango_groups_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, noise = video(23, 6).double(), torch.rand(23, generator=torch.Generator().manual_seed(0))
    for count, k in ((1, 7), (5, 3), (22, 40)):
        groups = []
        for block in (2**25, 1, 64):
            monkeypatch.setattr(tango, "_BLOCK", block)
            center, group = find_groups(rows, noise, count, k)
            groups.append((center.tolist(), group.tolist()))
        assert groups[1:] == groups[:1] * 2 and len(groups[0][0]) == count


def test_tango_keeps_each_index_once_where_centers_are_equal() -> None:
    tokens = video(1, 1, 8).expand(3, 20, 8)
    pruned = gstep.prune(
        tokens, 0.5, "tango", evidence={"token_attention": torch.rand(3, 20)}, grid=(1, 20), times=[0, 0, 0]
    )
    assert pruned.n_kept == 20  # all positions are static: r' = 1


def test_tango_takes_the_sinks_of_llava_onevision_for_unattended() -> None:
    tokens = video(2, 196, 8)
    attention = torch.rand(2, 196, generator=torch.Generator().manual_seed(0))
    attention[:, [11, 12, 27, 28, 41, 169]] = 9
    kept = {}
    for variant in ("llava", "qwen"):
        pruned = gstep.prune(
            tokens, 0.1, "tango", evidence={"token_attention": attention}, variant=variant, alpha=1.0, context=0.0
        )
        kept[variant] = len({11, 12, 27, 28, 41, 169} & set((pruned.index % 196).tolist()))
    assert kept == {"llava": 0, "qwen": 6}
