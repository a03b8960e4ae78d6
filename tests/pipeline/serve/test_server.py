"""vLLM's own server on a cache, asked by the official client of the OpenAI API."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from gstep.errors import ModelError
from jobs import compact, remove
from pipeline import TokenCache
from pipeline.errors import UsageError
from pipeline.serve.config import ServeConfig
from pipeline.serve.server import make_server_arguments
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.builders.answers import SHAPE, tiny_cache
from tests.builders.caches import encoded, random_tokens, write_shard
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
LARGE = (280, 49, 64)  # a quarter of it is more than vLLM makes room for by itself


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "c"
    tiny_cache(folder, ("a", "dir/b.mp4"), failed=("bad",))
    return folder


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """Another cache of the same server, that tests do damage to."""
    folder = tmp_path_factory.mktemp("more") / "c"
    store = tiny_cache(folder, ("redone", "held"))
    for run, name in (("later", "x"), ("afar", "far"), ("later", "old")):
        write_shard(store, run, encoded(name, random_tokens(7, SHAPE), 0.25, "gstep"))
    return folder


@pytest.fixture(scope="module")
def served(cache, more):
    """(process, address)."""
    with serving(cache, "--cache", f"more={more}", "--refresh-seconds", "0.5", stock=True) as served:
        yield served


@pytest.fixture(scope="module")
def address(served):
    return served[1]


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300)


@pytest.mark.parametrize(("names", "ratio"), [(("a",), None), (("dir/b.mp4",), 0.1), (("dir/b.mp4", "a"), 0.2)])
def test_it_answers_as_the_model_does(cache, client, names, ratio):
    query = "" if ratio is None else f"?retention_ratio={ratio}"
    n_tokens, text = expected(cache, "What is happening, and why?", names, ratio)
    messages = parts("What is happening, and why?", *(f"cache://{name}{query}" for name in names))
    answer = ask(client, messages)
    assert answer.usage.prompt_tokens == n_tokens
    assert same(answer.choices[0].message.content, text)
    streamed = ask(client, messages, stream=True)
    assert same("".join(chunk.choices[0].delta.content or "" for chunk in streamed), text)


def test_what_it_does_not_have_is_a_4xx_with_the_reason_and_nothing_is_fetched(client):
    for url, why in (
        ("cache://nope", "'nope' is not in the cache"),
        ("cache://bad", "corrupt: damaged"),
        ("cache://a?cache=other", "no cache 'other'"),
        ("file:///etc/passwd", "no files and no addresses"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            ask(client, parts("x", url))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v.mp4"
        for kind in ("video_url", "image_url", "audio_url"):
            with pytest.raises(openai.BadRequestError):
                ask(client, [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}])
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody came
            listener.accept()


def test_the_key_is_asked_for_on_every_route(address):
    """vLLM's own check leaves some of them to anybody: one answers chats, another reads the cache."""
    stranger = openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        ask(stranger, parts("x", "cache://a"))
    routes = json.loads(fetched(f"{address}/openapi.json", key=KEY)[1])["paths"]
    assert {"/invocations", "/tokenize", "/v1/chat/completions", "/health"} <= routes.keys()
    chat = {"model": "tiny", "messages": parts("x", "cache://a"), "max_tokens": 1}
    for path, methods in routes.items():
        for method in methods:
            body = None if method == "get" else chat
            status, _ = fetched(f"{address}{path}", body, method.upper())
            assert (status == 401) == (path not in ("/health", "/ping")), (path, method, status)
    assert fetched(f"{address}/invocations", chat, "POST", key=KEY)[0] == 200


