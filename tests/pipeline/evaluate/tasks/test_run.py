"""Tasks of lmms-eval from the command to the table: faults, reruns, other metrics, removal, and tables without it.

Replies and metrics are those of lmms-eval's own command on the same cache.
"""

import json
import os
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from jobs import evaluate, remove
from pipeline import read_answers
from pipeline.evaluate.tasks.process import TaskProcess
from tests import lmms_here
from tests.builders.clusters import ray_here
from tests.builders.runs import forbid_models, forbid_ray, run_here
from tests.interpreter import run_python
from tests.pipeline.evaluate.tasks import homes

pytestmark = [pytest.mark.lmms, pytest.mark.slow]

OPTIONS = ["--model", "shapes", "--num-frames", "4", "--max-new-tokens", "12", "--draws", "200"]
OPTIONS += ["--method", "gstep", "random", "--retention-ratio", "25%", "10%"]
LABELS = ["none@1", "gstep@0.25", "gstep@0.1", "random@0.25", "random@0.1"]
CHARADES, VIDEOS_RIGHT = "temporal_grounding_charades", "temporalbench_short_qa@temporalbench_score/1"
N_ASKED = 9  # documents of Charades that can be asked
VSIBENCH, TEMPCOMPASS = "vsibench", "tempcompass_multi_choice"
YAML = {VSIBENCH: "vsibench/vsibench", TEMPCOMPASS: "tempcompass/tempcompass_mc", CHARADES: "charades_sta/charades"}
VIDEO = {VSIBENCH: "{dataset}/{scene_name}.mp4", TEMPCOMPASS: "{video_id}.mp4", CHARADES: "{video}"}
_WITHOUT_LMMS_EVAL = """
import sys
sys.modules["lmms_eval"] = None  # its import fails
from jobs import evaluate
sys.exit(evaluate.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("v") / "hf"
    homes.write_charades(home)
    homes.write_temporalbench(home)
    homes.write_vsibench(home, per_type=2)
    homes.write_tempcompass(home)
    return home


def evaluated(home, out, task, code=0):
    done = run_here(evaluate, ["--benchmark", f"lmms:{task}", "--data", str(home), "--out", str(out), *OPTIONS])
    assert done.returncode == code, done.stdout
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def results(home, tmp_path_factory):
    """The results of four tasks; the number of TemporalBench is no mean over questions."""
    folder, found = tmp_path_factory.mktemp("r"), {}
    with ray_here({"num_cpus": 2}):
        for task in (*YAML, VIDEOS_RIGHT):
            out = folder / f"r{len(found)}"
            said = evaluated(home, out, task)
            answers = read_answers(out / "answers").to_pylist()
            found[task] = SimpleNamespace(said=said, out=out, answers=answers, own=own_of(out), scores=scores_of(out))
    return found


@pytest.fixture
def copied(results, tmp_path):
    """A function that copies the results of a task, to be changed."""
    return lambda task: shutil.copytree(results[task].out, tmp_path / "copy")


def own_of(out):
    return json.loads((out / "lmms.json").read_text())


def scores_of(out):
    return pq.read_table(out / "scores.parquet").to_pylist()


def table_of(out):
    """The printed number and the interval of each method and ratio; None where there is no number."""
    rows = json.loads((out / "tables.json").read_text())[0]["rows"]
    cells = {f"{row['method']}@{row['retention_ratio']:g}": row["scores"].get("overall") for row in rows}
    return {label: cell and (cell["printed"], cell["low"]) for label, cell in cells.items()}


def test_documents_that_cannot_be_asked_are_counted_and_named(results):
    done = results[CHARADES]
    assert f"{N_ASKED} questions to ask; 12 annotated" in done.said
    for note in (
        "1 missing-video, left out, e.g. document 9: ",
        "1 no-answer, left out, e.g. document 10: it has no right answer",
        "1 policy, left out, e.g. document 11: ",
        "1 repeated-question, kept, e.g. document 8: the same question on the same video as '2'",
    ):
        assert f"note: {note}" in done.said
    assert "ZZZZZ.mp4" in done.said and homes.OUTSIDE in done.said
    assert {row["question_id"] for row in done.answers} == set("012345678")
    # Of the two equal documents the task counts the later one.
    assert {row["question_id"] for row in done.scores} == set("01345678")
    assert "document 2: the task leaves it out" in (done.out / "report.html").read_text()


def run_lmms_eval(home, results, tmp_path, task, n_documents, **model_args):
    """The replies and metrics of lmms-eval's own command; without a model where ``replies`` are given.

    It is asked about the first documents, since it cannot leave out any.
    """
    rows = homes.select_annotations(home / f"annotations/{task}.parquet", range(n_documents), tmp_path / "rows.parquet")
    tasks = lmms_here.write_task(tmp_path / "t", rows, f"{YAML[task]}.yaml", f"{task}_here")
    model_args |= {"cache": results[task].out / "cache", "answers": tmp_path / "a", "video_id": VIDEO[task]}
    options = ("--batch_size", "8", "--gen_kwargs", "max_new_tokens=12")
    lmms_here.lmms_eval_of(tasks, tmp_path / "o", *options, task=f"{task}_here", **model_args)
    metrics = lmms_here.results_in(tmp_path / "o", f"{task}_here")
    own = {name.removesuffix(",none"): value for name, value in metrics.items() if name.endswith(",none")}
    return lmms_here.replies_in(tmp_path / "o", f"{task}_here"), {k: v for k, v in own.items() if "_stderr" not in k}


@pytest.mark.parametrize(
    ("task", "label", "n_metrics"),
    [
        (VSIBENCH, "gstep@0.25", 9),
        (TEMPCOMPASS, "none@1", 3),  # no document is about the other three
        (CHARADES, "gstep@0.25", 4),
    ],
)
def test_replies_and_all_metrics_are_those_of_lmms_evals_own_command(home, results, tmp_path, task, label, n_metrics):
    method, _, ratio = label.partition("@")
    pruning = {} if method == "none" else {"method": method, "retention_ratio": ratio}
    rows = {int(row["question_id"]): row for row in results[task].answers if row["pruning"] == label}
    replies, metrics = run_lmms_eval(home, results, tmp_path, task, len(rows), **pruning)
    assert replies == {number: row["answer"].strip() for number, row in rows.items()}
    ours = results[task].own["numbers"][label]
    assert metrics == pytest.approx(ours, abs=1e-9) and len(ours) == n_metrics
    assert task == CHARADES or (len(set(replies.values())) > 1 and any(ours.values()))


def test_numbers_in_replies_are_scored_as_by_lmms_evals_own_command(home, results, tmp_path):
    """Replies that score on all nine metrics, which those of the small model do not."""
    rows = pq.read_table(home / "annotations/vsibench.parquet")["ground_truth"].to_pylist()
    words = {"1": "There is one chair.", "2": "two", "3": "I count 3 of them", "A": "A.", "B": "b", "C": "C. up"}
    said = ("A", "B. right", "There are 3 chairs", "two", "1", "C.", "no idea", "2.5", "four", "D")
    replies = dict(enumerate([*(words.get(row, row) for row in rows[:10]), *said]))
    shown, metrics = run_lmms_eval(home, results, tmp_path, VSIBENCH, 20, replies=replies)
    assert shown == replies
    arms = {"none@1": {str(number): reply for number, reply in replies.items()}}
    ours = TaskProcess(VSIBENCH, None, "llava_onevision", home, print).score(arms)["own"]["none@1"]
    assert metrics == pytest.approx(ours, abs=1e-9)
    assert len(ours) == 9 and min(ours.values()) >= 0.5 and max(ours.values()) < 1


def scores_by_arm(scores):
    """Score rows by the label of their arm."""
    by_arm = {}
    for row in scores:
        by_arm.setdefault(f"{row['method']}@{row['retention_ratio']:g}", []).append(row)
    return by_arm


def test_the_table_shows_the_tasks_number_and_the_scores_have_it_as_their_mean(results):
    done = results[VSIBENCH]
    weights, numbers = done.own["weights"], done.own["numbers"]
    assert (done.own["metric"], done.own["mean_over"]) == ("vsibench_overall", "question_type")
    directions = {name for name in weights if "rel_direction" in name}
    expected = {name: 1 / 24 if name in directions else 1 / 8 for name in weights}
    assert weights == pytest.approx(expected, abs=1e-12) and (len(directions), len(weights)) == (3, 10)
    assert "the score is the mean over 10 question types" in done.said
    for label, rows in scores_by_arm(done.scores).items():
        by_type = {name: [] for name in weights}
        for row in rows:
            by_type[dict(row["splits"])["question_type"]].append(row["score"])
        mean = sum(weight * sum(by_type[name]) / len(by_type[name]) for name, weight in weights.items())
        assert mean == pytest.approx(numbers[label]["vsibench_overall"], abs=1e-6)
    shown = {label: f"{100 * numbers[label]['vsibench_overall']:.1f}" for label in LABELS}
    assert {label: printed for label, (printed, _) in table_of(done.out).items()} == shown


def test_a_rerun_by_another_metric_asks_nothing_and_scores_again(home, results, copied, monkeypatch):
    out = copied(CHARADES)
    forbid_models(monkeypatch)
    forbid_ray(monkeypatch)
    said = evaluated(home, out, f"{CHARADES}@charades_sta_mIOU")
    before, after = results[CHARADES].own, own_of(out)
    assert before["metric"] == "charades_sta_IOU@3" and after["metric"] == "charades_sta_mIOU"
    assert before["numbers"] == after["numbers"] and "0 failed" in said
    assert json.loads((out / "tables.json").read_text())[0]["columns"][-1]["Metric"] == "charades_sta_mIOU"
    assert list((out / "answers").glob("answers/*")) != []


def test_a_number_that_is_no_mean_is_shown_without_an_interval(results):
    done = results[VIDEOS_RIGHT]
    own = done.own
    assert (own["metric"], own["mean_over"], own["percent"]) == ("temporalbench_score/1", None, True)
    assert "temporalbench_score/1 is the task's own number of a whole method: no mean over questions" in done.said
    assert {row["score"] for row in done.scores} == {None} and len(done.scores) == 30
    shown = {label: f"{numbers['temporalbench_score/1']:.1f}" for label, numbers in own["numbers"].items()}
    assert {label: printed for label, (printed, _) in table_of(done.out).items()} == shown
    assert {low for _, low in table_of(done.out).values()} == {None}
    replies = {(row["pruning"], int(row["question_id"])): row["answer"].strip() for row in done.answers}
    right = [replies["none@1", 2 * n] == "A" and replies["none@1", 2 * n + 1] == "AB"[n % 2] for n in range(3)]
    assert own["numbers"]["none@1"]["temporalbench_score/1"] == pytest.approx(100 * sum(right) / 3)


@pytest.mark.parametrize("task", [VSIBENCH, VIDEOS_RIGHT])
def test_tables_are_laid_out_without_lmms_eval_and_without_the_videos(results, tmp_path, task):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    argv = ["--results", results[task].out, "--out", tmp_path / "t", "--draws", "200"]
    done = run_python("-c", _WITHOUT_LMMS_EVAL, *argv, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table_of(tmp_path / "t") == table_of(results[task].out)
    assert results[task].own["metric"] in (tmp_path / "t" / "tables.md").read_text().replace("\\", "")


def remove_video(out, tmp_path, video_id):
    (tmp_path / "ids.txt").write_text(video_id)
    done = run_here(remove, [str(out), "--ids", str(tmp_path / "ids.txt"), "--reason", "asked", "--keep-minutes", "0"])
    assert done.returncode == 0, done.stdout


def test_scores_of_questions_are_left_without_those_of_a_removed_video(copied, tmp_path):
    out = copied(CHARADES)
    remove_video(out, tmp_path, "charades_sta/Charades_v1_480/AO8RW.mp4")
    assert {row["question_id"] for row in scores_of(out)} == set("345678")
    by_arm = {label: [row["score"] for row in rows] for label, rows in scores_by_arm(scores_of(out)).items()}
    means = {label: f"{100 * sum(scores) / len(scores):.1f}" for label, scores in by_arm.items()}
    assert {label: printed for label, (printed, _) in table_of(out).items()} == means
    assert own_of(out)["numbers"] == {}


def test_a_removed_video_is_in_no_number(home, copied, tmp_path, monkeypatch):
    out = copied(VIDEOS_RIGHT)
    remove_video(out, tmp_path, "temporalbench/short_video/Charades/1.mp4")
    assert len({row["question_id"] for row in scores_of(out)}) == 4
    assert own_of(out)["numbers"] == {} and set(table_of(out).values()) == {None}
    assert "temporalbench_score/1 was about removed questions too" in (out / "report.html").read_text()
    forbid_models(monkeypatch)
    forbid_ray(monkeypatch)
    evaluated(home, out, VIDEOS_RIGHT)
    assert {row["question_id"] for row in scores_of(out)} == {"0", "1", "4", "5"}
    numbers = [numbers["temporalbench_score/1"] for numbers in own_of(out)["numbers"].values()]
    assert all(number in (0.0, 50.0, 100.0) for number in numbers)


def test_an_unknown_task_and_an_unknown_metric_are_named(home, tmp_path):
    for task, why in (
        ("temporal_grounding_charade", "lmms-eval has no such task (did you mean temporal_grounding"),
        (f"{CHARADES}@IOU", "charades_sta_IOU@3, charades_sta_IOU@5, charades_sta_IOU@7, charades_sta_mIOU, not IOU"),
        ("tempcompass", "lmms:tempcompass: it is a group: give each of its tasks an --out"),
    ):
        said = evaluated(home, tmp_path / "o", task, code=2)
        assert why in said
    assert "tempcompass_yes_no" in said
    assert not (tmp_path / "o").exists()
