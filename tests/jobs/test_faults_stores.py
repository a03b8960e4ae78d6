"""Disks that fill up and stores that fail for a moment or for good, under whole runs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jobs import prune
from pipeline import TokenCache
from pipeline.storage.stores import ObjectStore
from tests.jobs.faults import OPTIONS, Visible, files, tiny_videos
from tests.jobs.jobs import run_here
from tests.jobs.processes import family
from tests.pipeline.flaky import ALWAYS, FlakyProxy
from tests.pipeline.rays import ray_here
from tests.pipeline.s3 import KEY, S3Server
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

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
def visible(videos) -> Visible:
    return Visible(videos)


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


class SmallDisk:
    """A folder on a disk of 800 kB; where this user may not mount one, a writer that may write no files of a shard.

    Use it as a context manager; ``grow`` makes room.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._grown = threading.Event()

    def __enter__(self) -> SmallDisk:
        self.place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", self.place]
        able = sys.platform == "linux" and shutil.which("mount") is not None
        self.mounted = able and subprocess.run(command, check=False).returncode == 0
        self.told = "No space left on device" if self.mounted else "File too large"
        if not self.mounted:
            threading.Thread(target=self._limit, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grown.set()
        if self.mounted:
            subprocess.run(["umount", "-l", self.place], check=True)

    def grow(self) -> None:
        self._grown.set()
        if self.mounted:
            subprocess.run(["mount", "-o", "remount,size=64m", self.place], check=True)

    def _limit(self) -> None:
        """A limit of the system's on every writer, once something was committed."""
        wait_until(lambda: list(self.place.rglob("videos/*.parquet")), "the first commit")
        while not self._grown.wait(0.02):
            for pid, title in family(os.getpid()).items():
                if title.startswith("ray::Writer"):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_full_disk_ends_the_run_with_the_path_and_the_same_command_goes_on(visible, videos, tmp_path):
    cache = tmp_path / "disk" / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS]
    with SmallDisk(tmp_path / "disk") as disk:
        full = run_here(prune, argv)
        seconds = time.time() - max(path.stat().st_mtime for path in files(cache, "videos"))
        last = full.stdout.splitlines()[-1]
        assert (full.returncode, seconds < PATIENCE_S) == (1, True), full.stdout
        assert " failed: " in last and disk.told in last and f"{cache}/" in last, last
        assert visible.check(cache)
        assert not list(cache.rglob(".tmp-*"))
        if disk.mounted:
            still = run_here(prune, argv)
            assert still.returncode in (1, 2) and str(cache) in still.stdout.splitlines()[-1], still.stdout
        disk.grow()
        done = run_here(prune, argv)
        assert done.returncode == 0, done.stdout
        visible.assert_complete(cache)


def test_a_store_that_is_busy_loses_replies_and_breaks_off_has_one_copy_of_all(visible, videos, proxy):
    """Each fault hits one object: 503 three times, a PUT without a reply, a PUT that ends in the middle."""
    faults = [proxy.fail("PUT", f"/flaky/{name}", 503, 3) for name in ("runs/", "cache.json", "tokens/", "videos/")]
    faults += [proxy.fail("PUT", f"/flaky/{name}", "lost") for name in ("runs/", "tokens/", "videos/")]
    faults += [proxy.fail("PUT", f"/flaky/{name}", "cut") for name in ("tokens/", "videos/")]
    faults += [proxy.fail("GET", "/flaky/cache.json", 503, 3)]
    store, done = run_on(proxy, videos, "flaky")
    assert done.returncode == 0, done.stdout
    assert [len(fault.paths) for fault in faults] == [fault.times for fault in faults]
    assert sorted(visible.check_rows(TokenCache(store.root, store=store))) == visible.ids
    assert "Uploads" not in proxy.server.client.list_multipart_uploads(Bucket=proxy.server.bucket)


def test_a_store_that_refuses_is_asked_once(visible, videos, proxy):
    refused = proxy.fail("PUT", "/refused/tokens/", 403, ALWAYS)
    store, done = run_on(proxy, videos, "refused")
    assert (done.returncode, time.monotonic() - refused.first_at < PATIENCE_S) == (1, True), done.stdout
    last = done.stdout.splitlines()[-1]
    assert store.root in last and "/tokens/" in last and "Told403" in last
    assert KEY not in done.stdout and proxy.url not in done.stdout
    assert 0 < len(refused.paths) == len(set(refused.paths))
    assert store.names("videos", ".parquet") == []
