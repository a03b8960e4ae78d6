"""What a kind of run shares with all others: a store's errors, and the line of the options."""

import io

import pytest
from rich.console import Console

from pipeline.errors import CorruptShard, IdentityMismatch, RunFailed, UsageError
from pipeline.options import RunOptions
from pipeline.runner.job import convert_store_errors, print_options
from pipeline.storage.outages import OUTAGES, Outage


def test_an_error_of_a_store_ends_a_run():
    with pytest.raises(RunFailed, match=r"OSError: .*No space left") as caught, convert_store_errors(lambda line: None):
        raise OSError(28, "No space left on device")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(
    "error", [UsageError("no"), IdentityMismatch("other"), RunFailed("bad"), KeyboardInterrupt(), CorruptShard("torn")]
)
def test_a_refusal_stays_one_and_so_do_other_errors(error):
    with pytest.raises(type(error)) as caught, convert_store_errors(lambda line: None):
        raise error
    assert caught.value is error


def test_a_store_that_does_not_answer_is_announced_inside_the_context():
    lines: list[str] = []
    with convert_store_errors(lines.append):
        OUTAGES.take_reports([Outage("s3://bucket", 5.0, "503")])
    OUTAGES.take_reports([])
    (line,) = lines
    assert "s3://bucket" in line


def test_the_options_that_are_not_at_their_defaults_are_printed_without_their_secrets():
    console = Console(file=io.StringIO(), width=20)
    print_options(RunOptions(), console)
    print_options(RunOptions(device="cpu", s3_endpoint="http://secret.example", log_interval=60), console)
    first, second = console.file.getvalue().splitlines()
    assert first == "configuration: all defaults"
    assert second.startswith("configuration: ") and "device=cpu" in second and "s3_endpoint=(set)" in second
    assert "secret.example" not in second and "revision=" not in second and "max_attempts=" not in second
