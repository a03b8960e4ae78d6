"""Workers and drivers that are killed in the middle: every video has one row, and what is visible is always right."""

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import duckdb
import pytest
import ray

from jobs import prune
from tests.jobs.faults import (
    COUNTED,
    Driver,
    Visible,
    calls,
    die_before_the_third_commit,
    files,
    tiny_videos,
    wait_until,
)
from tests.jobs.jobs import run_here
from tests.jobs.processes import family
from tests.pipeline.rays import ray_here

pytestmark = [pytest.mark.slow, pytest.mark.long]

OPTIONS = ["--num-frames", "2", "--log-interval", "5"]
ONE_WORKER = ["--encode-workers", "1", "--decode-workers", "1", "--videos-per-shard", "2"]
KILLS = 20
STARTING = [("", 0, 3.0)] * 4  # while the driver takes the lock, writes the header and starts its workers


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
def visible(cluster, videos, tmp_path_factory) -> Visible:
    """What an undisturbed run makes of the videos."""
    reference = tmp_path_factory.mktemp("undisturbed") / "c"
    done = run_here(prune, [str(videos), "--out", str(reference), *OPTIONS])
    assert done.returncode == 0, done.stdout
    return Visible(reference)


def test_killed_workers_cost_no_row_and_no_more_calls_than_they_had_in_hand(cluster, videos, visible, tmp_path):
    """First a decoder is killed, then an encoder, whose videos need not be decoded again."""
    cache, shards = tmp_path / "c", []

    def kill() -> None:
        for commits, stage in ((1, "Decoder"), (4, "Encoder")):
            wait_until(lambda: len(files(cache, "videos")) >= commits, f"{commits} commits")  # noqa: B023
            title = f"ray::MapWorker(MapBatches({stage}))"
            worker = min(pid for pid, name in family(os.getpid()).items() if name.startswith(title))
            os.kill(worker, signal.SIGKILL)
            shards.append(len(files(cache, "videos")))

    killer = threading.Thread(target=kill)
    killer.start()
    options = [*OPTIONS, "--videos-per-shard", "4", "--decoder", COUNTED]
    done = run_here(prune, [str(videos), "--out", str(cache), *options])
    killer.join()
    assert done.returncode == 0, done.stdout
    visible.assert_complete(cache)
    assert shards[1] < len(files(cache, "videos")) / 2, "it was not in the middle"
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").iterdir()]
    again = sum(calls(videos).values()) - len(calls(videos))
    assert again <= record["resources"]["plan"]["videos_per_block"]


def test_a_driver_killed_twenty_times_on_one_cache(cluster, videos, visible, tmp_path):
    """Between any two kills, and while the killed driver's workers still write, only right rows are visible."""
    rng, cache = random.Random(20), tmp_path / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS, *ONE_WORKER, "--decoder", COUNTED]
    shown = []
    for number in range(KILLS):
        driver = Driver(argv, tmp_path / "log", RAY_ADDRESS=cluster)
        folder, more, delay = rng.choice([*STARTING, ("tokens", 1, 0.1), ("tokens", 3, 0.1), ("videos", 1, 0.2)])
        wanted = len(files(cache, folder)) + more
        wait_until(lambda: len(files(cache, folder)) >= wanted or not driver.running(), f"{more} more {folder}")  # noqa: B023
        time.sleep(rng.uniform(0, delay))
        assert driver.running(), f"kill {number} came too late: {driver.output}"
        driver.kill()
        shown.append(len(visible.check(cache)))
    assert shown == sorted(shown) and 0 < shown[-1] < len(list(videos.glob("*.mp4")))
    assert len(set(shown)) >= KILLS / 4, shown
    done = run_here(prune, argv)
    assert done.returncode == 0, done.stdout
    visible.assert_complete(cache)


def test_a_driver_killed_between_tokens_and_commit_leaves_an_orphan_that_nobody_sees(
    cluster, videos, visible, tmp_path
):
    cache = tmp_path / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS, *ONE_WORKER]
    driver = Driver(argv, tmp_path / "log", before=die_before_the_third_commit, RAY_ADDRESS=cluster)
    assert driver.wait() == -signal.SIGKILL, driver.output
    assert len(files(cache, "videos")) == 2 < len(files(cache, "tokens"))
    seen = visible.check(cache)
    assert 0 < len(seen) == len(_by_sql(cache)) < len(list(videos.glob("*.mp4")))
    done = run_here(prune, argv)
    assert done.returncode == 0, done.stdout
    visible.assert_complete(cache)
    assert len(_by_sql(cache)) == len(list(videos.glob("*.mp4")))
    assert len(files(cache, "tokens")) > len(files(cache, "videos"))  # it is still there


def _by_sql(cache: Path) -> list[str]:
    """The videos that the README's query finds."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    query = readme.partition("```sql\n")[2].partition("```")[0].replace("cache/", f"{cache}/")
    return sorted({row[0] for row in duckdb.sql(query).fetchall()})


def test_a_second_driver_is_refused_and_the_lock_of_a_killed_one_holds_nobody_up(cluster, videos, visible, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for path in sorted(videos.glob("*.mp4"))[:8]:
        shutil.copy(path, few)
    argv = [str(few), "--out", str(tmp_path / "c"), *OPTIONS]
    first = Driver(argv, tmp_path / "log", RAY_ADDRESS=cluster)
    wait_until(lambda: (tmp_path / "c" / ".lock").is_file() and (tmp_path / "c" / ".lock").read_text(), "the lock")
    refused = run_here(prune, argv)
    assert refused.returncode == 2, refused.stdout
    assert f'"pid": {first.pid}' in refused.stdout and "another run writes here" in refused.stdout
    first.kill()
    done = run_here(prune, argv)
    assert done.returncode == 0, done.stdout
    assert sorted(visible.check(tmp_path / "c")) == sorted(path.name for path in few.iterdir())
