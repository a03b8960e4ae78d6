"""The page of results: well-formed, loads nothing, shows every number, and nothing breaks out of it."""

import re

from pipeline.evaluate.benchmarks.items import AnnotationFault, LoadedQuestions
from pipeline.evaluate.page import render_report_page
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.tabulate import ScoredBenchmark, make_results_table
from tests.pipeline.evaluate.pages import Page
from tests.pipeline.evaluate.score_tables import items_of, scores_of

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
