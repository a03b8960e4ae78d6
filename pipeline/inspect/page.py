"""The page of ``jobs.inspect --html``: one file that shows which tokens of a video were kept."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gstep.types import budget_for
from pipeline import html_pages
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import CacheIdentity, ModelIdentity
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import TIERS
from pipeline.errors import UsageError
from pipeline.inputs.manifest import sort_roots
from pipeline.inspect.report import format_source_frames, list_identity_facts, list_source_facts, list_step_frames
from pipeline.inspect.thumbnails import Pictures, make_source_pictures
from pipeline.rows import VideoRow, compute_sampled_fps, format_rate
from pipeline.storage.s3 import Objects

PACKAGE = "pipeline.inspect"
_LONG_HASH = re.compile(r"([0-9a-f]{12})[0-9a-f]{8,}$")  # of weights; the page's section About has the whole hash


class Page(NamedTuple):
    """An HTML page, and the reason why its frames have no pictures ("" if they have)."""

    html: str
    missing: str


class Tier(NamedTuple):
    """A step of the page's slider: a retention ratio, its label, and the number of kept tokens."""

    ratio: float
    label: str
    kept: int


class Frame(NamedTuple):
    """A frame (on Qwen, a temporal patch) of the page: t, time, source frames, and a base64 JPEG or ""."""

    t: int
    at: str
    source: str
    picture: str


def write_page(
    cache: TokenCache,
    video_id: str,
    file: Path,
    retention_ratio: float | None = None,
    objects: Objects | None = None,
    video_roots: Sequence[str] = (),
) -> str:
    """Write the page of one video to ``file``, replacing an existing file; return a line about it for the terminal.

    Args:
        retention_ratio: where the slider starts; None for all that is stored.
        objects: None for the settings of the environment.
        video_roots: folders and prefixes below which the source may be read, for pictures.

    Raises:
        UsageError: ``file`` cannot be written (checked first), or a root does not exist.
        UnknownVideo: the cache has no tokens of the video; FailedVideo if it failed.
        ValueError: the ratio is invalid; RatioNotCached if the cache does not serve it.
    """
    check_page_file(file)
    page = render_video_page(cache, video_id, retention_ratio, objects, video_roots)
    return write_html(file, page.html, video_id, page.missing)


