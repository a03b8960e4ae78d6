"""What ``jobs.inspect CACHE --html`` writes: a page of a whole cache, and beside it the pages of some of its videos."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import fingerprint
from pipeline.cache.live_rows import ok_rows
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.errors import FAULTS, CorruptShard, UsageError
from pipeline.inspect.charts import upward
from pipeline.inspect.facts import fault_rows, flat, identity_facts
from pipeline.inspect.page import draw_page, grid_of
from pipeline.inspect.page_files import asset, check_file, render, write_file
from pipeline.inspect.report import Counted, count
from pipeline.inspect.thumbnails import Pictures, source_pictures
from pipeline.prune.summary import remark_lines
from pipeline.storage.s3 import Objects

STAGES: Final = ("decode", "encode", "prune", "write")
_COLUMNS = ("video_id", "status", "n_tokens", "n_total", "tokens_per_frame", "kept_per_frame", "source_size")
_BINS: Final = 20  # of a video's length
_LOOKED_AT: Final = 48  # videos whose tokens say where in the frame they lie
_SHEET: Final = 12  # videos with pictures and pages of their own
_LISTED: Final = 8  # slowest and largest videos


class Tile(NamedTuple):
    """A video of the contact sheet: its id, its page's address, a base64 JPEG ("" without one), tokens kept of all."""

    video_id: str
    page: str
    picture: str
    kept: str


class Stage(NamedTuple):
    """The seconds of a stage: over all videos, and the median and the longest of a video."""

    name: str
    total_s: float
    median_s: float
    longest_s: float


def write_cache_page(cache: TokenCache, file: Path, objects: Objects | None = None) -> tuple[str, Counted]:
    """Write the page of a cache to ``file``, and pages of some videos to a folder beside it.

    Return a line for the user about it, and the counts. Raises UsageError where a file cannot be written, CorruptShard
    and OSError.
    """
    check_file(file)
    folder = file.with_name(f"{file.stem}-videos")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: the folder cannot be made: {error.strerror}") from error
    counted, videos = count(cache), columns_shown(cache)
    drawn = _drawn(cache, videos, _LOOKED_AT)
    tiles = _tiles(cache, drawn[:_SHEET], folder, objects or Objects.from_environment())
    html = _render(cache, counted, videos, drawn, tiles)
    size = write_file(file, html)
    return (
        f"{file}: {size / 1000:,.0f} kB, {len(videos):,} videos, {len(tiles)} of them with pages in {folder}/",
        counted,
    )


def columns_shown(cache: TokenCache) -> pa.Table:
    """Return the columns that the page shows of every video that has tokens."""
    names = (*_COLUMNS, *(f"{stage}_s" for stage in STAGES))
    return ok_rows(LiveVideos.open(cache.store, fingerprint(cache.identity)).live(names))


def _drawn(cache: TokenCache, videos: pa.Table, most: int) -> list[CachedVideo]:
    """Read up to so many random videos, the same ones each time; damaged ones are left out for jobs.verify to name."""
    places = np.random.default_rng(0).permutation(len(videos))[:most]
    found = []
    for video_id in videos["video_id"].take(pa.array(places)).to_pylist():
        try:
            found.append(cache.get(video_id, order="selection"))
        except CorruptShard:
            continue
    return found


