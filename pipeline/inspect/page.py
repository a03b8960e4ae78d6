"""What ``jobs.inspect --html`` writes: one self-contained page that shows which tokens of a video were kept."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from gstep.types import budget_for
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import CacheIdentity
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import TIERS
from pipeline.errors import UsageError
from pipeline.inspect.charts import density_chart, kept_chart
from pipeline.inspect.report import flat, frames_of, source_facts, source_frames
from pipeline.inspect.thumbnails import Pictures, source_pictures
from pipeline.storage.s3 import Objects


@dataclass(frozen=True)
class Page:
    """A page in HTML, and why its frames have no pictures; empty where they have."""

    html: str
    missing: str


def write_page(
    cache: TokenCache,
    video_id: str,
    file: Path,
    retention_ratio: float | None = None,
    objects: Objects | None = None,
) -> str:
    """Write the page of one video; returns a line that says what was written.

    Raises UsageError where ``file`` cannot be written, and what ``video_page`` raises.
    """
    if not file.parent.is_dir():
        raise UsageError(f"{file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise UsageError(f"{file}: is a folder; name a file for the page")
    page = video_page(cache, video_id, retention_ratio, objects)
    try:
        size = file.write_bytes(page.html.encode())
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
    pictures = f"without pictures: {page.missing}" if page.missing else "with pictures of its frames"
    return f"{file}: {size / 1000:,.0f} kB, {video_id} {pictures}"


def video_page(
    cache: TokenCache, video_id: str, retention_ratio: float | None = None, objects: Objects | None = None
) -> Page:
    """The page of one video; the slider starts at ``retention_ratio``, by default at all that is stored.

    ``objects`` fetches the frames of a video on S3 again; by default as the environment says.

    Raises UnknownVideo, FailedVideo, RatioNotCached, CorruptShard, and ValueError for a ratio that makes no sense.
    """
    if retention_ratio is not None:
        cache.get(video_id, retention_ratio)  # refuses what the cache cannot serve
    video = cache.get(video_id, order="selection")
    pictures = source_pictures(video.metadata, cache.identity["sampling"], objects or Objects.from_environment())
    return Page(_render(video, cache.identity, pictures, retention_ratio), pictures.missing)


def grid_of(row: dict[str, Any]) -> tuple[int, int] | None:
    """(rows, columns) in which the tokens of a frame lie, row by row; None where that is not known."""
    grid = (row.get("model_extra") or {}).get("grid")
    side = math.isqrt(row["tokens_per_frame"])
    rows, columns = grid or (side, side)  # a cache that does not say holds LLaVA-OneVision's squares
    return (rows, columns) if rows * columns == row["tokens_per_frame"] else None


def tiers_of(row: dict[str, Any], more: float | None = None) -> list[tuple[float, int]]:
    """(retention ratio, tokens kept) of what the slider offers, ascending; a method without an order has just one."""
    stored = row["retention_ratio"]
    smaller = {ratio for ratio in (*TIERS, more) if ratio is not None and row["nested"] and ratio < stored - 1e-9}
    kept = [(ratio, min(budget_for(ratio, row["n_total"]), row["n_tokens"])) for ratio in sorted(smaller)]
    return [*kept, (stored, row["n_tokens"])]


def _render(video: CachedVideo, identity: CacheIdentity, pictures: Pictures, start: float | None) -> str:
    row = video.metadata
    template = (files("pipeline.inspect") / "page.html").read_text(encoding="utf-8")
    tiers = tiers_of(row, start)
    note = f"pale: all that are stored, {_percent(row['retention_ratio'])}" if len(tiers) > 1 else ""
    seconds = [row["timestamps"][frames[0]] for frames in frames_of(row)]
    density = row["temporal_density"]
    curve = density_chart(density, seconds) if density else '<p class="hint">This method has no temporal density.</p>'
    return Template(template).substitute(
        script_hash=_script_hash(template),
        title=escape(row["video_id"]),
        summary=escape(_summary(row)),
        missing=f'<p class="missing">No pictures: {escape(pictures.missing)}.</p>' if pictures.missing else "",
        control=_control(tiers, _start(tiers, start)),
        total=f"{row['n_total']:,}",
        density=curve,
        kept=kept_chart(row["kept_per_frame"], seconds, note),
        explanation=escape(_explanation(row)),
        shape=_shape(row),
        frames="".join(_figure(row, t, pictures) for t in range(row["n_frames"])),
        facts=_facts([*source_facts(row), *_settings(row, identity)]),
        data=_data(video, tiers),
    )


def _control(tiers: Sequence[tuple[float, int]], start: int) -> str:
    """The slider over the tiers, or words where there is nothing to choose."""
    if len(tiers) == 1:
        return f'<span class="label">Retention ratio</span><b id="ratio">{_percent(tiers[0][0])}</b>'
    marks = "".join(f"<span>{_percent(ratio)}</span>" for ratio, _ in tiers)
    return (
        '<label for="tier">Retention ratio</label><div class="slider">'
        f'<input id="tier" type="range" min="0" max="{len(tiers) - 1}" step="1" value="{start}" autocomplete="off">'
        f'<div class="marks" aria-hidden="true">{marks}</div></div><output id="ratio" for="tier"></output>'
    )


def _figure(row: dict[str, Any], t: int, pictures: Pictures) -> str:
    """One t: the picture of its (first) frame or a plain tile, two paths that the script draws, and the caption."""
    rows, columns = grid_of(row) or (1, 1)
    frames = frames_of(row)[t]
    first = frames[0]
    box = f'width="{columns}" height="{rows}"'
    picture = f'<rect class="blank" {box}/>'
    if pictures.jpegs:
        data = base64.b64encode(pictures.jpegs[first]).decode()
        picture = f'<image {box} preserveAspectRatio="none" href="data:image/jpeg;base64,{data}"/>'
    at = f"{row['timestamps'][first]:.2f} s"
    return (
        f'<figure id="t{t}"><svg class="tile" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" role="img" '
        f'data-name="Frame {t} at {at}">{picture}<path class="drain"/><path class="veil"/><path class="edge"/></svg>'
        f'<figcaption><b>t {t}</b><span class="count"></span>'
        f"<small>{at}</small><small>{source_frames(row, frames)}</small></figcaption></figure>"
    )


def _shape(row: dict[str, Any]) -> str:
    """CSS: the shape of a frame as players show it, and the width of a tile; upright ones are narrower."""
    width, height = row["source_width"] or row["width"] or 1, row["source_height"] or row["height"] or 1
    return f"--shape:{width}/{height};--tile:{168 if width >= height else 124}px"


def _summary(row: dict[str, Any]) -> str:
    unit = "pair" if _pairs(row) else "frame"
    parts = [f"{row['tokens_per_frame']} tokens × {row['n_frames']} {unit}{'s' if row['n_frames'] > 1 else ''}"]
    if _pairs(row):
        parts[0] += " of frames"
    if row["source_width"]:
        parts.insert(0, f"{row['source_width']}×{row['source_height']} {row['codec']}")
        parts.insert(1, f"{row['duration_s']:.2f} s at {row['fps']:.2f} frames/s")
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _explanation(row: dict[str, Any]) -> str:
    grid = grid_of(row)
    if grid is None:
        return f"{row['tokens_per_frame']} tokens a frame are no square grid, so only their number is shown."
    words = "Bright: the tokens that were kept. Dimmed: those that were pruned."
    if _pairs(row):
        words += " A token spans two frames, of which the first is shown."
    if not _squeezed(row):
        return words
    return (
        f"{words} The encoder saw every frame squeezed to {row['width']}×{row['height']}; here the frame has its own "
        f"shape, and the {grid[0]}×{grid[1]} tokens are stretched with it."
    )


def _pairs(row: dict[str, Any]) -> bool:
    """Whether a t has more than one frame."""
    return len(row["frame_indices"]) > int(row["n_frames"])


def _squeezed(row: dict[str, Any]) -> bool:
    """Whether the encoder saw frames of another shape than the source's."""
    sizes = [row[name] for name in ("source_width", "source_height", "width", "height")]
    return None not in sizes and sizes[0] * sizes[3] != sizes[1] * sizes[2]


