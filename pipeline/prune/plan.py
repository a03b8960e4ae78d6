"""The plan of a run, made by timing a sample of its videos, or from options, the model's config and measured rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from rich.console import Console

from gstep.backbones import ModelSource, family_of
from gstep.types import budget_for
from pipeline.errors import UsageError, VideoFault, convert_store_usage_errors, convert_usage_errors, format_count
from pipeline.plan.estimate import (
    ANY_TOWER,
    CORE_FACTOR,
    GPU_FACTOR,
    GPU_TYPES,
    NONE,
    UTILISATION,
    Cluster,
    Interval,
    RunEstimate,
    Workload,
    add_intervals,
    estimate_decode_seconds,
    estimate_mean,
    estimate_run,
    find_gpu_type,
    multiply_intervals,
)
from pipeline.plan.render import format_number, format_range
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import decode_sample, plan_video
from pipeline.prune.encode_stage import VideoEncoder
from pipeline.prune.facts import COLUMN_BYTES, measure_seconds
from pipeline.prune.frame_limits import RAISE, count_limits, describe_limits, plan_frames
from pipeline.prune.recipe import Recipe, make_sampling_identity, resolve_recipe
from pipeline.prune.request import check_request
from pipeline.rows import TodoRow, VideoRecord, format_rate, make_failed_video
from pipeline.runner.cluster.nodes import count_cores
from pipeline.runner.run_record import make_run_id
from pipeline.video.sampling import count_frames

Shape = tuple[int, int, int]  # frames, height and width as an encoder gets them
_DEFAULT_PROBE = 20  # videos that a plan decodes without --probe
_BUSY = 1.5  # wall time / CPU time of decoding above which the machine counts as busy
_MAX_ENCODE_S = 60.0  # the sample is also encoded if that takes no longer


def plan_run(config: PruneConfig, console: Console) -> RunEstimate:
    """Forecast a run with the same options, without starting Ray or writing to the cache.

    Decodes a sample of the videos here (``--probe``, by default 20). It also encodes the sample if the plan is for this
    machine and that takes about a minute at most. With ``--videos`` and ``--seconds``, nothing is decoded.

    Raises:
        UsageError: a run would refuse the request, no video of the sample can be read, or ``--gpu-type`` is given
            without GPUs.
        RunFailed: an archive cannot be indexed.
        CorruptShard: a file of the videos table is damaged.
    """
    cluster, notes = _choose_cluster(config)
    if config.corpus_videos is None or config.seconds is None:
        work = _probe_work(config, cluster, console)
    else:
        with TemporaryDirectory() as folder, convert_usage_errors():
            # Only its config matters.
            source = ModelSource.random(config.model, Path(folder), config.revision, config.family)
            recipe = resolve_recipe(config, source=source)
            _, n_shards = config.part() or (0, 1)
            n_videos = math.ceil(int(config.corpus_videos) / n_shards)
            work = _estimate_work_from_options(recipe, cluster, min(n_videos, config.limit or n_videos), config.seconds)
    return estimate_run(work, cluster, config.prices, notes)


def _choose_cluster(config: PruneConfig) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster that the options describe (by default this machine), and notes on the assumptions.

    GPUs of unknown type count as A100. With ``--gpus`` and without ``--decode-cores``, the vCPUs are those usual for
    the GPUs. ``--max-gpus`` and ``--encode-workers`` limit the GPUs, but no worker option limits the vCPUs.

    Raises:
        UsageError: ``--gpu-type`` is given, but there are no GPUs by ``--gpus`` or in this machine.
    """
    n_local_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    gpus = n_local_gpus if config.gpus is None else config.gpus
    cores = float(count_cores())
    notes = []
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
        notes.append(f"--decode-workers {config.decode_workers} is ignored: all {cores:g} vCPUs decode")
    if config.encode_workers is not None and not gpus:
        notes.append(f"--encode-workers {config.encode_workers} is ignored: all {cores:g} vCPUs encode")
    return Cluster(gpus, kind if gpus else None, cores), tuple(notes)


def _is_this_machine(config: PruneConfig) -> bool:
    """Return True if no option describes another cluster than this machine."""
    return config.gpus is None and config.gpu_type is None and config.decode_cores is None


