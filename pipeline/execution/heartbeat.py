"""What every worker is doing right now: an actor that the workers tell and the driver asks.

A worker states what it holds, it does not count up and down: a statement that is lost, or made again by a restarted
actor or a retried task, is mended by the next one. The actor remembers one statement a busy worker, whatever the size
of the corpus. Nobody waits for an answer, and an actor that is gone costs no video anything.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_RESTARTS = 3
_FAIL_S = 10.0
_BACKLOG = 1000  # statements that a worker may have under way; an actor that hangs must not fill its memory


@dataclass(frozen=True)
class Reading:
    """The state of all stages.

    Attributes:
        inside: for each stage, what its workers hold and where: "ID on HOST", or other work in words.
        left: for each stage, how many videos went through it. One that is tried again counts again.
        moves: goes up with every video that enters or leaves a stage.
        failure: why a worker gave the run up, where one did.
    """

    inside: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    failure: str | None = None


class Heartbeats:
    """The actor's class; see ``start_heartbeats``."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._held: dict[str, dict[str, Sequence[str]]] = {stage: {} for stage in stages}
        self._left = dict.fromkeys(stages, 0)
        self._moves = 0
        self._failure: str | None = None

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    def state(self, stage: str, worker: str, held: Sequence[str], left: int, moves: int) -> None:
        """A worker of ``stage`` holds ``held`` from now on; ``left`` videos just went on."""
        if held:
            self._held[stage][worker] = held
        else:
            self._held[stage].pop(worker, None)
        self._left[stage] += left
        self._moves += moves

    def fail(self, why: str) -> None:
        """A worker gives the run up; the first one's reason is kept."""
        self._failure = self._failure or why

    def read(self) -> Reading:
        """Everything that is known."""
        inside = {stage: [name for held in workers.values() for name in held] for stage, workers in self._held.items()}
        return Reading(inside, dict(self._left), self._moves, self._failure)


def start_heartbeats(stages: Sequence[str]) -> Any:
    """Start the actor for these stages, beside this process if that is possible; returns its handle."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": _RESTARTS, "max_pending_calls": _BACKLOG, "scheduling_strategy": here}
    return ray.remote(Heartbeats).options(**options).remote(tuple(stages))


class Heartbeat:
    """A worker's side: says what the worker holds. It travels to the workers; without the actor it says nothing."""

    def __init__(self, stage: str, heartbeats: Any = None) -> None:
        self._stage = stage
        self._heartbeats = heartbeats
        self._left = self._moves = 0  # not said yet

    @contextmanager
    def holding(self, *ids: str) -> Iterator[None]:
        """The block works on these videos (or questions); afterwards, however it ends, the worker holds nothing."""
        self._say(ids, moves=len(ids))
        left = 0
        try:
            yield
            left = len(ids)
        finally:
            self._say((), left=left, moves=left)

    @contextmanager
    def busy(self, work: str) -> Iterator[None]:
        """The block does something that is no video's, and that must not pass for progress."""
        self._say((work,))
        try:
            yield
        finally:
            self._say(())

    def fail(self, why: str) -> None:
        """Say why this worker gives the run up, before it raises: Ray would bury its error in texts of its own."""
        if self._heartbeats is not None:
            with suppress(Exception):  # then the run ends with what Ray says
                ray.get(self._heartbeats.fail.remote(why), timeout=_FAIL_S)

    def _say(self, held: Sequence[str], left: int = 0, moves: int = 0) -> None:
        if self._heartbeats is None:
            return
        self._left, self._moves = self._left + left, self._moves + moves
        named = [f"{name} on {socket.gethostname()}" for name in held]
        with suppress(Exception):  # a dead actor, a full backlog: nothing that a video should hear of
            self._heartbeats.state.remote(self._stage, _worker(), named, self._left, self._moves)
            self._left = self._moves = 0


def _worker() -> str:
    """One name for all incarnations of an actor, and for all attempts of a task."""
    context = ray.get_runtime_context()
    return str(context.get_actor_id() or context.get_task_id())
