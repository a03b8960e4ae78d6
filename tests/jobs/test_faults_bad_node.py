"""A node or a worker that fails at once is always free, and must not get the corpus for that."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from jobs import prune
from pipeline import TokenCache
from pipeline.runner import execution
from pipeline.runner.worker_reports import WorkerReport, run_heartbeats
from tests.builders.clusters import ray_here
from tests.builders.runs import run_here
from tests.jobs.faults import calls, tiny_videos
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

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


def test_what_fails_on_one_node_is_tried_again_on_the_others(tmp_path):
    ids = tiny_videos(tmp_path / "videos", 40)
    cache = tmp_path / "c"
    with ray_here({"num_cpus": 2}, {"num_cpus": 2, "env_vars": {"BAD_NODE": "1"}}):
        argv = [str(tmp_path / "videos"), "--out", str(cache), *OPTIONS, "--decode-workers", "3"]
        done = _run_until(_any_failed, tmp_path / "videos", argv)
    assert done.returncode == 0, done.stdout
    assert "failed, most of them on " in done.stdout
    assert TokenCache(cache).video_ids == ids
    attempts = [TokenCache(cache).metadata(video_id)["attempts"] for video_id in ids]
    assert set(attempts) == {1, 2}  # it was the bad node that failed
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").iterdir()]
    assert record["summary"]["n_new_failed"] == 0


def _any_failed(report: WorkerReport) -> bool:
    return any(tally.n_failed for tally in report.tallies["decode"].values())


@pytest.fixture(scope="module")
def one_node():
    with ray_here({"num_cpus": 5}):
        yield


def test_a_worker_that_fails_where_others_do_not_is_put_out_of_service(one_node, tmp_path):
    """One of four decoders, on the only node: what it does not get is done by the others.

    A second attempt would be made at the files, which are there.
    """
    ids = tiny_videos(tmp_path / "videos", 96)
    (tmp_path / "videos" / "roles").mkdir()
    argv = [
        str(tmp_path / "videos"),
        "--out",
        str(tmp_path / "c"),
        *OPTIONS,
        "--decode-workers",
        "4",
        "--max-attempts",
        "1",
    ]
    done = _run_until(lambda report: report.excluded_workers, tmp_path / "videos", argv)
    failed = TokenCache(tmp_path / "c").failed
    assert set(failed.values()) == {"io"}, done.stdout
    assert len(failed) <= len(ids) // 4, done.stdout  # its share at most: some 10 at once, and what it has in hand
    assert len(calls(tmp_path / "videos")) == len(ids) - len(failed)
    assert "excluded worker: a decode worker on " in done.stdout
    (record,) = [json.loads(file.read_text()) for file in (tmp_path / "c" / "runs").iterdir()]
    assert len(record["out_of_service"]) == 1


def test_a_run_in_which_all_videos_fail_alike_stops_with_the_remedy(one_node, tmp_path):
    ids = tiny_videos(tmp_path / "videos", 400)
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--num-frames", "2", "--decode-workers", "4"]
    done = run_here(prune, [*argv, "--decoder", "tests.jobs.hostile:AwayDecoder"])
    assert done.returncode == 1, done.stdout
    said = " ".join(done.stdout.splitlines()[-1].split())
    assert " failed: " in said and "videos failed alike and all decode workers fail (io, v" in said
    assert said.endswith("check that it exists and can be read on every node, then --retry-failed")
    assert 50 < len(TokenCache(tmp_path / "c").failed) < len(ids)
