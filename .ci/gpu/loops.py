"""What a user would write instead of ``jobs.prune``: a DataLoader loop, and a plain Ray Data script."""

from __future__ import annotations

import os
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, default_convert

import gstep
from gstep.density import spatio_temporal_density
from jobs.benchmark.selection import select_by_loop

RATIO = 0.25
VIDEOS_PER_FILE = 8
Row = dict[str, Any]


@cache
def load_processor(folder: str) -> Any:
    """Load transformers' video processor of a checkpoint, once per process, and limit torch to one CPU thread."""
    from transformers import AutoVideoProcessor  # noqa: PLC0415 - seconds

    torch.set_num_threads(1)
    return AutoVideoProcessor.from_pretrained(folder)


def add_pixels(row: Row, folder: str, n_frames: int) -> Row:
    """Return a video's row with ``pixels``: evenly spaced frames from the video processor, [T,3,h,w] float32."""
    with av.open(row["uri"]) as container:
        stream = container.streams.video[0]
        numbers = {*np.linspace(0, stream.frames - 1, n_frames).round().astype(int).tolist()}
        decoded = enumerate(container.decode(stream))
        frames = np.stack([frame.to_ndarray(format="rgb24") for number, frame in decoded if number in numbers])
    pixels = load_processor(folder)(torch.from_numpy(frames).permute(0, 3, 1, 2), return_tensors="pt")
    return {**row, "pixels": pixels["pixel_values_videos"][0].numpy()}


class StockEncoder:
    """The stock LLaVA-OneVision with the paper's selection loop; also a class for Ray Data's ``map_batches``."""

    def __init__(self, folder: str, device: str) -> None:
        from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - seconds

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval().to(device)

    @torch.no_grad()
    def __call__(self, batch: Row) -> Row:
        """Encode and prune a batch of one video.

        Returns:
            ``video_id``, the kept tokens as bfloat16 bytes, their ``index``, and the time ``encoded_at``.
        """
        pixels = torch.as_tensor(batch["pixels"][0]).to(self.model.device, self.model.dtype)
        rows_MD = self.model.get_video_features(pixels[None], return_dict=True).pooler_output[0]
        n_frames = len(pixels)
        tokens_MD = rows_MD[: len(rows_MD) // n_frames * n_frames]  # without the newline
        density_TN, _ = spatio_temporal_density(tokens_MD.unflatten(0, (n_frames, -1)))
        unit_DM = normalize(tokens_MD.float(), dim=1).T.contiguous()
        index = select_by_loop(unit_DM, density_TN.flatten(), gstep.budget_for(RATIO, len(tokens_MD)) - 1)
        kept = tokens_MD[index].bfloat16().view(torch.int16).cpu().numpy().tobytes()
        columns = {"tokens": [kept], "index": [index.tolist()], "encoded_at": [time.time()]}
        return {"video_id": batch["video_id"], **columns}


def run_loader(rows: list[Row], folder: str, out: Path, n_frames: int, device: str) -> None:
    """Run the DataLoader loop, which writes the kept tokens to one Parquet file per 8 videos in ``out``."""
    encoder = StockEncoder(folder, device)
    kept = list[pa.Table]()
    workers = {"num_workers": max(1, (os.cpu_count() or 1) - 1), "pin_memory": device != "cpu"}
    load = partial(add_pixels, folder=folder, n_frames=n_frames)
    loader = DataLoader(rows, batch_size=None, collate_fn=lambda row: default_convert(load(row)), **workers)
    for number, row in enumerate(loader, start=1):
        kept.append(pa.table(encoder({"video_id": [row["video_id"]], "pixels": [row["pixels"]]})))
        if len(kept) == VIDEOS_PER_FILE or number == len(rows):
            pq.write_table(pa.concat_tables(kept), out / f"{number:06d}.parquet")
            kept.clear()


def run_ray_data(rows: list[Row], folder: str, out: Path, n_frames: int, device: str) -> None:
    """Run the Ray Data script with one encoder, which writes Parquet files to ``out``; starts and stops Ray."""
    ray.init(log_to_driver=False, include_dashboard=False)
    try:
        videos = ray.data.from_items(rows, override_num_blocks=max(2, len(rows) // 4))
        encoder = {"num_cpus": 1} if device == "cpu" else {"num_gpus": 1}
        encoder |= {"batch_size": 1, "compute": ray.data.ActorPoolStrategy(size=1)}
        kept = videos.map(add_pixels, fn_args=(folder, n_frames))
        kept.map_batches(StockEncoder, fn_constructor_args=(folder, device), **encoder).write_parquet(str(out))
    finally:
        ray.shutdown()
