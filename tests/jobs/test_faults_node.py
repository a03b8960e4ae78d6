"""A node that goes away under a run takes no row with it."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from jobs import prune
from tests.jobs.faults import files, tiny_videos
from tests.jobs.jobs import assert_complete, run_here
from tests.jobs.processes import family
from tests.pipeline.rays import ray_here
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SLOW = "tests.jobs.hostile:SlowDecoder"


def test_a_run_that_takes_every_cpu_goes_on_without_a_node(tmp_path):
    """The default plan: no worker of the lost node finds room on the other one.

    Which workers were there is Ray's choice. Where those that are left have no more to come, it ends them and starts
    the lost ones in their room; else what is left is planned anew, and the lost ones must not take the room then.
    """
    stays, goes = 1, 3
    ids = tiny_videos(tmp_path / "videos", 44)
    cache = tmp_path / "c"
    argv = [str(tmp_path / "videos"), "--out", str(cache), "--num-frames", "2", "--decoder", SLOW]
    with ray_here({"num_cpus": stays}, {"num_cpus": goes}):

        def kill() -> None:
            wait_until(lambda: files(cache, "videos"), "the first commit")
            os.kill(_raylets()[1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        done = run_here(prune, argv)
        killer.join()
    assert done.returncode == 0, done.stdout
    assert_complete(cache, ids)
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert record["status"] == "finished"
    anew = "note: nodes were lost and nothing moves: " in done.stdout
    assert record["resources"]["cluster"]["CPU"] == (stays if anew else stays + goes)


def _raylets() -> list[int]:
    """The raylets of this process's cluster in the order in which they were started."""
    named = [pid for pid, title in family(os.getpid()).items() if Path(title.split()[0]).name == "raylet"]
    return sorted(named)
