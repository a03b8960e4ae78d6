"""Run the whole job with encoders that sleep instead of computing, as a GPU's work is to its host."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster

from gstep import PrunedTokens, VisualTokens, make_pruner
from jobs.benchmark.pipeline.work import HIDDEN, RATIO, TOKENS_PER_FRAME, Work
from pipeline.cache.writer import PrunedVideo
from pipeline.errors import RunFailed
from pipeline.execution.access import workers_import_this
from pipeline.execution.cluster import connect
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder, kept_tokens, pruned_columns
from pipeline.prune.library import prune_videos
from pipeline.prune.request import PruneRequest
from pipeline.rows import VideoRecord

_NODE = {"num_cpus": 2, "object_store_memory": 512 * 2**20, "include_dashboard": False, "include_log_monitor": False}


@dataclass(frozen=True)
class SleepingSetup(EncodeSetup):
    """The settings of a sleeping encoder: those of every encoder, and the seconds that a video takes."""

    work_s: float = 0.0

    def encoder(self) -> VideoEncoder:
        """Return the encoder; nothing is loaded."""
        return SleepingEncoder(self)


class SleepingEncoder(VideoEncoder):
    """An encoder that sleeps for each video instead of computing, and returns the same made-up tokens each time."""

    def __init__(self, setup: SleepingSetup) -> None:
        self._setup = self._sleeping = setup
        self._computing = threading.Lock()  # two calls run at a time, of which one computes

    def encode_one(self, record: VideoRecord, frames: NDArray[np.uint8]) -> PrunedVideo:
        """Sleep for the nominal time, then return made-up tokens and the record of the video."""
        visual, pruned = made_up(len(frames), self._sleeping.pruner, self._sleeping.retention_ratio)
        with self._computing:
            time.sleep(self._sleeping.work_s)
        seconds: VideoRecord = {"encode_s": self._sleeping.work_s, "prune_s": 0.0, "runtime": "{}", "model_extra": "{}"}
        return PrunedVideo({**record, **pruned_columns(pruned, visual), **seconds}, kept_tokens(pruned, visual))


@cache
def made_up(n_frames: int, method: str, ratio: float) -> tuple[VisualTokens, PrunedTokens]:
    """Return random tokens of so many frames, and what the method keeps of them."""
    numbers = torch.randn(n_frames, TOKENS_PER_FRAME, HIDDEN, generator=torch.Generator().manual_seed(0))
    visual = VisualTokens(numbers.to(torch.bfloat16))
    return visual, make_pruner(method).prune(visual, ratio)


def run(work: Work) -> dict[str, float]:
    """Prune the videos; return the seconds and what went through Ray's object stores. Raises RunFailed."""
    made = PruneRequest.encode_setup

    def encode_setup(self: PruneRequest, device: str, dtype: str) -> EncodeSetup:
        return SleepingSetup(**vars(made(self, device, dtype)), work_s=work.work_s)

    PruneRequest.encode_setup = encode_setup  # type: ignore[method-assign]
    options = {"model": "tiny", "num_frames": work.frames, "retention_ratio": RATIO, "device": "cpu"}
    workers = {"decode_workers": work.workers, "encode_workers": work.encoders}
    with ray_of(work):
        started = time.perf_counter()
        summary = prune_videos(**work.named, out=work.out, progress=False, **options, **workers)
        seconds = time.perf_counter() - started
        if summary.n_ok != work.videos:
            raise RunFailed(f"{summary.n_ok} of {work.videos} videos are ok: {summary.examples}")
        store = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
        made_there = {
            "store MB": store.cumulative_created_bytes / 1e6,
            "store objects": store.cumulative_created_objects,
        }
        return {"seconds": seconds, "fetched MB": summary.fetched_bytes / 1e6, **made_there}


@contextmanager
def ray_of(work: Work) -> Iterator[None]:
    """Run the block with Ray started as the job starts it, or with the work's logical nodes; shut Ray down after it."""
    with ExitStack() as stack:
        if work.nodes:
            cluster = Cluster()
            stack.callback(cluster.shutdown)
            cpus = max(2, 2 * math.ceil((work.encoders + work.workers) / work.nodes))
            for _ in range(work.nodes):
                cluster.add_node(**{**_NODE, "num_cpus": cpus, "memory": cpus * 2**32})
            stack.enter_context(workers_import_this())
            ray.init(cluster.address, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        connect()
        yield
