"""Live pruning, prompts and options for vLLM, without it: choices, positions, names of videos, refusals."""

import dataclasses
import gc
import itertools
import json
import os
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

import gstep
from gstep.backbones import ModelSource, Runtime, choose_runtime
from gstep.errors import ModelError
from gstep.language import Decoding
from gstep.methods import LIVE_METHODS, METHODS
from gstep.pruners import find_method
from gstep.serving import ARCHITECTURES, LIVE_ARCHITECTURES
from gstep.serving import options as serving
from gstep.serving.live import (
    LIVE,
    LivePruning,
    PromptStarts,
    check_live_method,
    check_live_model,
    compute_grid_positions,
    compute_timed_positions,
    decode_digits,
    encode_digits,
    find_live_obstacle,
    find_runs,
    update_positions,
)
from gstep.serving.options import check_live_engine
from gstep.serving.prompts import compute_mrope_positions, make_video_spans
from tests.gstep.language.prompts import builder, text_of, video
from tests.gstep.llms import FAMILIES
from tests.gstep.quantized import quantize


def test_the_methods_are_those_that_no_obstacle_keeps_away():
    free = {name for name in METHODS if find_live_obstacle(find_method(name)) is None}
    assert free == set(LIVE_METHODS)


NO_PRUNING = "vLLM has no pruning for .*serve the cache"
OWN_PRUNING = ("evs", "vidcom2")  # of vLLM itself
GENERIC = SimpleNamespace(name="m", model_type="qwen3_vl", family="generic")


@pytest.mark.parametrize(
    ("check", "given", "why"),
    [
        *((check_live_method, method, f"--method {method}: ") for method in sorted(METHODS.keys() - {*LIVE_METHODS})),
        *((check_live_method, m, f"{m}: .*--video-pruning-method {m} --video-pruning-rate 0.9;") for m in OWN_PRUNING),
        (check_live_method, "mine:Method", "methods of your own are not tested in vLLM.*: gstep, novelty"),
        (check_live_method, "gsetp", r"there is no such method \(did you mean gstep\?\).*: gstep, novelty"),
        (check_live_method, "none", "it keeps all tokens.*: gstep, novelty"),
        *((check_live_model, ModelSource.resolve(name), NO_PRUNING) for name in ("tiny", "tiny-internvl")),
        (check_live_model, GENERIC, "for qwen3_vl by the family generic"),
        # Engines that could mix up videos or positions.
        (check_live_engine, {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}}, "^kv_transfer_config: "),
        (check_live_engine, {"kv_transfer_config": "LMCache"}, "^kv_transfer_config: "),
        (check_live_engine, {"ec_transfer_config": {"ec_connector": "ECExampleConnector"}}, "^ec_transfer_config: "),
        (
            check_live_engine,
            {"ec_transfer_config": SimpleNamespace(ec_connector="ECExample")},
            "^ec_transfer_config: ",
        ),
        (check_live_engine, {"kv_offloading_size": 4}, "^kv_offloading_size: "),
        (check_live_engine, {"pipeline_parallel_size": 2}, "^pipeline_parallel_size: "),
    ],
)
def test_other_methods_models_and_engines_are_refused_for_what_they_are(check, given, why):
    more = (0.1,) if check is check_live_method else ()
    with pytest.raises(ModelError, match=why) as refused:
        check(given, *more)
    assert ("--video-pruning-method" in str(refused.value)) == (given in OWN_PRUNING)
    check_live_model(ModelSource.resolve("tiny-qwen3-vl"))
    check_live_engine({"pipeline_parallel_size": 1, "ec_transfer_config": None, "kv_transfer_config": {}})


@pytest.mark.parametrize("method", LIVE_METHODS)
def test_it_keeps_the_tokens_of_gstep_prune_and_as_many_as_are_known_beforehand(method):
    generator = torch.Generator().manual_seed(0)
    for (n_frames, per_frame), ratio in itertools.product(((1, 4), (3, 25), (8, 100)), (0.1, 0.25, 0.9, 0.999)):
        live = LivePruning(method, ratio)
        tokens = torch.randn(n_frames, per_frame, 16, generator=generator)
        mask = live.select_mask(tokens)
        kept = gstep.prune(tokens.to(torch.bfloat16), ratio, method)
        assert mask.nonzero()[:, 0].tolist() == kept.index.tolist()
        assert live.budget(mask.numel()) == len(kept.index) == gstep.budget_for(ratio, mask.numel())


