"""A node that goes away under a run takes no row with it, and one that fails at once must not get the corpus."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import pipeline
from jobs import prune
from pipeline import TokenCache
from pipeline.inputs.archive import ArchiveOptions, Member
from pipeline.inputs.forms import FORMS
from pipeline.inputs.tar_and_zip import Tar
from pipeline.prune.summary import Summary
from pipeline.prune.todo import Todo
from pipeline.runner import execution, stream, watchdog
from pipeline.runner.stages import end_workers
from pipeline.runner.worker_reports import WorkerReport, run_heartbeats
from tests.builders.archives import write_tar
from tests.builders.clusters import growing_ray, hold_cpu, more_nodes
from tests.builders.runs import assert_complete, environment, raylets, run_here, said_by
from tests.jobs.faults import Driver, calls, files, tiny_videos
from tests.jobs.hostile import let_through
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SLOW = "tests.jobs.hostile:SlowDecoder"
FREE_BYTES = 2**18  # of a box of the file format that holds nothing


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    """Let the runs in this process look at their workers and nodes each second, whatever may take a minute."""
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 1.0)


#: A node whose object store holds a few videos' frames, with a disk that counts as full from the start.
FULL = {
    "num_cpus": 4,
    "object_store_memory": 75 * 2**20,
    "env_vars": {"RAY_local_fs_capacity_threshold": "0.0001"},
}
#: The head of tests in which other nodes come and go; it stays.
SMALL = {"num_cpus": 1, "object_store_memory": 2**29}
#: For tests on one node: what small videos need in memory fits it, so that its disk matters to one of them alone.
on_the_only_node = pytest.mark.parametrize("head", [FULL], indirect=True, ids=["only node"])


@pytest.fixture(scope="module")
def head(request):
    """A function that adds a node to the cluster, and the id of its head."""
    with growing_ray(getattr(request, "param", SMALL)) as (add_node, (node,)):
        yield add_node, node


def _run_that_loses_a_node(cache: Path, argv: list[str], once_lost: Callable[[], object] = lambda: None) -> str:
    """Run jobs.prune here, to its end, on two nodes of which the second is killed after the first commit.

    What is left is planned anew a few seconds later, where that is needed. ``once_lost`` is called as soon as Ray
    counts the node as lost.
    """

    def kill() -> None:
        wait_until(lambda: files(cache, "videos"), "the first commit")
        os.kill(raylets(os.getpid())[1], signal.SIGKILL)
        wait_until(lambda: [node["Alive"] for node in ray.nodes()].count(True) == 1, "the loss of the node")
        once_lost()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "SHRUNK_S", 5.0)
        said = said_by(prune, *argv)
    killer.join()
    return said


def test_a_run_that_takes_every_cpu_goes_on_without_a_node(head, tmp_path):
    """The default plan: no worker of the lost node finds room on the other one.

    Which workers were there is Ray's choice. Where those that are left have no more to come, it ends them and starts
    the lost ones in their room; else what is left is planned anew, and the lost ones must not take the room then.
    Half of the videos wait until the node counts as lost, which takes Ray seconds: the run could end before that.
    """
    stays, goes = 1, 2
    ids = tiny_videos(tmp_path / "videos", 44)
    let_through(tmp_path / "videos", 22)
    cache = tmp_path / "c"
    argv = [str(tmp_path / "videos"), "--out", str(cache), "--num-frames", "2"]
    argv += ["--decoder", "tests.jobs.hostile:StuckDecoder", "--decode-workers", "3"]
    with more_nodes(head[0], {"num_cpus": goes}):
        said = _run_that_loses_a_node(cache, argv, lambda: let_through(tmp_path / "videos", 44))
    assert_complete(cache, ids)
    assert len(re.findall(r"note: node \S+ \w{6} was lost.*?\. The videos that it had in hand run again", said)) == 1
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert record["status"] == "finished"
    anew = "note: nodes were lost and nothing moves. Rescheduling " in said
    assert record["resources"]["cluster"]["CPU"] == (stays if anew else stays + goes)


def test_a_node_is_lost_while_tars_are_found(head, tmp_path, monkeypatch):
    """What is left is planned anew once the last tar has its index, for which the run waits."""
    names = tiny_videos(tmp_path / "videos", 30)
    (tmp_path / "tars").mkdir()
    for tar in range(5):
        members = {name: (tmp_path / "videos" / name).read_bytes() for name in names[tar::5]}
        write_tar(tmp_path / "tars" / f"{tar}.tar", members)
    ids = [f"{tar}.tar/{name}" for tar in range(5) for name in names[tar::5]]
    gate, found_all = threading.Event(), Todo.wait_for_all

    class Gated(Tar):
        def members(self, asked: ArchiveOptions) -> Iterator[Member]:
            assert not self._file.uri.endswith("4.tar") or gate.wait(400)
            yield from super().members(asked)

    def waited(todo: Todo) -> pa.Table:
        assert todo.n_left == 1
        threading.Timer(2, gate.set).start()
        return found_all(todo)

    monkeypatch.setitem(FORMS, ".tar", Gated)
    monkeypatch.setattr(Todo, "wait_for_all", waited)
    cache = tmp_path / "c"
    argv = [str(tmp_path / "tars"), "--out", str(cache), "--num-frames", "2", "--decoder", SLOW]
    with more_nodes(head[0], {"num_cpus": 2}):
        said = _run_that_loses_a_node(cache, [*argv, "--flush-seconds", "1"])
    assert gate.is_set() and "note: nodes were lost and nothing moves. Rescheduling " in said
    assert_complete(cache, ids)
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert record["resources"]["cluster"]["CPU"] == 1 and record["videos"] == len(ids)


def test_a_run_takes_in_nodes_that_join_and_goes_on_without_those_that_leave(head, tmp_path):
    """One of the first nodes is lost once what was left has been planned for all. Until then there is long to go."""
    ids = tiny_videos(tmp_path / "videos", 100)
    for name in ids:
        with (tmp_path / "videos" / name).open("ab") as file:  # so large that more decoders are worth their start
            file.write(FREE_BYTES.to_bytes(4, "big") + b"free" + bytes(FREE_BYTES - 8))
    cache = tmp_path / "c"
    notes: list[str] = []

    def run() -> Summary:
        options = {"out": cache, "num_frames": 2, "decoder": "tests.jobs.hostile:PatientDecoder"}
        return pipeline.prune_videos(tmp_path / "videos", **options, progress=lambda at: notes.append(at.note))

    with more_nodes(head[0], {"num_cpus": 1}), ExitStack() as joined, ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)  # nodes are added by the main thread alone
        wait_until(lambda: files(cache, "videos"), "the first commit")
        wait_until(lambda: 2 in decoding_nodes(notes), "a line about workers on two nodes")
        joined.enter_context(more_nodes(head[0], {"num_cpus": 4}))
        wait_until(lambda: planned_cpus(cache) == 6, "a plan for six cores")
        before = len(files(cache, "videos"))
        wait_until(lambda: len(files(cache, "videos")) > before, "a commit by the new workers")
        # It needs a look at which all of them have started, and a worker that is late may miss some.
        wait_until(lambda: 3 in decoding_nodes(notes), "a line about workers on three nodes")
        os.kill(raylets(os.getpid())[1], signal.SIGKILL)
        (tmp_path / "videos" / "quick").touch()
        assert running.result().n_ok == len(ids)
    assert any(note.startswith("note: nodes joined, which saves about ") for note in notes), notes
    came = re.compile(r"note: node \S+ \w{6} joined \(4 CPUs, 0 GPUs\) and has no workers yet")
    assert any(map(came.match, notes)), notes
    assert decoding_nodes(notes)[:2] == [2, 3], notes  # one decoder a CPU, before and after
    assert_complete(cache, ids)


def decoding_nodes(notes: list[str]) -> list[int]:
    """Return how many nodes have decoders by each line about the workers of the nodes; more may come meanwhile."""
    return [note.count(" to decode") for note in [*notes] if note.startswith("workers of each node: ")]


def planned_cpus(cache: Path) -> float:
    """Return the CPUs of the cluster that the run in this cache was last planned for."""
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    return record["resources"]["cluster"]["CPU"]


def _prune_large_frames(folder: Path, code: int = 0) -> tuple[list[str], str]:
    """Run jobs.prune on videos of 29 MB of frames each, which are decoded faster than they are pruned."""
    ids = tiny_videos(folder / "videos", 8)
    argv = [str(folder / "videos"), "--out", str(folder / "c"), "--model", "tiny-internvl", "--num-frames", "192"]
    argv += ["--pruner", "tests.jobs.poison:Slow", "--decode-workers", "4"]
    return ids, said_by(prune, *argv, code=code)


def test_a_node_with_a_full_disk_is_left_out_and_named(head, tmp_path, monkeypatch):
    """No decoder finds room on the other node before the first workers have ended: else it might do too many videos."""
    add_node, other = head
    with more_nodes(add_node, FULL) as (full,), ExitStack() as held:
        monkeypatch.setattr(stream, "end_workers", lambda: (end_workers(), held.close()))
        held.enter_context(hold_cpu(scheduling_strategy=NodeAffinitySchedulingStrategy(other, soft=False)))
        ids, said = _prune_large_frames(tmp_path)
    assert_complete(tmp_path / "c", ids)
    (note,) = re.findall(r"note: the disk is full on .*?(?=note: the disk|$)", said)
    assert f" {full[:6]} (/" in note and "% full" in note
    assert " on the other nodes. Free space on them, or start these nodes with --temp-dir" in note


def stand_still_briefly() -> None:
    """Let this driver wait seconds instead of a minute for free space on a disk that keeps workers from starting."""
    execution.SHRUNK_S, execution._FULL_S, watchdog._MAX_LOOK_S = 3.0, 6.0, 1.0


def test_a_full_disk_on_which_no_worker_can_start_ends_the_run_with_its_folder(tmp_path):
    """The disk of Ray's folder fills up once Ray has started, and stays full: no process can write its log."""
    disk = Path(tempfile.mkdtemp(prefix="disk-", dir="/tmp"))  # a short path, for sockets
    command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("this user may not mount a disk")
    try:
        tiny_videos(tmp_path / "videos", 4)
        argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--num-frames", "2", "--log-interval", "1"]
        (tmp_path / "log").touch()
        run = Driver(argv, tmp_path / "log", stand_still_briefly, **{**environment(), "RAY_TMPDIR": str(disk)})
        run.until(lambda: "Ray at " in run.output, "Ray starts")
        with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        assert run.wait() == 1, run.output
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
        disk.rmdir()
    (last,) = [line for line in run.output.splitlines() if " failed: " in line]
    assert re.search(rf"no video moved for \d+ s; the disk is full on \S+ \w{{6}} \({disk}/\S+, 100% full\)", last)
    assert "Free space on them, or start these nodes with" in last and last.endswith("then rerun the command")
    (record,) = [json.loads(file.read_text()) for file in (tmp_path / "c" / "runs").glob("*.json")]
    assert record["status"] == "failed" and "the disk is full on" in record["error"]


