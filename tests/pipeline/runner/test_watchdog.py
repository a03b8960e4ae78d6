"""Waiting with patience that ends: what is looked at meanwhile, and what a stalled graph is reported as."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import ray

from pipeline.errors import RunFailed
from pipeline.prune.resources import PRUNING, plan_resources
from pipeline.runner.heartbeats import WorkerReport, heartbeats_of
from pipeline.runner.progress import Progress, Speed
from pipeline.runner.watchdog import SHRUNK_S, ClusterChanged, Fetcher, Growth, Watchdog
from pipeline.storage.stores import LocalStore
from tests.pipeline.rays import graph_of, ray_here, rows_of
from tests.pipeline.videos import write_clip
from tests.waiting import wait_until

STAGES = tuple(PRUNING.stages)


def endless(items=()):
    """The items, then a wait without end that an exception can end, as Ray's own."""
    yield from items
    while True:
        time.sleep(0.01)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graph of ")]


def taken(items, timeout_s: float = 10) -> list:
    """What a fetcher hands over until its iterator ends."""
    with Fetcher(iter(items)) as fetcher:
        found = []
        while not fetcher.is_at_end:
            found.append(fetcher.next(timeout_s))
    assert found.pop() is None
    return found


def test_every_item_comes_in_order():
    assert taken(range(100)) == list(range(100))


def test_a_wait_ends_while_nothing_comes():
    with Fetcher(endless("a")) as fetcher:
        assert fetcher.next(10) == "a"
        assert [fetcher.next(0.01) for _ in range(3)] == [None] * 3 and not fetcher.is_at_end
    assert not threads()


def test_an_error_of_the_iterator_arrives():
    with pytest.raises(ZeroDivisionError):
        taken(1 // n for n in (1, 0))


def test_at_most_one_item_is_fetched_ahead_and_leaving_ends_the_iterator():
    fetched = []

    def count():
        for number in range(100):
            fetched.append(number)
            yield number

    with Fetcher(count()) as fetcher:
        assert fetcher.next(10) == 0
        wait_until(lambda: len(fetched) >= 3, "one in the queue and one that waits for its place", 20)
    assert not threads() and len(fetched) == 3


@pytest.fixture(scope="module")
def one_cpu():
    with ray_here({"num_cpus": 1}) as nodes:
        yield nodes


@pytest.fixture
def heartbeats(one_cpu):
    with heartbeats_of(STAGES) as heartbeats:
        yield heartbeats


def stalled(dataset, plan, n_videos, heartbeats, reached: Callable[[WorkerReport], object]) -> str:
    """Run a graph until its watchdog gives up; returns why. Its patience starts once the heartbeats say what
    ``reached`` waits for, however long the workers take to start on this machine."""
    watchdog, deadline = Watchdog(heartbeats, 3, plan, n_videos), time.monotonic() + 120

    def look() -> None:
        if not reached(ray.get(heartbeats.read.remote())):
            assert time.monotonic() < deadline, "the graph never came so far"
            watchdog.record_movement()
        watchdog.read()
        watchdog.check()

    with pytest.raises(RunFailed) as failed:
        rows_of(dataset, look, watchdog.every_s, watchdog.record_movement)
    return str(failed.value)


@pytest.mark.slow
def test_a_cluster_without_room_is_named(heartbeats, tmp_path):
    plan = plan_resources(1, 1, 8)
    plan = replace(plan, decode=replace(plan.decode, num_cpus=3))
    why = stalled(graph_of(8, plan, tmp_path, heartbeats=heartbeats), plan, 8, heartbeats, lambda reading: True)
    assert "decode takes none of 8 waiting videos; scheduling: the cluster offers 1 CPUs and 0 GPUs" in why


@pytest.mark.slow
def test_a_missing_gpu_is_named(heartbeats, tmp_path):
    plan = plan_resources(1, 1, 8)
    dataset = graph_of(8, plan, tmp_path, heartbeats=heartbeats)
    why = stalled(dataset, plan, 8, heartbeats, lambda reading: reading.n_passed_on["decode"] == 8)
    assert "encode takes none of 8 waiting videos; scheduling: the cluster offers 1 CPUs and 0 GPUs" in why
    assert f"the plan needs {plan.cpus:g} and 1" in why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "now", "anew"),
    [
        (plan_resources(4, 0, 64), {"CPU": 3}, True),
        (plan_resources(4, 2, 64), {"CPU": 4, "GPU": 1}, True),
        (plan_resources(4, 0, 64), {"CPU": 4}, False),  # as it was
        (plan_resources(4, 0, 64), {}, False),  # a new plan would have no room either
        (plan_resources(4, 2, 64), {"CPU": 4}, False),
        (plan_resources(8, 0, 64), {"CPU": 3}, False),  # it never had room, so nothing was lost
    ],
)
def test_what_is_left_is_planned_anew_where_nodes_were_lost(heartbeats, plan, now, anew):
    offer, at = {"CPU": 4.0, "GPU": 2.0}, 0.0
    told = {"available_resources": lambda: offer, "clock": lambda: at}
    dog = Watchdog(heartbeats, 60, plan, 64, **told)
    dog.check()
    offer, at = now, SHRUNK_S + 1
    with pytest.raises(ClusterChanged) if anew else nullcontext():
        dog.check()


