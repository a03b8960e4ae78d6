"""Two real ranks read every video once, by torch.distributed alone and by loaders of Accelerate."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.interpreter import run_python
from tests.paths import ROOT, python_path
from tests.pipeline.datasets.caches import N_VIDEOS, make_shards

pytestmark = pytest.mark.slow
ALL = list(range(N_VIDEOS))


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> list[dict]:
    """What each of two ranks read."""
    folder = tmp_path_factory.mktemp("ranks")
    make_shards(folder / "cache")
    script = Path(__file__).with_name("ranks_here.py")
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    done = run_python(script, folder / "cache", folder, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


SHARED = ("forked", "spawned", "not prepared", "resumed")  # also where the dataset came before the ranks
PREPARED = ("dispatched", "sharded", "packed", "packed, forked", "packed, by index")


@pytest.mark.parametrize("how", [*SHARED, *PREPARED])
def test_ranks_share_the_videos_and_a_loader_that_accelerate_prepared_fills_up_the_last_batches(told, how):
    first, second = told[0][how], told[1][how]
    assert first and second and sorted({*first, *second}) == ALL
    if how in SHARED:
        assert len(first) + len(second) == N_VIDEOS
    else:  # with videos of the first batches: a batch of each rank more, for each worker
        assert len(first) == len(second) and len(first) + len(second) < N_VIDEOS + 2 * 2 * 2


def test_ranks_end_together_and_what_would_lose_videos_is_refused(told):
    assert len(told[0]["ddp"]) == len(told[1]["ddp"]) > 0 == len({*told[0]["ddp"]} & {*told[1]["ddp"]})
    for rank in told:
        assert rank["batches"] == -(-N_VIDEOS // 4)  # of two videos on two ranks
        assert "world_size=accelerator.num_processes, do not prepare its loader" in rank["state"]
        assert rank["stateful"] == rank["state"] and rank["end"]
        assert "DataLoaderConfiguration(dispatch_batches=False)" in rank["cut"]
        assert "leave out rank and world_size, or do not prepare the loader" in rank["given"]
