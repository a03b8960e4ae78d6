"""Tasks of lmms-eval from the command to the table: faults, reruns, other metrics, removal, and tables without it.

Replies and metrics are those of lmms-eval's own command on the same cache; numbers of made-up replies are computed by
hand.
"""

import json
import os
import shutil
import socket
from collections import Counter
from contextlib import suppress
from threading import Thread
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from jobs import evaluate, remove
from pipeline import read_answers
from pipeline.errors import UsageError
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
    ours = process_of(home, VSIBENCH).score(arms)["own"]["none@1"]
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


def process_of(home, task, metric=None):
    return TaskProcess(task, metric, "llava_onevision", home, print)


def scored(home, task, *replies, metric=None):
    """The task's answer about replies by the number of their document, for one or two arms."""
    texts = ({str(number): text for number, text in of_arm.items()} for of_arm in replies)
    arms = dict(zip(LABELS[:2], texts, strict=True))
    return process_of(home, task, metric).score(arms)


def means(answer):
    """The mean of the documents' scores, by arm."""
    return {label: sum(of_arm.values()) / len(of_arm) for label, of_arm in answer["scores"].items()}


def test_of_equal_documents_of_charades_the_last_one_counts(home):
    """Documents 2 and 8 are the same, and the task's own code keeps the last reply to them."""
    replies = {
        0: "The event happens in the 0.0 - 2.0 seconds.",  # is 0.0 to 1.0
        1: "It starts at 0.4 and ends at 1.3",  # a sentence of two numbers without a dash counts as one of them
        2: "0.0 - 1.1",  # right, but the eighth counts
        3: "0.4 - 1.3",
        4: "00:00 to 00:01",  # is 0.0 to 1.2; "to" is a dash to the task
        5: "",
        6: "1.0 - 0.0",  # turned round; is 0.0 to 1.3
        7: "5 - 9",
        8: "no idea",
    }
    answer = scored(home, "temporal_grounding_charades", replies, {**replies, 2: "no idea", 8: "0.0 - 1.1"})
    numbers = {"charades_sta_IOU@3": 50.0, "charades_sta_IOU@5": 50.0, "charades_sta_IOU@7": 37.5}
    total = 0.5 + 1.0 + 1.0 / 1.2 + 1.0 / 1.3
    assert answer["own"]["none@1"] == pytest.approx({**numbers, "charades_sta_mIOU": 100 * total / 8})
    numbers = {name: number + 12.5 for name, number in numbers.items()}
    assert answer["own"]["gstep@0.25"] == pytest.approx({**numbers, "charades_sta_mIOU": 100 * (total + 1) / 8})
    assert (answer["mean_over"], answer["percent"], answer["errors"]) == ("questions", True, [])
    assert [set(of_arm) for of_arm in answer["scores"].values()] == [set("01345678")] * 2
    assert means(answer) == {"none@1": 0.5, "gstep@0.25": 0.625}


def test_documents_that_show_pictures_or_several_videos_are_named_and_left_out(home):
    homes.write_mmsi_video(home)
    described = process_of(home, "mmsi_video").describe()
    two, picture = (
        ("other-media", f"it shows 2 ({what}), and not one video file") for what in ("a path", "Image, a path")
    )
    assert [one.fault for one in described.documents] == [None, two, None, picture, None, None, None]
    assert (described.metric, len(described.metrics)) == ("overall_accuracy", 14)
    assert described.documents[2].fields["type"] == "(Motion Understanding) Camera Motion"
    replies = {0: "A", 2: "The answer is C.", 4: "B", 5: "(B)", 6: "C"}
    answer = scored(home, "mmsi_video", replies, dict.fromkeys(replies, "A"), metric="motion_camera")
    own = answer["own"]["none@1"]
    assert own["overall_accuracy"] == 80.0 and own["motion_camera"] == 66.67 and own["planning"] == 100.0
    # A metric about one type is a mean over its documents, and the others do not count.
    assert (answer["mean_over"], answer["weights"]) == ("type", {"(Motion Understanding) Camera Motion": 1.0})
    assert answer["scores"]["none@1"] == {"2": 1.0, "4": 0.0, "6": 1.0}
    assert answer["scores"]["gstep@0.25"] == {"2": 0.0, "4": 1.0, "6": 0.0}


def test_replies_for_a_judge_are_counted_and_never_posted(home, monkeypatch):
    calls = []

    def count_calls():
        with suppress(OSError):  # the server was closed
            while True:
                connection, address = server.accept()
                connection.close()
                calls.append(address)

    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=count_calls, daemon=True).start()
        monkeypatch.setenv("OPENAI_API_URL", f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        right = {0: "Yes, it does.", 1: "no", 2: "yes", 3: "No way"}
        answer = scored(home, "tempcompass_yes_no", right, {**right, 1: "perhaps", 3: "the square rests"})
        assert not calls
    assert answer["judged"] == {"none@1": 0, "gstep@0.25": 2}
    own = answer["own"]
    assert own["none@1"] == {"avg_accuracy": 100.0, "direction_accuracy": 100.0}
    assert own["gstep@0.25"] == {"avg_accuracy": 50.0, "direction_accuracy": 50.0}
    assert means(answer) == {"none@1": 1.0, "gstep@0.25": 0.5}


def test_a_task_that_only_a_judge_scores_is_refused_before_anything_is_asked(home):
    homes.write_captioning(home)
    with pytest.raises(UsageError, match=r"lmms:tempcompass_captioning: its rule sends replies to a judge"):
        process_of(home, "tempcompass_captioning").describe()


def test_an_option_that_the_rule_draws_is_the_same_for_every_method(home):
    homes.write_nextqa(home)
    replies = dict.fromkeys(range(12), "no idea")
    answer = scored(home, "nextqa_mc_test", replies, replies)
    first, second = answer["scores"].values()
    assert first == second and len(Counter(first.values())) == 2
    assert answer["own"]["none@1"] == answer["own"]["gstep@0.25"]
