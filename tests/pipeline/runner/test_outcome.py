"""How a run ended: the exit code that its counts mean, and its failures by class."""

import io

import pytest
from rich.console import Console

from pipeline.errors import FAULTS
from pipeline.runner.run_record import Outcome, count_failures


def outcome(n_ok: int = 10, n_missing: int = 0, **more) -> Outcome:
    failures = more.pop("failures", {})
    examples = {name: (f"id of {name}", f"message of {name}") for name in failures}
    return Outcome(n_ok=n_ok, failures=failures, examples=examples, n_missing=n_missing, **more)


@pytest.mark.parametrize(
    ("ended", "limit", "code"),
    [
        (outcome(), 0, 0),
        (outcome(n_missing=1), 5, 1),
        (outcome(n_ok=0), 5, 1),
        (outcome(n_waiting=3), 0, 0),
        (outcome(failures={"corrupt": 2}), 2, 0),
        (outcome(failures={"corrupt": 2, "io": 1}), 2, 1),
        (outcome(failures={"internal": 1}), 5, 1),
        (outcome(n_new=4, n_new_failed=3), 2, 1),  # redone in vain: earlier results are in place
        (outcome(n_new=4, n_new_failed=2), 2, 0),
    ],
)
def test_the_exit_code(ended, limit, code):
    assert ended.exit_code(limit) == code


def test_failures_are_counted_with_their_first_example():
    kinds = {"a": "io", "b": "corrupt", "c": "corrupt"}
    rows = [
        {"video_id": name, "error_class": kind, "error_message": f"{name} is {kind}"} for name, kind in kinds.items()
    ]
    failures, examples = count_failures(rows, "video_id")
    assert list(failures.items()) == [("corrupt", 2), ("io", 1)]
    assert examples == {"corrupt": ("b", "b is corrupt"), "io": ("a", "a is io")}
    assert count_failures([], "video_id") == ({}, {})


def test_the_table_names_the_remedy_and_takes_no_id_for_markup():
    examples = {"io": ("[red]a[/red].mp4", "gone"), "strange": ("b.mp4", "?")}
    ended = Outcome(n_ok=1, failures={"io": 2, "strange": 1}, n_missing=0, examples=examples)
    text = io.StringIO()
    Console(file=text, width=300).print(ended.failures_table("video", FAULTS))
    said = text.getvalue()
    assert "failed videos" in said and "[red]a[/red].mp4: gone" in said and FAULTS["io"].remedy in said
    assert "b.mp4: ?" in said
