"""Numbers of a task that tables must not show as more than they are, and what its process is given."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.errors import NotResults, UsageError
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS, Split
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.results import _split_tables
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio, make_score_matrix, set_arm_scores
from pipeline.evaluate.tabulate import ScoredBenchmark
from pipeline.evaluate.tasks import child, numbers, process
from pipeline.evaluate.tasks.process import DescribedTask, TaskProcess
from pipeline.storage.stores import LocalStore
from tests.paths import ROOT
from tests.pipeline.evaluate.score_tables import score_rows, score_table

PRUNED = MethodAtRatio("gstep", 0.25)
_NETWORK = """
import socket
from pipeline.evaluate.tasks.child import _Network

server = socket.create_server(("127.0.0.1", 0))
network = _Network()
for attempt in (
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendmsg([b"x"], [], 0, server.getsockname()),
    lambda: socket.gethostbyname("example.org"),
    lambda: socket.gethostbyaddr("127.0.0.1"),
    lambda: socket.socket(socket.AF_INET6).connect_ex(("::1", 80)),
):
    try:
        attempt()
    except ConnectionError:
        pass
print(network.attempts)
"""


def table_of_two(*scores):
    """Scores of full retention and of GSTEP on the same questions, in two parts of a split."""
    splits = [{"kind": "ab"[i % 2]} for i in range(len(scores))]
    return score_table(score_rows("none", 1.0, scores, splits=splits), score_rows("gstep", 0.25, scores, splits=splits))


@pytest.mark.parametrize(("per_question", "keys"), [(True, ["kind=a", "kind=b", "overall"]), (False, ["overall"])])
def test_the_number_of_a_whole_method_stands_in_no_column_of_a_part(per_question, keys):
    scores = set_arm_scores(table_of_two(1.0, 0.0), {ORIGINAL: 0.75, PRUNED: 0.5})
    scored = ScoredBenchmark(title="t", scores=scores, per_question=per_question)
    tables = _split_tables("m", scored, [Split("kind", "Kind"), Split("kind", "Again")])
    assert [column.key for column in tables[0].columns] == keys
    assert len(tables) == 1 + per_question
    assert [row.cells[-1].score for row in tables[0].rows] == [75.0, 50.0]


def test_failed_answers_are_counted_beside_the_number_of_a_whole_method():
    matrix = make_score_matrix(
        set_arm_scores(table_of_two(1.0, None), {ORIGINAL: 0.75, PRUNED: 0.5}), [ORIGINAL, PRUNED]
    )
    assert matrix.scores.tolist() == [[0.75, 0.75], [0.5, 0.5]]
    assert [tally.n_failed for tally in matrix.tallies] == [1, 1]


class Scorer:
    """A process that has scored already."""

    def __init__(self, **answer):
        own = {"none@1": {"acc": 50.0}, "gstep@0.25": {"acc": 100.0}}
        common = {
            "metric": "acc",
            "own": own,
            "judged": {},
            "errors": [],
            "nothing": "",
            "weights": {},
            "percent": True,
        }
        self.score = lambda arms: {**common, **answer}


def own_scores(replies, **answer):
    task = DescribedTask("0.7.3", "acc", ["acc"], {}, [])
    common = {"video_ids": ("v",), "path": "v", "question": "Q", "expected": None, "cluster": "v"}
    items = [Item(question_id=str(number), splits={"dim": "ab"[number]}, **common) for number in range(2)]
    benchmark = replace(find_benchmark("lmms:mine"), task=task, process=Scorer(**answer))
    return benchmark.score_replies(items, replies, benchmark.protocol())


SCORES = {"none@1": {"0": 1.0, "1": 0.5}, "gstep@0.25": {"0": 1.0, "1": 0.5}}


def test_failed_answers_to_which_the_rule_gives_points_are_named():
    replies = {"none@1": {"0": "A", "1": "B"}, "gstep@0.25": {"0": "A"}}
    notes = own_scores(replies, scores=SCORES, mean_over="questions").notes
    assert len(notes) == 1 and notes[0].startswith("the task's rule gives points to 1 failed answers")
    replies["gstep@0.25"]["1"] = ""  # an empty reply did not fail
    assert not own_scores(replies, scores=SCORES, mean_over="questions").notes


def test_a_mean_over_a_field_that_is_no_split_is_the_number_of_a_whole_method():
    """Five videos of a hundred, by --limit: the task averages over videos, and results have no such parts."""
    replies = {label: {"0": "A", "1": "B"} for label in SCORES}
    own = own_scores(replies, scores=SCORES, mean_over="video", weights={"x": 0.5, "y": 0.5})
    assert (own.scores, own.numbers["mean_over"], own.numbers["weights"]) == (None, None, {})
    assert own.notes[-1].startswith("acc is the task's own number of a whole method")
    own = own_scores(replies, scores=SCORES, mean_over="dim", weights={"a": 0.5, "b": 0.5})
    assert own.scores == SCORES and own.numbers["mean_over"] == "dim"


def test_errors_that_several_metrics_share_are_one_note():
    own = {label: {"acc": "KeyError: 'b'", "rate": "KeyError: 'b'", "miou": 0.5} for label in SCORES}
    notes = own_scores({label: {} for label in SCORES}, own=own, scores=None, mean_over=None).notes
    assert notes[0] == "the task made no number acc, rate: KeyError: 'b'" and len(notes) == 2


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


def test_keys_of_services_do_not_reach_the_code_of_tasks(monkeypatch, tmp_path):
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a secret")
    environment = process._make_environment(tmp_path)
    assert "a secret" not in environment.values() and environment["OPENAI_API_KEY"] == "withheld"
    assert environment["PATH"] == os.environ["PATH"] and environment["HF_HOME"] == str(tmp_path)


def test_annotations_in_a_file_leave_nothing_in_hf_home(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    assert "HF_DATASETS_CACHE" not in process._make_environment(tmp_path)
    assert process._make_environment(tmp_path, tmp_path / "t")["HF_DATASETS_CACHE"] == str(tmp_path / "t")


def test_annotations_that_cannot_be_loaded_are_named_with_their_file(monkeypatch, tmp_path):
    refused = {"refusal": "its annotations cannot be loaded: KeyError: 'question'"}
    monkeypatch.setattr(process, "run_child", lambda request, home: refused)
    with pytest.raises(UsageError, match=r"must be below HF_HOME .* write them to annotations/mine\.parquet"):
        TaskProcess("mine", None, "llava_onevision", tmp_path, print).describe()
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/mine.jsonl").write_text(json.dumps({"x": 1}))
    with pytest.raises(UsageError, match=r"They were read from .*/mine\.jsonl, which must have rows"):
        TaskProcess("mine", None, "llava_onevision", tmp_path, print).describe()


def test_names_are_not_looked_up_and_messages_are_not_sent():
    done = subprocess.run([sys.executable, "-c", _NETWORK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "4\n", done.stderr


def test_the_end_of_a_long_log_is_read(tmp_path):
    (tmp_path / "log").write_bytes(b"\xff" * 10_000 + b"\nthe last line")
    assert process._read_end(tmp_path / "log").splitlines()[-1] == "the last line"
    assert len(process._read_end(tmp_path / "log")) <= 4096


@pytest.mark.parametrize("extra", [1, lambda: 1], ids=["pickled", "deep"])
def test_rules_get_copies_of_results(extra):
    results = [{"list": [1], "extra": extra}]

    def aggregate(of_all):
        of_all[0]["list"].append(2)
        return len(of_all[0]["list"])

    assert [numbers.compute_number(results, aggregate) for _ in range(2)] == [2.0, 2.0]
    assert results[0]["list"] == [1]


def test_numbers_that_do_not_say_whether_they_are_percentages_are_damaged(tmp_path):
    store = LocalStore(tmp_path)
    own = {"splits": [], "metric": "acc", "weights": {}, "mean_over": None, "numbers": {"none@1": {"acc": 0.5}}}
    store.put(OWN_NUMBERS, json.dumps(own).encode())
    with pytest.raises(NotResults, match=r"lmms\.json is damaged \(KeyError\('percent'\)\)"):
        find_benchmark("lmms:mine").load_stored_settings(store)
    store.put(OWN_NUMBERS, json.dumps({**own, "percent": False}).encode())
    assert find_benchmark("lmms:mine").load_stored_settings(store).get_arm_share("none@1") == 0.5
