"""The trained model `shapes` on 12 videos: it answers rightly, methods part, and faults in between cost answers.

Counts are those of one machine; others round differently, and a question or two may change sides.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from gstep.backbones import ModelSource
from gstep.language import Decoding
from jobs import evaluate
from jobs.testbed import main
from pipeline.evaluate.shapes.questions import TYPES
from pipeline.generate.answerer import Answerer
from pipeline.generate.prompts import VideoMemory
from pipeline.generate.questions import AnswerMode, read_questions
from pipeline.rows import QuestionRecord, drop_nulls
from pipeline.storage.stores import LocalStore
from tests.builders.answers import setup_of
from tests.builders.runs import said_by

pytestmark = pytest.mark.slow

VIDEOS = 12
CELLS = 36  # tokens of a frame
RIGHT = {"none": 93, "gstep": 88, "random": 44}
MUTATED = 2  # videos


@pytest.fixture(scope="module")
def results(one_ray, tmp_path_factory):
    """All tokens, and a tenth of them by two methods, at the positions that are the product's default."""
    folder = tmp_path_factory.mktemp("shapes")
    assert main(["make", str(folder / "data"), "--videos", str(VIDEOS), "--seed", "20"]) == 0
    argv = ["--benchmark", "shapes", "--data", str(folder / "data"), "--model", "shapes", "--out", str(folder / "r")]
    said_by(evaluate, *argv, "--method", "gstep", "random", "--retention-ratio", "0.1", "--draws", "200")
    return folder / "r"


def test_it_answers_and_gstep_keeps_what_matters(results):
    rows = pq.read_table(results / "scores.parquet").to_pylist()
    asked, right = Counter(row["method"] for row in rows), Counter(row["method"] for row in rows if row["right"])
    share = {method: right[method] / asked[method] for method in asked}
    assert len(set(asked.values())) == 1 and share["none"] > 0.9
    assert share["gstep"] >= share["random"] + 0.25
    assert {method: pytest.approx(count, abs=2) for method, count in RIGHT.items()} == dict(right)
    types = Counter(dict(row["splits"])["task_type"] for row in rows if row["method"] == "none")
    assert types.keys() == set(TYPES) and min(types.values()) >= 2


@pytest.fixture(scope="module")
def questions(results):
    """Those on a few videos, as the driver of jobs.generate sends them."""
    rows = read_questions(
        str(results.parent / "data" / "questions.jsonl"), AnswerMode(Decoding(), "letter")
    ).to_pylist()
    some = sorted({video_id for row in rows for video_id in row["video_ids"]})[:MUTATED]
    return [{**drop_nulls(row, QuestionRecord), "attempts": 1} for row in rows if row["video_ids"][0] in some]


@pytest.fixture(scope="module")
def accuracy(results, questions):
    """Of the answering actor on the whole tokens of the cache."""
    store = LocalStore(results / "cache")
    setup = setup_of(store, source=ModelSource.resolve("shapes"), positions="original")

    def measured():
        answers = list(Answerer(setup).answer(questions))
        assert {answer["status"] for answer in answers} == {"ok"}
        right = [answer["choices"][answer["choice"]] == answer["target"] for answer in answers]
        return sum(right) / len(right)

    return measured


def another_video(visual, other):
    return other


def frames_reversed(visual, other):
    return replace(visual, tokens=by_frame(visual.tokens).flip(0).flatten(0, 1))


def places_within_frames_for_times(visual, other):
    """Transposed: [T,N] read as [N,T]."""
    return replace(visual, index=visual.index.view(visual.n_frames, -1).T.flatten().sort().indices)


def by_frame(tokens):
    return tokens.unflatten(0, (-1, CELLS))


@pytest.fixture(scope="module")
def unharmed(accuracy):
    return accuracy()


@pytest.mark.parametrize(
    "fault",
    [another_video, frames_reversed, places_within_frames_for_times],
)
def test_a_fault_between_cache_and_model_costs_answers(fault, accuracy, unharmed, questions, monkeypatch):
    assert unharmed >= 0.93
    prune, ids = VideoMemory.prune, sorted({row["video_ids"][0] for row in questions})

    def broken(self, video, *args):
        other = self.read(next(one for one in ids if one != video.video_id))
        return fault(prune(self, video, *args), other.visual)

    monkeypatch.setattr(VideoMemory, "prune", broken)
    assert accuracy() <= unharmed - 0.1
