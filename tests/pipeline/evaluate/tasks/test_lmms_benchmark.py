"""A task of lmms-eval as a benchmark, without lmms-eval: its process is a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from jobs import evaluate
from pipeline.errors import NotResults, RunFailed, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS
from pipeline.evaluate.scores import AnsweredItems, make_score_table
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio
from pipeline.evaluate.tasks import child, process
from pipeline.evaluate.tasks.process import DescribedTask, TaskDocument, TaskProcess
from pipeline.generate.answers import ANSWER_SCHEMA
from pipeline.storage.stores import LocalStore
from tests.builders.runs import run_here
from tests.paths import ROOT
from tests.pipeline.evaluate.layouts import faulty

SETTINGS = {"max_new_tokens": 16, "temperature": 0, "until": ["\n\n", "###"]}
PRUNED = MethodAtRatio("gstep", 0.25)
_NETWORK = """
import os, socket, sys, threading
from pipeline.evaluate.tasks.child import _Network

inside, outside = socket.socketpair()
listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(sys.argv[1], "s"))
listener.listen()
server = socket.create_server(("127.0.0.1", 0))
network = _Network()
socket.socket(socket.AF_UNIX).connect(os.path.join(sys.argv[1], "s"))
assert network.attempts == 0
for attempt in (
    lambda: socket.create_connection(server.getsockname()),
    lambda: socket.socket().connect(server.getsockname()),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", server.getsockname()),
    lambda: socket.getaddrinfo("example.org", 80),
):
    try:
        attempt()
    except ConnectionError as error:
        print(error)