def test_a_request_that_would_change_the_prompt_is_refused(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    for more, why in (
        ({"tools": [tool], "tool_choice": "none"}, ""),
        ({"extra_body": {"chat_template_kwargs": {"add_vision_id": True}}}, "add_vision_id cannot go"),
        ({"extra_body": {"truncate_prompt_tokens": 20}}, ""),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, parts("x", "cache://a"), **more)
        assert why in str(refused.value)


def named(client, prompt, *urls):
    """(text, content names of the rows) of an answer."""
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=parts(prompt, *urls), max_tokens=N_TOKENS, temperature=0
    )
    return raw.parse().choices[0].message.content, raw.headers["x-cached-videos"]


@contextmanager
def asked_meanwhile(ask_once):
    """Eight threads that ask again and again."""
    stop = threading.Event()

    def ask_on():
        while not stop.is_set():
            ask_once()

    threads = [threading.Thread(target=ask_on) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_redone_video_is_answered_afresh_and_no_answer_fails(client, more):
    """While many ask, each gets the answer to the rows that it names, and in the end those are the new ones."""
    _, old = named(client, "Who?", "cache://redone?cache=more")
    texts, answers = {old: expected(more, "Who?", ["redone"], None)[1]}, []

    def ask_once():
        links = (f"cache://redone?cache=more{query}" for query in ("", "&retention_ratio=0.25"))
        answers.extend(named(client, "Who?", link) for link in links)

    with asked_meanwhile(ask_once):
        wait_until(lambda: answers, "an answer from the old rows")
        redone = encoded("redone", random_tokens(9, SHAPE), 0.25, "gstep", attempts=2)
        write_shard(TokenCache(more).store, "redo", redone)
        row = TokenCache(more).metadata("redone")
        new = f"redone={row['token_shard']}:{row['first_row_group']}:{row['checksum']}"
        wait_until(lambda: [name for _, name in answers[-20:]] == [new] * 20, "twenty answers from the new rows")
    texts[new] = expected(more, "Who?", ["redone"], None)[1]
    assert {name for _, name in answers} == {old, new} and texts[old] != texts[new]
    assert all(same(text, texts[name]) for text, name in answers)


def test_a_store_that_is_away_is_a_503_and_what_is_held_goes_on(client, address, more):
    held = named(client, "Who?", "cache://held?cache=more")
    more.rename(more.with_name("away"))
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, parts("Who?", "cache://x?cache=more"))
        assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"] == "10"
        assert named(client, "Who?", "cache://held?cache=more") == held
        assert fetched(f"{address}/health")[0] == 200
    finally:
        more.with_name("away").rename(more)
    named(client, "Who?", "cache://x?cache=more")


def test_a_video_larger_than_all_at_the_start_is_a_503_and_a_share_of_it_is_answered(client, more):
    write_shard(TokenCache(more).store, "grown", encoded("grown", random_tokens(7, LARGE), 0.25, "gstep"))
    wait_until(lambda: status_of(client, parts("Who?", "cache://grown?cache=more")) != 400, "that the server knows it")
    with pytest.raises(openai.InternalServerError, match=r"'grown' has 3,431 tokens .* restart the server") as caught:
        ask(client, parts("Who?", "cache://grown?cache=more"))
    assert caught.value.status_code == 503
    text, _ = named(client, "Who?", "cache://grown?cache=more&retention_ratio=0.01")
    assert same(text, expected(more, "Who?", ["grown"], 0.01)[1])


def status_of(client, messages):
    try:
        ask(client, messages)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_tokens_per_video": 48}, "--max-tokens-per-video 48: the caches have a video of 49; give that or more"),
        (
            {"max_tokens_per_video": 4000, "engine_param": ["max-num-batched-tokens=2k"]},
            r"=2000 limits a video to 3,149 .* has 4,001: set max_num_batched_tokens=4001 or more",
        ),
        ({"engine_param": ["kv-offloading-backend=lmcache"]}, "kv_offloading_backend=lmcache: it is not known to tell"),
        ({"engine_param": ['kv_transfer_config={"kv_connector": "NixlConnector"}']}, "NixlConnector: it is not known"),
    ],
)
def test_what_a_server_could_not_answer_right_is_refused_before_it_starts(cache, options, why):
    with pytest.raises(UsageError, match=why):
        make_server_arguments(ServeConfig(cache=str(cache), **options))


