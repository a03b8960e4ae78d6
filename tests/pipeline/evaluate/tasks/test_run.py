"""Tasks of lmms-eval from the command to the table: faults, reruns, other metrics, removal, and tables without it."""

import json
import os
import shutil
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from jobs import evaluate, remove
from pipeline import read_answers
from tests import lmms_here
from tests.builders.clusters import ray_here
from tests.builders.runs import forbid_models, forbid_ray, run_here
from tests.interpreter import run_python
from tests.pipeline.evaluate.tasks import homes

pytestmark = [pytest.mark.lmms, pytest.mark.slow]

OPTIONS = ["--model", "shapes", "--num-frames", "4", "--max-new-tokens", "12", "--draws", "200"]
OPTIONS += ["--method", "gstep", "random", "--retention-ratio", "25%", "10%"]
CHARADES, VIDEOS_RIGHT = "temporal_grounding_charades", "temporalbench_short_qa@temporalbench_score/1"
N_ASKED = 9  # documents of Charades that can be asked
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
    return home


def evaluated(home, out, task, code=0):
    done = run_here(evaluate, ["--benchmark", f"lmms:{task}", "--data", str(home), "--out", str(out), *OPTIONS])
    assert done.returncode == code, done.stdout
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def results(home, tmp_path_factory):
    """The results of two tasks: Charades, and TemporalBench by a number that is no mean over questions."""
    folder, found = tmp_path_factory.mktemp("r"), {}
    with ray_here({"num_cpus": 2}):
        for task in (CHARADES, VIDEOS_RIGHT):
            out = folder / f"r{len(found)}"
            found[task] = SimpleNamespace(said=evaluated(home, out, task), out=out)
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
    assert {row["question_id"] for row in read_answers(done.out / "answers").to_pylist()} == set("012345678")
    # Of the two equal documents the task counts the later one.
    assert {row["question_id"] for row in scores_of(done.out)} == set("01345678")
    assert "document 2: the task leaves it out" in (done.out / "report.html").read_text()


def test_the_same_replies_and_metrics_as_by_lmms_evals_own_command(home, results, tmp_path):
    """On the documents that can be asked, since the command cannot leave out any."""
    done = results[CHARADES]
    rows = homes.select_annotations(home / f"annotations/{CHARADES}.parquet", range(N_ASKED), tmp_path / "rows.parquet")
    tasks = lmms_here.write_task(tmp_path / "t", rows, "charades_sta/charades.yaml", "charades_here")
    options = ("--batch_size", "8", "--gen_kwargs", "max_new_tokens=12")
    args = {"cache": done.out / "cache", "answers": tmp_path / "a", "method": "gstep", "retention_ratio": 0.25}
    lmms_here.lmms_eval_of(tasks, tmp_path / "o", *options, task="charades_here", **args)
    answers = read_answers(done.out / "answers").to_pylist()
    ours = {int(row["question_id"]): row["answer"].strip() for row in answers if row["pruning"] == "gstep@0.25"}
    assert lmms_here.replies_in(tmp_path / "o", "charades_here") == ours
    metrics = lmms_here.results_in(tmp_path / "o", "charades_here")
    own = own_of(done.out)["numbers"]["gstep@0.25"]
    assert len(own) == 4 and {name: metrics[f"{name},none"] for name in own} == pytest.approx(own, abs=1e-9)


def test_a_rerun_by_another_metric_asks_nothing_and_scores_again(home, results, copied, monkeypatch):
    out = copied(CHARADES)
    forbid_models(monkeypatch)
    forbid_ray(monkeypatch)
    said = evaluated(home, out, f"{CHARADES}@charades_sta_mIOU")
    before, after = own_of(results[CHARADES].out), own_of(out)
    assert before["metric"] == "charades_sta_IOU@3" and after["metric"] == "charades_sta_mIOU"
    assert before["numbers"] == after["numbers"] and "0 failed" in said
    assert json.loads((out / "tables.json").read_text())[0]["columns"][-1]["Metric"] == "charades_sta_mIOU"
    assert list((out / "answers").glob("answers/*")) != []


def test_a_number_that_is_no_mean_is_shown_without_an_interval(results):
    done = results[VIDEOS_RIGHT]
    own = own_of(done.out)
    assert (own["metric"], own["mean_over"], own["percent"]) == ("temporalbench_score/1", None, True)
    assert "temporalbench_score/1 is the task's own number of a whole method: no mean over questions" in done.said
    assert {row["score"] for row in scores_of(done.out)} == {None} and len(scores_of(done.out)) == 30
    shown = {label: f"{numbers['temporalbench_score/1']:.1f}" for label, numbers in own["numbers"].items()}
    assert {label: printed for label, (printed, _) in table_of(done.out).items()} == shown
    assert {low for _, low in table_of(done.out).values()} == {None}
    answers = read_answers(done.out / "answers").to_pylist()
    replies = {(row["pruning"], int(row["question_id"])): row["answer"].strip() for row in answers}
    right = [replies["none@1", 2 * n] == "A" and replies["none@1", 2 * n + 1] == "AB"[n % 2] for n in range(3)]
    assert own["numbers"]["none@1"]["temporalbench_score/1"] == pytest.approx(100 * sum(right) / 3)


@pytest.mark.parametrize("task", [CHARADES, VIDEOS_RIGHT])
def test_tables_are_laid_out_without_lmms_eval_and_without_the_videos(results, tmp_path, task):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    argv = ["--results", results[task].out, "--out", tmp_path / "t", "--draws", "200"]
    done = run_python("-c", _WITHOUT_LMMS_EVAL, *argv, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert table_of(tmp_path / "t") == table_of(results[task].out)
    assert own_of(results[task].out)["metric"] in (tmp_path / "t" / "tables.md").read_text().replace("\\", "")


def remove_video(out, tmp_path, video_id):
    (tmp_path / "ids.txt").write_text(video_id)
    done = run_here(remove, [str(out), "--ids", str(tmp_path / "ids.txt"), "--reason", "asked", "--keep-minutes", "0"])
    assert done.returncode == 0, done.stdout


def test_scores_of_questions_are_left_without_those_of_a_removed_video(copied, tmp_path):
    out = copied(CHARADES)
    remove_video(out, tmp_path, "charades_sta/Charades_v1_480/AO8RW.mp4")
    assert {row["question_id"] for row in scores_of(out)} == set("345678")
    by_arm = {}
    for row in scores_of(out):
        by_arm.setdefault(f"{row['method']}@{row['retention_ratio']:g}", []).append(row["score"])
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
