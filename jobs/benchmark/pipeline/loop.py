"""Run what one would write without this package: DataLoader -> model -> Parquet, in one process."""

from __future__ import annotations

import json
import os
import time

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

from jobs.benchmark.pipeline.work import KEPT_BYTES_PER_FRAME, SIDE, SINGLE, Work

_VIDEOS_PER_FILE = 16
_PREFETCH = 4


class Videos(Dataset[tuple[str, torch.Tensor]]):
    """A dataset of the work's videos, each item an id and its frames, [t,h,w,3] uint8."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._rows = [json.loads(line) for line in work.manifest.read_text(encoding="utf-8").splitlines()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> tuple[str, torch.Tensor]:
        row, size = self._rows[place], {"width": SIDE, "height": SIDE, "interpolation": "BICUBIC"}
        with av.open(str(self._work.manifest.with_name(row["uri"]))) as container:
            frames = [frame.to_ndarray(format="rgb24", **size) for frame in container.decode(video=0)]
        return row["video_id"], torch.from_numpy(np.stack(frames[: self._work.frames]))


def run(work: Work) -> dict[str, float]:
    """Decode by a DataLoader, sleep for each video as the encoder does, write tokens to Parquet; return the seconds."""
    work.out.mkdir()
    workers = 0 if work.kind == SINGLE else work.workers
    tokens, waiting = os.urandom(work.frames * KEPT_BYTES_PER_FRAME), dict[str, bytes]()
    started = time.perf_counter()
    # No batches: videos differ in length. Frames would go to the GPU as they are, so nothing is computed of them here.
    loader = DataLoader(
        Videos(work), batch_size=None, num_workers=workers, prefetch_factor=_PREFETCH if workers else None
    )
    for number, (video_id, _) in enumerate(loader, start=1):
        time.sleep(work.work_s)
        waiting[video_id] = tokens
        if len(waiting) == _VIDEOS_PER_FILE or number == work.videos:
            table = pa.table({"video_id": list(waiting), "tokens": list(waiting.values())})
            pq.write_table(table, work.out / f"{number:07d}.parquet")
            waiting.clear()
    return {"seconds": time.perf_counter() - started}
