"""The charts of the page: round ticks that hold the data, and bars and curves where the numbers say."""

import re

import pytest

from pipeline.inspect.charts import density_chart, kept_chart, nice_ticks, time_ticks, upward
from pipeline.inspect.page_files import templates


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (61, 89, [70, 80]), (3, 3, [3])],
)
def test_ticks_are_round_and_inside(low, high, ticks):
    assert nice_ticks(low, high) == ticks


@pytest.mark.parametrize("highest", [0.0, 1e-9, 0.31, 1, 3, 7, 49, 196, 729])
@pytest.mark.parametrize("whole", [True, False])
def test_an_axis_starts_at_zero_and_holds_its_data(highest, whole):
    ticks = upward(highest, whole=whole)
    assert ticks[0] == 0 and ticks[-1] >= highest and ticks[-1] > 0
    assert 2 <= len(ticks) <= 6
    assert not whole or all(tick == int(tick) for tick in ticks)


def test_seconds_stand_where_the_frames_of_these_seconds_stand():
    assert time_ticks([0.0, 1.0, 2.0, 3.0]) == [
        (12.5, "0"), (25.0, "0.5"), (37.5, "1"), (50.0, "1.5"), (62.5, "2"), (75.0, "2.5"), (87.5, "3")
    ]  # fmt: skip
    assert time_ticks([0.0, 1.0, 10.0])[-1] == (pytest.approx(250 / 3), "10")


def test_a_single_instant_has_one_tick():
    assert time_ticks([2.5]) == [(50.0, "2.50")]
    assert time_ticks([2.5, 2.5, 2.5]) == [(50.0, "2.50")]


def test_curve_and_bars_are_drawn_to_scale():
    drawings = templates().get_template("charts.html").module
    curve = drawings.curve(density_chart([0.0, 2.0, 1.0], [0.0, 1.0, 2.0]))
    assert 'class="line" d="M0.5 100.00L1.5 0.00L2.5 50.00"' in curve
    bars = drawings.bars(kept_chart([0, 100, 25], [0.0, 1.0, 2.0], "<note>"))
    assert re.findall(r'class="bar" [^/]*height="([\d.]+)"', bars) == ["0.00", "100.00", "25.00"]
    assert "&lt;note&gt;" in bars and "<note>" not in bars
