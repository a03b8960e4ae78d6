"""What an evaluation leaves behind: its files, its page, and one table of the results of several benchmarks."""

import json
import os
import re
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import evaluate
from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import AnnotationFault, LoadedQuestions
from pipeline.evaluate.page import render_report_page
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.request import write_results_header
from pipeline.evaluate.results import Presentation, make_tables, write_results
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.evaluate.tabulate import ScoredBenchmark, make_results_table
from pipeline.storage.stores import LocalStore
from tests.pipeline.evaluate.score_tables import (
    MODEL,
    Page,
    items_of,
    leave_results,
    score_rows,
    score_table,
    scores_of,
)

VIDEOMME = BENCHMARKS["videomme"]
FAULT = AnnotationFault("missing-video", "9-1", "row 9: there is no data/nine.mp4", True)
FILES = ["tables.md", "tables.tex", "tables.json", "report.html"]


def done_with(items, *methods) -> ScoredQuestions:
    scores = scores_of(items, ["gstep", "uniform", *methods], [0.25])
    return ScoredQuestions(loaded=LoadedQuestions(tuple(items.values()), (FAULT,), len(items) + 1), scores=scores)


def in_parts(*parts: str | None):
    """A question on a video of its own in each of these parts of a split; None is in no part."""
    items = items_of(len(parts), 1).values()
    return {
        item.question_id: replace(item, splits={**item.splits, **({} if part is None else {"split": part})})
        for item, part in zip(items, parts, strict=True)
    }


def shown(benchmark: Benchmark = VIDEOMME, **more) -> Presentation:
    described = {"protocol": "p", "metric": benchmark.protocol().metric}
    return Presentation(**{"title": "T", "benchmark": benchmark, "described": described, "draws": 100, **more})


def own(*splits: Split, metric: str = "questions") -> Benchmark:
    return Benchmark(name="q", title="Q", protocols=(replace(LETTER, metric=metric),), splits=splits)


def main_table(done: ScoredQuestions, presentation: Presentation):
    return make_tables(done, presentation)[0]


def titles(table) -> list[str]:
    return [column.title for column in table.columns]


def test_the_main_table_has_the_parts_of_the_first_split_that_have_questions_in_the_benchmarks_order():
    table = main_table(done_with(items_of(9)), shown(draws=123, seed=7))
    assert (table.title, table.draws, table.seed) == ("T", 123, 7)
    assert [(one.title, one.key, one.n_questions, one.n_videos) for one in table.columns] == [
        *((title, f"duration={title.lower()}", 9, 3) for title in ("Short", "Medium", "Long")),
        ("Overall", "overall", 27, 9),
    ]
    assert titles(main_table(done_with(items_of(2)), shown())) == ["Short", "Medium", "Overall"]
    assert titles(main_table(done_with(items_of(2)), shown(own()))) == ["Q"]
    named = own(Split("split", "Split", {"z": "Zed", "b": "Bee"}))  # the others come behind
    table = main_table(done_with(in_parts("y", "b", "a", "z", None)), shown(named))
    assert titles(table) == ["Zed", "Bee", "a", "y", "Overall"]
    assert [column.n_questions for column in table.columns] == [1, 1, 1, 1, 5]


@pytest.mark.parametrize(("count", "columns"), [(30, 31), (31, 1)])
def test_a_split_into_too_many_parts_is_not_shown(count, columns):
    done = done_with(in_parts(*(f"{i:02}" for i in range(count))))
    assert len(main_table(done, shown(own(Split("split", "Split")))).columns) == columns


def test_the_overall_score_is_by_the_protocols_metric():
    """Over questions, or over the parts of a split, however many questions each has."""
    done = done_with(in_parts("a", "a", "a", "b"))
    place = SCORE_SCHEMA.get_field_index("score")
    scores = done.scores.slice(0, 4).set_column(place, SCORE_SCHEMA.field("score"), [[1.0, 1.0, 1.0, 0.0]])
    done, split = replace(done, scores=scores), Split("split", "Split")
    scored = [main_table(done, shown(own(split, metric=metric))).original for metric in ("questions", "split")]
    assert [row.cells[-1].printed for row in scored] == ["75.0", "50.0"]


