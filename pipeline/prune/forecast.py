"""The dry run and the plan: the work of a run and its cost. Nothing is started or written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gstep.backbones import ModelSource, family_of
from gstep.types import budget_for
from pipeline.cache.header import CacheIdentity
from pipeline.errors import CacheLocked, UsageError, VideoFault, count_of, store_usage_errors, usage_errors
from pipeline.inputs.left_out import format_left_out
from pipeline.plan.estimate import (
    ANY_TOWER,
    GPU_TYPES,
    UTILISATION,
    Cluster,
    Interval,
    RunEstimate,
    Workload,
    decode_seconds,
    estimate,
    find_gpu_type,
    mean_of,
    total,
)
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder, plan_video
from pipeline.prune.encode_stage import VideoEncoder
from pipeline.prune.facts import COLUMN_BYTES, measure_seconds
from pipeline.prune.frame_limits import RAISE, count_limits, describe_limits, describe_sampling, foresee_limits
from pipeline.prune.manifest_checks import Example, ListCheck, check_list
from pipeline.prune.model_checks import check_model
from pipeline.prune.recipe import Recipe, resolve, sampling_settings
from pipeline.prune.request import check_request
from pipeline.prune.resume import ManifestCounts
from pipeline.rows import JsonObject, TodoRow, VideoRecord, failed_video, format_rate
from pipeline.runner.claim import describe_holder, find_holder
from pipeline.runner.cluster.nodes import count_cores
from pipeline.runner.run_record import new_run_id
from pipeline.storage.stores import Store
from pipeline.video.sampling import count_frames

Shape = tuple[int, int, int]  # frames, height and width as an encoder gets them
_MAX_EXAMPLES = 5  # ids that the report lists
_DEFAULT_PROBE = 20  # videos that a plan decodes
_MAX_ENCODE_S = 60.0  # probed videos are also encoded if the estimate is below this


@dataclass(frozen=True)
class Forecast:
    """The work of a run with the same flags, if it started now.

    Attributes:
        out: the cache, as named.
        tally: the numbers of new, cached, failed and changed videos in the manifest.
        n_todo: the videos that the run would process; ``--limit`` leaves the others for another run.
        doomed: problem -> videos of ``n_todo`` that are sure to fail.
        first_ids: the first ids of the videos to process.
        identity: the identity of the cache; the dtype may be left to the cluster ("auto").
        grid: (T, N) of a video; if it depends on the shape, of a video of ``size`` with the maximum number of frames.
        kept: the stored tokens of this video; an estimate if the method decides.
        video_bytes: the bytes of these tokens on disk.
        size: the size of this video in words: full HD, or the largest usual size that the model takes.
        refusal: the error of full HD videos with as many frames, which become rows of class ``unsupported``; None if
            the model takes them.
        minute: (tokens, kept, bytes on disk) of a video of one minute of the size ``minute_size``.
        minute_size: as ``size``, of a video of one minute.
        one_size: whether every video has this grid.
        is_exact: whether the method keeps exactly ``kept`` tokens of such a video; else the video decides.
        frames: texts on the sampling of frames: how many, and which videos a limit gives fewer or more than the rate.
        files: texts on what was checked of the files of the videos.
        checks: name of a check of the model -> what was checked and what it showed, or that it was not checked.
        unlisted: archives without an index; their videos are not counted.
        left_out: kind of file -> files that are no videos, or are not read, as far as archives are indexed.
        left_out_names: kind of file -> the names of the first of these files.
    """

    out: str
    tally: ManifestCounts
    n_todo: int
    doomed: dict[str, Example]
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
        """Return the forecast as a JSON-able mapping."""
        return {**vars(self), "tally": self.tally._asdict()}


def make_forecast(config: PruneConfig, console: Console) -> Forecast:
    """Check the request as a run does, and count its work; starts and writes nothing.

    Prints the notes that a run prints before it starts. Raises UsageError for whatever a run would refuse.
    """
    request = check_request(config, console)
    store, recipe = request.store, request.recipe
    with store_usage_errors():
        if not config.join and (holder := find_holder(store)):
            raise CacheLocked(f"{store}: another run writes here: {describe_holder(holder)}")
        _check_writable(store)
        _, todo = request.select_todo(new_run_id())
    rows = todo.list_todo()
    family, sampling = family_of(recipe.source), recipe.sampling
    video = plan_video(family.preprocessor(), sampling.num_frames or sampling.max_frames or 0)
    shape = video.shape
    minute, minute_size = _measure_minute(recipe)
    T, N = family.token_counts(*shape)
    with usage_errors():
        checks = check_model(recipe)
    list_check, left_out = check_list(rows), request.videos.indexes.left_out
    return Forecast(
        out=str(store),
        tally=todo.tally,
        n_todo=len(rows),
        doomed=list_check.failures,
        first_ids=rows["video_id"].slice(0, _MAX_EXAMPLES).to_pylist(),
        identity=recipe.identity(recipe.dtype),
        grid=(T, N),
        kept=budget_for(recipe.retention_ratio, T * N),
        video_bytes=recipe.encode_setup(recipe.config.device, recipe.dtype).stored_bytes_per_video(*shape),
        size=video.size_text,
        refusal=video.refusal,
        minute=minute,
        minute_size=minute_size,
        one_size=sampling.fps is None and family.preprocessor().target_size(shape[0], 240, 240) == shape[1:],
        is_exact=recipe.pruner.exact,
        frames=[describe_sampling(settings := sampling_settings(sampling)), *foresee_limits(settings, rows)],
        files=list(_describe_files(list_check)),
        checks=checks,
        unlisted=[place.uri for place in request.videos.unindexed],
        left_out=left_out.counts(),
        left_out_names=left_out.first_names(),
    )


def _describe_files(check: ListCheck) -> Iterator[str]:
    """Yield what was checked of the files of the videos that are not sure to fail."""
    if check.n_found:
        verb = "exists" if check.n_found == 1 else "exist"
        yield f"{count_of(check.n_found, 'local file')} {verb}; whether they decode was not checked"
    if check.n_unseen:
        yield f"{count_of(check.n_unseen, 'video')} on stores or in archives: not checked"


def _measure_minute(recipe: Recipe) -> tuple[tuple[int, int, int], str]:
    """Compute (tokens, kept tokens, bytes on disk) of a video of one minute, and its size, without decoding anything.

    It is a full HD video, or one of the largest usual size that the model takes.
    """
    sampling, family = recipe.sampling, family_of(recipe.source)
    n_frames = sampling.num_frames or 0
    if sampling.fps is not None:
        n_frames = max(sampling.min_frames, count_frames(60, sampling.fps))
        n_frames = min(n_frames, sampling.max_frames or n_frames)
    video = plan_video(family.preprocessor(), n_frames)
    T, N = family.token_counts(*video.shape)
    stored_bytes = recipe.encode_setup(recipe.config.device, recipe.dtype).stored_bytes_per_video(*video.shape)
    return (T * N, budget_for(recipe.retention_ratio, T * N), stored_bytes), video.size_text


def _check_writable(store: Store) -> None:
    """Raise UsageError if the store's folder cannot be made or written to; an object store is not checked.

    Writes nothing: permissions decide.
    """
    if store.folder is None:
        return
    existing_folder = next(path for path in (store.folder, *store.folder.parents) if path.exists())
    if not existing_folder.is_dir() or not os.access(existing_folder, os.W_OK | os.X_OK):
        why = "is not writable" if existing_folder.is_dir() else "is no folder"
        raise UsageError(f"{store}: nothing can be written here: {existing_folder} {why}")


def render_forecast(forecast: Forecast) -> RenderableType:
    """Render the forecast as a table for the terminal, with the identity below it."""
    table = Table.grid(padding=(0, 2))
    for name, value in _list_lines(forecast):
        table.add_row(name, Text(value))  # ids and addresses come from files and are no markup
    identity = Table.grid(padding=(0, 2))
    for name, value in _list_leaves(forecast.identity):
        identity.add_row(f"  {name}", Text(value))
    header = "dry run: Ray was not started, no video was decoded, and the cache was not touched"
    return Group(header, table, "identity of every row", identity)


def _list_lines(forecast: Forecast) -> list[tuple[str, str]]:
    """Return the forecast's lines for the terminal: (label, text)."""
    counts, (T, N) = forecast.tally, forecast.grid
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
    in_all = f"{forecast.video_bytes * n_good:,} bytes for {count_of(n_good, 'video')}"
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
    """List (dotted name, value) of every leaf of nested mappings; of a whole file of a processor, how many it has."""
    leaves: list[tuple[str, str]] = []
    for name, value in values.items():
        inner = _list_leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else []
        if inner and prefix == "preprocessing.processor.":
            leaves.append((f"{prefix}{name}", f"{len(inner)} settings (--json lists them)"))
        else:
            leaves += inner or [(f"{prefix}{name}", str(value))]
    return leaves


