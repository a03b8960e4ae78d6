"""The page of results: every part of it, whatever there is to show, and nothing breaks out of it."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from jinja2 import UndefinedError

from pipeline.evaluate.benchmarks.items import AnnotationFault
from pipeline.evaluate.report.page import report_page, templates
from pipeline.evaluate.statistics.results import Block
from tests.pipeline.evaluate.report.report_data import (
    HOSTILE,
    METHODS,
    RATIOS,
    data_of,
    items_of,
    replaced,
    report_of,
    scores_of,
)

ITEMS = items_of(24)
SECTIONS = ["results", "retention", "splits", "disagreements", "faults", "protocol"]


@pytest.fixture(scope="module")
def scores() -> pa.Table:
    return scores_of(ITEMS, failures=0.01)


@pytest.fixture(scope="module")
def report(scores):
    return report_of(ITEMS, scores, draws=999)


@pytest.fixture(scope="module")
def page(report) -> str:
    return report_page(report)


class Page(HTMLParser):
    """A page as a browser has it: texts of each section, ids, classes, and how many scripts and links there are."""

    VOID = frozenset({"meta", "path"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.section = ""
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style") and data.strip():
            self.texts.append((self.section, " ".join(data.split())))

    def text(self, section: str) -> str:
        return " ".join(text for of, text in self.texts if of == section)

    def all(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [attrs for t, attrs in self.tags if t == tag and name in ["", *(attrs.get("class") or "").split()]]


def with_scores(scores: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        scores = scores.set_column(
            scores.column_names.index(name), name, pa.array(values, scores.schema.field(name).type)
        )
    return scores


def test_the_page_has_every_part_in_order(page):
    sections = [attrs["id"] for attrs in Page(page).all("section")]
    assert sections == SECTIONS
    assert [attrs["href"] for attrs in Page(page).all("a")][: len(SECTIONS)] == [f"#{name}" for name in SECTIONS]


def test_the_page_is_well_formed_and_refers_to_nothing_outside(page):
    parsed = Page(page)
    assert parsed.open == []
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert "default-src 'none'" in page and not parsed.all("link") and not parsed.all("img")
    links = [attrs["href"] or "" for attrs in parsed.all("a")]
    assert all(link.startswith(("#", "videos/")) for link in links)


def test_title_and_facts_come_first(page, report):
    texts = [text for section, text in Page(page).texts if not section]
    assert report.shown.title in texts
    for name, value in report.shown.facts:
        assert texts.index(value) == texts.index(name) + 1


def test_every_number_of_the_table_is_on_the_page(page, report):
    text = Page(page).text("results")
    rows = [row for block in report.table.blocks for row in block.rows]
    assert len(rows) == len(METHODS) * len(RATIOS)
    for row in rows:
        for cell in (*row.cells, row.rel):
            assert cell.printed in text
            if cell.full.low is None:
                assert cell.full.error == 0 and "(no spread)" in text
                continue
            ends = (f"{end:+.1f}" if abs(end) >= 0.05 else "0.0" for end in (cell.full.low, cell.full.high))
            assert f"[{', '.join(ends)}]".replace("-", "\N{MINUS SIGN}") in text
    assert "72 questions" in text and "24 clusters" in text and "24 questions" in text
    assert "Overall†" in text and "Fewer than 50 videos" in text
    assert "(75 % pruned)" in text.replace("\N{NO-BREAK SPACE}", " ")


def test_marks_and_noise_are_those_of_the_table(page, report):
    parsed = Page(page)
    cells = [cell for block in report.table.blocks for row in block.rows for cell in (*row.cells, row.rel)]
    in_splits = [
        cell
        for split in report.splits
        for block in split.blocks
        for row in block.rows
        for cell in row.cells
        if cell.full
    ]
    for mark in ("best", "second"):
        expected = sum(cell.mark == mark for cell in (*cells, *in_splits))
        assert len(parsed.all("span", mark)) == expected > 0
    noisy = [attrs for attrs in parsed.all("small", "versus") if "noise" in (attrs["class"] or "").split()]
    assert sum(attrs["data-key"] == "full" for attrs in noisy) == sum(bool(cell.full.noise) for cell in cells) > 0
    assert sum(attrs["data-key"] == "gstep" for attrs in noisy) == sum(
        bool(cell.gstep.noise) for cell in cells if cell.gstep
    )


def test_a_chart_has_a_line_a_method_and_numbers_at_every_ratio(page, report):
    (chart,) = re.findall(
        r'<figure class="lines" data-group="chart" data-key="score-3">(.*?)</figure>', page, re.DOTALL
    )
    assert chart.count('<g class="series') == len(METHODS)
    assert len(re.findall(r'<path class="band" d="M[^"]+z"', chart)) == len(METHODS)
    assert 'class="line full"' in chart and 'class="band full"' in chart
    tables = re.findall(r"<table data-stop.*?</table>", chart, re.DOTALL)
    assert len(tables) == len(RATIOS) == chart.count('class="stop"')
    for table, block in zip(reversed(tables), report.table.blocks, strict=True):
        for row in block.rows:
            cell = row.cells[3]
            (shown,) = re.findall(rf'<tr data-method="{row.method}".*?</tr>', table)
            assert f"<td>{cell.score:.1f}</td>" in shown
            assert f"[{cell.low:.1f}, {cell.high:.1f}]" in shown
    assert page.count('<figure class="lines"') == 8  # scores and differences of four columns


def test_splits_have_a_table_at_every_ratio(page):
    parsed = Page(page)
    assert len(parsed.all("table", "heat")) == 2 * len(RATIOS)
    text = parsed.text("splits")
    assert "Film & Television" in text and "Counting Problem" in text
    assert "Task, retention ratio 15 %" in text.replace("\N{NO-BREAK SPACE}", " ")


def test_disagreements_are_all_counted_and_shown_with_their_replies(page, scores):
    rows = {(r["question_id"], r["method"], r["retention_ratio"]): r for r in scores.to_pylist()}
    methods = ["none", *METHODS]
    total = 0
    for ratio in RATIOS:
        counts = np.array(data_of(page)["counts"][f"{ratio:g}"])
        expected = np.zeros((len(methods) + 1,) * 2, int)
        for question in ITEMS:
            arms = [rows[question, m, 1.0 if m == "none" else ratio] for m in methods]
            right = [i for i, row in enumerate(arms, 1) if row["right"] and row["status"] == "ok"]
            wrong = [i for i, row in enumerate(arms, 1) if not row["right"] and row["status"] == "ok"]
            if right and wrong:
                expected[np.ix_([0, *right], [0, *wrong])] += 1
        assert (counts == expected).all()
        total += expected[0, 0]
    cards = re.findall(r'<article class="card".*?</article>', page, re.DOTALL)
    assert len(cards) == min(total, 200) > 20
    assert f"{total} in all" in Page(page).text("disagreements")
    for card in cards:
        ratio = float(re.search(r'data-ratio="([\d.]+)"', card)[1])
        question = next(q for q in ITEMS if f"<span>{q}</span>" in card)
        right, wrong = (set(re.search(rf'data-{name}="([^"]+)"', card)[1].split()) for name in ("right", "wrong"))
        assert right and wrong and not right & wrong
        shown = re.findall(r'<tr class="(\w+)"><th scope="row">.*?</tr>', card)
        for i, (outcome, method) in enumerate(zip(shown, methods, strict=True)):
            row = rows[question, method, 1.0 if method == "none" else ratio]
            state = "failed" if row["status"] == "failed" else "right" if row["right"] else "wrong"
            assert outcome == state
            assert (str(i) in right, str(i) in wrong) == (state == "right", state == "wrong")
            assert row["reply"] is None or row["reply"] in card
            assert row["n_kept"] is None or f"{row['n_kept']:,} (" in card
        assert card.count('<li class="right">') == 1 and card.count("<li") == 4
        assert card.count('<a href="videos/') == 2


def test_questions_that_were_not_asked_are_counted(report):
    text = Page(report_page(replaced(report, n_annotated=100))).text("faults")
    assert "100 questions are annotated, 2 left out for faults, 72 scored, of 98 that could be asked." in text


def test_faults_and_failures_are_counted_with_examples(page, scores):
    text = Page(page).text("faults")
    assert "74 questions are annotated, 2 left out for faults, 72 scored." in text
    assert "missing-video the video is not in the data folder 1 0 1 example" in text
    assert "repeated-candidate an option is there more than once 0 1 1 example" in text
    assert "901-1: test.parquet, row 2701: data/gone.mp4 is not there" in text
    failed = scores.filter(pa.compute.equal(scores["status"], "failed"))
    assert failed.num_rows > 0
    assert f"out-of-memory {failed.num_rows} {len(failed['question_id'].unique())}" in text


def test_the_protocol_says_how_numbers_were_made(page):
    text = Page(page).text("protocol")
    assert "parser extract-mcq-answer" in text
    assert "frames.num_frames 32" in text
    assert "pixels not set: the checkpoint's own" in text
    assert "999 times (seed 0)" in text and "never below 0.002" in text
    assert "Select the best answer.\n{question}\n{options}\n\nAnswer" in page


def test_texts_of_files_are_escaped(scores):
    """As question, option, id, video, expected answer, split, reply, fault, class, method, fact, protocol, link."""
    question_id, method = f"q {HOSTILE}", f"mine {HOSTILE}"
    first = next(iter(ITEMS.values()))
    hostile = replace(
        first,
        question_id=question_id,
        video_ids=(HOSTILE,),
        question=f"Why? {HOSTILE}",
        options=(HOSTILE, "B", "C", "D"),
        expected=HOSTILE,
        splits={**first.splits, "domain": HOSTILE},
    )
    items = {question_id if q == first.question_id else q: hostile if q == first.question_id else item
             for q, item in ITEMS.items()}  # fmt: skip
    rows = scores_of(items, failures=0.0).to_pylist()
    for row in rows:
        row["method"] = method if row["method"] == "gstep" else row["method"]
        if row["question_id"] == question_id:
            row["right"] = row["method"] == method
            row |= {"reply": f"reply {HOSTILE}", "parsed": None}
    rows[-1] |= {"status": "failed", "error_class": HOSTILE, "score": 0.0, "right": False}
    page = report_page(
        report_of(
            items,
            pa.Table.from_pylist(rows, scores.schema),
            title=HOSTILE,
            facts=[(HOSTILE, HOSTILE)],
            faults=[AnnotationFault("bad-row", HOSTILE, HOSTILE, True)],
            described={HOSTILE: HOSTILE},
            pages={HOSTILE: [(HOSTILE, f"./{HOSTILE}.html")]},
        )
    )
    parsed = Page(page)
    assert parsed.open == [] and page.count("<script") == 2 == len(parsed.all("script"))
    texts = [text for _, text in parsed.texts]
    for expected in (HOSTILE, question_id, f"Why? {HOSTILE}", f"reply {HOSTILE}", method):
        assert any(expected in text for text in texts)
    assert any(attrs["href"] == f"./{HOSTILE}.html" for attrs in parsed.all("a"))
    assert data_of(page)["counts"]


def test_a_link_that_leads_outside_is_refused(report):
    for link in ("javascript:alert(1)", "https://example.org/", "//example.org/x"):
        with pytest.raises(ValueError, match="leads outside"):
            report_page(replaced(report, pages={"v": [("page", link)]}))


def test_scores_of_an_unknown_question_are_refused(report):
    first, *others = ITEMS
    with pytest.raises(ValueError, match=f"1 questions that are not among the items, e.g. '{first}'"):
        report_page(replaced(report, items=tuple(ITEMS[q] for q in others)))


def test_one_method_at_one_ratio_without_gstep_splits_faults_or_pages():
    scores = scores_of(ITEMS, ["fps"], [0.1], failures=0.0)
    page = report_page(report_of(ITEMS, scores, splits=(), faults=(), facts=(), pages={}, n_annotated=36))
    parsed = Page(page)
    assert [attrs["id"] for attrs in parsed.all("section")] == [name for name in SECTIONS if name != "splits"]
    assert "GSTEP" not in page
    assert 'class="whisker"' in page and 'class="stop"' not in page
    assert 'data-right="0" data-wrong="1"' in page  # against full retention
    assert "No faults in the annotations." in page and "No answer failed." in page


def test_one_cluster_has_no_intervals():
    page = report_page(report_of(ITEMS, scores_of(ITEMS, cluster="v")))
    parsed = Page(page)
    assert "there is no interval" in parsed.text("results")
    assert "[" not in parsed.text("results") + parsed.text("retention")
    assert not parsed.all("path", "band") and "≈" not in page
    assert "fewer than 6 clusters" in parsed.text("protocol")


def test_too_few_draws_are_said():
    items = items_of(60)
    scores = scores_of(items, methods=METHODS, ratios=[0.25])
    for draws, few in ((200, True), (2000, False)):
        text = Page(report_page(report_of(items, scores, draws=draws))).text("results")
        assert (f"{draws} draws are too few" in text) is few


def test_free_questions_have_no_options_and_name_none():
    items = items_of(8, free=True)
    page = report_page(report_of(items, scores_of(items)))
    assert "names no option" not in page.lower() and '<ul class="options">' not in page
    assert "Right answer: <b>" in page and "I cannot say" in page


def test_without_full_retention_there_is_nothing_to_compare_with(scores):
    scores = scores.filter(pa.compute.not_equal(scores["method"], "none"))
    page = report_page(report_of(ITEMS, scores))
    assert "line full" not in page and page.count('<figure class="lines"') == 4
    assert "GSTEP at the same ratio" in page


def test_a_method_that_was_not_run_at_a_ratio_leaves_a_gap(scores):
    gone = pa.compute.and_(
        pa.compute.equal(scores["method"], "gstep"), pa.compute.equal(scores["retention_ratio"], 0.15)
    )
    page = report_page(report_of(ITEMS, scores.filter(pa.compute.invert(gone))))
    (line,) = re.findall(r'<g class="series gstep".*?class="dots" d="([^"]*)"', page.split("score-3")[2], re.DOTALL)[:1]
    assert line.count("M") == 3


def test_only_failed_answers_and_no_counts_of_tokens(scores):
    n = scores.num_rows
    nothing = with_scores(
        scores,
        status=["failed"] * n,
        error_class=[None] * n,
        reply=[None] * n,
        right=[False] * n,
        score=[0.0] * n,
        n_kept=[None] * n,
        n_total=[None] * n,
        kept_per_frame=[None] * n,
    )
    page = report_page(report_of(ITEMS, nothing))
    assert "No question that one method gets right" in page
    assert f"unknown {n:,}" in Page(page).text("faults")


def test_a_table_with_no_method_at_all(scores):
    scores = scores.filter(pa.compute.equal(scores["method"], "none"))
    page = report_page(report_of(ITEMS, scores))
    assert 'id="retention"' not in page and "Full retention" in Page(page).text("results")


def test_methods_that_the_table_leaves_out_are_nowhere(report):
    blocks = tuple(Block(b.ratio, tuple(r for r in b.rows if r.method != "cdpruner")) for b in report.table.blocks)
    page = report_page(replace(report, table=replace(report.table, blocks=blocks), splits=()))
    assert "cdpruner" not in page and "CDPruner" not in page


@pytest.mark.slow
def test_a_page_of_2700_questions_and_60_arms_stays_small():
    items = items_of(900)
    scores = scores_of(items, [*METHODS, "random", "uniform", "topk", "fps"], [0.5, 0.25, 0.2, 0.15, 0.1, 0.05])
    reply = [f"{text} and so on" * 100 if text else None for text in scores["reply"].to_pylist()]
    page = report_page(report_of(items, with_scores(scores, reply=reply), draws=50))
    assert page.count('<article class="card"') == 200
    assert len(page.encode()) < 3_000_000
    seen = set()
    for ratio, right, wrong in re.findall(r'data-ratio="([\d.]+)" data-right="([^"]+)" data-wrong="([^"]+)"', page):
        seen |= {(ratio, a, b) for a in right.split() for b in wrong.split()}
    there = {
        (ratio, str(i - 1), str(j - 1))
        for ratio, table in data_of(page)["counts"].items()
        for i, j in np.argwhere(np.array(table)[1:, 1:]) + 1
    }
    assert seen == there  # of every two methods at every ratio something is shown


def test_a_name_that_is_not_given_is_an_error():
    with pytest.raises(UndefinedError):
        templates().from_string("{{ nothing }}").render()


def test_answers_about_frames_that_may_be_damaged_are_a_line(report, scores):
    said = "come from frames that were decoded with warnings and may be damaged"
    assert said not in report_page(report)
    place = scores.schema.get_field_index("decode_warnings")
    warned = scores.set_column(place, scores.schema.field(place), pa.array([2] + [0] * (len(scores) - 1), pa.int32()))
    assert f"1 of {len(scores):,} answers, about 1 videos, {said}." in report_page(replace(report, scores=warned))
