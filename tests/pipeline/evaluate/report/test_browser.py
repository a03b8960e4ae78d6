"""The page of results in a browser: selections, filters, and numbers where one points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.evaluate.report.page import Report, report_page
from pipeline.evaluate.statistics.results import Block
from tests.pipeline.evaluate.report.report_data import METHODS, data_of, items_of, report_of, scores_of


@pytest.fixture(scope="module")
def report() -> Report:
    items = items_of(12)
    return report_of(items, scores_of(items))


@pytest.fixture(scope="module")
def page(report) -> str:
    return report_page(report)


@pytest.fixture
def opened(browser, page, tmp_path) -> Iterator[Any]:
    """The page in the browser, which finds no fault with it."""
    file: Path = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    browser.get(file.as_uri())
    yield browser
    assert browser.get_log("browser") == []  # neither an error nor anything that the page's policy stopped


def choose(browser: Any, selector: str, text: str) -> None:
    from selenium.webdriver.support.ui import Select  # noqa: PLC0415 - skipped where it is not installed

    Select(browser.find_element("css selector", selector)).select_by_visible_text(text)


def visible(browser: Any, selector: str) -> list[Any]:
    return [element for element in browser.find_elements("css selector", selector) if element.is_displayed()]


@pytest.mark.slow
def test_the_filter_shows_the_pair_and_the_ratio_asked_for(opened, page):
    counts = data_of(page)["counts"]
    assert len(visible(opened, ".card")) == 20
    opened.find_element("id", "more").click()
    assert len(visible(opened, ".card")) == 40
    choose(opened, "[data-filter=ratio]", "10\N{NO-BREAK SPACE}%")
    choose(opened, "[data-filter=right]", "GSTEP")
    choose(opened, "[data-filter=wrong]", "VisionZip")
    methods = ["none", *METHODS]
    right, wrong = methods.index("gstep"), methods.index("visionzip")
    cards = visible(opened, ".card")
    assert len(cards) == counts["0.1"][right + 1][wrong + 1] > 0
    assert opened.find_element("id", "matches").text == f"{len(cards)} in all"
    for card in cards:
        assert card.get_attribute("data-ratio") == "0.1"
        rows = card.find_elements("css selector", "tbody tr")
        outcome = {row.text.split()[0].lstrip("✓✗!"): row.get_attribute("class") for row in rows}
        assert (outcome["GSTEP"], outcome["VisionZip"]) == ("right", "wrong")
    choose(opened, "[data-filter=wrong]", "GSTEP")
    assert not visible(opened, ".card") and opened.find_element("id", "matches").text == "0 in all"


@pytest.mark.slow
def test_a_chart_says_the_numbers_of_the_ratio_pointed_at(opened, report):
    """With the pointer and with the keyboard; methods pointed at stand out."""
    from selenium.webdriver.common.action_chains import ActionChains  # noqa: PLC0415
    from selenium.webdriver.common.keys import Keys  # noqa: PLC0415

    stops = visible(opened, ".stop")
    assert [stop.accessible_name.replace("\N{NO-BREAK SPACE}", " ") for stop in stops] == [
        f"Numbers at {ratio} %" for ratio in (10, 15, 20, 25)
    ]

    def expected(block: Block) -> set[str]:
        return {f"{row.cells[3].score:.1f}" for row in block.rows} | {f"{report.table.original.cells[3].score:.1f}"}

    def shown() -> set[str]:
        return {cell.text for cell in visible(opened, ".readings td:nth-child(2)")}

    assert shown() == expected(report.table.blocks[0])
    ActionChains(opened).move_to_element(stops[0]).perform()
    assert shown() == expected(report.table.blocks[3])
    (guide,) = visible(opened, ".guide")
    assert guide.get_attribute("d") == f"M{stops[0].get_attribute('data-x')} 0V100"
    opened.execute_script("arguments[0].focus()", stops[0])
    ActionChains(opened).send_keys(Keys.TAB).perform()
    assert shown() == expected(report.table.blocks[2])
    (row,) = visible(opened, '.readings tr[data-method="vidcom2"]')
    ActionChains(opened).move_to_element(row).perform()
    assert [s.get_attribute("data-method") for s in visible(opened, ".dim .series.on")] == ["vidcom2"]


@pytest.mark.slow
def test_selections_change_what_is_shown(opened, report):
    choose(opened, "[data-picks=chart]", "Long, difference")
    (chart,) = visible(opened, ".lines")
    assert chart.get_attribute("data-key") == "difference-2"
    choose(opened, "[data-picks=versus]", "GSTEP at the same ratio")
    assert {small.get_attribute("data-key") for small in visible(opened, ".results .versus")} == {"gstep"}
    choose(opened, "[data-picks=split]", "Task")
    choose(opened, "[data-picks=split-ratio]", "15\N{NO-BREAK SPACE}%")
    (heading,) = visible(opened, "#splits h3")
    assert heading.text.replace("\N{NO-BREAK SPACE}", " ") == "Task, retention ratio 15 %"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_no_part_is_wider_than_the_window(opened, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": True}  # bars to scroll lie over it
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert opened.execute_script("return document.documentElement.scrollWidth") == width
        inside = opened.execute_script("return document.querySelector('#results .scroll').scrollWidth")
        assert inside > width if width < 500 else inside <= width
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
