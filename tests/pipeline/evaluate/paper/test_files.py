"""The paper's tables and figures from results folders: its own numbers come out, in its layouts."""

from __future__ import annotations

import json
from itertools import product

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gstep.methods import METHODS
from jobs import evaluate
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.grids import TABLES
from pipeline.evaluate.paper.gathered import label
from pipeline.evaluate.request import write_results_header
from pipeline.storage.stores import LocalStore
from tests.pipeline.evaluate.statistics.paper_tables import paper_rows
from tests.pipeline.evaluate.statistics.score_tables import score_rows, score_table

MODEL = {"type": "llava_onevision", "weights": "hub:a/model@sha"}
GROUPS = [f"v{i % 160}" for i in range(1000)]
#: Table 4 of the paper: VideoMME, LongVideoBench, MLVU.
ABLATION = {
    "gstep,smoothing=raw": "57.5 55.5 63.3",
    "gstep,smoothing=box": "57.7 56.4 63.2",
    "gstep": "57.6 57.0 63.5",
    "gstep,fusion=temporal": "55.8 54.1 61.9",
    "gstep,fusion=spatial": "56.6 56.7 63.3",
    "random": "56.4 55.9 61.6",
    "uniform": "56.3 55.8 61.7",
    "topk": "55.0 55.4 61.3",
    "fps": "55.3 55.3 62.8",
}
AVERAGES = ["58.8", "59.1", "59.4", "57.3", "58.9", "59.4", "58.0", "57.9", "57.2", "57.8", "59.4"]


def results(folder, benchmark, arms, **identity):
    """What jobs.evaluate leaves of a benchmark: of 1,000 questions as many are right as each arm's number says."""
    store = LocalStore(folder / benchmark)
    store.make()
    about = {"model": "a/model", "annotations": "blake2b:0123456789abcdef"}
    held = {"benchmark": benchmark, "model": MODEL, "num_frames": 32, "protocol": "p"} | identity
    write_results_header(store, held, about)
    rows = []
    for method, ratio, number in arms:
        right = round(10 * float(number))
        splits = [{"duration": ("short", "medium", "long")[i % 3]} for i in range(1000)]
        scores = [1.0] * right + [0.0] * (1000 - right)
        rows.append(score_rows(method, ratio, scores, clusters=GROUPS, splits=splits))
    pq.write_table(score_table(*rows), store.root / "scores.parquet")
    return str(store.root)


