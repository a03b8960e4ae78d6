"""Runs that end early, freeze or start late: what is said then, that nothing of Ray's own is said besides or left."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from pipeline.runner import execution
from pipeline.runner.cluster.prefork.server import SOCKET
from tests.builders.runs import (
    ALONE,
    assert_all_gone,
    assert_complete,
    clips,
    environment,
    family,
    shut_ray_down_in_the_end,
    start,
    titled,
    wait_for_files,
)
from tests.jobs.faults import Driver, files, tiny_videos
from tests.jobs.hostile import let_through
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path) -> list[str]:
    """A command on eight videos, of which two get through before the file stuck says something else."""
    for i in range(8):
        shutil.copy(clips()[1], tmp_path / f"v{i}.mp4")
    let_through(tmp_path, 2)
    argv = ["jobs.prune", str(tmp_path), "--out", str(tmp_path / "c"), "--num-frames", "2", "--log-interval", "1"]
    return [*argv, "--decoder", "tests.jobs.hostile:StuckDecoder", "--videos-per-shard", "1"]


def until_it_says(process: subprocess.Popen[str], text: str) -> str:
    """Read what the command says until a line has this text; return the lines."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return output
    raise AssertionError(f"it never said {text}: {output}")


def wait_for(process: subprocess.Popen[str], name: str) -> int:
    """Wait until Ray has started this program of its own; return its process id."""

    def programs() -> list[int]:
        return [pid for pid, title in family(process.pid).items() if Path(title.partition(" ")[0]).name == name]

    def running() -> None:
        assert process.poll() is None, process.communicate()[0]

    return wait_until(programs, name, meanwhile=running)[0]


def test_sigterm_while_ray_starts_ends_with_130_and_a_word(job):
    """Ray Data is imported meanwhile, whose imports no exception may fall into.

    A signal to the command's group, as ``timeout`` sends it, is not for Ray: it has to write what is finished.
    """
    process = start(*job, **ALONE)
    until_it_says(process, "starting Ray on this machine")
    assert os.getpgid(wait_for(process, "raylet")) != os.getpgid(process.pid)
    everything = family(process.pid)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "Rerun the same command to resume" in output and "Traceback" not in output
    assert_all_gone(list(everything))


def stop_the_first_raylet(folder: Path) -> dict[str, str]:
    """Make the environment in which Ray starts its raylets by a program that stops itself the first time.

    It writes its process id to the file first. Ray has it in the place of Valgrind, with options before the command.
    """
    program = folder / "bin" / "valgrind"
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
set -C  # a file that is there is not written again
if echo $$ 2>/dev/null > "{folder}/first"; then kill -STOP $$; fi
while [ "${{1#--}}" != "$1" ]; do shift; done
exec "$@"
"""
    )
    program.chmod(0o755)
    return {"RAY_RAYLET_VALGRIND": "1", "PATH": f"{program.parent}:{os.environ['PATH']}"}


def test_a_ray_that_does_not_start_is_tried_once_more_and_an_actor_of_ray_datas_own_may_die(job, tmp_path):
    """The first node does not answer, as on a machine that is busy.

    Ray Data starts another actor, whose calls fail every few seconds as it does not know the run.
    """
    process = start(*job, **ALONE, **stop_the_first_raylet(tmp_path))
    output = until_it_says(process, "trying once more")
    wait_for_files(tmp_path / "c/videos", 1, process)
    killed = titled(process, "ray::_StatsActor")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: titled(process, "ray::_StatsActor") != killed, "another actor")
    let_through(tmp_path, 8)
    output += process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert_all_gone([int((tmp_path / "first").read_text())])
    assert output.count("trying once more") == 1 and "Traceback" not in output
    assert "_StatsActor" not in output and "(raylet)" not in output, output
    assert_complete(tmp_path / "c", [f"v{i}.mp4" for i in range(8)])


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