DECODING = {"decode": 0.98, "encode": 0.2, "write": 0.01}
ENCODING = {"decode": 0.4, "encode": 0.99, "write": 0.01}


@pytest.mark.parametrize(
    ("before", "left", "encoding", "now", "busy", "saved"),
    [
        ((4, 0), 1000, 0, (8, 0), DECODING, 240),  # 500 s become 250, and 10 s pass until they are begun
        ((4, 0), 60, 0, (8, 0), DECODING, None),  # 30 s become 15
        ((4, 0), 1000, 0, (4, 0), DECODING, None),
        ((4, 0), 1000, 0, (2, 0), DECODING, None),
        # The one encoder can take 1.4 times as many, not 1.75.
        ((4, 0), 1000, 0, (7, 0), {"decode": 0.98, "encode": 0.7}, 133),
        ((4, 2), 1000, 0, (64, 2), ENCODING, None),  # nodes that do not help the slowest stage
        ((4, 0), 1000, 400, (8, 0), DECODING, None),  # what encoders have not got through would be decoded again
        ((4, 2), 1000, 700, (8, 4), ENCODING, 240),  # decoders have time to do so again: the encoders take longer
        ((4, 0), 1000, 0, None, DECODING, None),
        ((4, 0), 1000, 0, (8, 0), {}, None),
    ],
)
def test_what_is_left_is_planned_anew_where_that_saves_more_than_it_costs(before, left, encoding, now, busy, saved):
    growth = Growth(plan_resources(*before, 4000))
    today = None if now is None else plan_resources(*now, left)
    waiting = {"decode": left - encoding, "encode": encoding, "write": 0}
    at, speed = Progress(busy=busy, waiting=waiting), Speed(2.0, left, 10.0)
    growth.look(at, speed, today)  # nodes may still be joining
    if saved is None:
        growth.look(at, speed, today)
        growth.look(at, speed, today)
    else:
        with pytest.raises(ClusterChanged, match=f"nodes joined, which saves about {saved} s"):
            growth.look(at, speed, today)


def test_nodes_that_come_one_after_another_are_waited_for():
    growth = Growth(plan_resources(4, 0, 4000))
    at, speed = Progress(busy=DECODING, waiting={"decode": 1000}), Speed(2.0, 1000, 10.0)
    for cores in (5, 6, 7, 8):
        growth.look(at, speed, plan_resources(cores, 0, 1000))
    with pytest.raises(ClusterChanged):
        growth.look(at, speed, plan_resources(8, 0, 1000))


@pytest.mark.slow
def test_dead_heartbeats_harm_no_video(heartbeats, tmp_path):
    plan = plan_resources(1, 0, 8)
    ray.kill(heartbeats)
    watchdog = Watchdog(heartbeats, 60, plan, 8)

    def look() -> None:
        watchdog.read()
        watchdog.check()

    look()
    rows = rows_of(graph_of(8, plan, tmp_path, heartbeats=heartbeats), look, 0.2)
    assert sorted(row["video_id"] for row in rows) == [f"v{i}" for i in range(8)]


class HangingStore(LocalStore):
    def put(self, name, data):
        time.sleep(3600)


@pytest.mark.slow
def test_a_writer_that_hangs_is_named(heartbeats, tmp_path):
    plan = plan_resources(1, 0, 8)
    path = str(write_clip(tmp_path / "v.mp4", count=2))  # of what failed no shard is written
    dataset = graph_of(8, plan, HangingStore(tmp_path), path, heartbeats=heartbeats)
    why = stalled(dataset, plan, 8, heartbeats, lambda reading: reading.inside["write"])
    assert re.match(r"no video moved for 3 s: write holds \d \(v\d on .*\) and does not move; .*--out", why)
