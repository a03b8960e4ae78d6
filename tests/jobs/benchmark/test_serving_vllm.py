"""The benchmark of answering: every way asks the same questions, and those that prune inside vLLM keep as much."""

import json
from itertools import product
from statistics import fmean

import pytest

from gstep.backbones import ModelSource
from gstep.language import prompt_builder
from gstep.serving.live import LivePruning
from gstep.serving.options import prepare_process
from jobs.benchmark.serving_ways import CACHED, MODES, ONLINE, PRUNING, OnlineWay, ServingWork, make_questions
from pipeline import TokenCache
from tests import vllm_here  # noqa: F401 - skips this module where there is no vLLM
from tests.interpreter import run_python
from tests.pipeline.serve.live_cases import N_FRAMES, pruned_cache

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROW = 64 * 2  # bytes of a token
SMALL = ["serving", "--num-frames", "8", "--retention-ratio", "1.0", "0.25", "--questions", "1", "4", "--repeats", "1"]
WAYS = (*CACHED, ONLINE)
CASES = list(product(WAYS, (1.0, 0.25), (1, 4)))


@pytest.fixture(scope="module")
def found():
    """(way, share of tokens, questions a video) -> what is measured of it."""
    done = run_python("-m", "jobs.benchmark", *SMALL, "--max-new-tokens", "4", "--modes", *WAYS, "--json", check=True)
    return {(one["mode"], one["retention_ratio"], one["questions"]): one for one in json.loads(done.stdout)["measured"]}


def test_every_way_answers_cold_and_again(found):
    assert (*WAYS, *PRUNING) == MODES
    assert list(found) == [case for case in CASES if case[:2] != (ONLINE, 0.25)]
    for (_, _, questions), one in found.items():
        assert one["requests"] == 4 * questions and one["peak_mb"] > 100
        assert one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0


def test_rows_are_sent_with_each_question_and_others_share_what_the_first_one_about_a_video_left(found):
    for questions in (1, 4):
        rows, texts = found["cached-vllm", 0.25, questions], found["text-vllm", 0.25, questions]
        assert rows["sent_kb"] > 0.9 * ROW * rows["visual_tokens"] / 1e3 > texts["sent_kb"] > 0
        assert found["cached-transformers", 0.25, questions]["sent_kb"] is None
    for mode, ratio in product(("cached-vllm", "text-vllm"), (1.0, 0.25)):
        assert found[mode, ratio, 1]["reused"] < 0.2 < found[mode, ratio, 4]["reused"]


MODEL, RATIO, N_ANSWER = "tiny-qwen2-5-vl", 0.25, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The cache that jobs.prune makes of a few videos."""
    return str(pruned_cache(tmp_path_factory.mktemp("pruned"), MODEL)[1])


@pytest.fixture(scope="module")
def sizes(folder):
    """(number of videos, kept tokens of a video, tokens of a prompt with them), the last two on average."""
    cache, builder = TokenCache(folder), prompt_builder(ModelSource.resolve(MODEL))
    videos, (question,) = [cache.get(video_id) for video_id in cache], make_questions(1)
    prompts = [builder.build(question, [video.visual]) for video in videos]
    return len(videos), fmean(len(video.tokens) for video in videos), fmean(map(len, prompts))


def note_kept(worker):
    """Note what is kept of each video, in the engine's process."""
    select_mask, LivePruning.kept = LivePruning.select_mask, []

    def select_and_note(live, tokens):
        mask = select_mask(live, tokens)
        LivePruning.kept.append(mask.nonzero()[:, 0].tolist())
        return mask

    LivePruning.select_mask = select_and_note


def read_kept(worker):
    return LivePruning.kept


def test_the_way_by_gstep_keeps_the_tokens_of_jobs_prune(folder, sizes, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the engine's process
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    prepare_process("cpu", 1, multiprocessing=True)
    assert PRUNING["live-vllm"] == "gstep"
    way = OnlineWay("live-vllm", ServingWork(MODEL, folder, N_FRAMES, (RATIO,), (1,), N_ANSWER, 1))
    try:
        way._llm.collective_rpc(note_kept)
        asked = way.make_ask(RATIO, 1)()
        (kept,) = way._llm.collective_rpc(read_kept)
    finally:
        way.close()
    cache = TokenCache(folder)
    assert sorted(kept) == sorted(cache.get(video_id).index.tolist() for video_id in cache)
    assert (asked.requests, asked.visual_tokens, asked.prompt_tokens / asked.requests) == sizes
    assert asked.reused_tokens == 0


def test_the_way_by_a_method_of_vllm_reads_as_many_tokens(folder, sizes):
    flags = ["--num-frames", N_FRAMES, "--retention-ratio", RATIO, "--questions", 1, "--max-new-tokens", N_ANSWER]
    flags += ["--model", MODEL, "--cache", folder, "--modes", "evs-vllm", "--repeats", 1, "--json"]
    done = run_python("-m", "jobs.benchmark", "serving", *flags, check=True)
    (one,) = json.loads(done.stdout)["measured"]
    assert (one["mode"], one["retention_ratio"]) == ("evs-vllm", RATIO)
    assert (one["requests"], one["visual_tokens"], one["prefilled_tokens"]) == sizes
    assert one["requests_per_s"] > 0 and one["warm_requests_per_s"] > 0 and one["first_token_s"] > 0
