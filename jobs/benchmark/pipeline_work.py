"""The work of the child processes of ``pipeline``, and the plain loop: DataLoader -> model -> Parquet."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

LOOP, JOB = "plain loop", "job"
SIDE = 384  # pixels of a clip's side, which is the size of LLaVA-OneVision's frames
FRAME_BYTES = 3 * SIDE**2
RATIO = 0.25
KEPT_BYTES_PER_FRAME = 49 * 64 * 2  # a quarter of 196 bfloat16 tokens with hidden size 64, as of the model "tiny"
_VIDEOS_PER_FILE = 16
_PREFETCH = 4


@dataclass(frozen=True)
class PipelineWork:
    """The work of one child process.

    Attributes:
        kind: LOOP for a DataLoader in front of a model, JOB for ``jobs.prune``.
        encode_s: seconds that an encoder sleeps per video.
        encoders: the number of encoders; the plain loop has one process for each.
        nodes: the number of logical Ray nodes; 0 for the Ray that the job starts itself.
        folder: has the videos, and receives the results.
    """

    kind: str
    frames: int
    encode_s: float
    workers: int
    encoders: int = 1
    nodes: int = 0
    folder: str = ""
    videos: int = 0

    @property
    def manifest(self) -> Path:
        """The path of the manifest of the videos."""
        return Path(self.folder) / "manifest.jsonl"

    @property
    def out(self) -> Path:
        """The path of the folder for results."""
        return Path(self.folder) / "out"


class VideoDataset(Dataset[tuple[str, torch.Tensor]]):
    """Every ``work.encoders``-th video, beginning at number ``encoder``."""

    def __init__(self, work: PipelineWork, encoder: int) -> None:
        self._work = work
        lines = work.manifest.read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line) for line in lines[encoder :: work.encoders]]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]:
        """Decode the first ``work.frames`` frames of a video: (video_id, frames [t,384,384,3] uint8)."""
        row, size = self._rows[index], {"width": SIDE, "height": SIDE, "interpolation": "BICUBIC"}
        with av.open(str(self._work.manifest.with_name(row["uri"]))) as container:
            frames = [frame.to_ndarray(format="rgb24", **size) for frame in container.decode(video=0)]
        return row["video_id"], torch.from_numpy(np.stack(frames[: self._work.frames]))


def run_loop(work: PipelineWork) -> dict[str, float]:
    """Run the plain loop over all videos, in one process per encoder if there are several; return the seconds."""
    work.out.mkdir()
    started = time.perf_counter()
    if work.encoders == 1:
        encode_slice(work, 0)
    else:
        with ProcessPoolExecutor(work.encoders, get_context("spawn")) as processes:
            list(processes.map(partial(encode_slice, work), range(work.encoders)))
    return {"seconds": time.perf_counter() - started}


def encode_slice(work: PipelineWork, encoder: int) -> None:
    """Decode one encoder's share of the videos with a DataLoader, sleep for each, and write random tokens to files."""
    tokens = os.urandom(work.frames * KEPT_BYTES_PER_FRAME)
    batch = dict[str, bytes]()
    videos = VideoDataset(work, encoder)
    workers = max(1, work.workers // work.encoders)
    # No batches: videos differ in length. Frames would go to the GPU unchanged, so nothing is computed from them here.
    loader = DataLoader(videos, batch_size=None, num_workers=workers, prefetch_factor=_PREFETCH)
    for number, (video_id, _) in enumerate(loader, start=1):
        time.sleep(work.encode_s)
        batch[video_id] = tokens
        if len(batch) == _VIDEOS_PER_FILE or number == len(videos):
            table = pa.table({"video_id": list(batch), "tokens": list(batch.values())})
            pq.write_table(table, work.out / f"{encoder}-{number:07d}.parquet")
            batch.clear()


def run_child_work() -> None:
    """Run the loop or the job in this child process, and print its figures as JSON on the last line of stdout.

    ``sys.argv[1]`` has the fields of a ``PipelineWork`` as JSON.
    """
    work = PipelineWork(**json.loads(sys.argv[1]))
    if work.kind == LOOP:
        figures = run_loop(work)
    else:
        from jobs.benchmark.pipeline_job import run_job  # noqa: PLC0415 - Ray would count in the memory of the loop

        figures = run_job(work)
    print(json.dumps(figures))
