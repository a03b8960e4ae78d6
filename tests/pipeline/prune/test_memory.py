"""Decode is held back by what comes after it: memory depends on the workers, not on the length of the corpus."""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import ray
from ray._private.internal_api import node_stats

from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.prune.resources import plan_resources
from pipeline.runner.stages import BLOCKS_AHEAD
from pipeline.storage.stores import LocalStore
from tests.builders.clips import write_clip
from tests.builders.clusters import graph_of, ray_here, rows_of
from tests.builders.runs import family, resident_mb

FRAMES, FRAME_BYTES = 16, 16 * 384 * 384 * 3  # 7 MB a video, all of them more than may wait
SMALL, LARGE = 24, 64


class SlowEncoder(VideoEncoder):
    """Takes its time, and computes on two of the frames only."""

    def encode_video_alone(self, record, frames):
        threading.Event().wait(0.16)
        few = {**record, **{name: record[name][:2] for name in ("frame_indices", "timestamps")}}
        return super().encode_video_alone(few, frames[:2].copy())


class SlowSetup(EncodeSetup):
    def encoder(self) -> VideoEncoder:
        return SlowEncoder(self)


class SlowStore(LocalStore):
    """Takes its time with each shard of four videos."""

    def put(self, name, data):
        threading.Event().wait(0.8)
        super().put(name, data)


@dataclass
class Peak:
    """The most that was seen, in MB: in the object store, and the memory that a process shares with nobody."""

    store: float = 0
    spilled: float = 0
    processes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def look(self) -> None:
        node = ray.nodes()[0]
        stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
        self.store = max(self.store, stats.object_store_bytes_used / 1e6)
        self.spilled = max(self.spilled, stats.spilled_bytes_total / 1e6)
        workers = {pid: title for pid, title in family(os.getpid()).items() if title.startswith(("ray::Map", "ray::W"))}
        for pid, title in {**workers, os.getpid(): "the driver"}.items():
            name = title.removeprefix("ray::").partition(".")[0]
            self.processes[name] = max(self.processes[name], resident_mb(pid))


@contextmanager
def watch_memory(peaks: list[Peak]) -> Iterator[None]:
    """Sample memory in a thread while the block runs, always for the last one of the peaks."""
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.25):
            peaks[-1].look()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
def test_later_videos_take_no_more_memory_than_the_first(tmp_path):
    """Decoders wait for the encoders, and those for the writers."""
    clip = str(write_clip(tmp_path / "v.mp4", size=(384, 384), count=FRAMES))
    plan = plan_resources(2, 0, LARGE, videos_per_shard=4)
    peaks = [Peak()]

    def look_at_shards() -> None:
        if len(peaks) == 1 and 4 * len([*tmp_path.glob("tokens/*.parquet")]) >= SMALL:
            peaks.append(Peak())

    with ray_here({"num_cpus": 4, "object_store_memory": 2000 * 10**6}):
        graph = graph_of(LARGE, plan, SlowStore(tmp_path), clip, FRAMES, "tests.builders.clips:Instant", SlowSetup)
        with watch_memory(peaks):
            rows = rows_of(graph, moved=look_at_shards)
    assert [row["status"] for row in rows] == ["ok"] * LARGE
    # Ray keeps to the limit but for what each worker has in hand and is about to give. The peaks below it are left to
    # chance: which of them a run happens to reach says nothing about growth.
    untaken = plan.decode.workers * plan.decode.calls * BLOCKS_AHEAD + 2 * plan.encode.workers * plan.encode.calls
    bound = plan.estimate_store_bytes(FRAME_BYTES, 0) + untaken * FRAME_BYTES
    early, late = peaks
    print(f"at most {bound / 1e6:.0f} MB in the object store;", early, late)
    assert late.spilled == 0
    assert max(early.store, late.store) <= bound / 1e6 < (LARGE - SMALL) * FRAME_BYTES / 1e6
    both = early.processes.keys() & late.processes.keys()
    assert len(both) >= 4, both
    for name in both:
        assert late.processes[name] <= early.processes[name] + 60, name
