"""Workers and drivers that are killed in the middle: every video has one row, and what is visible is always right."""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
import ray
import torch

from jobs import inspect, prune
from pipeline import TokenCache
from pipeline.prune import table
from tests.builders.clusters import ray_here
from tests.builders.runs import family, run_here, said_by
from tests.jobs.faults import (
    COUNTED,
    N_VIDEOS,
    OPTIONS,
    STOPS,
    Driver,
    Visible,
    calls,
    die_before_the_third_commit,
    die_in_a_merge,
    files,
    stop_before_the_third_commit,
    tiny_videos,
)
from tests.jobs.hostile import let_through
from tests.paths import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ONE_WORKER = ["--encode-workers", "1", "--decode-workers", "1", "--videos-per-shard", "2"]
ENCODER = "ray::MapWorker(MapBatches(Encoder))"
KILLS = 5
STARTING = [("", 0, 3.0)] * 4  # while the driver writes its note, the header and starts its workers


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray with twice as many logical CPUs as there are cores here."""
    with ray_here({"num_cpus": 4}):
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    tiny_videos(folder)
    return folder


@pytest.fixture(scope="module")
def visible(videos) -> Visible:
    return Visible(videos)


def test_killed_workers_cost_no_row_and_no_more_calls_than_they_had_in_hand(
    cluster, videos, visible, tmp_path, monkeypatch
):
    """First a decoder is killed, then an encoder, whose videos need not be decoded again.

    The driver, which is this process, does it between two commits. Until then half of the videos wait to be decoded.
    """
    cache, killed = tmp_path / "c", []
    commit, commits = table.commit_rows, count(1)

    def kill_and_commit(*args: Any, **more: Any) -> Any:
        if stage := {2: "Decoder", 5: "Encoder"}.get(next(commits)):
            os.kill(min(titled_so(f"ray::MapWorker(MapBatches({stage}))")), signal.SIGKILL)
            killed.append(n_rows(cache))
        if stage == "Encoder":
            let_through(videos, N_VIDEOS)
        return commit(*args, **more)

    monkeypatch.setattr(table, "commit_rows", kill_and_commit)
    let_through(videos, N_VIDEOS // 2)
    options = [*OPTIONS, "--videos-per-shard", "4", "--decoder", "tests.jobs.hostile:CountedStuckDecoder"]
    said_by(prune, videos, "--out", cache, *options)
    visible.assert_complete(cache)
    assert 0 < killed[0] < killed[1] < N_VIDEOS / 2, "it was not in the middle"
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    again = sum(calls(videos).values()) - len(calls(videos))
    plan = record["resources"]["plan"]
    assert again <= plan["decode"]["calls"] * plan["videos_per_block"]


@dataclass
class Chain:
    """One cache, and the drivers that were killed on it so far."""

    cache: Path
    argv: list[str]
    address: str
    log: Path
    shown: list[int] = field(default_factory=list)  # after each kill

    def driver(self, before: Callable[[], None] | None = None) -> Driver:
        options = [*ONE_WORKER, "--decoder", COUNTED]
        return Driver([*self.argv, *options], self.log, before, RAY_ADDRESS=self.address)

    def killed(self, visible: Visible) -> list[str]:
        """What is visible after a kill, while workers of the killed driver may still write."""
        seen = visible.check(self.cache)
        self.shown.append(len(seen))
        return seen


@pytest.fixture(scope="module")
def chain(cluster, videos, tmp_path_factory) -> Chain:
    folder = tmp_path_factory.mktemp("chain")
    return Chain(folder / "c", [str(videos), "--out", str(folder / "c"), *OPTIONS], cluster, folder / "log")


def test_a_driver_killed_between_tokens_and_commit_leaves_an_orphan_that_nobody_sees(chain, visible):
    driver = chain.driver(before=die_before_the_third_commit)
    assert driver.wait() == -signal.SIGKILL, driver.output
    assert len(files(chain.cache, "tokens")) > len(token_shards(chain.cache)) > 0
    assert sorted(chain.killed(visible)) == by_sql(chain.cache)


def test_a_second_driver_is_refused_and_the_note_of_a_killed_one_holds_nobody_up(chain, visible):
    for _ in range(2):  # the second finds the note that the first left behind
        driver = chain.driver()
        driver.until(lambda: f'"pid": {driver.pid},' in notes(chain.cache), "its note")  # noqa: B023
        refused = said_by(prune, *chain.argv, code=2)
        assert "another run writes here" in refused and f'"pid": {driver.pid},' in refused
        driver.kill()
        chain.killed(visible)


def test_a_driver_that_is_terminated_says_what_goes_on(chain, visible):
    wanted = len(files(chain.cache, "videos")) + 1
    driver = chain.driver()
    driver.until(lambda: len(files(chain.cache, "videos")) >= wanted, "a commit")
    assert "running for" in " ".join(run_here(inspect, [str(chain.cache)]).stdout.split())
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.wait() == 130, driver.output
    assert "Rerun the same command to resume" in driver.output and "Traceback" not in driver.output
    newest = max((chain.cache / "runs").glob("*.json"))
    assert json.loads(newest.read_text())["status"] == "cancelled"
    assert 0 < len(visible.check(chain.cache)) < len(visible.ids)


def test_a_driver_killed_again_and_again_on_one_cache_and_run_again_completes_it(chain, visible):
    rng = random.Random(20)
    while len(chain.shown) < KILLS:
        driver = chain.driver()
        folder, more, delay = rng.choice([*STARTING, ("tokens", 1, 0.1), ("tokens", 3, 0.1), ("videos", 1, 0.2)])
        wanted = len(files(chain.cache, folder)) + more
        driver.until(lambda: len(files(chain.cache, folder)) >= wanted, f"{more} more {folder}")  # noqa: B023
        time.sleep(rng.uniform(0, delay))
        assert driver.running(), f"kill {len(chain.shown)} came too late: {driver.output}"
        driver.kill()
        chain.killed(visible)
    shown = " ".join(run_here(inspect, [str(chain.cache)]).stdout.split())  # wherever the table breaks its lines
    assert "ended without a final record" in shown, shown
    assert chain.shown == sorted(chain.shown) and len(set(chain.shown)) >= KILLS / 4, chain.shown
    assert 0 < chain.shown[-1] < len(visible.ids)
    said_by(prune, *chain.argv)
    visible.assert_complete(chain.cache)
    assert "finished after" in " ".join(run_here(inspect, [str(chain.cache)]).stdout.split())
    assert by_sql(chain.cache) == visible.ids
    assert len(files(chain.cache, "tokens")) > len(token_shards(chain.cache))  # orphans are there to the end


def test_three_drivers_fill_one_cache_while_one_of_them_and_two_encoders_are_killed(cluster, videos, visible, tmp_path):
    """The part of the killed driver is done by the same command, beside the others.

    None of them comes to its end before the kills: until then a video takes seconds.
    """
    cache, quick = tmp_path / "c", videos / "quick"
    options = ["--out", str(cache), *OPTIONS, *ONE_WORKER, "--join"]
    options += ["--decoder", "tests.jobs.hostile:PatientDecoder", "--flush-seconds", "1"]
    argv = [[str(videos), *options, "--shard", f"{part}/3"] for part in range(3)]
    left = titled_so(ENCODER)  # of drivers that were killed before
    drivers = [Driver(one, tmp_path / f"log{part}", RAY_ADDRESS=cluster) for part, one in enumerate(argv)]

    def encoders() -> list[int]:
        return [pid for pid in titled_so(ENCODER) if pid not in left]

    drivers[0].until(lambda: len(encoders()) == 3, "an encoder of each driver")
    drivers[0].until(lambda: len(files(cache, "videos")) >= 2, "two commits")
    for encoder in encoders()[:2]:
        os.kill(encoder, signal.SIGKILL)
    drivers[0].kill()
    quick.touch()
    said_by(prune, *argv[0])
    assert [driver.wait() for driver in drivers[1:]] == [0, 0], [driver.output for driver in drivers]
    quick.unlink()
    visible.assert_complete(cache)


def test_a_driver_killed_while_it_merges_the_table_leaves_a_cache_that_goes_on(cluster, videos, visible, tmp_path):
    cache = tmp_path / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS, *ONE_WORKER, "--limit", "40"]
    driver = Driver(argv, tmp_path / "log", die_in_a_merge, RAY_ADDRESS=cluster)
    assert driver.wait() == -signal.SIGKILL, driver.output
    before = visible.check(cache)
    assert len(before) >= 6  # more than two commits of two videos
    said_by(prune, videos, "--out", cache, *OPTIONS)
    visible.assert_complete(cache)


def test_a_driver_that_stands_still_refuses_others_and_one_that_joins_does_its_work(cluster, videos, tmp_path):
    """Its own commits come late and change nothing."""
    cache, ids = tmp_path / "c", sorted(path.name for path in videos.glob("v00*.mp4"))
    argv = [str(videos / "v00*.mp4"), "--out", str(cache), *OPTIONS, *ONE_WORKER]
    log = tmp_path / "log"
    log.touch()
    driver = Driver(argv, log, stop_before_the_third_commit, RAY_ADDRESS=cluster)
    wait_until(lambda: STOPS in driver.output, lambda: driver.output)
    assert f'"pid": {driver.pid},' in said_by(prune, *argv, code=2)
    said_by(prune, *argv, "--join")
    read = {video_id: TokenCache(cache).get(video_id).tokens for video_id in ids}
    os.kill(driver.pid, signal.SIGCONT)
    assert driver.wait() == 0, driver.output
    late = TokenCache(cache)
    assert late.video_ids == ids
    assert all(torch.equal(late.get(name).tokens, tokens) for name, tokens in read.items())


def test_what_was_encoded_survives_a_kill_by_its_age_and_a_request_to_end_at_once(cluster, tmp_path):
    """The next video never comes, and what is encoded makes no shard. First the driver is killed, then terminated."""
    cache, videos = tmp_path / "c", tmp_path / "videos"
    tiny_videos(videos, 112)  # seven a shard
    visible = Visible(videos)
    one_each = ["--encode-workers", "1", "--decode-workers", "1", "--decoder", "tests.jobs.hostile:StuckDecoder"]
    argv = [str(videos), "--out", str(cache), "--num-frames", "2", "--log-interval", "0.2", *one_each]
    let_through(videos, 18)  # of these up to four in each of two bundles wait for their neighbours
    driver = Driver([*argv, "--flush-seconds", "1"], tmp_path / "log", RAY_ADDRESS=cluster)
    driver.until(lambda: n_rows(cache) >= 10, "what is older than a second")
    driver.kill()
    before = len(visible.check(cache))
    assert before >= 10

    let_through(videos, 5)  # fewer than make a shard
    log = tmp_path / "log of the second"  # whose output is looked at before it says anything
    log.touch()
    driver = Driver([*argv, "--flush-seconds", "3600"], log, RAY_ADDRESS=cluster)
    encoded = re.compile(r"(\d+) encoded")
    driver.until(lambda: max(map(int, encoded.findall(driver.output)), default=0) >= 3, "more that are encoded")
    assert n_rows(cache) == before
    writers = wait_until(lambda: titled_so("ray::Writer"), "a writer")
    for writer in writers:
        os.kill(writer, signal.SIGSTOP)
    os.kill(driver.pid, signal.SIGTERM)
    time.sleep(4)  # a handler of Ray's core would abort the driver after 3 s
    for writer in writers:
        os.kill(writer, signal.SIGCONT)
    assert driver.wait() == 130, driver.output
    assert "flushing finished work" in driver.output and "***" not in driver.output, driver.output
    assert len(visible.check(cache)) >= before + 3


def titled_so(title: str) -> list[int]:
    """List the processes below this one whose title begins so."""
    return [pid for pid, its in family(os.getpid()).items() if its.startswith(title)]


def n_rows(cache: Path) -> int:
    """How many rows are committed; cheap to ask again and again while a run commits."""
    return sum(pq.read_metadata(file).num_rows for file in files(cache, "videos"))


def notes(cache: Path) -> str:
    """What the notes of runs say at this moment."""
    found = []
    for file in (cache / "runs").glob("*.running"):
        with suppress(FileNotFoundError):
            found.append(file.read_text())
    return "\n".join(found)


def token_shards(cache: Path) -> set[str]:
    """The token shards that a videos shard names."""
    named = duckdb.sql(f"select distinct token_shard from read_parquet('{cache}/videos/*.parquet')")
    return {row[0] for row in named.fetchall()}


def by_sql(cache: Path) -> list[str]:
    """The videos that the query on the cache's page finds."""
    query = (ROOT / "pipeline/cache/README.md").read_text().partition("```sql\n")[2].partition("```")[0]
    return sorted({row[0] for row in duckdb.sql(query.replace("cache/", f"{cache}/")).fetchall()})
