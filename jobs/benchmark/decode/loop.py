"""The whole job where decoding is the cost, beside DataLoader loops that decode with other libraries."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import DataLoader, Dataset

from jobs.benchmark.decode.measure import by_decord, by_torchcodec
from jobs.benchmark.timing import seconds_of
from pipeline.cache.reader import TokenCache

JOB, LIBRARIES = "the job", {"decord": by_decord, "torchcodec": by_torchcodec}


class Videos(Dataset[torch.Tensor]):
    """A dataset of ``count`` copies of one clip, each item its sampled and resized frames, uint8."""

    def __init__(self, path: Path, chosen: list[int], count: int, library: str) -> None:
        self._decode = partial(LIBRARIES[library], str(path), chosen)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return self._decode()


def videos_per_second(path: Path, chosen: list[int], counts: Sequence[int], workers: int) -> dict[str, float | None]:
    """Return the throughput, in videos/s, of jobs.prune and of each DataLoader loop: the slope between two ``counts``.

    The loops burn the CPU seconds that the job's small encoder takes for a video, so that all do the same work.
    """
    (few, many), encode_s = sorted(counts), list[float]()
    ways: dict[str, Callable[[int], None]] = {JOB: lambda count: encode_s.append(_job(path, len(chosen), count))}
    for library in LIBRARIES:
        ways[f"loop with {library}"] = partial(_loop, path, chosen, library, workers, encode_s)
    found: dict[str, float | None] = {}
    for way, run in ways.items():
        try:
            of_many, of_few = (seconds_of(partial(run, count))[0] for count in (many, few))
            found[way] = (many - few) / (of_many - of_few)
        except Exception:  # noqa: BLE001 - a library that is not here, or cannot read this clip, has no figure
            found[way] = None
    return found


def _job(path: Path, n_frames: int, count: int) -> float:
    """Run ``jobs.prune`` on ``count`` copies of a clip; return the fastest one's seconds of encoding and pruning."""
    with TemporaryDirectory() as folder:
        manifest, cache = Path(folder) / "videos.jsonl", Path(folder) / "cache"
        rows = [json.dumps({"video_id": str(number), "uri": str(path.resolve())}) for number in range(count)]
        manifest.write_text("\n".join(rows), encoding="utf-8")
        options = [manifest, "--out", cache, "--num-frames", n_frames, "--video-root", path.resolve().parent]
        command = [sys.executable, "-m", "jobs.prune", *map(str, options)]
        subprocess.run(command, check=True, capture_output=True)
        found = TokenCache(cache)
        rows_of = [found.get(video_id).metadata for video_id in found.video_ids]
        return float(min(row["encode_s"] + row["prune_s"] for row in rows_of))


def _loop(path: Path, chosen: list[int], library: str, workers: int, encode_s: list[float], count: int) -> None:
    """Decode ``count`` copies of a clip by a DataLoader, and burn the least of ``encode_s`` in CPU seconds for each."""
    videos, burn_s = Videos(path, chosen, count, library), min(encode_s)
    for _ in DataLoader(videos, batch_size=None, num_workers=workers, prefetch_factor=2):
        until = time.thread_time() + burn_s
        while time.thread_time() < until:
            pass
