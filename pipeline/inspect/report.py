"""Reports of ``jobs.inspect`` in the terminal and as records: a cache, one video of it, and what failed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gstep.evidence import describe_evidence
from pipeline.cache.header import CacheIdentity, fingerprint
from pipeline.cache.live import Ledger, LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.cache.table import parse_file_name
from pipeline.console import clean_line
from pipeline.inspect.watch import latest_run
from pipeline.prune.summary import Summary, render, summarise
from pipeline.rows import Json, JsonObject, VideoRow
from pipeline.runner.run_record import list_committed_shards

BAR = 24  # characters of a full bar
_FAILURE_COLUMNS = ("video_id", "uri", "error_stage", "error_class", "error_message", "attempts", "status")
_SHORT_NAMES = {"error_class": "class", "error_message": "message", "error_stage": "stage"}
Failures = list[dict[str, str | int | None]]


class CacheCounts(NamedTuple):
    """The rows of a cache's table, and the counts over all its videos."""

    ledger: Ledger
    summary: Summary


def count(cache: TokenCache) -> CacheCounts:
    """Read the whole table of a cache and count its videos, also videos whose rows are lost.

    Raises CorruptShard, OSError.
    """
    committed_names = list_committed_shards(cache.store)
    ledger = Ledger(cache.store, fingerprint(cache.identity)).refresh()
    return CacheCounts(
        ledger, summarise(ledger, deepstack_levels=cache.deepstack_levels, codec=cache.codec, committed=committed_names)
    )


def cache_report(cache: TokenCache, counts: CacheCounts) -> RenderableType:
    """Render identity and counts of a cache, its latest run, then a line for each of its first videos."""
    ledger = counts.ledger
    facts = [("cache", str(cache.store)), *identity_facts(cache.identity)]
    if cache.evidence:
        facts.append(("evidence", describe_evidence(cache.evidence)))
    facts.append(("sampling", flat(cache.identity["sampling"])))
    files = _files_of(ledger)
    facts.append(("table", f"{files['small']} small files, {files['sorted']} sorted ones"))
    if ledger.foreign:
        facts.append(("left out", f"{len(ledger.foreign)} files that were made with other settings"))
    if ledger.strays:
        facts.append(("left out", f"{', '.join(ledger.strays)}: no files of the videos table"))
    run = latest_run(cache.store, ledger)
    if run is not None:
        facts.append(("last run", run.describe()))
    return Group(facts_table(facts), "", render(counts.summary), "", _videos(cache))


def _files_of(ledger: Ledger) -> dict[str, int]:
    """Count the sorted files of the videos table, and the small ones that wait to be merged."""
    n_sorted = sum(parse_file_name(name).is_sorted for name in ledger.names)
    return {"small": len(ledger.names) - n_sorted, "sorted": n_sorted}


def cache_record(cache: TokenCache, counts: CacheCounts) -> JsonObject:
    """Return a cache's summary as a JSON-able dict: cache, identity, table, last_run, and counts."""
    ledger = counts.ledger
    run = latest_run(cache.store, ledger)
    return {
        "cache": str(cache.store),
        "identity": cast(JsonObject, cache.identity),
        "table": {
            **_files_of(ledger),
            "foreign": list(ledger.foreign),
            **({"strays": list(ledger.strays)} if ledger.strays else {}),
        },
        "last_run": None if run is None else asdict(run),
        **counts.summary.standing(),
    }


def _videos(cache: TokenCache, limit: int = 20) -> RenderableType:
    """Render a table of the cache's first videos."""
    table = Table(show_edge=False)
    for name in ("video", "frames", "tokens", "kept", "decoder"):
        table.add_column(name, justify="left" if name in {"video", "decoder"} else "right")
    ids = cache.video_ids
    for video_id in ids[:limit]:
        row = cache.metadata(video_id)
        decoder = f"{row['backend']} {row['backend_version'] or ''}"
        table.add_row(
            Text(video_id),
            str(len(row["frame_indices"] or ())),
            str(row["n_total"]),
            str(row["n_tokens"]),
            Text(decoder),
        )
    more = [f"... and {len(ids) - limit} more"] if len(ids) > limit else []
    return Group(table, *more)


