"""Waiting with patience that ends: what is looked at meanwhile, and what a stalled graph is reported as."""

import re
import threading
import time
from contextlib import nullcontext

import pytest
import ray

from pipeline.errors import RunFailed
from pipeline.prune.resources import PRUNING, plan_resources
from pipeline.runner import watchdog as watchdog_module
from pipeline.runner.progress import Progress, Speed
from pipeline.runner.watchdog import SHRUNK_S, ClusterChanged, Fetcher, Growth, Watchdog
from pipeline.runner.worker_reports import Heartbeats, ProgressDelta, Worker, run_heartbeats
from pipeline.storage.stores import LocalStore
from tests.builders.clips import write_clip
from tests.builders.clusters import PLAIN, graph_of, handle_of, hold_cpu, ray_here, rows_of
from tests.waiting import wait_until

STAGES = tuple(PRUNING.stages)
LONG_S = 120  # for what comes at once, unless the machine is busy


def test_every_item_comes_in_order_and_an_error_of_the_iterator_arrives():
    with Fetcher(12 // n for n in (1, 2, 3, 0)) as fetcher:
        assert [fetcher.next(LONG_S) for _ in range(3)] == [12, 6, 4] and not fetcher.is_at_end
        with pytest.raises(ZeroDivisionError):
            fetcher.next(LONG_S)
    with Fetcher(iter("a")) as fetcher:
        assert (fetcher.next(LONG_S), fetcher.next(LONG_S), fetcher.is_at_end) == ("a", None, True)


def test_a_wait_ends_while_nothing_comes_and_leaving_ends_the_iterator(monkeypatch):
    monkeypatch.setattr(watchdog_module, "_END_S", LONG_S)

    def endless():
        yield "a"
        while True:
            time.sleep(0.01)  # as Ray's own wait, which an exception can end

    with Fetcher(endless()) as fetcher:
        assert fetcher.next(LONG_S) == "a"
        assert [fetcher.next(0.01) for _ in range(3)] == [None] * 3 and not fetcher.is_at_end
    assert not fetcher._thread.is_alive()


def test_a_thread_that_ends_by_itself_is_not_interrupted():
    """An exception behind the thread's own handler would reach the user."""

    class Slow(Fetcher):
        def _fetch(self):
            super()._fetch()
            self._close_event.wait(60)  # until it would be interrupted
            self.left = [number for number in range(1000) if self.is_at_end]

    with Slow(iter("a")) as fetcher:
        assert (fetcher.next(60), fetcher.next(60), fetcher.is_at_end) == ("a", None, True)
        wait_until(lambda: not fetcher._may_interrupt, "the end behind the last item")
    assert len(fetcher.left) == 1000


def test_at_most_one_item_is_fetched_ahead(monkeypatch):
    monkeypatch.setattr(watchdog_module, "_END_S", LONG_S)
    fetched = []
    with Fetcher(fetched.append(number) or number for number in range(100)) as fetcher:
        assert fetcher.next(LONG_S) == 0
        wait_until(lambda: len(fetched) >= 3, "one in the queue and one that waits for its place")
    assert not fetcher._thread.is_alive() and len(fetched) == 3


OFFER = "the cluster offers 2 CPUs and 0 GPUs"


@pytest.mark.parametrize(
    ("passed_on", "holder", "why"),
    [
        ({}, None, f"decode takes none of 1 waiting videos; scheduling: {OFFER}, the plan"),
        ({"decode": 1}, None, f"encode takes none of 1 waiting videos; scheduling: {OFFER}"),
        ({"decode": 1}, "encode", "encode holds 1 (v0 on h) and does not move; look at that host and its GPU"),
        ({"decode": 1, "encode": 1}, "write", "write holds 1 (v0 on h) and does not move; look at the storage"),
        (dict.fromkeys(STAGES, 1), None, f"scheduling: no worker holds a video; {OFFER}"),
    ],
)
def test_the_stage_that_does_not_move_is_named_with_the_remedy(monkeypatch, passed_on, holder, why):
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(ray, "cluster_resources", lambda: offer)
    actor, now, offer = Heartbeats(STAGES), 0.0, {"CPU": 2.0}
    dog = Watchdog(handle_of(actor.read), 60, plan_resources(1, 1, 1), 1, lambda: offer, lambda: now)
    for stage, count in passed_on.items():
        actor.state(stage, Worker("w", "h", "n"), [], ProgressDelta(count, 2 * count))
    if holder:
        actor.state(holder, Worker("w", "h", "n"), ["v0"], ProgressDelta(0, 1))
    now = 50.0
    if dog.read().n_moves:
        now = 110.0
        dog.check()
    now += 11.0
    with pytest.raises(RunFailed, match="no video moved for 60 s: " + re.escape(why)):
        dog.check()


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
def test_what_is_left_is_planned_anew_where_nodes_were_lost(plan, now, anew):
    offer, at = {"CPU": 4.0, "GPU": 2.0}, 0.0
    dog = Watchdog(None, 60, plan, 64, available_resources=lambda: offer, clock=lambda: at)
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
    with pytest.raises(ClusterChanged, match=f"saves about {saved} s") if saved else nullcontext():
        growth.look(at, speed, today)


def test_nodes_that_come_one_after_another_are_waited_for():
    growth = Growth(plan_resources(4, 0, 4000))
    at, speed = Progress(busy=DECODING, waiting={"decode": 1000}), Speed(2.0, 1000, 10.0)
    for cores in (5, 6, 7, 8):
        growth.look(at, speed, plan_resources(cores, 0, 1000))
    with pytest.raises(ClusterChanged):
        growth.look(at, speed, plan_resources(8, 0, 1000))


@pytest.fixture
def heartbeats():
    with ray_here(*PLAIN), run_heartbeats(STAGES) as heartbeats:
        yield heartbeats


def run_until_stalled(graph, plan, heartbeats, reached) -> str:
    """Run a graph of eight videos until its watchdog gives up; returns why.

    For it a second passes from look to look, once the heartbeats say what ``reached`` waits for: however long the
    workers take to start, and to answer.
    """
    now, deadline = 0.0, time.monotonic() + LONG_S
    watchdog = Watchdog(heartbeats, 3, plan, 8, clock=lambda: now)

    def look() -> None:
        nonlocal now
        if reached(watchdog.read()):
            now += 1
        else:
            assert time.monotonic() < deadline, "the graph never came so far"
        watchdog.check()

    with pytest.raises(RunFailed) as failed:
        rows_of(graph, look, watchdog.every_s, watchdog.record_movement)
    return str(failed.value)


@pytest.mark.slow
def test_a_graph_whose_workers_find_no_gpu_ends(heartbeats, tmp_path):
    plan = plan_resources(1, 1, 8)
    graph = graph_of(8, plan, tmp_path, heartbeats=heartbeats)
    why = run_until_stalled(graph, plan, heartbeats, lambda report: report.n_passed_on.get("decode") == 8)
    assert "encode takes none of 8 waiting videos; scheduling: the cluster offers 2 CPUs and 0 GPUs" in why
    assert f"the plan needs {plan.cpus:g} and 1" in why


class HangingStore(LocalStore):
    def put(self, name, data):
        threading.Event().wait()


@pytest.mark.slow
def test_a_graph_whose_writer_hangs_ends(heartbeats, tmp_path):
    plan = plan_resources(1, 0, 8)
    path = str(write_clip(tmp_path / "v.mp4", count=2))  # of what failed no shard is written
    graph = graph_of(8, plan, HangingStore(tmp_path), path, heartbeats=heartbeats)
    why = run_until_stalled(graph, plan, heartbeats, lambda report: report.inside.get("write"))
    assert re.match(r"no video moved for 3 s: write holds \d \(v\d on .*\) and does not move; .*--out", why)


@pytest.mark.slow
def test_one_cpu_is_enough_and_dead_heartbeats_harm_no_video(heartbeats, tmp_path):
    """Every stage finds room beside the others: a missing file goes all the way and comes out as an error row."""
    plan = plan_resources(1, 0, 8)
    ray.kill(heartbeats)
    watchdog = Watchdog(heartbeats, 600, plan, 8)  # it sees no movement, not even that workers start

    def look() -> None:
        watchdog.read()
        watchdog.check()

    with hold_cpu():  # the other one
        look()
        rows = rows_of(graph_of(8, plan, tmp_path, heartbeats=heartbeats), look, 0.2)
    assert sorted(row["video_id"] for row in rows) == [f"v{i}" for i in range(8)]
    assert [row["error_class"] for row in rows] == ["io"] * 8
