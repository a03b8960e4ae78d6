"""Three writers and a merger whose requests are lost after success, come late, twice and in another order.

Once on S3 with threads, through a proxy; and once step by step: the order of requests is drawn from a seed, and the
live rows are held against a model after each of them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from pipeline import TokenCache
from pipeline.cache.merging import merge
from pipeline.cache.schema import VIDEOS
from pipeline.cache.table import table_files
from pipeline.errors import CorruptShard
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.pipeline.cache.test_merging import Model, Row, commit_rows, draw_rows, live_in
from tests.pipeline.caches import limit_merges, write_header
from tests.pipeline.flaky import FlakyProxy
from tests.pipeline.s3 import S3Server

COMMITS = 12  # of each writer
NOW = timedelta(0)


@pytest.fixture(scope="module")
def proxy():
    with S3Server("history") as server, FlakyProxy(server) as proxy:
        yield proxy


class History:
    """What writers have committed to a place, and the threads that write and merge there through a proxy."""

    def __init__(self, proxy: FlakyProxy, place: str) -> None:
        self.model, self.faults = Model(), list[BaseException]()
        self._proxy, self._place = proxy, place
        self._ended, self._lock = threading.Event(), threading.Lock()

    def run(self, writers: int, mergers: int) -> None:
        writing = [threading.Thread(target=self._write, args=(number,)) for number in range(writers)]
        merging = [threading.Thread(target=self._merge, args=(number,)) for number in range(mergers)]
        for thread in (*writing, *merging):
            thread.start()
        for thread in writing:
            thread.join()
        self._ended.set()
        for thread in merging:
            thread.join()

    def _write(self, number: int) -> None:
        draw, store = random.Random(number), ObjectStore(self._place, self._proxy.objects())
        for step in range(COMMITS):
            run = f"w{number}.{step}"
            rows: list[Row] = draw_rows(draw, run)
            commit_rows(store, run, rows)
            with self._lock:
                self.model.rows += rows
            if draw.random() < 0.3:  # the same once more, perhaps after it was merged away
                time.sleep(draw.random() * 0.2)
                commit_rows(store, run, rows)

    def _merge(self, number: int) -> None:
        draw, store = random.Random(number), ObjectStore(self._place, self._proxy.objects())
        while not self._ended.is_set():
            try:
                merge(store, None, everything=draw.random() < 0.5, keep=NOW)
            except FileNotFoundError:  # the other merger deleted it
                continue
            except (OSError, CorruptShard) as error:
                self.faults.append(error)
                return


@pytest.mark.slow
def test_the_live_rows_are_the_model_s_whatever_the_store_does_to_requests(proxy):
    place = proxy.server.uri("history")
    sound = write_header(ObjectStore(place, proxy.server.objects()))
    hit = [
        proxy.fail(method, f"/history/{VIDEOS}/", kind)  # one object each
        for _ in range(4)
        for method, kind in (("PUT", "lost"), ("DELETE", "lost"), ("PUT", "cut"), ("GET", 503), ("DELETE", 503))
    ]
    history = History(proxy, place)
    history.run(writers=3, mergers=2)
    model = history.model.live()
    assert not history.faults, history.faults
    assert sum(bool(fault.paths) for fault in hit) > 12
    assert len(history.model.rows) > 3 * COMMITS and live_in(sound) == model
    for _ in range(3):
        merge(sound, None, everything=True, keep=NOW)
    assert live_in(sound) == model and len(table_files(sound)) == 1
    cache = TokenCache(sound.root, store=sound)
    assert {name: cache.metadata(name)["run_id"] for name in model} == {name: row[2] for name, row in model.items()}


class Killed(BaseException):
    """The process ends in mid-request."""


class Steps:
    """Runs actors one request at a time, the next of them drawn from a seed; holds the rows against a model between.

    What a request changes may come twice, or late: after others, when its sender has long tried again.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder, self.model = random.Random(seed), folder, Model()
        self.rows: dict[str, list[Row]] = {}  # what a small file holds, by its name
        self._late: list[Callable[[], None]] = []
        self._changed = True  # since the rows were last compared
        self._turn: dict[threading.Thread, threading.Semaphore] = {}
        self._yielded = threading.Semaphore(0)

    def wait_for_turn(self) -> None:
        """Called by an actor before each of its requests. Raises Killed."""
        self._yielded.release()
        self._turn[threading.current_thread()].acquire()
        if self.draw.random() < 0.03:
            raise Killed

    def change(self, act: Callable[[], None]) -> None:
        """Carry out a change as a store may: at once; twice, as the reply was lost; or again at any time later."""
        kind = self.draw.choice(["once", "once", "twice", "late"])
        self._do(act)
        if kind == "twice":
            self.wait_for_turn()
            self._do(act)
        elif kind == "late":
            self._late.append(act)

    def put_was_done(self, name: str) -> None:
        self.model.rows += self.rows.get(name, [])

    def run(self, *actors: Callable[[LocalStore], None]) -> None:
        for actor in actors:
            thread = threading.Thread(target=self._act, args=(actor,), daemon=True)
            self._turn[thread] = threading.Semaphore(0)
            thread.start()
            self._yielded.acquire()
        while self._turn:
            self._turn[self.draw.choice(list(self._turn))].release()
            self._yielded.acquire()
            if self._late and self.draw.random() < 0.2:
                self._do(self._late.pop(self.draw.randrange(len(self._late))))
            self.check()
        while self._late:
            self._do(self._late.pop())
            self.check()

    def check(self) -> None:
        if self._changed:
            assert live_in(LocalStore(self.folder)) == self.model.live()
        self._changed = False

    def _do(self, act: Callable[[], None]) -> None:
        self._changed = True
        act()

    def _act(self, actor: Callable[[LocalStore], None]) -> None:
        with suppress(Killed):
            self.wait_for_turn()
            actor(Stepped(self))
        del self._turn[threading.current_thread()]
        self._yielded.release()