def _tiles(cache: TokenCache, videos: list[CachedVideo], folder: Path, objects: Objects) -> list[Tile]:
    """Write the page of each video, and return its tile."""
    tiles = []
    for number, video in enumerate(videos):
        pictures: Pictures = source_pictures(video.metadata, cache.identity["sampling"], objects)
        page = folder / f"{number:02d}.html"
        write_file(page, draw_page(video, cache.identity, pictures).html)
        picture = pictures.jpegs[len(pictures.jpegs) // 2] if pictures.jpegs else b""
        row = video.metadata
        kept = f"{row['n_tokens']:,} of {row['n_total']:,} tokens"
        address = f"{quote(folder.name)}/{page.name}"
        tiles.append(Tile(row["video_id"], address, base64.b64encode(picture).decode(), kept))
    return tiles


def kept_over_time(videos: pa.Table) -> list[float]:
    """Return the share of tokens kept in each twentieth of the videos' length, all videos together.

    A frame counts where its middle lies; twentieths without any frame repeat the one before.
    """
    lists = videos["kept_per_frame"].combine_chunks()
    counts = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    kept = lists.flatten().to_numpy(zero_copy_only=False)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    place = (np.arange(len(kept)) - starts + 0.5) / np.repeat(counts, counts)
    bins = np.minimum((place * _BINS).astype(np.int64), _BINS - 1)
    per_frame = np.repeat(videos["tokens_per_frame"].to_numpy(), counts)
    sums = np.bincount(bins, kept, _BINS), np.bincount(bins, per_frame, _BINS)
    shares: list[float] = []
    for part, whole in zip(*sums, strict=True):
        shares.append(float(part / whole) if whole else (shares[-1] if shares else 0.0))
    return shares


def kept_by_place(videos: list[CachedVideo]) -> NDArray[np.float64] | None:
    """Return the share of frames in which each place is kept, [rows,columns], of the commonest grid; None without."""
    grids = [grid_of(video.metadata) for video in videos]
    known = [grid for grid in grids if grid is not None]
    if not known:
        return None
    grid = max(sorted(set(known)), key=known.count)
    kept, n_frames = np.zeros(grid[0] * grid[1]), 0
    for video, its in zip(videos, grids, strict=True):
        if its == grid:
            places = (video.index % video.metadata["tokens_per_frame"]).numpy()
            kept += np.bincount(places, minlength=len(kept))
            n_frames += video.metadata["n_frames"]
    return (kept / n_frames).reshape(grid)


def stages_of(videos: pa.Table) -> list[Stage]:
    """Return the seconds of each stage."""
    found = []
    for name in STAGES:
        seconds = pc.fill_null(videos[f"{name}_s"], 0.0).to_numpy()
        found.append(Stage(name, float(seconds.sum()), float(np.median(seconds)), float(seconds.max())))
    return found


def _most(videos: pa.Table, values: NDArray[np.float64], unit: str) -> list[tuple[str, str]]:
    """Return (id, value in words) of the videos of the highest values."""
    order = np.argsort(-values, kind="stable")[:_LISTED]
    ids = videos["video_id"].take(pa.array(order)).to_pylist()
    return [
        (video_id, f"{value:,.{0 if unit == 'tokens' else 1}f} {unit}")
        for video_id, value in zip(ids, values[order], strict=True)
    ]


def _render(cache: TokenCache, counted: Counted, videos: pa.Table, drawn: list[CachedVideo], tiles: list[Tile]) -> str:
    """Render the page's template."""
    summary = counted.summary
    shares = kept_over_time(videos) if len(videos) else []
    ticks = upward(max(shares, default=0.0) * 100 or 1.0)
    seconds = sum((pc.fill_null(videos[f"{name}_s"], 0.0).to_numpy() for name in STAGES), np.zeros(len(videos)))
    return render(
        "cache.html",
        style=asset("page.css") + asset("answers.css") + asset("cache.css"),
        place=str(cache.store),
        counts=summary,
        remarks=list(remark_lines(summary)),
        faults=fault_rows(summary, FAULTS),
        ticks=[(100 * tick / ticks[-1], f"{tick:g}") for tick in ticks],
        heights=[10000 * share / ticks[-1] for share in shares],
        shares=[100 * share for share in shares],
        places=kept_by_place(drawn),
        n_drawn=len(drawn),
        stages=stages_of(videos) if len(videos) else [],
        lists=[
            ("Slowest", _most(videos, seconds, "s")),
            ("Most tokens", _most(videos, videos["n_tokens"].to_numpy().astype(float), "tokens")),
            ("Largest files", _most(videos, pc.fill_null(videos["source_size"], 0).to_numpy() / 1e6, "MB")),
        ]
        if len(videos)
        else [],
        tiles=tiles,
        facts=[*identity_facts(cache.identity), ("sampling", flat(cache.identity["sampling"]))],
    )
