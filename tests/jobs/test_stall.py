"""A run whose worker freezes ends, says which stage it was, and leaves no process behind."""

import json
import os
import shutil
import signal

import pytest

from tests.jobs.jobs import ALONE, clips, start, wait_for_files
from tests.jobs.processes import assert_all_gone, family, titled

pytestmark = pytest.mark.slow

ENCODER = "ray::MapWorker(MapBatches(Encoder))"


@pytest.fixture
def job(tmp_path) -> list[str]:
    """A command on 64 videos."""
    for i in range(64):
        shutil.copy(clips()[i % 4], tmp_path / f"v{i:02}.mp4")
    return [str(tmp_path), "--out", str(tmp_path / "c"), "--num-frames", "4", "--videos-per-shard", "2"]


def test_a_frozen_worker_ends_the_run_and_its_stage_is_named(job, tmp_path):
    frozen = tmp_path / "frozen"
    process = start(
        "tests.jobs.stalling", str(frozen), *job, "--stall-timeout", "15", "--decode-timeout", "10", **ALONE
    )
    wait_for_files(tmp_path / "c/videos", 1, process)
    worker = titled(process, ENCODER)
    os.kill(worker, signal.SIGSTOP)
    frozen.touch()
    everything = family(process.pid)
    output, _ = process.communicate(timeout=300)
    last = output.splitlines()[-1]
    assert process.returncode == 1, output
    assert " failed: " in last and "no video moved for 15 s: " in last and ": encode " in last, output
    assert "Traceback" not in output
    assert_all_gone(list(everything))
    (record,) = [json.loads(file.read_text()) for file in (tmp_path / "c" / "runs").iterdir()]
    assert record["status"] == "failed" and "no video moved" in record["error"]
