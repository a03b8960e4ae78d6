"""What an engine is told of a video: its place with all frames' markers, positions that add up, a name of its own."""

import dataclasses
import gc
import weakref
from itertools import product

import pytest
import torch

from gstep.serving.prompts import compute_mrope_positions, make_video_spans
from tests.gstep.language.prompts import builder, text_of, video
from tests.gstep.llms import FAMILIES

MARKERS = "<|vision_start|> and <|vision_end|>, <0.2 seconds>"
RULES = ("transformers-5", "transformers-4.57", "vllm")


def items_of(name, prompt):
    return make_video_spans(prompt, builder(name).placeholder_id)


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
    (mine,) = items_of(name, builder(name).build("Who?", [one]))
    (again,) = items_of(name, builder(name).build("Another question, much longer than that", [one]))
    assert (mine.name, mine.first) == (again.name, again.first)
    others = [dataclasses.replace(one, tokens=one.tokens + 1)]
    if one.newline is not None:
        others.append(dataclasses.replace(one, newline=one.newline + 1))
    if builder(name).axes > 1:  # else only the rows count
        others.append(video(name, index=[1, 5]))
    if one.deepstack:
        others.append(dataclasses.replace(one, deepstack=(one.deepstack[0] + 2, *one.deepstack[1:])))
    names = {items_of(name, builder(name).build("Who?", [other]))[0].name for other in others}
    assert len(names | {mine.name}) == 1 + len(others)


def test_other_positions_of_the_same_tokens_have_another_name():
    one = video("tiny-qwen2-5-vl", index=[1, 40])
    policies = [("original", "transformers-5"), ("contiguous", "transformers-5"), ("original", "vllm")]
    names = {items_of("tiny-qwen2-5-vl", builder("tiny-qwen2-5-vl", *p).build("Who?", [one]))[0].name for p in policies}
    assert len(names) == 3


def test_a_prompt_without_a_video_has_text_positions():
    positions, delta = compute_mrope_positions([], 5)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3 and delta == 0


def test_questions_on_a_video_share_its_rows_and_those_go_with_it():
    """A thousand questions hold one copy, and hash it once."""
    one = video("tiny-qwen3-vl", index=[1, 4])
    first, again = (items_of("tiny-qwen3-vl", builder("tiny-qwen3-vl").build(text, [one]))[0] for text in ("a", "b"))
    assert first.rows is again.rows
    plain = video("tiny-qwen2-5-vl", index=[1, 4])
    assert plain.placeholder_rows is plain.tokens
    held = weakref.ref(plain)
    del plain
    gc.collect()
    assert held() is None