OPTIONS = ["--num-frames", "2", "--decoder", "tests.jobs.hostile:MountedElsewhere", "--encode-workers", "1"]


def _run_until(
    failed: Callable[[WorkerReport], object], videos: Path, argv: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run jobs.prune here with MountedElsewhere.

    Videos fail once the heartbeats know of one in the hand of a worker that reads, and those are in hand until enough
    have ``failed`` by their report: there is always one that does better, and it does not do everything.
    """

    def watch(heartbeats: ActorHandle) -> None:
        def read() -> WorkerReport:
            return ray.get(heartbeats.read.remote())

        def is_held() -> bool:
            return any(item.split(" on ")[0] in calls(videos) for item in read().inside["decode"])

        wait_until(is_held, "a video in hand")
        (videos / "held").touch()
        wait_until(lambda: failed(read()), "failures")
        (videos / "failed").touch()

    @contextmanager
    def watched(stages: Sequence[str]) -> Iterator[ActorHandle]:
        with ThreadPoolExecutor(1) as pool, run_heartbeats(stages) as heartbeats:
            watching = None if (videos / "failed").exists() else pool.submit(watch, heartbeats)  # not at a second try
            yield heartbeats
            if watching is not None:
                watching.result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "run_heartbeats", watched)
        return run_here(prune, argv)


def test_what_fails_on_one_node_is_tried_again_on_the_others(head, tmp_path):
    ids = tiny_videos(tmp_path / "videos", 28)
    cache = tmp_path / "c"
    with more_nodes(head[0], {"num_cpus": 2, "env_vars": {"BAD_NODE": "1"}}):
        argv = [str(tmp_path / "videos"), "--out", str(cache), *OPTIONS, "--decode-workers", "3"]
        done = _run_until(
            lambda report: any(t.n_failed for t in report.tallies["decode"].values()), tmp_path / "videos", argv
        )
    assert done.returncode == 0, done.stdout
    assert "failed, most of them on " in done.stdout
    assert TokenCache(cache).video_ids == ids
    attempts = [TokenCache(cache).metadata(video_id)["attempts"] for video_id in ids]
    assert set(attempts) == {1, 2}  # it was the bad node that failed
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").iterdir()]
    assert record["summary"]["n_new_failed"] == 0


@on_the_only_node
def test_a_worker_that_fails_where_others_do_not_is_put_out_of_service(head, tmp_path):
    """One of four decoders, on the only node: what it does not get is done by the others.

    A second attempt would be made at the files, which are there.
    """
    ids = tiny_videos(tmp_path / "videos", 96)
    (tmp_path / "videos" / "roles").mkdir()
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), *OPTIONS]
    argv += ["--decode-workers", "4", "--max-attempts", "1"]
    done = _run_until(lambda report: report.excluded_workers, tmp_path / "videos", argv)
    failed = TokenCache(tmp_path / "c").failed
    assert set(failed.values()) == {"io"}, done.stdout
    assert len(failed) <= len(ids) // 4, done.stdout  # its share at most: some 10 at once, and what it has in hand
    assert len(calls(tmp_path / "videos")) == len(ids) - len(failed)
    assert "excluded worker: a decode worker on " in done.stdout
    (record,) = [json.loads(file.read_text()) for file in (tmp_path / "c" / "runs").iterdir()]
    assert len(record["out_of_service"]) == 1


@on_the_only_node
def test_a_run_in_which_all_videos_fail_alike_stops_with_the_remedy(head, tmp_path):
    tiny_videos(tmp_path, 1)
    rows = [{"video_id": f"v{number}", "uri": "v000.mp4"} for number in range(400)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = [str(tmp_path / "m.jsonl"), "--out", str(tmp_path / "c"), "--num-frames", "2", "--decode-workers", "4"]
    said = said_by(prune, *argv, "--decoder", "tests.jobs.hostile:AwayDecoder", code=1)
    assert " failed: " in said and "videos failed alike and all decode workers fail (io, v" in said
    assert said.endswith("check that it exists and can be read on every node, then --retry-failed")
    assert 50 < len(TokenCache(tmp_path / "c").failed) < len(rows)


@on_the_only_node
def test_a_full_disk_of_the_only_node_ends_the_run_with_its_folder(head, tmp_path):
    _, said = _prune_large_frames(tmp_path, code=1)
    assert "the disk is full on " in said and "/session_" in said and "then rerun the command" in said
    assert "and no other node can run all stages. Free space on them, or start " in said