@pytest.mark.parametrize("method", LIVE_METHODS)
def test_values_of_any_size_end_nothing(method):
    tokens = torch.full((2, 8, 4), torch.nan)
    tokens[0, 0] = torch.inf
    tokens[1, 1:] = 3e38
    for scaled in (tokens, tokens[1:].nan_to_num(-3e38), torch.zeros(2, 8, 4)):
        assert LivePruning(method).select_mask(scaled).sum() == scaled.shape[0] * 2


def test_starts_of_recent_prompts_are_known():
    starts, ids = PromptStarts(2), [torch.tensor([1, number]) for number in range(3)]
    for number, prompt in enumerate(ids):
        starts.store(prompt, [number])
    assert [starts.find(prompt) for prompt in ids] == [None, [1], [2]]


def test_settings_travel_as_json_and_each_has_a_name_of_its_own():
    settings = [("gstep", {}, 0.25, 0), ("gstep", {"alpha": "0.7"}, 0.25, 0), ("gstep", {}, 0.5, 0)]
    settings += [("random", {}, 0.25, seed) for seed in (0, 1)]
    made = [LivePruning.from_texts(ModelSource.resolve("tiny-qwen3-vl"), *setting) for setting in settings]
    for live in made:
        options = json.loads(json.dumps(live.as_options()))
        assert LivePruning.from_config(SimpleNamespace(**{LIVE: options})) == live
        assert live.pruner.params() == live.params
    assert len({live.name for live in made}) == len(made)
    assert [LivePruning(retention_ratio=ratio).rate for ratio in (0.1, 1e-12, 1 - 1e-12)] == [0.9, 1 - 1e-9, 1e-9]