def laid(table, places, out, capsys):
    code = evaluate.main(["--table", table, "--results", *places, "--out", str(out), "--draws", "100"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return (out / f"{table}.md").read_text(), said.err


def cells(text, title):
    """The numbers of the first row of this title, without marks."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {title} |"))
    return [cell.strip(" *[]").replace("<ins>", "").replace("</ins>", "") for cell in line.split("|")[2:-1]]


@pytest.mark.parametrize("name", TABLES)
def test_every_grid_can_be_asked(name):
    table = TABLES[name]
    grid = EvaluateConfig(benchmark="videomme", table=name).grid()
    assert set(grid) == {"none@1"} | {f"{label(m)}@{r:g}" for m, r in product(table.methods, table.ratios)}
    assert {method.split(",")[0] for method in table.methods} <= METHODS.keys()
    named = EvaluateConfig(benchmark="videomme", table=name, method=["fps"], retention_ratio=[0.5]).grid()
    assert set(named) == {"none@1", "fps@0.5"}


def test_the_main_table_of_the_paper(tmp_path, capsys):
    rows = paper_rows("LLaVA-OV-7B")
    names = ("videomme", "longvideobench", "mlvu-dev", "mvbench", "egoschema-subset")
    places = [
        results(tmp_path, name, [(row.method, row.ratio, row.numbers[3 + i]) for row in rows])
        for i, name in enumerate(names)
    ]
    text, said = laid("main", places[::-1], tmp_path / "paper", capsys)
    assert "note:" not in said
    assert "| Method | VideoMME Short | VideoMME Medium | VideoMME Long | VideoMME Overall | LongVideoBench |" in text
    gstep = [row for row in rows if row.method == "gstep"]
    block = text.split("Pruning Ratio (↓ 90%)")[1]
    assert cells(block, "GSTEP")[3:] == [*gstep[-1].numbers[3:-1], f"{gstep[-1].numbers[-1]}%"]
    latex, page = (tmp_path / "paper" / f"main.{kind}" for kind in ("tex", "html"))
    assert r"\textbf{100.2\%}" in latex.read_text() and "100.2%" in page.read_text()
    assert "1,000 questions, 32 frames, p" in page.read_text() and "src=" not in page.read_text()


def submitted(folder, arms, typed):
    """What jobs.evaluate leaves of the full set of EgoSchema, and what its user typed in."""
    place = results(folder, "egoschema", arms)
    file = LocalStore(folder / "egoschema").root / "scores.parquet"
    table = pq.read_table(file)
    nothing = pa.nulls(len(table), pa.float64())
    pq.write_table(table.set_column(table.schema.get_field_index("score"), "score", nothing), file)
    if typed:
        LocalStore(place).put("submissions/server.json", json.dumps(typed).encode())
    return place


def test_what_the_server_of_egoschema_returned_goes_into_the_table(tmp_path, capsys):
    arms = [("none", 1.0, "60.0"), ("gstep", 0.25, "57.0"), ("vidcom2", 0.25, "54.0")]
    typed = {"none@1": 60.4, "gstep@0.25": 60, "vidcom2@0.25": None, "gstepp@0.25": 61}
    places = [results(tmp_path, "mvbench", arms), submitted(tmp_path, arms, typed)]
    text, said = laid("main", places, tmp_path / "paper", capsys)
    assert cells(text, "a/model") == ["60.0", "60.4", "100.0%"]
    assert cells(text, "GSTEP") == ["57.0", "60.0", "97.2%"]  # the mean of 57.0/60.0 and 60.0/60.4
    assert cells(text, "VidCom2")[1:] == ["–", "–"]
    assert "server.json has a score of gstepp@0.25, which is none of its submissions" in said
    assert "has 1 submissions without a score: type what its server returns into" in said
    assert "scores from its server, without errors" in (tmp_path / "paper" / "main.html").read_text()


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ({"gstep@0.25": "59"}, "gstep@0.25 must be a percentage of right answers, got '59'"),
        ({"gstep@0.25": 590}, "must be a percentage of right answers, got 590"),
        ({"gstep@0.25": 0.59}, "percentages are wanted, 59.2 and not 0.592"),
        ([1], "must be an object such as"),
    ],
)
def test_a_score_that_is_none_is_refused(tmp_path, capsys, typed, why):
    place = submitted(tmp_path, [("none", 1.0, "60.0"), ("gstep", 0.25, "57.0")], typed)
    assert evaluate.main(["--table", "main", "--results", place, "--out", str(tmp_path / "paper")]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_the_ablations_of_the_paper(tmp_path, capsys):
    places = []
    for i, name in enumerate(("videomme", "longvideobench", "mlvu-dev")):
        arms = [("none", 1.0, "60.0"), *((label(m), 0.15, numbers.split()[i]) for m, numbers in ABLATION.items())]
        places.append(results(tmp_path, name, [*arms, ("gstep", 0.25, "99.9")]))  # another share is left out
    text, _ = laid("ablation", places, tmp_path / "paper", capsys)
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| *", "| Method"))]
    assert [line.split("|")[-2].strip(" *") for line in rows] == AVERAGES
    assert "| Fixed smoothing | **57.7** | 56.4 | 63.2 | 59.1 |" in rows
    assert "| Full GSTEP | **57.6** | **57.0** | **63.5** | **59.4** |" in rows


def test_the_figure_of_sensitivity_is_a_map_a_benchmark_and_one_of_the_mean(tmp_path, capsys):
    arms = [("none", 1.0, "60.0")]
    arms += [(label(m), 0.15, f"{60 - i / 10:.1f}") for i, m in enumerate(TABLES["sensitivity"].methods)]
    places = [results(tmp_path, name, arms) for name in ("longvideobench", "mlvu-test")]
    text, said = laid("sensitivity", places, tmp_path / "paper", capsys)
    assert "note:" not in said
    assert [line.rpartition(": ")[2] for line in text.splitlines() if line.startswith("###")] == [
        "MLVU test" if "MLVU test" in text else "MLVU", "LongVideoBench", "Mean retention",
    ]  # fmt: skip
    assert cells(text, "sigma 1.0") == ["59.5", "59.4", "59.3", "59.2", "59.1"] and "[59.3]" in text
    assert cells(text.split("Mean retention")[1], "sigma 0.5")[0] == "100.0%"
    assert 'class=" boxed"' in (tmp_path / "paper" / "sensitivity.html").read_text()


def test_the_figure_of_qwen3_is_relative_and_says_what_is_missing(tmp_path, capsys):
    arms = [("none", 1.0, "80.0"), ("vidcom2", 0.25, "76.0"), ("gstep", 0.25, "78.0")]
    text, said = laid("qwen3", [results(tmp_path, "videomme", arms)], tmp_path / "paper", capsys)
    assert cells(text, "GSTEP") == ["97.5%", "97.5%"] and cells(text, "VidCom2") == ["95.0%", "95.0%"]
    assert "note: no results of longvideobench" in said and "(VideoMME) has no visionzip@0.25" in said


ARMS = [("none", 1.0, "60.0"), ("gstep", 0.25, "59.0")]


def refused(capsys, out, *argv):
    assert evaluate.main([*argv, "--out", str(out)]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_results_that_do_not_belong_together_are_refused(tmp_path, capsys):
    one = results(tmp_path, "videomme", ARMS)
    other = results(tmp_path, "mvbench", ARMS, model=MODEL | {"weights": "another"})
    dev, test = (results(tmp_path, name, ARMS) for name in ("mlvu-dev", "mlvu-test"))
    out = tmp_path / "paper"
    assert "is of another model than" in refused(capsys, out, "--table", "main", "--results", one, other)
    assert "is of another model than" in refused(capsys, out, "--table", "main", "--mixed", "--results", one, other)
    assert "are for the same column: name one" in refused(capsys, out, "--table", "main", "--results", dev, test)
    assert "no results of python -m jobs.evaluate" in refused(
        capsys, out, "--table", "main", "--results", str(tmp_path)
    )
    assert "--results goes with --table" in refused(capsys, out, "--results", one)
    assert "--mixed goes with --results" in refused(capsys, out, "--benchmark", "videomme", "--mixed")
    assert "one of them" in refused(capsys, out, "--table", "main", "--results", one, "--benchmark", "videomme")
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "holds something else than main.md" in refused(capsys, out, "--table", "main", "--results", one)


@pytest.mark.parametrize(
    ("unlike", "said"),
    [
        ({"num_frames": 8}, "num_frames"),
        ({"protocol": "lmms-eval-0.5"}, "protocol"),
        ({"system": "Be brief."}, "system"),
    ],
)
def test_what_the_paper_holds_equal_is_refused_or_marked(tmp_path, capsys, unlike, said):
    places = [results(tmp_path, "videomme", ARMS), results(tmp_path, "mvbench", ARMS, **unlike)]
    text = refused(capsys, tmp_path / "paper", "--table", "main", "--results", *places)
    assert f"MVBench: {said}" in text and "let --mixed mark the columns" in text
    assert not (tmp_path / "paper").exists()
    argv = ["--table", "main", "--mixed", "--results", *places, "--out", str(tmp_path / "paper"), "--draws", "100"]
    assert evaluate.main(argv) == 0
    md, tex, html = ((tmp_path / "paper" / f"main.{kind}").read_text() for kind in ("md", "tex", "html"))
    assert "| MVBench‡ |" in md and f"‡ MVBench: {said}" in md.replace("\\", "")
    assert r"\textbf{MVBench\ddag{}}" in tex and r"\ddag{} MVBench" in tex
    assert "<th>MVBench‡</th>" in html and f"‡ MVBench: {said}" in html


def test_every_format_says_what_its_numbers_were_made_of(tmp_path, capsys):
    """1,000 of 2,700 questions; an answer that failed; methods and benchmarks that are missing."""
    place = results(tmp_path, "videomme", ARMS)
    path = LocalStore(place).root / "scores.parquet"
    table = pq.read_table(path).to_pylist()
    table[1500] |= {"status": "failed", "score": 0.0}
    pq.write_table(pa.Table.from_pylist(table, pq.read_schema(path)), path)
    laid("main", [place], tmp_path / "paper", capsys)
    wanted = (
        "1,000 of 2,700",
        "32",
        "Protocol",
        "01234567",
        "1 failed",
        "no results of longvideobench",
        "has no fastv@",
    )
    for kind in ("md", "tex", "html"):
        text = (tmp_path / "paper" / f"main.{kind}").read_text()
        assert [word for word in wanted if word not in text] == [], kind
    assert "\nLlava\\_model &" not in text and "a/model & " in (tmp_path / "paper" / "main.tex").read_text()


def broken(change):
    """What damages the scores of a place, by their rows."""

    def damage(root):
        rows = pq.read_table(root / "scores.parquet")
        pq.write_table(change(rows), root / "scores.parquet")

    return damage


def torn(root):
    data = (root / "scores.parquet").read_bytes()
    (root / "scores.parquet").write_bytes(data[: len(data) // 2])


def scored_otherwise(rows):
    return rows.set_column(rows.schema.get_field_index("score"), "score", pa.array([2.0] * len(rows)))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (torn, "scores.parquet is damaged"),
        (lambda root: (root / "scores.parquet").unlink(), "has no scores.parquet yet"),
        (lambda root: (root / "evaluation.json").write_text("{"), "evaluation.json"),
        (lambda root: (root / "evaluation.json").unlink(), "no results of python -m jobs.evaluate"),
        (broken(lambda rows: rows.drop_columns(["cluster"])), "has no cluster as it should be"),
        (broken(lambda rows: rows.slice(0, len(rows) - 5)), "has no score of question"),
        (broken(lambda rows: pa.concat_tables([rows, rows.slice(0, 1)])), "has 2 scores of question"),
        (broken(scored_otherwise), "answers without a score from 0 to 1"),
    ],
)
def test_results_that_are_damaged_or_half_run_are_refused(tmp_path, capsys, damage, why):
    places = [results(tmp_path, name, ARMS) for name in ("videomme", "mvbench")]
    damage(LocalStore(places[1]).root)
    text = refused(capsys, tmp_path / "paper", "--table", "main", "--results", *places)
    assert why in text and "mvbench" in text
    assert not (tmp_path / "paper").exists()


def test_rows_at_other_positions_are_another_sheet(tmp_path, capsys):
    arms = [*ARMS, ("gstep,positions=original", 0.25, "47.3"), ("fastv", 0.25, "59.5")]
    place = results(tmp_path, "videomme", arms)
    text, _ = laid("main", [place], tmp_path / "paper", capsys)
    assert "| GSTEP | " in text and "47.3" not in text
    code = evaluate.main(
        [
            "--table",
            "main",
            "--positions",
            "both",
            "--results",
            place,
            "--out",
            str(tmp_path / "both"),
            "--draws",
            "100",
        ]
    )
    assert code == 0
    close, original = (tmp_path / "both" / "main.md").read_text().split("original positions")
    assert "contiguous positions" in close and "47.3" not in close
    assert "47.3" in original and original.count("| FastV |") == 1  # FastV has none of its own
