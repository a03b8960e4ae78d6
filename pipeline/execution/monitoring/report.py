"""What workers report of themselves, and what the driver is told of all of them."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import NamedTuple


class Worker(NamedTuple):
    """The sender of a report: one name for all processes of an actor or attempts of a task, and where this one runs."""

    name: str
    host: str
    node: str
    pid: int = 0


class ProgressDelta(NamedTuple):
    """Numbers of items since a worker's last report.

    Attributes:
        left: items that went on to the next stage.
        moves: items that came or went on.
        done: items that were tried without a failure that another node might avoid.
        failed: items that were tried with such a failure.
        made: items that went on as results of the stage, not as failures.
        up_s: seconds since then in which the worker had its model and could work.
        busy_s: those of them in which it had something in hand.
        faults: the error classes of the items that failed in this stage.
    """

    left: int = 0
    moves: int = 0
    done: int = 0
    failed: int = 0
    made: int = 0
    up_s: float = 0.0
    busy_s: float = 0.0
    faults: tuple[str, ...] = ()

    def plus(self, more: ProgressDelta) -> ProgressDelta:
        return ProgressDelta(*map(operator.add, self, more))  # numbers add up, faults are joined


class NodeTally(NamedTuple):
    """The items that a stage did and failed on a node, as ProgressDelta counts them."""

    host: str
    done: int = 0
    failed: int = 0


class Fault(NamedTuple):
    """The kind of a failure: the stage, the host, and the error class of the item."""

    stage: str
    host: str
    error_class: str


class Death(NamedTuple):
    """The end of a worker's process, noticed as its next one started, and what it had in hand."""

    stage: str
    worker: Worker
    items: tuple[str, ...]


@dataclass(frozen=True)
class WorkerReport:
    """The state of all stages, as the actor knows it.

    Attributes:
        inside: stage -> what its workers hold and where: "ID on HOST", or a description of other work.
        left: stage -> how many items went through it. An item that is tried again counts again.
        made: stage -> how many of these had not failed, in this stage or before.
        moves: a number that grows with every item that enters or leaves a stage.
        failure: why a worker gave the run up, if one did.
        tried: stage -> node id -> its tally.
        out_of_service: descriptions of the workers that were put out of service.
        failing: the stages of which all workers at work fail nearly every item.
        up_s: stage -> seconds in which its workers could work, summed over them.
        busy_s: stage -> those of them in which they had something in hand.
        faults: how often items failed, by stage, host and error class; again where they were tried again.
        deaths: the last processes of workers that died.
    """

    inside: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    moves: int = 0
    failure: str | None = None
    tried: dict[str, dict[str, NodeTally]] = field(default_factory=dict)
    out_of_service: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    up_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)
    faults: dict[Fault, int] = field(default_factory=dict)
    deaths: list[Death] = field(default_factory=list)
