"""lmms-eval's own command on a local task of VideoMME: the replies of jobs.evaluate, also after a kill."""

import shutil
from collections import Counter
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

from jobs import evaluate
from pipeline import read_answers
from pipeline.cache.header import compute_fingerprint
from pipeline.cache.reader import TokenCache
from pipeline.errors import IdentityMismatch, RunFailed, UnknownVideo, UsageError
from pipeline.generate.answers import AnswersTable
from pipeline.storage.stores import LocalStore
from tests import lmms_here
from tests.builders.answers import tiny_cache
from tests.builders.clusters import ray_here
from tests.builders.runs import forbid_models, forbid_ray, run_here
from tests.pipeline.evaluate.videomme import PER_VIDEO, write_videomme

pytestmark = [pytest.mark.lmms, pytest.mark.slow]

N_VIDEOS = 4
SETTINGS = {"max_new_tokens": 16, "temperature": 0, "top_p": 1.0, "num_beams": 1, "do_sample": False, "until": ["\n\n"]}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The rows of the task, and the results of jobs.evaluate on them; then the videos are deleted."""
    data = write_videomme(tmp_path_factory.mktemp("v"), n_videos=N_VIDEOS, faults=False)
    out = tmp_path_factory.mktemp("r")
    argv = ["--benchmark", "videomme", "--data", str(data), "--out", str(out / "r"), "--num-frames", "4"]
    with ray_here({"num_cpus": 2}):
        done = run_here(evaluate, [*argv, "--draws", "200", "--method", "gstep", "--retention-ratio", "0.25"])
    assert done.returncode == 0, done.stdout
    shutil.rmtree(data / "data")
    (rows,) = data.glob("videomme/*.parquet")
    return SimpleNamespace(rows=rows, out=out / "r", cache=out / "r" / "cache")


@pytest.fixture(scope="module")
def tasks(evaluated, tmp_path_factory):
    return lmms_here.write_task(tmp_path_factory.mktemp("t") / "tasks", evaluated.rows)


def expected(evaluated, pruning):
    """What jobs.evaluate was answered, by the place of the question in the annotations."""
    ids = pq.read_table(evaluated.rows)["question_id"].to_pylist()
    rows = {r["question_id"]: r for r in read_answers(evaluated.out / "answers").to_pylist() if r["pruning"] == pruning}
    return {place: rows[name] for place, name in enumerate(ids)}


def ours(answers):
    """What was answered here, by the same."""
    return {int(row["question_id"].rsplit("/", 1)[1]): row for row in read_answers(answers).to_pylist()}


def test_replies_are_those_of_jobs_evaluate_without_the_videos(evaluated, tasks, tmp_path):
    places = {"cache": evaluated.cache, "answers": tmp_path / "a"}
    said = lmms_here.lmms_eval_of(tasks, tmp_path / "o", "--batch_size", "4", **places)
    theirs, mine = expected(evaluated, "none@1"), ours(tmp_path / "a")
    assert len(theirs) == len(mine) == N_VIDEOS * PER_VIDEO
    for place, row in theirs.items():
        for name in ("prompt", "video_ids", "answer", "n_prompt_tokens", "n_kept", "finish"):
            assert mine[place][name] == row[name]
    replies = lmms_here.replies_in(tmp_path / "o")
    assert replies == {place: row["answer"].strip() for place, row in theirs.items()} and len(set(replies.values())) > 2
    assert "videomme_perception_score,none" in lmms_here.results_in(tmp_path / "o")
    assert f"fingerprint={compute_fingerprint(TokenCache(evaluated.cache).identity)}" in said


def test_a_run_that_is_killed_at_half_goes_on_and_asks_nothing_twice(evaluated, tasks, tmp_path):
    known = compute_fingerprint(TokenCache(evaluated.cache).identity)
    asked = {"cache": evaluated.cache, "answers": tmp_path / "a", "method": "gstep", "retention_ratio": 0.25}
    asked |= {"alpha": 0.5, "fingerprint": known}  # alpha is the method's own default
    lmms_here.lmms_eval_of(tasks, tmp_path / "k", "--batch_size", "3", die_at=2, **asked)
    held = AnswersTable(LocalStore(tmp_path / "a")).rows()["question_id"].to_pylist()
    assert len(held) == 6 and not list((tmp_path / "k").rglob("*_results.json"))
    lmms_here.lmms_eval_of(tasks, tmp_path / "o", "--batch_size", "3", **asked)
    rows = AnswersTable(LocalStore(tmp_path / "a")).rows()
    assert set(Counter(rows["question_id"].to_pylist()).values()) == {1} and len(rows) == N_VIDEOS * PER_VIDEO
    assert sorted(Counter(rows["run_id"].to_pylist()).values()) == [6, 6]
    theirs = expected(evaluated, "gstep@0.25")
    assert lmms_here.replies_in(tmp_path / "o") == {place: row["answer"].strip() for place, row in theirs.items()}


@pytest.fixture
def model(tmp_path):
    """gstep_cached on a small cache, as lmms-eval makes it; ``ask`` has its tasks ask one question a document."""
    from pipeline.evaluate.lmms.plugin import GstepCached  # noqa: PLC0415 - imports lmms_eval

    tiny_cache(tmp_path / "c", ("data/a.mp4", "clevrer/video_validation/v.mp4", "perception/videos/v.mp4"))

    def made(**more):
        said = {"cache": tmp_path / "c", "answers": tmp_path / "a", **more}
        text = ",".join(f"{name}={value}" for name, value in said.items())
        lm = GstepCached.create_from_arg_string(text, {"batch_size": "4", "max_batch_size": None, "device": None})
        lm.ask = lambda *docs, task="t", settings=SETTINGS, visual=None: _ask(lm, docs, task, settings, visual)
        return lm

    return made


def _ask(lm, docs, task, settings, visual):
    lm.task_dict = {task: {"test": list(docs)}}
    said = (" ".join(map(str, doc.values())) for doc in docs)
    args = [(f"What is {words}?", settings, visual, place, task, "test") for place, words in enumerate(said)]
    return lm.generate_until([SimpleNamespace(args=arg) for arg in args])


def test_the_same_questions_again_need_no_model_and_no_ray(model, monkeypatch):
    forbid_ray(monkeypatch)
    docs = {"videoID": "a"}, {"video_path": "a.mp4", "q": 2}
    first = model().ask(*docs)
    forbid_models(monkeypatch)
    assert model().ask(*docs) == first and len(first) == 2
    with pytest.raises(UsageError, match="have changed"):
        model().ask({"videoID": "a", "q": "another question"})


def test_a_folder_tells_videos_of_one_name_apart(model, tmp_path):
    class Task:
        def __init__(self, sub_task):
            self.lmms_eval_specific_kwargs = {"sub_task": sub_task, "post_prompt": ""}

        def doc_to_visual(self, doc):
            raise AssertionError("a file was looked for")

    model().ask({"video": "v.mp4"}, task="mine_1", visual=Task("moving_count").doc_to_visual)
    model().ask({"video": "v.mp4"}, task="mine_2", visual=Task("action_count").doc_to_visual)
    model().ask({"video": "v.mp4"}, task="mvbench_state_change")
    found = {row["question_id"]: row["video_ids"] for row in read_answers(tmp_path / "a").to_pylist()}
    assert found == {
        "mine_1/test/0": ["clevrer/video_validation/v.mp4"],
        "mine_2/test/0": ["perception/videos/v.mp4"],
        "mvbench_state_change/test/0": ["perception/videos/v.mp4"],
    }
    with pytest.raises(UsageError, match=r"task t, document 0: 'v\.mp4' may be"):
        model().ask({"video": "v.mp4"})


def test_a_video_that_is_not_there_is_no_silent_skip(model, tmp_path):
    docs = {"videoID": "a"}, {"videoID": "gone"}
    with pytest.raises(UnknownVideo, match=r"task t, document 1: no id is 'gone' or ends with '/gone'"):
        model().ask(*docs)
    assert not list((tmp_path / "a").glob("answers/*"))
    answered, empty = model(missing="empty").ask(*docs)
    assert answered and empty == ""
    with pytest.raises(UsageError, match="task t, document 0: no field names a video"):
        model(missing="empty").ask({"clip": "a"})
    assert len(model(video_id="data/{clip}.mp4").ask({"clip": "a"}, task="u")) == 1


def test_questions_that_fail_are_named_and_the_others_kept(model, tmp_path):
    docs = {"videoID": "a"}, {"videoID": "a", "q": "\U0010fffe"}  # no text has that
    with pytest.raises(RunFailed, match=r"task t, document 1: bad-prompt: .*no character"):
        model().ask(*docs)
    assert {r["status"] for r in read_answers(tmp_path / "a").to_pylist()} == {"ok", "failed"}
    assert model(missing="empty").ask(*docs)[1] == ""


def test_another_cache_at_the_same_place_is_refused(model, tmp_path):
    known = compute_fingerprint(TokenCache(tmp_path / "c").identity)
    model().ask({"videoID": "a"})
    model(fingerprint=known)
    shutil.rmtree(tmp_path / "c")
    tiny_cache(tmp_path / "c", ("data/a.mp4",), ratio=0.5)
    with pytest.raises(IdentityMismatch, match=r"has the fingerprint blake2b:.*say fingerprint="):
        model(fingerprint=known)
    with pytest.raises(IdentityMismatch, match=r"cache.retention_ratio: the answers have 0.25, this run 0.5"):
        model()


def test_what_it_does_not_do_it_says(model, monkeypatch):
    lm = model()
    request = SimpleNamespace(args=("text", "choice", None, 0, "t", "test"))
    for ask, requests, why in (
        (lm.loglikelihood, [], "--choices loglikelihood"),
        (lm.generate_until_multi_round, [], "several rounds"),
        (lm.generate_until, [request], "output_type is generate_until"),
    ):
        with pytest.raises(UsageError, match=why):
            ask(requests)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="answers in one process"):
        model()
