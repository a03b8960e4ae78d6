"""The table of results: the paper's own numbers and marks, and what each number is compared with."""

import json
import math
from dataclasses import asdict
from functools import cache

import numpy as np
import pytest

from pipeline.evaluate.statistics.results import Cell, Column, Versus
from pipeline.evaluate.statistics.tables import ScoredBenchmark, marks, printed, rel_of, results_table
from tests.pipeline.evaluate.statistics.paper_tables import COLUMNS, TABLES, paper_rows
from tests.pipeline.evaluate.statistics.score_tables import bits, score_rows, score_table

BENCHMARKS = slice(COLUMNS.index("VideoMME"), COLUMNS.index("Rel."))
FULL, PRUNED = bits("110 101 011 110"), bits("100 101 111 000")  # the worked case of test_statistics
VIDEOS = [f"v{i // 3}" for i in range(12)]
TIMES = 15  # the worked case so often, about other videos each time: enough of them for draws
MANY = [f"v{i // 3:02}" for i in range(12 * TIMES)]


def shown(number):
    return Cell(score=float(number), printed=number)


@cache
def rebuilt(model):
    """The paper's table from scores: of 1,000 questions as many are right as its numbers say."""
    rows = paper_rows(model)
    benchmarks = [
        ScoredBenchmark(
            title,
            score_table(
                *(score_rows(row.method, row.ratio, right_of(row.numbers[i]), clusters=GROUPS) for row in rows)
            ),
        )
        for i, title in enumerate(COLUMNS[BENCHMARKS], BENCHMARKS.start)
    ]
    return results_table(model, benchmarks, draws=20)


GROUPS = [f"v{i % 10}" for i in range(1000)]


def right_of(number):
    right = round(10 * float(number))
    return [1.0] * right + [0.0] * (1000 - right)


@pytest.mark.parametrize("model", TABLES)
def test_rel_agrees_with_the_paper(model):
    """All 24 rows of pruning methods, and full retention."""
    original, *rows = paper_rows(model)
    assert len(rows) == 24
    originals = [shown(number) for number in original.numbers[BENCHMARKS]]
    for row in [original, *rows]:
        rel = rel_of([shown(number) for number in row.numbers[BENCHMARKS]], originals)
        assert rel.score == pytest.approx(float(row.numbers[-1]), abs=0.05 + 1e-9), row
        assert rel.printed == f"{row.numbers[-1]}%", row


@pytest.mark.parametrize("model", TABLES)
def test_marks_agree_with_the_paper(model):
    """Each of the 4 blocks x 9 columns."""
    _, *rows = paper_rows(model)
    for block in (rows[i : i + 6] for i in range(0, 24, 6)):
        for column, title in enumerate(COLUMNS):
            found = marks([shown(row.numbers[column]) for row in block])
            assert found == [row.marks[column] for row in block], (block[0].ratio, title)


@pytest.mark.parametrize("model", TABLES)
def test_the_papers_table_from_scores(model):
    original, *rows = paper_rows(model)
    table = rebuilt(model)
    assert [column.title for column in table.columns] == list(COLUMNS[BENCHMARKS])
    assert [block.ratio for block in table.blocks] == [0.25, 0.2, 0.15, 0.1]
    found = [table.original, *(row for block in table.blocks for row in block.rows)]
    for row, paper in zip(found, [original, *rows], strict=True):
        assert (row.method, row.ratio) == (paper.method, paper.ratio)
        assert [cell.printed for cell in row.cells] == list(paper.numbers[BENCHMARKS])
        assert [cell.mark for cell in row.cells] == list(paper.marks[BENCHMARKS])
        assert (row.rel.printed, row.rel.mark) == (f"{paper.numbers[-1]}%", paper.marks[-1])


def test_halves_are_printed_upwards():
    assert [printed(number) for number in (58.65, 58.64999999999999, 0.05, 100.0)] == ["58.7", "58.7", "0.1", "100.0"]


def test_ties_share_their_mark_and_what_is_missing_has_none():
    assert marks([shown("2.0"), None, shown("2.0"), shown("1.0"), shown("1.0"), shown("0.5")]) == [
        *("best", "", "best"),
        *("second", "second", ""),
    ]
    assert marks([shown("10.0"), shown("9.9")]) == ["best", "second"]  # as numbers, not as text


def worked_case(**others):
    """VideoMME-like: full retention, GSTEP and others at 25 %, scores of twelve questions about four videos."""
    arms = {("none", 1.0): FULL, ("gstep", 0.25): PRUNED, **others}
    splits = [{"duration": "short" if i < 6 else "long", "task": "ab"[i < 9]} for i in range(12)]
    return score_table(*(score_rows(*arm, s, clusters=VIDEOS, splits=splits) for arm, s in arms.items()))


