"""How far a run has come, told from the cache alone."""

from datetime import UTC, datetime, timedelta

import pytest

from pipeline.cache.ledger import Ledger
from pipeline.errors import CorruptShard, VideoFault
from pipeline.execution.claim import Claim
from pipeline.execution.run_record import RunFile
from pipeline.inspect.run_progress import latest_run
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard


@pytest.fixture
def store(tmp_path):
    """Run r2 has written two videos, one of them failed; r1 wrote another one before."""
    store = write_header(tmp_path)
    write_shard(store, "r1", encoded("a", random_tokens(0), 0.25, "gstep"))
    good, bad = encoded("b", random_tokens(1), 0.25, "gstep"), encoded_failure("c", VideoFault("crash", "x"))
    write_shard(store, "r2", good, bad)
    RunFile(store, {"run_id": "r1", "host": "h", "pid": 1, "videos": 1}).save(status="finished", ended="x")
    return store


def record(**more) -> dict[str, object]:
    return {"run_id": "r2", "host": "h", "pid": 7, "videos": 10, **more}


def progress(store):
    run = latest_run(store, Ledger(store).refresh())
    assert run is not None and run.run_id == "r2"
    return run


def test_a_running_run_tells_its_rate_and_what_is_left(store):
    started = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    RunFile(store, record()).save(status="running", started=started)
    with Claim(store, "r2", print):
        run = progress(store)
    assert (run.status, run.n_done, run.n_failed, run.n_videos) == ("running", 2, 1, 10)
    assert run.seconds == pytest.approx(100, abs=20)
    assert "running for" in run.describe() and "2 of 10 videos, 1 failed, 0.02 videos/s" in run.describe()


def test_a_run_that_holds_the_cache_no_more_is_gone(store):
    RunFile(store, record()).save(status="running")
    assert "ended without a final record: 2 of 10 videos" in progress(store).describe()


def test_a_run_that_has_written_no_record_yet_is_starting(store):
    RunFile(store, record()).save(status="running")
    with Claim(store, "r3", print):
        run = latest_run(store, Ledger(store).refresh())
    assert run is not None and run.describe().startswith("r3 on ") and run.describe().endswith("is starting")


def test_the_run_that_writes_is_told_of_whatever_the_names_of_others_are(store):
    """Clocks of hosts differ: a run that ended before may have a later name."""
    RunFile(store, record(run_id="r9")).save(status="running")
    RunFile(store, record()).save(status="running")
    with Claim(store, "r2", print):
        assert "2 of 10 videos" in progress(store).describe()


@pytest.mark.parametrize("text", [b"{}", b"[]", b"no json"])
def test_what_is_no_record_is_named(store, text):
    store.put("runs/z.json", text)
    with pytest.raises(CorruptShard, match=r"runs/z\.json: it is no record"):
        latest_run(store, Ledger(store).refresh())


def test_a_failed_run_says_why(store):
    with pytest.raises(RuntimeError), RunFile(store, record()):
        raise RuntimeError("the disk is full")
    assert "failed after 0 s: 2 of 10 videos, 1 failed: the disk is full" in progress(store).describe()


def test_a_cache_without_runs(tmp_path):
    store = write_header(tmp_path)
    assert latest_run(store, Ledger(store).refresh()) is None