def test_a_part_that_is_missing_stands_in_every_form_and_a_mean_says_over_how_many(tmp_path):
    tasks = Split("split", "Task", {"a": "Ay", "b": "Bee", "c": "Cee"})
    by_task, by_question = own(tasks, metric="split"), own(tasks)
    store, done = LocalStore(tmp_path), done_with(in_parts("a", "a", "c"))
    said = "Q: no question of b: the score is the mean over 2 of the 3, and not the published one."
    table, _ = write_results(store, done, shown(by_task))
    assert said in table.remarks
    md, tex, text, html = ((tmp_path / name).read_text() for name in FILES)
    assert said in md and said in tex and said in html and said in json.loads(text)[0]["notes"]
    assert "Q: no question of b." in main_table(done, shown(by_question)).remarks
    whole = done_with(in_parts("a", "b", "c"))
    assert "Q: the score is the mean over 3 of the 3 tasks." in main_table(whole, shown(by_task)).remarks
    assert not any("Q: " in line for line in main_table(whole, shown(by_question)).remarks)


def test_scores_a_table_for_every_split_and_the_page_are_written_over_those_of_an_earlier_run(tmp_path):
    store = LocalStore(tmp_path)
    write_results(store, done_with(items_of(3)), shown(title="before"))
    done = done_with(items_of(9))
    _, names = write_results(store, done, shown(facts=[("model", "a fact & more")], token_bytes=7168))
    assert names == ["scores.parquet", *FILES] and sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert pq.read_table(tmp_path / "scores.parquet").equals(done.scores)
    headings = [line for line in (tmp_path / "tables.md").read_text().splitlines() if line.startswith("### ")]
    assert headings == ["### T", "### T: Domain", "### T: Task"]  # none has a sub-category
    assert [table["title"] for table in json.loads((tmp_path / "tables.json").read_text())] == [h[4:] for h in headings]
    latex = (tmp_path / "tables.tex").read_text()
    assert latex.count(r"\begin{tabular}") == 1 and "Medium" in latex and "Sports" not in latex
    page = (tmp_path / "report.html").read_text()
    assert "<title>T" in page and "there is no data/nine.mp4" in page and "a fact &amp; more" in page
    assert "11 MB" in page and "1,568 tokens" in page  # a quarter of 6,272 tokens of 7 KB


def test_what_is_said_below_tables_stands_once_and_no_table_is_the_whole_again(tmp_path):
    """All questions are short and of one domain: no column and no table says that of the whole once more."""
    table, _ = write_results(LocalStore(tmp_path), done_with(items_of(1, 4)), shown())
    text = (tmp_path / "tables.md").read_text()
    assert titles(table) == ["VideoMME"]
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### T", "### T: Task"]
    for said in ("Bold: the best", "paired difference to GSTEP", "Fewer than 20 videos"):
        assert text.count(said) == 1, said


def test_another_pair_is_asked_of_results_that_are_there_and_has_the_numbers_it_would_have_had(tmp_path, capsys):
    mine, store = "mine:Mine,p=2", LocalStore(tmp_path / "r")
    done = done_with(items_of(20), mine)
    identity = {"benchmark": "videomme", "model": MODEL, "num_frames": 32, "protocol": "p"}
    named = {"names": {"mine:Mine": "my-method"}}
    titles = {"none": "Full retention", "gstep": "GSTEP", "uniform": "Uniform", mine: "my-method, p=2"}
    write_results_header(store, identity, {"model": "a/model", **named})
    for reference in ("gstep", "uniform"):
        write_results(store, done, shown(reference=reference, described=identity, **named))
        before, out = json.loads((store.root / "tables.json").read_text()), tmp_path / reference
        argv = ["--results", str(store.root), "--out", str(out), "--draws", "100", "--ours", mine]
        assert evaluate.main([*argv, *(["--reference", reference] if reference != "gstep" else [])]) == 0
        said = capsys.readouterr().out
        cells = {line.split("│")[0].strip(): line.split("│")[-2].split() for line in said.splitlines() if "│" in line}
        for row in before[0]["rows"]:
            assert cells[titles[row["method"]]][0] == row["scores"]["overall"]["printed"]
        assert "also in tables.md: " in said and "lowest safe ratio" in said and "Where it breaks" in said
        assert not re.search(r"^#|\*\*|<ins>|\|---", said, re.MULTILINE)  # no Markdown
        later = json.loads((out / "tables.json").read_text())
        scores = [[[row["scores"] for row in one["rows"]] for one in tables] for tables in (later, before)]
        assert scores[0] == scores[1] and len(later) == 3  # durations, domains, tasks
        text, latex = ((out / name).read_text() for name in FILES[:2])
        assert f"difference to {titles[reference]} in" in text
        assert r"\textbf{my-method, p=2 (Ours)}" in latex and "GSTEP (Ours)" not in latex and "mine:" not in latex
    assert "--reference fps: no row of the table" in refused(
        capsys, tmp_path / "x", str(store.root), "--reference", "fps"
    )
    assert not (tmp_path / "x").exists()