class Stepped(LocalStore):
    """A folder of which one actor's requests are steps among those of others."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.folder)
        self.steps = steps

    def put(self, name, data) -> None:
        self.steps.wait_for_turn()

        def act() -> None:
            LocalStore(self.root).put(name, data)
            self.steps.put_was_done(name)

        self.steps.change(act)

    def delete(self, name) -> None:
        self.steps.wait_for_turn()
        self.steps.change(lambda: LocalStore(self.root).delete(name))

    def names(self, folder, suffix):
        self.steps.wait_for_turn()
        return super().names(folder, suffix)

    def read(self, name):
        self.steps.wait_for_turn()
        return super().read(name)

    def read_slice(self, name, start, end=None):
        self.steps.wait_for_turn()
        return super().read_slice(name, start, end)


def step_by_step(folder: Path, seed: int) -> None:
    """Three writers and two mergers, the requests of all in an order drawn from the seed."""
    write_header(folder)
    steps = Steps(folder, seed)

    def write(number: int, store: LocalStore) -> None:
        for step in range(4):
            run = f"w{number}.{step}"
            rows = draw_rows(steps.draw, run)
            steps.rows[small_file(run, rows)] = rows
            commit_rows(store, run, rows)

    def merge_often(store: LocalStore) -> None:
        for _ in range(4):
            with suppress(FileNotFoundError):  # the other merger deleted it
                merge(store, None, everything=steps.draw.random() < 0.5, keep=NOW)

    steps.run(*(partial(write, number) for number in range(3)), merge_often, merge_often)
    for _ in range(3):
        merge(LocalStore(folder), None, everything=True, keep=NOW)
        steps.check()


def small_file(run: str, rows: list[Row]) -> str:
    """The name that the commit of the rows gets."""
    folder = Recorded()
    return commit_rows(folder, run, rows)


class Recorded(LocalStore):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__("/nowhere")

    def put(self, name, data) -> None:
        pass


@pytest.fixture
def many_files(monkeypatch):
    """Merges write several files of a few rows."""
    limit_merges(monkeypatch, GROUP_ROWS=2, _PART_GROUPS=2)


@pytest.mark.parametrize("seed", range(7, 13))
def test_every_step_of_an_interleaving_shows_the_model_s_rows(tmp_path, many_files, seed):
    step_by_step(tmp_path, seed)
