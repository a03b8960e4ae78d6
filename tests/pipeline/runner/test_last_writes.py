"""The last writes before an error leaves a run: one bound for all, and nothing raised."""

import threading
from functools import partial

from pipeline.runner import last_writes
from pipeline.runner.last_writes import NO_ANSWER, seconds_left, write_last


def test_a_write_is_done_or_says_why_not():
    ending, done = KeyboardInterrupt(), list[int]()
    assert write_last(ending, lambda: done.append(1)) == "" and done == [1]

    def fail(error: BaseException) -> None:
        raise error

    assert "Input/output error" in write_last(ending, partial(fail, OSError(5, "Input/output error", "s3://b/x")))
    for silent in (TimeoutError(), KeyboardInterrupt()):
        assert write_last(ending, partial(fail, silent)) == type(silent).__name__


def test_writes_that_hang_share_one_bound_and_leave_a_part_to_others(monkeypatch):
    monkeypatch.setattr(last_writes, "LAST_WRITES_S", 0.5)
    ending, forever = KeyboardInterrupt(), threading.Event()
    try:
        assert write_last(ending, forever.wait, spare_s=0.3) == NO_ANSWER
        assert seconds_left(ending) > 0
        assert [write_last(ending, forever.wait) for _ in range(5)] == [NO_ANSWER] * 5
        assert seconds_left(ending) == 0 < seconds_left(KeyboardInterrupt()) <= 0.5
    finally:
        forever.set()
