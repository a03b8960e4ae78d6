"""Progress: lines, a bar, a notebook's line, a function that is told, and the load of the stages."""

import io
import re

import pytest
from rich.console import Console

from pipeline.generate.run import ANSWERING
from pipeline.prune.resources import PRUNING
from pipeline.runner import progress as progress_module
from pipeline.runner.progress import (
    CallbackConsole,
    LineReporter,
    NotebookLine,
    Pace,
    Progress,
    StageLoad,
    find_bottleneck,
    make_reporter,
)
from pipeline.runner.worker_reports import WorkerReport
from pipeline.storage.outages import OUTAGES, Outage, announce_outages
from tests.waiting import wait_until


def test_a_log_gets_lines_even_while_nothing_is_committed():
    text = io.StringIO()
    with make_reporter(Console(file=text, width=120), 10, 0.02, PRUNING) as progress:
        wait_until(lambda: text.getvalue().count("\n") >= 3, "three lines")
        progress.advance(3, 1)
        progress.stages(results(7, 5, 4))
    lines = text.getvalue().splitlines()
    assert lines[0] == "0/10 videos, 0 failed, no estimate yet"
    assert lines[-1].startswith("4/10 videos, 1 failed, 7 decoded, 5 encoded, ")


def test_an_interval_of_centuries_prints_no_line_and_ends_no_thread(monkeypatch):
    monkeypatch.setattr(progress_module, "_EARLY_LINES", 0)
    text = io.StringIO()
    with LineReporter(Console(file=text, width=120), 10, 1e300, PRUNING) as progress:
        progress._ticker.join(0.2)
        assert progress._ticker.is_alive() and not text.getvalue()
    assert text.getvalue().count("\n") == 1


def test_a_store_that_does_not_answer_is_the_bottleneck_of_all_displays_though_no_report_comes(monkeypatch):
    """The driver itself may wait for the store, and looks at no worker then."""
    monkeypatch.setattr(progress_module, "EARLY_S", 3600)  # only the line at the end
    busy = dict.fromkeys(PRUNING.stages, 30.0)
    line, bar, told = io.StringIO(), io.StringIO(), list[Progress]()
    line_console, bar_console = Console(file=line, width=200), Console(file=bar, force_terminal=True, width=200)
    for console in (line_console, bar_console, CallbackConsole(told.append)):
        with announce_outages(lambda text: None), make_reporter(console, 10, 3600, PRUNING) as progress:
            progress.stages(WorkerReport(up_s=busy, busy_s=busy))
            assert progress.current.bottleneck == "write"
            OUTAGES.note_failure(Outage("s3://b", 0.0, "503 SlowDown"))
            progress.show()
    assert "write 100% (bottleneck: no answer from s3://b)" in line.getvalue()
    assert "(bottleneck: no answer from s3://b)" in bar.getvalue()
    assert [at.bottleneck for at in told] == ["", "write", "no answer from s3://b"]
    OUTAGES.clear()
    assert str(Progress(item="video", total=2, bottleneck="x")) == "0/2 videos, 0 failed, bottleneck: x"


def results(decode: int, encode: int, write: int) -> WorkerReport:
    return WorkerReport(n_results={"decode": decode, "encode": encode, "write": write})


def test_a_terminal_gets_a_bar():
    text = io.StringIO()
    with make_reporter(Console(file=text, force_terminal=True, width=120), 10, 30, PRUNING) as progress:
        progress.stages(results(3, 2, 0))
        progress.advance(9, 1)
    assert "10/10" in text.getvalue() and "1 failed, 9 decoded, 9 encoded" in text.getvalue()


def test_a_line_stays_one_line_and_never_says_that_less_was_decoded_than_is_done(monkeypatch):
    monkeypatch.setattr(progress_module, "EARLY_S", 3600)  # only the line at the end
    text = io.StringIO()
    with LineReporter(Console(file=text, width=40), 10_000, 3600, PRUNING) as progress:
        progress.stages(results(5, 4, 3))
        progress.count_computed(1)
        progress.count_computed(6)
        progress.advance(6, 1)
    with LineReporter(Console(file=text, width=40), 6, 3600, PRUNING) as progress:
        progress.stages(results(0, 0, 6))
        progress.advance(0, 6)
    line, unread = text.getvalue().splitlines()
    assert re.fullmatch(r"7/10000 videos, 1 failed, 6 decoded, 6 encoded, \d+\.\d\d videos/s, \d+ s left", line)
    assert unread == "6/6 videos, 6 failed, 0 decoded, 0 encoded"  # files that cannot be read


def test_rate_and_time_left_are_of_what_came_through_since_the_first_though_nothing_is_written():
    now = 30.0  # the workers have loaded their models by then
    pace = Pace(100, "video", lambda: now)
    assert str(pace) == "no estimate yet"
    pace.count_computed(1)
    assert str(pace) == "no estimate yet"
    now = 40.0
    pace.count_computed(20)
    assert str(pace) == "2.00 videos/s, 40 s left"
    pace.count_written(5)
    assert str(pace) == "2.00 videos/s, 40 s left"
    pace.count_computed(79)
    assert str(pace) == ""
    pace.grow(100, is_final=False)  # archives are still being indexed: no time would be true
    assert str(pace) == "9.90 videos/s, more videos are being listed"
    pace.grow(120)
    assert str(pace) == "9.90 videos/s, 2 s left"
    pace = Pace(11, "file", lambda: now)  # where nobody says what came through, what is done counts
    pace.count_written(1)
    now = 50.0
    pace.count_written(5)
    assert str(pace) == "0.50 files/s, 10 s left"


