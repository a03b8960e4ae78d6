"""Reports of ``jobs.inspect``: a cache, one of its videos, and failures."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gstep.evidence import describe_evidence
from pipeline.cache.header import CacheIdentity, SamplingIdentity, compute_fingerprint
from pipeline.cache.live import HDR_TRANSFERS, Ledger, LiveVideos
from pipeline.cache.reader import TokenCache
from pipeline.cache.table import parse_file_name
from pipeline.console import clean_line
from pipeline.errors import format_count, list_first_names
from pipeline.inspect.watch import find_latest_run
from pipeline.prune.frame_limits import describe_limit, describe_sampling
from pipeline.prune.summary import Summary, render_summary, summarize_videos
from pipeline.rows import Json, JsonObject, VideoRow, compute_sampled_fps, describe_frames, format_rate
from pipeline.runner.run_record import list_committed_shards

BAR = 24  # characters of a full bar
_MAX_SHOWN = 20  # videos in the terminal
_FAILURE_COLUMNS = ("video_id", "uri", "error_stage", "error_class", "error_message", "attempts", "status")
_SHORT_NAMES = {"error_class": "class", "error_message": "message", "error_stage": "stage"}
Failures = list[dict[str, str | int | None]]


def count_cache(cache: TokenCache) -> tuple[Ledger, Summary]:
    """Read the whole videos table of a cache; return its live rows and the counts of all videos.

    The counts include videos whose committed token shards have no row any more.
    """
    committed_names = list_committed_shards(cache.store)
    ledger = Ledger(cache.store, compute_fingerprint(cache.identity)).refresh()
    return ledger, summarize_videos(
        ledger,
        deepstack_levels=cache.deepstack_levels,
        codec=cache.codec,
        sampling=cache.identity["sampling"],
        committed=committed_names,
    )


def render_cache_report(cache: TokenCache, ledger: Ledger, summary: Summary) -> RenderableType:
    """Render identity, counts and latest run of a cache, table files that do not count, and its first videos."""
    facts = [("cache", str(cache.store)), *list_identity_facts(cache.identity)]
    if cache.evidence:
        facts.append(("evidence", describe_evidence(cache.evidence)))
    facts.append(("frames", describe_sampling(cache.identity["sampling"])))
    files = _count_table_files(ledger)
    small, merged = format_count(files["small"], "small file"), format_count(files["sorted"], "merged file")
    facts.append(("table", f"{small} (a commit each) and {merged} in videos/"))
    for names, why in ((ledger.foreign, "made with other settings"), (ledger.strays, "with no name of the table's")):
        if names:
            listed = list_first_names(sorted(names), len(names))
            facts.append(("not counted", f"{format_count(len(names), 'file')} in videos/, {why}: {listed}"))
    run = find_latest_run(cache.store, ledger)
    if run is not None:
        facts.append(("last run", run.describe()))
    return Group(render_facts(facts), "", render_summary(summary), "", _render_videos(cache))


def _count_table_files(ledger: Ledger) -> dict[str, int]:
    """Count the files of the videos table: small ones, which wait to be merged, and sorted ones."""
    n_sorted = sum(parse_file_name(name).is_sorted for name in ledger.names)
    return {"small": len(ledger.names) - n_sorted, "sorted": n_sorted}


def make_cache_record(cache: TokenCache, ledger: Ledger, summary: Summary) -> JsonObject:
    """Return a cache's location, identity, table files, latest run and counts as a JSON-able dict.

    ``last_run`` is None without a run. ``table`` has the numbers of small and sorted files, the names of ``foreign``
    files (of another identity), and those of ``strays``, if there are any.
    """
    run = find_latest_run(cache.store, ledger)
    return {
        "cache": str(cache.store),
        "identity": cast(JsonObject, cache.identity),
        "table": {
            **_count_table_files(ledger),
            "foreign": list(ledger.foreign),
            **({"strays": list(ledger.strays)} if ledger.strays else {}),
        },
        "last_run": None if run is None else asdict(run),
        **summary.standing(),
    }


def _render_videos(cache: TokenCache) -> RenderableType:
    """Render a table of the first _MAX_SHOWN ok videos, and the number of the others."""
    table = Table(show_edge=False)
    for name in ("video", "sampled frames", "sampled fps", "tokens", "kept", "decoder"):
        table.add_column(name, justify="left" if name in {"video", "decoder"} else "right")
    ids = cache.video_ids
    for video_id in ids[:_MAX_SHOWN]:
        row = cache.metadata(video_id)
        decoder = f"{row['backend']} {row['backend_version'] or ''}"
        table.add_row(
            Text(video_id),
            f"{len(row['frame_indices']):,}",
            format_rate(compute_sampled_fps(row)),
            f"{row['n_total']:,}",
            f"{row['n_tokens']:,}",
            Text(decoder),
        )
    more = [f"... and {len(ids) - _MAX_SHOWN:,} more"] if len(ids) > _MAX_SHOWN else []
    return Group(table, *more)


def render_video_report(cache: TokenCache, video_id: str, retention_ratio: float | None = None) -> RenderableType:
    """Render one video: its source, and the number of kept tokens of each frame.

    A failed or removed video has the reason instead of tokens.

    Raises:
        UnknownVideo: the cache has no row of the video.
        RatioNotCached: the cache does not serve the ratio.
    """
    row = cache.metadata(video_id)
    facts = render_facts(list_source_facts(row, cache.identity["sampling"]))
    if row["status"] != "ok":
        how = "" if row["status"] == "removed" else f"{row['error_class']} in {row['error_stage']}: "
        return Group(facts, Text(clean_line(f"{row['status']}  {how}{row['error_message']}")))
    kept_per_frame = _count_kept_per_frame(cache, row, retention_ratio)
    n_kept, n_total = sum(kept_per_frame), row["n_total"]
    title = f"{n_kept:,} of {n_total:,} tokens kept ({n_kept / n_total:.1%})"
    if len(row["frame_indices"]) > row["n_frames"]:
        title += "; each t is a temporal patch of two sampled frames"
    return Group(facts, "", title, _render_frames(row, kept_per_frame))


def make_video_record(cache: TokenCache, video_id: str, retention_ratio: float | None = None) -> JsonObject:
    """Return a video as a JSON-able dict: its row (see ``VIDEO_SCHEMA``), its kept tokens per frame and its sampling.

    For a failed or removed video, ``retention_ratio``, ``n_kept``, ``kept_per_frame`` and ``sampling`` are None.

    Raises:
        UnknownVideo: the cache has no row of the video.
        RatioNotCached: the cache does not serve the ratio.
    """
    row = cache.metadata(video_id)
    record: dict[str, Json] = {"cache": str(cache.store), "video_id": video_id, "status": row["status"]}
    record |= {"retention_ratio": None, "n_kept": None, "kept_per_frame": None, "sampling": None}
    if row["status"] == "ok":
        kept_per_frame = _count_kept_per_frame(cache, row, retention_ratio)
        record["retention_ratio"] = row["retention_ratio"] if retention_ratio is None else retention_ratio
        record |= {"n_kept": sum(kept_per_frame), "kept_per_frame": kept_per_frame}
        record["sampling"] = _make_sampling_record(row, cache.identity["sampling"])
    return {**record, "row": cast(JsonObject, row)}


def _make_sampling_record(row: VideoRow, sampling: SamplingIdentity) -> JsonObject:
    """Return the frame rates and counts of an ok video, and a text about them; unknown values are None."""
    n_sampled, by_rate = len(row["frame_indices"]), row["frames_by_rate"]
    return {
        "text": "; ".join(filter(None, (describe_frames(row), describe_limit(row, sampling)))),
        "source_fps": row["fps"],
        "asked_fps": sampling.get("fps"),
        "sampled_fps": compute_sampled_fps(row),
        "asked_frames": None if by_rate is None else by_rate or n_sampled,
        "sampled_frames": n_sampled,
        "temporal_patches": row["n_frames"],
    }


def _count_kept_per_frame(cache: TokenCache, row: VideoRow, retention_ratio: float | None) -> list[int]:
    """Count the kept tokens of each frame. Raises RatioNotCached if the cache does not serve the ratio."""
    video = cache.get(row["video_id"], retention_ratio)
    counts: list[int] = torch.bincount(video.frame, minlength=row["n_frames"]).tolist()
    return counts


def list_source_facts(row: VideoRow, sampling: SamplingIdentity) -> list[tuple[str, str]]:
    """Return (name, value) pairs on a row's source, decoding, carried columns and run; unknown values are left out."""
    facts = [("video", row["video_id"]), ("source", row["uri"])]
    if row["start_s"] is not None or row["end_s"] is not None:
        end = "the end" if row["end_s"] is None else f"{row['end_s']:g} s"
        facts.append(("clip", f"{row['start_s'] or 0:g} s to {end}"))
    if row["source_width"]:
        facts += [*_iter_file_facts(row), ("sampled", describe_frames(row))]
        if limit := describe_limit(row, sampling):
            facts.append(("limit", limit))
        if row["n_repeated"]:
            repeated = format_count(row["n_repeated"], "sampled frame")
            facts.append(("repeated", f"{repeated}: the clip has only {format_count(row['clip_frames'], 'frame')}"))
        facts.append(("resized", f"to {row['width']}x{row['height']} for the model"))
    if row["backend"]:
        warnings_note = f", {format_count(row['decode_warnings'], 'warning')}" if row["decode_warnings"] else ""
        facts.append(("decoder", f"{row['backend']} {row['backend_version'] or ''}{warnings_note}"))
    if row["backend_note"]:
        facts.append(("note", row["backend_note"]))
    columns = row["manifest"] or {}
    facts += [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in columns.items()
        if value is not None
    ]
    if row["run_id"] is not None:  # a video that is in no cache has no run
        facts.append(("run", f"{row['run_id']}, attempt {row['attempts']}"))
    return facts


