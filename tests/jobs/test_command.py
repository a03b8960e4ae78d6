"""What stands around a command's work: flags over a file in any order, and errors as exit codes with a line each."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from rich.console import Console

from jobs import command, prune
from jobs.command import LogConsole, run_to_exit_code
from jobs.frame.json_document import CommandResult
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.prune.config import PruneConfig
from tests.interpreter import run_python
from tests.paths import ROOT


def code_of(work, **more) -> tuple[int, str]:
    """The exit code, and what was said."""
    console = Console(width=200)
    with console.capture() as said:
        code = run_to_exit_code(work, console, **more)
    return code, said.get().strip()


def raising(error: BaseException):
    def work() -> int:
        raise error

    return work


def test_errors_become_exit_codes_with_a_line_each():
    failed = (RunFailed, CorruptShard)
    assert code_of(lambda: 1) == (1, "")
    assert code_of(raising(RunFailed("no [room]")), failures=failed) == (1, "failed: no [room]")
    assert code_of(raising(UsageError("no such [flag]")), failures=failed) == (2, "error: no such [flag]")
    assert code_of(raising(ValueError("odd")), refusals=(ValueError,)) == (2, "error: odd")
    assert code_of(raising(UsageError("x")), failures=(UsageError,)) == (1, "failed: x")
    assert code_of(raising(KeyboardInterrupt()), interrupt_message="ended early") == (130, "ended early")


TABLE = """
import sys
from rich.console import Console
from jobs.command import run_to_exit_code
from jobs.frame.json_document import CommandResult

sys.exit(run_to_exit_code(lambda: CommandResult(0, {}, ["a table"], "failed: 3 videos"), Console(stderr=True)))
"""
LINES = """
import sys
from rich.console import Console
from jobs.command import run_to_exit_code
from jobs.frame.json_document import print_lines

sys.exit(run_to_exit_code(lambda: print_lines(["a line"]) or 0, Console(stderr=True), failures=(OSError,)))
"""


@pytest.mark.parametrize(("program", "failure"), [(TABLE, "\nfailed: 3 videos\n"), (LINES, "\n")])
def test_a_disk_without_space_for_the_output_is_a_line_and_hides_no_failure(program, failure):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c '{program}' 2>&1 >/dev/full"], cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, f"failed: [Errno 28] No space left on device{failure}")


def test_lines_of_a_result_are_not_broken_and_its_failure_goes_to_stderr(capsys):
    line = "[room] " + "word " * 100 + "end"
    result = CommandResult(3, {}, [line], "failed: [3] " + "videos " * 100 + "end")
    assert run_to_exit_code(lambda: result, Console(stderr=True, width=80)) == 3
    assert capsys.readouterr() == (f"{line}\n", f"{result.failure}\n")


def test_letters_that_the_locale_lacks_are_escaped():
    done = subprocess.run(
        [sys.executable, "-c", TABLE.replace("a table", "\u89c6.mp4")], cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "\\u89c6.mp4\n")


def test_a_log_has_the_time_in_front_of_every_message_and_no_line_is_cut(capsys):
    console = LogConsole()
    console.print("note: " + "word " * 100, highlight=False)
    console.print("[room]", markup=False)
    assert run_to_exit_code(raising(RunFailed("x" * 300)), console, failures=(RunFailed,)) == 1
    assert run_to_exit_code(raising(UsageError("y" * 300)), console) == 2  # nothing was started: no log
    lines = capsys.readouterr().err.splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    wanted = [f"{stamp}note: (word ){{100}}", stamp + r"\[room\]", f"{stamp}failed: x{{300}}", "error: y{300}"]
    assert len(lines) == len(wanted)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(wanted, lines, strict=True)), lines


@pytest.mark.parametrize(
    ("signals", "last"), [(2, "interrupted again: exiting at once"), (1, "a request does not finish")]
)
def test_an_interrupt_that_is_swallowed_ends_the_process_at_the_next_one_and_in_time(
    monkeypatch, tmp_path, signals, last
):
    """In a process of its own, which it ends."""
    monkeypatch.setattr(command, "_SAME_SIGNAL_S", 0.0)
    monkeypatch.setattr(command, "_MAX_STOP_S", 60.0 if signals == 2 else 0.2)

    def work() -> int:
        for _ in range(signals):
            with suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
        signal.pause()
        return 0

    pid = os.fork()
    if pid == 0:
        with (tmp_path / "log").open("w", buffering=1) as log:
            run_to_exit_code(work, Console(file=log))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith(last)


def test_an_error_behind_an_interrupt_is_a_line_and_not_its_end():
    def work(error: Exception):
        def fail() -> int:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            except KeyboardInterrupt:
                raise error from None
            return 0

        return fail

    assert code_of(work(RunFailed("the store")), failures=(RunFailed,)) == (130, "interrupted\nfailed: the store")
    assert code_of(work(OSError("the store"))) == (130, "interrupted\nfailed: the store")


def test_what_could_not_be_written_is_said_of_an_interrupt_and_of_a_failure():
    interrupt, failure = KeyboardInterrupt(), RunFailed("no word moved")
    for ending in (interrupt, failure):
        ending.add_note("the record was not written")
    assert code_of(raising(interrupt)) == (130, "interrupted\nthe record was not written")
    said = "failed: no word moved\nthe record was not written"
    assert code_of(raising(failure), failures=(RunFailed,)) == (1, said)


LEAVING = """
import atexit, os, signal, sys
from rich.console import Console
from jobs.command import run_to_exit_code

