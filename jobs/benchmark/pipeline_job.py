"""The whole job with encoders that sleep instead of computing, or with stages that do nothing at all."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster

from gstep import PrunedTokens, VisualTokens, make_pruner
from jobs.benchmark.pipeline_work import DRIVER, HIDDEN, RATIO, SIDE, TOKENS_PER_FRAME, Work
from pipeline.cache.writer import VideoItem
from pipeline.errors import RunFailed
from pipeline.inputs.forms import OpenArchives
from pipeline.prune import graph
from pipeline.prune.decode_stage import Decoder, DecodeSetup, VideoDecoder
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder, collect_kept_tokens, make_pruning_columns
from pipeline.prune.library import prune_videos
from pipeline.prune.recipe import Recipe
from pipeline.rows import TodoRow, VideoRecord
from pipeline.runner.cluster.address import workers_import_this
from pipeline.runner.cluster.connection import connect, private_ray
from pipeline.runner.cluster.prefork.server import forking_workers
from pipeline.runner.cluster.session_folder import make_ray_folder
from pipeline.storage.location import Location
from pipeline.video.source import Source

_NODE = {"object_store_memory": 512 * 2**20, "include_dashboard": False, "include_log_monitor": False}
_IDLE_SIDE = 4  # pixels of the frames that stand for decoded frames


@dataclass(frozen=True)
class SleepingSetup(EncodeSetup):
    """The settings of a sleeping encoder: the settings of every encoder, and the seconds of a video."""

    work_s: float = 0.0

    def encoder(self) -> VideoEncoder:
        """Make the encoder without loading a model."""
        return SleepingEncoder(self)


class SleepingEncoder(VideoEncoder):
    """An encoder that sleeps for each video instead of computing, and returns the same synthetic tokens each time."""

    def __init__(self, setup: SleepingSetup) -> None:
        self._setup = self._sleep_setup = setup
        self._computing = threading.Lock()  # two calls run at a time, but only one computes

    def encode_one(self, record: VideoRecord, frames: NDArray[np.uint8]) -> VideoItem:
        """Sleep for the nominal time, then return synthetic tokens and the record of the video.

        Calls from several threads sleep one after the other. The record has the nominal time.
        """
        visual, pruned = make_tokens(len(frames), self._sleep_setup.pruner, self._sleep_setup.retention_ratio)
        with self._computing:
            time.sleep(self._sleep_setup.work_s)
        seconds: VideoRecord = {
            "encode_s": self._sleep_setup.work_s,
            "prune_s": 0.0,
            "runtime": "{}",
            "model_extra": "{}",
        }
        return VideoItem(
            {**record, **make_pruning_columns(pruned, visual), **seconds}, collect_kept_tokens(pruned, visual)
        )


@cache
def make_tokens(n_frames: int, method: str, ratio: float) -> tuple[VisualTokens, PrunedTokens]:
    """Make random tokens of ``n_frames`` frames, and prune them by the method; the same objects at each call."""
    numbers = torch.randn(n_frames, TOKENS_PER_FRAME, HIDDEN, generator=torch.Generator().manual_seed(0))
    visual = VisualTokens(numbers.to(torch.bfloat16))
    return visual, make_pruner(method).prune(visual, ratio)


class IdleVideoDecoder(VideoDecoder):
    """A decoder that opens no file and starts no child: every video has the same small frames and a full record."""

    def __init__(self, setup: DecodeSetup) -> None:
        self._setup = setup
        self._frames = np.zeros((setup.sampling.num_frames or 1, _IDLE_SIDE, _IDLE_SIDE, 3), np.uint8)

    def close(self) -> None:
        """Close nothing: there is no child."""

    def open(self, row: TodoRow, archives: OpenArchives) -> Source:
        """Return the source unopened."""
        return Source(Location(row["uri"]))

    def decode_one(self, row: TodoRow, source: Source) -> tuple[VideoRecord, NDArray[np.uint8] | None]:
        """Return the record of a still video of one second, and frames of zeros."""
        n_frames = len(self._frames)
        record: VideoRecord = {
            "status": "ok",
            "video_id": row["video_id"],
            "uri": row["uri"],
            "attempts": row["attempts"],
            "fps": float(n_frames),
            "duration_s": 1.0,
            "source_frames": n_frames,
            "clip_frames": n_frames,
            "n_repeated": 0,
            "source_width": SIDE,
            "source_height": SIDE,
            "codec": "h264",
            "backend": "none",
            "decode_warnings": 0,
            "source_size": 1,
            "frame_indices": list(range(n_frames)),
            "timestamps": [place / n_frames for place in range(n_frames)],
            "height": _IDLE_SIDE,
            "width": _IDLE_SIDE,
            "decode_s": 0.0,
        }
        return record, self._frames


class IdleDecoder(Decoder):
    """The decode actor of the job, heartbeat and bundles included, around an IdleVideoDecoder."""

    def __init__(self, setup: DecodeSetup, heartbeats: ActorHandle | None = None, videos_per_bundle: int = 1) -> None:
        super().__init__(setup, heartbeats, videos_per_bundle)
        self._decoder = IdleVideoDecoder(setup)


def run_job(work: Work) -> dict[str, float]:
    """Prune the videos; return the seconds, and the bytes and objects that Ray's object stores got.

    It replaces the encoders of all later runs of this process by sleeping encoders, and for a DRIVER the decoders too.
    Ray is started here and shut down at the end, on ``nodes`` logical nodes if there are any.

    Raises RunFailed if a video failed.
    """
    encode_setup = Recipe.encode_setup

    def sleeping_setup(self: Recipe, device: str, dtype: str) -> EncodeSetup:
        return SleepingSetup(**vars(encode_setup(self, device, dtype)), work_s=work.encode_s)

    Recipe.encode_setup = sleeping_setup  # type: ignore[method-assign]
    if work.kind == DRIVER:
        vars(graph)["Decoder"] = IdleDecoder
    options = {"model": "tiny", "num_frames": work.frames, "retention_ratio": RATIO, "device": "cpu"}
    workers = {"decode_workers": work.workers, "encode_workers": work.encoders}
    with ExitStack() as stack:
        if work.nodes:
            cpus = max(2, 2 * math.ceil((work.encoders + work.workers) / work.nodes))
            with forking_workers(), private_ray():  # as a job's own Ray
                cluster = Cluster()
                stack.callback(cluster.shutdown)
                folder = str(make_ray_folder())
                for _ in range(work.nodes):
                    cluster.add_node(**_NODE, num_cpus=cpus, memory=cpus * 2**32, temp_dir=folder)
            stack.enter_context(workers_import_this())
            ray.init(cluster.address, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        connect()
        started = time.perf_counter()
        summary = prune_videos(videos=str(work.manifest), out=work.out, progress=False, **options, **workers)
        seconds = time.perf_counter() - started
        if summary.n_ok != work.videos:
            raise RunFailed(f"{summary.n_ok} of {work.videos} videos are ok: {summary.examples}")
        store = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
        created_mb = store.cumulative_created_bytes / 1e6
        return {"seconds": seconds, "store MB": created_mb, "store objects": store.cumulative_created_objects}
