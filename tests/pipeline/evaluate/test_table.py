"""The table of results: the paper's own numbers and marks, differences, and its three forms."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import UsageError
from pipeline.evaluate.forms import add_counts, format_latex_table, format_markdown_tables
from pipeline.evaluate.statistics import Estimate
from pipeline.evaluate.table import Cell, format_score
from pipeline.evaluate.tabulate import ScoredBenchmark, format_method_title, make_results_table, mark_rows
from tests.pipeline.evaluate.score_tables import COLUMNS, bits, paper_rows, score_rows, score_table, table_of, thousand

BENCHMARKS = slice(COLUMNS.index("VideoMME"), COLUMNS.index("Rel."))
FULL, PRUNED = bits("110 101 011 110"), bits("100 101 111 000")  # the worked case of test_statistics
TIMES = 15  # the worked case so often, about other videos each time: enough of them for draws
VIDEOS = [f"v{i // 3:02}" for i in range(12 * TIMES)]


def lay(*scores, **options):
    """Lay out tables of scores, of benchmarks B, C and so on."""
    benchmarks = [ScoredBenchmark(title, of_one) for title, of_one in zip("BC", scores, strict=False)]
    return make_results_table("m", benchmarks, **{"draws": 50, **options})


def test_the_papers_table_from_scores_whose_best_numbers_are_marked_where_they_are_clear():
    """A video a question, and a method is right wherever a worse one is: 4 questions more of 1,000 are clear."""
    papers = paper_rows()
    scores = [
        table_of({(row.method, row.ratio): thousand(row.numbers[i]) for row in papers})
        for i in range(BENCHMARKS.start, BENCHMARKS.stop)
    ]
    benchmarks = map(ScoredBenchmark, COLUMNS[BENCHMARKS], scores)
    table = make_results_table("LLaVA-OV-7B", list(benchmarks), draws=1000)
    assert [column.title for column in table.columns] == list(COLUMNS[BENCHMARKS])
    assert [rows[0].ratio for _, rows in table.blocks] == [0.25, 0.1]
    for row, paper in zip(table.rows, papers, strict=True):
        assert (row.method, row.ratio) == (paper.method, paper.ratio)
        assert [cell.printed for cell in row.cells] == list(paper.numbers[BENCHMARKS])
        assert row.rel.printed == f"{paper.numbers[-1]}%"
    mean = np.mean([float(number) for number in papers[0].numbers[BENCHMARKS]])
    assert table.original.mean.printed == format_score(mean.item())
    n_marked, n_unmarked = 0, 0
    for ratio in (0.25, 0.1):
        for column, cells in enumerate(zip(*(row.cells for row in table.rows if row.ratio == ratio), strict=True)):
            of_paper = [paper.marks[BENCHMARKS][column] for paper in papers if paper.ratio == ratio]
            best, second, *_ = sorted((float(cell.printed) for cell in cells), reverse=True)
            clear = of_paper.count("best") == 1 and best - second > 0.35
            assert [cell.mark for cell in cells] == (of_paper if clear else [""] * len(cells))
            n_marked, n_unmarked = n_marked + clear, n_unmarked + (not clear)
    assert n_marked >= 5 and n_unmarked >= 3


@pytest.mark.parametrize(
    ("numbers", "options", "marked"),
    [
        ([60.0, 50.0, 40.0], {}, {0: "best", 1: "second"}),
        ([40.0, 50.0, 60.0, 50.0], {}, {2: "best", 1: "second", 3: "second"}),  # clear beside both
        ([10.0, 9.0, None], {"spread": 0.001}, {0: "best", 1: "second"}),  # as numbers, not as text
        ([60.0, 58.0, 10.0], {}, {}),  # the interval of 2 points holds 0
        ([60.0, 50.0], {"n_videos": 19}, {}),  # no interval
        ([None, None], {}, {}),
        ([60.0, 50.0, 70.0], {"printed_as": [60.0, 80.0, 50.0]}, {}),  # it is the best as printed alone
    ],
)
def test_the_best_of_a_block_is_marked_where_it_is_clear(numbers, options, marked):
    """Draws spread on their own around the numbers."""
    values = np.array([np.nan if number is None else number / 100 for number in numbers])
    drawn = np.random.default_rng(0).normal(values, options.get("spread", 0.01), (1000, len(values)))
    cells = {
        row: None if number is None else Cell(score=number, printed=f"{number:.1f}")
        for row, number in enumerate(options.get("printed_as", numbers))
    }
    assert mark_rows(Estimate(values, drawn, options.get("n_videos", 50)), cells) == marked


def many(arms):
    """A table of these arms, each with its twelve scores TIMES over."""
    return table_of({arm: scores * TIMES for arm, scores in arms.items()}, clusters=VIDEOS)


def test_halves_are_printed_upwards_and_methods_are_named_as_the_paper_names_them():
    numbers = {58.65: "58.7", 58.64999999999999: "58.7", 0.05: "0.1", 100.0: "100.0"}
    assert {number: format_score(number) for number in numbers} == numbers
    titles = {"gstep": "GSTEP", "fastv,K=3,L=1": "FastV, K=3, L=1", "topk": "Top-k", "mine:Mine": "mine:Mine"}
    assert {method: format_method_title(method) for method in titles} == titles


ONE = [1.0, *[0.0] * 11]
COMPARED = {
    ("none", 1.0): FULL,
    ("gstep", 0.25): PRUNED,
    ("fastv", 0.25): ONE,
    ("fps", 0.25): bits("100 101 110 010"),
    ("gstep", 0.1): ONE,
    ("fastv", 0.1): PRUNED,
}


def compared(arms=COMPARED, **options):
    """The differences of a table of these arms by (method, ratio); the table."""
    table = lay(many(arms), **{"draws": 999, **options})
    cells = {(row.method, row.ratio): row.cells[0] for row in table.rows}
    return {arm: (cell.difference, cell.low, cell.high, cell.unclear) for arm, cell in cells.items()}, table


def test_a_number_is_compared_with_the_reference_at_its_ratio():
    by, table = compared()
    assert table.reference == "gstep" and by["none", 1.0] == by["gstep", 0.25] == by["gstep", 0.1] == (None,) * 4
    difference, low, high, unclear = by["fastv", 0.25]
    assert difference == pytest.approx(-500 / 12) and low < difference < high < 0 and unclear is False
    assert by["fastv", 0.1][0] == pytest.approx(500 / 12) and by["fps", 0.25][0] == pytest.approx(0)
    assert by["fps", 0.25][1] < 0 < by["fps", 0.25][2] and by["fps", 0.25][3] is True
    (_, (_, fastv, _)), _ = table.blocks
    assert (fastv.rel.printed, fastv.rel.difference) == ("12.4%", pytest.approx(-62.5))  # 8.3 / 66.7, and of shares


def test_the_same_differences_stand_in_every_form_with_a_word_where_they_are_unclear_and_their_number():
    by, table = compared()
    text, tex = format_markdown_tables(table), format_latex_table(table)
    record = json.loads(json.dumps(table.as_record(), allow_nan=False))
    assert record["reference"] == "gstep" and record["notes"] == list(table.remarks)
    for row in record["rows"]:
        cell = row["scores"]["overall"]
        values = tuple(cell[name] for name in ("difference", "low", "high", "unclear"))
        assert values == by[row["method"], row["retention_ratio"]]
    fps = re.search(r"^\| FPS \|.*", text, re.M)[0].replace("\\", "")
    shown = table.blocks[0][1][2].cells[0].difference_text
    assert re.fullmatch(r"0\.0 \[-\d+\.\d, \+\d+\.\d\] unclear", shown) and shown in fps
    assert shown.replace("-", "$-$") in tex
    for form in (text, tex, " ".join(table.remarks)):
        assert "Unclear: the interval contains 0. The table has 6 intervals, uncorrected: " in form
        assert "paired difference to GSTEP in points, with the 95" in form
        assert not {"p-value", "Holm", "≈"} & set(form.split())


def test_an_unclear_difference_says_how_many_videos_would_resolve_it_in_every_form():
    """The worked case with two questions of 180 less right, in three of the 15 copies."""
    worse = [*PRUNED * (TIMES - 3), *(bits("100 101 110 010") * 2), *bits("110 100 100 000")]
    arms = {("none", 1.0): FULL * TIMES, ("gstep", 0.25): PRUNED * TIMES, ("fps", 0.25): worse}
    scores = table_of(arms, clusters=VIDEOS)
    table, both = lay(scores, draws=999), lay(scores, scores, draws=999)
    cell = table.rows[2].cells[0]
    assert cell.unclear and cell.difference == pytest.approx(-200 / 180)
    exact = 60 * ((cell.high - cell.low) / 2 / cell.difference) ** 2
    assert exact <= cell.videos_needed <= 1.1 * exact and cell.videos_needed % 10 == 0
    words = f"unclear (about {cell.videos_needed:,} videos)"
    assert words in format_markdown_tables(table) and words in format_latex_table(table)
    assert table.as_record()["rows"][2]["scores"]["overall"]["videos_needed"] == cell.videos_needed
    assert "an estimate: the number of videos x (half width of the interval / difference)²" in table.remarks[1]
    assert "For Rel., N counts the videos of all benchmarks." in both.remarks[1] and "For Rel." not in table.remarks[1]
    rel = both.rows[2].rel
    assert rel.videos_needed == pytest.approx(120 * ((rel.high - rel.low) / 2 / rel.difference) ** 2, rel=0.1)
    assert "estimate" not in format_markdown_tables(compared()[1])  # clear differences, and one of 0.0


def test_another_method_beside_a_pair_changes_nothing_of_it():
    more = {**COMPARED, ("vidcom2", 0.25): FULL, ("random", 0.25): [0.5] * 12}
    (first, _), (second, _) = compared(), compared(more)
    assert first == {arm: second[arm] for arm in first}


def test_any_pair_can_be_asked_and_without_a_word_gstep_or_the_first_method_or_full_retention_is_the_reference():
    by, table = compared(reference="fastv")
    assert table.reference == "fastv" and "difference to FastV in points" in format_markdown_tables(table)
    there, back = by["gstep", 0.25], compared()[0]["fastv", 0.25]
    assert there[:3] == pytest.approx([-back[0], -back[2], -back[1]], abs=0.01)
    by, table = compared(reference="none")
    assert by["gstep", 0.25][0] == pytest.approx(-100 / 6)
    assert "difference to Full retention" in format_markdown_tables(table)
    for option in ("reference", "ours"):
        with pytest.raises(UsageError, match=f"--{option} cdpruner: no row of the table; there are none, gstep, fastv"):
            compared(**{option: "cdpruner"})
    assert compared({arm: of_arm for arm, of_arm in COMPARED.items() if arm[0] != "gstep"})[1].reference == "fastv"
    lone, table = compared({arm: of_arm for arm, of_arm in COMPARED.items() if arm[0] in ("none", "gstep")})
    assert table.reference == "none" and lone["gstep", 0.25][0] == pytest.approx(-100 / 6)


def test_an_interval_that_is_printed_as_reaching_0_is_unclear():
    shares = np.linspace(0, 1, 180).tolist()
    arms = {("a", 0.25): shares, ("b", 0.25): [share + 1e-4 * (i % 2) for i, share in enumerate(shares)]}
    cell = lay(table_of(arms, clusters=VIDEOS), draws=500).rows[2].cells[0]
    assert 0 < cell.low < cell.high < 0.05 and cell.difference_text == "0.0 [0.0, 0.0] unclear"


def test_several_seeds_are_one_row_with_mean_and_spread():
    seeds = {("random", 0.25): PRUNED, ("random,seed=1", 0.25): ONE, ("random,seed=7", 0.25): FULL}
    by, table = compared({**seeds, ("none", 1.0): FULL, ("gstep", 0.25): PRUNED})
    _, random, gstep = table.rows
    assert (random.title, random.method, random.seeds) == ("Random, 3 seeds", "random", [0, 1, 7])
    assert (gstep.title, gstep.method, gstep.seeds) == ("GSTEP", "gstep", [0])
    cell, numbers = random.cells[0], np.array([50, 100 / 12, 200 / 3])
    assert (cell.score, cell.spread) == pytest.approx((numbers.mean(), numbers.std(ddof=1)))
    assert by["random", 0.25][0] == pytest.approx(numbers.mean() - 50)
    assert random.rel.spread == pytest.approx(100 * numbers.std(ddof=1) / (200 / 3))
    assert random.tally.n_answers == 3 * 180
    tex = format_latex_table(table)
    assert f"{cell.printed}</ins> ± 30.0" in format_markdown_tables(table)
    assert r" $\pm$ 30.0" in tex and r"$\pm$: standard deviation" in tex
    record = table.as_record()["rows"][1]
    assert (record["seeds"], record["scores"]["overall"]["spread"]) == ([0, 1, 7], cell.spread)
    assert gstep.cells[0].spread is None and "±" not in format_markdown_tables(compared()[1])
    two = {("none", 1.0): FULL, ("gstep", 0.25): PRUNED, ("random,seed=7", 0.25): FULL}
    alone = compared(two, reference="random")[1]
    assert [row.title for row in alone.rows[1:]] == ["GSTEP", "Random, seed=7"] and alone.reference == "random,seed=7"
    chosen = compared({("none", 1.0): FULL, **seeds}, methods=["random,seed=1", "random,seed=7"])[1]
    assert [row.seeds for row in chosen.rows[1:]] == [[1, 7]]


@pytest.mark.parametrize(("n_videos", "there"), [(19, False), (20, True)])
def test_a_number_about_few_videos_has_no_interval_and_no_draw_is_told_of(n_videos, there):
    generator = np.random.default_rng(n_videos)
    videos = [f"v{min(i, n_videos - 1):02}" for i in range(60)]
    arms = {arm: generator.integers(0, 2, 60).astype(float).tolist() for arm in (("none", 1.0), ("gstep", 0.25))}
    table = lay(table_of(arms, clusters=videos), draws=100)
    cell = table.rows[1].cells[0]
    assert cell.difference is not None and (cell.low is not None) is (cell.unclear is not None) is there
    for text in (format_markdown_tables(table), format_latex_table(table), " ".join(table.remarks)):
        assert ("draws of whole videos" in text) is ("uncorrected" in text) is there
        assert ("Fewer than 20 videos: no interval" in text) is not there


def test_columns_are_splits_then_overall():
    splits = [{"duration": "short" if i < 6 else "long"} for i in range(12)]
    scores = table_of({("none", 1.0): FULL, ("gstep", 0.25): PRUNED}, clusters=VIDEOS[:12], splits=splits)
    columns = [("duration=short", "Short"), ("duration=medium", "Medium")]
    first = ScoredBenchmark("VideoMME", scores, columns, n_questions=2700)
    table = make_results_table("m", [first, ScoredBenchmark("Other", scores)], draws=200)
    assert [(one.key, one.text, one.n_questions, one.n_whole, one.n_videos) for one in table.columns] == [
        ("VideoMME: duration=short", "VideoMME Short", 6, None, 2),
        ("VideoMME: duration=medium", "VideoMME Medium", 0, None, 0),
        ("VideoMME: overall", "VideoMME Overall", 12, 2700, 4),
        ("Other: overall", "Other", 12, None, 4),
    ]
    short, medium, overall, _ = table.original.cells
    assert (short.printed, medium, overall.printed, table.original.rel.printed) == ("66.7", None, "66.7", "100.0%")
    single = format_latex_table(lay(scores))
    assert r"\textbf{Method} & \textbf{B\dag{}} & \textbf{Rel.} \\" in single and r"\multirow" not in single


def test_a_part_of_a_split_that_is_called_overall_is_not_the_overall_score():
    parts = [{"split": "overall" if i < 10 else "detail"} for i in range(40)]
    scores = table_of({("none", 1.0): [1.0] * 40, ("gstep", 0.25): [0.0] * 10 + [1.0] * 30}, splits=parts)
    columns = [("split=overall", "Overall part"), ("split=detail", "Detail")]
    row = make_results_table("m", [ScoredBenchmark("B", scores, columns)], draws=10).rows[1]
    assert [cell.printed for cell in (*row.cells, row.mean, row.rel)] == ["0.0", "100.0", "75.0", "75.0", "75.0%"]


def test_rows_are_in_the_order_asked_for_and_positions_are_blocks_of_their_own():
    more = {("fastv", 0.25): PRUNED, ("fps", 0.5): PRUNED, ("fastv", 0.5): FULL, ("fps,positions=original", 0.5): FULL}
    scores = many({("none", 1.0): FULL, ("gstep", 0.25): PRUNED, **more})
    table = lay(scores, methods=["fps", "fastv", "cdpruner"])
    titles = [[row.title for row in rows] for _, rows in table.blocks]
    assert titles == [["FPS", "FastV"], ["FPS, original positions"], ["FastV"]]
    assert table.blocks[1][0] == "Pruning Ratio (↓ 50%), original positions"
    assert (table.rows[3].method, table.rows[3].positions) == ("fps", "original")
    table = lay(scores, methods=["fastv", "fps,positions=original"])
    assert [row.title for row in table.rows[1:]] == ["FastV", "FPS, original positions", "FastV"]


def test_rel_is_missing_where_full_retention_scores_nothing_or_was_not_run():
    pruned = {("gstep", 0.25): PRUNED}
    for arms, is_run in (({("none", 1.0): [0.0] * 12, **pruned}, True), (pruned, False)):
        table = lay(table_of(arms))
        row = table.rows[1]
        assert (table.original.rel, row.rel, row.cells[0].printed) == (None, None, "50.0")
        assert (table.original.cells[0] is not None) == (row.cells[0].difference is not None) == is_run
        assert any("paired difference" in text for text in table.remarks) is is_run


def test_failed_answers_are_wrong_and_counted_and_a_benchmark_without_questions_has_no_numbers():
    scores = table_of({("none", 1.0): FULL, ("gstep", 0.25): [None, *FULL[1:]]})
    empty = ScoredBenchmark("Empty", score_table(), [("duration=short", "Short")], mean_over="task")
    row = make_results_table("m", [empty, ScoredBenchmark("B", scores)], draws=50).rows[1]
    assert (list(row.cells[:2]), row.cells[2].printed, row.mean, row.rel) == ([None, None], "58.3", None, None)
    assert (row.tally.n_failed, row.tally.unparsed_share, row.tally.kept_share) == (1, 0, pytest.approx(0.25))


def test_benchmarks_are_drawn_on_their_own_and_alike_in_every_table():
    """Another benchmark beside it changes no interval; the same scores under another title are drawn anew."""
    wide = many({("none", 1.0): FULL, ("fps", 0.1): np.random.default_rng(0).random(12).tolist()})

    def cells(*scores, seed=0):
        return lay(*scores, draws=300, seed=seed).rows[1].cells

    (alone,), (first, second) = cells(wide), cells(wide, wide)
    assert first == alone == cells(wide.take(np.arange(wide.num_rows)[::-1]))[0]
    assert second.printed == first.printed and (second.low, second.high) != (first.low, first.high)
    assert cells(wide, seed=1)[0] != alone


def test_cut_and_weakly_read_replies_stand_beside_the_score_in_every_form():
    rows = score_rows("gstep", 0.25, PRUNED)
    for row in rows[:5]:
        row["finish"] = "length"
    rows[7]["weak"] = "in-word"
    table = lay(score_table(score_rows("none", 1.0, FULL), rows))
    assert [add_counts(row) for row in table.rows] == ["Full retention", "GSTEP (5 cut, 1 weak)"]
    text, tex, record = format_markdown_tables(table), format_latex_table(table), table.as_record()
    assert row_of(text, "GSTEP")[-3:] == ["5", "1", "0"] and r"(5 cut, 1 weak) &" in tex
    for form in (text, tex, json.dumps(record)):
        assert "Cut: 5 of 24 replies were cut by max_new_tokens" in form.replace("\\", "")
        assert "Weak: 1 of 24 replies were read by chance" in form
    assert [(row["n_cut"], row["n_weak"]) for row in record["rows"]] == [(0, 0), (5, 1)]
    older = lay(score_table(rows).drop_columns(["finish", "weak"]))
    assert row_of(format_markdown_tables(older), "GSTEP")[-3:] == ["–", "–", "0"]
    assert "Cut: " not in "".join(older.remarks)


ARMS = {
    ("none", 1.0): FULL * TIMES,
    ("fastv,K=3", 0.25): [0.0] * 12 * TIMES,
    ("gstep", 0.25): [None, *FULL[1:], *PRUNED, *(FULL * (TIMES - 2))],
    ("mine|a_b", 0.125): PRUNED * TIMES,
}


@pytest.fixture(scope="module")
def table():
    """Two benchmarks, one with splits, of which the short one is about a single video; the last method ran on one."""
    splits = [{"duration": "short" if i < 3 else "long"} for i in range(12 * TIMES)]
    first, second = (table_of(arms, clusters=VIDEOS, splits=splits) for arms in (ARMS, dict(list(ARMS.items())[:3])))
    columns, made_of = [("duration=short", "Short"), ("duration=long", "Long")], {"Protocol": "mine | yours"}
    benchmarks = [ScoredBenchmark("VideoMME", first, columns, None, 2700, made_of), ScoredBenchmark("R&D", second)]
    return make_results_table("LLaVA_OV", benchmarks, reference="fastv,K=3", ours="gstep", draws=999)


def row_of(text, label):
    """The cells of the line that begins with a label."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]]


