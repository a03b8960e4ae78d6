"""``gstep.pruning``: a live model answers from the kept tokens of a video, as from a cache of them."""

from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import gstep
from gstep.backbones import BACKBONES, ModelSource, family_of
from gstep.errors import ModelError
from gstep.generic.halves import load_model
from gstep.generic.layout import probe_units
from gstep.generic.processor import load_processor, make_metadata, run_processor
from gstep.language import load_language_model
from tests.gstep.generic.live import (
    QUICK,
    Live,
    answer,
    check_parity,
    first_logits,
    keep_taken,
    make_video,
    read,
    render,
)
from tests.gstep.llms import FLOAT32


@pytest.fixture
def live(tiny_checkpoint):
    return lambda name: load(name, tiny_checkpoint)


@cache
def load(name: str, tiny_checkpoint: Any) -> Live:
    source = ModelSource.resolve(str(tiny_checkpoint(name)), family="generic", gate=False)
    return Live(load_model(source, FLOAT32), load_processor(source))


def test_a_video_whose_frames_nothing_tells_apart_is_refused_with_the_remedy(live):
    case = live("minicpmv4_6")
    inputs = read(case)
    del inputs["video_metadata"]
    with gstep.pruning(case.model), pytest.raises(ValueError, match="give return_metadata=True to the processor"):
        answer(case, inputs)


# ---- the logits of the cached path


@pytest.mark.parametrize("name", [name for name in QUICK if name in BACKBONES])
def test_a_family_with_its_own_code_answers_as_from_its_cache(live, tiny_checkpoint, name):
    source = ModelSource.resolve(tiny_checkpoint(name))
    check_parity(live(name), family_of(source).load(FLOAT32), load_language_model(source, FLOAT32))


def test_the_layout_that_is_found_at_the_first_call_serves_other_lengths(live):
    case = live("gemma4")
    longer, shorter = read(case, 12), read(case, 4)
    expected = []
    for inputs in (longer, shorter):
        with gstep.pruning(case.model):
            expected.append(first_logits(case, inputs))
    with gstep.pruning(case.model):
        first_logits(case, read(case))
        for inputs, logits in zip((longer, shorter), expected, strict=True):
            assert torch.equal(first_logits(case, inputs), logits)


@pytest.mark.parametrize("name", ["qwen3_vl", "llava_onevision"])
def test_with_all_tokens_the_answer_is_the_stock_models(live, name):
    case = live(name)
    inputs = read(case)
    model = case.model.to(torch.bfloat16)  # so that the rounding of tokens changes nothing
    try:
        stock = first_logits(case, inputs)
        with gstep.pruning(model, method="none"):
            kept = first_logits(case, inputs)
        with gstep.pruning(model, method="random", seed=1):
            pruned = first_logits(case, inputs)
    finally:
        model.to(torch.float32)
    assert float((kept - stock).abs().max()) <= 0.05 * float(stock.float().std())
    assert float((pruned - stock).abs().max()) > 0.2 * float(stock.float().std())


# ---- what goes in and comes out of generate


def test_generate_takes_the_prompt_by_position_and_by_name_and_gives_it_back_whole(live):
    case = live("qwen3_vl")
    inputs = read(case)
    ids = inputs["input_ids"]
    others = {key: value for key, value in inputs.items() if key != "input_ids"}
    case.model.model.rope_deltas = None
    with gstep.pruning(case.model):
        expected = answer(case, inputs)
        by_position = case.model.generate(ids, **others, max_new_tokens=4, do_sample=False, eos_token_id=None)
        by_name = answer(case, {"inputs": ids, **others})
        unmasked = answer(case, {**inputs, "attention_mask": None})
        at_length = answer(case, inputs, max_new_tokens=None, max_length=ids.shape[1] + 4)
        sampled = [answer(case, inputs, do_sample=True, temperature=9.0) for _ in range(2) if torch.manual_seed(5)]
        with pytest.raises(TypeError, match="multiple values"):
            case.model.generate(ids, inputs=ids, **others)
    assert expected.shape[1] == ids.shape[1] + 4 and torch.equal(expected[:, : ids.shape[1]], ids)
    for other in (by_position, by_name, unmasked, at_length):
        assert torch.equal(other, expected)
    assert torch.equal(*sampled) and not torch.equal(sampled[0], expected)
    assert case.model.model.rope_deltas is None


