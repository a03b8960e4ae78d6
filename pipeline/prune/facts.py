"""The seconds and bytes of a run so far, computed from its committed rows, and its time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import pyarrow as pa

from pipeline.errors import LimitReached
from pipeline.rows import VideoRecord

#: Compressed bytes of a token in its shard without its vectors: index, rank, frame and density.
COLUMN_BYTES = 12
_HOUR = 3600.0
# The columns of the videos table that the sums need.
_COLUMNS = ("status", "decode_s", "encode_s", "prune_s", "n_tokens", "start_s", "end_s", "duration_s")


@dataclass
class Facts:
    """Sums over the committed rows of a run, and its time limit.

    Attributes:
        token_bytes: stored bytes of a token with its columns.
        on_gpus: True if encoders compute on GPUs.
        max_hours: None for no limit.
        videos: the number of committed rows, failed videos included.
        encode_s: seconds of encoding; on CPUs also of pruning.
        video_s: seconds that the ok videos, or their clips, play.
        limit_reached: the message of the limit that ended the run; "" until then.
    """

    token_bytes: float
    on_gpus: bool = False
    max_hours: float | None = None
    videos: int = 0
    decode_core_s: float = 0.0
    encode_s: float = 0.0
    tokens: int = 0
    video_s: float = 0.0
    limit_reached: str = ""
    clock: Callable[[], float] = time.monotonic
    _started_at: float = field(init=False)
    _encoders: int = field(init=False, default=1)  # encoders that work since _since
    _since: float = field(init=False)
    _encoder_s: float = field(init=False, default=0.0)  # seconds that all encoders had until _since

    def __post_init__(self) -> None:
        self._started_at = self._since = self.clock()

    def set_encoders(self, encoders: int) -> None:
        """Set the number of working encoders from now on, or from the start of the run if nothing is committed yet.

        Before the first call, the number is 1.
        """
        if self.videos:
            self._encoder_s += (self.clock() - self._since) * self._encoders
            self._since = self.clock()
        self._encoders = encoders

    def add(self, rows: pa.Table) -> None:
        """Add the rows of a shard (columns of WRITTEN_SCHEMA) to the sums; null values count as 0.

        The number of rows and their seconds of decoding and encoding and tokens are added for all rows, including
        failed videos. The seconds of pruning are added to ``encode_s`` unless ``on_gpus``. ``video_s`` counts only the
        ok videos.

        Sums of floats do not depend on the sizes of the shards, because rows are added one by one.
        """
        self.videos += len(rows)
        for row in rows.select(_COLUMNS).to_pylist():
            self.decode_core_s += row["decode_s"] or 0.0
            self.encode_s += row["encode_s"] or 0.0
            if not self.on_gpus:  # a GPU prunes one video while it encodes another
                self.encode_s += row["prune_s"] or 0.0
            self.tokens += row["n_tokens"] or 0
            if row["status"] == "ok":
                self.video_s += measure_seconds(row)

    def check_limit(self) -> None:
        """Raise LimitReached, and set ``limit_reached``, if ``max_hours`` have passed since this object was created."""
        if self.max_hours is not None and self.clock() - self._started_at >= self.max_hours * _HOUR:
            self.limit_reached = f"--max-hours {self.max_hours:g} is reached"
            raise LimitReached(self.limit_reached)

    def as_record(self, wall_s: float | None = None) -> dict[str, float]:
        """Return the figures for the record of a run.

        Args:
            wall_s: seconds that the run took; None takes the seconds until now.

        Returns:
            wall_s, decode_core_s, encode_s, output_bytes (an estimate), encoder_busy (the share of time in which
            encoders worked, from 0 to 1) and video_hours.
        """
        wall = self.clock() - self._started_at if wall_s is None else wall_s
        encoder_s = self._encoder_s + max(0.0, wall - (self._since - self._started_at)) * self._encoders
        return {
            "wall_s": wall,
            "decode_core_s": self.decode_core_s,
            "encode_s": self.encode_s,
            "output_bytes": self.tokens * self.token_bytes,
            "encoder_busy": min(1.0, self.encode_s / encoder_s) if encoder_s else 0.0,
            "video_hours": self.video_s / _HOUR,
        }


def sum_column(rows: pa.Table, name: str) -> Any:
    """Return the sum of a column of numbers, exact for integers; nulls count as 0."""
    return reduce(add, (value for value in rows[name].to_pylist() if value is not None), 0)


def measure_seconds(record: VideoRecord) -> float:
    """Return the seconds that a decoded video, or its clip, plays; 0 without a duration."""
    duration = record.get("duration_s") or 0.0
    end = record.get("end_s")
    return max(0.0, (duration if end is None else min(end, duration)) - (record.get("start_s") or 0.0))
