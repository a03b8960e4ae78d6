"""What a run has taken so far, to stand beside its forecast, and the limits at which it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.errors import LimitReached
from pipeline.plan.estimate import HOUR, Plan
from pipeline.rows import VideoRecord


class _Taken(NamedTuple):
    """The seconds of wall time, of all encoders and of GPUs that a run has taken, and their cost."""

    wall_s: float = 0.0
    encoder_s: float = 0.0
    gpu_s: float = 0.0
    cost: float = 0.0


@dataclass
class Facts:
    """Sums over the rows that a run has committed, and what its machines have taken.

    Attributes:
        token_bytes: stored bytes of a token and its columns.
        encoders: how many encoders compute at once; ``gpus`` of them on a GPU each.
        hourly: price of the cluster for an hour; None where it is not known.
    """

    token_bytes: float
    encoders: int = 1
    gpus: int = 0
    hourly: float | None = None
    videos: int = 0
    decode_core_s: float = 0.0
    encode_s: float = 0.0
    tokens: int = 0
    video_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    started: float = field(init=False)
    _before: _Taken = field(init=False)  # by the machines that the run had before those of now

    def __post_init__(self) -> None:
        self.started = self.clock()
        self._before = _Taken()

    def take(self, encoders: int, gpus: int, hourly: float | None) -> None:
        """Count from now on with these machines, from the start on where nothing is committed yet."""
        if self.videos:
            self._before = self._taken(self.clock() - self.started)
        self.encoders, self.gpus, self.hourly = encoders, gpus, hourly

    def _taken(self, wall_s: float) -> _Taken:
        """Return what the run has taken in its first ``wall_s`` seconds."""
        seconds, before = max(0.0, wall_s - self._before.wall_s), self._before
        cost = before.cost + seconds * (self.hourly or 0.0) / HOUR
        encoder_s, gpu_s = before.encoder_s + seconds * self.encoders, before.gpu_s + seconds * self.gpus
        return _Taken(before.wall_s + seconds, encoder_s, gpu_s, cost)

    @property
    def cost(self) -> float:
        """The cost of the machines until now; 0 where no price is known."""
        return self._taken(self.clock() - self.started).cost

    def add(self, records: Iterable[VideoRecord]) -> None:
        """Add the rows of a shard."""
        for record in records:
            self.videos += 1
            self.decode_core_s += record.get("decode_s", 0.0)
            self.encode_s += record.get("encode_s", 0.0)
            if not self.gpus:  # a GPU prunes one video while it encodes another
                self.encode_s += record.get("prune_s", 0.0)
            self.tokens += record.get("n_tokens", 0)
            if record["status"] == "ok":
                self.video_s += video_seconds(record)

    def as_record(self, wall_s: float | None = None) -> dict[str, float | None]:
        """Return the facts as a JSON-able mapping; ``wall_s`` are the seconds of the run, by default until now."""
        wall = self.clock() - self.started if wall_s is None else wall_s
        hours, taken = self.video_s / HOUR, self._taken(wall)
        return {
            "wall_s": wall,
            "decode_core_s": self.decode_core_s,
            "encode_s": self.encode_s,
            "output_bytes": self.tokens * self.token_bytes,
            "encoder_busy": min(1.0, self.encode_s / taken.encoder_s) if wall else 0.0,
            "core_s_a_video": self.decode_core_s / self.videos if self.videos else None,
            "video_hours": hours,
            "video_hours_per_day_per_gpu": hours / taken.gpu_s * 24 * HOUR if taken.gpu_s else None,
            "cost": None if self.hourly is None else taken.cost,
        }


def video_seconds(record: VideoRecord) -> float:
    """Return the seconds of a decoded video, or of its clip."""
    duration, end = record.get("duration_s") or 0.0, record.get("end_s")
    return max(0.0, (duration if end is None else min(end, duration)) - (record.get("start_s") or 0.0))


@dataclass
class Limits:
    """The hours and the money at which a run ends in order, None for no limit, and the forecast that it keeps.

    Attributes:
        reached: the limit that has ended the run, in words.
    """

    facts: Facts
    plan: Plan | None = None
    max_hours: float | None = None
    max_cost: float | None = None
    reached: str = ""

    def check(self) -> None:
        """Raise LimitReached where one is reached."""
        hours = (self.facts.clock() - self.facts.started) / HOUR
        if self.max_hours is not None and hours >= self.max_hours:
            self.reached = f"--max-hours {self.max_hours:g} is reached"
        if self.max_cost is not None and self.facts.cost >= self.max_cost:
            self.reached = f"--max-cost {self.max_cost:g} is reached"
        if self.reached:
            raise LimitReached(self.reached)