def work():
    sys.stdout.write("result")
    return 1

def leave():
    os.kill(os.getpid(), signal.SIGINT)
    print("unreachable")

atexit.register(leave)
sys.argv[0] = "{name}"
sys.exit(run_to_exit_code(work, Console(stderr=True)))
"""


def test_ctrl_c_once_the_work_has_ended_leaves_at_once_with_its_exit_code():
    left = run_python("-c", LEAVING.format(name="/bin/gstep-cache"))
    assert (left.returncode, left.stdout, left.stderr) == (1, "result", "")
    program = run_python("-c", LEAVING.format(name="mine.py"))  # a program of the user's goes on
    assert "KeyboardInterrupt" in program.stderr


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The command with a file of options; returns the configuration that its work got."""
    got: list[PruneConfig] = []
    monkeypatch.setattr(prune, "_prune", lambda config, console: got.append(config) or 0)

    def command(text: str, *argv: str) -> PruneConfig:
        (tmp_path / "o.yaml").write_text(text)
        assert prune.main([str(tmp_path / "o.yaml") if word == "FILE" else word for word in argv]) == 0
        return got[-1]

    return command


def test_a_flag_wins_over_the_file_wherever_it_stands(run):
    assert run("seed: 1", "--config", "FILE", "--seed", "2").seed == 2
    assert run("seed: 1", "--seed", "0", "--config", "FILE").seed == 0
    assert run("videos: w", "--config", "FILE").videos == ["w"]
    assert run("videos: [w, x]", "v", "--config", "FILE").videos == ["v"]
    assert run("retry-failed: true", "--no-retry-failed", "--config", "FILE").retry_failed is False


def test_a_repeatable_flag_adds_to_the_file_and_a_flag_wins_over_the_other_way_of_sampling(run):
    config = run("pruner-param: [a=1]", "--config", "FILE", "--pruner-param", "b=2")
    assert config.pruner_param == ["a=1", "b=2"]
    config = run("fps: 1\nmax-frames: 4", "--config", "FILE", "--num-frames", "8")
    assert (config.num_frames, config.fps, config.max_frames) == (8, None, None)
    config = run("num-frames: 8\nframe-rule: round-even", "--config", "FILE", "--fps", "2")
    assert (config.num_frames, config.fps, config.frame_rule) == (None, 2.0, "truncate")
