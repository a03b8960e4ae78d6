"""A run as the cache alone tells of it: how far it has come, what watching shows, and when that ends."""

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipeline import TokenCache
from pipeline.cache.header import compute_fingerprint
from pipeline.cache.live import Ledger
from pipeline.errors import CorruptShard, NotACache, VideoFault
from pipeline.inspect import watch as watching
from pipeline.inspect.watch import find_latest_run, iter_run_progress, wait_for_cache, watch
from pipeline.runner import claim as claiming
from pipeline.runner import run_record
from pipeline.runner.claim import Claim
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import RunFile
from pipeline.storage.stores import store_at
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.pipeline.pages import shown
from tests.waiting import wait_until

NOW = Progress(item="video", total=4, busy={"decode": 0.97, "encode": 0.41}, waiting={"decode": 3}, bottleneck="decode")


def record(run_id="r2", **more) -> dict[str, object]:
    return {"run_id": run_id, "host": "h", "pid": 7, "videos": 4, **more}


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def write_video(store, run_id: str, video_id: str) -> None:
    write_shard(store, run_id, encoded(video_id, random_tokens(0), 0.25, "gstep"))


def test_it_shows_what_comes_and_ends_with_the_run(tmp_path, pool):
    store, shown = write_header(tmp_path), io.StringIO()
    with Claim(store, "r1", print, heartbeat_s=0.05) as claim:
        console = Console(file=shown, force_terminal=True, width=100)
        watcher = pool.submit(watch, TokenCache(tmp_path), console, 0.05)
        wait_until(lambda: "r1 on " in shown.getvalue() and "is starting" in shown.getvalue(), shown.getvalue)
        with RunFile(store, record("r1")):
            wait_until(lambda: "0 of 4 videos" in shown.getvalue(), shown.getvalue)
            claim.set_progress(NOW)
            wait_until(lambda: "the bottleneck" in shown.getvalue(), shown.getvalue)
            write_video(store, "r1", "a")
            wait_until(lambda: "1 of 4 videos" in shown.getvalue(), shown.getvalue)
    run = watcher.result(60)
    assert (run.status, run.n_done, run.n_videos) == ("finished", 1, 4)
    assert "97%" in shown.getvalue() and "r1 on h (pid 7) finished after" in shown.getvalue()


def test_a_log_gets_a_whole_line_each_time(tmp_path, pool):
    shown, store = io.StringIO(), write_header(tmp_path)
    with Claim(store, "r1", print, heartbeat_s=0.05) as claim, RunFile(store, record("r1")):
        claim.set_progress(NOW)
        watcher = pool.submit(watch, TokenCache(tmp_path), Console(file=shown, width=60), 0.05)
        wait_until(lambda: "0 of 4 videos" in shown.getvalue(), shown.getvalue)
        wait_until(lambda: "busy: " in shown.getvalue(), shown.getvalue)  # a beat later
        write_video(store, "r1", "v0")
        wait_until(lambda: "1 of 4 videos" in shown.getvalue(), shown.getvalue)
    watcher.result(60)
    *lines, last = shown.getvalue().splitlines()
    assert len(lines) > 1 and all(" running for " in line and "videos/s recently" in line for line in lines)
    assert any("busy: decode 97% encode 41% (bottleneck: decode)" in line for line in lines)
    assert "r1 on h (pid 7) finished after" in last and shown.getvalue().endswith("\n")


def test_it_waits_for_a_run_that_begins_the_cache(tmp_path, pool):
    store, said = store_at(str(tmp_path / "c")), list[str]()
    waiter = pool.submit(wait_for_cache, store, said.append, 0.02)
    wait_until(lambda: said, lambda: said)
    store.make()
    with Claim(store, "r1", print):
        with pytest.raises(TimeoutError):
            waiter.result(0.2)  # a note is no cache yet
        write_header(tmp_path / "c")
        waiter.result(60)
    assert len(said) == 1 and "Waiting for a run to begin one" in said[0]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    wait_for_cache(store_at(str(tmp_path / "other")), said.append)  # for another error to say what that is
    assert len(said) == 1


def test_a_run_that_never_begins_its_cache_ends_the_wait(tmp_path, pool):
    store, said = store_at(str(tmp_path)), list[str]()
    with Claim(store, "r1", print):
        waiter = pool.submit(wait_for_cache, store, said.append, 0.02)
        wait_until(lambda: said, lambda: said)
    with pytest.raises(NotACache, match=r"r1.* ended before it began the cache"):
        waiter.result(60)