def test_markdown_has_each_number_with_its_difference_and_json_the_counts(table):
    text = format_markdown_tables(table)
    assert row_of(text, "Method") == [
        *("VideoMME Short†", "VideoMME Long", "VideoMME Overall", "R&D", "Avg.", "Rel."),
        *("Tokens", "Kept", "No option", "Cut", "Weak", "Failed"),
    ]
    assert row_of(text, "*Questions*")[:4] == ["3", "177", "180 of 2,700", "180"]
    assert row_of(text, "*Videos*")[:4] == ["1", "59", "60", "60"]
    assert row_of(text, "*Protocol*")[:4] == [r"mine \| yours"] * 3 + [""]
    assert row_of(text, "Full retention") == [*(*["66.7"] * 5, "100.0%"), *("100", "100.0%", "0.0%", "0", "0", "0")]
    short, long, overall, _, mean, rel, *counts = row_of(text, "GSTEP")
    assert (short, mean, counts) == ("33.3 +33.3", "**65.0**", ["25", "25.0%", "0.0%", "0", "0", "2"])
    assert long.startswith("**65.5** +65.5 ") and rel.startswith(r"**97.5%** +97.5 \[")
    assert re.fullmatch(r"\*\*65\.0\*\* \+65\.0 \\\[\+\d\d\.\d, \+\d\d\.\d\\\]", overall)
    assert row_of(text, "FastV, K=3")[2] == "<ins>0.0</ins>"  # the reference
    assert row_of(text, r"mine\|a\_b")[3:6] == ["–", "–", "–"]
    headings = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| *Pruning")]
    assert headings == ["*Pruning Ratio (↓ 75%)*", "*Pruning Ratio (↓ 87.5%)*"]
    assert "999 draws of whole videos (seed 0)" in text
    record = json.loads(json.dumps(table.as_record(), allow_nan=False))
    assert (record["draws"], record["seed"], len(record["rows"])) == (999, 0, 4)
    assert record["columns"][2]["n_whole"] == 2700 and record["columns"][2]["Protocol"] == "mine | yours"
    row = record["rows"][2]
    assert (row["method"], row["retention_ratio"], row["positions"], row["n_failed"]) == ("gstep", 0.25, None, 2)


