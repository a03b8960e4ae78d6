"""Three writers and a merger whose requests are lost after success, come late, twice and in another order.

Once on S3 with threads, through a proxy; and once step by step: the order of requests is drawn from a seed, and the
live rows are held against a model after each of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from pipeline.cache.merging import KEEP, merge_table_files
from pipeline.cache.schema import VIDEOS
from pipeline.cache.table import list_table_files
from pipeline.storage.stores import LocalStore, ObjectStore, Store
from tests.builders.caches import limit_merges, write_header
from tests.builders.stores import FlakyProxy, S3Server
from tests.pipeline.cache.table_rows import (
    Model,
    Row,
    assert_all_agree,
    commit_rows,
    draw_rows,
    live_in,
    serialise_rows,
)
from tests.waiting import wait_until

COMMITS = 8  # of each writer
NOW = timedelta(0)


@pytest.mark.slow
def test_the_live_rows_are_the_model_s_whatever_the_store_does_to_requests():
    """Three threads write through a proxy that fails, and two merge until they have met faults of every kind too."""
    with S3Server("history") as server, FlakyProxy(server) as proxy:
        place, model, ended = server.uri("history"), Model(), threading.Event()
        sound = write_header(ObjectStore(place, server.objects()))
        kinds = (("PUT", "lost"), ("DELETE", "lost"), ("PUT", "cut"), ("GET", 503), ("DELETE", 503))
        faults = [proxy.fail(method, f"/history/{VIDEOS}/", kind) for method, kind in 3 * kinds]  # one object each

        def write(number: int) -> None:
            draw, store = random.Random(number), ObjectStore(place, proxy.objects())
            for step in range(COMMITS):
                run = f"w{number}.{step}"
                rows = draw_rows(draw, run)
                commit_rows(store, run, rows)
                model.rows.extend(rows)
                if draw.random() < 0.3:  # the same once more, perhaps after it was merged away
                    commit_rows(store, run, rows)

        def merge_often(number: int) -> None:
            draw, store = random.Random(number), ObjectStore(place, proxy.objects())
            while not ended.is_set():
                merge(store, draw)

        with ThreadPoolExecutor(5) as pool:
            mergers = [pool.submit(merge_often, number) for number in range(2)]
            try:
                list(pool.map(write, range(3)))
                wait_until(
                    lambda: sum(bool(fault.paths) for fault in faults) > 9,
                    "faults of every kind",
                    meanwhile=lambda: [merger.result() for merger in mergers if merger.done()],
                )
            finally:
                ended.set()
            for merger in mergers:
                merger.result()
        assert len(model.rows) > 3 * COMMITS and live_in(sound) == model.live()
        for _ in range(3):
            merge_table_files(sound, None, everything=True, keep=NOW)
        assert_all_agree(sound, model)
        assert len(list_table_files(sound)) == 1


def merge(store: Store, draw: random.Random) -> None:
    with suppress(FileNotFoundError):  # the other merger deleted it
        merge_table_files(store, None, everything=draw.random() < 0.5, keep=draw.choice([NOW, NOW, KEEP]))


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

    def _do(self, act: Callable[[], None]) -> None:
        self._changed = True
        act()

    def check(self) -> None:
        if self._changed:
            assert live_in(LocalStore(self.folder)) == self.model.live()
        self._changed = False

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
        def act() -> None:
            LocalStore(self.root).put(name, data)
            self.steps.model.rows += self.steps.rows.get(name, [])

        self.steps.wait_for_turn()
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


@pytest.mark.parametrize("seed", (7, 8))
def test_every_step_of_an_interleaving_shows_the_model_s_rows(tmp_path, monkeypatch, seed):
    """Three writers and two mergers, the requests of all in an order drawn from the seed."""
    limit_merges(monkeypatch, GROUP_ROWS=2, _PART_GROUPS=2)  # merges write several files of a few rows
    write_header(tmp_path)
    steps = Steps(tmp_path, seed)

    def write(number: int, store: LocalStore) -> None:
        for step in range(4):
            run = f"w{number}.{step}"
            rows = draw_rows(steps.draw, run)
            steps.rows[serialise_rows(run, rows)[0]] = rows
            commit_rows(store, run, rows)

    def merge_often(store: LocalStore) -> None:
        for _ in range(4):
            merge(store, steps.draw)

    steps.run(*(partial(write, number) for number in range(3)), merge_often, merge_often)
    store = LocalStore(tmp_path)
    assert_all_agree(store, steps.model)
    for _ in range(3):
        merge_table_files(store, None, everything=True, keep=NOW)
    assert_all_agree(store, steps.model)
    assert all(file.level for file in list_table_files(store))
