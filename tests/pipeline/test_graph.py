"""The graph: how a cluster is shared out, and that Ray runs the stages apart."""

import pytest

from pipeline.graph import RESTARTS, plan_resources


@pytest.mark.parametrize("cpus", [1, 2, 3, 4, 8, 64, 256])
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("n_videos", [1, 5, 160, 100_000])
def test_one_of_each_stage_always_fits(cpus, gpus, n_videos):
    plan = plan_resources(cpus, gpus, n_videos)
    assert plan.decode.workers >= 1
    assert plan.encode.workers >= 1
    assert plan.decode.num_cpus + plan.encode.num_cpus + plan.write.num_cpus <= cpus
    assert plan.encode.num_gpus == (1 if gpus else 0)
    assert plan.encode.workers <= max(gpus, cpus // 4, 1)
    assert plan.videos_per_block >= 1
    assert 1 <= plan.videos_per_shard <= 16


@pytest.mark.parametrize("cpus", [3, 4, 8, 64])
def test_all_workers_and_a_writer_fit_at_once(cpus):
    plan = plan_resources(cpus, 0, 1000)
    used = plan.decode.num_cpus * plan.decode.workers + plan.encode.num_cpus * plan.encode.workers
    assert used + plan.write.num_cpus <= cpus


def test_restarts_are_finite():
    assert 0 < RESTARTS < 10
