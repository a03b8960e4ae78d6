"""generation_kwargs of tasks, what becomes of a reply, and which cached video a document names; without lmms-eval."""

import json

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.tasks.questions import (
    MAX_NEW_TOKENS,
    CachedIds,
    cut_reply,
    find_video_key,
    make_question,
    make_unique,
)

STOCK = {"max_new_tokens": 16, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False, "until": ["\n\n"]}


def of(**settings):
    return make_question("t/test/0", "t", 0, "v", " a prompt\n", settings)


def test_a_question_has_the_prompt_as_it_came_and_the_settings_of_its_task():
    row = of(**STOCK).row("data/v.mp4", "Be brief.")
    assert row["prompt"] == " a prompt\n" and row["video_ids"] == ["data/v.mp4"] and row["question_id"] == "t/test/0"
    said = {"method": "generate", "system": "Be brief.", "max_new_tokens": 16, "temperature": 0.0}
    assert json.loads(row["decoding"]) == said
    assert (row["task"], row["doc_id"]) == ("t", 0)


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({}, None),
        ({"temperature": 0.7, "do_sample": False}, None),
        ({"temperature": 0.7, "do_sample": False}, None),
        ({"temperature": 0.7}, (0.7, 1.0, 0)),
        ({"do_sample": True, "top_p": 0.9, "top_k": 5}, (1.0, 0.9, 5)),
        ({"do_sample": True, "temperature": 0}, None),
    ],
)
def test_what_is_drawn(settings, drawn):
    decoding = of(**settings).decoding
    assert (decoding.temperature, decoding.top_p, decoding.top_k) == drawn if drawn else decoding.temperature == 0
    assert decoding.max_new_tokens == MAX_NEW_TOKENS


def test_a_reply_ends_before_a_stop_text_but_not_before_the_one_that_every_task_has():
    assert cut_reply("B\n\nbecause", of(**STOCK).until) == "B\n\nbecause"
    assert cut_reply("B, because", of(until="because").until) == "B, "
    assert cut_reply("a\n\nb Q: c x", of(until=["\n\n", "x", "Q:"]).until) == "a\n\nb "
    assert cut_reply("all", of(until=None).until) == "all"


REFUSED = {
    "num_beams must be 1": lambda: of(num_beams=3),
    "length_penalty: not among max_new_tokens": lambda: of(length_penalty=2),
    "task t: generation_kwargs": lambda: of(max_new_tokens="many"),
    "until must be texts": lambda: of(until=[1]),
    r"video_id=\{vid\} .*it has clip": lambda: find_video_key({"clip": "x"}, "{vid}"),
    "is not made of fields": lambda: find_video_key({"n": 1}, "{n[0]}"),
    r"no field names a video .* it has clip, n\): .* video_id=": lambda: find_video_key({"clip": "x", "n": 1}),
    "'v' may be 'a/v.mp4' or 'b/v.mp4': .* video_id=": lambda: CachedIds(["a/v.mp4", "b/v.mp4"], {}).find("v"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_settings_and_documents_that_are_not_understood_are_refused(why):
    with pytest.raises(UsageError, match=why):
        REFUSED[why]()


@pytest.mark.parametrize(
    ("doc", "key"),
    [
        ({"video_id": "007", "videoID": "-Ab3xYz_9Qk", "question_id": "007-2"}, "-Ab3xYz_9Qk"),
        ({"video_id": "@cook-712", "id": "@cook-712_0", "video_path": "712.mp4"}, "712.mp4"),
        ({"video_name": "needle_3.mp4", "task_type": "needle"}, "needle_3.mp4"),
        ({"video": "v.mp4", "question": "?"}, "clevrer/video_validation/v.mp4"),
    ],
    ids=["VideoMME", "LongVideoBench", "MLVU", "MVBench"],
)
def test_what_a_document_calls_its_video(doc, key):
    assert find_video_key(doc, folder="clevrer/video_validation" if "video" in doc else None) == key


def test_other_tasks_say_how():
    assert find_video_key({"clip": "x", "part": 3}, "{part}/{clip}.mp4") == "3/x.mp4"


@pytest.mark.parametrize(
    ("ids", "key", "found"),
    [
        (["data/-Ab.mp4", "data/b.mkv"], "-Ab", "data/-Ab.mp4"),
        (["videos/712.mp4", "videos/1712.mp4"], "712.mp4", "videos/712.mp4"),
        (["video/data0613/star/Cut/x.mp4"], "star/Cut/x.mp4", "video/data0613/star/Cut/x.mp4"),
        (["a/v.mp4", "v.mp4"], "v.mp4", "v.mp4"),  # the one that is so to the letter
        (["v.mp4"], "clevrer/video_validation/v.mp4", None),  # of which folder, nobody knows
        (["x/1712.mp4"], "712.mp4", None),
        (["v.mkv"], "v.mp4", None),
        ([], "v", None),
    ],
)
def test_an_id_is_or_ends_with_what_the_document_says(ids, key, found):
    assert CachedIds(ids, {}).find(key) == found


def test_one_that_failed_is_told():
    ids = CachedIds(["a/v.mp4"], {"b/v.mp4": "corrupt", "c/w.mp4": "timeout"})
    assert (ids.find("v"), ids.find("w.mp4"), ids.failed["c/w.mp4"]) == ("a/v.mp4", "c/w.mp4", "timeout")


def test_ids_are_unique_where_a_question_repeats_or_its_name_ends_like_a_repeated_one():
    assert make_unique(["a", "b", "a", "a"]) == ["a", "b", "a#1", "a#2"]
    assert make_unique(["a#1", "a", "a", "a#1"]) == ["a#1", "a", "a#2", "a#1#1"]
