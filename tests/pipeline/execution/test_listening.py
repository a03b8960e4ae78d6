"""What a run says reaches the function that asked for it, and one line of a notebook."""

import pytest

from pipeline.execution.listening import Listening, OneLine, Progress
from pipeline.execution.progress import reporter
from pipeline.generate.graph import ANSWERING
from pipeline.prune.graph import PRUNING


def test_a_function_is_told_numbers_and_notes():
    told: list[Progress] = []
    console = Listening(told.append)
    console.print("note: [a] long one " + "x" * 200, markup=False)
    with reporter(console, 3, 30.0, PRUNING) as progress:
        progress.stages({"decode": 2, "encode": 1, "write": 0})
        progress.stages({"decode": 2, "encode": 1, "write": 0})  # nothing new
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


def test_of_a_run_of_one_stage_its_own_is_told():
    told: list[Progress] = []
    with reporter(Listening(told.append), 2, 30.0, ANSWERING) as progress:
        progress.stages({"answer": 1})
    assert (told[-1].item, dict(told[-1].ahead)) == ("question", {"asked": 1})


def test_what_the_function_raises_leaves_the_reporter():
    def stop(progress: Progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reporter(Listening(stop), 2, 30.0, PRUNING) as progress:
        progress.advance(1, 0)


def test_a_notebook_has_one_line_written_over_and_notes_above_it(capsys):
    line = OneLine()
    line(Progress(note="configuration: out=c"))
    line(Progress(item="video", total=2))
    line(Progress(note="note: no GPU"))
    line(Progress(item="video", total=2, ok=1, ahead={"decoded": 2}))
    line(Progress(item="video", total=2, ok=2))
    shown = [part.rstrip() for part in capsys.readouterr().err.split("\r")[1:]]
    assert shown == ["0/2 videos, 0 failed", "note: no GPU", "1/2 videos, 0 failed, 2 decoded", "2/2 videos, 0 failed"]
