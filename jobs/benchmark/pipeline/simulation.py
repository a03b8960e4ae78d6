"""Run the driver of a run over simulated workers, of which only the number and what they report is there.

Shards, commits, merges, heartbeats, watchdog and metrics are those of a run. Ray Data is left out, as its workers would
be processes: bundles come at the pace of so many encoders, one process stands for all writers, and another one sends
the reports of all workers.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import cast
from uuid import uuid4

import numpy as np
import pyarrow as pa
import ray
from ray.actor import ActorHandle
from rich.console import Console

from gstep.backbones import family_of
from jobs.benchmark.pipeline.driver import IdleVideoDecoder
from jobs.benchmark.pipeline.job import SleepingSetup, ray_of
from jobs.benchmark.pipeline.work import FRAME_BYTES, RATIO, Work
from jobs.benchmark.table.times import Far
from pipeline.cache.header import header_bytes
from pipeline.cache.live_rows import TOKENS
from pipeline.cache.reader import HEADER
from pipeline.cache.writer import write_token_shard
from pipeline.execution import stream as streaming
from pipeline.execution.monitoring.monitor import Monitor
from pipeline.execution.monitoring.report import ProgressDelta, Worker, WorkerReport
from pipeline.execution.run_record import RunFile
from pipeline.execution.shards import TICK_S, Batch, RunGraph, Shard, Shards
from pipeline.execution.stream import PlannedGraph
from pipeline.prune.batches import written_batch
from pipeline.prune.config import PruneConfig
from pipeline.prune.graph import Resources, plan_resources, videos_for
from pipeline.prune.passes import Commits
from pipeline.prune.request import PruneRequest, prepare
from pipeline.rows import TodoRow
from pipeline.storage.stores import LocalStore, Store

_DECODERS = 12  # beside each encoder: the vCPUs of a GPU
_CORPUS = 10**8  # videos for which the stages are planned: what is simulated is a stretch of a long run
_KEPT_BYTES = 351_232  # of a frame: a quarter of 196 tokens of 3,584 numbers
_SHARD_BYTES, _WRITE_BYTES_S = 256 * 10**6, 269e6  # bytes of a shard, and a second at which a writer hashes and writes
_SAMPLE_S = 0.005
_STORE_BYTES = 64e9  # of the object store, beside each encoder
_BLOCKS = 256  # the blocks that stand for all bundles


class SimulatedWriters:
    """The actor that stands for all writers: each takes its time for a shard, one at a time, and returns its rows."""

    def __init__(self, rows: pa.Table, folder: str, run_id: str) -> None:
        self._rows, self._store, self._run_id = rows, LocalStore(folder), run_id
        self._turns: dict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._n_videos = 0
        (self._store.root / TOKENS).mkdir(exist_ok=True)

    async def ready(self) -> None:
        """Return once the actor has started."""

    async def write(self, writer: int, n_videos: int, seconds: float, *bundles: pa.Table) -> pa.Table:
        """Wait for as long as writing takes, leave an empty file, and return the rows of new videos."""
        first, self._n_videos = self._n_videos, self._n_videos + n_videos
        async with self._turns[writer]:
            await asyncio.sleep(seconds)
        name = f"{TOKENS}/{self._run_id}-{uuid4().hex[:16]}-{uuid4().hex[:16]}.parquet"
        (self._store.root / name).touch()
        rows = self._rows.slice(0, n_videos)
        ids = [f"video-{first + place:09d}" for place in range(n_videos)]
        for column, values in (("video_id", ids), ("token_shard", [name] * n_videos)):
            place = rows.schema.get_field_index(column)
            rows = rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))
        return rows


class _Writer:
    """A writer as the driver sees it: ``write.remote`` asks the actor that stands for all of them."""

    def __init__(self, writers: ActorHandle, number: int, videos_per_bundle: int, video_s: float) -> None:
        self._writers, self._number = writers, number
        self._videos_per_bundle, self._video_s = videos_per_bundle, video_s
        self.write = self

    def remote(self, *bundles: ray.ObjectRef) -> ray.ObjectRef:
        """Start to write a shard, and return the reference to its rows."""
        n_videos = len(bundles) * self._videos_per_bundle
        return self._writers.write.remote(self._number, n_videos, n_videos * self._video_s, *bundles)


@dataclass(frozen=True)
class SimulatedGraph(RunGraph):
    """A graph of ``n_bundles`` bundles that come from nowhere, so many a second."""

    n_bundles: int = 0
    bundles_s: float = 1.0

    def batches(self) -> Iterator[Batch]:
        """Yield each bundle when the encoders would have it, or at once where the driver is late."""
        blocks = [ray.put(pa.table({"records": [b"0"]})) for _ in range(_BLOCKS)]
        began = time.monotonic()
        for number in range(self.n_bundles):
            if (early_s := began + number / self.bundles_s - time.monotonic()) > 0:
                time.sleep(early_s)
            yield Batch([blocks[number % _BLOCKS]], self.items_per_row)


class Reporters:
    """The actor that reports to ``heartbeats`` for so many workers of each stage, as often as these should."""

    def __init__(self, heartbeats: ActorHandle, stages: Mapping[str, int]) -> None:
        self._heartbeats = heartbeats
        self._workers = [
            (stage, Worker(f"{stage}-{number}", f"host-{number % 64}", f"node-{number % 64}"))
            for stage, n_workers in stages.items()
            for number in range(n_workers)
        ]
        self._sent = 0
        threading.Thread(target=self._report, daemon=True).start()

    def sent(self) -> int:
        """Return how many reports Ray has taken."""
        return self._sent

    def _report(self) -> None:
        """Report for one worker after the other, as far as this process can; runs in a thread."""
        every_s, full = 1.0, ray.exceptions.PendingCallsLimitExceeded
        while True:
            with suppress(full):
                every_s = ray.get(self._heartbeats.every_s.remote())
            began = time.monotonic()
            for place, (stage, worker) in enumerate(self._workers):
                if (early_s := began + place * every_s / len(self._workers) - time.monotonic()) > 0.01:
                    time.sleep(early_s)
                delta = ProgressDelta(1, 2, 1, 0, 1, every_s, every_s)
                with suppress(full):  # as a worker does
                    self._heartbeats.state.remote(stage, worker, [f"{worker.name}.mp4"], delta)
                    self._sent += 1


class _TimedShards(Shards):
    """Shards that time the turns of the driver in which something is written: how long it takes to commit that."""

    turns_s: list[float] = []  # noqa: RUF012 - of the one run of this process

    def written(self, wait_s: float = TICK_S) -> Iterator[Shard]:
        """Yield the written shards, and keep the seconds until the next is asked for."""
        for shard in super().written(wait_s):
            began = time.perf_counter()
            yield shard
            self.turns_s.append(time.perf_counter() - began)


class _Sampler:
    """The observer of the main thread, which counts the function of ``pipeline`` in which it is, 200 times a second."""

    def __init__(self) -> None:
        self._began, self._used = time.perf_counter(), time.process_time()
        self._samples: Counter[str] = Counter()
        self._main, self._ended = threading.get_ident(), threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def end(self) -> dict[str, float]:
        """End it; return the seconds since the start and the share that each function took, by "in " and its name."""
        self._ended.set()
        seconds, used = time.perf_counter() - self._began, time.process_time() - self._used
        shares = {f"in {name}": times / self._samples.total() for name, times in self._samples.most_common()}
        return {"seconds": seconds, "CPU s": used, **shares}

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            frame = sys._current_frames()[self._main]
            while frame.f_back is not None and not frame.f_globals["__name__"].startswith("pipeline."):
                frame = frame.f_back
            self._samples[frame.f_code.co_qualname.partition(".<locals>")[0]] += 1


def run(work: Work) -> dict[str, float]:
    """Run the driver over so many simulated videos; return what it took."""
    work.out.mkdir()
    with ray_of(work):
        config = PruneConfig(
            videos=[str(work.manifest)],
            out=str(work.out),
            model="tiny",
            num_frames=work.frames,
            retention_ratio=RATIO,
            device="cpu",
        )
        request = prepare(config, Console(file=StringIO()))
        request.store.put(HEADER, header_bytes(request.header("float32", family_of(request.source).static())))
        return _streamed(work, request, planned(work))


def planned(work: Work) -> Resources:
    """Plan the stages of a long run on a cluster with so many GPUs."""
    token_bytes = work.frames * _KEPT_BYTES
    shard = videos_for(_SHARD_BYTES, token_bytes, work.frames)
    cores = _DECODERS * work.encoders
    plan = plan_resources(cores, work.encoders, _CORPUS, videos_per_shard=shard)
    return plan.fitting(_STORE_BYTES * work.encoders, work.frames * FRAME_BYTES, token_bytes, _CORPUS)


def _written_rows(work: Work, request: PruneRequest, n_rows: int) -> pa.Table:
    """Return rows as writers return them, of idle decoders and sleeping encoders."""
    setup = SleepingSetup(**vars(request.encode_setup("cpu", "float32")))
    decoder, encoder = IdleVideoDecoder(request.decode_setup()), setup.encoder()
    row = cast(TodoRow, {"video_id": "video", "uri": str(work.folder), "attempts": 1})
    record, frames = decoder.decode_one(row, decoder.open(row))
    video = encoder.encode_one(record, cast(np.ndarray, frames))
    return written_batch(write_token_shard([video] * n_rows, store=request.store, run_id=request.run_id))


class _Simulation:
    """The builder of the simulated graph, which keeps what is measured from when it runs."""

    def __init__(self, work: Work, plan: Resources, writers: ActorHandle) -> None:
        self._work, self._plan, self._host = work, plan, writers
        self.n_bundles = work.videos // plan.videos_per_bundle
        self.reporters: ActorHandle | None = None
        self.sampler: _Sampler | None = None
        self.report = WorkerReport()

    def build(self, heartbeats: ActorHandle) -> RunGraph:
        """Start the reports, wait for all simulated workers, and return the graph."""
        plan, work = self._plan, self._work
        stages = {"decode": plan.decode.workers, "encode": plan.encode.workers, "write": plan.write.workers}
        self.reporters = ray.remote(Reporters).options(num_cpus=0).remote(heartbeats, stages)
        ray.get([self.reporters.sent.remote(), self._host.ready.remote()])
        self.sampler = _Sampler()
        return SimulatedGraph(
            dataset=None,
            items_per_shard=plan.videos_per_shard,
            writers=self._writers,
            items_per_row=plan.videos_per_bundle,
            n_bundles=self.n_bundles,
            bundles_s=work.encoders / work.work_s / plan.videos_per_bundle,
        )

    def _writers(self) -> list[_Writer]:
        """Return the writers of the graph."""
        video_s = self._work.frames * _KEPT_BYTES / _WRITE_BYTES_S
        numbers = range(self._plan.write.workers)
        return [_Writer(self._host, number, self._plan.videos_per_bundle, video_s) for number in numbers]

    def keep(self, report: WorkerReport) -> None:
        """Keep the last report of the workers."""
        self.report = report

    def figures(self) -> dict[str, float]:
        """Return what the run took, with the share of the driver's time in each function."""
        assert self.sampler is not None and self.reporters is not None
        spent, n_videos = self.sampler.end(), self.n_bundles * self._plan.videos_per_bundle
        seconds = spent["seconds"]
        return {
            "offered": self._work.encoders / self._work.work_s,
            "reached": n_videos / seconds,
            "driver CPU ms": 1e3 * spent["CPU s"] / n_videos,
            "tick": float(np.median(_TimedShards.turns_s)),
            "slow tick": float(np.quantile(_TimedShards.turns_s, 0.99)),
            "driver MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
            "reports sent": ray.get(self.reporters.sent.remote()) / seconds,
            "reports read": self.report.moves / 2 / seconds,
            **spent,
        }


def _streamed(work: Work, request: PruneRequest, plan: Resources) -> dict[str, float]:
    """Stream the videos through the driver, and return its figures."""
    rows = _written_rows(work, request, plan.videos_per_shard)
    writers = ray.remote(SimulatedWriters).options(num_cpus=0, max_concurrency=4 * work.encoders)
    simulated = _Simulation(work, plan, writers.remote(rows, str(work.out), request.run_id))
    n_videos = simulated.n_bundles * plan.videos_per_bundle
    store = cast(Store, Far(cast(LocalStore, request.store), work.request_s))
    run_file, console = RunFile(store, {"run_id": request.run_id}), Console(file=StringIO())
    vars(streaming)["Shards"] = _TimedShards
    with Monitor(store, request.run_id, lambda at: None) as monitor, run_file:
        monitor.start()
        far = replace(request, store=store)
        commits = Commits(far, store.read(HEADER), n_videos, run_file, lambda text: None, monitor=monitor)
        commit, keep = partial(commits, 0), simulated.keep
        graph = PlannedGraph(simulated.build, commit, plan, lambda: n_videos, on_look=monitor.look, on_end=keep)
        streaming.stream(request.manifest, lambda left: graph, lambda left: left, console, request.config)
        return simulated.figures()
