"""How long others wait while one client sends texts that are too large: ``jobs.serve`` under many requests at once."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobs.benchmark.server import served
from pipeline import TokenCache
from pipeline.errors import RunFailed
from pipeline.rows import JsonObject

if TYPE_CHECKING:
    import httpx

PATIENCE_S: Final = 600.0  # the longest that a server may take to load its model
_LARGE = "why " * (5_000_000 // 4)


@dataclass(frozen=True)
class Waited:
    """The seconds that requests of a crowd took, all of them sent at once; medians over the rounds.

    Attributes:
        large: whether another client sent texts of 5 MB meanwhile, one behind the other.
        requests: how many at once.
        p50_s, p99_s: seconds until half, and until 99 of 100, had their answers.
        n_large: texts of 5 MB that were answered, in all rounds; each with an error.
    """

    large: bool
    requests: int
    p50_s: float
    p99_s: float
    n_large: int


def measure_crowd(cache: str, requests: int, rounds: int) -> list[Waited]:
    """Measure so many requests at once, without and with a client of large texts in turns. Raises RunFailed."""
    with serving(cache) as address:
        return asyncio.run(_measure(address, TokenCache(cache).video_ids, requests, rounds))


def serving(cache: str) -> AbstractContextManager[str]:
    """Serve a cache by ``jobs.serve`` in this context, which has its address. Raises RunFailed."""
    return served("jobs.serve", cache, "--port", ready="/ready", patience_s=PATIENCE_S)


@asynccontextmanager
async def client_of(address: str, key: str = "") -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a client of a server for any number of requests at once, and the name of the server's model."""
    import httpx  # noqa: PLC0415 - comes with vLLM

    limits = httpx.Limits(max_connections=None)
    # A connection a request: the server may close one that rests in the very moment in which it is used again.
    headers = {"connection": "close", **({"authorization": f"Bearer {key}"} if key else {})}
    async with httpx.AsyncClient(base_url=address, limits=limits, headers=headers, timeout=PATIENCE_S) as client:
        yield client, (await client.get("/v1/models")).json()["data"][0]["id"]


async def answered(client: httpx.AsyncClient, request: JsonObject) -> httpx.Response:
    """Return the whole answer to a chat request. Raises RunFailed where there is none."""
    answer = await client.post("/v1/chat/completions", json=request)
    if answer.is_error:
        raise RunFailed(f"jobs.serve answers {answer.status_code}: {answer.text[:500]}")
    return answer


async def _measure(address: str, videos: list[str], requests: int, rounds: int) -> list[Waited]:
    """Send rounds of requests all at once, alone and beside a client of large texts, and return how long they waited.

    Of each round the median and the 99th percentile are taken, and of all rounds the medians of these.
    """
    seconds, n_large = {False: list[list[float]](), True: []}, 0
    async with client_of(address) as (client, model):
        await _ask(client, model, videos[0])
        for _ in range(rounds):
            for large, of_rounds in seconds.items():
                sender = asyncio.create_task(_send_large(client, model)) if large else None
                asked = (_ask(client, model, videos[number % len(videos)]) for number in range(requests))
                of_rounds.append(sorted(await asyncio.gather(*asked)))
                if sender is not None:
                    sender.cancel()
                    n_large += await sender
    return [
        Waited(
            large=large,
            requests=requests,
            p50_s=statistics.median(took[len(took) // 2] for took in of_rounds),
            p99_s=statistics.median(took[len(took) * 99 // 100] for took in of_rounds),
            n_large=n_large if large else 0,
        )
        for large, of_rounds in seconds.items()
    ]


def body(model: str, video_id: str | None, text: str) -> JsonObject:
    """Return the body of a chat request that asks ``text`` about a cached video, or about none."""
    video: JsonObject = {"type": "video_url", "video_url": {"url": f"cache://{video_id}"}}
    content: list[JsonObject] = [*([] if video_id is None else [video]), {"type": "text", "text": text}]
    return {"model": model, "max_tokens": 4, "temperature": 0, "messages": [{"role": "user", "content": content}]}


async def _ask(client: httpx.AsyncClient, model: str, video_id: str) -> float:
    """Ask about a video and return the seconds until the answer. Raises RunFailed where there is none."""
    started = time.monotonic()
    await answered(client, body(model, video_id, "What happens?"))
    return time.monotonic() - started


async def _send_large(client: httpx.AsyncClient, model: str) -> int:
    """Send texts of 5 MB one behind the other until cancelled; return how many were answered."""
    import httpx  # noqa: PLC0415

    n_answered = 0
    data, kind = json.dumps(body(model, "any", _LARGE)).encode(), {"content-type": "application/json"}
    try:
        while True:
            with suppress(httpx.TransportError):  # the server closes the connection once it has refused
                await client.post("/v1/chat/completions", content=data, headers=kind)
            n_answered += 1
    except asyncio.CancelledError:
        return n_answered