def test_room_for_larger_videos_is_the_engines(cache):
    larger = ServeConfig(cache=str(cache), max_tokens_per_video=9000)
    assert "--max-num-batched-tokens=9001" in make_server_arguments(larger)  # and the row of the newline


def test_the_renderer_refuses_a_connector_in_whatever_way_it_came(cache):
    from pipeline.serve.renderer import CachedVideosRenderer  # noqa: PLC0415 - after what is set for vLLM

    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="LMCacheMPConnector"))
    with pytest.raises(ModelError, match="LMCacheMPConnector: it is not known"):
        CachedVideosRenderer(config, None)


def test_rows_that_the_engine_never_got_are_sent_again(client, more, address):
    """After a request that is refused once its prompt is made, vLLM's server takes its rows for sent."""
    asked = {"model": "tiny", "messages": parts("Who?", "cache://far?cache=more"), "max_tokens": 10**6}
    assert fetched(f"{address}/v1/chat/completions", asked, "POST", key=KEY)[0] == 400
    text, _ = named(client, "Who?", "cache://far?cache=more")
    assert same(text, expected(more, "Who?", ["far"], None)[1])
    queries = [line for line in fetched(f"{address}/metrics", key=KEY)[1].splitlines() if "mm_cache_hits" in line]
    assert queries and float(queries[-1].rpartition(" ")[2]) > 0  # rows that the engine has are not sent again


def test_a_merge_and_a_removal_fail_no_request(client, more):
    """While many ask, files are merged and deleted at once, and a video is removed: who asks for it is told so."""
    texts = {name: expected(more, "Why?", [name], 0.1)[1] for name in ("redone", "held", "old")}
    answers, refused = [], []

    def ask_once():
        for name in texts:
            try:
                answers.append((name, ask(client, parts("Why?", f"cache://{name}?cache=more&retention_ratio=0.1"))))
            except openai.APIStatusError as error:
                refused.append((name, error.status_code))

    (more.parent / "ids").write_text("old\n")
    merge = compact, [str(more), "--tokens", "--keep-minutes", "0"]
    removal = remove, [str(more), "--ids", str(more.parent / "ids"), "--reason", "asked to", "--keep-minutes", "0"]
    with asked_meanwhile(ask_once):
        for module, argv in (merge, merge, removal, merge, merge):
            assert module.main(argv) == 0
            before = len(answers)
            wait_until(lambda before=before: len(answers) > before + 20, "twenty answers")
        wait_until(lambda: len(refused) > 5, "that the video is gone")
    assert all(same(answer.choices[0].message.content, texts[name]) for name, answer in answers)
    assert set(refused) == {("old", 410)}


def test_long_texts_are_refused(client, address):
    with pytest.raises(openai.BadRequestError, match="300,000 characters"):
        ask(client, [{"role": "user", "content": "x" * 300_000}])
    assert fetched(f"{address}/v1/chat/completions", {"messages": "x" * 5_000_000}, "POST", key=KEY)[0] == 413


def test_a_placeholder_in_a_text_is_refused_by_name_also_without_a_video(client):
    for messages in (parts("What is a <video>?", "cache://a"), [{"role": "user", "content": "What is an <image>?"}]):
        with pytest.raises(openai.BadRequestError, match=r"the text has <(video|image)>, which stands for a video"):
            ask(client, messages)
    assert ask(client, parts("What is a < video >, a <|video_pad|>?", "cache://a")).usage.completion_tokens == N_TOKENS


