"""How long answers take when questions arrive by themselves, at given rates: ``jobs.serve``, open loop."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich.table import Table

from jobs.benchmark.serving.crowd import answered, body, client_of, serving
from jobs.benchmark.shown import figure_table
from pipeline import TokenCache
from pipeline.errors import RunFailed
from pipeline.rows import JsonObject

if TYPE_CHECKING:
    import httpx

# vLLM's own sums of seconds, by the part of a request that took them; those before a request reaches its engine are the
# whole without these.
_PARTS: Final = {
    "read": "gstep_cache_load_seconds_total",
    **{part: f"vllm:request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")},
}
_STEP: Final = 0.002  # of the share of tokens: rows of another share are other rows, which nothing holds yet
WAYS: Final = ("names", "texts")  # of cached videos, and words as many as these have tokens
_WORDS: Final = [f" {letter}" for letter in string.ascii_lowercase]
# Where no rates are given: the first one, how long requests arrive at least, and the share of a rate that must be
# answered, or the server is saturated.
FIRST_RATE, ROUND_S, KEPT_UP = 16.0, 2.0, 0.9


@dataclass(frozen=True)
class Arrived:
    """The seconds that requests took which arrived at random (Poisson), whether others were still waiting or not.

    Attributes:
        way: in WAYS.
        rate: requests a second, on average.
        questions: about each video.
        warm: whether the same questions had been asked before.
        answers_per_s: from the first request to the last answer; well below ``rate`` where the server is saturated.
        first_p50_s, first_p99_s: until the first token.
        p50_s, p99_s: until the last one.
        parts_s: mean seconds of a request by part: reading what is stored of videos, queue, prefill and decode.
    """

    way: str
    rate: float
    questions: int
    warm: bool
    requests: int
    answers_per_s: float
    first_p50_s: float
    first_p99_s: float
    p50_s: float
    p99_s: float
    parts_s: dict[str, float]


def measure_open(cache: str, rates: Sequence[float], questions: Sequence[int], seed: int = 0) -> list[Arrived]:
    """Measure each rate with each number of questions a video, cold and then warm. Raises RunFailed.

    Where there are no rates, they double from FIRST_RATE until the server is saturated.
    """
    with serving(cache) as address:
        return asyncio.run(measure_at(address, TokenCache(cache), rates, questions, random.Random(seed)))


async def measure_at(
    address: str,
    cache: TokenCache,
    rates: Sequence[float],
    questions: Sequence[int],
    draw: random.Random,
    key: str = "",
    first_rate: float = FIRST_RATE,
) -> list[Arrived]:
    """Measure at a running server of a cache, as ``measure_open``. Raises RunFailed."""
    found = list[Arrived]()
    async with client_of(address, key) as (client, model):
        await _ask(client, body(model, cache.video_ids[0], "Hello?"))
        lengths = [await answered(client, body(model, None, " a" * count)) for count in (100, 300)]
        few, many = (answer.json()["usage"]["prompt_tokens"] for answer in lengths)
        for way in WAYS:
            asking = _Questions(cache, model, way, (many - few) / 200, draw)
            for number in questions:
                for rate in rates or (first_rate * 2**step for step in itertools.count()):
                    asked = asking.round(number, 0 if rates else rate * ROUND_S)
                    both = [await _round(client, asked, way, rate, number, warm, draw) for warm in (False, True)]
                    found += both
                    if not rates and both[-1].answers_per_s < KEPT_UP * rate:
                        break
    return found


class _Questions:
    """Requests about all videos of a cache, or as long: each round is about shares of their tokens of its own."""

    def __init__(self, cache: TokenCache, model: str, way: str, tokens_a_word: float, draw: random.Random) -> None:
        self._model, self._way, self._tokens_a_word, self._draw = model, way, tokens_a_word, draw
        self._totals = {video_id: cache.metadata(video_id)["n_total"] for video_id in cache.video_ids}
        self._share = cache.retention_ratio

    def round(self, number: int, least: float) -> list[JsonObject]:
        """Return ``number`` questions about each video in random order, about more shares until there are ``least``.

        A round takes a quarter of the shares that are left at most. Raises RunFailed where none is left.
        """
        asked, begun = list[JsonObject](), self._share
        while not asked or (len(asked) < least and self._share > 0.75 * begun):
            self._share -= _STEP
            if self._share <= 0:
                raise RunFailed("all shares of the videos' tokens have been asked about: --rates takes fewer rates")
            for video_id, n_total in self._totals.items():
                words = "".join(self._draw.choices(_WORDS, k=round(self._share * n_total / self._tokens_a_word)))
                for text in (f"Question {i}: what happens in this video, and why?" for i in range(number)):
                    link = f"{video_id}?retention_ratio={self._share:.4f}"
                    about = (link, text) if self._way == "names" else (None, f"{words} {text}")
                    asked.append(body(self._model, *about))
        self._draw.shuffle(asked)
        return asked


async def _round(
    client: httpx.AsyncClient,
    asked: Sequence[JsonObject],
    way: str,
    rate: float,
    questions: int,
    warm: bool,
    draw: random.Random,
) -> Arrived:
    """Send requests at random times and return what they took."""
    # Those of a Poisson process that has as many requests in as long as the rate says.
    times = sorted(draw.uniform(0.0, len(asked) / rate) for _ in asked)
    before, sent, started = await _seconds(client), [], time.monotonic()
    for request, at in zip(asked, times, strict=True):
        await asyncio.sleep(started + at - time.monotonic())
        sent.append(asyncio.create_task(_ask(client, request)))
    took = await asyncio.gather(*sent)
    ended = time.monotonic()
    after = await _seconds(client)
    first, whole = (sorted(seconds) for seconds in zip(*took, strict=True))
    return Arrived(
        way=way,
        rate=rate,
        questions=questions,
        warm=warm,
        requests=len(asked),
        answers_per_s=len(asked) / (ended - started),
        first_p50_s=_quantile(first, 0.5),
        first_p99_s=_quantile(first, 0.99),
        p50_s=_quantile(whole, 0.5),
        p99_s=_quantile(whole, 0.99),
        parts_s={part: (after[part] - before[part]) / len(asked) for part in after},
    )


async def _ask(client: httpx.AsyncClient, request: JsonObject) -> tuple[float, float]:
    """Return the seconds until the first and the last token of an answer. Raises RunFailed where there is none."""
    started, first = time.monotonic(), None
    async with client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            if answer.is_error or '"error"' in line:
                raise RunFailed(f"jobs.serve answers {answer.status_code}: {line[:500]}")
            if first is None and '"content":"' in line.replace('"content":""', ""):
                first = time.monotonic() - started
    whole = time.monotonic() - started
    return whole if first is None else first, whole


async def _seconds(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the seconds that the server has spent on each part of its requests so far."""
    text = (await client.get("/metrics")).text
    return {part: sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.M))) for part, name in _PARTS.items()}


def _quantile(ascending: list[float], share: float) -> float:
    """Return the value that a share of the ascending values do not pass."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]


def as_table(found: list[Arrived]) -> Table:
    """Lay out a row a round."""
    columns = (
        *("way", "requests/s", "questions a video", "", "answers/s"),
        *("first token p50, s", "p99", "whole p50, s", "p99", "parts, s"),
    )
    rows = []
    for one in found:
        seconds = (one.first_p50_s, one.first_p99_s, one.p50_s, one.p99_s)
        parts = " ".join(f"{part} {took:.3f}" for part, took in one.parts_s.items())
        asked = (one.way, f"{one.rate:g}", str(one.questions), "warm" if one.warm else "cold")
        rows.append((*asked, f"{one.answers_per_s:.1f}", *(f"{took:.3f}" for took in seconds), parts))
    return figure_table("requests that arrive by themselves (Poisson), jobs.serve", columns, rows)
