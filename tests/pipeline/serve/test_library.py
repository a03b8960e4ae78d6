"""Cached videos in a vLLM of one's own."""

import pytest

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, load_language_model, prompt_builder
from pipeline import TokenCache, vllm_input, vllm_options
from pipeline.errors import UsageError
from tests import vllm_here
from tests.builders.answers import tiny_cache

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


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
    with pytest.raises(ValueError, match="no character"):
        vllm_input(cache.get("a"), "a \U0010fffe?")
    with pytest.raises(ValueError, match="the text has <video>, which stands for a video"):
        vllm_input(cache.get("a"), "What?", system="Say <video>.")
    with pytest.raises(ValueError, match="--positions original needs transformers"):
        vllm_input(cache.get("a"), "What?", positions="original")
