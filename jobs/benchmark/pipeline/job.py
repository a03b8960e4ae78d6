"""Run the whole job over made-up videos with a sleeping encoder: a child process of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster

from jobs.benchmark.pipeline.sleeping import SleepingSetup
from jobs.benchmark.pipeline.work import RATIO, Answer, Work, answer
from pipeline.errors import RunFailed
from pipeline.execution.cluster import connect
from pipeline.execution.import_path import workers_import_this
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.prune.library import prune_videos
from pipeline.prune.request import PruneRequest

CPUS_PER_NODE = 2  # a decode worker and an encode worker
_STORE_BYTES = 512 * 2**20  # a node


def run(work: Work) -> Answer:
    """Prune the videos of a work. Raises RunFailed where one of them failed."""
    _let_encoders_sleep(work.work_s)
    with _ray(work.nodes):
        started = time.perf_counter()
        options = {"model": "tiny", "num_frames": work.frames, "retention_ratio": RATIO, "device": "cpu"}
        workers = {"decode_workers": work.workers, "encode_workers": work.encoders}
        summary = prune_videos(work.manifest, out=work.out, progress=False, **options, **workers)
        seconds = time.perf_counter() - started
        if summary.n_ok != work.videos:
            raise RunFailed(f"{summary.n_ok} of {work.videos} videos are ok: {summary.examples}")
        store = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
        return Answer(seconds, store.cumulative_created_bytes, store.cumulative_created_objects)


def _let_encoders_sleep(work_s: float) -> None:
    """Have the runs of this process take sleeping encoders."""
    made = PruneRequest.encode_setup

    def encode_setup(self: PruneRequest, device: str, dtype: str) -> EncodeSetup:
        return SleepingSetup(**vars(made(self, device, dtype)), work_s=work_s)

    PruneRequest.encode_setup = encode_setup  # type: ignore[method-assign]


@contextmanager
def _ray(nodes: int) -> Iterator[None]:
    """Start Ray as the job does, or so many logical nodes; end it."""
    quiet = {"include_dashboard": False, "include_log_monitor": False}
    with ExitStack() as stack:
        if nodes:
            cluster = Cluster()
            stack.callback(cluster.shutdown)
            for _ in range(nodes):
                cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=_STORE_BYTES, **quiet)
            stack.enter_context(workers_import_this())
            ray.init(cluster.address, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        connect()
        yield


if __name__ == "__main__":
    answer(run)