def video_report(cache: TokenCache, video_id: str, retention_ratio: float | None = None) -> RenderableType:
    """Render one video: its source, and how many tokens of each frame were kept.

    A failed or removed video has the reason instead. Raises UnknownVideo, RatioNotCached.
    """
    row = cache.metadata(video_id)
    if row["status"] != "ok":
        how = "" if row["status"] == "removed" else f"{row['error_class']} in {row['error_stage']}: "
        return Group(facts_table(source_facts(row)), Text(clean_line(f"{row['status']}  {how}{row['error_message']}")))
    kept_per_frame = _kept_per_frame(cache, row, retention_ratio)
    title = f"{sum(kept_per_frame)} of {row['n_total']} tokens kept ({sum(kept_per_frame) / row['n_total']:.1%})"
    return Group(facts_table(source_facts(row)), "", _frames(row, kept_per_frame, title))


def video_record(cache: TokenCache, video_id: str, retention_ratio: float | None = None) -> JsonObject:
    """Return a video's row (``pipeline.cache.schema.VIDEO_SCHEMA``), JSON-able, with tokens kept per frame.

    The kept tokens are those at ``retention_ratio``; None for a failed video.

    Raises UnknownVideo, RatioNotCached.
    """
    row = cache.metadata(video_id)
    record: dict[str, Json] = {"cache": str(cache.store), "video_id": video_id, "status": row["status"]}
    record |= {"retention_ratio": None, "n_kept": None, "kept_per_frame": None}
    if row["status"] == "ok":
        kept_per_frame = _kept_per_frame(cache, row, retention_ratio)
        record["retention_ratio"] = row["retention_ratio"] if retention_ratio is None else retention_ratio
        record |= {"n_kept": sum(kept_per_frame), "kept_per_frame": kept_per_frame}
    return {**record, "row": cast(JsonObject, row)}


def _kept_per_frame(cache: TokenCache, row: VideoRow, retention_ratio: float | None) -> list[int]:
    """Count the tokens of each frame that are kept at a ratio, None for what is stored. Raises RatioNotCached."""
    video = cache.get(row["video_id"], retention_ratio)
    counts: list[int] = torch.bincount(video.frame, minlength=row["n_frames"]).tolist()
    return counts


def source_facts(row: VideoRow) -> list[tuple[str, str]]:
    """Return (name, value) pairs of a row's source, decoding, columns that its list carried along, and run."""
    facts = [("video", row["video_id"]), ("source", row["uri"])]
    if row["start_s"] is not None or row["end_s"] is not None:
        end = "the end" if row["end_s"] is None else f"{row['end_s']} s"
        facts.append(("clip", f"{row['start_s'] or 0} s to {end}"))
    if row["source_width"]:
        picture = f"{row['source_width']}x{row['source_height']}, {row['codec']}, {row['source_frames']} frames"
        facts.append(("picture", f"{picture}, {row['duration_s']:.2f} s at {row['fps']:.2f} frames/s"))
        repeats_note = f", {row['n_repeated']} of them repeated" if row["n_repeated"] else ""
        frames_text = f"{len(row['frame_indices'])} frames{repeats_note}, resized to {row['width']}x{row['height']}"
        facts.append(("sampled", frames_text))
    if row["backend"]:
        if row["color_transfer"] or row["sample_aspect_ratio"]:
            pixels = f"pixels {row['sample_aspect_ratio']}" if row["sample_aspect_ratio"] else "no shape of pixels"
            facts.append(("states", f"{row['color_transfer'] or 'no transfer function'}, {pixels}"))
        warnings_note = f", {row['decode_warnings']} warnings" if row["decode_warnings"] else ""
        facts.append(("decoder", f"{row['backend']} {row['backend_version'] or ''}{warnings_note}"))
    columns = row["manifest"] or {}
    facts += [(name, _as_text(value)) for name, value in columns.items() if value is not None]
    if row["run_id"] is not None:  # a video that is in no cache has no run
        facts.append(("run", f"{row['run_id']}, attempt {row['attempts']}"))
    return facts