def _probe_work(config: PruneConfig, cluster: Cluster, console: Console) -> Workload:
    """Estimate the work of the videos to process by decoding (and maybe encoding) an evenly spaced sample of them.

    Indexes all archives first (with ``--limit``, as many as it needs), and prints a line about the sample. If nothing
    is left to process, the work is empty.

    Raises:
        UsageError: a run would refuse the request, no archive holds a video, or no video of the sample can be read.
        RunFailed: an archive cannot be indexed.
        CorruptShard: a file of the videos table is damaged.
    """
    request = check_request(config, console)
    recipe = request.recipe
    with convert_store_usage_errors():
        _, todo = request.select_todo(make_run_id())
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
    records, decode_s, encode_s = _probe_videos(recipe, sample, cluster)
    decoded_records = [record for record in records if record["status"] == "ok"]
    if not decoded_records:
        first = f"{records[0]['video_id']}: {records[0]['error_message']}"
        raise UsageError(f"none of the {len(records)} probed videos can be read, e.g. {first}; --probe K looks at more")
    stretch = sum(record["decode_s"] for record in records) / max(sum(decode_s), 1e-9)
    is_busy = stretch > _BUSY and _is_this_machine(config)
    factor = CORE_FACTOR._replace(high=CORE_FACTOR.high * (stretch if is_busy else 1))
    notes = [f"{len(records)} of {n_videos} videos were decoded here; times differ on another CPU"]
    if encode_s:
        notes.append(f"{len(encode_s)} of them were encoded here")
    factors = format_range(factor, format_number)
    notes.append(
        f"a run's core-seconds are those of the probe times {factors}, since its stages share the cores with each "
        "other and with other programs"
    )
    if is_busy:
        held_up = f"other programs or the disk held decoding up here to {format_number(stretch)} times its CPU seconds"
        notes.append(f"{held_up}: the high values assume a run that is held up as long")
    if (limits := count_limits(decoded_records, make_sampling_identity(recipe.sampling))) is not None:
        notes += [f"of the decoded videos, {line}" for line in describe_limits(limits)]
    pixels = {(record["source_width"], record["source_height"]) for record in decoded_records}
    if len(pixels) == 1 < n_videos:
        ((width, height),) = pixels
        notes.append(f"all of them are {width} x {height}: other sizes were not measured")
    unlisted_records = [record for row, record in zip(sample, records, strict=True) if row["size"] is None]
    counted_work = _estimate_encode_work(recipe, cluster, n_videos, [_read_shape(record) for record in decoded_records])
    if encode_s:  # the seconds of a GPU are measured on the GPU
        measured = multiply_intervals(estimate_mean(encode_s, n_videos), GPU_FACTOR if cluster.gpus else factor)
        counted_work = replace(counted_work, encode_s=measured, notes=())
    return replace(
        counted_work,
        failed=1 - len(decoded_records) / len(records),
        decode_s=multiply_intervals(estimate_mean(decode_s, n_videos), factor),
        input_bytes=_estimate_input_bytes(rows["size"], unlisted_records),
        video_s=estimate_mean([measure_seconds(record) for record in decoded_records], n_videos),
        notes=(*notes, *counted_work.notes),
    )


def _estimate_input_bytes(listed_sizes: pa.ChunkedArray, unlisted_records: Sequence[VideoRecord]) -> Interval | None:
    """Estimate the mean size of the files in bytes, with the sample's mean for files of unlisted size.

    Args:
        listed_sizes: the size of each video; null if unlisted.
        unlisted_records: the records of those videos of the sample that have no listed size.

    Returns:
        None if sizes are missing and the sample does not state any either.
    """
    known_bytes = Interval.from_value(pc.sum(listed_sizes).as_py() or 0)
    n_unknown = listed_sizes.null_count
    sizes = [float(size) for record in unlisted_records if (size := record.get("source_size"))]
    if n_unknown and not sizes:
        return None
    unknown_bytes = estimate_mean(sizes, n_unknown).scale_by(n_unknown) if n_unknown else NONE
    return add_intervals(known_bytes, unknown_bytes).scale_by(1 / len(listed_sizes))


def _read_shape(record: VideoRecord) -> Shape:
    """Return (frames, height, width) of a decoded video."""
    return len(record["frame_indices"]), record["height"], record["width"]


def _probe_videos(
    recipe: Recipe, rows: Sequence[TodoRow], cluster: Cluster
) -> tuple[list[VideoRecord], list[float], list[float]]:
    """Decode videos in a child process, and encode the decoded ones here if ``_load_probe_encoder`` returns an encoder.

    Returns:
        (records, core-seconds of decoding, seconds of encoding and pruning). Records and core-seconds have an item per
        video; the record is an error record if decoding or encoding failed. Each encoded video has its seconds on the
        GPU, or CPU seconds if the cluster has no GPU.
    """
    records, decode_s, encode_s = list[VideoRecord](), list[float](), list[float]()
    encoder = None
    is_first = True
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other in loops, which count as CPU seconds
    try:
        for record, frames, core_s in decode_sample(recipe.make_decode_setup(), rows):
            records.append(record)
            decode_s.append(core_s)
            if frames is None:
                continue
            if is_first:
                encoder = _load_probe_encoder(recipe, cluster, _read_shape(record), len(rows))
                is_first = False
            if encoder is None:
                continue
            try:
                if not encode_s:
                    encoder.encode_video_alone(record, frames)  # the first call allocates buffers and compiles kernels
                start = process_time()
                encoded = encoder.encode_video_alone(record, frames).record
                on_core_s = process_time() - start
                encode_s.append(encoded["encode_s"] + encoded["prune_s"] if cluster.gpus else on_core_s)
            except VideoFault as fault:
                records[-1] = make_failed_video(record, fault)
    finally:
        torch.set_num_threads(n_threads)
    return records, decode_s, encode_s


