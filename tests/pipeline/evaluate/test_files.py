"""What an evaluation leaves behind: scores, the paper's tables by every split, and the page."""

from collections.abc import Mapping
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.base import Benchmark, Split
from pipeline.evaluate.benchmarks.items import AnnotationFault, Item, LoadedQuestions
from pipeline.evaluate.files import REPORT, SCORES, TABLES_MD, TABLES_TEX, main_table, write_results
from pipeline.evaluate.protocols import LETTER
from pipeline.evaluate.report.page import Presentation
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.evaluate.statistics.results import OVERALL
from pipeline.storage.stores import LocalStore
from tests.pipeline.evaluate.report.report_data import items_of, scores_of

VIDEOMME = BENCHMARKS["videomme"]
FAULT = AnnotationFault("missing-video", "9-1", "row 9: there is no data/nine.mp4", True)


def done_with(items: Mapping[str, Item]) -> ScoredQuestions:
    scores = scores_of(items, ["gstep", "uniform"], [0.25])
    return ScoredQuestions(loaded=LoadedQuestions(tuple(items.values()), (FAULT,), len(items) + 1), scores=scores)


def in_parts(*parts: str | None, name: str = "split") -> dict[str, Item]:
    """A question on a video of its own in each of these parts of a split; None is in no part."""
    items = items_of(len(parts), 1).values()
    return {
        item.question_id: replace(item, splits={**item.splits, **({} if part is None else {name: part})})
        for item, part in zip(items, parts, strict=True)
    }


def shown(benchmark: Benchmark = VIDEOMME, **more) -> Presentation:
    described = {"protocol": "p", "metric": benchmark.protocol().metric}
    return Presentation(**{"title": "T", "benchmark": benchmark, "described": described, "draws": 100, **more})


def own(*splits: Split, metric: str = "questions") -> Benchmark:
    return Benchmark(name="q", title="Q", protocols=(replace(LETTER, metric=metric),), splits=splits)


def titles(table) -> list[str]:
    return [column.title for column in table.columns]


def test_the_main_table_has_the_parts_of_the_first_split_in_the_benchmarks_order():
    table = main_table(done_with(items_of(9)), shown())
    assert titles(table) == ["Short", "Medium", "Long", "Overall"] and table.title == "T"
    assert [column.key for column in table.columns] == ["duration=short", "duration=medium", "duration=long", OVERALL]
    assert [(column.n_questions, column.n_clusters) for column in table.columns] == [(9, 3), (9, 3), (9, 3), (27, 9)]
    assert [row.method for row in table.blocks[0].rows] == ["gstep", "uniform"]


def test_parts_that_no_question_is_in_are_left_out():
    assert titles(main_table(done_with(items_of(2)), shown())) == ["Short", "Medium", "Overall"]


def test_parts_that_the_benchmark_does_not_name_come_behind_those_that_it_does():
    benchmark = own(Split("split", "Split", {"z": "Zed", "b": "Bee"}))
    done = done_with(in_parts("y", "b", "a", "z", None))
    table = main_table(done, shown(benchmark))
    assert titles(table) == ["Zed", "Bee", "a", "y", "Overall"]
    assert [column.n_questions for column in table.columns] == [1, 1, 1, 1, 5]


@pytest.mark.parametrize(("count", "columns"), [(30, 31), (31, 1)])
def test_a_split_into_too_many_parts_is_not_shown(count, columns):
    done = done_with(in_parts(*(f"{i:02}" for i in range(count))))
    table = main_table(done, shown(own(Split("split", "Split"))))
    assert len(table.columns) == columns and table.title == "T"


def test_without_splits_there_is_one_column_for_the_benchmark():
    table = main_table(done_with(items_of(3)), shown(own()))
    assert (titles(table), table.title) == (["Q"], "T")


def test_the_overall_score_is_by_the_protocols_metric():
    """Over questions, or over the parts of a split, however many questions each has."""
    done = done_with(in_parts("a", "a", "a", "b"))
    place = SCORE_SCHEMA.get_field_index("score")
    scores = done.scores.slice(0, 4).set_column(place, SCORE_SCHEMA.field("score"), [[1.0, 1.0, 1.0, 0.0]])
    done = replace(done, scores=scores)
    split = Split("split", "Split")
    scored = [main_table(done, shown(own(split, metric=metric))).original for metric in ("questions", "split")]
    assert [row.cells[-1].printed for row in scored] == ["75.0", "50.0"]


def test_draws_and_seed_are_those_that_were_asked_for():
    table = main_table(done_with(items_of(3)), shown(draws=123, seed=7))
    assert (table.draws, table.seed) == (123, 7)


def test_everything_is_written_and_named(tmp_path):
    store, done = LocalStore(tmp_path), done_with(items_of(9))
    _, names = write_results(store, done, shown(pages={"data/x.mp4": [("gstep", "pages/x.html")]}))
    assert names == [SCORES, TABLES_MD, TABLES_TEX, REPORT]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert pq.read_table(tmp_path / SCORES).equals(done.scores)
    page = (tmp_path / REPORT).read_text()
    assert "<title>T" in page and "there is no data/nine.mp4" in page


def test_every_split_with_questions_has_a_table_and_the_main_one_is_the_papers(tmp_path):
    write_results(LocalStore(tmp_path), done_with(items_of(9)), shown())
    headings = [line for line in (tmp_path / TABLES_MD).read_text().splitlines() if line.startswith("### ")]
    assert headings == ["### T", "### T: Domain", "### T: Task"]  # none has a sub-category
    latex = (tmp_path / TABLES_TEX).read_text()
    assert latex.count(r"\begin{tabular}") == 1 and "Medium" in latex and "Sports" not in latex


def test_the_page_links_to_pages_of_videos(tmp_path):
    items = items_of(9)
    done = done_with(items)
    pages = {item.video_id: [("gstep", f"pages/{i}.html")] for i, item in enumerate(items.values())}
    write_results(LocalStore(tmp_path), done, shown(pages=pages, facts=[("model", "a fact & more")]))
    page = (tmp_path / REPORT).read_text()
    assert 'href="pages/' in page and "a fact &amp; more" in page


def test_results_are_written_over_those_of_an_earlier_run(tmp_path):
    store = LocalStore(tmp_path)
    write_results(store, done_with(items_of(9)), shown())
    write_results(store, done_with(items_of(3)), shown(title="U"))
    assert pq.read_table(tmp_path / SCORES).num_rows == 3 * 3 * 3
    assert "### U" in (tmp_path / TABLES_MD).read_text()
