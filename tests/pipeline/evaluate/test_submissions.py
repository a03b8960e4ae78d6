"""A benchmark without published answers ends in files for its server, and in no score anywhere."""

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from rich.console import Console

from pipeline.errors import IdentityMismatch, UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.evaluate import Evaluation, evaluate, render_evaluation
from pipeline.evaluate.request import prepare
from pipeline.evaluate.scores import make_submissions
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio
from tests.pipeline.evaluate.egoschema import UIDS, write_authors
from tests.pipeline.evaluate.layouts import commit_replies, replied

QUIET = Console(quiet=True)
FULL = BENCHMARKS["egoschema"]
ARMS = {"none@1": ORIGINAL, "gstep@0.25": MethodAtRatio("gstep", 0.25)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_authors(tmp_path_factory.mktemp("egoschema"))


@pytest.fixture(scope="module")
def loaded(data):
    return FULL.load(data)


def test_every_method_has_a_file_of_the_options_that_its_replies_name_and_of_draws_which_are_the_same_for_all(loaded):
    def made(replies, arms=ARMS):
        return make_submissions(loaded.items, replied(FULL, loaded, replies, arms=arms).scores)

    named = made(dict(zip(UIDS[:5], ("(A)", "B", "C.", "D ", "E"), strict=True)))
    assert list(named) == list(ARMS.values())
    for submission in named.values():
        assert submission.choices == {uid: number for number, uid in enumerate(UIDS[:5])} and submission.n_drawn == 0
    drawn, again = made(dict.fromkeys(UIDS[:5], "")), made(dict.fromkeys(UIDS[:5], ""))
    assert drawn == again and len({json.dumps(one.choices) for one in drawn.values()}) == 1
    choices = drawn[ORIGINAL].choices
    assert set(choices) == set(UIDS[:5]) and set(choices.values()) <= set(range(5)) and len(set(choices.values())) > 1
    assert drawn[ORIGINAL].n_drawn == 5
    (one,) = made({UIDS[0]: "B"}, None).values()  # questions that failed are left out
    assert one.choices == {UIDS[0]: 1}


def config_of(data: Path, out: Path, benchmark: str = "egoschema") -> EvaluateConfig:
    given = {"benchmark": benchmark, "data": str(data), "out": str(out), "draws": 100}
    return EvaluateConfig(**given, method=["gstep"], retention_ratio=[0.25])


def evaluated(data: Path, out: Path, benchmark: str = "egoschema") -> tuple[Evaluation, str]:
    """With answers to all questions there, one of them failed and one empty; and what was said."""
    config, said = config_of(data, out, benchmark), io.StringIO()
    commit_replies(prepare(config, QUIET), {UIDS[2]: ""}, {UIDS[3]: "failed-video"})
    done = evaluate(config, Console(file=said, width=300))
    Console(file=said, width=300).print(render_evaluation(done))
    return done, said.getvalue()


def test_the_full_set_becomes_submissions_without_ray_and_without_a_score(data, tmp_path):
    done, said = evaluated(data, tmp_path / "r")
    files = ["scores.parquet", "submissions/none@1.json", "submissions/gstep@0.25.json", "submissions/server.json"]
    assert done.files == files and not ray.is_initialized()
    there = {path.relative_to(tmp_path / "r").as_posix() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    assert set(files) <= there and not {"tables.md", "tables.tex", "report.html"} & there
    for name in files[1:3]:
        choices = json.loads((tmp_path / "r" / name).read_text())
        assert set(choices) == set(UIDS) - {UIDS[3], UIDS[5]} and choices[UIDS[0]] == choices[UIDS[4]] == 1
        assert f"note: {name}: 1 replies name no option; one is drawn for each" in said
        assert f"note: {name}: 1 questions failed, and are left out" in said
    assert "no score: the right answers are not published; python validate.py --f FILE" in said
    assert "EgoSchema full set: 5 questions to ask; 6 annotated of 5,031 in the whole benchmark" in said
    table = pq.read_table(tmp_path / "r" / "scores.parquet")
    assert table["right"].null_count == table["score"].null_count == len(table) == 10


def test_what_was_typed_in_stays_when_more_is_asked(data, tmp_path):
    evaluated(data, tmp_path / "r")
    form = tmp_path / "r" / "submissions" / "server.json"
    assert json.loads(form.read_text()) == {"none@1": None, "gstep@0.25": None}
    form.write_text(json.dumps({"gstep@0.25": 59.2, "other@0.1": 7}))
    evaluated(data, tmp_path / "r")
    assert json.loads(form.read_text()) == {"none@1": None, "gstep@0.25": 59.2, "other@0.1": 7}
    for typed, why in (("59.2", "must be an object such as"), ("{", "server.json is not valid JSON")):
        form.write_text(typed)
        with pytest.raises(UsageError, match=why):  # before anything is asked
            prepare(config_of(data, tmp_path / "r"), QUIET)


def test_subset_and_full_set_never_share_a_place(data, tmp_path):
    done, _ = evaluated(data, tmp_path / "r", "egoschema-subset")
    assert done.table is not None
    assert [(column.title, column.n_questions) for column in done.table.columns] == [("EgoSchema subset", 3)]
    with pytest.raises(IdentityMismatch, match="benchmark: the results have 'egoschema-subset', this run 'egoschema'"):
        evaluate(config_of(data, tmp_path / "r"), QUIET)
