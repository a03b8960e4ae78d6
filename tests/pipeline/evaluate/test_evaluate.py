"""One evaluation from its options to its files and its exit code; what is said of it on the way."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from rich.console import Console, Group

from pipeline.errors import IdentityMismatch, NotResults, RunFailed, UsageError
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.items import LoadedQuestions
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.evaluate import Evaluation, evaluate, render_evaluation
from pipeline.evaluate.forms import MARKS, render_table
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.request import prepare
from pipeline.evaluate.results import Presentation, make_tables
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import make_submissions
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio
from pipeline.evaluate.tabulate import ScoredBenchmark, make_results_table
from pipeline.generate.summary import AnswerSummary
from tests.builders.answers import tiny_cache, write_questions
from tests.pipeline.evaluate.egoschema import UIDS, write_authors
from tests.pipeline.evaluate.layouts import QUIET, commit_replies, generated, replied
from tests.pipeline.evaluate.score_tables import items_of, scores_of, table_of
from tests.pipeline.pages import shown

OWN = Benchmark(name="q", title="Q", protocols=(LETTER,))


def answers(n_ok=10, n_missing=0, **failures) -> AnswerSummary:
    n_questions = n_ok + n_missing + sum(failures.values())
    return AnswerSummary(
        n_ok=n_ok, failures=failures, examples=dict.fromkeys(failures, ("q", "why")), n_missing=n_missing,
        n_questions=n_questions, visual_tokens=0.0, prompt_tokens=0.0, new_tokens=0, seconds={"load": 1.5},
    )  # fmt: skip


@pytest.fixture(scope="module")
def done() -> Evaluation:
    """Made-up scores of a few questions, as scored alone."""
    items = items_of(6)
    scores = scores_of(items, ["gstep", "fastv,K=3"], [0.25, 0.1])
    evaluated = ScoredQuestions(loaded=LoadedQuestions(tuple(items.values()), (), len(items)), scores=scores)
    table = make_tables(evaluated, Presentation(title="T", benchmark=OWN, described={}, draws=100))[0]
    return Evaluation(done=evaluated, table=table, out="there", files=["a.md", "b.html"])


@pytest.mark.parametrize(
    ("asked", "limit", "expected"),
    [
        (None, None, 0),  # nothing was asked
        *((counts, None, 0) for counts in (answers(), answers(1, io=9))),
        *((counts, None, 1) for counts in (answers(0, io=10), answers(9, n_missing=1), answers(9, internal=1))),
        *((answers(9, io=1), limit, code) for limit, code in (("1", 0), ("10%", 0), ("0", 1))),
        (answers(8, io=2), "10%", 1),
    ],
)
def test_an_evaluation_ends_as_its_answers_did_of_which_failures_count_against_the_limit(done, asked, limit, expected):
    config = EvaluateConfig(benchmark="x", max_failed=limit)
    assert replace(done, done=replace(done.done, answers=asked)).exit_code(config) == expected


def printed(done) -> str:
    return shown(render_evaluation(done))


def test_the_record_has_every_method_with_its_scores_and_the_counts(done):
    record = json.loads(json.dumps(replace(done, done=replace(done.done, answers=answers())).as_record()))
    assert (record["out"], record["files"]) == (done.out, list(done.files)) and record["answers"]["n_ok"] is not None
    rows = done.table.rows
    assert [(row["method"], row["retention_ratio"]) for row in record["scores"]] == [(r.method, r.ratio) for r in rows]
    assert record["notes"] == list(done.table.remarks) and record["notes"]
    assert {(row["n_cut"], row["n_weak"]) for row in record["scores"]} == {(0, 0)}
    assert record["rows"] == json.loads(json.dumps(done.table.as_record()["rows"])) and record["reference"] == "gstep"
    first = record["scores"][0]
    assert first["scores"].keys() == {column.key for column in done.table.columns}
    assert (first["rel"], first["scores"]["overall"]) == (rows[0].rel.score, rows[0].cells[-1].score)
    assert list(record["clusters"].values()) == [column.n_videos for column in done.table.columns]


def test_the_terminal_shows_every_method_with_its_share_and_the_files(done):
    lines = printed(done).splitlines()
    whole = [line.split("│") for line in lines if "│" in line]
    rows = [row for row in whole if row[0].strip()]
    assert [row[0].strip() for row in rows] == ["Full retention", "GSTEP", "FastV, K=3", "GSTEP", "FastV, K=3"]
    assert [row[1].strip() for row in rows] == ["100 %", "25 %", "25 %", "10 %", "10 %"]
    cells = [row.cells[0].printed for row in done.table.rows[1:]]
    assert [row[2].strip() for row in rows[1:]] == cells
    beside = [row[2].strip() for row in whole if not row[0].strip()]  # below the number
    assert beside == [row.cells[0].difference_text for row in done.table.rows if row.method == "fastv,K=3"]
    assert [line.strip() for line in lines if "paired difference to GSTEP" in line] == [done.table.remarks[0]]
    assert lines[0].strip() == "T" and lines[-1] == "there: a.md, b.html"
    assert not any("answered" in line for line in lines)


def test_the_terminal_marks_numbers_as_the_files_do_and_says_how():
    """Of 60 videos: GSTEP is right wherever FastV is, and elsewhere."""
    arms = {("none", 1.0): 1.0, ("gstep", 0.25): 0.9, ("fastv", 0.25): 0.5, ("gstep", 0.1): 0.5, ("fastv", 0.1): 0.52}
    scores = table_of({arm: [float(i < 60 * right) for i in range(60)] for arm, right in arms.items()})
    table = make_results_table("T", [ScoredBenchmark("B", scores)], draws=500)
    said = io.StringIO()
    Console(file=said, width=200, force_terminal=True, color_system="standard").print(Group(*render_table(table)))
    assert "\x1b[1m90.0\x1b[0m" in said.getvalue() and "\x1b[4m50.0\x1b[0m" in said.getvalue()
    assert said.getvalue().count("\x1b[4m") == 2  # of the score and of Rel.; a tenth has neither
    unclear = table.rows[-1].cells[0]
    assert re.fullmatch(r"unclear \(about \d+ videos\)", unclear.unclear_text)
    lines = [[cell.strip() for cell in line.split("│")] for line in said.getvalue().splitlines()]
    place = next(i for i, cells in enumerate(lines) if unclear.interval_text in cells)
    assert lines[place + 1][2] == unclear.unclear_text and " ".join(said.getvalue().split()).count(MARKS) == 1


def test_the_terminal_shows_whole_benchmarks_where_parts_take_too_much_room(done):
    columns = [replace(done.table.columns[0], key=f"B: split={i}", title=f"p{i}", benchmark="B") for i in range(6)]
    columns += [replace(done.table.columns[0], key=f"{name}: overall", title=name, benchmark=name) for name in "BC"]
    rows = [replace(row, cells=[row.cells[0]] * len(columns)) for row in done.table.rows]
    text = printed(replace(done, table=replace(done.table, columns=columns, rows=rows)))
    head = next(line for line in text.splitlines() if "kept" in line)
    assert [title.strip(" †") for title in head.split("┃")] == ["method", "kept", "B", "C", "Avg.", "Rel."]
    assert "the 6 splits are in tables.md" in text and "Fewer than 20 videos" in text
    whole = [replace(column, n_videos=20) if column.key.endswith("overall") else column for column in columns]
    text = printed(replace(done, table=replace(done.table, columns=whole, rows=rows)))
    assert "Fewer than 20 videos" not in text  # no column that is shown has so few


def test_the_terminal_counts_cut_and_weakly_read_replies_beside_the_method_and_shows_names_as_they_are(done):
    full, gstep, *others = done.table.rows
    cut = replace(gstep, tally=replace(gstep.tally, n_cut=4, n_weak=2))
    column = replace(done.table.columns[0], title="[/easy] part")
    text = printed(replace(done, table=replace(done.table, rows=[full, cut, *others], columns=[column], title="[red]")))
    assert "GSTEP (4 cut, 2 weak)" in text and "Cut: 4 of 90 replies were cut by max_new_tokens" in text
    assert "GSTEP (" not in printed(done)
    assert "[/easy] part" in text and "[red]" in text


ROWS = [
    {"question_id": i, "video_id": "ab"[i % 2], "prompt": "What?", "choices": ["x", "y"], "answer": "y"}
    for i in range(4)
]


@pytest.fixture
def places(tmp_path) -> list[str]:
    """Answers of jobs.generate from all tokens, and from what gstep kept of them."""
    tiny_cache(tmp_path / "c", ("a", "b"), ratio=1.0, method="none")
    pruned = {"pruner": "gstep", "retention_ratio": 0.25}
    return [
        generated(tmp_path / "c", tmp_path / "full", ROWS, "BBBA"),
        generated(tmp_path / "c", tmp_path / "gstep", ROWS, "BAAA", **pruned),
    ]


def scored(places, out: Path, **options) -> Evaluation:
    return evaluate(EvaluateConfig(score=places, out=str(out), draws=100, **options), QUIET)


def test_answers_that_are_there_become_results_without_ray(places, tmp_path):
    done = scored(places, tmp_path / "r")
    written = {path.name for path in (tmp_path / "r").iterdir()}
    assert written == {*done.files, "evaluation.json"} and done.files[0] == "scores.parquet"
    assert [row.cells[-1].printed for row in done.table.rows] == ["75.0", "25.0"]
    assert pq.read_table(tmp_path / "r" / "scores.parquet").num_rows == 8
    assert done.exit_code(EvaluateConfig(score=places)) == 0 and not ray.is_initialized()
    assert places[0] in done.table.title and done.out == str(tmp_path / "r")


def test_answers_under_several_seeds_are_one_row(places, tmp_path):
    for seed, replies in ((0, "BBBB"), (4, "AAAA")):
        drawn = {"pruner": "random", "retention_ratio": 0.25, "pruner_seed": seed}
        places.append(generated(tmp_path / "c", tmp_path / f"r{seed}", ROWS, replies, **drawn))
    done = scored(places, tmp_path / "r")
    _, _, random = done.table.rows
    assert (random.title, random.seeds, random.cells[-1].printed) == ("Random, 2 seeds", [0, 4], "50.0")
    assert set(done.done.scores["method"].to_pylist()) == {"none", "gstep", "random", "random,seed=4"}


def test_the_same_answers_may_be_scored_again_and_others_need_another_place(places, tmp_path):
    scored(places, tmp_path / "r")
    scored(places, tmp_path / "r", seed=3)
    with pytest.raises(IdentityMismatch, match="scored: the results have"):
        scored(places[:1], tmp_path / "r")
    (tmp_path / "r" / "report.html").unlink()
    (tmp_path / "r" / "report.html").mkdir()
    with pytest.raises(RunFailed, match=r"r: the results cannot be written: Is a directory"):
        scored(places, tmp_path / "r")


def test_what_is_refused_writes_nothing(places, tmp_path):
    with pytest.raises(UsageError, match="occurs twice"):
        scored([places[0], places[0]], tmp_path / "r")
    with pytest.raises(UsageError, match="--reference fps: no row of the table; there are none, gstep"):
        scored(places, tmp_path / "r", reference="fps")
    assert not (tmp_path / "r").exists()
    before = sorted(path.name for path in Path(places[0]).rglob("*"))
    with pytest.raises(NotResults):
        scored(places, Path(places[0]))  # the place of the answers themselves
    assert sorted(path.name for path in Path(places[0]).rglob("*")) == before


def test_questions_that_all_fail_are_results_too_and_no_success(tmp_path):
    """They are about a video that nothing is cached of."""
    tiny_cache(tmp_path / "c", ("a",), ratio=1.0, method="none")
    file, messages = write_questions(tmp_path / "q.jsonl", [{**row, "video_id": "gone"} for row in ROWS]), io.StringIO()
    given = {"cache": str(tmp_path / "c"), "out": str(tmp_path / "r"), "method": ["gstep"], "retention_ratio": [0.25]}
    config = EvaluateConfig(benchmark=str(file), draws=100, **given)
    done = evaluate(config, Console(file=messages, width=300))
    assert messages.getvalue().startswith("note: 4 of 4 questions are about videos that")
    assert "q: 4 questions to ask; 4 annotated\n" in messages.getvalue()
    assert done.exit_code(config) == 1 and not ray.is_initialized()
    assert (done.table.original.tally.n_failed, done.table.original.cells[-1].printed) == (4, "0.0")
    assert {*done.files} < {path.name for path in (tmp_path / "r").iterdir()}
    page = (tmp_path / "r" / "report.html").read_text()
    assert "q, tiny" in page and "unknown-video" in page


@pytest.mark.parametrize(
    ("replies", "fault", "is_dropped"),
    [
        ("BBAA", None, True),
        ("BBA-", "out-of-memory", False),  # the question may be asked again
        ("BBA-", "failed-video", True),
    ],
)
def test_the_cache_in_the_results_is_dropped_once_no_question_needs_it(tmp_path, replies, fault, is_dropped):
    tiny_cache(tmp_path / "c", ("a", "b"), ratio=1.0, method="none")
    file, out = write_questions(tmp_path / "q.jsonl", ROWS), tmp_path / "r"
    given = {"benchmark": str(file), "out": str(out), "method": ["none"], "draws": 100}
    request = prepare(EvaluateConfig(**given, cache=str(tmp_path / "c")), QUIET)
    named = {str(row["question_id"]): text for row, text in zip(ROWS, replies, strict=True)}
    commit_replies(request, named, {name: fault for name, text in named.items() if text == "-"})
    shutil.move(tmp_path / "c", out / "cache")
    assert evaluate(EvaluateConfig(**given, drop_tokens=True), QUIET).done.answers.n_missing == 0
    assert (not (out / "cache" / "cache.json").exists()) is is_dropped and (out / "report.html").exists()


FULL = BENCHMARKS["egoschema"]
ARMS = {"none@1": ORIGINAL, "gstep@0.25": MethodAtRatio("gstep", 0.25)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_authors(tmp_path_factory.mktemp("egoschema"))


def test_every_method_has_a_file_of_the_options_that_its_replies_name_and_of_draws_which_are_the_same_for_all(data):
    loaded = FULL.load(data)

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


def config_of(data: Path, out: Path) -> EvaluateConfig:
    given = {"benchmark": "egoschema", "data": str(data), "out": str(out), "draws": 100}
    return EvaluateConfig(**given, method=["gstep"], retention_ratio=[0.25])


def evaluated(data: Path, out: Path) -> tuple[Evaluation, str]:
    """With answers to all questions there, one of them failed and one empty; and what was said."""
    config, said = config_of(data, out), io.StringIO()
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
    full = config_of(data, tmp_path / "r")
    subset = replace(full, benchmark="egoschema-subset")
    commit_replies(prepare(subset, QUIET))
    assert evaluate(subset, QUIET).table.columns[0].n_questions == 3
    with pytest.raises(IdentityMismatch, match="benchmark: the results have 'egoschema-subset', this run 'egoschema'"):
        evaluate(full, QUIET)
