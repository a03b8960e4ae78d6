"""jobs.testbed: what make writes and says, how it ends, and the trained model `shapes` on 12 of its videos.

Counts are those of one machine; others round differently, and a question or two may change sides.
"""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from gstep.backbones import ModelSource
from gstep.language import Decoding
from jobs import evaluate, testbed
from pipeline.evaluate.benchmarks import find_benchmark
from pipeline.evaluate.shapes import layout
from pipeline.evaluate.shapes.questions import TYPES
from pipeline.generate.answerer import Answerer
from pipeline.generate.prompts import VideoMemory
from pipeline.generate.questions import AnswerMode, read_questions
from pipeline.rows import QuestionRecord, drop_nulls
from pipeline.storage.stores import LocalStore
from tests.builders.answers import setup_of
from tests.builders.runs import run, said_by
from tests.paths import read_all


def make(folder, *options, code=0):
    return said_by(testbed, "make", folder, "--videos", 3, *options, code=code)


def seeds_of(folder):
    return {int(path.stem.removeprefix("shapes-")) for path in (folder / "data").iterdir()}


def test_a_folder_is_made_that_the_benchmark_reads_and_the_same_command_again_is_well(tmp_path):
    said = make(tmp_path / "d")
    items = find_benchmark("shapes").load(tmp_path / "d").items
    assert f"3 videos and {len(items)} questions are in {tmp_path / 'd'}" in said
    assert len({item.video_id for item in items}) == 3 and len(items) >= 18
    before = read_all(tmp_path / "d")
    make(tmp_path / "d", "--picture", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "holds videos of another recipe" in make(tmp_path / "d", "--seed", "1", code=2)
    assert read_all(tmp_path / "d") == before


def test_options_choose_the_videos(tmp_path):
    make(tmp_path / "a", "--seed", "4", "--durations", "long", "--hardness", "dim", "needle", "pan")
    items = find_benchmark("shapes").load(tmp_path / "a").items
    assert {item.splits["duration"] for item in items} == {"long"}
    assert {item.splits["domain"] for item in items} == {"dim", "needle", "pan"}
    make(tmp_path / "b", "--durations", "short")
    assert not seeds_of(tmp_path / "a") & seeds_of(tmp_path / "b")


def test_an_interrupted_one_ends_with_130_and_goes_on(tmp_path, monkeypatch):
    write_mp4 = layout.write_mp4

    def write_and_interrupt(path, *video):
        write_mp4(path, *video)
        if len([*path.parent.iterdir()]) == 2:
            path.write_bytes(path.read_bytes()[:-99])  # as in the middle of the second video
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "write_mp4", write_and_interrupt)
        make(tmp_path / "d", code=130)
    assert len([*tmp_path.glob("d/data/*.mp4")]) == 2
    make(tmp_path / "d")
    make(tmp_path / "whole")
    assert read_all(tmp_path / "d") == read_all(tmp_path / "whole")


def test_a_folder_that_cannot_be_made_is_a_failure_in_a_line(tmp_path):
    (tmp_path / "d").write_text("mine")
    assert "failed: " in make(tmp_path / "d" / "e", code=1)
    assert (tmp_path / "d").is_file()


def test_two_processes_write_the_same_bytes(tmp_path):
    make(tmp_path / "here", "--hardness", "mixed")
    argv = ("make", str(tmp_path / "there"), "--videos", "3", "--hardness", "mixed")
    done = run("jobs.testbed", *argv, PYTHONHASHSEED="3")
    assert done.returncode == 0, done.stdout
    assert read_all(tmp_path / "here") == read_all(tmp_path / "there")


VIDEOS = 12
CELLS = 36  # tokens of a frame
RIGHT = {"none": 93, "gstep": 88, "random": 44}
MUTATED = 2  # videos


@pytest.fixture(scope="module")
def results(one_ray, tmp_path_factory):
    """All tokens, and a tenth of them by two methods, at the positions that are the product's default."""
    folder = tmp_path_factory.mktemp("shapes")
    assert testbed.main(["make", str(folder / "data"), "--videos", str(VIDEOS), "--seed", "20"]) == 0
    argv = ["--benchmark", "shapes", "--data", str(folder / "data"), "--model", "shapes", "--out", str(folder / "r")]
    said_by(evaluate, *argv, "--method", "gstep", "random", "--retention-ratio", "0.1", "--draws", "200")
    return folder / "r"


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", [another_video, frames_reversed, places_within_frames_for_times])
def test_a_fault_between_cache_and_model_costs_answers(fault, accuracy, unharmed, questions, monkeypatch):
    assert unharmed >= 0.93
    prune, ids = VideoMemory.prune, sorted({row["video_ids"][0] for row in questions})

    def broken(self, video, *args):
        other = self.read(next(one for one in ids if one != video.video_id))
        return fault(prune(self, video, *args), other.visual)

    monkeypatch.setattr(VideoMemory, "prune", broken)
    assert accuracy() <= unharmed - 0.1