def plan_run(config: PruneConfig, console: Console) -> RunEstimate:
    """Estimate what a run with the same flags would take; starts no Ray and writes nothing.

    Decodes a sample of the videos here, and may encode it; neither if the options describe the corpus. Raises
    UsageError for whatever a run would refuse before it starts, and if no probed video can be read.
    """
    cluster, notes = _choose_cluster(config)
    if config.corpus_videos is None or config.seconds is None:
        work = _probe_work(config, cluster, console)
    else:
        with TemporaryDirectory() as folder, usage_errors():
            # Its config is all that counts.
            source = ModelSource.random(config.model, Path(folder), config.revision, config.family)
            recipe = resolve(config, source=source)
            work = _describe_work(recipe, cluster, _count_corpus(config), config.seconds)
    return estimate(work, cluster, config.prices, notes)


def _count_corpus(config: PruneConfig) -> int:
    """Count the videos that a run takes of the corpus of ``--videos``, by ``--shard`` and ``--limit``."""
    n_videos, part = int(config.corpus_videos or 0), config.part()
    n_own = n_videos if part is None else math.ceil(n_videos / part[1])
    return min(n_own, config.limit or n_own)


def _choose_cluster(config: PruneConfig) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster of the options, by default this machine, and notes on the assumptions.

    It has no more GPUs than a run uses. Raises UsageError for a type of GPUs without their number.
    """
    n_local_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    gpus, cores, notes = n_local_gpus if config.gpus is None else config.gpus, float(count_cores()), []
    if config.gpu_type is not None and not gpus:
        raise UsageError(f"--gpu-type {config.gpu_type}: this machine has no GPU; give their number with --gpus N")
    kind = config.gpu_type or (find_gpu_type(torch.cuda.get_device_name(0)) if n_local_gpus else None)
    if gpus and kind is None:
        kind = "A100"
        notes.append("the type of the GPUs is not known: A100 is assumed (--gpu-type)")
    if config.gpus and kind:
        cores = float(config.gpus * GPU_TYPES[kind].vcpus)
    if _is_this_machine(config):
        notes.append("the cluster is this machine: --gpus, --gpu-type and --decode-cores plan for another one")
    cores = float(config.decode_cores or cores)
    gpus = min(n for n in (gpus, config.max_gpus, config.encode_workers) if n is not None)
    if config.decode_workers is not None and config.decode_workers < cores:
        notes.append(f"--decode-workers {config.decode_workers} is not reckoned with: all {cores:g} vCPUs decode")
    if config.encode_workers is not None and not gpus:
        notes.append(f"--encode-workers {config.encode_workers} is not reckoned with: all {cores:g} vCPUs encode")
    return Cluster(gpus, kind if gpus else None, cores), tuple(notes)


def _is_this_machine(config: PruneConfig) -> bool:
    """Return True if the options plan for this machine."""
    return config.gpus is None and config.gpu_type is None and config.decode_cores is None


def _probe_work(config: PruneConfig, cluster: Cluster, console: Console) -> Workload:
    """Estimate the work of the videos to do by decoding (and encoding) a sample; prints a line about it.

    Indexes all archives first. Raises UsageError if no video is named, or no video of the sample can be read.
    """
    request = check_request(config, console)
    recipe = request.recipe
    with store_usage_errors():
        _, todo = request.select_todo(new_run_id())
    with todo:
        rows = todo.wait_for_all()
    todo.refuse_empty()
    n_videos = len(rows)
    if not n_videos:
        return Workload(videos=0)
    indices = sorted(
        {int(index) for index in np.linspace(0, n_videos - 1, min(config.probe or _DEFAULT_PROBE, n_videos))}
    )
    console.print(f"probing {len(indices)} of {n_videos} videos", highlight=False)
    sample: list[TodoRow] = rows.take(indices).to_pylist()
    records, encode_s = _probe(recipe, sample, cluster)
    good = [record for record in records if record["status"] == "ok"]
    if not good:
        first = f"{records[0]['video_id']}: {records[0]['error_message']}"
        raise UsageError(f"none of the {len(records)} probed videos can be read, e.g. {first}; --probe K looks at more")
    notes = [f"{len(records)} of {n_videos} videos were decoded here; times differ on another CPU"]
    if encode_s:
        notes.append(f"{len(encode_s)} of them were encoded here")
    if (limits := count_limits(good, sampling_settings(recipe.sampling))) is not None:
        notes += [f"of the decoded videos, {line}" for line in describe_limits(limits)]
    pixels = {(record["source_width"], record["source_height"]) for record in good}
    if len(pixels) == 1 < n_videos:
        ((width, height),) = pixels
        notes.append(f"all of them are {width} x {height}: other sizes were not measured")
    shapes = [_read_shape(record) for record in good]
    unlisted_records = [record for row, record in zip(sample, records, strict=True) if row["size"] is None]
    counted_work = _count_work(recipe, cluster, n_videos, shapes)
    return replace(
        counted_work,
        failed=1 - len(good) / len(records),
        decode_s=mean_of([record["decode_s"] for record in records], n_videos, least=0.1),
        encode_s=mean_of(encode_s, n_videos, least=0.1) if encode_s else counted_work.encode_s,
        input_bytes=_estimate_input_bytes(rows["size"], unlisted_records),
        video_s=mean_of([measure_seconds(record) for record in good], n_videos),
        notes=(*notes, *(() if encode_s else counted_work.notes)),
    )


def _estimate_input_bytes(listed_sizes: pa.ChunkedArray, unlisted_records: Sequence[VideoRecord]) -> Interval | None:
    """Estimate the mean bytes of a file from listed sizes, and from a sample for files without a listed size.

    None if files lack a size and the sample has none either.

    Args:
        listed_sizes: the size of each video, null if unknown.
        unlisted_records: probed videos without a listed size.
    """
    known_bytes, n_unknown = pc.sum(listed_sizes).as_py() or 0, listed_sizes.null_count
    if not n_unknown:
        return Interval.exactly(known_bytes / len(listed_sizes))
    sizes = [float(size) for record in unlisted_records if (size := record.get("source_size"))]
    if not sizes:
        return None
    return total(Interval.exactly(known_bytes), mean_of(sizes, n_unknown).scaled(n_unknown)).scaled(
        1 / len(listed_sizes)
    )


def _read_shape(record: VideoRecord) -> Shape:
    """Return the shape of a decoded video."""
    return len(record["frame_indices"]), record["height"], record["width"]


def _probe(recipe: Recipe, rows: Sequence[TodoRow], cluster: Cluster) -> tuple[list[VideoRecord], list[float]]:
    """Decode videos in a child process and encode them here; return their records and seconds of encoding.

    A record tells of the decoding alone, unless the encoding fails: then it is an error record. Each encoding that
    succeeds has its GPU seconds, or core seconds without a GPU; there are none if ``_probe_encoder`` returns None.
    """
    records, encode_s = list[VideoRecord](), list[float]()
    encoder, first = None, True
    with closing(VideoDecoder(recipe.decode_setup())) as decoder, decoder.open_archives(rows) as archives:
        for row in rows:
            with decoder.open(row, archives) as source:
                record, frames = decoder.decode_one(row, source)
            records.append(record)
            if frames is None:
                continue
            if first:
                encoder, first = _probe_encoder(recipe, cluster, _read_shape(record), len(rows)), False
            if encoder is None:
                continue
            try:
                if not encode_s:
                    encoder.encode_one(record, frames)  # the first video pays for buffers and kernels
                start = process_time()
                encoded_record = encoder.encode_one(record, frames).record
                encode_s.append(
                    encoded_record["encode_s"] + encoded_record["prune_s"] if cluster.gpus else process_time() - start
                )
            except VideoFault as fault:
                records[-1] = failed_video(record, fault)
    return records, encode_s


def _probe_encoder(recipe: Recipe, cluster: Cluster, shape: Shape, n_videos: int) -> VideoEncoder | None:
    """Load the encoder on this machine.

    None if the plan is for another cluster, or encoding would take too long or a time that is not known.

    ``n_videos`` videos of ``shape`` are to be encoded. Raises UsageError if the encoder cannot be loaded.
    """
    encode_s = _count_work(recipe, cluster, n_videos, [shape]).encode_s
    max_s = _MAX_ENCODE_S * (1 if cluster.gpus else cluster.cores)
    if not _is_this_machine(recipe.config) or encode_s is None or n_videos * encode_s.expected > max_s:
        return None
    with usage_errors():
        return recipe.encode_setup("cuda" if cluster.gpus else "cpu", recipe.dtype).encoder()


def _describe_work(recipe: Recipe, cluster: Cluster, n_videos: int, seconds: float) -> Workload:
    """Estimate the work of a corpus that the options describe, without a video: ``n_videos`` of ``seconds`` each."""
    sampling = recipe.sampling
    n_by_rate = count_frames(seconds, sampling.fps or 1.0)
    n_frames = sampling.num_frames or min(max(sampling.min_frames, n_by_rate), sampling.max_frames or 1)
    video = plan_video(family_of(recipe.source).preprocessor(), n_frames, recipe.config.pixels())
    width, height = video.size
    counted_work = _count_work(recipe, cluster, n_videos, [video.shape])
    assumption = f"{width} x {height} at 30 frames a second, with a keyframe each 1 to 8 s"
    config, notes = recipe.config, list[str]()
    if video.refusal is not None:
        refused = "videos of {} x {} become rows of class unsupported".format(*config.pixels())
        notes.append(f"this size is planned for, because {refused}: {video.refusal}")
    if sampling.fps is not None and n_by_rate != n_frames:
        rate = f"({format_rate(n_frames / seconds)} frames per second)"
        is_capped = n_by_rate > n_frames
        limit = (
            f"capped at {n_frames} {rate}; {RAISE}" if is_capped else f"filled up to {n_frames} {rate} for this model"
        )
        notes.append(f"--fps {sampling.fps:g} gives {count_of(n_by_rate, 'frame')} of {seconds:g} s, {limit}")
    if config.snap_to_keyframes is not None:
        notes.append("--snap-to-keyframes is not reckoned with: it makes decoding cheaper than this")
    if config.decoder not in ("auto", "pyav"):
        notes.append(f"--decoder {config.decoder} is not reckoned with: decoding is of PyAV on CPUs")
    return replace(
        counted_work,
        decode_s=decode_seconds(seconds, width, height, n_frames),
        video_s=Interval.exactly(seconds),
        notes=(f"no video was decoded; assumed: {assumption}", *notes, *counted_work.notes),
    )


def _count_work(recipe: Recipe, cluster: Cluster, n_videos: int, shapes: Sequence[Shape]) -> Workload:
    """Estimate the work of encoding and storing ``n_videos`` from the model's config; ``shapes`` are a sample.

    Seconds of decoding are left to the caller.
    """
    family, encode = family_of(recipe.source), recipe.encode_setup(recipe.config.device, recipe.dtype)
    measured = recipe.source.family in UTILISATION
    utilisation = UTILISATION[recipe.source.family] if measured else ANY_TOWER

    def mean(values: Iterable[float]) -> Interval:
        numbers = [float(value) for value in values]
        return mean_of(numbers, n_videos) if len({*numbers}) > 1 else Interval.exactly(numbers[0])

    def stored_bytes(shape: Shape) -> float:
        n_kept = budget_for(recipe.retention_ratio, math.prod(family.token_counts(*shape)))
        return encode.stored_bytes_per_video(*shape) + COLUMN_BYTES * n_kept

    flops = [count for shape in shapes if (count := family.flops(*shape)) is not None]
    low, expected, high = (f"{100 * end:.0f}" for end in utilisation)
    peak = f"{expected} % ({low} to {high} %) of the GPU's peak"
    frame_bytes = mean(3 * math.prod(shape) for shape in shapes)
    if not flops:
        note = (
            f"the work of {recipe.source.model_type} on a video is not known, so time and cost are without encoding; "
            f"{frame_bytes.expected:,.0f} bytes of frames a video go from decoders to encoders"
        )
    elif cluster.gpus:
        source = "measured on one H200 with random weights" if measured else f"not measured for {recipe.source.family}"
        note = f"encoding was not run: the vision tower is assumed to reach {peak} ({source})"
    else:
        note = "encoding was not run: a core is assumed to reach 6 to 60 GFLOP/s"
    return Workload(
        videos=n_videos,
        encode_s=cluster.encode_s(mean(flops), utilisation) if flops else None,
        frame_bytes=frame_bytes,
        output_bytes=mean(map(stored_bytes, shapes)),
        notes=(note,),
    )
