"""vLLM with live pruning keeps the tokens of jobs.prune and answers as its cache does; cached videos in one's own vLLM.

Steps are so short that they begin and end inside videos, and so are the blocks of the prefix cache.
"""

import base64
import os
from contextlib import suppress
from functools import cache as remember
from types import SimpleNamespace

import pytest

from gstep.backbones import ModelSource, choose_runtime
from gstep.errors import ModelError
from gstep.language import Decoding, load_language_model, prompt_builder
from gstep.serving.live import LIVE, LivePruning
from gstep.serving.options import make_live_engine_options, prepare_process
from pipeline import TokenCache, vllm_input, vllm_options
from pipeline.errors import UsageError
from tests import vllm_here
from tests.builders.answers import tiny_cache
from tests.builders.servers import KEY, N_TOKENS, expected, fetched, parts, same, serving
from tests.builders.servers import ask as ask_server
from tests.pipeline.serve.live_cases import N_FRAMES, NAMES, SHORT, pruned_cache

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STEP = 48  # tokens: a video has more
# The second question on a video finds all of it in the prefix cache. A marker in a text is no video's.
TEXTS = ("What happens, and why?", "Is <|vision_start|> before <|vision_end|>, and who is it?")


@pytest.fixture(scope="module")
def make_cache(tmp_path_factory):
    """A function that makes the videos and the cache of a model, each once."""
    return remember(lambda model: pruned_cache(tmp_path_factory.mktemp("live"), model))


@pytest.fixture(scope="module", params=["tiny-qwen2-5-vl", "tiny-qwen3-vl"])
def case(request, make_cache):
    """(model, folder of videos, cache, vLLM's engine, the indices that it kept of each video)."""
    videos, cache = make_cache(request.param)
    source, kept = ModelSource.resolve(request.param), []
    prepare_process("cpu", 1)
    from vllm import LLM  # noqa: PLC0415 - after what is set for it

    select_mask = LivePruning.select_mask

    def spy(live, tokens):
        mask = select_mask(live, tokens)
        kept.append(mask.nonzero()[:, 0].tolist())
        return mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LivePruning, "select_mask", spy)
        options = make_live_engine_options(source, choose_runtime("cpu", "float32"), LivePruning(), N_FRAMES)
        options |= {"limit_mm_per_prompt": {"image": 1, "video": 2}, "allowed_local_media_path": str(videos)}
        options |= {"max_num_batched_tokens": STEP, "block_size": 32, "max_num_seqs": 4, "max_model_len": 2048}
        engine = LLM(**options)
        by_v2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"  # by tests/test_vllm.py
        assert engine.llm_engine.vllm_config.use_v2_model_runner == by_v2
        kept.clear()  # of the start
        yield request.param, videos, cache, engine, kept
        engine.llm_engine.engine_core.shutdown()


def ask(engine, videos, names, texts):
    """The outputs of questions on the same videos, asked at once."""
    from vllm import SamplingParams  # noqa: PLC0415 - as above

    links = [{"type": "video_url", "video_url": {"url": (videos / name).as_uri()}} for name in names]
    messages = [[{"role": "user", "content": [*links, {"type": "text", "text": text}]}] for text in texts]
    return engine.chat(messages, SamplingParams(max_tokens=N_TOKENS, temperature=0.0), use_tqdm=False)


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[1:], (SHORT,), NAMES[::-1]])
def test_it_keeps_the_tokens_of_a_cache_and_gives_its_answers(case, names):
    model, videos, cache, engine, kept = case
    kept.clear()
    first, *_ = asked = [*ask(engine, videos, names, TEXTS[:1]), *ask(engine, videos, names, TEXTS[1:])]
    for text, output in zip(TEXTS, asked, strict=True):
        n_tokens, answer = expected(cache, text, names, None, model)
        assert len(output.prompt_token_ids) == n_tokens
        assert same(output.outputs[0].text, answer)
    if len(names) == 1:  # the two at once are known to the encoder cache
        assert kept == [TokenCache(cache).get(names[0]).index.tolist()]
        assert len(kept[0]) > STEP or names != NAMES[:1]
        assert first.num_cached_tokens < asked[1].num_cached_tokens
    else:
        assert kept == []


def test_questions_at_once_get_the_answers_of_questions_alone(case):
    model, videos, cache, engine, _ = case
    engine.reset_prefix_cache()
    texts = [f"{number}: {text}" for number in range(3) for text in TEXTS]
    for text, output in zip(texts, ask(engine, videos, NAMES, texts), strict=True):
        assert same(output.outputs[0].text, expected(cache, text, NAMES, None, model)[1])