def test_columns_are_splits_then_overall():
    benchmark = ScoredBenchmark(
        "VideoMME", worked_case(), [Column("duration=short", "Short"), Column("duration=medium", "Medium")]
    )
    table = results_table("m", [benchmark, ScoredBenchmark("Other", worked_case())], draws=200)
    assert table.columns == (
        Column("duration=short", "Short", "VideoMME", 6, 2),
        Column("duration=medium", "Medium", "VideoMME", 0, 0),
        Column("overall", "Overall", "VideoMME", 12, 4),
        Column("overall", "Other", "Other", 12, 4),
    )
    short, medium, overall, _ = table.original.cells
    assert (short.printed, medium, overall.printed) == ("66.7", None, "66.7")
    assert (table.original.rel.printed, overall.mark, overall.full) == ("100.0%", "", None)


def many(arms):
    """A table of these arms, each with its twelve scores TIMES over."""
    return score_table(*(score_rows(*arm, scores * TIMES, clusters=MANY) for arm, scores in arms.items()))


def test_a_number_is_compared_with_full_retention():
    table = results_table("m", [ScoredBenchmark("B", many({("none", 1.0): FULL, ("gstep", 0.25): PRUNED}))], draws=5000)
    cell = table.blocks[0].rows[0].cells[0]
    assert (cell.printed, cell.mark, cell.gstep) == ("50.0", "best", None)
    assert cell.full.difference == pytest.approx(-100 / 6)
    error = 21.52 * (3 / 4 * 60 / 59 / TIMES) ** 0.5  # of G / (G - 1) only
    assert cell.full.error == pytest.approx(error, abs=5e-3)
    assert (cell.full.low, cell.full.high) == pytest.approx((-100 / 6 - 1.96 * error, -100 / 6 + 1.96 * error), abs=0.7)
    assert cell.full.p_holm < 0.002 and not cell.full.noise and cell.full.enough is None
    assert cell.low < 50 < cell.high
    rel = table.blocks[0].rows[0].rel
    assert rel.printed == "75.0%"  # 50.0 / 66.7
    assert rel.full.difference == pytest.approx(-25)


def test_noise_comes_with_the_number_of_videos_that_would_show_it():
    arms = {("none", 1.0): [1.0, 0.0] * 12, ("gstep", 0.25): [0.0, 1.0] + [1.0, 0.0] * 11}
    arms[("gstep", 0.25)][3] = 1.0
    versus = _cell(arms, 24).full
    assert versus.noise and versus.enough == math.ceil(24 * (2.8 * versus.error / versus.difference) ** 2) > 24


def _cell(arms, n_videos):
    """The cell of GSTEP where every question is about a video of its own, or the last ones about one."""
    videos = [f"v{min(i, n_videos - 1):02}" for i in range(len(arms["none", 1.0]))]
    scores = score_table(*(score_rows(*arm, s, clusters=videos) for arm, s in arms.items()))
    return results_table("m", [ScoredBenchmark("B", scores)], draws=100).blocks[0].rows[0].cells[0]


@pytest.mark.parametrize(("n_videos", "shown"), [(2, False), (5, False), (6, True), (49, True), (50, True)])
def test_a_number_about_few_videos_has_no_interval(n_videos, shown):
    generator = np.random.default_rng(n_videos)
    arms = {arm: generator.integers(0, 2, 60).astype(float).tolist() for arm in (("none", 1.0), ("gstep", 0.25))}
    cell = _cell(arms, n_videos)
    assert (cell.full.low is not None) is (cell.full.p_holm is not None) is (cell.low is not None) is shown


def test_p_is_adjusted_over_the_block_and_gstep_is_compared_with_none():
    """Two methods that lose nearly everything at 25 %, one family each; at 10 % one alone, without GSTEP."""
    nothing = [0.0] * 12
    arms = {("none", 1.0): FULL, ("gstep", 0.25): PRUNED}
    others = {("fastv", 0.25): nothing, ("fps", 0.25): nothing, ("fastv", 0.1): nothing}
    benchmarks = [ScoredBenchmark("B", many(arms)), ScoredBenchmark("C", many(arms | others))]
    quarter, tenth = results_table("m", benchmarks, draws=999).blocks
    gstep, fastv, fps = (row.cells[1] for row in quarter.rows)
    assert (fastv.full.error, fastv.full.p_holm, fps.full.low) == (0, None, None)  # the same in every video
    assert fastv.gstep.p_holm == fps.gstep.p_holm == pytest.approx(2 * 2 / 1000) and not fastv.gstep.noise
    assert (gstep.mark, fastv.mark, fps.mark) == ("best", "second", "second")
    assert (tenth.rows[0].cells[1].full.difference, tenth.rows[0].cells[1].gstep) == (pytest.approx(-200 / 3), None)
    assert tenth.rows[0].cells[0] is None  # not run on B
    assert tenth.rows[0].rel is None
    assert [row.method for row in tenth.rows] == ["fastv"]


