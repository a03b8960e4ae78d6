"""The last writes before an error leaves a run: one bound for all, and nothing raised."""

import threading
from functools import partial
from types import SimpleNamespace

from pipeline.runner import run_record
from pipeline.runner.run_record import NO_ANSWER, compute_seconds_left, write_last


def test_a_write_is_done_or_says_why_not():
    ending, done = KeyboardInterrupt(), list[int]()
    assert write_last(ending, lambda: done.append(1)) == "" and done == [1]

    def fail(error: BaseException) -> None:
        raise error

    assert "Input/output error" in write_last(ending, partial(fail, OSError(5, "Input/output error", "s3://b/x")))
    for silent in (TimeoutError(), KeyboardInterrupt()):
        assert write_last(ending, partial(fail, silent)) == type(silent).__name__


def test_writes_that_hang_share_one_bound_and_leave_a_part_to_others(monkeypatch):
    now = 0.0

    class Thread(threading.Thread):
        """Real, but a wait for its end takes time by the clock of this test alone."""

        def join(self, timeout: float | None = None) -> None:
            nonlocal now
            assert timeout is not None
            now += timeout

    monkeypatch.setattr(run_record, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(run_record, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(run_record, "LAST_WRITES_S", 8.0)
    ending, forever = KeyboardInterrupt(), threading.Event()
    try:
        assert write_last(ending, forever.wait, spare_s=3.0) == NO_ANSWER
        assert (now, compute_seconds_left(ending)) == (5.0, 3.0)
        assert [write_last(ending, forever.wait) for _ in range(5)] == [NO_ANSWER] * 5
        assert (now, compute_seconds_left(ending), compute_seconds_left(KeyboardInterrupt())) == (8.0, 0.0, 8.0)
    finally:
        forever.set()
