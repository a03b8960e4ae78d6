"""Disks that fill up and stores that fail for a moment or for good, under whole runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import prune
from pipeline import TokenCache
from pipeline.storage.stores import ObjectStore
from tests.builders.runs import run_here, said_by
from tests.builders.stores import ALWAYS, KEY, FlakyProxy, S3Server
from tests.jobs.faults import OPTIONS, Driver, Visible, files, tiny_videos

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]

PATIENCE_S = 120  # a store that is away for a while has 300 s


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


def test_a_full_disk_ends_the_run_with_the_path_and_the_same_command_goes_on(visible, videos, tmp_path):
    cache = tmp_path / "disk" / "c"
    argv = [str(videos), "--out", str(cache), *OPTIONS]
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", disk]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        full = run_here(prune, argv)
        seconds = time.time() - max(path.stat().st_mtime for path in files(cache, "videos"))
        last = full.stdout.splitlines()[-1]
        assert (full.returncode, seconds < PATIENCE_S) == (1, True), full.stdout
        assert " failed: " in last and "No space left on device" in last and f"{cache}/" in last, last
        assert visible.check(cache)
        assert not list(cache.rglob(".tmp-*"))
        still = run_here(prune, argv)
        assert still.returncode in (1, 2) and str(cache) in still.stdout.splitlines()[-1], still.stdout
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        said_by(prune, *argv)
        visible.assert_complete(cache)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


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


def stop_soon() -> None:
    """Give this driver's last writes less time, so that the tests need not wait as long as an operator."""
    from jobs import command  # noqa: PLC0415 - in the driver's process alone
    from pipeline.runner import run_record, stream  # noqa: PLC0415

    command._SAME_SIGNAL_S = 0.0
    run_record.LAST_WRITES_S, stream._RECORD_S = 3.0, 1.0


@pytest.mark.parametrize("kind", ["stall", 503])
def test_a_stop_ends_with_130_while_the_store_is_away_and_says_what_is_not_written(visible, stopped, kind):
    driver = stopped.driver(kind)
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.wait() == 130, driver.output
    assert "Traceback" not in driver.output and "failed:" not in driver.output
    for line in (
        "finished videos were not written",
        "the record of this run still says",
        "the note of this run was not deleted: ",
        "A run that starts on another machine within 60 s waits that long at most",
        "this run has written rows for ",
    ):
        assert driver.output.count(line) == 1, driver.output
    stopped.proxy.away.clear()
    assert visible.check_rows(stopped.cache())


class Stopped:
    """A cache on a store that goes away below runs."""

    def __init__(self, proxy: FlakyProxy, videos: Path, address: str, folder: Path) -> None:
        self.proxy, self._address, self._folder = proxy, address, folder
        options = ["--decoder", "tests.jobs.hostile:SlowDecoder", "--videos-per-shard", "2", "--decode-workers", "1"]
        self._argv = [str(videos), "--out", proxy.server.uri("stopped"), *OPTIONS, *options]

    def cache(self) -> TokenCache:
        root = self.proxy.server.uri("stopped")
        return TokenCache(root, store=ObjectStore(root, self.proxy.server.objects()))

    def driver(self, kind: int | str, before: Callable[[], None] = stop_soon) -> Driver:
        """Start a run, and let the store be away once it has committed something; return it when it has noticed.

        Then it has work that is not written: it asks for nothing else, but for its note and record.
        """
        environ = self.proxy.environment()
        store = ObjectStore(self.proxy.server.uri("stopped"), self.proxy.server.objects())
        wanted, self.proxy.n_away = len(store.names("videos", ".parquet")) + 1, 0
        driver = Driver(self._argv, self._folder / "log", before, **{**environ, "RAY_ADDRESS": self._address})
        driver.until(lambda: len(store.names("videos", ".parquet")) >= wanted, "a commit")
        self.proxy.away["/stopped/"] = kind
        driver.until(lambda: self.proxy.n_away, "a request that fails")
        return driver


