"""Tasks without lmms-eval: how they ask, what becomes of a reply, which video is named, and how far they fit."""

import json
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.tasks import survey
from pipeline.evaluate.tasks.process import render_tasks
from pipeline.evaluate.tasks.questions import (
    MAX_NEW_TOKENS,
    CachedIds,
    cut_reply,
    find_video_key,
    make_question,
    make_unique,
)
from pipeline.evaluate.tasks.survey import TaskFit, judge_task
from tests.pipeline.pages import shown

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
def test_what_a_document_calls_its_video_and_another_task_says_how(doc, key):
    assert find_video_key(doc, folder="clevrer/video_validation" if "video" in doc else None) == key
    assert find_video_key({**doc, "clip": "x", "part": 3}, "{part}/{clip}.mp4") == "3/x.mp4"


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


MODULE = """
import json
import os
import requests
from functools import partial


class Client:
    def ask(self, text):
        return requests.post("https://judge", data=text)


def ask_judge(text):
    for _ in range(3):
        return Client().ask(text)


def shows_video(doc):
    return [os.path.join("videos", doc["id"] + ".mp4")]


def shows_frames(doc):
    from decord import VideoReader

    return VideoReader(doc["video"]) if doc.get("long") else [doc["video"]]


def shows_image(doc):
    return [doc["image"].convert("RGB")]


def matches(doc, results):
    return {"accuracy": float(results[0] == doc["answer"])}


def asks_always(doc, results):
    return {"accuracy": ask_judge(results[0])}


asks_by_partial = partial(asks_always, results=[""])

def asks_sometimes(doc, results):
    if results[0] in "ABCD":
        return matches(doc, results)
    else:
        rating = ask_judge(results[0])
    return {"accuracy": rating}


def mean(results):
    return sum(results) / len(results)


def judged_mean(results, *, model):
    return ask_judge(json.dumps(results))
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """The module, imported as lmms-eval imports those of tasks, from a folder of its name."""
    file = tmp_path_factory.mktemp("lmms_eval") / "utils.py"
    file.write_text(MODULE)
    spec = spec_from_file_location("utils", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(module, shows="shows_video", rule="matches", means=("mean",), **more):
    metrics = [{"metric": f"m{number}", "aggregation": getattr(module, name)} for number, name in enumerate(means)]
    functions = {"doc_to_visual": getattr(module, shows), "process_results": getattr(module, rule)}
    return {**functions, "metric_list": metrics, "output_type": "generate_until", **more}


@pytest.mark.parametrize(
    ("config", "fit", "reason"),
    [
        ({}, survey.FITS, ""),
        ({"rule": "asks_always"}, survey.NEEDS_JUDGE, "every reply to requests"),
        ({"rule": "asks_sometimes"}, survey.IN_PART, "do not decide are for requests"),
        ({"means": ("judged_mean", "mean")}, survey.NEEDS_JUDGE, "m0 is made by a judge"),
        ({"means": ("mean", "judged_mean")}, survey.IN_PART, "not m1"),
        ({"shows": "shows_frames"}, survey.UNKNOWN, "VideoReader, decord"),
        ({"output_type": "loglikelihood"}, survey.UNFIT, "its output_type is loglikelihood"),
        ({"num_fewshot": 2}, survey.UNFIT, "examples"),
        ({"repeats": 5}, survey.UNFIT, "5 times"),
        ({"class": object}, survey.UNFIT, "class of its own"),
        ({"rule": "asks_by_partial"}, survey.NEEDS_JUDGE, "every reply to requests"),
        ({"shows": "shows_image", "dataset_kwargs": {"video": True}}, survey.UNKNOWN, "convert"),
    ],
)
def test_a_task_is_judged_by_its_settings_and_code(module, config, fit, reason):
    judged = judge_task(config_of(module, **config))
    assert judged[0] == fit and reason in judged[1]


def test_a_task_about_images_alone_is_none_of_the_list(module):
    assert judge_task(config_of(module, shows="shows_image")) is None


def test_every_name_is_in_the_list_and_tasks_that_fail_alike_share_a_row():
    tasks = [
        TaskFit("b_two", "b", survey.FITS, "", ["acc"]),
        TaskFit("b_one", "b", survey.FITS, "", ["acc", "f1"]),
        TaskFit("c", "c/d", survey.NEEDS_JUDGE, "its rule sends every reply to openai", ["score"]),
    ]
    lines = shown(render_tasks(tasks)).splitlines()
    assert lines[0].startswith("3 tasks about videos: 2 fits, 1 needs a judge")
    assert any(line.split() == ["b", "b_one", "b_two", "acc"] for line in lines)
    assert any(line.split()[:3] == ["c/d", "c", "score"] and "openai" in line for line in lines)
