"""Watching a run from the cache alone: what is shown, and when it ends."""

import io
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline import TokenCache
from pipeline.cache.header import fingerprint
from pipeline.execution.claim import Claim
from pipeline.execution.monitoring.load import Progress
from pipeline.execution.run_record import RunFile
from pipeline.inspect import watch as watching
from pipeline.inspect.watch import looks, watch
from pipeline.storage.stores import store_at
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.s3 import S3Server
from tests.waiting import wait_until

NOW = Progress(
    item="video",
    total=4,
    busy={"decode": 0.97, "encode": 0.41},
    waiting={"decode": 3, "encode": 1},
    bottleneck="decode",
)


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path):
    if request.param == "folder":
        yield write_header(tmp_path)
        return
    with S3Server() as server:
        yield write_header(store_at(server.uri("c"), server.objects()))


def run_file(store) -> RunFile:
    return RunFile(store, {"run_id": "r1", "host": "h", "pid": 7, "videos": 4})


def test_it_shows_what_comes_and_ends_with_the_run(store):
    shown, cache = io.StringIO(), TokenCache(str(store), store=store)
    console = Console(file=shown, force_terminal=True, width=100)
    states = []
    watcher = threading.Thread(target=lambda: states.append(watch(cache, console, 0.05)))
    with Claim(store, "r1", print, heartbeat_s=0.05) as claim:
        watcher.start()
        wait_until(lambda: "r1 on " in shown.getvalue() and "is starting" in shown.getvalue(), shown.getvalue)
        with run_file(store):
            wait_until(lambda: "0 of 4 videos" in shown.getvalue(), shown.getvalue)
            claim.tell(NOW)
            wait_until(lambda: "the bottleneck" in shown.getvalue(), shown.getvalue)
            write_shard(store, "r1", encoded("a", random_tokens(0), 0.25, "gstep"))
            wait_until(lambda: "1 of 4 videos" in shown.getvalue(), shown.getvalue)
    watcher.join(timeout=60)
    (run,) = states
    assert (run.status, run.n_done, run.n_videos) == ("finished", 1, 4)
    assert "97%" in shown.getvalue() and "r1 on h (pid 7) finished after" in shown.getvalue()


def test_a_run_that_is_gone_ends_it(store):
    run_file(store).save(status="running")
    cache = TokenCache(str(store), store=store)
    ((run, _),) = looks(store, fingerprint(cache.identity), 60)
    assert run.status == "gone"


def test_a_log_gets_the_last_state_as_whole_lines(tmp_path):
    shown, store = io.StringIO(), write_header(tmp_path)
    run_file(store).save(status="running")
    watch(TokenCache(tmp_path), Console(file=shown, width=200))
    assert "ended without a final record" in shown.getvalue() and shown.getvalue().endswith("\n")


def test_a_cache_without_runs_has_nothing_to_watch(tmp_path):
    write_header(tmp_path)
    assert watch(TokenCache(tmp_path), Console(quiet=True)) is None


def test_the_rate_is_that_of_the_last_minute(tmp_path, monkeypatch):
    store, clock = write_header(tmp_path), [1000.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with Claim(store, "r1", print), run_file(store):
        seen = looks(store, fingerprint(TokenCache(tmp_path).identity), 40.0)
        next(seen)
        for number in range(3):
            write_shard(store, "r1", encoded(f"v{number}", random_tokens(number), 0.25, "gstep"))
            run, rate = next(seen)
            assert (run.n_done, rate) == (number + 1, pytest.approx(1 / 40))
        assert next(seen)[1] == 0  # nothing came since
