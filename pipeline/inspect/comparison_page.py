"""The page of a comparison: the same frames in a row for each method and ratio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline import html_pages
from pipeline.inspect.comparison import Comparison, MethodSelection
from pipeline.inspect.page import PACKAGE, explain_shape, has_paired_frames, make_shared_values
from pipeline.inspect.report import format_values, list_source_facts

# Frames side by side, at most; the next frames make another band.
_WIDE_FRAMES, _TALL_FRAMES = 8, 12


class Tile(NamedTuple):
    """A frame in the row of a selection: three SVG paths whose unit is one token, and the number of kept tokens.

    Attributes:
        holes: the runs of kept tokens.
        edges: the lines between kept and dropped tokens, and between kept tokens and the frame's border.
        merged: the runs of kept tokens that are mixtures.
    """

    holes: str
    edges: str
    merged: str
    n_kept: int


class Strip(NamedTuple):
    """The row of a selection in one band: its tiles, and the SVG path of its bars."""

    row: MethodSelection
    tiles: Sequence[Tile]
    bars: str


class Band(NamedTuple):
    """The frames [start, end), with a strip for each selection."""

    start: int
    end: int
    strips: Sequence[Strip]


class Overlap(NamedTuple):
    """The overlaps at one ratio: K selections, and [K][K] shares and numbers of common tokens."""

    rows: Sequence[MethodSelection]
    shares: Sequence[Sequence[float]]
    counts: Sequence[Sequence[int]]


def draw_comparison(comparison: Comparison) -> str:
    """Render the page of a comparison as HTML, without other files and scripts."""
    row, grid = comparison.metadata, comparison.grid
    shared = make_shared_values(row, comparison.model, comparison.pictures, "comparison.css")
    template = html_pages.make_environment(PACKAGE).get_template("comparison.html")
    return template.render(
        **shared,
        video_id=comparison.video_id,
        origin=comparison.origin,
        explanation=_explain_comparison(comparison),
        merges=any(selection.merged is not None for selection in comparison.rows),
        grid=grid,
        view=grid or (1, 1),
        unit="pair" if has_paired_frames(row) else "frame",
        bands=list(_list_bands(comparison, is_wide=shared["is_wide"])),
        charts=[_draw_bars(selection, highest) for selection, highest in _pair_with_highest(comparison)],
        overlaps=list(_list_overlaps(comparison)),
        facts=[
            *list_source_facts(row, comparison.sampling),
            ("model", f"{comparison.model['type']}  {comparison.model['weights']}"),
        ],
        settings={row.method: format_values(row.settings) or "no parameters" for row in comparison.rows},
    )


def _explain_comparison(comparison: Comparison) -> str:
    """Return the sentences that explain the page's frames, or ""."""
    row, grid = comparison.metadata, comparison.grid
    words = "A token spans two frames, of which the first is shown." if has_paired_frames(row) else ""
    if grid is not None:
        return f"{words}{explain_shape(row, grid)}".strip()
    unknown = "This model does not say where in a frame its tokens are, so a row shows only how many of them are kept."
    return f"{words} {unknown}".strip()


def _pair_with_highest(comparison: Comparison) -> list[tuple[MethodSelection, int]]:
    """Pair each selection with the largest number of tokens per frame of the selections at its ratio."""
    highest = {
        ratio: max(max(row.kept_per_frame) for row in comparison.at(ratio)) for ratio in comparison.retention_ratios
    }
    return [(row, highest[row.retention_ratio]) for row in comparison.rows]


def _list_bands(comparison: Comparison, *, is_wide: bool) -> Iterator[Band]:
    """Yield the fewest possible bands of nearly equal length.

    Args:
        is_wide: True if frames are at least as wide as high, which allows 8 frames per band instead of 12.
    """
    n_frames = comparison.metadata["n_frames"]
    length = math.ceil(n_frames / math.ceil(n_frames / (_WIDE_FRAMES if is_wide else _TALL_FRAMES)))
    rows = _pair_with_highest(comparison)
    tiles = [_list_tiles(row, comparison.grid) for row, _ in rows]
    for start in range(0, n_frames, length):
        end = min(start + length, n_frames)
        strips = [
            Strip(row, row_tiles[start:end], _draw_bars(row, highest, start, end))
            for (row, highest), row_tiles in zip(rows, tiles, strict=True)
        ]
        yield Band(start, end, strips)


def _list_tiles(row: MethodSelection, grid: tuple[int, int] | None) -> list[Tile]:
    """Return the tile of each frame of a selection; without a grid, tiles have only ``n_kept``."""
    if grid is None:
        return [Tile("", "", "", count) for count in row.kept_per_frame]
    masks = (row.mask().reshape(-1, *grid), row.mask(merged=True).reshape(-1, *grid))
    return [
        Tile(draw_cells(kept), draw_edges(kept), draw_cells(merged), int(kept.sum()))
        for kept, merged in zip(*masks, strict=True)
    ]


def _list_runs(mask: NDArray[np.bool_]) -> Iterator[tuple[int, int, int]]:
    """Yield (y, x, length) of each horizontal run of True in a mask [rows, columns]."""
    for y, line in enumerate(mask):
        ends = np.flatnonzero(np.diff(line, prepend=False, append=False))
        for start, end in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True):
            yield y, start, end - start


def draw_cells(mask: NDArray[np.bool_]) -> str:
    """Return an SVG path that fills the True cells of a mask [rows, columns]; a cell is one unit wide and high."""
    return "".join(f"M{x} {y}h{n}v1h-{n}z" for y, x, n in _list_runs(mask))


def draw_edges(mask: NDArray[np.bool_]) -> str:
    """Return an SVG path of the lines around the True cells of a mask [rows, columns]."""
    above = np.diff(mask, axis=0, prepend=False, append=False)
    beside = np.diff(mask, axis=1, prepend=False, append=False)
    horizontal = "".join(f"M{x} {y}h{n}" for y, x, n in _list_runs(above))
    return horizontal + "".join(f"M{x} {y}v{n}" for x, y, n in _list_runs(beside.T))


def _draw_bars(row: MethodSelection, highest: int, start: int = 0, end: int | None = None) -> str:
    """Return an SVG path of one bar per frame in [start, end), by default for all frames.

    A frame is one unit wide, and a bar for ``highest`` tokens is 100 high. A frame without kept tokens has no bar.
    """
    heights = [(t, 100 * count / highest) for t, count in enumerate(row.kept_per_frame)][start:end]
    return "".join(f"M{t + 0.1:g} 100v-{height:.4g}h.8v{height:.4g}z" for t, height in heights if height)


def _list_overlaps(comparison: Comparison) -> Iterator[Overlap]:
    """Yield the overlaps at each ratio that has several selections."""
    for ratio in comparison.retention_ratios:
        rows = comparison.at(ratio)
        if len(rows) > 1:
            shares = comparison.overlap(ratio)
            sizes = np.array([len(row.index) for row in rows])[:, None]
            yield Overlap(rows, shares.tolist(), (shares * sizes).round().astype(int).tolist())