print(network.attempts)
"""


@pytest.fixture
def no_lmms_eval(monkeypatch):
    monkeypatch.setattr(process, "find_spec", lambda name: None)


@pytest.fixture
def home(tmp_path):
    """HF_HOME with three videos, of which one is a link out of it."""
    home = tmp_path / "hf"
    (home / "t").mkdir(parents=True)
    for name in ("t/-a.mp4", "t/b.mp4", "../outside.mp4"):
        (home / name).write_bytes(b"video")
    (home / "t/link.mp4").symlink_to(tmp_path / "outside.mp4")
    return home


def document(home, video, number=0, **fields):
    return TaskDocument(f"What is seen {number}?", str(home / video), {"id": str(number), **fields})


def opened(*documents, metric=None, **settings):
    """A task as its process described it."""
    task = DescribedTask("0.7.3", "acc", ["acc", "miou"], {**SETTINGS, **settings}, documents)
    return replace(find_benchmark("lmms:mine" + (f"@{metric}" if metric else "")), task=task)


class Scorer:
    """A process that scores as it is told, and remembers what it was asked."""

    def __init__(self, **answer):
        own = {"none@1": {"acc": 50.0}, "gstep@0.25": {"acc": 100.0}}
        judged = dict.fromkeys(own, 0)
        explained = {"scores": None, "mean_over": None, "weights": {}, "percent": True}
        self.answer = {
            "metric": "acc",
            "own": own,
            "judged": judged,
            "errors": [],
            "nothing": "",
            **explained,
            **answer,
        }
        self.arms = None

    def score(self, arms):
        self.arms = arms
        return self.answer


def test_without_lmms_eval_the_option_names_the_environment(no_lmms_eval, home, tmp_path):
    argv = ["--benchmark", "lmms:vsibench", "--data", str(home), "--model", "tiny", "--num-frames", "4"]
    argv += ["--method", "gstep", "--retention-ratio", "25%"]
    done = run_here(evaluate, [*argv, "--out", str(tmp_path / "o")])
    said = " ".join(done.stdout.split())
    assert done.returncode == 2 and "lmms:vsibench: it needs lmms-eval: pip install -e '.[lmms]' && pip install" in said
    assert "lmms_eval==0.7.3 in an environment of its own" in said and not (tmp_path / "o").exists()


def test_the_folder_of_a_task_is_named_by_data(tmp_path):
    task = find_benchmark("lmms:vsibench@room_size_estimation_mra")
    assert (task.name, task.title, task.shown_metric) == ("lmms:vsibench", "vsibench", "room_size_estimation_mra")
    with pytest.raises(UsageError, match=r"--data must name the folder of lmms:vsibench: it must be HF_HOME"):
        task.open("llava_onevision", None, print)
    with pytest.raises(UsageError, match="no such folder; it must be HF_HOME"):
        task.open("llava_onevision", tmp_path / "gone", print)


def test_documents_become_questions_and_the_others_are_faults(home):
    documents = [
        document(home, "t/-a.mp4", dim="speed"),
        document(home, "t/gone.mp4", 1, dim="speed"),
        document(home, "t/../t/b.mp4", 2, dim="order"),
        document(home, "../outside.mp4", 3, dim="order"),
        document(home, "t/link.mp4", 4, dim="order"),
        TaskDocument(fault=("other-media", "it shows 2 (Image, a path), and not one video file")),
        TaskDocument(fault=("no-answer", "it has no right answer")),
        document(home, "t/-a.mp4", dim="speed"),
        document(Path("/"), "etc/hosts", 8, dim="order"),
    ]
    loaded = opened(*documents).load(home)
    assert [(item.question_id, item.video_id, item.cluster) for item in loaded.items] == [
        ("0", "t/-a.mp4", "t/-a.mp4"),
        ("2", "t/b.mp4", "t/b.mp4"),
        ("7", "t/-a.mp4", "t/-a.mp4"),
    ]
    assert [item.splits for item in loaded.items] == [
        {"id": "0", "dim": "speed"},
        {"id": "2", "dim": "order"},
        {"id": "0", "dim": "speed"},
    ]
    assert loaded.items[0].question == "What is seen 0?" and loaded.n_annotated == 9
    assert faulty(loaded, "policy") == ["3", "4", "8"] and faulty(loaded, "missing-video") == ["1"]
    assert faulty(loaded, "other-media") == ["5"] and faulty(loaded, "no-answer") == ["6"]
    assert faulty(loaded, "repeated-question") == ["7"]
    with pytest.raises(UsageError, match=r"none of the 1 questions can be asked \(1 other-media\)"):
        opened(documents[5]).load(home)


def answered(*replies, arms=(ORIGINAL, PRUNED)):
    """Answers to the questions 0, 1, ... under each arm; None is a failed one."""
    common = {"prompt": "p", "run_id": "r", "attempts": 1, "video_ids": ["v"]}
    rows = [
        {
            **common,
            "question_id": str(number),
            "pruning": arm.label,
            "status": "failed" if reply is None else "ok",
            "answer": reply,
            "error_class": "io" if reply is None else None,
            "error_message": "why" if reply is None else None,
        }
        for arm in arms
        for number, reply in enumerate(replies)
    ]
    return pa.Table.from_pylist(rows, schema=ANSWER_SCHEMA), {arm.label: arm for arm in arms}


def scores_by(home, scorer, *replies):
    task = replace(opened(*(document(home, "t/b.mp4", n) for n in range(len(replies)))), process=scorer)
    answers, arms = answered(*replies)
    selected = AnsweredItems.select(task.load(home).items, arms, answers)
    own = task.score_replies(selected.items, selected.replies(task.protocol()), task.protocol())
    return own, make_score_table(selected, task.protocol(), own).to_pylist()


def test_replies_are_cut_and_a_failed_answer_is_an_empty_reply(home):
    scorer = Scorer(scores={"none@1": {"0": 1.0, "2": 0.5}, "gstep@0.25": {"0": 0.0, "2": 0.5}}, mean_over="questions")
    own, rows = scores_by(home, scorer, "A\n\nno, B", "B ### C", None)
    # lmms-eval adds the first stop text to every task, and no model stops there.
    assert scorer.arms["none@1"] == {"0": "A\n\nno, B", "1": "B ", "2": ""}
    assert own.numbers["numbers"] == scorer.answer["own"] and own.numbers["lmms_eval"] == "0.7.3"
    assert len(own.notes) == 1 and "points to 2 failed answers" in own.notes[0]
    # Document 1 does not count, and what failed scores nothing.
    assert [(row["question_id"], row["score"], row["right"]) for row in rows] == [
        ("0", 1.0, True),
        ("2", 0.0, False),
        ("0", 0.0, False),
        ("2", 0.0, False),
    ]


def test_what_a_user_should_know_of_the_scores_is_a_note(home):
    own, rows = scores_by(home, Scorer(judged={"none@1": 0, "gstep@0.25": 2}), "A", "B")
    assert own.notes[0].startswith("2 replies were for a judge on the network, which is not asked: the task's rule")
    assert own.notes[0].endswith("(gstep@0.25 2)") and {row["score"] for row in rows} == {None}
    assert own.notes[1].startswith("acc is the task's own number of a whole method: no mean over questions")
    own, _ = scores_by(home, Scorer(errors=["document 1: KeyError: 'x'"]), "A", "B")
    assert own.notes[0].startswith("the task's rule failed on 1 replies, which count as empty replies, e.g. document 1")
    broken = {"none@1": {"acc": "IndexError: string index out of range"}, "gstep@0.25": {"miou": 0.5}}
    own, _ = scores_by(home, Scorer(own=broken), "A", "B")
    assert own.notes[0] == "the task made no number acc of gstep@0.25: it has miou"
    assert own.notes[1] == "the task made no number acc: IndexError: string index out of range"


def stored(tmp_path, **more):
    own = {"lmms_eval": "0.7.3", "task": "mine", "metric": "acc", "mean_over": None, "weights": {}, "percent": False}
    own |= {"splits": ["dim", "source_id"], "numbers": {"none@1": {"acc": 0.5}, "gstep@0.25": {"acc": 1.5}}, **more}
    store = LocalStore(tmp_path / "r")
    store.make()
    store.put(OWN_NUMBERS, json.dumps(own).encode())
    return find_benchmark("lmms:mine").load_stored_settings(store)


def test_results_say_what_the_number_is_made_of(tmp_path):
    task = stored(tmp_path)
    assert not task.scores_questions and task.metric("questions") == "questions" and task.made_of == {"Metric": "acc"}
    assert [(split.name, split.title) for split in task.splits] == [("dim", "Dim"), ("source_id", "Source id")]
    assert [task.get_arm_share(label) for label in ("none@1", "gstep@0.25", "random@0.1")] == [0.5, None, None]
    assert "no mean over questions, and without interval" in task.notes[0]
    task = stored(tmp_path, percent=True)
    assert [task.get_arm_share(label) for label in ("none@1", "gstep@0.25")] == [0.005, 0.015]
    task = stored(tmp_path, mean_over="type", weights={"a": 0.25, "b": 0.75})
    assert task.scores_questions and task.metric("questions") == "type" and not task.notes
    assert task.weights == {"a": 0.25, "b": 0.75} and task.splits[0].name == "type"
    assert stored(tmp_path, mean_over="questions").metric("x") == "questions"
    task = stored(tmp_path, numbers={})
    assert task.get_arm_share("none@1") is None and "was about removed questions too" in task.notes[0]


@pytest.mark.parametrize("text", ["{", "[]", '{"splits": []}', '{"splits": [], "metric": "a", "weights": 1}'])
def test_damaged_numbers_are_named(tmp_path, text):
    store = LocalStore(tmp_path / "r")
    store.make()
    store.put(OWN_NUMBERS, text.encode())
    with pytest.raises(NotResults, match=r"lmms\.json is damaged .*: run its jobs\.evaluate again"):
        find_benchmark("lmms:mine").load_stored_settings(store)


def test_a_process_that_dies_is_named_with_its_last_lines(monkeypatch, home):
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    monkeypatch.setattr(process, "_CHILD", "tests.pipeline.evaluate.tasks.no_such_module")
    with pytest.raises(RunFailed, match=r"lmms:mine: its code ended with 1:\n.*No module named"):
        TaskProcess("mine", None, "llava_onevision", home, print).describe()


def test_the_metric_is_the_first_of_which_more_is_better():
    task = object.__new__(child.LoadedTask)
    task.task = SimpleNamespace(higher_is_better=lambda: {"loss": False, "score": True, "rate": True})
    task._aggregations = {"loss": None, "score": None, "rate": None}
    assert [task._choose_metric(name) for name in (None, "rate", "score/2")] == ["score", "rate", "score/2"]
    with pytest.raises(child.Refusal, match="it has the metrics loss, score, rate, not acc"):
        task._choose_metric("acc")
    with pytest.raises(child.Refusal, match="less is better for loss"):
        task._choose_metric("loss")
    task._aggregations = {"loss": None}
    with pytest.raises(child.Refusal, match="less is better for all of its metrics"):
        task._choose_metric(None)


def test_the_code_of_tasks_reaches_no_network(tmp_path):
    command = [sys.executable, "-c", _NETWORK, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [*["the rules of tasks reach no network here"] * 4, "4"], done.stderr
