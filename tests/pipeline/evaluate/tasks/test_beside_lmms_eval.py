"""Two tasks run by jobs.evaluate and by lmms-eval's own command on the same cache: equal replies, equal metrics."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from jobs import evaluate
from pipeline import read_answers
from pipeline.evaluate.tasks.process import TaskProcess
from tests import lmms_here
from tests.builders.clusters import ray_here
from tests.builders.runs import run_here
from tests.pipeline.evaluate.tasks import homes

pytestmark = [pytest.mark.lmms, pytest.mark.slow]

LABELS = ["none@1", "gstep@0.25", "gstep@0.1", "random@0.25", "random@0.1"]
OPTIONS = ["--model", "shapes", "--num-frames", "4", "--max-new-tokens", "12", "--draws", "200"]
OPTIONS += ["--method", "gstep", "random", "--retention-ratio", "25%", "10%"]
YAML = {"vsibench": "vsibench/vsibench.yaml", "tempcompass_multi_choice": "tempcompass/tempcompass_mc.yaml"}
VIDEO = {"vsibench": "{dataset}/{scene_name}.mp4", "tempcompass_multi_choice": "{video_id}.mp4"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("v") / "hf"
    homes.write_vsibench(home, per_type=2)
    homes.write_tempcompass(home)
    return home


@pytest.fixture(scope="module")
def evaluated(home, tmp_path_factory):
    """The results of jobs.evaluate by the name of the task."""
    results = {}
    with ray_here({"num_cpus": 2}):
        for task in YAML:
            out = tmp_path_factory.mktemp("r") / "r"
            done = run_here(evaluate, ["--benchmark", f"lmms:{task}", "--data", str(home), "--out", str(out), *OPTIONS])
            assert done.returncode == 0, done.stdout
            results[task] = SimpleNamespace(
                said=done.stdout,
                out=out,
                answers=read_answers(out / "answers").to_pylist(),
                own=json.loads((out / "lmms.json").read_text()),
                scores=pq.read_table(out / "scores.parquet").to_pylist(),
            )
    return results


def run_lmms_eval(home, evaluated, tmp_path, task, **model_args):
    """The replies and metrics of lmms-eval's own command; without a model where ``replies`` are given."""
    tasks = lmms_here.write_task(tmp_path / "t", home / f"annotations/{task}.parquet", YAML[task], f"{task}_here")
    model_args |= {"cache": evaluated[task].out / "cache", "answers": tmp_path / "a", "video_id": VIDEO[task]}
    options = ("--batch_size", "8", "--gen_kwargs", "max_new_tokens=12")
    lmms_here.lmms_eval_of(tasks, tmp_path / "o", *options, task=f"{task}_here", **model_args)
    return lmms_here.replies_in(tmp_path / "o", f"{task}_here"), lmms_here.results_in(tmp_path / "o", f"{task}_here")


def own_numbers(results):
    """The metrics that lmms-eval wrote, without their standard errors."""
    return {
        name.removesuffix(",none"): value
        for name, value in results.items()
        if name.endswith(",none") and "_stderr" not in name
    }


def replies_of(results, label):
    return {int(row["question_id"]): row["answer"].strip() for row in results.answers if row["pruning"] == label}


@pytest.mark.parametrize(
    ("task", "label"),
    [("vsibench", "none@1"), ("vsibench", "gstep@0.25"), ("tempcompass_multi_choice", "none@1")],
)
def test_replies_and_all_metrics_are_those_of_lmms_evals_own_command(home, evaluated, tmp_path, task, label):
    method, _, ratio = label.partition("@")
    pruning = {} if method == "none" else {"method": method, "retention_ratio": ratio}
    replies, results = run_lmms_eval(home, evaluated, tmp_path, task, **pruning)
    assert replies == replies_of(evaluated[task], label) and len(set(replies.values())) > 1
    ours = evaluated[task].own["numbers"][label]
    assert own_numbers(results) == pytest.approx(ours, abs=1e-9) and any(ours.values())
    assert len(ours) == {"vsibench": 9, "tempcompass_multi_choice": 3}[task]  # no document is about the other three


def test_numbers_in_replies_are_scored_as_by_lmms_evals_own_command(home, evaluated, tmp_path):
    """Replies that score on all nine metrics, which those of the small model do not."""
    rows = pq.read_table(home / "annotations/vsibench.parquet")["ground_truth"].to_pylist()
    words = {"1": "There is one chair.", "2": "two", "3": "I count 3 of them", "A": "A.", "B": "b", "C": "C. up"}
    said = ("A", "B. right", "There are 3 chairs", "two", "1", "C.", "no idea", "2.5", "four", "D")
    replies = {
        number: words.get(rows[number], rows[number]) if number < 10 else said[number - 10] for number in range(20)
    }
    shown, results = run_lmms_eval(home, evaluated, tmp_path, "vsibench", replies=replies)
    assert shown == replies
    arms = {"none@1": {str(number): reply for number, reply in replies.items()}}
    scored = TaskProcess("vsibench", None, "llava_onevision", home, print).score(arms)
    ours = scored["own"]["none@1"]
    assert own_numbers(results) == pytest.approx(ours, abs=1e-9)
    assert len(ours) == 9 and min(ours.values()) >= 0.5 and max(ours.values()) < 1


def test_the_table_shows_the_tasks_number_and_the_scores_have_it_as_their_mean(evaluated, tmp_path):
    results = evaluated["vsibench"]
    assert (results.own["metric"], results.own["mean_over"]) == ("vsibench_overall", "question_type")
    weights = results.own["weights"]
    directions = {name for name in weights if "rel_direction" in name}
    assert len(directions) == 3 and len(weights) == 10
    for name, weight in weights.items():
        assert weight == pytest.approx(1 / 24 if name in directions else 1 / 8, abs=1e-12)
    assert "the score is the mean over 10 question types" in results.said
    for label, numbers in results.own["numbers"].items():
        by_type = {name: [] for name in weights}
        for row in results.scores:
            if f"{row['method']}@{row['retention_ratio']:g}" == label:
                by_type[dict(row["splits"])["question_type"]].append(row["score"])
        mean = sum(weight * sum(by_type[name]) / len(by_type[name]) for name, weight in weights.items())
        assert mean == pytest.approx(numbers["vsibench_overall"], abs=1e-6)
    own = {label: 100 * numbers["vsibench_overall"] for label, numbers in results.own["numbers"].items()}
    argv = ["--results", str(results.out), "--out", str(tmp_path / "t"), "--draws", "200"]
    assert run_here(evaluate, argv).returncode == 0 and list(own) == LABELS
    for out in results.out, tmp_path / "t":
        rows = json.loads((out / "tables.json").read_text())[0]["rows"]
        shown = {f"{row['method']}@{row['retention_ratio']:g}": row["scores"]["overall"]["score"] for row in rows}
        assert shown == pytest.approx(own, abs=1e-4)


def test_a_percentage_over_all_questions_has_no_parts(evaluated):
    results = evaluated["tempcompass_multi_choice"]
    own = results.own
    assert (own["metric"], own["mean_over"], own["weights"], own["percent"]) == ("avg_accuracy", "questions", {}, True)
    for label, numbers in own["numbers"].items():
        scores = [r["score"] for r in results.scores if f"{r['method']}@{r['retention_ratio']:g}" == label]
        assert len(scores) == 8 and 100 * sum(scores) / 8 == pytest.approx(numbers["avg_accuracy"])
    assert {row["video_id"] for row in results.scores} >= {"tempcompass/videos/-1002488318.mp4"}
    assert list(own["numbers"]) == LABELS
