"""The record of a run, how the run ended, and the last writes before an error leaves it."""

import json
import re
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from pipeline.errors import FAULTS, UsageError
from pipeline.runner import run_record
from pipeline.runner.run_record import (
    NO_ANSWER,
    Outcome,
    RunFile,
    check_out_folder,
    compute_seconds_left,
    count_failures,
    make_run_id,
    write_last,
)
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.runs import printed


def read(store: LocalStore) -> dict[str, object]:
    return json.loads(store.read("runs/r1.json"))


class Away(LocalStore):
    """A store that takes nothing once ``away`` is set."""

    away = False

    def put(self, name, data):
        if self.away:
            raise OSError(5, "Input/output error")
        super().put(name, data)


def test_a_run_is_running_and_then_finished(tmp_path):
    store = LocalStore(tmp_path)
    run_file = RunFile(store, {"run_id": "r1", "host": "h"})
    assert not store.exists("runs/r1.json")
    with run_file:
        running = read(store)
        assert (running["status"], running["host"]) == ("running", "h") and "ended" not in running
        run_file.save(device="cpu")
        assert read(store)["device"] == "cpu"
    ended = read(store)
    assert (ended["status"], ended["error"], ended["device"]) == ("finished", None, "cpu")
    assert running["started"] == ended["started"] <= ended["ended"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(RuntimeError("torn\x1b[31m"), "failed", "torn"), (KeyboardInterrupt(), "cancelled", "")],
)
def test_what_ended_it_is_recorded_and_raised(tmp_path, error, status, said):
    store = LocalStore(tmp_path)
    with pytest.raises(type(error)), RunFile(store, {"run_id": "r1"}):
        raise error
    record = read(store)
    assert record["status"] == status and record["error"].startswith(said) and "\x1b" not in record["error"]


def test_a_store_that_is_away_hides_nothing_and_is_not_hidden(tmp_path):
    store = Away(tmp_path)
    with pytest.raises(RuntimeError, match="the run's own"), RunFile(store, {"run_id": "r1"}):
        store.away = True
        raise RuntimeError("the run's own")
    store.away = False
    with pytest.raises(OSError, match="Input/output"), RunFile(store, {"run_id": "r1"}):
        store.away = True


def test_names_of_runs_differ_and_sort_by_their_time():
    names = [make_run_id() for _ in range(50)]
    assert len(set(names)) == 50
    assert all(re.fullmatch(r"\d{8}T\d{9}Z-[0-9a-f]{6}", name) for name in names)
    times = [name.partition("-")[0] for name in names]
    assert times == sorted(times)


NONE = {"n_ok": 10, "failures": {}, "examples": {}, "n_missing": 0}
UPLOADED = {"runtime_env": {"working_dir": "gcs://_ray_pkg_1.zip"}}


@pytest.mark.parametrize(
    ("out", "job"), [("cache", {"runtime_env": {}}), ("cache", {}), ("cache", None), ("/mnt/cache", UPLOADED)]
)
def test_a_relative_place_in_an_uploaded_folder_would_be_lost(monkeypatch, out, job):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(UPLOADED))
    with pytest.raises(UsageError, match=r"--out cache: .*name an absolute path"):
        check_out_folder(LocalStore("cache"))
    check_out_folder(ObjectStore("s3://bucket/cache", Objects()))
    if job is None:
        monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR")
    else:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    check_out_folder(LocalStore(out))


@pytest.mark.parametrize(
    ("counts", "limit", "code"),
    [
        ({}, 0, 0),
        ({"n_missing": 1}, 5, 1),
        ({"n_ok": 0}, 5, 1),
        ({"n_waiting": 3}, 0, 0),
        ({"failures": {"corrupt": 2}}, 2, 0),
        ({"failures": {"corrupt": 2, "io": 1}}, 2, 1),
        ({"failures": {"internal": 1}}, 5, 1),
        ({"n_new": 4, "n_new_failed": 3}, 2, 1),  # redone in vain: earlier results are in place
        ({"n_new": 4, "n_new_failed": 2}, 2, 0),
    ],
)
def test_the_exit_code_follows_from_the_counts_of_a_run(counts, limit, code):
    assert Outcome(**{**NONE, **counts}).exit_code(limit) == code


@pytest.mark.parametrize(
    ("counts", "troubles"),
    [
        ({}, []),
        ({"failures": {"io": 2}, "examples": {"io": ("a", "gone")}}, ["2 of 10 videos failed (2 io), e.g. a: gone"]),
        ({"n_new_failed": 2}, ["2 videos failed in this run, which keep earlier results"]),
        ({"n_ok": 0, "n_missing": 10}, ["10 of 10 videos have no row", "no video has a result"]),
    ],
)
def test_every_trouble_of_a_run_is_named(counts, troubles):
    assert list(Outcome(**{**NONE, **counts}).iter_troubles("video", 10)) == troubles


def test_a_run_that_was_ended_before_its_first_row_does_not_say_that_nothing_is_to_do():
    none = Outcome(n_ok=0, failures={}, examples={}, n_missing=0, n_waiting=4, wall_s=2.0)
    assert none.pace("video") == "no video was done before the run ended"
    assert replace(none, n_ok=4, n_waiting=0).pace("video") == "nothing to do: every video has a row already"


def test_failures_are_counted_with_their_first_example():
    kinds = {"a": "io", "b": "corrupt", "c": "corrupt"}
    names = ("video_id", "error_class", "error_message")
    rows = [dict(zip(names, (name, kind, f"{name} is {kind}"), strict=True)) for name, kind in kinds.items()]
    failures, examples = count_failures(rows, "video_id")
    assert list(failures.items()) == [("corrupt", 2), ("io", 1)]
    assert examples == {"corrupt": ("b", "b is corrupt"), "io": ("a", "a is io")}
    assert count_failures([], "video_id") == ({}, {})


def test_the_table_names_the_remedy_and_takes_no_id_for_markup():
    examples = {"io": ("[red]a[/red].mp4", "gone"), "strange": ("b.mp4", "?")}
    ended = Outcome(n_ok=1, failures={"io": 2, "strange": 1}, n_missing=0, examples=examples)
    said = printed(ended.make_failures_table("video", FAULTS), 300)
    assert "failed videos" in said and "[red]a[/red].mp4: gone" in said and FAULTS["io"].remedy in said
    assert "b.mp4: ?" in said


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