def test_no_name_breaks_a_line(table):
    rows = [table.rows[0], replace(table.rows[1], title="a\nb\r\u2028c"), *table.rows[2:]]
    broken = replace(table, title="two\nlines", rows=rows)
    for form in (format_markdown_tables, format_latex_table):
        assert form(broken).count("\n") == form(table).count("\n") and "a b c" in form(broken)


def test_latex_is_the_papers_tabular(table):
    lines = format_latex_table(table).splitlines()
    assert lines[2:7] == [
        r"\begin{tabular}{l cccccc}",
        r"\toprule",
        r"\multirow{2}{*}{\textbf{Method}} & \multicolumn{3}{c}{\textbf{VideoMME}} & \multirow{2}{*}{\textbf{R\&D}} & "
        r"\multirow{2}{*}{\textbf{Avg.}} & \multirow{2}{*}{\textbf{Rel.}} \\",
        r"\cmidrule(lr){2-4}",
        r" & \textbf{Short\dag{}} & \textbf{Long} & \textbf{Overall} &  &  &  \\",
    ]
    assert r"\multicolumn{7}{c}{\textit{Original Model (100\%)}} \\" in lines
    assert r"Full retention & 66.7 & 66.7 & 66.7 & 66.7 & 66.7 & 100.0\% \\" in lines
    assert r"\multicolumn{7}{c}{\textit{Pruning Ratio ($\downarrow$ 75\%)}} \\" in lines
    (ours,) = (line for line in lines if line.startswith(r"\textbf{GSTEP (Ours)} (2 failed) & "))
    short, long, _, _, mean, rel = ours.removesuffix(r" \\").split(" & ")[1:]
    assert (short, mean) == (r"\shortstack{33.3\\{\tiny +33.3}}", r"\textbf{65.0}")
    assert long.startswith(r"\shortstack{\textbf{65.5}\\{\tiny +65.5 [+") and rel.startswith(
        r"\shortstack{\textbf{97.5\%}\\{\tiny +97.5"
    )
    assert "(Ours)" not in format_latex_table(replace(table, ours=None))
    assert r"FastV, K=3 & 0.0 & " + " & ".join([r"\underline{0.0}"] * 4) + r" & \underline{0.0\%} \\" in lines
    assert r"mine|a\_b & 33.3 & 50.3 & 50.0 & -- & -- & -- \\" in lines
    assert "Videos: VideoMME Short 1; VideoMME Long 59; VideoMME Overall 60" in format_latex_table(table)
