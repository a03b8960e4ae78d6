"""The simulation runs the real driver, which fails unless it commits every video that is offered."""

import asyncio
from dataclasses import replace

import pyarrow as pa
import pytest

from jobs.benchmark.pipeline.measure import run_child
from jobs.benchmark.pipeline.simulation import SimulatedWriters, planned
from jobs.benchmark.pipeline.work import SIMULATION, Work
from pipeline.prune.batches import WRITTEN, written_batch

WORK = Work(SIMULATION, 32, 0.25, 1, encoders=4, videos=48)


def test_simulated_writers_give_each_video_a_row_and_each_shard_a_file(tmp_path):
    rows = written_batch([{"video_id": "one", "status": "ok"}] * 5)
    writers = SimulatedWriters(rows, str(tmp_path), "run")

    async def written() -> list[pa.Table]:
        return await asyncio.gather(*(writers.write(number % 2, 3, 0.01) for number in range(4)))

    shards = asyncio.run(written())
    assert all(shard.schema == WRITTEN for shard in shards)
    assert len({video for shard in shards for video in shard["video_id"].to_pylist()}) == 4 * 3
    named = {name for shard in shards for name in shard["token_shard"].to_pylist()}
    assert named == {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.parquet")} and len(named) == 4


def test_stages_are_planned_as_for_a_cluster_of_that_many_gpus():
    plan = planned(replace(WORK, encoders=1000))
    assert (plan.decode.workers, plan.encode.workers, plan.write.workers) == (12_000, 1000, 2001)
    assert plan.videos_per_shard == 22 and 1 < plan.videos_per_bundle <= 4


@pytest.mark.slow
def test_the_driver_commits_what_simulated_encoders_give(tmp_path):
    done = run_child(replace(WORK, folder=str(tmp_path), request_s=0.001))
    assert done["offered"] == 16 and 0 < done["reached"] <= 16.5  # the last shard is written after its last video
    assert 0 < done["tick"] <= done["slow tick"] < done["seconds"] and done["driver MB"] > 100
    assert done["reports read"] > 0 and sum(share for name, share in done.items() if name[:3] == "in ") < 1.001
    assert done["CPU writers"] > 0 and done["CPU reporters"] > 0
    assert not list(tmp_path.iterdir())
