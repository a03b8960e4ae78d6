"""Runs that end early or start late: what is said then, and that nothing of Ray's own is said besides."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.jobs.jobs import ALONE, assert_complete, clips, start, wait_for_files
from tests.jobs.processes import assert_all_gone, family, raylets, titled
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SHORT = ["--num-frames", "2", "--log-interval", "1"]


@pytest.fixture
def job(tmp_path) -> list[str]:
    """A command on eight videos."""
    for i in range(8):
        shutil.copy(clips()[1], tmp_path / f"v{i}.mp4")
    return ["jobs.prune", str(tmp_path), "--out", str(tmp_path / "c"), *SHORT]


def until_ray_starts(process: subprocess.Popen[str]) -> None:
    """Read what the command says until it starts Ray."""
    assert process.stdout is not None
    assert any("starting Ray on this machine" in line for line in process.stdout)


@pytest.mark.parametrize("moment_s", [0.7, 3.6])
def test_sigterm_at_any_moment_while_ray_starts_ends_with_130_and_a_word(job, moment_s):
    """Ray Data is imported meanwhile, whose imports no exception may fall into."""
    process = start(*job, **ALONE)
    until_ray_starts(process)
    time.sleep(moment_s)
    everything = family(process.pid)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "the same command goes on from here" in output and "Traceback" not in output
    assert_all_gone(list(everything))


def test_a_ray_that_does_not_start_is_tried_once_more(job, tmp_path):
    """Its node does not answer, as on a machine that is busy."""
    process = start(*job, **ALONE)
    until_ray_starts(process)
    raylet = wait_until(lambda: raylets(process.pid), "the raylet", meanwhile=lambda: running(process))[0]
    os.kill(raylet, signal.SIGSTOP)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        os.kill(raylet, signal.SIGKILL)
    assert process.returncode == 0, output
    assert output.count("trying once more") == 1 and "Traceback" not in output
    assert_complete(tmp_path / "c", [f"v{i}.mp4" for i in range(8)])


def running(process: subprocess.Popen[str]) -> None:
    assert process.poll() is None, process.communicate()[0]


def test_an_actor_of_ray_datas_own_that_dies_is_not_talked_about(job, tmp_path):
    """Ray Data starts another one, whose calls fail every few seconds as it does not know the run."""
    process = start(*job, "--decoder", "tests.jobs.hostile:SlowDecoder", "--videos-per-shard", "1", **ALONE)
    wait_for_files(tmp_path / "c/videos", 1, process)
    os.kill(titled(process, "ray::_StatsActor"), signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "Traceback" not in output and "_StatsActor" not in output and "(raylet)" not in output, output
