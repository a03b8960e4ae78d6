"""A run whose worker freezes ends, says which stage it was, and leaves no process behind."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.runner import execution
from pipeline.runner.cluster.prefork.server import SOCKET
from tests.builders.runs import ALONE, assert_all_gone, environment, family, shut_ray_down_in_the_end
from tests.jobs.faults import Driver, files, tiny_videos
from tests.jobs.hostile import let_through

pytestmark = pytest.mark.slow


class LateClock:
    """Seconds since a file is there; 0 until then, so that nothing passes for a stall while workers start slowly."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._since: float | None = None

    def __call__(self) -> float:
        if self._since is None and self._file.exists():
            self._since = time.monotonic()
        return 0.0 if self._since is None else time.monotonic() - self._since


def count_from_the_freeze() -> None:
    """Let the watchdog of this driver wait for the file, and its workers be its own."""
    os.environ.pop(SOCKET, None)
    shut_ray_down_in_the_end()
    clock = LateClock(Path(os.environ["FROZEN"]))
    execution.Watchdog = partial(execution.Watchdog, clock=clock)  # type: ignore[assignment,misc]


def test_a_frozen_worker_ends_the_run_and_its_stage_is_named(tmp_path):
    frozen, cache = tmp_path / "frozen", tmp_path / "c"
    tiny_videos(tmp_path / "videos", 32)
    let_through(tmp_path / "videos", 8)  # the run cannot end before the freeze
    argv = [str(tmp_path / "videos"), "--out", str(cache), "--num-frames", "2", "--videos-per-shard", "2"]
    argv += ["--decode-workers", "1", "--decoder", "tests.jobs.hostile:StuckDecoder"]
    argv += ["--stall-timeout", "15", "--decode-timeout", "10"]
    place = environment(FROZEN=str(frozen), **ALONE)  # with a Ray of its own
    run = Driver(argv, tmp_path / "log", count_from_the_freeze, **place)
    run.until(lambda: files(cache, "videos"), "the first commit")
    everything = family(run.pid)
    (worker,) = [pid for pid, title in everything.items() if title.startswith("ray::MapWorker(MapBatches(Encoder))")]
    os.kill(worker, signal.SIGSTOP)
    let_through(tmp_path / "videos", 32)
    frozen.touch()
    assert run.wait(300) == 1, run.output
    last = run.output.splitlines()[-1]
    assert " failed: " in last and "no video moved for 15 s: " in last and ": encode " in last, run.output
    assert "Traceback" not in run.output
    assert_all_gone(list(everything))
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").iterdir()]
    assert record["status"] == "failed" and "no video moved" in record["error"]
