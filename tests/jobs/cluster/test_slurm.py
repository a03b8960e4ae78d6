"""The job array on a real Slurm of one node: lost tasks, the same command again, and what only has to be parsed."""

import json
import re
import subprocess
import time

import pytest

from jobs import prune
from pipeline import TokenCache
from tests.jobs.cluster.slurm import Slurm, missing
from tests.jobs.faults import tiny_videos
from tests.jobs.jobs import assert_complete
from tests.paths import ROOT
from tests.pipeline.tars import write_tar
from tests.waiting import wait_until

SCRIPT = str(ROOT / "jobs" / "cluster" / "slurm.sh")


def test_it_is_a_script_of_bash_that_asks_for_parts():
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    done = subprocess.run(
        [SCRIPT, "videos"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "PARTS: how many parts" in done.stderr


def test_parts_are_submitted_where_videos_are_left_or_not_known_yet(tmp_path, capsys):
    """By what the command says of a part with a video, of one without any and one that is done, and of a tar."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.mp4").write_bytes(b"x")
    write_tar(tmp_path / "b.tar", {"a.mp4": b"x"})
    script(tmp_path / "bin" / "sbatch", 'echo sbatch "$2"')
    answer = f'name={tmp_path}/$3-$(expr "$*" : ".*--shard \\([0-9]\\)")', 'cat "$name"', 'exit "$(cat "$name.code")"'
    script(tmp_path / "bin" / "python", *answer)
    for name, part in (("files", 0), ("files", 1), ("b.tar", 0), ("b.tar", 1)):
        argv = [str(tmp_path / name), "--out", str(tmp_path / "c"), "--shard", f"{part}/2", "--dry-run", "--json"]
        code = prune.main(argv)
        (tmp_path / f"{name}-{part}").write_text(capsys.readouterr().out)
        (tmp_path / f"{name}-{part}.code").write_text(str(code))
    assert sorted((tmp_path / f"files-{part}.code").read_text() for part in (0, 1)) == ["0", "2"]
    has = next(part for part in (0, 1) if (tmp_path / f"files-{part}.code").read_text() == "0")
    assert submitted(tmp_path, "files") == f"sbatch --array={has}"
    assert submitted(tmp_path, "b.tar") == "sbatch --array=0,1"
    told = json.loads((tmp_path / f"files-{has}").read_text())
    (tmp_path / f"files-{has}").write_text(json.dumps({**told, "n_todo": 0}, indent=2))
    assert submitted(tmp_path, "files") == "nothing is left to do"


def script(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)


def submitted(folder, name):
    """What the script prints that submits a run over this file, where Slurm and the command are scripts of a line."""
    env = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PARTS": "2"}
    done = subprocess.run([SCRIPT, name], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def slurm():
    if missing():
        pytest.skip(f"not installed: {', '.join(missing())} (apt-get install slurm-wlm munge)")
    with Slurm() as slurm:
        yield slurm


@pytest.mark.slow
def test_tasks_that_were_lost_and_only_they_are_submitted_again(slurm, tmp_path):
    """The second task is killed, as with a node that is lost for good."""
    ids = tiny_videos(tmp_path / "videos", 16)
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--num-frames", "2", "--decoder", SLOW]

    def submit():
        return slurm.run(SCRIPT, *argv, cwd=tmp_path, PARTS="2")

    first = submit()
    job = re.search(r"Submitted batch job (\d+)", first.stdout)
    assert job, first.stdout
    wait_until(lambda: "starting workers" in log(tmp_path, job[1], 1), lambda: logs(tmp_path), 240, meanwhile=pause)
    assert slurm.run("scancel", "--signal=KILL", "--full", f"{job[1]}_1").returncode == 0
    wait_until(lambda: ended(slurm), lambda: logs(tmp_path), 240, meanwhile=pause)
    kept = TokenCache(tmp_path / "c").video_ids
    assert 0 < len(kept) < len(ids)

    again = submit()
    job = re.search(r"Submitted batch job (\d+)", again.stdout)
    assert job, again.stdout
    wait_until(lambda: ended(slurm), lambda: logs(tmp_path), 240, meanwhile=pause)
    assert [file.name for file in tmp_path.glob(f"gstep-prune-{job[1]}_*.log")] == [f"gstep-prune-{job[1]}_1.log"]
    assert_complete(tmp_path / "c", ids)
    assert submit().stdout.strip().endswith("nothing is left to do")


@pytest.mark.slow
def test_a_task_that_is_stopped_writes_what_is_encoded_and_goes_on_by_itself(slurm, tmp_path):
    """SIGTERM to its script is what Slurm sends before a time limit; the task would go on two minutes later."""
    ids = tiny_videos(tmp_path / "videos", 40)
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--num-frames", "2", "--log-interval", "1"]
    done = slurm.run(SCRIPT, *argv, "--decoder", SLOW, cwd=tmp_path, PARTS="1")
    job = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert job, done.stdout
    wait_until(
        lambda: re.search(r" [1-9]\d*/40 videos", log(tmp_path, job[1], 0)), lambda: logs(tmp_path), meanwhile=pause
    )
    assert slurm.run("scancel", "--batch", "--signal=TERM", f"{job[1]}_0").returncode == 0
    wait_until(lambda: "goes on from here" in log(tmp_path, job[1], 0), lambda: logs(tmp_path), meanwhile=pause)
    wait_until(lambda: slurm.run("squeue", "-h", "-o", "%t").stdout == "PD\n", lambda: logs(tmp_path), meanwhile=pause)
    stopped = log(tmp_path, job[1], 0)
    # Not in the second of the requeue, in which Slurm takes the new start for the one that it has revoked.
    assert slurm.run("scontrol", "update", f"JobId={job[1]}_0", "StartTime=now+2").returncode == 0
    wait_until(lambda: ended(slurm), lambda: logs(tmp_path), 240, meanwhile=pause)
    assert_complete(tmp_path / "c", ids)
    assert "videos are in the cache already" in log(tmp_path, job[1], 0).removeprefix(stopped)


@pytest.mark.slow
def test_a_refused_request_is_no_job(slurm, tmp_path):
    done = slurm.run(SCRIPT, str(tmp_path / "none"), "--out", str(tmp_path / "c"), cwd=tmp_path, PARTS="2")
    assert done.returncode == 2 and "no such folder" in done.stdout
    assert ended(slurm)


SLOW = "tests.jobs.hostile:SlowDecoder"


def pause():
    time.sleep(0.5)


def ended(slurm):
    return not slurm.run("squeue", "-h").stdout.strip()


def log(folder, job, task):
    file = folder / f"gstep-prune-{job}_{task}.log"
    return file.read_text() if file.exists() else ""


def logs(folder):
    return "\n".join(f"{file.name}: {file.read_text()[-3000:]}" for file in sorted(folder.glob("*.log")))
