"""The dry run: checks a request as a run does, and counts its work, without Ray or writes to the cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gstep.backbones import family_of
from gstep.types import budget_for
from pipeline.cache.header import CacheIdentity
from pipeline.errors import CacheLocked, UsageError, convert_store_usage_errors, convert_usage_errors, format_count
from pipeline.inputs.left_out import format_left_out
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import PlannedVideo, plan_video
from pipeline.prune.frame_limits import describe_future_limits, describe_sampling, plan_frames
from pipeline.prune.manifest_checks import ListCheck, ProblemExample, check_list
from pipeline.prune.model_checks import check_model
from pipeline.prune.recipe import Recipe, make_sampling_identity
from pipeline.prune.request import check_request
from pipeline.prune.resume import ManifestCounts
from pipeline.rows import JsonObject
from pipeline.runner.claim import describe_holder, find_holder
from pipeline.runner.run_record import make_run_id
from pipeline.storage.stores import Store

_MAX_EXAMPLES = 5  # ids that the report lists


@dataclass(frozen=True)
class Forecast:
    """The result of a dry run: what a run with the same options would do if it started now.

    Attributes:
        n_todo: the number of videos that the run would process, with ``--limit`` applied.
        doomed: problem -> an example and the number of the videos among ``n_todo`` that are sure to fail.
        first_ids: the ids of the first 5 videos to process.
        identity: the identity of the cache; its compute dtype is "auto" if the cluster decides.
        grid: (T, N) of every video if ``one_size``; otherwise of the largest planned video, which has ``size``.
        kept: the number of tokens stored for that video; an estimate unless ``is_exact``.
        video_bytes: the bytes of these tokens on disk.
        size: "full HD", or the largest smaller standard size that the model takes.
        refusal: the error with which full HD videos of maximum length will fail; None if the model takes them.
        minute: (tokens, kept tokens, bytes on disk) of a video of one minute.
        minute_size: its size in words.
        one_size: True if every video has this grid.
        is_exact: True if the method always keeps ``kept`` tokens of such a video.
        frames: sentences about the sampling, and about videos whose number of frames a limit will change.
        files: sentences about what was checked of the videos' files.
        checks: name of a check of the model -> what was checked and its result, or that it was not checked.
        unlisted: the URIs of archives without an index, whose videos are not counted.
        left_out: kind of file -> the number of files that are not videos or are not read.
        left_out_names: kind of file -> the first names.
    """

    out: str
    tally: ManifestCounts
    n_todo: int
    doomed: dict[str, ProblemExample]
    first_ids: list[str]
    identity: CacheIdentity
    grid: tuple[int, int]
    kept: int
    video_bytes: int
    size: str
    refusal: str | None
    minute: tuple[int, int, int]
    minute_size: str
    one_size: bool
    is_exact: bool
    frames: list[str]
    files: list[str]
    checks: dict[str, str]
    unlisted: list[str]
    left_out: dict[str, int]
    left_out_names: dict[str, list[str]]

    def as_record(self) -> JsonObject:
        """Return the forecast as a mapping that JSON can hold."""
        return {**vars(self), "tally": self.tally._asdict()}


def make_forecast(config: PruneConfig, console: Console) -> Forecast:
    """Check a request as a run does, and count its work, without starting Ray, decoding or writing to the cache.

    Prints the notes that a run prints before it starts. Imports user code, and downloads small files of a Hugging Face
    model if they are missing.

    Raises:
        UsageError: a run would refuse the request; this includes CacheLocked if another run writes to the cache and
            ``--join`` is not given.
        CorruptShard: a file of the videos table is damaged.
    """
    request = check_request(config, console)
    store = request.store
    recipe = request.recipe
    with convert_store_usage_errors():
        if not config.join and (holder := find_holder(store)):
            raise CacheLocked(f"{store}: another run writes here: {describe_holder(holder)}")
        _check_writable(store)
        _, todo = request.select_todo(make_run_id())
    rows = todo.list_todo()
    sampling = recipe.sampling
    preprocessor = family_of(recipe.source).preprocessor()
    video, grid, kept, video_bytes = _measure_video(recipe, sampling.num_frames or sampling.max_frames or 0)
    minute, (T, N), minute_kept, minute_bytes = _measure_video(recipe, plan_frames(sampling, 60))
    with convert_usage_errors():
        checks = check_model(recipe)
    list_check = check_list(rows)
    left_out = request.videos.indexes.left_out
    return Forecast(
        out=str(store),
        tally=todo.tally,
        n_todo=len(rows),
        doomed=list_check.failures,
        first_ids=rows["video_id"].slice(0, _MAX_EXAMPLES).to_pylist(),
        identity=recipe.identity(recipe.dtype),
        grid=grid,
        kept=kept,
        video_bytes=video_bytes,
        size=video.size_text,
        refusal=video.refusal,
        minute=(T * N, minute_kept, minute_bytes),
        minute_size=minute.size_text,
        one_size=sampling.fps is None and preprocessor.target_size(video.shape[0], 240, 240) == video.shape[1:],
        is_exact=recipe.pruner.exact,
        frames=[
            describe_sampling(settings := make_sampling_identity(sampling)),
            *describe_future_limits(settings, rows),
        ],
        files=list(_describe_files(list_check)),
        checks=checks,
        unlisted=[archive.uri for archive in request.videos.unindexed],
        left_out=left_out.counts(),
        left_out_names=left_out.list_first_names_by_kind(),
    )


def _describe_files(check: ListCheck) -> Iterator[str]:
    """Yield a sentence about the existing local files, and one about the videos that were not looked at, if any."""
    if check.n_found:
        verb = "exists" if check.n_found == 1 else "exist"
        yield f"{format_count(check.n_found, 'local file')} {verb}; whether they decode was not checked"
    if check.n_unseen:
        yield f"{format_count(check.n_unseen, 'video')} on stores or in archives: not checked"


def _measure_video(recipe: Recipe, n_frames: int) -> tuple[PlannedVideo, tuple[int, int], int, int]:
    """Plan a full HD video with ``n_frames`` frames (of a smaller standard size if the model does not take full HD).

    Returns:
        The video, its (T, N), the number of its kept tokens, and their bytes on disk.
    """
    family = family_of(recipe.source)
    video = plan_video(family.preprocessor(), n_frames)
    T, N = family.token_counts(*video.shape)
    stored_bytes = recipe.make_encode_setup(recipe.config.device, recipe.dtype).estimate_stored_bytes(*video.shape)
    return video, (T, N), budget_for(recipe.retention_ratio, T * N), stored_bytes


def _check_writable(store: Store) -> None:
    """Raise UsageError if the cache's folder, or the nearest parent that exists, is not a writable folder.

    An object store is not checked.
    """
    if store.folder is None:
        return
    existing_folder = next(path for path in (store.folder, *store.folder.parents) if path.exists())
    if not existing_folder.is_dir() or not os.access(existing_folder, os.W_OK | os.X_OK):
        why = "is not writable" if existing_folder.is_dir() else "is not a folder"
        raise UsageError(f"{store}: nothing can be written here: {existing_folder} {why}")


def render_forecast(forecast: Forecast) -> RenderableType:
    """Render the forecast as a table for the terminal, followed by the identity of the cache."""
    table = Table.grid(padding=(0, 2))
    for name, value in _list_lines(forecast):
        table.add_row(name, Text(value))  # ids and URIs come from files and must not be parsed as markup
    identity = Table.grid(padding=(0, 2))
    for name, value in _list_leaves(forecast.identity):
        identity.add_row(f"  {name}", Text(value))
    header = "dry run: Ray was not started, no video was decoded, and the cache was not touched"
    return Group(header, table, "identity of every row", identity)


def _list_lines(forecast: Forecast) -> list[tuple[str, str]]:
    """Return the lines of the forecast as (label, text), without the identity."""
    counts = forecast.tally
    T, N = forecast.grid
    waiting = counts.n_todo - forecast.n_todo
    waiting_note = f", {waiting} more wait (--limit)" if waiting else ""
    todo_kinds = f"{counts.new} new, {counts.retried} failed before, {counts.redone} changed or named by --redo"
    failures = [
        (f"{example.n} of the {forecast.n_todo} {problem}", example.first)
        for problem, example in forecast.doomed.items()
    ]
    n_good = forecast.n_todo - sum(example.n for example in forecast.doomed.values())
    about = "" if forecast.is_exact else "about "
    a_video = f"{T} x {N} = {T * N:,} tokens, {about}{forecast.kept:,} kept in {forecast.video_bytes:,} bytes"
    in_all = f"{forecast.video_bytes * n_good:,} bytes for {format_count(n_good, 'video')}"
    lines = [
        ("cache", forecast.out),
        (
            "videos",
            f"{forecast.n_todo} to do{waiting_note}, {counts.done} done, {counts.failed} failed before and left alone",
        ),
        ("left to do", todo_kinds),
        *(("will fail", f"{count}, e.g. {first}") for count, first in failures),
        *(("files", text) for text in forecast.files),
        *(("frames", text) for text in forecast.frames),
    ]
    if forecast.one_size:
        lines.append(("a video", f"{a_video}; {about}{in_all}"))
    else:
        minute_tokens, minute_kept, minute_bytes = forecast.minute
        a_minute = f"{minute_tokens:,} tokens, {about}{minute_kept:,} kept in {minute_bytes:,} bytes"
        lines += [
            ("largest", f"{a_video}, of {forecast.size} and full length; {in_all} if all are as large"),
            ("a minute", f"{a_minute}, of {forecast.minute_size}"),
        ]
    lines += forecast.checks.items()
    if forecast.refusal is not None:
        lines.append(
            ("too large", f"full HD videos of full length become rows of class unsupported: {forecast.refusal}")
        )
    if forecast.left_out:
        lines.append(("left out", format_left_out(forecast.left_out, forecast.left_out_names)))
    if forecast.unlisted:
        lines.append(
            ("not counted", f"the videos of {len(forecast.unlisted)} archives, e.g. {forecast.unlisted[0]} (--index)")
        )
    more = ", ..." if forecast.n_todo > len(forecast.first_ids) else ""
    return [*lines, ("first", ", ".join(forecast.first_ids) + more)] if forecast.first_ids else lines


def _list_leaves(values: CacheIdentity | JsonObject, prefix: str = "") -> list[tuple[str, str]]:
    """List the leaves of nested mappings as (dotted name, value).

    A file of the model's processor becomes one entry with the number of its settings.
    """
    leaves: list[tuple[str, str]] = []
    for name, value in values.items():
        inner = _list_leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else []
        if inner and prefix == "preprocessing.processor.":
            leaves.append((f"{prefix}{name}", f"{len(inner)} settings (--json lists them)"))
        else:
            leaves += inner or [(f"{prefix}{name}", str(value))]
    return leaves
