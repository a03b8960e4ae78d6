"""What a run has taken so far, to stand beside its forecast, and the limits at which it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeline.errors import LimitReached
from pipeline.plan.estimate import HOUR, Plan
from pipeline.rows import VideoRecord


@dataclass
class Facts:
    """Sums over the rows that a run has committed.

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

    def __post_init__(self) -> None:
        self.started = self.clock()

    def add(self, records: Iterable[VideoRecord]) -> None:
        """Add the rows of a shard."""
        for record in records:
            self.videos += 1
            self.decode_core_s += record.get("decode_s", 0.0)
            self.encode_s += record.get("encode_s", 0.0) + record.get("prune_s", 0.0)
            self.tokens += record.get("n_tokens", 0)
            if record["status"] == "ok":
                self.video_s += video_seconds(record)

    def as_record(self, wall_s: float | None = None) -> dict[str, float | None]:
        """Return the facts as a JSON-able mapping; ``wall_s`` are the seconds of the run, by default until now."""
        wall = self.clock() - self.started if wall_s is None else wall_s
        hours = self.video_s / HOUR
        return {
            "wall_s": wall,
            "decode_core_s": self.decode_core_s,
            "encode_s": self.encode_s,
            "output_bytes": self.tokens * self.token_bytes,
            "encoder_busy": min(1.0, self.encode_s / (self.encoders * wall)) if wall else 0.0,
            "core_s_a_video": self.decode_core_s / self.videos if self.videos else None,
            "video_hours": hours,
            "video_hours_per_day_per_gpu": hours / wall * 24 * HOUR / self.gpus if self.gpus and wall else None,
            "cost": None if self.hourly is None else self.hourly * wall / HOUR,
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
        if self.max_cost is not None and hours * (self.facts.hourly or 0.0) >= self.max_cost:
            self.reached = f"--max-cost {self.max_cost:g} is reached"
        if self.reached:
            raise LimitReached(self.reached)