@pytest.fixture
def stopped(proxy, videos, one_ray, tmp_path) -> Iterator[Stopped]:
    yield Stopped(proxy, videos, one_ray, tmp_path)
    proxy.away.clear()  # also after a test that failed


def look_often() -> None:
    """Let this driver read its workers' reports each second, however long a stall may last."""
    from pipeline.runner import watchdog  # noqa: PLC0415 - in the driver's process alone

    watchdog._MAX_LOOK_S = 1.0


def test_an_outage_of_the_corpus_alone_costs_no_video_and_is_said_once(proxy, videos, one_ray, tmp_path):
    """One node, whose workers alone read the corpus."""
    for path in sorted(videos.glob("*.mp4"))[:6]:
        proxy.server.upload(f"corpus/{path.name}", path.read_bytes())
    argv = [proxy.server.uri("corpus/"), "--out", str(tmp_path / "c"), *OPTIONS]
    proxy.away["/corpus/v"] = 503
    try:
        (tmp_path / "log").touch()
        driver = Driver(argv, tmp_path / "log", look_often, **{**proxy.environment(), "RAY_ADDRESS": one_ray})
        driver.until(lambda: "has failed since" in driver.output, "a line about the outage")
        says = f"(bottleneck: no answer from s3://{proxy.server.bucket})"
        driver.until(lambda: says in driver.output, "a line about progress with the store as the bottleneck")
    finally:
        proxy.away.clear()
    assert driver.wait() == 0, driver.output
    assert driver.output.count(f"the store s3://{proxy.server.bucket} has failed since") == 1, driver.output
    assert driver.output.count(f"the store s3://{proxy.server.bucket} answers again") == 1, driver.output
    cache = TokenCache(tmp_path / "c")
    assert [cache.metadata(video_id)["attempts"] for video_id in cache.video_ids] == [1] * 6


def test_a_video_that_could_not_be_read_is_tried_again_at_the_end_and_one_that_is_gone_is_not(proxy, videos, tmp_path):
    """One node, as each task of a Slurm array has."""
    names = [path.name for path in sorted(videos.glob("*.mp4"))[:6]]
    for name in names:
        proxy.server.upload(f"unread/{name}", (videos / name).read_bytes())
    listed = [{"video_id": name, "uri": proxy.server.uri(f"unread/{name}")} for name in (*names, "gone.mp4")]
    pq.write_table(pa.Table.from_pylist(listed), tmp_path / "manifest.parquet")
    argv = [str(tmp_path / "manifest.parquet"), "--out", str(tmp_path / "c"), *OPTIONS, "--max-failed", "1"]
    argv += ["--video-root", proxy.server.uri("unread")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.environment().items():
            patch.setenv(name, value)
        proxy.fail("GET", f"/unread/{names[0]}", 403)
        assert said_by(prune, *argv).count("note: 1 video could not be read (io), but can be found") == 1
        cache = TokenCache(tmp_path / "c")
        assert cache.video_ids == names and cache.failed == {"gone.mp4": "io"}
        assert [cache.metadata(name)["attempts"] for name in names] == [2, *[1] * 5]
        later = said_by(prune, *argv)
    assert "1 video failed for infrastructure reasons (I/O) in earlier runs: --retry-failed tries" in later


def test_a_store_that_refuses_is_asked_once(visible, videos, proxy):
    refused = proxy.fail("PUT", "/refused/tokens/", 403, ALWAYS)
    store, done = run_on(proxy, videos, "refused")
    assert (done.returncode, time.monotonic() - refused.first_at < PATIENCE_S) == (1, True), done.stdout
    last = done.stdout.splitlines()[-1]
    assert store.root in last and "/tokens/" in last and "Told403" in last
    assert KEY not in done.stdout and proxy.url not in done.stdout
    assert 0 < len(refused.paths) == len(set(refused.paths))
    assert store.names("videos", ".parquet") == []
