"""vLLM says what transformers says of the same prompts: texts, choices, scores; with its prefix cache and in parts."""

import dataclasses
import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from gstep.backbones import ModelSource, choose_runtime
from gstep.checkpoints import tiny
from gstep.errors import ModelError
from gstep.language import Decoding, Visual, prompt_builder
from gstep.pruners.cdpruner import CDPruner
from pipeline.generate.answerer import Answerer
from pipeline.generate.engines import EngineCrashed, load_engine
from pipeline.generate.engines.vllm import VllmEngine
from pipeline.generate.late_pruning import LatePruning
from pipeline.generate.questions import AnswerMode, read_given_questions
from pipeline.options import EngineOptions
from tests import vllm_here
from tests.builders.answers import sent, setup_of, tiny_qwen_cache
from tests.gstep.language.prompts import video
from tests.gstep.llms import FAMILIES, RECURRENT, encode, ids_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RUNTIME = choose_runtime("cpu", "float32")
TEXTS = ["A", "B", "C", "yes, always", "yes, never at all", "no"]
MARKERS = "Is <|vision_start|> before <|vision_end|>, and <0.2 seconds> after?"


def engines_of(source, largest_video=400, params=vllm_here.PARAMS, runtime=RUNTIME):
    """(vLLM's, transformers')."""
    given = [f"{name}={json.dumps(value)}" for name, value in params.items()]
    options = EngineOptions(engine="vllm", engine_param=given)
    return load_engine(options, source, runtime, largest_video), load_engine(EngineOptions(), source, runtime)


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name not in RECURRENT])
def family(request):
    """(name, vLLM's engine, transformers' engine)."""
    ours, theirs = engines_of(ModelSource.resolve(request.param))
    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    assert ours._engine.vllm_config.use_v2_model_runner == wanted
    yield request.param, ours, theirs
    ours.close()


def assert_same_answers(ours, theirs, prompts, decodings):
    """Compare texts, tokens and ends, and return vLLM's answers."""
    mine, expected = ours.generate(prompts, decodings), theirs.generate(prompts, decodings)
    assert [(a.text, a.token_ids, a.finish) for a in mine] == [(a.text, a.token_ids, a.finish) for a in expected]
    return mine


def clips(name, ratio):
    """Two videos of the same frames with other tokens kept; of one, frames at both ends keep nothing."""
    whole = encode(name, n_frames=2 if name == "tiny" else 6, grid=(8, 8))
    n, per_frame = len(whole.visual.index), whole.visual.tokens_per_frame
    generator = torch.Generator().manual_seed(int(100 * ratio))
    some = torch.randperm(n, generator=generator)[: max(2, int(ratio * n))].sort().values
    inner = some[(some >= per_frame) & (some < n - per_frame)] if name != "tiny" else some[some >= per_frame]
    return whole.keep(some), whole.keep(inner if len(inner) else torch.tensor([per_frame]))


def policies(name):
    if "qwen" not in name:
        return [("contiguous", "transformers-5")]
    return [("original", "transformers-5"), ("original", "vllm"), ("contiguous", "transformers-4.57")]


def prompts_of(name):
    """At three ratios, on one video and on two, under every policy; questions on a video are neighbours."""
    made = []
    for ratio in (1.0, 0.25, 0.1):
        for policy in policies(name):
            build = prompt_builder(ModelSource.resolve(name), *policy).build
            one, two = clips(name, ratio)
            texts = [
                "What is happening?",
                "Why do they do it, and who is it for?",
                MARKERS if name != "tiny" else "Hm?",
            ]
            made += [build(text, visuals) for visuals in ([one], [two], [two, one]) for text in texts]
    return made


