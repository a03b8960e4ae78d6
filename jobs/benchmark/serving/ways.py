"""What every way of answering has in common: questions about every video of a cache, asked cold and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Job:
    """The work of the benchmark: the model, the cache, and the ratios and numbers of questions a video to try.

    Pickles.
    """

    model: str
    cache: str
    num_frames: int
    ratios: tuple[float, ...]
    questions: tuple[int, ...]
    max_new_tokens: int
    repeats: int


class Pass(NamedTuple):
    """The times and counts of one pass over all requests, which were given at once.

    Attributes:
        requests: how many.
        seconds: reading tokens (or decoding and encoding videos) included.
        first_token_s: of the median request; None where a way does not say.
        prompt_tokens: of all requests.
        reused_tokens: how many of them the prefix cache had; None where there is none.
        visual_tokens: in a prompt, on average; None where a way does not say.
        sent_bytes: what went to the engine's process; None where it has none of its own.
    """

    requests: int
    seconds: float
    first_token_s: float | None
    prompt_tokens: int
    reused_tokens: int | None
    visual_tokens: float | None
    sent_bytes: int | None


Ask = Callable[[], Pass]


class Way(Protocol):
    """One way of answering, with its engine loaded."""

    def fresh(self, ratio: float, questions: int) -> Ask:
        """Return what asks so many questions about every video: at its first call nothing of them is held anywhere."""

    def close(self) -> None:
        """End the engine and its process."""


class SentBytes:
    """The bytes that go to an engine's process: its client encodes all of them."""

    def __init__(self, client: Any) -> None:
        self.total = 0
        encode = client.encoder.encode

        def counted(message: object) -> Any:
            parts = encode(message)
            self.total += sum(memoryview(part).nbytes for part in parts)
            return parts

        client.encoder.encode = counted


def questions_of(count: int) -> list[str]:
    """Return ``count`` different texts of questions."""
    return [f"Question {number}: what happens in this video, and why?" for number in range(count)]
