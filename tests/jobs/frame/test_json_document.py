"""``--json``: one strict document on stdout whatever else is printed, for errors too, and the same exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jobs import compact, doctor, evaluate, generate, inspect, prune, serve, verify
from jobs.benchmark import __main__ as benchmark
from jobs.command import run_to_exit_code
from jobs.frame.json_document import CommandResult, print_document
from pipeline.errors import RunFailed, UsageError
from pipeline.generate.summary import AnswerSummary
from pipeline.prune.summary import Summary
from tests.interpreter import run_python
from tests.jobs.test_command import raising
from tests.paths import ROOT


def ended(work, capsys, **more) -> tuple[int, dict, str]:
    """Exit code, document and stderr."""
    code = run_to_exit_code(work, Console(stderr=True), document=True, **more)
    said = capsys.readouterr()
    return code, json.loads(said.out, parse_constant=pytest.fail), said.err


def test_what_is_printed_meanwhile_goes_to_stderr(capfd):
    """By this process, by C code and by child processes: only the document is on stdout."""

    def work() -> CommandResult:
        print("a table")
        os.write(1, b"of a library\n")
        subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
        return CommandResult(3, {"n": 1})

    assert run_to_exit_code(work, Console(stderr=True), document=True) == 3
    out, err = capfd.readouterr()
    assert json.loads(out) == {"exit_code": 3, "n": 1}
    assert {"a table", "of a library", "of a child"} <= set(err.splitlines())
    print("later")
    assert capfd.readouterr().out == "later\n"


# A command beside a thread that prints all the time, as Ray's does, and at exit something prints once more.
PRINTING = """
import atexit, os, sys, threading
from rich.console import Console
from jobs.command import run_to_exit_code
from jobs.frame.json_document import CommandResult

printed = threading.Event()

def prints():
    while True:
        print("(raylet) a worker died", flush=True)
        os.write(1, b"of a library\\n")
        printed.set()

def wait_for_more():
    printed.clear()
    assert printed.wait(60)

def work():
    threading.Thread(target=prints, daemon=True).start()
    wait_for_more()
    if "fails" in sys.argv:
        raise ValueError("a bug")
    return CommandResult(3, {"n": "\\u00fc"})

atexit.register(print, "goodbye", flush=True)
code = run_to_exit_code(work, Console(stderr=True), document=True)
wait_for_more()
sys.exit(code)
"""


@pytest.mark.parametrize(("word", "code"), [("works", 3), ("fails", 1)])
def test_what_is_printed_before_and_behind_the_document_goes_to_stderr(word, code):
    done = run_python("-c", PRINTING, word)
    document = json.loads(done.stdout)
    assert done.returncode == code and document.get("n", "ü") == "ü" and ("error" in document) == (word == "fails")
    assert all(said in done.stderr for said in ("(raylet) a worker died", "of a library", "goodbye"))


def test_a_reader_that_does_not_wait_for_the_document_is_no_error():
    command = f"{sys.executable} -c '{PRINTING}' works 2>&1 >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "failed: " in done.stdout and "Traceback" not in done.stdout, done.stdout
    closed = f"{sys.executable} -c '{PRINTING}' works 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", closed], cwd=ROOT, check=False).returncode == 3


@pytest.mark.parametrize(
    ("error", "code", "named", "message"),
    [
        (RunFailed("no [room]"), 1, "RunFailed", "no [room]"),
        (UsageError("no such flag"), 2, "UsageError", "no such flag"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt", "ended early"),
    ],
)
def test_an_error_is_a_document_with_the_same_exit_code(capsys, error, code, named, message):
    more = {"failures": (RunFailed,), "interrupt_message": "ended early"}
    ends = ended(raising(error), capsys, **more)
    assert ends[:2] == (code, {"error": {"class": named, "message": message}}) and message in ends[2]


def test_a_bug_is_a_document_and_still_raises(capsys):
    with pytest.raises(ZeroDivisionError):
        run_to_exit_code(raising(ZeroDivisionError("by nought")), Console(stderr=True), document=True)
    assert json.loads(capsys.readouterr().out) == {"error": {"class": "ZeroDivisionError", "message": "by nought"}}


def test_without_the_flag_there_is_no_document(capsys):
    assert run_to_exit_code(lambda: CommandResult(0, {"n": 1}), Console(stderr=True)) == 0
    assert capsys.readouterr().out == ""


def test_a_document_is_strict_json_in_ascii(capsys):
    print_document({"x": float("nan"), "y": (1, float("-inf")), "z": {"ü": Path("a")}, "s": "\udcff"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out, parse_constant=pytest.fail) == {"x": None, "y": [1, None], "z": {"ü": "a"}, "s": "\udcff"}


REFUSED = {
    prune: (["/no/such/folder"], "ManifestError"),
    generate: (["/no/cache"], "UsageError"),
    evaluate: ([], "UsageError"),
    inspect: (["/no/cache"], "NotACache"),
    verify: (["/no/cache"], "NotACache"),
    compact: (["/no/cache"], "NotACache"),
    doctor: (["--num-frames", "0"], "UsageError"),
}


@pytest.mark.parametrize("command", [*REFUSED, serve, benchmark])
def test_a_mistyped_flag_is_a_document_on_every_command(command, capsys):
    words = ["read"] if command is benchmark else []
    with pytest.raises(SystemExit, match="2"):
        command.main([*words, "--json", "--no-such-flag"])
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert "usage: " in said.err and error["class"] == "UsageError" and error["message"]


@pytest.mark.parametrize("command", REFUSED)
def test_a_refusal_is_a_document_on_every_command(command, capsys):
    argv, kind = REFUSED[command]
    assert command.main([*argv, "--json"]) == 2
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert error["class"] == kind and error["message"] in said.err.removeprefix("error: ")


OF_RUNS = {
    *("n_ok", "n_failed", "failures", "examples", "n_missing", "n_waiting", "n_outside"),
    *("n_new", "n_new_failed", "wall_s", "seconds"),
}


def test_the_counts_that_programs_rely_on_keep_their_names():
    """The README has them: more may come, none may go."""
    tokens = {"tokens_in": 4, "tokens_kept": 1, "token_bytes": 8}
    videos = Summary(n_ok=1, failures={}, examples={}, n_missing=0, n_videos=1, **tokens)
    assert videos.as_record().keys() >= OF_RUNS | tokens.keys() | {"n_videos", "n_warned"}
    about = {"visual_tokens": 1.0, "prompt_tokens": 2.0, "new_tokens": 3, "seconds": {}}
    answers = AnswerSummary(n_ok=1, failures={}, examples={}, n_missing=0, n_questions=1, **about)
    assert answers.as_record().keys() >= OF_RUNS | {"n_questions", "visual_tokens", "prompt_tokens", "new_tokens"}