def _load_probe_encoder(recipe: Recipe, cluster: Cluster, shape: Shape, n_videos: int) -> VideoEncoder | None:
    """Load the encoder for ``n_videos`` videos of ``shape`` if the plan is for this machine and encoding is quick.

    Returns:
        None if the plan is for another cluster, the work of the model is unknown, or encoding would take more than
        _MAX_ENCODE_S seconds on one GPU or on all cores.

    Raises:
        UsageError: the encoder cannot be loaded.
    """
    encode_s = _estimate_encode_work(recipe, cluster, n_videos, [shape]).encode_s
    max_s = _MAX_ENCODE_S * (1 if cluster.gpus else cluster.cores)
    if not _is_this_machine(recipe.config) or encode_s is None or n_videos * encode_s.expected > max_s:
        return None
    with convert_usage_errors():
        return recipe.make_encode_setup("cuda" if cluster.gpus else "cpu", recipe.dtype).encoder()


def _estimate_work_from_options(recipe: Recipe, cluster: Cluster, n_videos: int, seconds: float) -> Workload:
    """Estimate the work of ``n_videos`` videos of ``seconds`` each, of which only the options are known.

    If the model does not take their size, a smaller standard size is planned. ``--snap-to-keyframes`` and ``--decoder``
    are ignored. Notes say all this. UnsupportedVideo is raised if the model takes no such size, or needs more frames.
    """
    sampling = recipe.sampling
    n_frames = plan_frames(recipe.sampling, seconds)
    video = plan_video(family_of(recipe.source).preprocessor(), n_frames, recipe.config.pixels())
    width, height = video.size
    counted_work = _estimate_encode_work(recipe, cluster, n_videos, [video.shape])
    assumption = f"{width} x {height} at 30 frames a second, with a keyframe each 1 to 8 s"
    config = recipe.config
    notes = list[str]()
    if video.refusal is not None:
        refused = "videos of {} x {} become rows of class unsupported".format(*config.pixels())
        notes.append(f"this size is planned for, because {refused}: {video.refusal}")
    if sampling.fps is not None and (n_by_rate := count_frames(seconds, sampling.fps)) != n_frames:
        rate = f"({format_rate(n_frames / seconds)} frames per second)"
        is_capped = n_by_rate > n_frames
        limit = (
            f"capped at {n_frames} {rate}; {RAISE}" if is_capped else f"filled up to {n_frames} {rate} for this model"
        )
        notes.append(f"--fps {sampling.fps:g} gives {format_count(n_by_rate, 'frame')} of {seconds:g} s, {limit}")
    if config.snap_to_keyframes is not None:
        notes.append("--snap-to-keyframes is ignored: it makes decoding cheaper than this")
    if config.decoder not in ("auto", "pyav"):
        notes.append(f"--decoder {config.decoder} is ignored: decoding is estimated for PyAV on CPUs")
    return replace(
        counted_work,
        decode_s=estimate_decode_seconds(seconds, width, height, n_frames),
        video_s=Interval.from_value(seconds),
        notes=(f"no video was decoded; assumed: {assumption}", *notes, *counted_work.notes),
    )


def _estimate_encode_work(recipe: Recipe, cluster: Cluster, n_videos: int, shapes: Sequence[Shape]) -> Workload:
    """Estimate the work of encoding and storing ``n_videos`` videos from the model's config; ``decode_s`` stays 0.

    ``encode_s`` is None if the work of the model is unknown.

    Args:
        shapes: the shapes of at least one video, as a sample of all.
    """
    family = family_of(recipe.source)
    encode = recipe.make_encode_setup(recipe.config.device, recipe.dtype)
    measured = recipe.source.family in UTILISATION
    utilisation = UTILISATION[recipe.source.family] if measured else ANY_TOWER

    def compute_mean(values: Iterable[float]) -> Interval:
        numbers = [float(value) for value in values]
        return estimate_mean(numbers, n_videos) if len({*numbers}) > 1 else Interval.from_value(numbers[0])

    def count_stored_bytes(shape: Shape) -> float:
        n_kept = budget_for(recipe.retention_ratio, math.prod(family.token_counts(*shape)))
        return encode.estimate_stored_bytes(*shape) + COLUMN_BYTES * n_kept

    flops = [count for shape in shapes if (count := family.flops(*shape)) is not None]
    low, expected, high = (f"{100 * end:.0f}" for end in utilisation)
    peak = f"{expected} % ({low} to {high} %) of the GPU's peak"
    frame_bytes = compute_mean(3 * math.prod(shape) for shape in shapes)
    if not flops:
        note = (
            f"the work of {recipe.source.model_type} on a video is not known, so time and cost are without encoding; "
            f"{frame_bytes.expected:,.0f} bytes of frames per video go from decoders to encoders"
        )
    elif cluster.gpus:
        source = "measured on one H200 with random weights" if measured else f"not measured for {recipe.source.family}"
        note = f"encoding was not run: the vision tower is assumed to reach {peak} ({source})"
    else:
        note = "encoding was not run: a core is assumed to reach 6 to 60 GFLOP/s"
    return Workload(
        videos=n_videos,
        encode_s=cluster.encode_s(compute_mean(flops), utilisation) if flops else None,
        frame_bytes=frame_bytes,
        output_bytes=compute_mean(map(count_stored_bytes, shapes)),
        notes=(note,),
    )
