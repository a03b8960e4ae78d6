"""Where lines, bands, ticks and numbers of the charts are."""

import pytest

from pipeline.evaluate.report.charts import line_charts, ratio_places, styles, ticks
from pipeline.evaluate.statistics.tables import ScoredBenchmark, results_table
from tests.pipeline.evaluate.statistics.score_tables import bits, score_rows, score_table

FULL = bits("1111 1111 00")
ARMS = {("gstep", 0.1): bits("1111 0000 00"), ("gstep", 0.2): bits("1111 1100 00"), ("fps", 0.2): bits("1100 0000 00")}


@pytest.fixture(scope="module")
def charts():
    arms = [score_rows("none", 1.0, FULL), *(score_rows(*arm, scores) for arm, scores in ARMS.items())]
    table = results_table("m", [ScoredBenchmark("B", score_table(*arms))], draws=500)
    return line_charts(table, styles(["none", "gstep", "fps"])), table


def test_ticks_are_round_and_hold_the_ends():
    assert ticks(46.1, 61.7) == [45, 50, 55, 60, 65]
    assert ticks(-21.2, 0.0) == [-25, -20, -15, -10, -5, 0]
    assert ticks(0.0, 0.0)[0] == 0.0 < ticks(0.0, 0.0)[-1]
    for low, high in [(0, 100), (57.3, 57.4), (-3, 90)]:
        marks = ticks(low, high)
        assert marks[0] <= low and marks[-1] >= high and 2 <= len(marks) <= 8


def test_ratios_stand_by_their_size_or_its_logarithm():
    assert ratio_places([0.1, 0.15, 0.2]) == ([5.0, pytest.approx(50.0), 95.0], False)
    places, logarithmic = ratio_places([0.05, 0.1, 0.2, 0.4])
    assert logarithmic and places == pytest.approx([5, 35, 65, 95])
    assert ratio_places([0.25]) == ([50.0], False)


def test_points_and_bands_are_where_the_scores_are(charts):
    (scores, _), table = charts
    gstep, fps = scores.series
    lowest, highest = (float(text) for _, text in (scores.up[0], scores.up[-1]))

    def down(score: float) -> float:
        return 100 * (highest - score) / (highest - lowest)

    assert [point.y for point in gstep.points] == pytest.approx([down(40), down(60)])
    assert [point.x for point in gstep.points] == [5.0, 95.0]
    cell = table.blocks[1].rows[0].cells[0]
    assert (gstep.points[0].low, gstep.points[0].high) == pytest.approx((down(cell.low), down(cell.high)))
    assert gstep.band.count("L") == 3 and gstep.band.endswith("z")
    assert fps.band.count("V") == 1 and fps.line.endswith("h0")  # a single ratio
    assert scores.full.y == pytest.approx(down(80))


def test_numbers_of_a_ratio_are_best_first(charts):
    (scores, differences), _ = charts
    assert [stop.label.replace("\N{NO-BREAK SPACE}", " ") for stop in scores.stops] == ["10 %", "20 %"]
    assert [(r.method, r.value) for r in scores.stops[1].readings] == [
        ("none", "80.0"),
        ("gstep", "60.0"),
        ("fps", "20.0"),
    ]
    assert [r.value for r in differences.stops[1].readings] == ["0.0", "\N{MINUS SIGN}20.0", "\N{MINUS SIGN}60.0"]
    assert [(stop.left, stop.width) for stop in scores.stops] == [(0, 50), (50, 50)]


def test_methods_differ_in_colour_or_dash():
    style = styles(["none", "gstep", *(f"m{i}" for i in range(15))])
    assert len(set(style.values())) == 17
    assert style["gstep"] == ("c0", 0)
    assert {name.colour for method, name in style.items() if method.startswith("m")} == {"c1", "c2", "c3", "c4", "c5"}
