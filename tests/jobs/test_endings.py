"""Runs that end early or start late: what is said then, and that nothing of Ray's own is said besides."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.builders.runs import ALONE, assert_all_gone, assert_complete, clips, family, start, titled, wait_for_files
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


@pytest.mark.parametrize("moment", ["gcs_server", "raylet"])
def test_sigterm_at_any_moment_while_ray_starts_ends_with_130_and_a_word(job, moment):
    """Ray Data is imported meanwhile, whose imports no exception may fall into.

    A signal to the command's group, as ``timeout`` sends it, is not for Ray: it has to write what is finished.
    """
    process = start(*job, **ALONE)
    until_it_says(process, "starting Ray on this machine")
    assert os.getpgid(wait_for(process, moment)) != os.getpgid(process.pid)
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