def test_greedy_answers_are_the_same(family):
    name, ours, theirs = family
    prompts = prompts_of(name)
    decodings = [Decoding(max_new_tokens=4 + i % 5) for i in range(len(prompts))]
    before = ours.reused_tokens
    mine = assert_same_answers(ours, theirs, prompts, decodings)
    assert len({a.text for a in mine}) > len(prompts) // 4  # or the comparison would say nothing
    assert ours.reused_tokens > before  # questions on the same video found it in the prefix cache
    assert all(a.prefill_s > 0 and a.decode_s >= 0 for a in mine)


def test_choices_have_the_same_scores(family):
    name, ours, theirs = family
    prompts = prompts_of(name)[::3]
    texts = [TEXTS[: 3 + i % 4] for i in range(len(prompts))]
    mine, expected = ours.score(prompts, texts), theirs.score(prompts, texts)
    for scores, others in zip(mine, expected, strict=True):
        assert [score.n_tokens for score in scores] == [score.n_tokens for score in others]
        assert [score.logprob for score in scores] == pytest.approx([o.logprob for o in others], abs=1e-4)
    with pytest.raises(ValueError, match="one character"):
        ours.score(prompts[:1], [[""]])


@pytest.mark.parametrize("name", RECURRENT)
def test_linear_attention_is_served_in_bfloat16_and_refused_in_float32_on_a_cpu(name):
    """vLLM's kernels of it on a CPU take bfloat16 alone, so scores agree but for rounding."""
    source = ModelSource.resolve(name)
    with pytest.raises(ModelError, match=r"vLLM runs qwen3_5\w* on a CPU only in bfloat16, not in float32"):
        engines_of(source)
    ours, theirs = engines_of(source, runtime=choose_runtime("cpu", "bfloat16"))
    prompts = prompts_of(name)
    mine, expected = (engine.score(prompts, [TEXTS] * len(prompts)) for engine in (ours, theirs))
    pairs = [
        (a.logprob, b.logprob) for one, two in zip(mine, expected, strict=True) for a, b in zip(one, two, strict=True)
    ]
    apart = [abs(a - b) for a, b in pairs]
    assert np.mean(apart) < 0.15 and np.quantile(apart, 0.9) < 0.3  # measured: 0.05, of numbers whose deviation is 20
    assert np.std([b for _, b in pairs]) > 5
    before, one = ours.reused_tokens, [Decoding(max_new_tokens=4)]
    first = ours.generate(prompts[:1], one)
    assert ours.generate(prompts[:1], one)[0].token_ids == first[0].token_ids and ours.reused_tokens > before
    ours.close()


def test_the_same_ids_with_other_tokens_are_another_video(family):
    name, ours, theirs = family
    one, _ = clips(name, 0.25)
    other = dataclasses.replace(one, tokens=one.tokens.flip(0).contiguous())
    build = prompt_builder(ModelSource.resolve(name)).build
    prompts = [build("What is it?", [visual]) for visual in (one, other, one)]
    assert_same_answers(ours, theirs, prompts, [Decoding(max_new_tokens=8)] * 3)


def test_a_drawn_answer_does_not_depend_on_its_batch(family):
    name, ours, _ = family
    prompts = prompts_of(name)[:6]
    decodings = [Decoding(max_new_tokens=6, temperature=1.3, top_p=0.9, seed=i) for i in range(6)]
    together = ids_of(ours.generate(prompts, decodings))
    assert together == [ids_of(ours.generate([one], [how]))[0] for one, how in zip(prompts, decodings, strict=True)]
    assert together != ids_of(ours.generate(prompts, [dataclasses.replace(how, seed=99) for how in decodings]))


def test_what_vllm_refuses_is_said_and_the_engine_lives(family):
    name, ours, theirs = family
    prompt, (one, _) = prompts_of(name)[0], clips(name, 0.1)
    long = prompt_builder(ModelSource.resolve(name)).build("why " * (ours.context_length + 1), [one])
    with pytest.raises(ValueError, match="maximum"):
        ours.generate([prompt, long], [Decoding(4)] * 2)
    assert_same_answers(ours, theirs, [prompt], [Decoding(4)])


