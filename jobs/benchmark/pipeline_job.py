"""The whole job, ``prune_videos``, with encoders that sleep instead of computing."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster

from jobs.benchmark.pipeline_work import RATIO, PipelineWork
from jobs.benchmark.sleeping import FAMILY, write_model
from pipeline.errors import RunFailed
from pipeline.prune.run import prune_videos
from pipeline.runner.cluster.address import make_package_importable
from pipeline.runner.cluster.connection import connect, keep_ray_private
from pipeline.runner.cluster.prefork.server import fork_workers_from_server
from pipeline.runner.cluster.session_folder import make_ray_folder

_NODE = {"object_store_memory": 512 * 2**20, "include_dashboard": False, "include_log_monitor": False}


def run_job(work: PipelineWork) -> dict[str, float]:
    """Prune the videos of the work; return the seconds, and the MB and objects that went into Ray's object stores.

    Starts Ray, on ``nodes`` logical nodes or as the job itself does, and shuts it down at the end.

    Raises:
        RunFailed: a video failed.
    """
    model = write_model(Path(work.folder) / "model", work.encode_s)
    with ExitStack() as stack:
        if work.nodes:
            cpus = max(2, 2 * math.ceil((work.encoders + work.workers) / work.nodes))
            with fork_workers_from_server(), keep_ray_private():  # as for the Ray that a job starts itself
                cluster = Cluster()
                stack.callback(cluster.shutdown)
                folder = str(make_ray_folder())
                for _ in range(work.nodes):
                    cluster.add_node(**_NODE, num_cpus=cpus, memory=cpus * 2**32, temp_dir=folder)
            stack.enter_context(make_package_importable())
            ray.init(cluster.address, logging_level="error", log_to_driver=False)
        stack.callback(ray.shutdown)
        connect()
        started = time.perf_counter()
        summary = prune_videos(
            str(work.manifest),
            out=work.out,
            progress=False,
            model=model,
            family=FAMILY,
            pruner="random",
            retention_ratio=RATIO,
            num_frames=work.frames,
            device="cpu",
            decode_workers=work.workers,
            encode_workers=work.encoders,
        )
        seconds = time.perf_counter() - started
        if summary.n_ok != work.videos:
            raise RunFailed(f"{summary.n_ok} of {work.videos} videos are ok: {summary.examples}")
        store = get_memory_info_reply(get_state_from_address(ray.get_runtime_context().gcs_address)).store_stats
        created_mb = store.cumulative_created_bytes / 1e6
        return {"seconds": seconds, "store MB": created_mb, "store objects": store.cumulative_created_objects}
