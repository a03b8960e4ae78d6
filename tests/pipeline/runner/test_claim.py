"""Notes of runs: a second run is refused while the first lives, and no run that is gone holds anybody up."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pipeline.errors import CacheLocked, UsageError
from pipeline.runner import claim
from pipeline.runner.claim import Claim, find_holder
from pipeline.storage.stores import LocalStore, ObjectStore, Store
from tests.waiting import wait_until

BEAT = 0.05


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, server) -> Store:
    if request.param == "folder":
        return LocalStore(tmp_path)
    return ObjectStore(server.uri(request.node.name), server.objects())


def note_of(store: Store, run_id: str = "r1", **facts: object) -> None:
    """The note of a run on another machine."""
    said = {"run_id": run_id, "host": "elsewhere", "pid": 1, "namespace": "x", "checked": True, "beat": 3, **facts}
    store.put(f"runs/{run_id}.running", json.dumps(said).encode())


def test_a_second_run_is_refused_by_name_and_the_first_leaves_nothing(store):
    with Claim(store, "r1", print):
        found = find_holder(store)
        assert found is not None and (found["run_id"], found["pid"]) == ("r1", os.getpid())
        refuse(store, match=rf'"pid": {os.getpid()}, "run_id": "r1".*--join allows concurrent runs')
        with Claim(store, "r3", print, join=True):
            assert len(store.names("runs", ".running")) == 2
    assert store.names("runs", ".running") == [] and find_holder(store) is None


def looked_at(store: Store, first: Callable[[], object]) -> Mock:
    """A store in which ``first`` happens before notes are listed, behind the first beat of the run that looks."""
    other = Mock(wraps=store, folder=store.folder)
    other.names.side_effect = lambda *of: [first(), store.names(*of)][1]
    return other


def refuse(store: Store, say: Callable[[str], object] = print, match: str | None = None) -> None:
    """Assert that a second run is refused here."""
    with pytest.raises(CacheLocked, match=match):
        Claim(store, "r2", say).__enter__()


def test_of_two_that_come_together_one_goes_on(store):
    """Both have put their notes before either looks."""
    refused = Mock(side_effect=lambda: refuse(store))
    with Claim(looked_at(store, refused), "r1", print):
        assert refused.call_count == 1


def test_a_note_without_signs_of_life_is_forgotten(store):
    """Also one that is no note."""
    said: list[str] = []
    with Claim(looked_at(store, lambda: note_of(store)), "r2", said.append, heartbeat_s=BEAT):
        assert store.names("runs", ".running") == ["runs/r2.running"]
    assert len(said) == 1 and '"host": "elsewhere"' in said[0] and "for a sign of life" in said[0]
    store.put("runs/r1.running", b"[")
    with Claim(store, "r2", print, heartbeat_s=BEAT):
        assert store.names("runs", ".running") == ["runs/r2.running"]


def test_a_sign_of_life_refuses(store, monkeypatch):
    monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    note_of(store)
    refuse(store, lambda line: note_of(store, beat=4), "elsewhere")
    assert store.names("runs", ".running") == ["runs/r1.running"]


def test_it_shows_signs_of_life(store):
    with Claim(store, "r1", print, heartbeat_s=BEAT):
        first = find_holder(store)
        assert first is not None
        wait_until(lambda: (find_holder(store) or first)["beat"] > first["beat"] + 1, "beats")


def claimed(folder: str) -> None:
    with Claim(LocalStore(folder), "killed", print, heartbeat_s=BEAT):
        signal.pause()


@pytest.fixture
def claimant(tmp_path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process of this machine that holds a claim on the folder."""
    process = multiprocessing.get_context("fork").Process(target=claimed, args=(str(tmp_path),))
    process.start()
    wait_until(lambda: (find_holder(LocalStore(tmp_path)) or {}).get("checked"), "its note")
    yield process
    process.kill()
    process.join()


def test_a_killed_run_of_this_machine_holds_nobody_up_and_a_living_one_does_whatever_the_clock(claimant, tmp_path):
    note = tmp_path / "runs" / "killed.running"
    for days in (0, -1):
        shift(note, days)
        refuse(LocalStore(tmp_path), match=f'"pid": {claimant.pid}')
    assert find_holder(LocalStore(tmp_path)) is not None
    claimant.kill()
    claimant.join()
    said: list[str] = []
    assert find_holder(LocalStore(tmp_path)) is None
    with Claim(LocalStore(tmp_path), "r2", said.append):
        assert said == [] and not note.exists()


def shift(note: Path, days: int) -> None:
    """Let a note look as if the clock had jumped since it was written."""
    os.utime(note, (time.time() + 86400 * days,) * 2)


def test_a_clock_that_jumps_back_lets_nobody_wait_for_a_day(tmp_path):
    note_of(LocalStore(tmp_path))
    shift(tmp_path / "runs" / "r1.running", 1)
    said: list[str] = []
    with Claim(LocalStore(tmp_path), "r2", said.append, heartbeat_s=0.1):
        assert not (tmp_path / "runs" / "r1.running").exists()
    assert "waiting 1 s for a sign of life" in said[0]


def test_a_place_that_takes_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nothing can be written here"):
        Claim(copy(LocalStore(tmp_path / "gone")), "r", print).__enter__()  # a worker has a copy
    assert not (tmp_path / "gone").exists()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "runs").write_text("a file")
    with pytest.raises(UsageError, match="nothing can be written here"):
        Claim(LocalStore(tmp_path / "c"), "r", print).__enter__()


def test_notes_are_nothing_that_takes_a_place(tmp_path):
    with Claim(LocalStore(tmp_path), "r", print):
        assert not LocalStore(tmp_path).has_other_files()
    (Path(tmp_path) / "runs" / "mine.txt").write_text("x")
    assert LocalStore(tmp_path).has_other_files()
