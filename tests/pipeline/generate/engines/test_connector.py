"""Between vLLM's processes go names of rows: a server's to its engine's, and an engine's to its workers'."""

import pickle

import pytest
import torch

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, prompt_builder
from pipeline import TokenCache
from pipeline.generate.engines import EngineSetup, load_engine
from pipeline.generate.engines.cached_rows import read_outline
from tests import vllm_here
from tests.pipeline.asking import tiny_cache

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

    monkeypatch.setattr(core.encoder, "encode", counted)
    try:
        answers = engine.generate(named, HOW)
        assert found(marks, sent) == 0 and 0 < sum(map(len, sent)) < 4 * 4000
        sent.clear()
        assert [a.token_ids for a in engine.generate(whole, HOW)] == [a.token_ids for a in answers] == expected(whole)
        assert found(marks, sent) == len(marks)  # so rows are seen where they are sent
    finally:
        engine.close()


def test_no_row_goes_from_an_engine_to_its_workers(asked, monkeypatch):
    """Two of them, that each hold half of the model and read the cache."""
    cache, named, whole, marks = asked
    engine, sent = engine_of(cache, tensor_parallel=2), []
    queue = engine._engine.engine_core.engine_core.model_executor.rpc_broadcast_mq
    enqueue = queue.enqueue

    def counted(told, *more, **keywords):
        sent.append(pickle.dumps(told))
        return enqueue(told, *more, **keywords)

    monkeypatch.setattr(queue, "enqueue", counted)
    try:
        answers = engine.generate(named, HOW)
        assert found(marks, sent) == 0 and sent
        assert [answer.token_ids for answer in answers] == expected(whole)
    finally:
        engine.close()