def test_streamers_criteria_and_processors_see_the_whole_prompt(live):
    case = live("qwen3_vl")
    inputs = read(case)
    n, seen = inputs["input_ids"].shape[1], []

    def stop(ids, scores, **options):
        seen.append(ids[0])
        return torch.tensor([ids.shape[1] >= n + 2])

    def process(ids, scores):
        seen.append(ids[0])
        return scores

    def allow(row, ids):
        seen.append(ids)
        return list(range(200))

    streamer = Mock(BaseStreamer)
    options = {"stopping_criteria": [stop], "logits_processor": [process], "prefix_allowed_tokens_fn": allow}
    with gstep.pruning(case.model):
        ids = answer(case, inputs, streamer=streamer, **options)
    streamed = torch.cat([call.args[0].flatten() for call in streamer.put.call_args_list])
    assert ids.shape[1] == n + 2 and streamer.end.called and torch.equal(streamed, ids[0])
    assert len(seen) >= 6 and all(torch.equal(part, ids[0, : len(part)]) and len(part) >= n for part in seen)


def test_inputs_without_a_video_are_answered_as_ever(live):
    case = live("qwen3_vl")
    text = run_processor(case.processor, render(case.processor), None, None)
    inputs = {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"]}
    two = {"input_ids": inputs["input_ids"].expand(2, -1), "attention_mask": inputs["attention_mask"].expand(2, -1)}
    options = ({}, {"num_beams": 2}, {"num_return_sequences": 2, "num_beams": 2})
    outside = [answer(case, given, **more) for given in (inputs, two) for more in options]
    with gstep.pruning(case.model):
        inside = [answer(case, given, **more) for given in (inputs, two) for more in options]
    assert all(torch.equal(*pair) for pair in zip(inside, outside, strict=True))


def test_the_tiles_of_an_image_are_no_video(live):
    case = live("internvl")
    video = read(case)
    ids, image_id = video["input_ids"][0], case.model.config.image_token_id
    run = torch.full((8 * int((ids == image_id).sum()) // 8,), image_id)
    prompt = torch.cat([ids[:5], run, ids[-5:]])[None]  # one image of eight tiles
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "pixel_values": video["pixel_values"]}
    stock = answer(case, inputs)
    with gstep.pruning(case.model):
        assert torch.equal(answer(case, inputs), stock)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 does not go with gstep.pruning"),
        ({"num_return_sequences": 3, "do_sample": True}, "num_return_sequences=3"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens does not go"),
        ({"position_ids": torch.zeros(1, 1)}, "position_ids does not go"),
        ({"guidance_scale": 2.0}, "guidance_scale does not go"),
        ({"prefill_chunk_size": 8}, "prefill_chunk_size does not go"),
        ({"generation_config": "beams"}, "num_beams=4"),
        ({"use_cache": False}, "use_cache=False"),
        ({"assistant_model": "any"}, "assistant_model does not go"),
        ({"past_key_values": ()}, "past_key_values does not go"),
        ({"custom_generate": "repo"}, "custom_generate does not go"),
        ({"pixel_values": torch.zeros(4, 4)}, "has images beside it"),
        ({"input_ids": torch.zeros(2, 9, dtype=torch.int64)}, "one prompt at a time"),
        ({"inputs": torch.zeros(1, 9, dtype=torch.int64)}, "one prompt at a time"),
        ({"video_grid_thw": torch.tensor([[2, 4, 6], [2, 4, 6]])}, "this prompt has several"),
    ],
)
def test_what_does_not_go_with_a_pruned_prompt_is_refused_by_name(live, options, message):
    case = live("qwen3_vl")
    if options.get("generation_config"):
        config = type(case.model.generation_config)(num_beams=4, max_new_tokens=2)
        options = {"generation_config": config}
    with gstep.pruning(case.model), pytest.raises(ValueError, match=message):
        case.model.generate(**{**read(case), **options})
    assert "generate" not in vars(case.model)


def test_several_videos_are_refused(live):
    case = live("internvl")
    frames, video = make_video()
    text = render(case.processor, {"type": "video"}, {"type": "text", "text": "and"}, {"type": "video"})
    given = {"videos": [frames.permute(0, 3, 1, 2)] * 2, "video_metadata": [make_metadata(video)] * 2}
    inputs = case.processor(text=[text], do_sample_frames=False, return_tensors="pt", **given)
    with gstep.pruning(case.model), pytest.raises(ValueError, match="this prompt has several"):
        case.model.generate(**keep_taken(case, inputs))


def test_methods_and_models_that_do_not_go_are_refused_at_entry(live):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text, model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)), live("qwen3_vl").model
    for given, method, params, error, message in (
        (model, "fastv", {}, ValueError, "'fastv' prunes inside the language model"),
        (model, "holitom", {}, ValueError, "'holitom' needs token_attention"),
        (model, "gstep", {"alphabet": 1}, ValueError, "alphabet"),
        (text, "gstep", {}, ModelError, "LlamaForCausalLM .* takes no mm_encoder_outputs.* needs a model that reads"),
        ("tiny", "gstep", {}, ModelError, "str is no model of transformers"),
    ):
        with pytest.raises(error, match=message):
            gstep.pruning(given, method, **params).__enter__()
    with gstep.pruning(model), pytest.raises(ValueError, match="within a pruning context already"):
        gstep.pruning(model).__enter__()
    assert "generate" not in vars(model)


