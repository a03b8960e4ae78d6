"""Run what one would write without this package, DataLoader -> model -> Parquet: a child process of the benchmark."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

from jobs.benchmark.pipeline.work import KEPT_BYTES_PER_FRAME, SIDE, Answer, Work, answer

VIDEOS_PER_FILE = 16
PREFETCH = 4


class Videos(Dataset[tuple[str, torch.Tensor]]):
    """The videos of a manifest: each its id and its frames, [t,h,w,3] uint8."""

    def __init__(self, manifest: Path, frames: int) -> None:
        self._folder, self._frames = manifest.parent, frames
        self._rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> tuple[str, torch.Tensor]:
        row, frames = self._rows[place], []
        with av.open(str(self._folder / row["uri"])) as container:
            for frame in container.decode(video=0):
                frames.append(frame.to_ndarray(format="rgb24", width=SIDE, height=SIDE, interpolation="BICUBIC"))
                if len(frames) == self._frames:
                    break
        return row["video_id"], torch.from_numpy(np.stack(frames))


def run(work: Work) -> Answer:
    """Decode the videos of a work by a DataLoader, sleep for each, and write tokens of the job's size."""
    work.out.mkdir()
    workers = 0 if work.kind == "single" else work.workers
    videos = Videos(work.manifest, work.frames)
    tokens, waiting = os.urandom(work.frames * KEPT_BYTES_PER_FRAME), dict[str, bytes]()
    started = time.perf_counter()
    # No batches: videos differ in length. A user's loop collates nothing, and copies frames to the GPU as they are.
    loader = DataLoader(videos, batch_size=None, num_workers=workers, prefetch_factor=PREFETCH if workers else None)
    for number, (video_id, frames) in enumerate(loader, start=1):
        assert frames.shape == (work.frames, SIDE, SIDE, 3)
        time.sleep(work.work_s)
        waiting[video_id] = tokens
        if len(waiting) == VIDEOS_PER_FILE or number == len(videos):
            table = pa.table({"video_id": list(waiting), "tokens": list(waiting.values())})
            pq.write_table(table, work.out / f"{number:07d}.parquet")
            waiting.clear()
    return Answer(time.perf_counter() - started)


if __name__ == "__main__":
    answer(run)
