"""The dry run and the plan: what a run would do, and what that would take; nothing is started or written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gstep.backbones import ModelSource, family_of
from gstep.types import budget_for
from pipeline.cache.header import CacheIdentity
from pipeline.cache.ledger import Ledger
from pipeline.cache.reader import made_with
from pipeline.cache.schema import TIERS
from pipeline.errors import CacheLocked, UsageError
from pipeline.execution.claim import holder, who
from pipeline.execution.request import refusing, store_refusing
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.plan.estimate import Cluster, Plan, Prices, estimate
from pipeline.plan.facts import video_seconds
from pipeline.plan.gpus import GPU_TYPES, TOWER_UTILISATION, UTILISATION, named_type
from pipeline.plan.intervals import Interval, mean_of, share_of
from pipeline.plan.options import PlanOptions
from pipeline.plan.simulate import simulated_s
from pipeline.plan.workload import Workload, decoding, selecting
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.manifest_checks import Example, sure_failures
from pipeline.prune.request import PruneRequest, prepare, resolve
from pipeline.prune.resume import Tally, discovery_of, refuse_empty, remaining, within_limit
from pipeline.rows import JsonObject, VideoRecord
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, Store

_SHOWN = 5  # ids that the report lists
PROBE = 20  # videos that a plan decodes
FRAMES_AT_ONCE = 32  # of a video on a GPU: what loading a model asks for unless told otherwise
COLUMN_BYTES = 12  # of a token in its shard beside its vectors: index, rank, frame and density, compressed


@dataclass(frozen=True)
class Forecast:
    """The work of a run with the same flags, if it started now.

    Attributes:
        out: the cache, as named.
        tally: the manifest's videos by what is to be done with them.
        n_todo: how many videos the run would process; ``--limit`` leaves the others for another run.
        doomed: videos of these that are sure to fail, by what is wrong with them.
        first_ids: the first ids of the videos to process.
        identity: what every row of the cache would share; the dtype may be left to the cluster ("auto").
        grid: (T, N) of a video; if that depends on its shape, of one in full HD with the most frames that are sampled.
        kept: how many of its tokens are stored; an estimate if the method decides.
        video_bytes: the bytes of these on disk.
        one_size: whether every video has this grid.
        unlisted: containers whose videos are not known, and not counted.
    """

    out: str
    tally: Tally
    n_todo: int
    doomed: dict[str, Example]
    first_ids: list[str]
    identity: CacheIdentity
    grid: tuple[int, int]
    kept: int
    video_bytes: int
    one_size: bool
    unlisted: list[str]

    def as_record(self) -> JsonObject:
        """Return the forecast as a JSON-able mapping."""
        return {**vars(self), "tally": self.tally._asdict()}


def forecast(config: PruneConfig, console: Console) -> Forecast:
    """Check the request as a run does and look at what is left; starts and writes nothing.

    Raises UsageError for whatever a run would refuse.
    """
    request = prepare(config, console)
    with store_refusing():
        if not config.join and (other := holder(request.store)):
            raise CacheLocked(f"{request.store}: another run writes here: {who(other)}")
        _check_writable(request.store)
        ledger = Ledger(request.store, made_with(request.store)).refresh()
        todo, counts = remaining(request.manifest, ledger, config, request.objects)
    todo, _ = within_limit(todo, config.limit)
    shape = request.decode_setup().largest_frames()
    small = family_of(request.source).preprocessor().target_size(shape[0], 240, 240)
    T, N = family_of(request.source).token_counts(*shape)
    return Forecast(
        out=str(request.store),
        tally=counts,
        n_todo=len(todo),
        doomed=sure_failures(todo),
        first_ids=todo["video_id"].slice(0, _SHOWN).to_pylist(),
        identity=request.identity(request.dtype),
        grid=(T, N),
        kept=budget_for(request.retention_ratio, T * N),
        video_bytes=request.encode_setup(request.config.device, request.dtype).stored_bytes_per_video(*shape),
        one_size=request.sampling.fps is None and small == shape[1:],
        unlisted=[place.uri for place in request.indexing.left],
    )


def _check_writable(store: Store) -> None:
    """Raise UsageError where a folder cannot be made or written to; an object store tells only once it is."""
    if store.folder is None:
        return
    there = next(path for path in (store.folder, *store.folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is no folder"
        raise UsageError(f"{store}: nothing can be written here: {there} {why}")


def render_forecast(plan: Forecast) -> RenderableType:
    """Render the forecast as a table for the terminal, with the identity below it."""
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(plan):
        table.add_row(name, Text(value))  # ids and addresses come from files and are no markup
    identity = Table.grid(padding=(0, 2))
    for name, value in _leaves(plan.identity):
        identity.add_row(f"  {name}", Text(value))
    return Group("dry run: nothing was started or written", table, "identity of every row", identity)


def _lines(plan: Forecast) -> list[tuple[str, str]]:
    counts, (T, N) = plan.tally, plan.grid
    waiting = counts.n_todo - plan.n_todo
    rest = f", {waiting} more wait (--limit)" if waiting else ""
    again = f"{counts.new} new, {counts.retried} failed before, {counts.redone} changed"
    largest = "" if plan.one_size else ", in full HD and of full length"
    wrong = [(f"{found.n} of the {plan.n_todo} {what}", found.first) for what, found in plan.doomed.items()]
    total = plan.video_bytes * (plan.n_todo - sum(found.n for found in plan.doomed.values()))
    lines = [
        ("cache", plan.out),
        ("videos", f"{plan.n_todo} to do{rest}, {counts.done} done, {counts.failed} failed before and left alone"),
        ("left to do", again),
        *(("will fail", f"{count}, e.g. {first}") for count, first in wrong),
        ("a video", f"{T} x {N} = {T * N} tokens, about {plan.kept} kept{largest}"),
        ("bytes", f"about {plan.video_bytes:,} a video, {total:,} in all{largest}"),
    ]
    if plan.unlisted:
        lines.append(
            ("not counted", f"the videos of {len(plan.unlisted)} containers, e.g. {plan.unlisted[0]} (--index)")
        )
    more = ", ..." if plan.n_todo > len(plan.first_ids) else ""
    return [*lines, ("first", ", ".join(plan.first_ids) + more)] if plan.first_ids else lines


def _leaves(values: CacheIdentity | JsonObject, prefix: str = "") -> list[tuple[str, str]]:
    """List (dotted name, value) of every leaf of nested mappings."""
    leaves: list[tuple[str, str]] = []
    for name, value in values.items():
        leaves += (
            _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", str(value))]
        )
    return leaves


Shape = tuple[int, int, int]  # frames, height and width as an encoder gets them
# A file that nobody has looked at: low, expected and high (frames' height and width) and core-seconds of decoding it.
_UNSEEN_SIZES = ((240, 426), (720, 1280), (1080, 1920))
_UNSEEN_DECODE_S = Interval(0.03, 0.5, 6.0)


def plan_run(config: PruneConfig, console: Console) -> Plan:
    """Estimate what a run with the same flags would take; decodes the probed videos, starts and writes nothing.

    Raises UsageError for whatever a run would refuse before it starts.
    """
    if config.corpus_videos is None or config.seconds is None:
        work = planned_work(config, console)
    else:
        with TemporaryDirectory() as folder, refusing():
            source = ModelSource.random(config.model, Path(folder), config.revision)  # its config is all that counts
            request = resolve(config, MANIFEST_SCHEMA.empty_table(), LocalStore(config.out), Objects(), source)
            work = _described(request, config.corpus_videos, config.seconds)
    cluster, notes = planned_cluster(config, config.device)
    cluster = cluster._replace(encoders_per_gpu=config.encoders_per_gpu)
    plan = estimate(work, cluster, Prices.of(config), notes)
    return replace(plan, simulated_wall_s=simulated_s(work, cluster)) if config.simulate else plan


def planned_work(config: PruneConfig, console: Console, given: object = None) -> Workload:
    """Return the work of the videos that are left to do, ``given`` ones or those that the options name."""
    request = prepare(config, console, given)
    with store_refusing():
        ledger = Ledger(request.store, made_with(request.store)).refresh()
        todo, _ = remaining(request.manifest, ledger, config, request.objects)
    todo, _ = within_limit(todo, config.limit)
    with discovery_of(request, ledger, todo) as found:
        todo = found.all().todo
    refuse_empty(request, found)
    seen = probed(request, todo, PROBE if config.probe is None else config.probe, console)
    return workload(request, len(todo), seen, ledger)


def probed(request: PruneRequest, todo: pa.Table, count: int, console: Console) -> list[VideoRecord]:
    """Decode ``count`` of the videos (TODO_SCHEMA), evenly spread, in a child process; return their records."""
    places = sorted({int(place) for place in np.linspace(0, len(todo) - 1, min(count, len(todo)))})
    if not places:
        return []
    console.print(f"probing {len(places)} of {len(todo)} videos", highlight=False)
    rows, records = todo.take(places).to_pylist(), []
    with closing(VideoDecoder(request.decode_setup())) as decoder:
        for row in rows:
            with decoder.open(row) as source:
                records.append(decoder.decode_one(row, source)[0])
    return records


def workload(request: PruneRequest, n_videos: int, seen: Sequence[VideoRecord], ledger: Ledger) -> Workload:
    """Return the work of ``n_videos``, by the videos that were probed, else by what the cache has measured."""
    good = [record for record in seen if record["status"] == "ok"]
    rows = np.flatnonzero(ledger.columns["state"] == 1)
    seconds = ledger.columns["seconds"][rows].astype(float)
    if good:
        shapes = [(len(one["frame_indices"]), one["height"], one["width"]) for one in good]
        decode_s = mean_of([one["decode_s"] for one in seen], population=n_videos)
        notes = [f"{len(seen)} of {n_videos} videos were decoded here; another CPU takes other times"]
        if len(pixels := {(one["source_width"], one["source_height"]) for one in good}) == 1 < n_videos:
            ((width, height),) = pixels
            notes.append(f"all of them are {width} x {height}: nothing is known of other sizes")
    else:
        n_frames = request.decode_setup().largest_frames()[0]
        shapes = _shapes(request, n_frames, _UNSEEN_SIZES)
        decode_s = mean_of(seconds[:, 0].tolist()) if len(rows) else _UNSEEN_DECODE_S.scaled(min(n_frames, 64) / 32)
        notes = ["no video was looked at: sizes from 240p to 1080p, and decoding, are assumed (--probe K looks at K)"]
    if seen and not good:
        notes = ["none of the probed videos can be read"]
    if len(rows):
        notes.append(f"encoding, and decoding of what was not probed, is as in the {len(rows)} videos of the cache")
    sizes = [float(size) for one in seen if (size := one.get("source_size"))]
    work = _counted(request, n_videos, shapes, decode_s, measured=bool(good))
    return replace(
        work,
        failed=share_of(len(seen) - len(good), len(seen), n_videos),
        encode_s=mean_of(seconds[:, 1:3].sum(axis=1).tolist()) if len(rows) else None,
        input_bytes=mean_of(sizes, 0.0, n_videos) if sizes else None,
        seconds=mean_of([video_seconds(one) for one in good], 0.0, n_videos) if good else None,
        notes=tuple(notes),
    )


def _described(request: PruneRequest, n_videos: float, seconds: float) -> Workload:
    """Return the work of a corpus that the options describe."""
    (width, height), sampling = request.config.pixels(), request.sampling
    by_time = max(sampling.min_frames, int(seconds * (sampling.fps or 1.0)))
    n_frames = sampling.num_frames or min(by_time, sampling.max_frames or 1)
    shapes = _shapes(request, n_frames, [(height, width)])
    work = _counted(request, int(n_videos), shapes, decoding(seconds, width, height, n_frames))
    assumed = f"{width} x {height} at 30 frames a second, with a keyframe each 1 to 8 s"
    return replace(work, seconds=Interval.exactly(seconds), notes=(f"no video was looked at: {assumed}, is assumed",))


def _shapes(request: PruneRequest, n_frames: int, sizes: Sequence[tuple[int, int]]) -> list[Shape]:
    """Return (frames, height, width) as the encoder would see videos of these (height, width)."""
    preprocessor = family_of(request.source).preprocessor()
    return [(n_frames, *preprocessor.target_size(n_frames, *size)) for size in sizes]


def _counted(
    request: PruneRequest, n_videos: int, shapes: Sequence[Shape], decode_s: Interval, *, measured: bool = False
) -> Workload:
    """Count what a model's config tells of videos of these shapes: a sample of them, or a low, middle and high case."""
    family, encode = family_of(request.source), request.encode_setup(request.config.device, request.dtype)

    def over(count: Callable[[Shape], float]) -> Interval:
        numbers = [float(count(shape)) for shape in shapes]
        if len({*numbers}) == 1 or not measured:
            return Interval(min(numbers), sorted(numbers)[len(numbers) // 2], max(numbers))
        return mean_of(numbers, 0.0, n_videos)

    def kept(shape: Shape) -> int:
        return budget_for(request.retention_ratio, math.prod(family.token_counts(*shape)))

    tower, ratio = family.tower_work(*max(shapes)[1:]), request.retention_ratio
    at_once = min(FRAMES_AT_ONCE // family.preprocessor().frames_per_patch, 2**17 // tower.patches)
    total = over(lambda shape: math.prod(family.token_counts(*shape)))
    width = encode.bytes_per_video(*shapes[0]) / kept(shapes[0]) / 2
    return Workload(
        videos=n_videos,
        decode_s=decode_s,
        flops=over(lambda shape: family.flops(*shape)),
        utilisation=TOWER_UTILISATION.get(family.model_type, UTILISATION),
        parameters=tower.parameters,
        patch_bytes=2.0 * max(1, at_once) * tower.patches * tower.width,
        tokens=(total, over(kept)),
        frame_bytes=over(lambda shape: 3 * math.prod(shape)),
        output_bytes=over(lambda shape: encode.stored_bytes_per_video(*shape) + COLUMN_BYTES * kept(shape)),
        reads={tier: tier / ratio for tier in TIERS if request.pruner.nested and tier < ratio - 1e-9},
        selection_s=selecting(request.method, total.expected, round(width)),
    )


def joined_cluster(resources: Mapping[str, float], device: str) -> Cluster:
    """Return the cluster that Ray describes; the GPUs that it does not name count as A100."""
    gpus = int(resources.get("GPU", 0)) if device == "cuda" else 0
    kinds = [named_type(name.partition(":")[2]) for name in resources if name.startswith("accelerator_type:")]
    return Cluster(gpus, next(filter(None, kinds), "A100") if gpus else None, resources.get("CPU", 1.0))


def token_bytes(request: PruneRequest) -> float:
    """Return the stored bytes of a kept token with its columns, whatever the shape of its video."""
    shape, family = request.decode_setup().largest_frames(), family_of(request.source)
    stored = request.encode_setup(request.config.device, request.dtype).stored_bytes_per_video(*shape)
    return COLUMN_BYTES + stored / request.retention_ratio / math.prod(family.token_counts(*shape))


def planned_cluster(config: PlanOptions, device: str) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster of the options, by default this machine, and what is assumed of it."""
    here = 0 if device == "cpu" else torch.cuda.device_count()
    gpus, cores = here if config.gpus is None else config.gpus, float(os.cpu_count() or 1)
    notes = []
    kind = config.gpu_type or (named_type(torch.cuda.get_device_name(0)) if here else None)
    if gpus and kind is None:
        kind = "A100"
        notes.append("the type of the GPUs is not known: A100 is assumed (--gpu-type)")
    if config.gpus and kind:
        cores = float(config.gpus * GPU_TYPES[kind].vcpus)
    if config.gpus is None and config.decode_cores is None:
        notes.append("the cluster is this machine: --gpus, --gpu-type and --decode-cores plan for another one")
    return Cluster(gpus, kind if gpus else None, float(config.decode_cores or cores)), tuple(notes)
