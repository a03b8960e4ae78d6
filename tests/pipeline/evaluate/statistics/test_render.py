"""Tables of results as Markdown and LaTeX."""

import re
from dataclasses import replace

import pytest

from pipeline.evaluate.statistics.render import latex, markdown, method_title
from pipeline.evaluate.statistics.results import Block, Column
from pipeline.evaluate.statistics.tables import ScoredBenchmark, results_table
from tests.pipeline.evaluate.statistics.score_tables import bits, score_rows, score_table

FULL, PRUNED = bits("110 101 011 110"), bits("100 101 111 000")
TIMES = 15
VIDEOS = [f"v{i // 3:02}" for i in range(12 * TIMES)]
SPLITS = [{"duration": "short" if i < 3 else "long"} for i in range(12 * TIMES)]
ARMS = {
    ("none", 1.0): FULL * TIMES,
    ("fastv,K=3", 0.25): [0.0] * 12 * TIMES,
    ("gstep", 0.25): [None, *FULL[1:], *PRUNED, *(FULL * (TIMES - 2))],
    ("mine|a_b", 0.125): PRUNED * TIMES,
}


@pytest.fixture(scope="module")
def table():
    """Two benchmarks, one with splits, of which the short one is about a single video; the last method ran on one."""
    first, second = (
        score_table(*(score_rows(*arm, s, clusters=VIDEOS, splits=SPLITS) for arm, s in arms.items()))
        for arms in (ARMS, dict(list(ARMS.items())[:3]))
    )
    splits = [Column("duration=short", "Short"), Column("duration=long", "Long")]
    benchmarks = [ScoredBenchmark("VideoMME", first, splits), ScoredBenchmark("R&D", second)]
    return results_table("LLaVA_OV", benchmarks, draws=999)


