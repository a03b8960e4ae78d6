"""Run what one would write without this package: DataLoader -> model -> Parquet, in a process for each encoder."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

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
    """A dataset of one encoder's share of the videos, each item an id and its frames, [t,h,w,3] uint8."""

    def __init__(self, work: Work, encoder: int) -> None:
        self._work = work
        lines = work.manifest.read_text(encoding="utf-8").splitlines()
        self._rows = [json.loads(line) for line in lines[encoder :: work.encoders]]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> tuple[str, torch.Tensor]:
        row, size = self._rows[place], {"width": SIDE, "height": SIDE, "interpolation": "BICUBIC"}
        with av.open(str(self._work.manifest.with_name(row["uri"]))) as container:
            frames = [frame.to_ndarray(format="rgb24", **size) for frame in container.decode(video=0)]
        return row["video_id"], torch.from_numpy(np.stack(frames[: self._work.frames]))


def run(work: Work) -> dict[str, float]:
    """Run the loop over all videos, in a process for each of several encoders; return the seconds."""
    work.out.mkdir()
    started = time.perf_counter()
    if work.encoders == 1:
        encode_share(work, 0)
    else:
        with ProcessPoolExecutor(work.encoders, get_context("spawn")) as processes:
            list(processes.map(partial(encode_share, work), range(work.encoders)))
    return {"seconds": time.perf_counter() - started}


def encode_share(work: Work, encoder: int) -> None:
    """Decode by a DataLoader, sleep for each video as the encoder does, and write tokens to Parquet."""
    workers = 0 if work.kind == SINGLE else max(1, work.workers // work.encoders)
    tokens, waiting = os.urandom(work.frames * KEPT_BYTES_PER_FRAME), dict[str, bytes]()
    # No batches: videos differ in length. Frames would go to the GPU as they are, so nothing is computed of them here.
    loader = DataLoader(
        videos := Videos(work, encoder),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_PREFETCH if workers else None,
    )
    for number, (video_id, _) in enumerate(loader, start=1):
        time.sleep(work.work_s)
        waiting[video_id] = tokens
        if len(waiting) == _VIDEOS_PER_FILE or number == len(videos):
            table = pa.table({"video_id": list(waiting), "tokens": list(waiting.values())})
            pq.write_table(table, work.out / f"{encoder}-{number:07d}.parquet")
            waiting.clear()
