"""The job with its cache or its videos on a real S3 API: what is left, what is asked for, and what must not show."""

import json
import os
import signal
import threading
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import ray

from jobs import inspect, prune
from pipeline import TokenCache
from pipeline.cache.table import parse_file_name
from pipeline.runner.claim import MAX_MISSED_BEATS, Claim
from pipeline.storage.stores import ObjectStore
from pipeline.video.decode import fingerprint_file
from tests.builders.runs import assert_complete, clips, forbid_ray, run, said_by
from tests.builders.stores import KEY, SECRET, TOKEN, S3Server
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

    def pruned_here(argv: list[str]) -> str:
        with pytest.MonkeyPatch.context() as patch:
            server.reach(patch)
            return said_by(prune, *argv)

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
    said = pruned_here(argv(manifest, store.root))
    return store, said, half, list(server.requests)


def test_a_killed_run_is_continued_and_shows_endpoint_and_credentials_nowhere(server, killed):
    store, said, half, _ = killed
    assert f"{half} of {len(IDS)} videos are in the cache already" in said
    assert_complete(store, IDS)
    stored = b"".join(store.objects.read(info.uri) for info in store.objects.list(f"{store.root}/", deep=True))
    for secret in (KEY, SECRET, server.url, server.url.partition("://")[2]):
        assert secret not in said and secret.encode() not in stored


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
    pruned_here(argv(manifest, store.root))
    assert_complete(store, IDS)


def test_nothing_left_to_do_starts_nothing(server, killed, manifest, monkeypatch):
    store, *_ = killed
    forbid_ray(monkeypatch)
    server.reach(monkeypatch)
    server.requests.clear()
    assert "32 of 32 videos are in the cache already" in said_by(prune, *argv(manifest, store.root))
    assert {r.path.rpartition(".")[2] for r in server.requests if r.kind in ("PUT", "DELETE")} == {"running"}
    assert "finished after" in said_by(inspect, store.root)


@pytest.mark.parametrize(
    ("place", "told"),
    [("s3://no-such-bucket/cache", "NoSuchBucket"), ("taken", "is no cache")],
)
def test_places_where_no_cache_can_be(server, manifest, monkeypatch, place, told):
    forbid_ray(monkeypatch)
    server.reach(monkeypatch)
    server.upload("taken/notes.txt")
    assert told in said_by(prune, *argv(manifest, server.uri("taken") if place == "taken" else place), code=2)


BIG = 96 * 2**20
OPTIONS = ["--num-frames", "4", "--max-failed", "2"]


@pytest.fixture(scope="module")
def sources():
    with S3Server() as opened:
        yield opened


@contextmanager
def watched(folder):
    """Yields a function for the most bytes that were seen below a folder at any one time."""
    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(0.05):
            with suppress(OSError):  # something was removed during this look
                peak.append(sum(path.lstat().st_size for path in list(folder.rglob("*"))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(peak)
    finally:
        done.set()
        thread.join()


def files_with(text, *folders):
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if text.encode() in path.read_bytes()]


def requested(sources):
    """(kind, key) of every request."""
    return sorted((request.kind, request.path.removeprefix(f"/{sources.bucket}")) for request in sources.requests)


def test_a_folder_on_s3_by_workers_that_have_no_credentials_of_their_own(sources, one_ray, tmp_path, monkeypatch):
    ray_folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent
    names = [f"sub dir/ü {clip.name}" for clip in clips()]
    for name, clip in zip(names, clips(), strict=True):
        sources.upload(f"all/{name}", clip.read_bytes())
    padding = BIG.to_bytes(4, "big") + b"free" + bytes(BIG - 8)  # a box of the file format that holds nothing
    sources.upload("all/big.mp4", clips()[1].read_bytes() + padding)
    sources.upload("all/empty.mp4", b"")
    sources.upload("all/", b"")
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    temporary.mkdir()
    argv = [sources.uri("all"), "--out", str(cache), *OPTIONS]
    with watched(temporary) as peak:
        done = run("jobs.prune", *argv, **sources.environment(), TMPDIR=str(temporary), RAY_ADDRESS=one_ray)
    assert done.returncode == 0, done.stdout
    opened = TokenCache(cache)
    assert opened.video_ids == ["big.mp4", *names] and opened.failed == {"empty.mp4": "unsupported"}
    for name, clip in zip(names, clips(), strict=True):
        row = opened.metadata(name)
        assert (row["uri"], row["backend"]) == (sources.uri(f"all/{name}"), "pyav")
        assert (row["source_size"], row["source_hash"]) == fingerprint_file(clip)
    videos = ["big.mp4", "empty.mp4", *names]
    assert requested(sources) == [*sorted(("GET", f"/all/{name}") for name in videos), ("LIST", "")]
    assert peak() < BIG / 8

    for secret in (KEY, SECRET, TOKEN, sources.url.partition("//")[2]):
        assert secret not in done.stdout
        assert files_with(secret, tmp_path, *ray_folder.glob("session_*/logs")) == []

    forbid_ray(monkeypatch)
    sources.reach(monkeypatch)
    sources.requests.clear()
    assert "6 of 6 videos are in the cache already" in said_by(prune, *argv)
    assert requested(sources) == [("LIST", "")]
    sources.requests.clear()
    shown = (cache, names[1], "--html", tmp_path / "page.html", "--video-root", sources.uri())
    assert "with pictures" in said_by(inspect, *shown)
    assert requested(sources) == [("GET", f"/all/{names[1]}")]
    assert files_with(SECRET, tmp_path) == files_with(KEY, tmp_path) == []
    sources.upload(f"all/{names[1]}", b"longer" * 10**6)
    assert "changed since" in said_by(inspect, *shown)


@pytest.mark.parametrize("kind", ["public", "requester"])
def test_workers_read_as_the_driver_decided(sources, one_ray, tmp_path, monkeypatch, kind):
    """The workers have no file of AWS and no variable, and the driver sends no request of its own before theirs."""
    headers, app = [], sources._app

    def record(environ, start):
        headers.append({name: value for name, value in environ.items() if name.startswith("HTTP_")})
        return app(environ, start)

    monkeypatch.setattr(sources, "_app", record)
    key = f"{kind}/a.mp4"
    sources.upload(key, clips()[0].read_bytes())
    sources.client.put_object_acl(Bucket=sources.bucket, Key=key, ACL="public-read")
    headers.clear()
    (tmp_path / "config").write_text(f"[profile mine]\nendpoint_url = {sources.url}\nregion = us-east-1\n")
    (tmp_path / "m.csv").write_text(f"video_id,uri\na,{sources.uri(key)}\n")
    nothing = dict.fromkeys(sources.environment(), "")
    files = {"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    options = {**nothing, **files, "AWS_PROFILE": "mine", "AWS_EC2_METADATA_DISABLED": "true"}
    flags = []
    if kind == "requester":
        flags = ["--s3-requester-pays"]
        options |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    argv = [str(tmp_path / "m.csv"), "--out", str(tmp_path / "c"), "--video-root", sources.uri(), "--num-frames", "4"]
    driver = Driver([*argv, *flags], tmp_path / "log", **options, RAY_ADDRESS=one_ray)
    assert driver.wait() == 0 and TokenCache(tmp_path / "c").video_ids == ["a"], driver.output
    assert ("Sources on S3 are read unsigned" in driver.output) == (kind == "public")
    assert len(headers) == 1  # a GET of a worker
    payer = headers[0].get("HTTP_X_AMZ_REQUEST_PAYER")
    assert ("HTTP_AUTHORIZATION" in headers[0], payer) == ((False, None) if kind == "public" else (True, "requester"))
