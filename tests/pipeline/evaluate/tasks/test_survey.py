"""How far tasks fit, told from small modules in the style of those of lmms-eval."""

from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO

import pytest
from rich.console import Console

from pipeline.evaluate.tasks import survey
from pipeline.evaluate.tasks.process import render_tasks
from pipeline.evaluate.tasks.survey import TaskFit, judge_task

MODULE = """
import json
import os
import requests


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
    ],
)
def test_a_task_is_judged_by_its_settings_and_code(module, config, fit, reason):
    judged = judge_task(config_of(module, **config))
    assert judged[0] == fit and reason in judged[1]


def test_functions_of_partials_are_followed(module):
    config = config_of(module, process_results=partial(module.asks_always, results=[""]))
    assert judge_task(config)[0] == survey.NEEDS_JUDGE


def test_a_task_about_images_is_none_of_the_list_unless_its_data_has_videos(module):
    assert judge_task(config_of(module, shows="shows_image")) is None
    fit, reason = judge_task(config_of(module, shows="shows_image", dataset_kwargs={"video": True}))
    assert fit == survey.UNKNOWN and "convert" in reason


def test_every_name_is_in_the_list_and_tasks_that_fail_alike_share_a_row():
    tasks = [
        TaskFit("b_two", "b", survey.FITS, "", ["acc"]),
        TaskFit("b_one", "b", survey.FITS, "", ["acc", "f1"]),
        TaskFit("c", "c/d", survey.NEEDS_JUDGE, "its rule sends every reply to openai", ["score"]),
    ]
    console = Console(width=120, record=True, file=StringIO())
    console.print(render_tasks(tasks))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("3 tasks about videos: 2 fits, 1 needs a judge")
    assert any(line.split() == ["b", "b_one", "b_two", "acc"] for line in lines)
    assert any(line.split()[:3] == ["c/d", "c", "score"] and "openai" in line for line in lines)
