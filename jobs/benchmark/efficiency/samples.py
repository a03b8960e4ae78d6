"""What is measured of one question, and of one video on its way into a cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from jobs.benchmark.efficiency.setup import Arm

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measurements of one question in one mode, in seconds and bytes; a step that a mode skips took 0 s.

    Attributes:
        mode: "online" from the video, "cached" from its tokens in a cache.
        visual_tokens: those that are left for most of the language model's layers.
        prompt_tokens: all that go in, text too.
        kv_bytes: of the prompt's keys and values after the prefill.
        llm_s: of the whole ``generate``; ``prefill_s`` until its first token and ``token_decode_s`` from there to the
            last one are parts of it.
        peak_bytes: of torch's memory on a GPU, weights included; None on a CPU.
        answer: token ids.
    """

    mode: str = ""
    video_id: str = ""
    question: int
    repeat: int = 0
    visual_tokens: int
    prompt_tokens: int
    kv_bytes: int
    video_decode_s: float = 0.0
    encode_s: float = 0.0
    read_s: float = 0.0
    prune_s: float = 0.0
    prompt_s: float
    llm_s: float
    prefill_s: float
    token_decode_s: float
    bytes_read: int = 0
    peak_bytes: float | None
    answer: tuple[int, ...] = field(repr=False)

    @property
    def llm_with_tower_s(self) -> float:
        """The model's seconds as the paper's harness counts them: vision tower and pruning included."""
        return self.encode_s + self.prune_s + self.llm_s

    @property
    def total_s(self) -> float:
        """The seconds from the start to the answer; online this is the paper's E2E, reading the video included."""
        return self.video_decode_s + self.read_s + self.prompt_s + self.llm_with_tower_s

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """New tokens a second after the first, which the prefill gives; None for a single token."""
        return (len(self.answer) - 1) / self.token_decode_s if len(self.answer) > 1 else None


@dataclass(frozen=True)
class Built:
    """The seconds of each step of putting one video into a cache."""

    video_id: str
    repeat: int
    video_decode_s: float
    encode_s: float
    prune_s: float
    write_s: float

    @property
    def total_s(self) -> float:
        """The seconds of all steps together."""
        return self.video_decode_s + self.encode_s + self.prune_s + self.write_s


@dataclass
class Found:
    """All measurements of one arm; peaks are bytes including weights, None where they cannot be measured."""

    arm: Arm
    online: list[Sample] = field(default_factory=list)
    cached: list[Sample] = field(default_factory=list)
    built: list[Built] = field(default_factory=list)
    online_peak: float | None = None
    cached_peak: float | None = None


class Timed(NamedTuple, Generic[T]):
    """The result of a piece of work, its seconds, and on a GPU the peak of torch's memory meanwhile."""

    value: T
    seconds: float
    peak_bytes: float | None


def timed(work: Callable[[], T], device: str) -> Timed[T]:
    """Run ``work`` and time it: on a GPU by CUDA events between synchronisations, else by wall clock."""
    if not device.startswith("cuda"):
        started = time.perf_counter()
        value = work()
        return Timed(value, time.perf_counter() - started, None)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    value = work()
    end.record(stream)
    end.synchronize()
    return Timed(value, begin.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated(device))


def highest(*peaks: float | None) -> float | None:
    """Return the highest peak that was measured, or None."""
    return max((peak for peak in peaks if peak is not None), default=None)
