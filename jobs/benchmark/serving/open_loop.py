"""How long answers take when questions arrive by themselves, at given rates: ``jobs.serve``, open loop."""

from __future__ import annotations

import asyncio
import random
import re
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from rich.table import Table

from jobs.benchmark.serving.crowd import PATIENCE_S, body, serving
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


@dataclass(frozen=True)
class Arrived:
    """The seconds that requests took which arrived at random (Poisson), whether others were still waiting or not.

    Attributes:
        rate: requests a second, on average.
        questions: about each video.
        warm: whether the same questions had been asked before.
        answers_per_s: from the first request to the last answer; well below ``rate`` where the server is saturated.
        first_p50_s, first_p99_s: until the first token.
        p50_s, p99_s: until the last one.
        parts_s: mean seconds of a request by part: reading what is stored of videos, queue, prefill and decode.
    """

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


def measure_open(cache: str, rates: list[float], questions: list[int], seed: int = 0) -> list[Arrived]:
    """Measure each rate with each number of questions a video, cold and then warm. Raises RunFailed."""
    with serving(cache) as address:
        return asyncio.run(measure_at(address, TokenCache(cache), rates, questions, random.Random(seed)))


async def measure_at(
    address: str, cache: TokenCache, rates: list[float], questions: list[int], draw: random.Random, key: str = ""
) -> list[Arrived]:
    """Measure each rate with each number of questions a video at a running server of a cache. Raises RunFailed."""
    import httpx  # noqa: PLC0415 - comes with vLLM

    found, share = list[Arrived](), cache.retention_ratio
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=PATIENCE_S, headers=headers) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await _ask(client, body(model, cache.video_ids[0], "Hello?"))
        for rate in rates:
            for number in questions:
                share -= _STEP
                asked = [(f"{name}?retention_ratio={share:.4f}", i) for name in cache.video_ids for i in range(number)]
                draw.shuffle(asked)
                found += [await _round(client, model, asked, rate, number, warm, draw) for warm in (False, True)]
    return found


async def _round(
    client: httpx.AsyncClient,
    model: str,
    asked: list[tuple[str, int]],
    rate: float,
    questions: int,
    warm: bool,
    draw: random.Random,
) -> Arrived:
    """Send questions at random times and return what they took."""
    before, sent, started = await _seconds(client), [], time.monotonic()
    for link, number in asked:
        text = f"Question {number}: what happens in this video, and why?"
        sent.append(asyncio.create_task(_ask(client, body(model, link, text))))
        await asyncio.sleep(draw.expovariate(rate))
    took = await asyncio.gather(*sent)
    ended = time.monotonic()
    after = await _seconds(client)
    first, whole = (sorted(seconds) for seconds in zip(*took, strict=True))
    return Arrived(
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
    table = Table(title="requests that arrive by themselves (Poisson), jobs.serve", show_edge=False)
    for name in (
        "requests/s",
        "questions a video",
        "",
        "answers/s",
        "first token p50, s",
        "p99",
        "whole p50, s",
        "p99",
    ):
        table.add_column(name, justify="right")
    table.add_column("parts, s", justify="right")
    for one in found:
        seconds = (one.first_p50_s, one.first_p99_s, one.p50_s, one.p99_s)
        parts = " ".join(f"{part} {took:.3f}" for part, took in one.parts_s.items())
        told = (f"{one.rate:g}", str(one.questions), "warm" if one.warm else "cold", f"{one.answers_per_s:.1f}")
        table.add_row(*told, *(f"{took:.3f}" for took in seconds), parts)
    return table


def as_record(found: list[Arrived]) -> JsonObject:
    """Return the figures as a JSON-able mapping."""
    return {"open_loop": [asdict(one) for one in found]}
