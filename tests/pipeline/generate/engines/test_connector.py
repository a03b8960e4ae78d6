"""Between vLLM's processes go names of rows: a server's to its engine's, and an engine's to its workers'."""

import pickle
import threading
import time
from functools import partial

import pytest
import torch

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, prompt_builder
from gstep.serving.items import SEPARATOR
from pipeline import TokenCache
from pipeline.generate.engines import EngineSetup, load_engine
from pipeline.generate.engines.cached_rows import RowReader, read_outline
from tests import vllm_here
from tests.pipeline.asking import tiny_cache
from tests.pipeline.caches import make_cache, random_tokens
from tests.waiting import wait_until

from pipeline.generate.engines.connector import Answering, Asking, connected  # isort: skip - once vllm_here has looked

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RUNTIME = choose_runtime("cpu", "float32")
HOW = [Decoding(max_new_tokens=6)] * 4


@pytest.fixture
def asked(tmp_path):
    """(cache, prompts of names, the same with rows, some bytes of every row)."""
    tiny_cache(tmp_path / "c", ("a", "b"))
    cache, build = TokenCache(tmp_path / "c"), prompt_builder(ModelSource.resolve("tiny")).build
    videos = [cache.get(name).visual for name in cache]
    outlines = [read_outline(cache, cache.metadata(name), None, "index") for name in cache]
    texts = ("Who?", "Where is it, and what for?")
    marks = [row[:16].view(torch.int16).numpy().tobytes() for video in videos for row in video.tokens]
    return (
        cache,
        [build(text, [outline]) for outline in outlines for text in texts],
        [build(text, [video]) for video in videos for text in texts],
        marks,
    )


def engine_of(cache, tensor_parallel=1):
    setup = EngineSetup("vllm", tensor_parallel, vllm_here.PARAMS, largest_video=400, cache=cache)
    return load_engine(setup, ModelSource.resolve("tiny"), RUNTIME)


def expected(prompts):
    answers = load_engine(EngineSetup(), ModelSource.resolve("tiny"), RUNTIME).generate(prompts, HOW)
    return [answer.token_ids for answer in answers]


def found(marks, messages):
    """How many rows are in the messages."""
    data = b"".join(messages)
    return sum(mark in data for mark in marks)


def test_no_row_goes_from_a_server_to_its_engine(asked, monkeypatch):
    cache, named, whole, marks = asked
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    engine, sent = engine_of(cache), []
    core = engine._engine.engine_core
    encode = core.encoder.encode

    def counted(request):
        parts = encode(request)
        sent.extend(bytes(memoryview(part).cast("B")) for part in parts)
        return parts

    core.encoder.encode = counted
    try:
        answers = engine.generate(named, HOW)
        assert found(marks, sent) == 0 and 0 < sum(map(len, sent)) < 4 * 4000
        sent.clear()
        assert [a.token_ids for a in engine.generate(whole, HOW)] == [a.token_ids for a in answers] == expected(whole)
        assert found(marks, sent) == len(marks)  # so rows are seen where they are sent
    finally:
        engine.close()


def test_no_row_goes_from_an_engine_to_its_workers(asked):
    """Two of them, that each hold half of the model and read the cache."""
    cache, named, whole, marks = asked
    engine, sent = engine_of(cache, tensor_parallel=2), []
    queue = engine._engine.engine_core.engine_core.model_executor.rpc_broadcast_mq
    enqueue = queue.enqueue

    def counted(told, *more, **keywords):
        sent.append(pickle.dumps(told))
        return enqueue(told, *more, **keywords)

    queue.enqueue = counted
    try:
        answers = engine.generate(named, HOW)
        assert found(marks, sent) == 0 and sent
        assert [answer.token_ids for answer in answers] == expected(whole)
    finally:
        engine.close()


@pytest.fixture
def sides(tmp_path):
    """(cache, the readers of two workers, a scheduler that asks them for at most 60 rows ahead)."""
    make_cache(tmp_path / "c", {name: random_tokens(i, (4, 49, 64)) for i, name in enumerate("abc")})
    readers = [RowReader({"": partial(TokenCache, tmp_path / "c")}, 2**30) for _ in range(2)]
    addresses = [f"\0{tmp_path}-{number}" for number in range(2)]
    workers = [Answering(*worker) for worker in zip(readers, addresses, strict=True)]
    asking = Asking(map(connected, addresses), 60)
    yield TokenCache(tmp_path / "c"), readers, asking
    asking.close()
    for worker in workers:
        worker.close()
    wait_until(lambda: not any(t.name == "row-requests" for t in threading.enumerate()), "the threads to end")


def test_rows_are_asked_for_as_far_as_there_is_room(sides):
    cache, readers, asking = sides
    a, b = (read_outline(cache, cache.metadata(name), None, "index").rows + SEPARATOR for name in "ab")
    wait_until(lambda: asking.ready("1", {a: 49}), "the first rows")
    for _ in range(3):  # the first request still waits for its turn, and 49 + 49 rows are too many
        assert not asking.ready("2", {b: 49})
        time.sleep(0.02)
    assert [reader.n_read for reader in readers] == [1, 1]
    asking.place("1", a)
    assert asking.take_placed([]) == [a]
    wait_until(lambda: asking.ready("2", {b: 49}), "the second")
    assert asking.ready("3", {a: 49})  # in the encoder caches, until vLLM takes it out of them
    assert asking.take_placed([a]) == []
    assert not asking.ready("3", {a: 49})
    asking.forget("2")  # its client has left
    wait_until(lambda: asking.ready("3", {a: 49}), "room")
    assert [reader.n_read for reader in readers] == [2, 2]


def test_rows_that_are_not_there_fail_the_requests_that_ask_for_them(sides):
    cache, _, asking = sides
    good = read_outline(cache, cache.metadata("c"), None, "index").rows + SEPARATOR
    wrong = good.replace("/49/", "/50/")
    wait_until(lambda: (asking.ready("1", {wrong: 50}), asking.take_failed() == {"1"})[1], "the fault")
    assert asking.reasons["1"].startswith("unknown-video: ")
    assert not asking.ready("2", {wrong: 50, good: 49}) and asking.take_failed() == {"2"}
    wait_until(lambda: asking.ready("3", {good: 49}), "the others")
    assert asking.take_failed() == set()
