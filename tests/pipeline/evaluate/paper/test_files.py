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
GROUPS = [f"v{i % 10}" for i in range(1000)]
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
    write_results_header(store, {"benchmark": benchmark, "model": MODEL, "num_frames": 32, "protocol": "p"} | identity)
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
    block = text.split("Pruning ratio 90%")[1]
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
    typed = {"none@1": 60.4, "gstep@0.25": 60, "vidcom2@0.25": None}
    places = [results(tmp_path, "mvbench", arms), submitted(tmp_path, arms, typed)]
    text, said = laid("main", places, tmp_path / "paper", capsys)
    assert cells(text, MODEL["weights"]) == ["60.0", "60.4", "100.0%"]
    assert cells(text, "GSTEP") == ["57.0", "60.0", "97.2%"]  # the mean of 57.0/60.0 and 60.0/60.4
    assert cells(text, "VidCom2")[1:] == ["–", "–"]
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


def test_results_that_do_not_belong_together_are_refused(tmp_path, capsys):
    arms = [("none", 1.0, "60.0"), ("gstep", 0.25, "59.0")]
    one = results(tmp_path, "videomme", arms)
    other = results(tmp_path, "mvbench", arms, model=MODEL | {"weights": "another"})
    dev, test = (results(tmp_path, name, arms) for name in ("mlvu-dev", "mlvu-test"))
    out = ["--out", str(tmp_path / "paper")]

    def refused(*argv):
        assert evaluate.main([*argv, *out]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "is of another model than" in refused("--table", "main", "--results", one, other)
    assert "are for the same column: name one of them" in refused("--table", "main", "--results", dev, test)
    assert "no results of python -m jobs.evaluate" in refused("--table", "main", "--results", str(tmp_path))
    assert "--results goes with --table" in refused("--results", one)
    assert "one of them" in refused("--table", "main", "--results", one, "--benchmark", "videomme")
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "mine.txt").write_text("mine")
    assert "holds something else than main.md" in refused("--table", "main", "--results", one)
