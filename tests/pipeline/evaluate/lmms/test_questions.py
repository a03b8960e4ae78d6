"""generation_kwargs of tasks, and what becomes of a reply; lmms-eval is not needed."""

import json

import pytest

from gstep.language import Decoding
from pipeline.errors import UsageError
from pipeline.evaluate.lmms.questions import MAX_NEW_TOKENS, asked, unique

STOCK = {"max_new_tokens": 16, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False, "until": ["\n\n"]}


def of(**settings):
    return asked("t/test/0", "t", 0, "v", " a prompt\n", settings)


def test_a_question_has_the_prompt_as_it_came_and_the_settings_of_its_task():
    one = of(**STOCK)
    row = one.row("data/v.mp4", "Be brief.")
    assert row["prompt"] == " a prompt\n" and row["video_ids"] == ["data/v.mp4"] and row["question_id"] == "t/test/0"
    said = {"method": "generate", "system": "Be brief.", "max_new_tokens": 16, "temperature": 0.0}
    assert json.loads(row["decoding"]) == said
    assert json.loads(row["question_extra"]) == {"task": "t", "doc_id": 0}


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({}, None),
        ({"temperature": 0.7, "do_sample": False}, None),
        ({"temperature": None, "top_p": None, "do_sample": None}, None),
        ({"temperature": 0.7}, (0.7, 1.0, 0)),
        ({"do_sample": True, "top_p": 0.9, "top_k": 5}, (1.0, 0.9, 5)),
        ({"do_sample": True, "temperature": 0}, None),
    ],
)
def test_what_is_drawn(settings, drawn):
    decoding = of(**settings).decoding
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == drawn if drawn else decoding.temperature == 0
    assert decoding.max_new_tokens == MAX_NEW_TOKENS


def test_a_drawn_question_asked_twice_has_a_seed_of_its_own():
    names = unique(["t/0", "t/1", "t/0", "t/0"])
    assert names == ["t/0", "t/1", "t/0#1", "t/0#2"]
    decodings = [asked(name, "t", 0, "v", "p", {"temperature": 1.0}).decoding for name in names]
    assert len({d.seed for d in decodings}) == 4 and all(isinstance(d, Decoding) for d in decodings)


def test_a_reply_ends_before_a_stop_text_but_not_before_the_one_that_every_task_has():
    assert of(**STOCK).reply("B\n\nbecause") == "B\n\nbecause"
    assert of(until="because").reply("B, because") == "B, "
    assert of(until=["\n\n", "x", "Q:"]).reply("a\n\nb Q: c x") == "a\n\nb "
    assert of(until=None).reply("all") == "all"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_beams": 3}, "num_beams must be 1"),
        ({"length_penalty": 2}, "length_penalty: not among max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": "many"}, "task t: generation_kwargs"),
        ({"until": [1]}, "until must be texts"),
    ],
)
def test_settings_that_are_not_understood_are_refused_with_the_task(settings, why):
    with pytest.raises(UsageError, match=why):
        of(**settings)
