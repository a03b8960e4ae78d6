"""Progress: plain lines in a log, also while nothing moves, and a bar on a terminal."""

import io
import re

from rich.console import Console

from pipeline.execution.progress import LineReporter, reporter
from pipeline.prune.graph import PRUNING
from tests.waiting import wait_until


def test_a_log_gets_lines_even_while_nothing_is_committed():
    text = io.StringIO()
    with reporter(Console(file=text, width=120), 10, 0.02, PRUNING) as progress:
        wait_until(lambda: text.getvalue().count("\n") >= 3, "three lines")
        progress.advance(3, 1)
        progress.stages({"decode": 7, "encode": 5, "write": 4})
    lines = text.getvalue().splitlines()
    assert lines[0] == "0/10 videos, 0 failed, 0.00 videos/s, no estimate yet"
    assert lines[-1].startswith("4/10 videos, 1 failed, 7 decoded, 5 encoded, ")
    assert "s left" in lines[-1]


def test_a_terminal_gets_a_bar():
    text = io.StringIO()
    with reporter(Console(file=text, force_terminal=True, width=120), 10, 30, PRUNING) as progress:
        progress.advance(9, 1)
    assert "10/10" in text.getvalue() and "1 failed" in text.getvalue()


def test_a_line_stays_one_line_and_never_says_that_less_was_decoded_than_is_done():
    text = io.StringIO()
    with LineReporter(Console(file=text, width=40), 10_000, 60, PRUNING) as progress:
        progress.stages({"decode": 5, "encode": 4, "write": 3})
        progress.advance(6, 1)
    line = r"7/10000 videos, 1 failed, 7 decoded, 7 encoded, \d+\.\d\d videos/s, \d+ s left\n"
    assert re.fullmatch(line, text.getvalue())