def _as_text(value: Json) -> str:
    """Return a carried value, a caption say, as text; what is no text as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _frames(row: VideoRow, kept_per_frame: list[int], title: str) -> Table:
    """Render a table of a video's frames with their kept tokens."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("t", "source frame", "seconds", "temporal density", "kept"):
        table.add_column(name, justify="right")
    table.add_column("of the frame's tokens")
    for t, (count, frames) in enumerate(zip(kept_per_frame, frames_of(row), strict=True)):
        density = "" if row["temporal_density"] is None else f"{row['temporal_density'][t]:.3f}"
        bar = "█" * round(BAR * count / row["tokens_per_frame"])
        seconds = f"{row['timestamps'][frames[0]]:.2f}"
        source = source_frames(row, frames).partition(" ")[2]
        table.add_row(str(t), source, seconds, density, str(count), bar)
    return table


def frames_of(row: VideoRow) -> list[list[int]]:
    """Return the numbers of the sampled frames that make each t: two on Qwen, where the last may be alone."""
    n_frames = len(row["frame_indices"])
    per_t = math.ceil(n_frames / row["n_frames"])
    return [list(range(t * per_t, min((t + 1) * per_t, n_frames))) for t in range(row["n_frames"])]


def source_frames(row: VideoRow, frames: Sequence[int]) -> str:
    """Describe sampled frames by their numbers in the source: ``frame 3`` or ``frames 3, 7``."""
    return f"frame{'s' if len(frames) > 1 else ''} {', '.join(str(row['frame_indices'][i]) for i in frames)}"


def failed_videos(cache: TokenCache) -> Failures:
    """List the failed videos by id: video_id, uri, stage, class, message, attempts. Raises CorruptShard, OSError."""
    _, rows = LiveVideos.read(cache.store, fingerprint(cache.identity), _FAILURE_COLUMNS)
    return failed_records(rows, _FAILURE_COLUMNS[:-1])


def failed_records(rows: pa.Table, columns: Sequence[str]) -> Failures:
    """Convert these columns of the failed rows to records; columns of the error lose their prefix."""
    failed_rows = rows.filter(pc.equal(rows["status"], "failed")).select(list(columns))
    return [{_SHORT_NAMES.get(name, name): value for name, value in row.items()} for row in failed_rows.to_pylist()]


def failed_lines(failures: Failures) -> Iterator[str]:
    """Yield ``ID<TAB>class<TAB>message`` of each; with several prunings ``ID<TAB>pruning<TAB>class<TAB>message``.

    A text with tabs or line breaks is quoted as JSON.
    """
    several = any(item.get("pruning") is not None for item in failures)
    for item in failures:
        columns = [item.get("video_id", item.get("question_id")), item["class"], item["message"]]
        if several:
            columns.insert(1, item["pruning"])
        texts = (str(column or "") for column in columns)
        yield "\t".join(text if text.isprintable() else json.dumps(text) for text in texts)


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    """Render (name, value) a line, on any console. Both come from files."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(clean_line(name)), Text(clean_line(value)))
    return table


def identity_facts(identity: CacheIdentity) -> list[tuple[str, str]]:
    """List (name, value) of model, pruner and storage."""
    model, pruner = identity["model"], identity["pruner"]
    return [
        ("model", f"{' by '.join(filter(None, (model['type'], model.get('family'))))}  {model['weights']}"),
        ("pruner", f"{pruner['method']}  {flat(pruner['params'])}"),
        ("stored", f"retention ratio {identity['retention_ratio']}, {identity['dtype']['stored']}"),
    ]


def flat(values: Mapping[str, object]) -> str:
    """Join the values that are set as ``name=value``."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None)