def test_clocks_that_differ_and_more_videos_than_estimated_give_no_negative_time(written):
    ahead = (datetime.now(UTC) + timedelta(minutes=10)).isoformat()
    RunFile(written, record()).save(status="running", started=ahead)
    with Claim(written, "r2", print):
        assert progress(written).seconds == 0
        RunFile(written, record(videos=1, estimated=True)).save(status="running")
        run, text = progress(written), shown(watching._render(progress(written), 2.0))
    assert run.n_done > run.n_videos and run.describe().endswith("videos/s, no estimate yet")
    assert "2.00 videos/s recently" in text and " left" not in text
    RunFile(written, record()).save(status="finished", started=ahead)
    assert "finished after 0 s" in progress(written).describe()


def test_a_cache_without_runs_has_nothing_to_watch_and_a_damaged_note_is_of_a_run_that_starts(tmp_path):
    store = write_header(tmp_path)
    assert watch(TokenCache(tmp_path), Console(quiet=True)) is None
    store.put(f"{run_record.RUNS}/r9{claiming.NOTE}", b"{")
    assert progress(store).describe() == "r9 on ? (pid 0) is starting"


def test_the_rate_is_that_of_the_last_minute(tmp_path, monkeypatch):
    store, clock = write_header(tmp_path), [1000.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with Claim(store, "r1", print), RunFile(store, record("r1")):
        seen = iter_run_progress(store, compute_fingerprint(TokenCache(tmp_path).identity), 40.0)
        next(seen)
        for number in range(3):
            write_video(store, "r1", f"v{number}")
            run, rate = next(seen)
            assert (run.n_done, rate) == (number + 1, pytest.approx(1 / 40))
        assert next(seen)[1] == 0  # nothing came since


@pytest.fixture
def written(tmp_path):
    """Run r2 has written two videos, one of them failed; r1 wrote another one before."""
    store = write_header(tmp_path)
    write_video(store, "r1", "a")
    good, bad = encoded("b", random_tokens(1), 0.25, "gstep"), encoded_failure("c", VideoFault("crash", "x"))
    write_shard(store, "r2", good, bad)
    RunFile(store, record("r1")).save(status="finished", ended="x")
    return store


def progress(store):
    return find_latest_run(store, Ledger(store).refresh())


@pytest.mark.parametrize(
    ("records", "holder", "said"),
    [
        ([record()], "r2", "2 of 4 videos, 1 failed, 0.02 videos/s"),
        ([record(estimated=True)], "r2", "2 of about 4 videos"),
        ([record("r9"), record()], "r2", "r2 on h (pid 7) running for"),  # clocks of hosts differ: r9 ended before
        ([record()], "r3", "r3 on"),  # which has no record yet
        ([record()], None, "ended without a final record: 2 of 4 videos"),
    ],
    ids=["running", "estimated", "beside-a-later-name", "starting", "gone"],
)
def test_the_run_that_writes_or_is_the_newest_is_told_of(written, monkeypatch, records, holder, said):
    monkeypatch.setattr(claiming, "time", SimpleNamespace(monotonic=lambda: 7.0))  # it took no time to come so far
    claim = Claim(written, holder or "nobody", print)
    started = (datetime.fromisoformat(claim._me["since"]) - timedelta(seconds=100)).isoformat()
    for values in records:
        RunFile(written, values).save(status="running", started=started)
    with nullcontext() if holder is None else claim:
        run = progress(written)
    status = {"r2": "running", "r3": "starting", None: "gone"}[holder]
    assert run.status == status and said in run.describe()
    assert run.describe().endswith("is starting") == (status == "starting")
    if status == "gone":
        fingerprint = compute_fingerprint(TokenCache(str(written)).identity)
        assert [seen.status for seen, _ in iter_run_progress(written, fingerprint, 60)] == ["gone"]  # it ends a watch
    elif status == "running":
        assert (run.n_done, run.n_failed, run.n_videos) == (2, 1, 4) and run.seconds == 100


def test_a_failed_run_and_one_that_a_limit_of_hours_ended_say_why(written, monkeypatch):
    RunFile(written, record(ended_by="--max-hours 1 is reached")).save(status="finished")
    assert progress(written).describe().endswith("of 4 videos, 1 failed: --max-hours 1 is reached")
    times = iter(["2026-01-01T12:00:58+00:00", "2026-01-01T12:01:05+00:00"])
    monkeypatch.setattr(run_record, "format_now", lambda: next(times))
    with pytest.raises(RuntimeError), RunFile(written, record()):
        raise RuntimeError("the disk is full")
    assert "failed after 7 s: 2 of 4 videos, 1 failed: the disk is full" in progress(written).describe()


def test_what_is_no_record_is_named(written):
    written.put("runs/z.json", b"[]")
    with pytest.raises(CorruptShard, match=r"runs/z\.json: not a record"):
        find_latest_run(written, Ledger(written).refresh())