ARMS = [("none", 1.0, "60.0"), ("gstep", 0.25, "59.0")]


def results(folder, benchmark, arms, **identity):
    """What jobs.evaluate leaves of a benchmark: of 200 questions as many are right as each arm's number says."""
    about = {"model": "a/model", "annotations": "blake2b:0123456789abcdef", "token_bytes": 7168}
    splits = [{"duration": ("short", "medium", "long")[i % 3]} for i in range(200)]
    shared = {"clusters": [f"v{i % 40}" for i in range(200)], "splits": splits}
    rows = [score_rows(*arm, [float(i < 2 * float(number)) for i in range(200)], **shared) for *arm, number in arms]
    return leave_results(folder, benchmark, score_table(*rows), about, **identity)


def laid(places, out, capsys, *options):
    """The numbers of each row of the table by title, without what stands beside them; the text; what was said."""
    code = evaluate.main(["--results", *places, "--out", str(out), "--draws", "100", *options])
    said = capsys.readouterr()
    assert code == 0, said.err
    (table,) = json.loads((out / "tables.json").read_text())
    numbers = [
        [cell and cell["printed"] for cell in (*row["scores"].values(), row["mean"], row["rel"])]
        for row in table["rows"]
    ]
    arms = [(row["method"], row["retention_ratio"], row["positions"]) for row in table["rows"]]
    return dict(zip(arms, numbers, strict=True)), said.err


@pytest.mark.parametrize(
    ("named", "rows"),
    [
        (["fps"], [("fps", None), ("fps", "original")]),
        (["random", "gstep,fusion=spatial"], [("random", None), ("gstep,fusion=spatial", None)]),  # in this order
    ],
)
def test_a_method_is_asked_for_at_positions_of_its_own_or_at_all_and_at_a_ratio(tmp_path, capsys, named, rows):
    arms = ["fps", "fps,positions=original", "uniform,positions=original", "gstep,fusion=spatial", "random"]
    arms = [*ARMS, *((arm, 0.25, "57.0") for arm in arms), ("fps", 0.5, "58.0"), ("random", 0.5, "58.0")]
    place = results(tmp_path, "longvideobench", arms)
    numbers, said = laid([place], tmp_path / "out", capsys, "--method", *named, "--retention-ratio", ".25")
    assert list(numbers) == [("none", 1.0, None), *((method, 0.25, positions) for method, positions in rows)]
    assert "note:" not in said


def change_scores(place, change):
    path = LocalStore(place).root / "scores.parquet"
    pq.write_table(change(pq.read_table(path)), path)


def with_scores(rows, *scores):
    return rows.set_column(rows.schema.get_field_index("score"), "score", pa.array(scores * len(rows), pa.float64()))


def submitted(folder, arms, typed):
    """What jobs.evaluate leaves of the full set of EgoSchema, and what its user typed in."""
    place = results(folder, "egoschema", arms)
    change_scores(place, lambda rows: with_scores(rows, None))
    LocalStore(place).put("submissions/server.json", json.dumps(typed).encode())
    return place


def test_what_the_server_of_egoschema_returned_goes_into_the_table(tmp_path, capsys):
    arms = [("none", 1.0, "60.0"), ("gstep", 0.25, "57.0"), ("vidcom2", 0.25, "54.0")]
    typed = {"none@1": 60.4, "gstep@0.25": 60, "vidcom2@0.25": None, "gstepp@0.25": 61}
    places = [results(tmp_path, "mvbench", arms), submitted(tmp_path, arms, typed)]
    numbers, said = laid(places, tmp_path / "paper", capsys)
    assert numbers["none", 1.0, None] == ["60.0", "60.4", "60.2", "100.0%"]
    assert numbers["gstep", 0.25, None] == ["57.0", "60.0", "58.5", "97.2%"]  # the mean of 57.0/60.0 and 60.0/60.4
    assert numbers["vidcom2", 0.25, None] == ["54.0", None, None]
    assert "server.json has a score for gstepp@0.25, which is not one of its submissions" in said
    assert "has 1 submissions without a score: type what its server returns into" in said
    page = (tmp_path / "paper" / "report.html").read_text()
    assert "scores from its server, without intervals" in page and "EgoSchema full set is left out here" in page