def test_a_function_is_told_numbers_and_notes():
    told: list[Progress] = []
    console = CallbackConsole(told.append)
    console.print("note: [a] long one " + "x" * 200, markup=False)
    with make_reporter(console, 3, 30.0, PRUNING) as progress:
        for _ in range(2):  # nothing new for the second time
            progress.stages(results(2, 1, 0))
        progress.advance(1, 1)
        progress.advance(1, 0)
    notes, numbers = [one for one in told if one.note], [one for one in told if not one.note]
    assert [one.note for one in notes] == ["note: [a] long one " + "x" * 200]
    assert [(one.done, one.failed, dict(one.ahead)) for one in numbers] == [
        (0, 0, {}),
        (0, 0, {"decoded": 2, "encoded": 1}),
        (2, 1, {"decoded": 2, "encoded": 1}),
        (3, 1, {"decoded": 2, "encoded": 2}),  # what is ok has gone through them
    ]
    assert str(numbers[-1]) == "3/3 videos, 1 failed, 2 decoded, 2 encoded"


def test_of_a_run_of_one_stage_its_own_is_told_and_what_the_function_raises_leaves_the_reporter():
    told: list[Progress] = []

    def stop(progress: Progress) -> None:
        told.append(progress)
        if progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), make_reporter(CallbackConsole(stop), 2, 30.0, ANSWERING) as progress:
        progress.stages(WorkerReport(n_results={"answer": 1}))
        assert (told[-1].item, dict(told[-1].ahead)) == ("question", {"asked": 1})
        progress.advance(1, 0)


def test_a_notebook_has_one_line_written_over_and_notes_above_it(capsys):
    line, numbers = NotebookLine(), {"item": "video", "total": 2}
    for said in ({"note": "configuration: out=c"}, numbers, {"note": "note: no GPU"}):
        line(Progress(**said))
    line(Progress(**numbers, ok=1, ahead={"decoded": 2}))
    line(Progress(**numbers, ok=2))
    shown = [part.rstrip() for part in capsys.readouterr().err.split("\r")[1:]]
    assert shown == ["0/2 videos, 0 failed", "note: no GPU", "1/2 videos, 0 failed, 2 decoded", "2/2 videos, 0 failed"]


def report(n_passed_on=(0, 0, 0), up_s=(0.0, 0.0, 0.0), busy_s=(0.0, 0.0, 0.0)) -> WorkerReport:
    def by_stage(numbers):
        return dict(zip(("decode", "encode", "write"), numbers, strict=True))

    return WorkerReport(n_passed_on=by_stage(n_passed_on), up_s=by_stage(up_s), busy_s=by_stage(busy_s))


def test_shares_are_those_of_the_last_looks_alone():
    load = StageLoad()
    for look in range(1, 6):
        idle = max(0, look - 2)  # from the third look on nobody works
        load.add(report(up_s=(10 * look,) * 3, busy_s=(10 * (look - idle), 0, 5 * look)))
    assert load.busy() == {"decode": 0.0, "encode": 0.0, "write": pytest.approx(0.5)}


def test_shares_are_of_the_time_in_which_workers_could_work_and_a_stage_of_dead_workers_is_not_busy():
    load = StageLoad()
    assert load.busy() == {}
    for look in range(1, 5):
        load.add(report(up_s=(10 * look, 10 * min(look, 3), 0), busy_s=(5 * look, 10 * min(look, 3), 0)))
        assert load.busy() == {"decode": 0.5, "encode": 1.0 if look < 4 else 0.0}


def test_queues_hold_what_the_stage_before_is_through_with():
    load = StageLoad()
    load.add(report(n_passed_on=(7, 4, 4)))
    assert load.waiting(10) == {"decode": 3, "encode": 3, "write": 0}
    load.add(report(n_passed_on=(11, 4, 5)))  # an item was decoded again on another node
    assert load.waiting(10) == {"decode": 0, "encode": 7, "write": 0}


@pytest.mark.parametrize(
    ("busy", "limits"),
    [
        ({"decode": 0.97, "encode": 0.41, "write": 0.02}, "decode"),
        ({"decode": 0.60, "encode": 0.99, "write": 0.02}, "encode"),
        ({"decode": 0.97, "encode": 0.96, "write": 0.02}, "encode"),  # decoders fill what is in front of the encoders
        ({"decode": 0.95, "encode": 0.95, "write": 0.95}, "write"),
        ({"decode": 0.70, "encode": 0.60, "write": 0.02}, "decode"),
        ({"decode": 0.30, "encode": 0.20, "write": 0.02}, ""),  # they wait for something else
        ({"answer": 1.0}, ""),
        ({}, ""),
    ],
)
def test_the_last_stage_that_is_always_busy_limits_the_run(busy, limits):
    assert find_bottleneck(busy) == limits