def test_the_responses_api_takes_lists(cache, client):
    n_tokens, text = expected(cache, "Who?", ["a"], None)
    content = [{"type": "input_file", "file_url": "cache://a"}, {"type": "input_text", "text": "Who?"}]
    for parts_asked, tokens in ((content, n_tokens), (content[1:], None)):
        answer = client.responses.create(
            model="tiny", input=[{"role": "user", "content": parts_asked}], max_output_tokens=N_TOKENS, temperature=0
        )
        assert tokens is None or (answer.usage.input_tokens == tokens and same(answer.output_text, text))


def kill_under_load(process, address, title):
    """Kill a process of a server while twenty ask, and return the exit status: whatever runs it may start it again.

    Nobody waits for an answer that does not come.
    """
    body = {"model": "tiny", "messages": parts("Who?", "cache://a"), "max_tokens": 200, "ignore_eos": True}
    killed, before = threading.Event(), count_of(address, "vllm:generation_tokens_total")

    def ask_until_the_kill():
        statuses = {ended(f"{address}/v1/chat/completions", body)}
        while not killed.is_set():
            statuses.add(ended(f"{address}/v1/chat/completions", body))
        return statuses

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask_until_the_kill) for _ in range(20)]
        try:
            wait_until(lambda: count_of(address, "vllm:generation_tokens_total") > before, "requests that run")
            os.kill(next(pid for pid, name in family(process.pid).items() if title in name), signal.SIGKILL)
        finally:
            killed.set()
        assert set().union(*(one.result() for one in asked)) <= {200, 500, 503, None}
    return process.wait(120)


def test_an_engine_or_an_api_server_that_is_killed_ends_the_server(served, cache):
    kill_under_load(*served, "EngineCore")
    with serving(cache, *TWO) as several:
        assert kill_under_load(*several, "APIServer") != 0


def test_sigterm_takes_no_other_request_as_long_as_one_is_let_in(cache):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "ignore_eos": True}
    with serving(cache, "--shutdown-timeout", "120") as (server, address):
        held = Admitted(address, body)
        server.terminate()
        # It is there to refuse others as long as it waits for the body of one that it has let in.
        wait_until(lambda: fetched(f"{address}/v1/models", key=KEY)[0] == 503, "the server to drain")
        held.send_body()
        assert held.status() == 200
        assert server.wait(60) == 0


def test_all_api_servers_answer_and_sigterm_lets_their_requests_end(cache):
    texts = {name: expected(cache, "Who?", [name], 0.1)[1] for name in ("a", "dir/b.mp4")}

    async def ask_all(address):
        headers = {"connection": "close"}  # a connection for each: it is which a process takes
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=500, default_headers=headers
        ) as client:

            async def ask_one(name):
                answer = await ask(client, parts("Who?", f"cache://{name}?retention_ratio=0.1"))
                return same(answer.choices[0].message.content, texts[name])

            asked = (ask_one(name) for _ in range(N_ASKED // 2) for name in texts)
            return Counter(map(str, await asyncio.gather(*asked, return_exceptions=True)))

    body = {"model": "tiny", "messages": parts("Who?", "cache://a"), "max_tokens": 300, "ignore_eos": True}
    with serving(cache, *TWO, "--shutdown-timeout", "120", stock=True) as (process, address):
        assert len([title for title in family(process.pid).values() if "APIServer" in title]) == 2
        assert asyncio.run(ask_all(address)) == {"True": N_ASKED}
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300)
        with pytest.raises(openai.BadRequestError, match="'nope' is not in the cache"):
            ask(client, parts("x", "cache://nope"))
        assert fetched(f"{address}/v1/models")[0] == 401
        # All are let in before the signal: a server without a request ends at once, and who is about to ask is cut off.
        running = [Admitted(address, body) for _ in range(20)]
        before = count_of(address, "vllm:generation_tokens_total")
        for one in running:
            one.send_body()
        wait_until(lambda: count_of(address, "vllm:generation_tokens_total") > before, "requests that run")
        process.terminate()
        assert [one.status() for one in running] == [200] * 20
        assert process.wait(60) == 0