def test_a_checkpoints_repetition_penalty_counts_and_a_video_may_be_larger_than_a_step(tmp_path):
    """It must fit vLLM's encoder cache, which is as large as a step: 4096 tokens on a CPU, where nobody says."""
    name, folder = "tiny-qwen2-5-vl", tmp_path / "model"
    shutil.copytree(tiny.build(name), folder)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "repetition_penalty": 1.5}))
    whole = video(name, n_frames=180)
    tokens = torch.randn(len(whole.index), 64, generator=torch.Generator().manual_seed(3))
    assert len(tokens) > 4096
    large = prompt_builder(ModelSource.resolve(name)).build("Why?", [dataclasses.replace(whole, tokens=tokens)])
    prompts, decodings = [*prompts_of(name)[:6], large], [Decoding(max_new_tokens=12)] * 7
    ours, theirs = engines_of(ModelSource.resolve(folder), len(tokens), {})
    try:
        mine = assert_same_answers(ours, theirs, prompts, decodings)
    finally:
        ours.close()
    plain = load_engine(EngineOptions(), ModelSource.resolve(name), RUNTIME).generate(prompts[:6], decodings[:6])
    assert ids_of(plain) != ids_of(mine[:6])


@pytest.mark.parametrize("family", ["tiny-qwen2-5-vl"], indirect=True)
def test_cdpruner_chooses_for_each_question_as_with_the_other_engine(family, tmp_path):
    """It embeds the question by the model's own table, which vLLM does not give away."""
    name, ours, theirs = family
    rows = [{"question_id": i, "video_id": "a", "prompt": text} for i, text in enumerate(["Who?", "Where is the dog?"])]
    asked = sent(read_given_questions(rows, AnswerMode(Decoding(max_new_tokens=6))))
    late = {"": LatePruning(CDPruner(), 0.25)}
    setup = setup_of(tiny_qwen_cache(tmp_path / "c"), source=ModelSource.resolve(name), prunings=late)
    mine, expected = (list(Answerer(setup, engine=engine).answer(asked)) for engine in (ours, theirs))
    same = ("status", "answer", "n_kept", "kept_per_frame", "n_prompt_tokens")
    for answer, other in zip(mine, expected, strict=True):
        assert answer["status"] == "ok" and {k: answer[k] for k in same} == {k: other[k] for k in same}
    assert mine[0]["kept_per_frame"] != mine[1]["kept_per_frame"]


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-vl"])
def test_a_connector_that_goes_by_a_videos_hash_tells_videos_of_equal_token_ids_apart(name, tmp_path):
    settings = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    settings["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    params = {**vllm_here.PARAMS, "enable_prefix_caching": False, "kv_transfer_config": settings}
    ours, theirs = engines_of(ModelSource.resolve(name), params=params)
    one, _ = clips(name, 1.0)
    other = dataclasses.replace(one, tokens=one.tokens.flip(0).contiguous())
    build = prompt_builder(ModelSource.resolve(name)).build
    prompts = [build("What is it?", [visual]) for visual in (one, other)]
    assert torch.equal(prompts[0].input_ids, prompts[1].input_ids)
    expected = [answer.token_ids for answer in theirs.generate(prompts, [Decoding(max_new_tokens=8)] * 2)]
    try:
        for _ in range(2):  # the second time by the connector
            assert [ours.generate([prompt], [Decoding(8)])[0].token_ids for prompt in prompts] == expected
    finally:
        ours.close()
    assert expected[0] != expected[1] and ours.reused_tokens > len(one.index)


def test_an_option_that_leaves_no_room_for_the_largest_video_is_refused_before_weights_are_loaded():
    source, largest = ModelSource.resolve("tiny-qwen2-5-vl"), 1051  # its processor's own largest item has 1050
    options = EngineOptions(engine="vllm", engine_param=["max_num_batched_tokens=640"])
    for refused in (partial(load_engine, options, source, RUNTIME), partial(VllmEngine.check_memory, options, source)):
        with pytest.raises(ModelError, match=r"=640 limits a video to 1,050 .* has 1,051: set .*=1051 or"):
            refused(largest)
    VllmEngine.check_memory(options, source, 1050)
    VllmEngine.check_memory(EngineOptions(engine="vllm", engine_param=["max_num_batched_tokens=1051"]), source, 1051)


@pytest.mark.parametrize(
    ("n_frames", "total", "fps", "times"),
    [
        (8, 250, 25.0, [0, 5, 10, 15]),  # a patch lasts 2.5 s: a time is 2 a second, cut only where it is a position
        (12, 84, 20.0, [0, 1, 2, 4, 5, 6]),  # 0.7 s, in float32 a little less: 7 would be the product in float32
        (6, 6, 24.0, [0, 0, 0]),
    ],
)
def test_the_rule_vllm_has_the_positions_of_vllms_own_qwen2_5_vl(n_frames, total, fps, times):
    """By its own processor, which gets the frames and their rate, and by its own model class."""
    from vllm import EngineArgs  # noqa: PLC0415 - after what is set for it
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration  # noqa: PLC0415
    from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: PLC0415
    from vllm.multimodal.inputs import MultiModalFeatureSpec  # noqa: PLC0415

    source = ModelSource.resolve("tiny-qwen2-5-vl")
    config = EngineArgs(model=source.pretrained()[0], load_format="safetensors").create_model_config()
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    metadata = {"fps": fps, "duration": total / fps, "total_num_frames": total, "video_backend": "opencv"}
    metadata |= {"frames_indices": [i * total // n_frames for i in range(n_frames)], "do_sample_frames": False}
    frames = np.zeros((n_frames, 56, 84, 3), dtype=np.uint8)
    items = processor.info.parse_mm_data({"video": [(frames, metadata)]})
    made = processor("<|vision_start|><|video_pad|><|vision_end|>Why do they?", items)
    (item,), (place,) = made["mm_kwargs"]["video"], made["mm_placeholders"]["video"]
    feature = MultiModalFeatureSpec(data=item, modality="video", identifier="v", mm_position=place)
    model = Qwen2_5_VLForConditionalGeneration.__new__(Qwen2_5_VLForConditionalGeneration)
    model.__dict__["config"] = config.hf_config
    ids = list(made["prompt_token_ids"])
    theirs, delta = model.get_mrope_input_positions(ids, [feature])

    t, h, w = item["video_grid_thw"].data.tolist()
    n = t * h * w // 4
    extra = {"video_grid_thw": [t, h, w], "spatial_merge_size": 2, "second_per_grid_ts": 2 / (n_frames / total * fps)}
    clip = Visual(torch.zeros(n, 64), torch.arange(n), t, h * w // 4, extra=extra)
    prompt = prompt_builder(source, "original", "vllm").build("Why do they?", [clip])
    (first, end), place_first = prompt.spans[0], place.offset
    ours = prompt.positions[:, first:] - prompt.positions[0, first]
    # Before the video stand the words of the chat template; behind it, the words of both prompts go on by one.
    assert torch.equal(ours[:, : end - first + 1], (theirs[:, place_first:] - theirs[0, place_first])[:, : n + 1])
    assert (ours[0, : n : h * w // 4]).tolist() == times
    assert delta == int(theirs.max()) + 1 - len(ids)


def test_an_engine_that_breaks_says_that_it_is_dead(family, monkeypatch):
    name, ours, _ = family

    def broken():
        raise RuntimeError("the scheduler is lost")

    monkeypatch.setattr(ours._engine, "step", broken)
    with pytest.raises(EngineCrashed, match="RuntimeError: the scheduler is lost"):
        ours.generate(prompts_of(name)[:1], [Decoding(4)])
    monkeypatch.undo()
    ours._engine.abort_request([f"{ours._n_requests - 1}"], internal=False)
