"""Tango where golden cases do not reach: rotation by hand, groups, blocks, sinks, times, counts."""

import math

import pytest
import torch

import gstep
from gstep.pruners import tango
from gstep.pruners.tango import find_groups, rotate_directions
from gstep.pruners.vectors import normalize_rows
from tests.gstep.synthetic import evidence_for, prune, video


def test_tango_rotates_channel_by_channel() -> None:
    """13 channels: 5 of time, of which the last stays, and 4 each of row and column."""
    direction = normalize_rows(video(2, 6, 13).double())
    rotated = rotate_directions(direction, (0.0, 2.5), columns=3)
    for t, n in ((0, 0), (0, 5), (1, 4)):
        expected = direction[t, n].tolist()
        for start, width, position, base in ((0, 4, 2.5 * t, 1e4), (5, 4, n // 3, 1e3), (9, 4, n % 3, 1e3)):
            for i in range(width // 2):
                angle = position * base ** (-2 * i / width)
                left, right = (float(direction[t, n, start + i + part]) for part in (0, width // 2))
                expected[start + i] = left * math.cos(angle) - right * math.sin(angle)
                expected[start + i + width // 2] = right * math.cos(angle) + left * math.sin(angle)
        assert torch.allclose(rotated[t, n], torch.tensor(expected, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(rotated.norm(dim=-1), direction.norm(dim=-1))


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


def test_tango_looks_at_the_grid_and_at_times() -> None:
    tokens = video(1, 12, 16).repeat(6, 1, 1) + video(6, 12, 16, seed=1)
    pruner = gstep.make_pruner("tango", tau=-1.0)
    evidence = evidence_for(pruner, tokens)
    usual = gstep.prune(tokens, 0.3, pruner, evidence=evidence)
    same = gstep.prune(tokens, 0.3, pruner, evidence=evidence, grid=(3, 4), times=range(6))
    assert torch.equal(usual.tokens, same.tokens)
    for places in ({"grid": (1, 12)}, {"times": [0.1 * t for t in range(6)]}):
        other = gstep.prune(tokens, 0.3, pruner, evidence=evidence, **places)
        assert not torch.equal(usual.index, other.index)


def test_tango_tau_follows_the_ratio_and_variants_differ_in_evidence() -> None:
    tokens = video(1, 30, 16).repeat(6, 1, 1) + 0.6 * video(6, 30, 16, seed=1)  # cosines about 0.73
    for ratio, tau in ((0.1, 0.65), (0.2, 0.8)):
        assert torch.equal(prune(tokens, ratio, "tango").tokens, prune(tokens, ratio, "tango", tau=tau).tokens)
    llava, qwen = (gstep.make_pruner("tango", variant=variant) for variant in ("llava", "qwen"))
    assert dict(llava.sources) == {"token_attention": "pooling_head"}
    assert dict(qwen.sources) == {"token_attention": "merged_queries"}
