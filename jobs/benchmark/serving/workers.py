"""How workers of a tensor-parallel engine get a video's rows: each reads them, or one reads and sends them to all."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.table import Table
from torch import Tensor, distributed

from jobs.benchmark.read.cache import ReadJob, make_cache
from jobs.benchmark.shown import figure_table
from pipeline import TokenCache
from pipeline.errors import RunFailed
from pipeline.generate.engines.cached_rows import read_packed
from pipeline.storage.stores import LocalStore

_MADE = ReadJob(videos=8, tokens=1568, hidden=3584, videos_per_shard=8, repeats=1)  # of 11 MB each
_WAYS = ("each reads", "one reads and broadcasts")


@dataclass(frozen=True)
class Shared:
    """The median times of a video until all workers hold its rows as they are stored, in one of the ways.

    Attributes:
        ms: until the last worker had them.
        cpu_ms: of all workers together.
        mb: of the rows.
    """

    way: str
    workers: int
    ms: float
    cpu_ms: float
    mb: float


def measure_workers(workers: int, rounds: int, job: ReadJob = _MADE) -> list[Shared]:
    """Measure both ways on made-up videos. Raises RunFailed."""
    with TemporaryDirectory() as folder:
        place = str(Path(folder) / "cache")
        make_cache(LocalStore(place), job)
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=False) for _ in range(workers)]
        meet = f"file://{folder}/meet"
        children = [
            context.Process(target=_worker, args=(place, rank, workers, rounds, meet, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for child in children:
            child.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            told: list[list[list[tuple[float, float, int]]]] = [ours.recv() for ours, _ in pipes]
        except EOFError as error:
            raise RunFailed("a worker died before it had measured") from error
        finally:
            for child in children:
                child.join()
    return [_shared(way, [of_worker[number] for of_worker in told]) for number, way in enumerate(_WAYS)]


def _shared(way: str, told: list[list[tuple[float, float, int]]]) -> Shared:
    """Return the times of one way from what each worker says of each video: (seconds, CPU seconds, bytes)."""
    by_video = list(zip(*told, strict=True))
    return Shared(
        way=way,
        workers=len(told),
        ms=1e3 * median(max(seconds for seconds, _, _ in video) for video in by_video),
        cpu_ms=1e3 * median(sum(cpu_s for _, cpu_s, _ in video) for video in by_video),
        mb=median(video[0][2] for video in by_video) / 1e6,
    )


def _worker(place: str, rank: int, workers: int, rounds: int, meet: str, pipe: Connection) -> None:
    """Measure both ways on all videos, beside the other workers, and send what each took; runs in a process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=workers)
    cache = TokenCache(place)
    took: list[list[tuple[float, float, int]]] = [[] for _ in _WAYS]
    for number in range(rounds + 1):
        for video_id in cache:
            both = [_timed(cache, video_id, rank, way) for way in _WAYS]
            assert all(map(torch.equal, both[0][1], both[1][1])), video_id
            for of_way, (times, _) in zip(took, both, strict=True):
                of_way.extend([times] if number else [])  # the first time files may be in no memory yet
    distributed.destroy_process_group()
    pipe.send(took)


def _timed(cache: TokenCache, video_id: str, rank: int, way: str) -> tuple[tuple[float, float, int], list[Tensor]]:
    """Read or receive a video's rows once all workers are there; return (seconds, CPU seconds, bytes), and the rows."""
    distributed.barrier()
    started, cpu_s = time.perf_counter(), time.process_time()
    columns = _rows(cache, video_id, reads=rank == 0 or way == _WAYS[0])
    if way != _WAYS[0]:
        for column in columns:
            distributed.broadcast(column, src=0)
    size = sum(column.nbytes for column in columns)
    return (time.perf_counter() - started, time.process_time() - cpu_s, size), columns


def _rows(cache: TokenCache, video_id: str, *, reads: bool) -> list[Tensor]:
    """Return a video's rows as they are stored, as bytes; those that are to be received are empty."""
    row = cache.metadata(video_id)
    if reads:
        return [
            column.view(torch.uint8) for column in read_packed(cache, row, row["n_tokens"], "index").columns.values()
        ]
    levels, width = 1 + cache.deepstack_levels, 2 * row["hidden_size"]
    return [torch.empty((row["n_tokens"], width), dtype=torch.uint8) for _ in range(levels)]


def as_table(found: list[Shared]) -> Table:
    """Lay out a row a way."""
    rows = [(one.way, f"{one.mb:.1f}", f"{one.ms:.1f}", f"{one.cpu_ms:.1f}") for one in found]
    return figure_table(
        f"until {found[0].workers} workers hold a video's rows", ("way", "MB", "ms", "CPU ms of all"), rows
    )