def row_of(text, label, nth=0):
    """The cells of the nth line that begins with a label."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", lines[nth])[1:-1]]


@pytest.mark.parametrize(
    ("method", "title"),
    [("gstep", "GSTEP"), ("fastv,K=3,L=1", "FastV, K=3, L=1"), ("topk", "Top-k"), ("mine:Mine", "mine:Mine")],
)
def test_methods_are_named_as_the_paper_names_them(method, title):
    assert method_title(method) == title


def test_markdown_has_the_papers_layout(table):
    text = markdown(table)
    assert row_of(text, "Method") == ["Method", "VideoMME Short†", "VideoMME Long", "VideoMME Overall", "R&D", "Rel."]
    assert row_of(text, "*Questions*")[1:] == ["3", "177", "180", "180", ""]
    assert row_of(text, "*Videos*")[1:] == ["1", "59", "60", "60", ""]
    assert row_of(text, r"LLaVA\_OV")[1:] == ["66.7", "66.7", "66.7", "66.7", "100.0%"]
    assert row_of(text, "GSTEP (2 failed)")[1:] == ["**33.3**", "**65.5**", "**65.0**", "**65.0**", "**97.5%**"]
    assert row_of(text, "FastV, K=3")[1:] == [*["<ins>0.0</ins>"] * 4, "<ins>0.0%</ins>"]
    assert row_of(text, r"mine\|a\_b")[1:] == ["**33.3**", "**50.3**", "**50.0**", "–", "–"]
    blocks = [line for line in text.splitlines() if line.startswith("| *Pruning")]
    assert [line.split("|")[1].strip() for line in blocks[:2]] == [
        "*Pruning Ratio (↓ 75%)*",
        "*Pruning Ratio (↓ 87.5%)*",
    ]


def filled_columns(table, made_of):
    return tuple(replace(column, made_of=given) for column, given in zip(table.columns, made_of, strict=True))


def test_columns_say_what_they_were_made_of(table):
    made_of = ({}, {}, {"Frames": "8", "Protocol": "mine | yours"}, {"Frames": "32"})
    filled = replace(table, columns=filled_columns(table, made_of))
    text = markdown(filled)
    assert row_of(text, "*Frames*")[1:] == ["", "", "8", "32", ""]
    assert row_of(text, "*Protocol*")[3] == r"mine \| yours"
    assert r"Frames: VideoMME Overall 8; R\&D 32." in latex(filled)
    assert "Frames: 32." in latex(replace(table, columns=filled_columns(table, [{"Frames": "32"}] * 4)))


@pytest.mark.parametrize("form", [markdown, latex])
def test_no_name_breaks_a_line(table, form):
    lines = form(table).count("\n")
    row = replace(table.blocks[0].rows[0], method="a\nb\r\u2028c")
    broken = replace(table, title="two\nlines", blocks=(Block(0.25, (row, *table.blocks[0].rows[1:])), table.blocks[1]))
    assert form(broken).count("\n") == lines and "a b c" in form(broken)


def test_every_line_of_a_markdown_table_has_as_many_cells(table):
    tables = [block.splitlines() for block in markdown(table).split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for lines in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_differences_have_interval_and_p_and_a_sign_for_noise(table):
    text = markdown(table)
    short, _, overall, _, rel = row_of(text, "GSTEP")[1:]
    assert short == "-33.3 (no interval)"
    assert re.fullmatch(r"-1\.7 \[-\d\.\d, [+-]\d\.\d\] p 0\.\d{3} ≈ \(\d{3} videos\)", overall)
    assert rel.startswith("-2.5 [")
    assert row_of(text, "FastV, K=3", 1)[3] == "-66.7 (no spread)"
    assert "No spread: the difference is the same in every video" in text
    against_gstep = row_of(text, "FastV, K=3", 2)
    assert re.fullmatch(r"-65\.0 \[-\d\d\.\d, -\d\d\.\d\] p 0\.002", against_gstep[3])
    legend = next(line for line in text.splitlines() if line.startswith("Percentage points"))
    assert "999 paired draws of whole videos (seed 0)" in legend
    assert "≈ within noise" in legend
    assert "† Fewer than 50 videos (VideoMME Short 1): interval and p are Student's" in text


@pytest.mark.parametrize(("p", "text"), [(0.0004, "< 0.001"), (0.0494, "0.049"), (0.0496, "< 0.05"), (0.05, "0.050")])
def test_a_p_that_is_no_noise_does_not_read_like_one_that_is(table, p, text):
    row = table.blocks[1].rows[0]
    full = replace(row.cells[2].full, difference=-0.04, p_holm=p, noise=p >= 0.05)
    cells = (*row.cells[:2], replace(row.cells[2], full=full), row.cells[3])
    shown = row_of(markdown(replace(table, blocks=(Block(0.25, (replace(row, cells=cells),)),))), r"mine\|a\_b", 1)[3]
    assert shown.endswith(f"p {text}{' ≈' if p >= 0.05 else ''}")
    assert shown.startswith("0.0 [")  # not -0.0


def test_answers_are_counted_below(table):
    text = markdown(table)
    assert row_of(text, "Original Model") == ["Original Model", "100%", "100.0%", "0.0%", "0"]
    assert row_of(text, "GSTEP", -1) == ["GSTEP", "25%", "25.0%", "0.0%", "2"]  # of both benchmarks
    assert row_of(text, r"mine\|a\_b", -1)[1] == "12.5%"


def test_without_gstep_nothing_is_compared_with_it():
    scores = score_table(score_rows("none", 1.0, FULL), score_rows("fps", 0.25, PRUNED))
    text = markdown(results_table("m", [ScoredBenchmark("B", scores)], draws=20))
    assert "GSTEP" not in text
    assert "No interval" not in text


def test_latex_is_the_papers_tabular(table):
    lines = latex(table).splitlines()
    assert lines[2:7] == [
        r"\begin{tabular}{l ccccc}",
        r"\toprule",
        r"\multirow{2}{*}{\textbf{Method}} & \multicolumn{3}{c}{\textbf{VideoMME}} & \multirow{2}{*}{\textbf{R\&D}} & "
        r"\multirow{2}{*}{\textbf{Rel.}} \\",
        r"\cmidrule(lr){2-4}",
        r" & \textbf{Short\dag{}} & \textbf{Long} & \textbf{Overall} &  &  \\",
    ]
    assert r"\multicolumn{6}{c}{\textit{Original Model (100\%)}} \\" in lines
    assert r"LLaVA\_OV & 66.7 & 66.7 & 66.7 & 66.7 & 100.0\% \\" in lines
    assert r"\multicolumn{6}{c}{\textit{Pruning Ratio ($\downarrow 75\%$)}} \\" in lines
    best = r" & ".join(rf"\textbf{{{n}}}" for n in ("33.3", "65.5", "65.0", "65.0", r"97.5\%"))
    assert rf"\textbf{{GSTEP (Ours)}} (2 failed) & {best} \\" in lines
    assert r"FastV, K=3 & " + " & ".join([r"\underline{0.0}"] * 4) + r" & \underline{0.0\%} \\" in lines
    assert r"mine|a\_b & \textbf{33.3} & \textbf{50.3} & \textbf{50.0} & -- & -- \\" in lines
    rows = [line for line in lines if line.endswith(r"\\") and "multicolumn" not in line]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in rows} == {5}
    assert lines[-1] == r"\end{tabular}"


def test_latex_heads_of_single_columns_take_one_line():
    scores = score_table(score_rows("none", 1.0, FULL), score_rows("fps", 0.25, PRUNED))
    text = latex(results_table("m", [ScoredBenchmark("B", scores)], draws=20))
    assert r"\textbf{Method} & \textbf{B\dag{}} & \textbf{Rel.} \\" in text
    assert r"\multirow" not in text
