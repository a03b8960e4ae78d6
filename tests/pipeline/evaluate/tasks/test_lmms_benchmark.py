"""A task of lmms-eval as a benchmark, without lmms-eval: its process is a stand-in."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import evaluate
from pipeline.errors import NotResults, RunFailed, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS, Split
from pipeline.evaluate.results import _split_tables
from pipeline.evaluate.scores import AnsweredItems, make_score_table
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio, make_score_matrix, set_arm_scores
from pipeline.evaluate.tabulate import ScoredBenchmark
from pipeline.evaluate.tasks import child, process
from pipeline.evaluate.tasks.process import DescribedTask, TaskDocument, TaskProcess
from pipeline.storage.stores import LocalStore
from tests.builders.runs import run_here
from tests.interpreter import run_python
from tests.pipeline.evaluate.layouts import answers_of, faulty
from tests.pipeline.evaluate.score_tables import score_rows, score_table

SETTINGS = {"max_new_tokens": 16, "temperature": 0, "until": ["\n\n", "###"]}
PRUNED = MethodAtRatio("gstep", 0.25)
ARMS = {arm.label: arm for arm in (ORIGINAL, PRUNED)}
_NETWORK = """
import os, socket, sys, threading
from pipeline.evaluate.tasks.child import _Network

listener = socket.socket(socket.AF_UNIX)
listener.bind(os.path.join(sys.argv[1], "s"))
listener.listen()
server = socket.create_server(("127.0.0.1", 0))
network, udp = _Network(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
socket.socket(socket.AF_UNIX).connect(os.path.join(sys.argv[1], "s"))
assert network.attempts == 0
for attempt in (
    lambda: socket.create_connection(server.getsockname()),
    lambda: socket.socket().connect(server.getsockname()),
    lambda: socket.socket(socket.AF_INET6).connect_ex(("::1", 80)),
    lambda: udp.sendto(b"x", server.getsockname()),
    lambda: udp.sendmsg([b"x"], [], 0, server.getsockname()),
    lambda: socket.getaddrinfo("example.org", 80),
    lambda: socket.gethostbyname("example.org"),
    lambda: socket.gethostbyaddr("127.0.0.1"),
):
    try:
        attempt()
    except ConnectionError as error:
        print(error)
print(network.attempts)
"""


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


def opened(*documents, scorer=None):
    """A task as its process described it."""
    task = DescribedTask("0.7.3", "acc", ["acc", "miou"], SETTINGS, documents)
    return replace(find_benchmark("lmms:mine"), task=task, process=scorer)


class Scorer:
    """A process that scores as it is told, and remembers what it was asked."""

    def __init__(self, **answer):
        own = {"none@1": {"acc": 50.0}, "gstep@0.25": {"acc": 100.0}}
        self.answer = {"metric": "acc", "own": own, "judged": dict.fromkeys(own, 0), "errors": [], "nothing": ""}
        self.answer |= {"scores": None, "mean_over": None, "weights": {}, "percent": True, **answer}

    def score(self, arms):
        self.arms = arms
        return self.answer


def test_without_lmms_eval_the_option_names_the_environment(monkeypatch, home, tmp_path):
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    argv = ["--benchmark", "lmms:vsibench", "--data", str(home), "--model", "tiny", "--num-frames", "4"]
    argv += ["--method", "gstep", "--retention-ratio", "25%"]
    done = run_here(evaluate, [*argv, "--out", str(tmp_path / "o")])
    said = " ".join(done.stdout.split())
    assert done.returncode == 2 and "lmms:vsibench: it needs lmms-eval: pip install -e '.[lmms]' && pip install" in said
    assert "lmms_eval==0.7.3 in an environment of its own" in said and not (tmp_path / "o").exists()


def test_the_folder_of_a_task_is_named_by_data(tmp_path):
    task = find_benchmark("lmms:vsibench@room_size_estimation_mra")
    assert (task.name, task.title, task.shown_metric) == ("lmms:vsibench", "vsibench", "room_size_estimation_mra")
    for folder, why in ((None, "--data must name the folder of lmms:vsibench"), (tmp_path / "gone", "no such folder")):
        with pytest.raises(UsageError, match=f"{why}.* it must be HF_HOME"):
            task.open("llava_onevision", folder, print)


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
    first, second = {"id": "0", "dim": "speed"}, {"id": "2", "dim": "order"}
    assert [(item.question_id, item.video_id, item.cluster, item.splits) for item in loaded.items] == [
        ("0", "t/-a.mp4", "t/-a.mp4", first),
        ("2", "t/b.mp4", "t/b.mp4", second),
        ("7", "t/-a.mp4", "t/-a.mp4", first),
    ]
    assert loaded.items[0].question == "What is seen 0?" and loaded.n_annotated == 9
    found = {"policy": ["3", "4", "8"], "missing-video": ["1"], "other-media": ["5"], "no-answer": ["6"]}
    found["repeated-question"] = ["7"]
    assert {kind: faulty(loaded, kind) for kind in found} == found
    with pytest.raises(UsageError, match=r"none of the 1 questions can be asked \(1 other-media\)"):
        opened(documents[5]).load(home)


def scores_by(home, scorer, *replies, dims="xx"):
    """The task's numbers and the scores of replies to the questions 0, 1, ... of both arms; None failed."""
    documents = [document(home, "t/b.mp4", number, dim=dims[number % 2]) for number in range(len(replies))]
    task = opened(*documents, scorer=scorer)
    answers = answers_of({str(number): reply for number, reply in enumerate(replies)}, ARMS)
    selected = AnsweredItems.select(task.load(home).items, ARMS, answers)
    own = task.score_replies(selected.items, selected.replies(task.protocol()), task.protocol())
    return own, make_score_table(selected, task.protocol(), own).to_pylist()


SCORES = {"none@1": {"0": 1.0, "2": 0.5}, "gstep@0.25": {"0": 0.0, "2": 0.5}}


def test_replies_are_cut_and_a_failed_answer_is_an_empty_reply(home):
    scorer = Scorer(scores=SCORES, mean_over="questions")
    own, rows = scores_by(home, scorer, "A\n\nno, B", "B ### C", None)
    # lmms-eval adds the first stop text to every task, and no model stops there.
    assert scorer.arms["none@1"] == {"0": "A\n\nno, B", "1": "B ", "2": ""}
    assert own.numbers["numbers"] == scorer.answer["own"] and own.numbers["lmms_eval"] == "0.7.3"
    assert len(own.notes) == 1 and own.notes[0].startswith("the task's rule gives points to 2 failed answers")
    # Document 1 does not count, and what failed scores nothing.
    expected = [("0", 1.0, True), ("2", 0.0, False), ("0", 0.0, False), ("2", 0.0, False)]
    assert [(row["question_id"], row["score"], row["right"]) for row in rows] == expected
    assert not scores_by(home, scorer, "A", "B", "")[0].notes  # an empty reply did not fail


KEY_ERROR = "KeyError: 'b'"


@pytest.mark.parametrize(
    ("answer", "notes"),
    [
        ({"judged": {"none@1": 0, "gstep@0.25": 2}}, [r"2 replies were for a judge .*\(gstep@0.25 2\)$"]),
        ({"errors": ["document 1: x"]}, ["the task's rule failed on 1 replies, which count as empty .*document 1"]),
        (
            {"own": {"none@1": {"acc": KEY_ERROR, "rate": KEY_ERROR}, "gstep@0.25": {"miou": 0.5}}},
            [
                "the task made no number acc of gstep@0.25: it has miou$",
                f"the task made no number acc, rate: {KEY_ERROR}$",
            ],
        ),
    ],
    ids=["judge", "rule", "no-number"],
)
def test_what_a_user_should_know_of_the_scores_is_a_note(home, answer, notes):
    own, rows = scores_by(home, Scorer(**answer), "A", "B")
    notes = [*notes, "acc is the task's own number of a whole method: no mean over questions"]
    assert len(own.notes) == len(notes) and {row["score"] for row in rows} == {None}
    for note, said in zip(notes, own.notes, strict=True):
        assert re.match(note, said)


def test_a_mean_over_a_field_that_is_no_split_is_the_number_of_a_whole_method(home):
    """Five videos of a hundred, by --limit: the task averages over videos, and results have no such parts."""
    scores = {label: {"0": 1.0, "1": 0.5} for label in ARMS}
    scorer = Scorer(scores=scores, mean_over="video", weights={"x": 0.5, "y": 0.5})
    own, _ = scores_by(home, scorer, "A", "B")
    assert (own.scores, own.numbers["mean_over"], own.numbers["weights"]) == (None, None, {})
    assert own.notes[-1].startswith("acc is the task's own number of a whole method")
    scorer = Scorer(scores=scores, mean_over="dim", weights={"a": 0.5, "b": 0.5})
    own, _ = scores_by(home, scorer, "A", "B", dims="ab")
    assert own.scores == scores and own.numbers["mean_over"] == "dim"


def settings_of(folder, text):
    """What a folder of results says of its task."""
    store = LocalStore(folder)
    store.make()
    store.put(OWN_NUMBERS, (text if isinstance(text, str) else json.dumps(text)).encode())
    return find_benchmark("lmms:mine").load_stored_settings(store)


OWN = {"lmms_eval": "0.7.3", "task": "mine", "metric": "acc", "mean_over": None, "weights": {}, "percent": False}
OWN |= {"splits": ["dim", "source_id"], "numbers": {"none@1": {"acc": 0.5}, "gstep@0.25": {"acc": 1.5}}}


def test_results_say_what_the_number_is_made_of(tmp_path):
    task = settings_of(tmp_path, OWN)
    assert not task.scores_questions and task.metric("questions") == "questions" and task.made_of == {"Metric": "acc"}
    assert [(split.name, split.title) for split in task.splits] == [("dim", "Dim"), ("source_id", "Source id")]
    assert [task.get_arm_share(label) for label in ("none@1", "gstep@0.25", "random@0.1")] == [0.5, None, None]
    assert "no mean over questions, and without interval" in task.notes[0]
    task = settings_of(tmp_path, {**OWN, "percent": True})
    assert [task.get_arm_share(label) for label in ARMS] == [0.005, 0.015]
    weights = {"a": 0.25, "b": 0.75}
    task = settings_of(tmp_path, {**OWN, "mean_over": "type", "weights": weights})
    assert task.scores_questions and task.metric("questions") == "type" and not task.notes
    assert task.weights == weights and task.splits[0].name == "type"
    assert settings_of(tmp_path, {**OWN, "mean_over": "questions"}).metric("x") == "questions"
    task = settings_of(tmp_path, {**OWN, "numbers": {}})
    assert task.get_arm_share("none@1") is None and "was about removed questions too" in task.notes[0]


UNSURE = {name: value for name, value in OWN.items() if name != "percent"}


@pytest.mark.parametrize("text", ["{", "[]", '{"splits": [], "metric": "a", "weights": 1}', json.dumps(UNSURE)])
def test_damaged_numbers_are_named(tmp_path, text):
    with pytest.raises(NotResults, match=r"lmms\.json is damaged .*: run its jobs\.evaluate again"):
        settings_of(tmp_path, text)


def table_of_two(*scores):
    """Scores of full retention and of GSTEP on the same questions, in two parts of a split."""
    splits = [{"kind": "ab"[i % 2]} for i in range(len(scores))]
    table = score_table(*(score_rows(arm.method, arm.ratio, scores, splits=splits) for arm in ARMS.values()))
    return set_arm_scores(table, {ORIGINAL: 0.75, PRUNED: 0.5})


@pytest.mark.parametrize(("per_question", "keys"), [(True, ["kind=a", "kind=b", "overall"]), (False, ["overall"])])
def test_the_number_of_a_whole_method_stands_in_no_column_of_a_part(per_question, keys):
    scored = ScoredBenchmark(title="t", scores=table_of_two(1.0, 0.0), per_question=per_question)
    tables = _split_tables("m", scored, [Split("kind", "Kind"), Split("kind", "Again")])
    assert [column.key for column in tables[0].columns] == keys and len(tables) == 1 + per_question
    assert [row.cells[-1].score for row in tables[0].rows] == [75.0, 50.0]


def test_failed_answers_are_counted_beside_the_number_of_a_whole_method():
    matrix = make_score_matrix(table_of_two(1.0, None), [ORIGINAL, PRUNED])
    assert matrix.scores.tolist() == [[0.75, 0.75], [0.5, 0.5]]
    assert [tally.n_failed for tally in matrix.tallies] == [1, 1]


class Unpaired(child.LoadedTask):
    """A task whose rule gives no result for the reply "none", and 1 for other ones."""

    def __init__(self):
        self.metric, self._network = "acc", SimpleNamespace(attempts=0)
        self._documents = [{"id": n} for n in range(8)]
        self._aggregations = {"acc": lambda results: sum(results) / len(results)}
        self.task = SimpleNamespace(doc_to_target=lambda document: "A", process_results=self._judge)

    def _filter_reply(self, reply):
        return reply

    @staticmethod
    def _judge(document, replies):
        return {} if replies[0] == "none" else {"acc": float(replies[0] == "A")}


def test_numbers_about_unlike_documents_have_no_interval():
    """A method's own number would be about 8 documents, and the table's about the 7 that both methods have."""
    right = {str(n): "A" if n < 5 else "B" for n in range(8)}
    paired = Unpaired().score({"none@1": right, "gstep@0.25": {**right, "0": "C"}})
    assert paired["mean_over"] == "questions" and paired["own"]["none@1"] == {"acc": 5 / 8}
    answer = Unpaired().score({"none@1": right, "gstep@0.25": {**right, "0": "none"}})
    assert answer["own"] == {"none@1": {"acc": 5 / 8}, "gstep@0.25": {"acc": 4 / 7}}
    assert (answer["scores"], answer["mean_over"], answer["percent"]) == (None, None, False)


def test_empty_replies_of_which_no_number_can_be_made_count_as_a_dash():
    task = Unpaired()
    task.task.process_results = lambda document, replies: {"acc": float(replies[0] == "A") if replies[0] else None}
    answer = task.score({"none@1": {"0": "A", "1": ""}})
    assert answer["nothing"] == "-" and answer["own"]["none@1"] == {"acc": 0.5}


HIGHER = {"loss": False, "score": True, "rate": True}


@pytest.mark.parametrize(
    ("metrics", "asked", "chosen"),
    [
        (HIGHER, None, "score"),
        (HIGHER, "score/2", "score/2"),
        (HIGHER, "acc", "it has the metrics loss, score, rate, not acc"),
        (HIGHER, "loss", "less is better for loss"),
        (["loss"], None, "less is better for all of its metrics"),
    ],
)
def test_the_metric_is_the_first_of_which_more_is_better(metrics, asked, chosen):
    task = object.__new__(child.LoadedTask)
    task.task, task._aggregations = SimpleNamespace(higher_is_better=lambda: HIGHER), dict.fromkeys(metrics)
    if " " in chosen:
        with pytest.raises(child.Refusal, match=chosen):
            task._choose_metric(asked)
    else:
        assert task._choose_metric(asked) == chosen


# ---- the process that runs the code of a task


def test_a_process_that_dies_is_named_with_its_last_lines(monkeypatch, home):
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    monkeypatch.setattr(process, "_CHILD", "tests.pipeline.evaluate.tasks.no_such_module")
    with pytest.raises(RunFailed, match=r"lmms:mine: its code ended with 1:\n.*No module named"):
        TaskProcess("mine", None, "llava_onevision", home, print).describe()


def test_keys_of_services_do_not_reach_the_code_of_tasks_and_annotations_of_a_file_leave_nothing_in_hf_home(
    monkeypatch, tmp_path
):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    environment = process._make_environment(tmp_path)
    assert "a secret" not in environment.values() and environment["OPENAI_API_KEY"] == "withheld"
    assert environment["PATH"] == os.environ["PATH"] and environment["HF_HOME"] == str(tmp_path)
    assert "HF_DATASETS_CACHE" not in environment
    assert process._make_environment(tmp_path, tmp_path / "t")["HF_DATASETS_CACHE"] == str(tmp_path / "t")


def test_annotations_that_cannot_be_loaded_are_named_with_their_file(monkeypatch, tmp_path):
    refused = {"refusal": "its annotations cannot be loaded: KeyError: 'question'"}
    monkeypatch.setattr(process, "run_child", lambda request, home: refused)
    (tmp_path / "annotations").mkdir()
    for why in (
        r"below HF_HOME .* write them to annotations/mine\.parquet",
        r"from .*/mine\.jsonl, which must have rows",
    ):
        with pytest.raises(UsageError, match=why):
            TaskProcess("mine", None, "llava_onevision", tmp_path, print).describe()
        (tmp_path / "annotations/mine.jsonl").write_text(json.dumps({"x": 1}))


def test_the_code_of_tasks_reaches_no_network(tmp_path):
    done = run_python("-c", _NETWORK, tmp_path)
    assert done.stdout.splitlines() == [*["the rules of tasks reach no network here"] * 8, "8"], done.stderr
