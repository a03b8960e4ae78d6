"""The job with its cache on a real S3 API: what a killed run leaves, what a run asks for, and what must not show."""

import json
import os
import signal
import subprocess
from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from jobs import inspect, prune
from pipeline import TokenCache
from pipeline.cache.table import parse_file_name
from pipeline.runner.claim import MAX_MISSED_BEATS, Claim
from pipeline.storage.stores import ObjectStore
from tests.builders.runs import assert_complete, forbid_ray, run_here, said_by
from tests.builders.stores import KEY, SECRET, S3Server
from tests.jobs.faults import (
    FAST_BEAT,
    STOPS,
    Driver,
    die_before_the_third_commit,
    stop_before_the_third_commit,
    tiny_videos,
)
from tests.pipeline.verifying import kinds, verified
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

IDS = [f"v{i:03}.mp4" for i in range(32)]
SLOWLY = ["--decoder", "tests.jobs.hostile:SlowDecoder"]


@pytest.fixture(scope="module")
def server():
    with S3Server("cache") as server:
        yield server


@pytest.fixture(scope="module")
def pruned_here(one_ray, server):
    """Run jobs.prune in this process, on a Ray that started without the credentials."""

    def pruned_here(argv: list[str]) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patch:
            server.reach(patch)
            return run_here(prune, argv)

    return pruned_here


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    assert tiny_videos(folder, len(IDS)) == IDS
    (folder / "m.jsonl").write_text("\n".join(json.dumps({"video_id": v, "uri": v}) for v in IDS))
    return folder / "m.jsonl"


def argv(manifest: Path, cache: str) -> list[str]:
    return [str(manifest), "--out", cache, "--num-frames", "2", "--log-interval", "2"]


def shards(store: ObjectStore) -> list[str]:
    return store.names("videos", ".parquet")


@pytest.fixture(scope="module")
def killed(one_ray, server, manifest, pruned_here, tmp_path_factory):
    """A run that was killed half-way and run again: (its store, the second run, videos before it, its requests)."""
    store = ObjectStore(server.uri("killed/cache"), server.objects())
    log = tmp_path_factory.mktemp("log") / "log"
    place = {"RAY_ADDRESS": one_ray, **server.environment()}
    driver = Driver([*argv(manifest, store.root), *SLOWLY], log, die_before_the_third_commit, **place)
    assert driver.wait() == -signal.SIGKILL, driver.output  # by itself: no request of it is under way any more
    half = len(TokenCache(store.root, store=store))
    assert 0 < half < len(IDS)
    server.requests.clear()
    done = pruned_here(argv(manifest, store.root))
    return store, done, half, list(server.requests)


def test_a_killed_run_is_continued_and_shows_endpoint_and_credentials_nowhere(server, killed):
    store, done, half, _ = killed
    assert done.returncode == 0, done.stdout
    assert f"{half} of {len(IDS)} videos are in the cache already" in done.stdout
    assert_complete(store, IDS)
    stored = b"".join(store.objects.read(info.uri) for info in store.objects.list(f"{store.root}/", deep=True))
    for secret in (KEY, SECRET, server.url, server.url.partition("://")[2]):
        assert secret not in done.stdout and secret.encode() not in stored


def test_requests_are_counted(server, killed):
    """Per shard two PUTs; the table is read once; the rest does not grow with the corpus."""
    store, _, _, requests = killed
    run_id = store.names("runs", ".json")[-1].partition("/")[2].removesuffix(".json")
    committed = [name for name in shards(store) if run_id in name]
    written = Counter(r.path.split("/")[4] for r in requests if r.kind == "PUT" and run_id in r.path)
    assert written["videos"] == len(committed) > 1
    assert written["videos"] <= written["tokens"] <= len(IDS)  # small shards are committed several at a time
    gets = Counter(r.path for r in requests if r.kind == "GET" and "/videos/" in r.path)
    small = [name for name in shards(store) if not parse_file_name(name).level]
    assert set(gets.values()) <= {1, 2} and len(gets) == len(small)  # once more where they were merged in the end
    rest = Counter(r.kind for r in requests if not any(f"/{part}/" in r.path for part in ("tokens", "videos")))
    beats = sum(r.kind == "PUT" and r.path.endswith(".running") for r in requests)  # one every ten seconds
    assert sum(rest.values()) - beats - len(committed) < 36, rest  # each commit looks at the header


def test_a_driver_that_was_stopped_commits_nothing_whose_tokens_were_removed(
    one_ray, server, manifest, pruned_here, tmp_path, monkeypatch
):
    """Meanwhile the token shards that it was about to commit were removed, as nothing named them."""
    store = ObjectStore(server.uri("stopped/cache"), server.objects())
    slowly = [*argv(manifest, store.root), *SLOWLY, "--videos-per-shard", "2"]
    place = {"RAY_ADDRESS": one_ray, **server.environment()}
    driver = Driver(slowly, tmp_path / "log", stop_before_the_third_commit, **place)
    driver.until(lambda: (tmp_path / "log").exists() and STOPS in driver.output, "the third commit")
    monkeypatch.setattr("pipeline.verify.verify.Claim", partial(Claim, heartbeat_s=FAST_BEAT))
    (note,) = store.names("runs", ".running")
    silent = timedelta(seconds=MAX_MISSED_BEATS * FAST_BEAT + 5)  # a claim reads two times, one after the other
    wait_until(lambda: store.compute_age(note) > silent, "a note without signs of life")
    try:
        assert verified(store, clean=True, keep=timedelta(0)).removed
    finally:
        os.kill(driver.pid, signal.SIGCONT)
    assert driver.wait() == 1 and "removed meanwhile" in driver.output, driver.output
    assert 0 < len(TokenCache(store.root, store=store)) < len(IDS) and kinds(verified(store)) == []
    done = pruned_here(argv(manifest, store.root))
    assert done.returncode == 0, done.stdout
    assert_complete(store, IDS)


def test_nothing_left_to_do_starts_nothing(server, killed, manifest, monkeypatch, capsys):
    store, *_ = killed
    forbid_ray(monkeypatch)
    server.reach(monkeypatch)
    server.requests.clear()
    assert "32 of 32 videos are in the cache already" in said_by(prune, *argv(manifest, store.root))
    assert {r.path.rpartition(".")[2] for r in server.requests if r.kind in ("PUT", "DELETE")} == {"running"}
    assert "finished after" in said_by(inspect, store.root)


@pytest.mark.parametrize(
    ("place", "told"),
    [("s3://no-such-bucket/cache", "NoSuchBucket"), ("s3://", "expected s3://BUCKET"), ("taken", "is no cache")],
)
def test_places_where_no_cache_can_be(server, manifest, monkeypatch, capsys, place, told):
    forbid_ray(monkeypatch)
    server.reach(monkeypatch)
    server.upload("taken/notes.txt")
    assert told in said_by(prune, *argv(manifest, server.uri("taken") if place == "taken" else place), code=2)