def _iter_file_facts(row: VideoRow) -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs on a decoded file: codec, size, frames, length, and unusual colors or pixels."""
    seconds = "a length that is not known" if row["duration_s"] is None else f"{row['duration_s']:.2f} s"
    size = f"{row['source_width']}x{row['source_height']} as shown"
    yield "file", f"{row['codec']}, {size}, {format_count(row['source_frames'] or 0, 'frame')} in {seconds}"
    if (transfer := row["color_transfer"]) is not None:
        hdr = ", which is HDR: taken as stored, without tone mapping" if transfer in HDR_TRANSFERS else ""
        yield "colors", f"transfer function {transfer}{hdr}"
    if (shape := row["sample_aspect_ratio"]) is not None and shape != "1:1":
        yield "pixels", f"{shape} (width to height), not square: frames are not stretched to the shape on a screen"


def _render_frames(row: VideoRow, kept_per_frame: list[int]) -> Table:
    """Render a table with a line for each t: source frames, seconds, temporal density and kept tokens."""
    table = Table(show_edge=False)
    for name in ("t", "source frame", "seconds", "temporal density", "kept"):
        table.add_column(name, justify="right")
    table.add_column(f"of {row['tokens_per_frame']} tokens")
    for t, (count, frames) in enumerate(zip(kept_per_frame, list_step_frames(row), strict=True)):
        density = "" if row["temporal_density"] is None else f"{row['temporal_density'][t]:.3f}"
        bar = "█" * round(BAR * count / row["tokens_per_frame"])
        seconds = f"{row['timestamps'][frames[0]]:.2f}"
        source = format_source_frames(row, frames).partition(" ")[2]
        table.add_row(str(t), source, seconds, density, str(count), bar)
    return table


def list_step_frames(row: VideoRow) -> list[list[int]]:
    """Return, for each t, the positions of its frames in ``frame_indices``: two on Qwen, maybe one at the end."""
    n_frames = len(row["frame_indices"])
    per_t = math.ceil(n_frames / row["n_frames"])
    return [list(range(t * per_t, min((t + 1) * per_t, n_frames))) for t in range(row["n_frames"])]


def format_source_frames(row: VideoRow, frames: Sequence[int]) -> str:
    """Describe sampled frames by their numbers in the source: ``frame 3`` or ``frames 3, 7``."""
    return f"frame{'s' if len(frames) > 1 else ''} {', '.join(str(row['frame_indices'][i]) for i in frames)}"


def list_failed_videos(cache: TokenCache) -> Failures:
    """List the failed videos, with the columns of _FAILURE_COLUMNS but for the status."""
    _, rows = LiveVideos.read(cache.store, compute_fingerprint(cache.identity), _FAILURE_COLUMNS)
    return list_failed_rows(rows, _FAILURE_COLUMNS[:-1])


def list_failed_rows(rows: pa.Table, columns: Sequence[str]) -> Failures:
    """Convert the failed rows to dicts of these columns; ``error_class`` becomes "class", and so on."""
    failed_rows = rows.filter(pc.equal(rows["status"], "failed")).select(list(columns))
    return [{_SHORT_NAMES.get(name, name): value for name, value in row.items()} for row in failed_rows.to_pylist()]


def format_failures(failures: Failures) -> Iterator[str]:
    """Yield a line ``ID<TAB>class<TAB>message`` for each failed item.

    If any item has a pruning, each line has it in its second column. A text with tabs, line breaks or other characters
    that cannot be printed is quoted as JSON.
    """
    several = any(item.get("pruning") is not None for item in failures)
    for item in failures:
        columns = [item.get("video_id", item.get("question_id")), item["class"], item["message"]]
        if several:
            columns.insert(1, item["pruning"])
        texts = (str(column or "") for column in columns)
        yield "\t".join(text if text.isprintable() else json.dumps(text) for text in texts)


def render_facts(facts: Iterable[tuple[str, str]]) -> Table:
    """Render (name, value) pairs as a borderless table; unprintable characters are cleaned."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        table.add_row(Text(clean_line(name)), Text(clean_line(value)))
    return table


def list_identity_facts(identity: CacheIdentity) -> list[tuple[str, str]]:
    """Return the (name, value) pairs "model", "pruner" and "stored" of an identity, in this order.

    "model" has the type, the family (if recorded) and the hash of the weights; "pruner" the method and its parameters;
    "stored" the retention ratio and the stored dtype.
    """
    model, pruner = identity["model"], identity["pruner"]
    return [
        ("model", f"{' by '.join(filter(None, (model['type'], model.get('family'))))}  {model['weights']}"),
        ("pruner", f"{pruner['method']}  {format_values(pruner['params'])}"),
        ("stored", f"retention ratio {identity['retention_ratio']}, {identity['dtype']['stored']}"),
    ]


def format_values(values: Mapping[str, object]) -> str:
    """Join the values that are not None as ``name=value``, with JSON values."""
    return " ".join(f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None)