def test_the_model_refuses_a_connector_in_whatever_way_it_came():
    from gstep.serving.live_models import LiveQwen3VL  # noqa: PLC0415 - as above

    config = SimpleNamespace(
        kv_transfer_config=None,
        ec_transfer_config=SimpleNamespace(ec_connector="ECExampleConnector"),
        lora_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    with pytest.raises(ModelError, match="ec_transfer_config: "):
        LiveQwen3VL(vllm_config=config)


def test_names_of_videos_in_caches_of_vllm_say_how_they_were_pruned():
    from gstep.serving import live_models  # noqa: PLC0415 - as above

    def name_of(live):
        processor = object.__new__(live_models._Qwen2Processor)
        config = SimpleNamespace(**{LIVE: live.as_options()})
        context = SimpleNamespace(get_mm_config=lambda: SimpleNamespace(mm_hasher_algorithm="sha256"))
        processor.info = SimpleNamespace(model_id="m", ctx=context, get_hf_config=lambda: config)
        hashes = {"video": ["pixels"], "image": []}
        inputs = SimpleNamespace(get_mm_hashes=lambda *_: hashes)
        return processor._get_mm_hashes(inputs)["video"][0]

    names = [name_of(live) for live in (LivePruning(), LivePruning("novelty"), LivePruning(retention_ratio=0.5))]
    assert len(set(names)) == 3 and all(name.endswith("-pixels") for name in names)


def test_a_function_of_an_unknown_vllm_is_refused():
    from gstep.serving.live_models import replace_names  # noqa: PLC0415 - as above

    def count(n):
        return [len(range(n)) for _ in range(1)]

    assert replace_names(count, ("len",), lambda _: 7)(3) == [7]
    with pytest.raises(ImportError, match="reads none of other"):
        replace_names(count, ("other",), lambda _: 7)


def test_a_server_prunes_what_requests_bring_and_reads_nothing_else(make_cache):
    model = "tiny-qwen3-vl"
    videos, cache = make_cache(model)
    flags = ("--model", model, "--served-model-name", "tiny", "--dtype", "float32", "--num-frames", str(N_FRAMES))
    limits = ("--max-request-bytes", "8000000", "--engine-param", "max_model_len=4096")
    with serving(cache, *flags, *limits, stock=True, live=True) as (server, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0, timeout=300)
        for name in (*NAMES, NAMES[0]):
            url = f"data:video/mp4;base64,{base64.b64encode((videos / name).read_bytes()).decode()}"
            n_tokens, text = expected(cache, "Who?", [name], None, model)
            answer = ask_server(client, parts("Who?", url))
            assert answer.usage.prompt_tokens == n_tokens
            assert same(answer.choices[0].message.content, text)
        with suppress(openai.BadRequestError):  # whatever a text has, the engine lives
            ask_server(client, parts("<|video_pad|> and <|vision_start|><|video_pad|>?", url))
        for url in ((videos / NAMES[0]).as_uri(), f"{address}/health", "cache://a"):
            with pytest.raises(openai.BadRequestError):
                ask_server(client, parts("Who?", url))
        assert ask_server(client, parts("Who?")).usage.completion_tokens > 0
        assert fetched(f"{address}/v1/models")[0] == 401
        assert fetched(f"{address}/v1/chat/completions", {"messages": "x" * 9_000_000}, "POST", key=KEY)[0] == 413
        server.terminate()
        assert server.wait(60) == 0


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library") / "c"
    tiny_cache(folder, ("a", "b"))
    return TokenCache(folder)


def test_an_engine_of_ones_own_answers_as_transformers_does(cache):
    options = vllm_options(cache, dtype="float32", **vllm_here.PARAMS)
    from vllm import EngineArgs, SamplingParams  # noqa: PLC0415 - after vllm_options
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

    engine = LLMEngine.from_engine_args(EngineArgs(**options))
    a, b = (cache.get(name, 0.10) for name in ("a", "b"))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked = {"1": ([a], "What happens here?", None), "2": ([b, a], "Which is first?", "Be brief.")}
    for name, (videos, prompt, system) in asked.items():
        one = videos[0] if len(videos) == 1 else videos
        engine.add_request(name, vllm_input(one, prompt, system=system), params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    engine.engine_core.shutdown()
    source = ModelSource.resolve("tiny")
    model = load_language_model(source, choose_runtime("cpu", "float32"))
    for name, (videos, prompt, system) in asked.items():
        visuals = [video.visual for video in videos]
        built = prompt_builder(source).build(prompt, visuals, system)
        assert tuple(found[name]) == model.generate([built], [Decoding(max_new_tokens=6)])[0].token_ids


def test_what_does_not_go_together_is_refused(cache):
    with pytest.raises(UsageError, match=r"own vision encoder only\. Name the model that the cache was made with"):
        vllm_options(cache, "tiny-qwen3-vl")
    with pytest.raises(ValueError, match="at least one"):
        vllm_input([], "What?")
    with pytest.raises(ValueError, match="the text has <video>, which stands for a video"):
        vllm_input(cache.get("a"), "What?", system="Say <video>.")
    with pytest.raises(ValueError, match="--positions original needs transformers"):
        vllm_input(cache.get("a"), "What?", positions="original")