def test_bfloat16_holds_digits_where_it_rounds_positions():
    positions = torch.tensor([[0, 1, 2], [257, 1201, 5001], [128**3 - 1, 127, 128]])
    columns = encode_digits(positions).to(torch.bfloat16)
    assert not torch.equal(positions.to(torch.bfloat16).long(), positions)
    assert torch.equal(decode_digits(columns)[0], positions)
    assert decode_digits(columns)[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl", "tiny-qwen3-vl", "tiny-qwen3-5"])
def test_positions_are_those_of_the_prompt_builder(name):
    whole = video(name)
    kept = [1, 2, whole.tokens_per_frame * 2 + 1]  # none of the second frame
    prompt = builder(name).build("Why?", [video(name, index=kept)])
    (first, end), config = prompt.spans[0], builder(name).config
    ids = prompt.input_ids[first:end]
    expected = prompt.positions[:, first:end] - (int(prompt.positions[0, first - 1]) + 1)
    visual = prompt.visuals[0]
    n_frames, height, width = (int(n) for n in visual.extra["video_grid_thw"])
    height, width = (n // visual.extra["spatial_merge_size"] for n in (height, width))
    if name == "tiny-qwen2-5-vl":
        step = config.vision_config.tokens_per_second * visual.extra["second_per_grid_ts"]
        positions = compute_grid_positions(n_frames, height, width, step)[visual.index]
    else:
        is_start = ids == config.vision_start_token_id
        positions = compute_timed_positions(ids == config.video_token_id, is_start, visual.index, height, width)
    assert torch.equal(positions.T, expected)


def test_rows_find_their_places_in_parts_of_any_length():
    """A prompt of words, an image of 2 x 2, words, a video of 5 rows, words."""
    image, clip = compute_grid_positions(1, 2, 2), torch.tensor([[0, 1, 1], [0, 2, 3], [4, 0, 1], [4, 3, 3], [9, 1, 0]])
    ids = torch.tensor([1, 1, 7, 7, 7, 7, 1, 1, 8, 8, 8, 8, 8, 1])
    assert (find_runs(ids, 7), find_runs(ids, 8)) == ([2], [8])
    text = torch.tensor([0, 1, 2, 2, 2, 2, 4, 5, 6, 6, 6, 6, 6, 10]).expand(3, -1)
    whole = text.clone()
    whole[:, 2:6] = image.T + 2
    whole[:, 8:13] = clip.T + 6
    items = [(2, encode_digits(image)), (8, encode_digits(clip))]
    for length in range(1, len(ids) + 1):
        positions = text
        for start in range(0, len(ids), length):
            parts = [
                columns[max(start - first, 0) : max(start + length - first, 0)]
                for first, columns in items
                if first < start + length and start < first + len(columns)
            ]
            positions = update_positions(positions, parts, [2, 8], start)
        assert torch.equal(positions, whole), length


def test_rows_without_a_place_are_left_out():
    positions, columns = torch.arange(6).expand(3, -1), encode_digits(compute_grid_positions(1, 2, 2))
    for parts, starts, n_computed in (([columns], [], 0), ([columns], [4], 0), ([columns[2:]], [1], 1)):
        assert torch.equal(update_positions(positions, parts, starts, n_computed), positions)


MARKERS = "<|vision_start|> and <|vision_end|>, <0.2 seconds>"
RULES = ("transformers-5", "transformers-4.57", "vllm")


def items_of(name, prompt):
    return make_video_spans(prompt, builder(name).placeholder_id)


def item_of(name, visual, *policy, text="Who?"):
    """Return the span of the one video of a prompt."""
    (item,) = items_of(name, builder(name, *policy).build(text, [visual]))
    return item


@pytest.mark.parametrize("name", FAMILIES)
def test_positions_of_a_prompt_follow_from_those_of_its_videos(name):
    per_frame = video(name).tokens_per_frame
    kept = [[per_frame + 1, per_frame + 5], [0, 3, 2 * per_frame]]  # some frames keep nothing, first and last ones too
    videos = [video(name, index=index) for index in kept]
    for policy in product(("original", "contiguous"), RULES):
        prompt = builder(name, *policy).build(f"Why? {MARKERS}", videos)
        items = items_of(name, prompt)
        spans = [(item.first, item.positions) for item in reversed(items)]
        positions, delta = compute_mrope_positions(spans, len(prompt), len(prompt.positions))
        assert torch.equal(positions, prompt.positions), policy
        assert delta == int(prompt.positions[0, -1]) + 1 - len(prompt)
        for item, visual in zip(items, prompt.visuals, strict=True):
            assert int(item.takes_row.sum()) == len(item.rows) == len(visual.index) + (visual.newline is not None)


def test_the_span_of_a_video_holds_the_markers_of_frames_that_keep_nothing():
    name = "tiny-qwen3-vl"
    clip = video(name)
    middle = [clip.tokens_per_frame, clip.tokens_per_frame + 2]
    prompt = builder(name).build(f"What? {MARKERS}", [video(name, index=middle)])
    (first, end), tokenizer = prompt.spans[0], builder(name).tokenizer
    start_id, end_id = (tokenizer.convert_tokens_to_ids(f"<|vision_{which}|>") for which in ("start", "end"))
    ids = prompt.input_ids.tolist()
    inside = ids[first:end]
    assert (inside[0], inside[-1]) == (start_id, end_id)
    assert inside.count(start_id) == inside.count(end_id) == clip.n_frames
    # Outside are the template's own pair of markers, and those of the question.
    assert ids.count(start_id) == clip.n_frames + 2
    assert "and" in text_of(name, prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_is_that_of_rows_and_positions(name):
    one = video(name, index=[1, 4])
    mine, again = item_of(name, one), item_of(name, one, text="Another question, much longer than that")
    assert (mine.name, mine.first) == (again.name, again.first)
    others = [dataclasses.replace(one, tokens=one.tokens + 1)]
    if one.newline is not None:
        others.append(dataclasses.replace(one, newline=one.newline + 1))
    if builder(name).axes > 1:  # else only the rows count
        others.append(video(name, index=[1, 5]))
    if one.deepstack:
        others.append(dataclasses.replace(one, deepstack=(one.deepstack[0] + 2, *one.deepstack[1:])))
    names = {item_of(name, other).name for other in others}
    assert len(names | {mine.name}) == 1 + len(others)


def test_other_positions_of_the_same_tokens_have_another_name():
    one = video("tiny-qwen2-5-vl", index=[1, 40])
    policies = [("original", "transformers-5"), ("contiguous", "transformers-5"), ("original", "vllm")]
    assert len({item_of("tiny-qwen2-5-vl", one, *policy).name for policy in policies}) == 3


def test_a_prompt_without_a_video_has_text_positions():
    positions, delta = compute_mrope_positions([], 5)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3 and delta == 0


def test_questions_on_a_video_share_its_rows_and_those_go_with_it():
    """A thousand questions hold one copy, and hash it once."""
    one = video("tiny-qwen3-vl", index=[1, 4])
    first, again = (item_of("tiny-qwen3-vl", one, text=text) for text in ("a", "b"))
    assert first.rows is again.rows
    plain = video("tiny-qwen2-5-vl", index=[1, 4])
    assert plain.placeholder_rows is plain.tokens
    held = weakref.ref(plain)
    del plain
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("name", FAMILIES)
def test_no_tower_is_built_and_no_processor_asked(name):
    source = ModelSource.resolve(name)
    told = serving.make_engine_options(source, choose_runtime("cpu", "bfloat16"), 100)
    assert told["limit_mm_per_prompt"] == {"image": 0, "video": 0} and told["enable_mm_embeds"]
    assert (told["trust_remote_code"], told["load_format"], told["dtype"]) == (False, "safetensors", "bfloat16")
    ours = {"architectures": [ARCHITECTURES[source.model_type]]} if "qwen" in name else {}
    assert told["hf_overrides"] == ours  # others go by vLLM's own classes
    assert told.keys() >= serving.RESERVED_OPTIONS - {"tokenizer", "hf_config_path", "skip_tokenizer_init", "hf_token"}


def test_a_step_takes_the_largest_video():
    source, runtime = ModelSource.resolve("tiny"), choose_runtime("cpu", "float32")
    for largest, tokens in ((2048, None), (2049, 8192), (75_000, 75_000)):  # vLLM's own limits are for the device
        assert serving.make_engine_options(source, runtime, largest).get("max_num_batched_tokens") == tokens


OLD_CPU = {"architecture": "x86_64", "avx512_bw": False, "avx512_vnni": False, "avx_vnni": False}


@pytest.mark.parametrize(
    ("method", "cpu", "lacks"),
    [
        ("compressed-tensors", {}, "VNNI"),
        ("compressed-tensors", {"avx512_bw": True}, "VNNI"),
        ("compressed-tensors", {"avx512_bw": True, "avx512_vnni": True}, None),
        ("compressed-tensors", {"avx_vnni": True}, None),
        ("awq", {"avx_vnni": True}, "AVX-512"),
        ("awq", {"avx512_bw": True}, None),
        ("gptq", {}, "AVX-512"),
        ("awq", {"architecture": "aarch64"}, None),
        ("fp8", {}, None),
    ],
)
def test_quantized_weights_are_refused_on_a_cpu_that_vllm_has_no_right_products_for(
    monkeypatch, tmp_path, method, cpu, lacks
):
    source = ModelSource.resolve(quantize("tiny", method, tmp_path / "q"), quantized=True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: OLD_CPU | cpu)
    serving.check_cpu_support(source, Runtime("cuda", torch.bfloat16, "sdpa"))
    with pytest.raises(ModelError, match=f"CPU has no {lacks}:") if lacks else nullcontext():
        serving.check_cpu_support(source, choose_runtime("cpu", "bfloat16"))


def test_four_bits_of_compressed_tensors_are_four_bits(monkeypatch):
    source = ModelSource.resolve("tiny")
    group = {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: OLD_CPU)
    serving.check_cpu_support(source, choose_runtime("cpu", "bfloat16"))
    quantized = {"quantization_config": quantization}
    for more in (quantized, {"text_config": source.config["text_config"] | quantized}):
        four = replace(source, config=source.config | more)
        with pytest.raises(ModelError, match="CPU has no AVX-512"):
            serving.check_cpu_support(four, choose_runtime("cpu", "bfloat16"))


@pytest.fixture
def registered(monkeypatch):
    """The classes that are registered with vLLM, which need not be installed."""
    found = {}
    registry = SimpleNamespace(get_supported_archs=found.keys, register_model=found.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    return found


def test_what_a_user_set_in_the_environment_stays(monkeypatch, registered):
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    serving.prepare_process("cpu", 1)
    assert registered.keys() == {*ARCHITECTURES.values(), *LIVE_ARCHITECTURES.values()}
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.usefixtures("registered")
def test_processes_that_would_not_know_the_classes_are_refused(monkeypatch):
    monkeypatch.setattr(serving, "entry_points", lambda group: ())
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    serving.prepare_process("cuda", 1)
    for asked in ({"tensor_parallel": 2}, {"tensor_parallel": 1, "multiprocessing": True}):
        with pytest.raises(ModelError, match="pip install -e"):
            serving.prepare_process("cuda", **asked)


def test_a_greedy_answer_ends_where_the_checkpoint_says_and_a_drawn_one_has_its_own_seed():
    ours = {"ignore_eos": True, "detokenize": False}
    generation = GenerationConfig(eos_token_id=[9, 7], repetition_penalty=1.05)
    ends = {"stop_token_ids": [7, 9], "repetition_penalty": 1.05}
    greedy = {"max_tokens": 5, "temperature": 0.0}
    assert serving.make_sampling_params(Decoding(max_new_tokens=5), generation) == greedy | ends | ours
    drawn = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 123}
    none = {"stop_token_ids": [], "repetition_penalty": 1.0}
    assert serving.make_sampling_params(Decoding(4, 0.7, 0.9, 20, 123), GenerationConfig(eos_token_id=None)) == (
        drawn | none | ours
    )


def test_what_vllm_does_not_have_is_refused():
    serving.check_generation_settings("m", GenerationConfig(repetition_penalty=1.3))
    for setting in ({"no_repeat_ngram_size": 3}, {"suppress_tokens": [4]}, {"min_new_tokens": 2}):
        with pytest.raises(ModelError, match=next(iter(setting))):
            serving.check_generation_settings("m", GenerationConfig(**setting))


def transfer(name, **more):
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", **more}}


def several(*names):
    children = [transfer(name)["kv_transfer_config"] for name in names]
    return transfer("MultiConnector", kv_connector_extra_config={"connectors": children})


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        *(({}, None), ({"kv_transfer_config": {"kv_role": "kv_both"}}, None), (transfer("OffloadingConnector"), None)),
        ({"kv_transfer_config": None, "kv_offloading_backend": "native", "kv_offloading_size": 4}, None),
        (several("MooncakeStoreConnector", "SimpleCPUOffloadConnector"), None),
        # As vLLM's own class has it.
        ({"kv_transfer_config": SimpleNamespace(kv_connector="ExampleConnector")}, None),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="FlexKVConnectorV1")}, "FlexKVConnectorV1"),
        ({"kv_offloading_backend": "lmcache", "kv_offloading_size": 4}, "kv_offloading_backend=lmcache"),
        (transfer("LMCacheConnectorV1"), "kv_transfer_config: LMCacheConnectorV1"),
        (transfer("OffloadingConnector", kv_connector_module_path="mine"), "OffloadingConnector of mine"),
        (several("OffloadingConnector", "HF3FSKVConnector"), "kv_transfer_config: HF3FSKVConnector"),
    ],
)
def test_a_connector_that_may_answer_one_video_from_anothers_keys_is_refused_and_others_are_taken(arguments, setting):
    why = rf"{setting}: .* equal token ids.*kv_offloading_backend=native\), or leave"
    with pytest.raises(ModelError, match=why) if setting else nullcontext():
        serving.check_connectors(arguments)
    with pytest.raises(ModelError, match=r"kv_transfer_config='LMCache' is not a JSON object"):
        serving.check_connectors({"kv_transfer_config": "LMCache"})