def check_page_file(file: Path) -> None:
    """Raise UsageError if ``file`` is a folder, or its folder does not exist."""
    if not file.parent.is_dir():
        raise UsageError(f"{file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise UsageError(f"{file}: is a folder; name a file for the page")


def write_html(file: Path, html: str, video_id: str, missing: str) -> str:
    """Write a page to ``file``, replacing an existing file; return a line about it for the terminal.

    Args:
        missing: the reason why the page has no pictures, for the line; "" if it has pictures.

    Raises:
        UsageError: the file cannot be written.
    """
    check_page_file(file)
    try:
        size = file.write_bytes(html.encode())
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
    pictures = f"without pictures: {missing}" if missing else "with pictures of its frames"
    return f"{file}: {size / 1000:,.0f} kB, {video_id} {pictures}"


def render_video_page(
    cache: TokenCache,
    video_id: str,
    retention_ratio: float | None = None,
    objects: Objects | None = None,
    video_roots: Sequence[str] = (),
) -> Page:
    """Render the page of one video.

    The source is decoded again for pictures. If it cannot be read, or has changed, the page has none and its
    ``missing`` says why.

    Args:
        retention_ratio: where the slider starts; None for all that is stored.
        objects: the client for S3, for the source; None for the settings of the environment.
        video_roots: folders and prefixes below which the source may be read.

    Raises:
        ManifestError: a root does not exist.
        UnknownVideo: the cache has no tokens of the video; FailedVideo if it failed.
        ValueError: the ratio is invalid; RatioNotCached if the cache does not serve it.
    """
    if retention_ratio is not None:
        cache.get(video_id, retention_ratio)  # raises for a ratio that the cache cannot serve
    video = cache.get(video_id, order="selection")
    objects, roots = objects or Objects.from_environment(), sort_roots(video_roots)
    pictures = make_source_pictures(video.metadata, cache.identity["sampling"], objects, roots)
    return draw_page(video, cache.identity, pictures, retention_ratio)


def draw_page(
    video: CachedVideo, identity: CacheIdentity, pictures: Pictures, retention_ratio: float | None = None
) -> Page:
    """Render the page of a video with given pictures of its frames.

    Args:
        video: all stored tokens of the video, read in order of selection.
        retention_ratio: where the slider starts; None for all that is stored.
    """
    row = video.metadata
    tiers = [Tier(ratio, f"{100 * ratio:g} %", n_kept) for ratio, n_kept in list_tiers(row, retention_ratio)]
    first = tiers[-1].ratio if retention_ratio is None else retention_ratio
    grid = get_grid(row)
    rows, columns = grid or (1, 1)
    script = html_pages.read_asset(PACKAGE, "page.js")
    template = html_pages.make_environment(PACKAGE).get_template("page.html")
    html = template.render(
        **make_shared_values(row, identity["model"], pictures, "page.css"),
        script=script,
        script_hash=html_pages.compute_policy_hash(script),
        video_id=row["video_id"],
        method=identity["pruner"]["method"],
        tiers=tiers,
        start=min(range(len(tiers)), key=lambda i: abs(tiers[i].ratio - first)),
        total=row["n_total"],
        has_density=row["temporal_density"] is not None,
        explanation=_explain_page(row),
        rows=rows,
        columns=columns,
        facts=[
            *list_source_facts(row, identity["sampling"]),
            *list_identity_facts({**identity, "retention_ratio": row["retention_ratio"]}),
        ],
        data={
            "grid": grid,
            "perFrame": row["tokens_per_frame"],
            "frames": row["n_frames"],
            "seconds": [row["timestamps"][members[0]] for members in list_step_frames(row)],
            "density": row["temporal_density"],
            "order": video.index.tolist(),
            "tiers": [tier._asdict() for tier in tiers],
        },
    )
    return Page(html, pictures.missing)


def make_shared_values(row: VideoRow, model: ModelIdentity, pictures: Pictures, style: str) -> dict[str, Any]:
    """Return the template variables that the pages of videos and of comparisons share.

    A frame of the page shows the picture of the first of its sampled frames, or none if ``pictures`` has none.

    Args:
        style: the file name of the page's own style sheet in this package, such as "page.css". It is read and appended
            to inspect.css.
    """
    width, height = row["source_width"] or row["width"] or 1, row["source_height"] or row["height"] or 1
    frames = [
        Frame(
            t,
            f"{row['timestamps'][members[0]]:.2f} s",
            format_source_frames(row, members),
            base64.b64encode(pictures.jpegs[members[0]]).decode() if pictures.jpegs else "",
        )
        for t, members in enumerate(list_step_frames(row))
    ]
    return {
        "style": html_pages.read_asset(PACKAGE, "inspect.css") + html_pages.read_asset(PACKAGE, style),
        "summary": _describe_row(row),
        "model": f"{model['type']}, " + _LONG_HASH.sub(r"\1", model["weights"]),
        "missing": pictures.missing,
        "frames": frames,
        "shape": f"{width}/{height}",  # as players show it
        "is_wide": width >= height,
    }


def get_grid(row: VideoRow) -> tuple[int, int] | None:
    """Return (rows, columns) of a frame's tokens; None if the row has no grid that fits their number.

    A row of an older cache without a grid counts as square, unless its tokens were made by a processor of transformers.
    """
    extra = row.get("model_extra") or {}
    side = math.isqrt(row["tokens_per_frame"])
    # Older caches lack the grid: LLaVA-OneVision's tokens form a square. A processor's "record" never has one.
    rows, columns = extra.get("grid") or ((0, 0) if "record" in extra else (side, side))
    return (rows, columns) if rows * columns == row["tokens_per_frame"] else None


def list_tiers(row: VideoRow, more: float | None = None) -> list[tuple[float, int]]:
    """List the slider's steps as (retention ratio, kept tokens), ascending; the last one is all that is stored.

    A method that is not nested has only this step.

    Args:
        more: another ratio to include if it is below the stored ratio.
    """
    stored_ratio = row["retention_ratio"]
    smaller = {ratio for ratio in (*TIERS, more) if ratio is not None and row["nested"] and ratio < stored_ratio - 1e-9}
    tiers = [(ratio, min(budget_for(ratio, row["n_total"]), row["n_tokens"])) for ratio in sorted(smaller)]
    return [*tiers, (stored_ratio, row["n_tokens"])]


def _describe_row(row: VideoRow) -> str:
    """Describe a video's source, length, sampled rate and tokens; an unknown source is left out."""
    unit = "pair" if has_paired_frames(row) else "frame"
    parts = [f"{row['tokens_per_frame']} tokens × {row['n_frames']} {unit}{'s' if row['n_frames'] > 1 else ''}"]
    if has_paired_frames(row):
        parts[0] += " of frames"
    if row["source_width"]:
        parts.insert(0, f"{row['source_width']}×{row['source_height']} {row['codec']}")
        parts.insert(1, f"{row['duration_s']:.2f} s at source fps {format_rate(row['fps'])}")
        parts.insert(2, f"sampled at {format_rate(compute_sampled_fps(row))} fps")
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _explain_page(row: VideoRow) -> str:
    """Return the sentences that explain the page's pictures; without a grid, only numbers are shown."""
    grid = get_grid(row)
    if grid is None:
        return f"{row['tokens_per_frame']} tokens per frame form no square grid, so only their number is shown."
    words = "Bright: the tokens that were kept. Dimmed: those that were pruned."
    if has_paired_frames(row):
        words += " A token spans two frames, of which the first is shown."
    return words + explain_shape(row, grid)


def explain_shape(row: VideoRow, grid: tuple[int, int]) -> str:
    """Return a sentence, after a blank, about frames that the encoder saw in another shape; otherwise ""."""
    sizes = [row[name] for name in ("source_width", "source_height", "width", "height")]
    if None in sizes or sizes[0] * sizes[3] == sizes[1] * sizes[2]:
        return ""
    return (
        f" The encoder saw every frame squeezed to {row['width']}×{row['height']}; here the frame has its own "
        f"shape, and the {grid[0]}×{grid[1]} tokens are stretched with it."
    )


def has_paired_frames(row: VideoRow) -> bool:
    """Return True if a video has more sampled frames than t, as on Qwen, where a token spans two."""
    return len(row["frame_indices"]) > int(row["n_frames"])