def more(others):
    arms = {("none", 1.0): FULL, ("gstep", 0.25): PRUNED, **others}
    return score_table(*(score_rows(*arm, scores, clusters=VIDEOS) for arm, scores in arms.items()))


def test_rows_are_in_the_order_asked_for():
    scores = more({("fastv", 0.25): PRUNED, ("fps", 0.5): PRUNED, ("fastv", 0.5): FULL})
    table = results_table("m", [ScoredBenchmark("B", scores)], methods=["fps", "fastv", "cdpruner"], draws=10)
    assert [[row.method for row in block.rows] for block in table.blocks] == [["fps", "fastv"], ["fastv"]]


def test_the_overall_score_may_weigh_tasks_alike():
    table = results_table("m", [ScoredBenchmark("MLVU", worked_case(), mean_over="task")], draws=50)
    assert table.original.cells[0].score == pytest.approx(100 * (6 / 9 + 2 / 3) / 2)
    assert table.blocks[0].rows[0].cells[0].score == pytest.approx(100 * (6 / 9 + 0) / 2)


def test_one_video_has_differences_without_intervals():
    scores = score_table(
        score_rows("none", 1.0, FULL, clusters=["v"] * 12), score_rows("gstep", 0.25, PRUNED, clusters=["v"] * 12)
    )
    row = results_table("m", [ScoredBenchmark("B", scores)], draws=50).blocks[0].rows[0]
    assert row.cells[0].full == Versus(difference=pytest.approx(-100 / 6))
    assert (row.cells[0].low, row.rel.low, row.rel.full.p_holm) == (None, None, None)


def test_equal_scores_show_no_spread():
    table = results_table("m", [ScoredBenchmark("B", more({("fps", 0.25): PRUNED}))], draws=50)
    assert table.blocks[0].rows[1].cells[0].gstep == Versus(difference=0, error=0)


def test_rel_is_missing_where_full_retention_scores_nothing_or_was_not_run():
    pruned = score_rows("gstep", 0.25, PRUNED)
    nothing = score_table(score_rows("none", 1.0, [0.0] * 12), pruned)
    for scores, without in ((nothing, False), (score_table(pruned), True)):
        table = results_table("m", [ScoredBenchmark("B", scores)], draws=50)
        row = table.blocks[0].rows[0]
        assert (table.original.rel, row.rel) == (None, None)
        assert (table.original.cells[0] is None) == (row.cells[0].full is None) == without
        assert row.cells[0].printed == "50.0"


def test_a_benchmark_without_questions_has_no_numbers():
    empty = ScoredBenchmark("Empty", score_table(), [Column("duration=short", "Short")], mean_over="task")
    table = results_table("m", [empty, ScoredBenchmark("B", worked_case())], draws=50)
    row = table.blocks[0].rows[0]
    assert (row.cells[:2], row.cells[2].printed, row.rel) == ((None, None), "50.0", None)
    assert [column.n_questions for column in table.columns] == [0, 0, 12]


def test_failed_answers_are_wrong_and_counted():
    scores = score_table(score_rows("none", 1.0, FULL), score_rows("gstep", 0.25, [None, *FULL[1:]]))
    row = results_table("m", [ScoredBenchmark("B", scores)], draws=50).blocks[0].rows[0]
    assert (row.cells[0].printed, row.tally.n_failed, row.tally.unparsed_share) == ("58.3", 1, 0)
    assert row.tally.kept_share == pytest.approx(0.25)


def test_benchmarks_are_drawn_on_their_own_and_alike_in_every_table():
    """Another benchmark beside it changes no interval; the same scores under another title are drawn anew."""
    generator = np.random.default_rng(0)
    wide = many({("none", 1.0): FULL, ("gstep", 0.25): PRUNED, ("fps", 0.1): generator.random(12).tolist()})
    one, other = ScoredBenchmark("One", wide), ScoredBenchmark("Other", wide)
    alone = _fps([one])[0]
    first, second = _fps([one, other])
    assert first == alone == _fps([ScoredBenchmark("One", wide.take(np.arange(wide.num_rows)[::-1]))])[0]
    assert second.printed == first.printed
    assert (second.low, second.full.high) != (first.low, first.full.high)
    assert _fps([one], seed=1)[0] != alone
    with pytest.raises(ValueError, match="different titles"):
        results_table("m", [one, one])


def _fps(benchmarks, seed=0):
    return results_table("m", benchmarks, draws=300, seed=seed).blocks[-1].rows[0].cells


def test_a_column_that_names_no_split_is_refused():
    with pytest.raises(ValueError, match="'short' of B is no SPLIT=VALUE"):
        results_table("m", [ScoredBenchmark("B", worked_case(), [Column("short", "Short")])])


def test_a_table_is_written_as_json():
    table = rebuilt("LLaVA-OV-7B")
    written = json.loads(json.dumps(asdict(table), allow_nan=False))
    assert (written["draws"], written["seed"]) == (20, 0)