def _settings(row: dict[str, Any], identity: CacheIdentity) -> list[tuple[str, str]]:
    model, pruner = identity["model"], identity["pruner"]
    return [
        ("model", f"{model['type']}  {model['weights']}"),
        ("pruner", f"{pruner['method']}  {flat(pruner['params'])}"),
        ("stored", f"retention ratio {row['retention_ratio']}, {identity['dtype']['stored']}"),
    ]


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)


def _data(video: CachedVideo, tiers: Sequence[tuple[float, int]]) -> str:
    """What the script needs, as JSON that cannot end its element: flat indices in order of selection, and the tiers."""
    row = video.metadata
    values = {
        "grid": grid_of(row),
        "perFrame": row["tokens_per_frame"],
        "frames": row["n_frames"],
        "order": video.index.tolist(),
        "tiers": [{"ratio": ratio, "label": _percent(ratio), "kept": kept} for ratio, kept in tiers],
    }
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


def _start(tiers: Sequence[tuple[float, int]], ratio: float | None) -> int:
    wanted = tiers[-1][0] if ratio is None else ratio
    return min(range(len(tiers)), key=lambda i: abs(tiers[i][0] - wanted))


def _script_hash(template: str) -> str:
    """What the page's policy lets run: its own script, so nothing that a video's name or path may carry."""
    (script,) = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _percent(ratio: float) -> str:
    return f"{100 * ratio:g} %"