def test_the_model_is_restored_after_an_exception(live):
    case = live("qwen3_vl")
    inputs, own = read(case), case.model.generate
    case.model.generate = own  # such as another library sets
    case.model.model.rope_deltas = deltas = torch.ones(1, 1)
    try:
        with pytest.raises(RuntimeError, match="from within"), gstep.pruning(case.model):
            answer(case, inputs)
            raise RuntimeError("from within")
        assert vars(case.model)["generate"] is own and case.model.model.rope_deltas is deltas
    finally:
        del case.model.generate
        case.model.model.rope_deltas = None


# ---- the layout of a video without its frames


def encode_rows(tokens_of_frames, constant=0, tail=0):
    """An encoder that gives each frame of [F,3] pixels rows of its own, some of them constant, and rows behind all."""

    def encode(inputs):
        pixels = tokens_of_frames(inputs["pixel_values_videos"])
        rows = pixels[:, None].repeat(1, 4, 1)
        rows[:, 4 - constant :] = 7.0
        return [torch.cat([rows.flatten(0, 1), torch.ones(tail, 3)])]

    return encode


@pytest.mark.parametrize(
    ("mix", "constant", "tail", "expected"),
    [
        (lambda x: x, 0, 0, (6, 0)),
        (lambda x: x, 1, 0, (6, 0)),  # a newline row behind each frame, and so behind the last
        (lambda x: x[::2] + x[1::2], 0, 2, (3, 2)),
        (lambda x: x + x.sum(0), 0, 0, (1, 0)),
        (lambda x: x.cumsum(0), 0, 0, "mix frames"),
        (lambda x: x * 0, 0, 0, "do not depend on the frames"),
    ],
)
def test_steps_are_found_by_changing_pixels(mix, constant, tail, expected):
    inputs = {"pixel_values_videos": torch.rand(6, 3, generator=torch.Generator().manual_seed(3))}
    encode = encode_rows(mix, constant, tail)
    base = encode(inputs)[0]
    if isinstance(expected, str):
        with pytest.raises(ModelError, match=expected):
            probe_units(encode, inputs, base)
    else:
        assert probe_units(encode, inputs, base) == expected