def refused(capsys, out, *places):
    assert evaluate.main(["--results", *places, "--out", str(out)]) == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ({"gstep@0.25": "59"}, "gstep@0.25 must be a percentage of right answers, got '59'"),
        ({"gstep@0.25": 0.59}, "numbers must be percentages, 59.2 and not 0.592"),
        ([1], "must be an object such as"),
    ],
)
def test_a_score_that_is_none_is_refused(tmp_path, capsys, typed, why):
    assert why in refused(capsys, tmp_path / "paper", submitted(tmp_path, ARMS, typed))


def test_results_that_do_not_belong_together_are_refused(tmp_path, capsys):
    one, out = results(tmp_path, "videomme", ARMS), tmp_path / "paper"
    other = results(tmp_path / "other", "mvbench", ARMS, model=MODEL | {"weights": "another"})
    again = results(tmp_path / "again", "videomme", ARMS)
    assert "were made with different models" in refused(capsys, out, one, other)
    assert "are both of VideoMME: name one of them" in refused(capsys, out, one, again)
    unlike = results(tmp_path / "unlike", "mvbench", ARMS, system="Be brief.")
    assert "cannot mix different settings: MVBench: system" in refused(capsys, out, one, unlike)
    assert "no results of python -m jobs.evaluate" in refused(capsys, out, str(tmp_path))
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for place in (one, out):
        assert "holds files other than tables.json" in refused(capsys, place, one)


def test_every_format_says_what_its_numbers_were_made_of(tmp_path, capsys):
    """200 of 2,700 questions; an answer that failed; a method that one benchmark lacks."""
    place = results(tmp_path, "videomme", ARMS)
    path = LocalStore(place).root / "scores.parquet"
    table = pq.read_table(path).to_pylist()
    table[300] |= {"status": "failed", "score": 0.0}
    pq.write_table(pa.Table.from_pylist(table, pq.read_schema(path)), path)
    places = [place, results(tmp_path, "mvbench", [*ARMS, ("fps", 0.25, "50")])]
    _, said = laid(places, tmp_path / "paper", capsys)
    lacking = f"{place} (VideoMME) has no fps@0.25"
    assert f"note: {lacking}" in said
    for name in FILES:
        text = (tmp_path / "paper" / name).read_text().replace("\\", "")
        wanted = ["2700", "01234567"] if "json" in name else ["200 of 2,700", "Protocol", "01234567", "32"]
        assert [word for word in [*wanted, lacking] if word not in text.replace("&lt;", "<")] == [], name
    assert "(1 failed)" in (tmp_path / "paper" / "tables.tex").read_text()
    page = (tmp_path / "paper" / "report.html").read_text()
    assert "<td>–</td>" in page and ">None<" not in page


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda root: os.truncate(root / "scores.parquet", 1000), "scores.parquet is damaged"),
        (lambda root: (root / "scores.parquet").unlink(), "has no scores.parquet yet"),
        (lambda root: (root / "evaluation.json").write_text("{"), "evaluation.json"),
        (lambda root: change_scores(root, lambda rows: rows.drop_columns(["cluster"])), "it has no column cluster"),
        (lambda root: change_scores(root, lambda rows: rows.slice(0, len(rows) - 5)), "has no score of question"),
        (
            lambda root: change_scores(root, lambda rows: pa.concat_tables([rows, rows.slice(0, 1)])),
            "has 2 scores of question",
        ),
        (lambda root: change_scores(root, lambda rows: with_scores(rows, 2.0)), "answers without a score from 0 to 1"),
    ],
)
def test_results_whose_files_are_damaged_are_refused(tmp_path, capsys, damage, why):
    place = results(tmp_path, "mvbench", ARMS)
    damage(LocalStore(place).root)
    text = refused(capsys, tmp_path / "paper", results(tmp_path, "videomme", ARMS), place)
    assert why in text and "mvbench" in text.lower() and not (tmp_path / "paper").exists()


def test_results_of_an_older_version_are_laid_out_and_said_to_lack_the_counts(tmp_path, capsys):
    place = results(tmp_path, "videomme", ARMS)
    change_scores(place, lambda rows: rows.drop_columns(["finish", "weak"]))
    numbers, said = laid([place], tmp_path / "paper", capsys)
    assert numbers["gstep", 0.25, None][3] == "59.0"
    assert "videomme does not say which replies were cut or read by chance: run its jobs.evaluate again" in said


