"""Several API server processes before one engine, by jobs.serve and by the command that it prints."""

import asyncio
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.builders.answers import tiny_cache
from tests.builders.runs import family
from tests.builders.servers import (
    KEY,
    N_TOKENS,
    Admitted,
    ask,
    count_of,
    ended,
    expected,
    fetched,
    parts,
    same,
    serving,
)
from tests.waiting import wait_until

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TWO = ("--engine-param", "api_server_count=2")
N_ASKED = 200


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "c"
    tiny_cache(folder, ("a", "b"))
    return folder


def client_of(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300)


def servers_of(process):
    """The ids of the API servers' processes."""
    return [pid for pid, title in family(process.pid).items() if "APIServer" in title]


def test_all_of_them_answer_and_sigterm_lets_their_requests_end(cache):
    texts = {name: expected(cache, "Who?", [name], 0.1)[1] for name in "ab"}

    async def all_of_them(address):
        # A connection for each: it is which a process takes.
        headers = {"connection": "close"}
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=500, default_headers=headers
        ) as client:

            async def one(name):
                link = f"cache://{name}?retention_ratio=0.1"
                answer = await client.chat.completions.create(
                    model="tiny", messages=parts("Who?", link), max_tokens=N_TOKENS, temperature=0
                )
                return same(answer.choices[0].message.content, texts[name])

            asked = (one("ab"[number % 2]) for number in range(N_ASKED))
            return Counter(map(str, await asyncio.gather(*asked, return_exceptions=True)))

    body = {"model": "tiny", "messages": parts("Who?", "cache://a"), "max_tokens": 300, "ignore_eos": True}
    with serving(cache, *TWO, "--shutdown-timeout", "120", stock=True) as (process, address):
        assert len(servers_of(process)) == 2
        assert asyncio.run(all_of_them(address)) == {"True": N_ASKED}
        with pytest.raises(openai.BadRequestError, match="'nope' is not in the cache"):
            ask(client_of(address), parts("x", "cache://nope"))
        assert fetched(f"{address}/v1/models")[0] == 401
        # All are let in before the signal: a server without a request ends at once, and who is about to ask is cut off.
        asked = [Admitted(address, body) for _ in range(20)]
        before = count_of(address, "vllm:generation_tokens_total")
        for one in asked:
            one.send_body()
        wait_until(lambda: count_of(address, "vllm:generation_tokens_total") > before, "requests that run")
        process.terminate()
        assert [one.status() for one in asked] == [200] * 20
        assert process.wait(60) == 0


def test_an_api_server_that_is_killed_under_load_ends_the_server(cache):
    """Whatever runs it may start it again; nobody waits for an answer that does not come."""
    body = {"model": "tiny", "messages": parts("Who?", "cache://a"), "max_tokens": 200, "ignore_eos": True}
    killed = threading.Event()
    with serving(cache, *TWO) as (process, address), ThreadPoolExecutor(20) as pool:

        def ask_until_the_kill():
            statuses = {ended(f"{address}/v1/chat/completions", body)}
            while not killed.is_set():
                statuses.add(ended(f"{address}/v1/chat/completions", body))
            return statuses

        asked = [pool.submit(ask_until_the_kill) for _ in range(20)]
        try:
            wait_until(lambda: count_of(address, "vllm:generation_tokens_total") > 0, "requests that run")
            os.kill(servers_of(process)[0], signal.SIGKILL)
        finally:
            killed.set()
        assert set().union(*(one.result() for one in asked)) <= {200, 500, 503, None}
        assert process.wait(120) != 0
