"""Three writers and a merger on S3, where replies are lost after success, requests come late and are tried again."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

import pytest

from pipeline import TokenCache
from pipeline.cache.live_rows import VIDEOS
from pipeline.cache.merging import merge
from pipeline.cache.table import table_files
from pipeline.errors import CorruptShard
from pipeline.storage.stores import ObjectStore
from tests.pipeline.cache.test_merging import Model, Row, commit_rows, draw_rows, live_in
from tests.pipeline.caches import write_header
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
    assert live_in(sound) == model and len(table_files(sound, VIDEOS)) == 1
    cache = TokenCache(sound.root, store=sound)
    assert {name: cache.metadata(name)["run_id"] for name in model} == {name: row[2] for name, row in model.items()}