def test_an_average_over_tasks_needs_the_task_of_every_question(tmp_path, capsys):
    places = [results(tmp_path, "videomme", ARMS), results(tmp_path, "mvbench", ARMS, metric="task")]
    text = refused(capsys, tmp_path / "paper", *places)
    assert "200 questions have no 'task', over which it averages: run its" in text and "MVBench" in text


def test_frames_by_time_are_named_and_not_mixed_with_a_number_of_frames(tmp_path, capsys):
    by_time = {"num_frames": None, "frames": {"fps": 2.0, "max_frames": 768}}
    place = results(tmp_path, "videomme", ARMS, **by_time)
    laid([place], tmp_path / "paper", capsys)
    md, html = ((tmp_path / "paper" / name).read_text() for name in ("tables.md", "report.html"))
    assert "| *Frames* | 2 a second, at most 768 |" in md
    assert "200 questions, 2 a second, at most 768 frames, p" in html
    mixed = refused(capsys, tmp_path / "other", place, results(tmp_path, "mvbench", ARMS))
    assert "num_frames: VideoMME has None, this run 32" in mixed


HOSTILE = "</script><script>x()</script> {{ 7 * 7 }} <!-- &amp; 'a' \"b\""
METHODS, RATIOS = ("fastv,K=3", "vidcom2", "gstep", "gstep,positions=original"), (0.25, 0.1)
ITEMS = items_of(12)


def made(title="VideoMME, a model", faults=(), **options):
    scores = scores_of(ITEMS, METHODS, RATIOS, failed=("001-1",))
    parts = [("duration=short", "Short"), ("duration=long", "Long")]
    table = make_results_table(title, [ScoredBenchmark("VideoMME", scores, parts)], draws=50)
    split = make_results_table(f"{title}: Domain", [ScoredBenchmark("VideoMME", scores)], draws=50)
    scored = ScoredQuestions(loaded=LoadedQuestions((), tuple(faults), len(faults)), scores=scores)
    given = {"token_bytes": 7168, "scored": scored, "identity": {"frames": {"rounding": "truncate"}, "pixels": None}}
    return table, render_report_page([table, split], [("model", title)], **given | options)


def test_the_page_is_well_formed_loads_nothing_and_has_every_number():
    table, page = made()
    parsed = Page(page)
    assert parsed.open == [] and not {"script", "link", "img", "a"} & set(parsed.tags)
    assert "default-src 'none'" in page and "http" not in page.replace("http-equiv", "")
    for row in table.rows:
        for cell in table.numbers(row):
            assert f">{cell.printed}</span>" in page and cell.difference_text in page
    assert "paired difference to GSTEP" in page and "Short†" in page and "Fewer than 20 videos" in page
    assert "VideoMME, a model: Domain" in page
    assert "out-of-memory" in page and "frames.rounding" in page and "the checkpoint" in page


def test_the_chart_is_accuracy_against_tokens_and_megabytes():
    table, page = made()
    assert "Accuracy against tokens and megabytes" in page
    assert page.count("<circle") == len(METHODS) * len(RATIOS)
    row = next(row for row in table.rows if row.method == "vidcom2" and row.ratio == 0.25)
    assert f"VidCom2: {row.cells[-1].score:.1f} at 1,568 tokens, 11 MB" in page  # 1,568 x 7,168 bytes
    assert "GSTEP, original positions: " in page
    _, page = made(token_bytes=None)
    assert "Accuracy against tokens<" in page and "MB" not in page


def test_faults_are_counted_with_an_example_and_no_name_or_text_breaks_out_of_the_page():
    faults = [AnnotationFault("missing-video", str(i), f"row {i}", True) for i in range(3)]
    faults += [AnnotationFault("repeated-question", "x", "row 9", False)]
    _, page = made(HOSTILE, faults=[*faults, AnnotationFault("bad-row", None, HOSTILE, True)])
    for kind, count, became, row in (("missing-video", 3, "left out", 0), ("repeated-question", 1, "kept", 9)):
        assert re.search(rf"{kind}</th><td>{count}</td>.*{became}.*row {row}", page)
    assert Page(page).open == [] and "<script" not in page and "{{ 7 * 7 }}" in page
