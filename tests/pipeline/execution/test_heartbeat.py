"""What every worker is doing: a statement replaces the one before, and nobody depends on the actor."""

import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import ray

from pipeline.execution import heartbeat
from pipeline.execution.heartbeat import Heartbeat, Heartbeats, start_heartbeats
from pipeline.prune.graph import PRUNING
from tests.pipeline.rays import ray_here

STAGES = tuple(PRUNING.stages)


def test_a_statement_replaces_the_one_before():
    heartbeats = Heartbeats(STAGES)
    heartbeats.state("decode", "a", ["v1"], 0, 1)
    heartbeats.state("decode", "a", ["v2"], 0, 1)  # the end of v1 was lost: its actor died
    heartbeats.state("decode", "b", ["v3"], 0, 1)
    heartbeats.state("decode", "b", [], 1, 1)
    reading = heartbeats.read()
    assert reading.inside == {"decode": ["v2"], "encode": [], "write": []}
    assert (reading.left["decode"], reading.moves) == (1, 4)


def test_the_first_reason_to_give_up_is_kept():
    heartbeats = Heartbeats(STAGES)
    assert heartbeats.read().failure is None
    heartbeats.fail("OSError: No space left on device")
    heartbeats.fail("OSError: another")
    assert heartbeats.read().failure == "OSError: No space left on device"


class Called:
    """A method of the actor's handle that works here and now, as ``remote`` does elsewhere and later."""

    def __init__(self, method: Callable[..., object]) -> None:
        self.remote = method


@pytest.fixture
def actor(monkeypatch) -> Heartbeats:
    """The actor's own class behind what a worker takes for its handle; asking Ray for its name would start Ray."""
    monkeypatch.setattr(heartbeat, "_worker", lambda: "w1")
    return Heartbeats(STAGES)


def handle(actor: Heartbeats) -> SimpleNamespace:
    return SimpleNamespace(state=Called(actor.state), fail=Called(actor.fail))


def test_a_worker_says_what_it_holds_and_lets_go_of_it(actor):
    worker = Heartbeat("decode", handle(actor))
    with worker.holding("v1", "v2"):
        inside = actor.read()
        assert inside.inside["decode"] == [f"{name} on {socket.gethostname()}" for name in ("v1", "v2")]
        assert (inside.left["decode"], inside.moves) == (0, 2)
    after = actor.read()
    assert (after.inside["decode"], after.left["decode"], after.moves) == ([], 2, 4)


def test_a_video_that_is_tried_again_did_not_leave(actor):
    worker = Heartbeat("decode", handle(actor))
    with pytest.raises(OSError, match="away"), worker.holding("v1"):
        raise OSError("away")
    after = actor.read()
    assert (after.inside["decode"], after.left["decode"], after.moves) == ([], 0, 1)


def test_other_work_is_shown_and_is_no_progress(actor):
    with Heartbeat("encode", handle(actor)).busy("the model, being loaded"):
        assert actor.read().inside["encode"] == [f"the model, being loaded on {socket.gethostname()}"]
    assert actor.read().moves == 0


def test_what_could_not_be_said_is_said_with_the_next_statement(actor):
    def full(*statement: object) -> None:
        raise RuntimeError("the backlog is full")

    mute = SimpleNamespace(state=Called(full))
    worker = Heartbeat("decode", mute)
    with worker.holding("v1"):
        mute.state = Called(actor.state)
    assert (actor.read().left["decode"], actor.read().moves) == (1, 2)


def test_a_worker_without_an_actor_or_with_a_dead_one_is_not_disturbed(actor):
    def dead(*statement: object) -> None:
        raise ray.exceptions.RayActorError

    for heartbeats in (None, SimpleNamespace(state=Called(dead), fail=Called(dead))):
        worker = Heartbeat("decode", heartbeats)
        with worker.holding("v1"), worker.busy("work"):
            worker.fail("why")


@pytest.mark.slow
def test_a_reason_reaches_the_driver_before_the_worker_raises():
    with ray_here({"num_cpus": 1}):
        heartbeats = start_heartbeats(STAGES)
        Heartbeat("write", heartbeats).fail("OSError: No space left on device")
        assert ray.get(heartbeats.read.remote()).failure == "OSError: No space left on device"
