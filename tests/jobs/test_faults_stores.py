"""Disks that fill up and stores that fail for a moment or for good, under whole runs."""

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jobs import prune
from pipeline import TokenCache
from pipeline.store import ObjectStore
from tests.jobs.faults import Visible, files, tiny_videos, wait_until
from tests.jobs.jobs import run_here
from tests.jobs.processes import family
from tests.pipeline.flaky import FlakyProxy
from tests.pipeline.rays import ray_here
from tests.pipeline.s3 import S3Server

pytestmark = pytest.mark.slow

OPTIONS = ["--num-frames", "2", "--log-interval", "5"]
PATIENCE_S = 30


@pytest.fixture(scope="module")
def cluster():
    with ray_here({"num_cpus": 2}):
        yield


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    tiny_videos(folder, 64)
    return folder


@pytest.fixture(scope="module")
def visible(cluster, videos, tmp_path_factory) -> Visible:
    """What an undisturbed run makes of the videos."""
    reference = tmp_path_factory.mktemp("undisturbed") / "c"
    done = run_here(prune, [str(videos), "--out", str(reference), *OPTIONS])
    assert done.returncode == 0, done.stdout
    return Visible(reference)


@pytest.fixture(scope="module")
def proxy():
    with S3Server("faults") as server, FlakyProxy(server) as proxy:
        yield proxy


def run_on(proxy: FlakyProxy, videos: Path, prefix: str) -> tuple[ObjectStore, subprocess.CompletedProcess[str]]:
    """A run into the cache below ``prefix``: (its store without the proxy, how it ended)."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.environment().items():
            patch.setenv(name, value)
        done = run_here(prune, [str(videos), "--out", proxy.server.uri(prefix), *OPTIONS])
    return ObjectStore(proxy.server.uri(prefix), proxy.server.objects()), done


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if sys.platform != "linux" or subprocess.run(mount, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs; the limit of file sizes is tested all the same")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_ends_the_run_with_the_path_and_the_rerun_completes(visible, videos, tmp_path):
    cache = tmp_path / "disk" / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS]
    with tmpfs(tmp_path / "disk", "800k"):
        full = run_here(prune, argv)
        seconds = time.time() - max(path.stat().st_mtime for path in files(cache, "videos"))
        last = full.stdout.splitlines()[-1]
        assert (full.returncode, seconds < PATIENCE_S) == (1, True), full.stdout
        assert last.startswith("failed: ") and "No space left on device" in last and f"{cache}/" in last, last
        half = visible.check(cache)
        assert len(half) > 0
        still = run_here(prune, argv)
        assert still.returncode in (1, 2) and str(cache) in still.stdout.splitlines()[-1], still.stdout
        assert len(visible.check(cache)) >= len(half)
        subprocess.run(["mount", "-o", "remount,size=64m", tmp_path / "disk"], check=True)
        done = run_here(prune, argv)
        assert done.returncode == 0, done.stdout
        visible.assert_complete(cache)


def test_a_writer_that_may_write_no_more_ends_the_run_with_the_path(visible, videos, tmp_path):
    """A limit of the system's, set on the running process: the next shard breaks off in the middle."""
    cache = tmp_path / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS]
    limited = []

    def limit() -> None:
        wait_until(lambda: files(cache, "videos"), "the first commit")
        for pid, title in family(os.getpid()).items():
            if title.startswith("ray::MapWorker(MapBatches(Writer"):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))
                limited.append(time.monotonic())

    thread = threading.Thread(target=limit)
    thread.start()
    failed = run_here(prune, argv)
    thread.join()
    last = failed.stdout.splitlines()[-1]
    assert (failed.returncode, time.monotonic() - limited[0] < PATIENCE_S) == (1, True), failed.stdout
    assert "File too large" in last and f"{cache}/tokens/" in last, last
    assert len(visible.check(cache)) > 0
    assert not list(cache.rglob(".tmp-*"))
    done = run_here(prune, argv)
    assert done.returncode == 0, done.stdout
    visible.assert_complete(cache)


def test_a_store_that_is_busy_three_times_is_asked_again(visible, videos, proxy):
    places = [("PUT", part) for part in ("/busy/.lock-", "/busy/cache.json", "/busy/tokens/", "/busy/videos/")]
    faults = [proxy.fail(method, part, 503, 3) for method, part in [*places, ("GET", "/busy/cache.json")]]
    store, done = run_on(proxy, videos, "busy")
    assert done.returncode == 0, done.stdout
    assert [fault.met for fault in faults] == [3] * len(faults)
    assert len(visible.check_rows(TokenCache(store.root, store=store))) == len(list(videos.glob("*.mp4")))


def test_a_reply_that_is_lost_and_an_upload_that_breaks_off_leave_one_copy(visible, videos, proxy):
    parts = ("/lost/.lock-", "/lost/cache.json", "/lost/runs/", "/lost/tokens/", "/lost/videos/")
    faults = [proxy.fail("PUT", part, "lost") for part in parts]
    faults += [proxy.fail("PUT", f"/lost/{part}/", "cut") for part in ("tokens", "videos")]
    store, done = run_on(proxy, videos, "lost")
    assert done.returncode == 0, done.stdout
    assert [fault.met for fault in faults] == [1] * len(faults)
    assert len(visible.check_rows(TokenCache(store.root, store=store))) == len(list(videos.glob("*.mp4")))
    assert "Uploads" not in proxy.server.client.list_multipart_uploads(Bucket=proxy.server.bucket)


def test_a_store_that_refuses_is_asked_once(visible, videos, proxy):
    refused = proxy.fail("PUT", "/refused/tokens/", 403, times=100)
    started = time.monotonic()
    store, done = run_on(proxy, videos, "refused")
    assert (done.returncode, time.monotonic() - started < PATIENCE_S) == (1, True), done.stdout
    assert store.root in done.stdout.splitlines()[-1] and "/tokens/" in done.stdout.splitlines()[-1]
    assert refused.met <= 2  # a shard each that the writer had in hand
    assert store.names("videos", ".parquet") == []
