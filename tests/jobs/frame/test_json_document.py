"""``--json``, one strict document on stdout whatever else is printed, for errors too; flags and files of options."""

import argparse
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from rich.console import Console

from jobs import compact, doctor, evaluate, generate, inspect, prune, serve, verify
from jobs.benchmark import __main__ as benchmark
from jobs.command import run_to_exit_code
from jobs.frame.flags import add_flags, from_flags, read_config_file
from jobs.frame.json_document import CommandResult, print_document, redirect_stdout_to_stderr
from pipeline.errors import RunFailed, UsageError
from pipeline.generate.config import GenerateConfig
from pipeline.generate.summary import AnswerSummary
from pipeline.options import S3Options, option
from pipeline.prune.config import PruneConfig
from pipeline.prune.summary import Summary
from tests.interpreter import run_python
from tests.jobs.test_command import raising
from tests.paths import ROOT

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


def test_a_stdout_that_is_not_the_process_s_own_is_as_it_was_behind_the_document(capfd):
    with redirect_stdout_to_stderr():
        os.write(1, b"within ")
    os.write(1, b"behind ")
    assert capfd.readouterr() == ("behind ", "within ")


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError("no such flag"), 2), (KeyboardInterrupt("ended early"), 130), (ZeroDivisionError("a bug"), None)],
)
def test_an_error_is_a_document_with_the_same_exit_code_and_a_bug_still_raises(capsys, error, code):
    more = {"failures": (RunFailed,), "interrupt_message": "ended early", "document": True}
    with nullcontext() if code else pytest.raises(type(error)):
        assert run_to_exit_code(raising(error), Console(stderr=True), **more) == code
    said = capsys.readouterr()
    assert json.loads(said.out) == {"error": {"class": type(error).__name__, "message": str(error)}}
    assert code is None or str(error) in said.err


def test_without_the_flag_there_is_no_document(capsys):
    assert run_to_exit_code(lambda: CommandResult(0, {"n": 1}), Console(stderr=True)) == 0
    assert capsys.readouterr().out == ""


def test_a_document_is_strict_json_in_ascii(capsys):
    print_document({"x": float("nan"), "y": (1, float("-inf")), "z": {"ü": Path("a")}, "s": "\udcff"})
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out, parse_constant=pytest.fail) == {"x": None, "y": [1, None], "z": {"ü": "a"}, "s": "\udcff"}


WRONG = ["--no-such-flag"]
MISTYPED = (prune, generate, evaluate, inspect, verify, compact, doctor, serve)


@pytest.mark.parametrize(
    ("command", "argv", "kind"),
    [
        (prune, ["/no/such/folder"], "ManifestError"),
        (inspect, ["/no/cache"], "NotACache"),
        *((command, WRONG, "UsageError") for command in MISTYPED),
        (benchmark, ["read", *WRONG], "UsageError"),
    ],
)
def test_a_refusal_and_a_mistyped_flag_are_documents_on_every_command(command, argv, kind, capsys):
    try:
        code = command.main([*argv, "--json"])
    except SystemExit as ended:  # argparse's
        code = ended.code
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (code, error["class"]) == (2, kind)
    assert "usage: " in said.err and error["message"] if WRONG[0] in argv else error["message"] in said.err


OF_RUNS = {"n_ok", "n_failed", "failures", "examples", "n_missing", "n_waiting", "n_outside", "wall_s", "seconds"}
OF_RUNS |= {"n_new", "n_new_failed"}


def test_the_counts_that_programs_rely_on_keep_their_names():
    """The README has them: more may come, none may go."""
    tokens = {"tokens_in": 4, "tokens_kept": 1, "token_bytes": 8}
    videos = Summary(n_ok=1, failures={}, examples={}, n_missing=0, n_videos=1, **tokens)
    assert videos.as_record().keys() >= OF_RUNS | tokens.keys() | {"n_videos", "n_warned"}
    about = {"visual_tokens": 1.0, "prompt_tokens": 2.0, "new_tokens": 3, "seconds": {}}
    answers = AnswerSummary(n_ok=1, failures={}, examples={}, n_missing=0, n_questions=1, **about)
    assert answers.as_record().keys() >= OF_RUNS | {"n_questions", "visual_tokens", "prompt_tokens", "new_tokens"}


def parser_of(config: type) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_flags(parser, config)
    return parser


def parse(*argv: str) -> PruneConfig:
    return from_flags(PruneConfig, parser_of(PruneConfig).parse_args(argv))


def help_of(config: type) -> str:
    return " ".join(parser_of(config).format_help().split())


@pytest.mark.parametrize("config", [PruneConfig, GenerateConfig, S3Options])
def test_every_field_is_a_flag_with_help(config):
    text = help_of(config)
    for item in fields(config):
        assert item.metadata["help"]
        flag = item.metadata.get("flag", f"--{item.name.replace('_', '-')}")
        assert item.metadata.get("positional") or f"{flag} " in text
    assert "{item}" not in text


@dataclass(frozen=True, kw_only=True)
class Shared:
    size: int = option(0, "size of a {item}", group="second")
    noise: float = option(0.0, "its noise")
    colour: str | None = option(None, "its colour", group="first")


@dataclass(frozen=True, kw_only=True)
class Own(Shared):
    item = "cat"
    name: str = option("Tom", "name of the {item}", group="first")
    age: int | None = option(None, "in years", group="second")


def test_groups_stand_in_order_a_class_s_own_options_first():
    text = help_of(Own)
    parts = r"--name .*name of the cat \[Tom\] .*--colour .*second: .*--age .*--size .*size of a cat \[0\] .*--noise"
    assert re.search(f"first: .*{parts}", text)
    assert "its noise [0.0]" in text and "its colour [" not in text


def test_no_flags_are_the_defaults_and_words_and_numbers_that_look_like_others_stay_what_they_are():
    assert parse() == PruneConfig()
    config = parse("--revision", "None", "--s3-endpoint", "", "--fps", "2", "--pruner-param", "a=1", "v")
    assert (config.revision, config.s3_endpoint, config.fps, config.videos) == ("None", "", 2.0, ["v"])


def test_a_configuration_file_holds_every_option_and_may_say_it_plainly(tmp_path):
    text = "num-frames: 8\nretention_ratio: 1\npruner-param: [alpha=0.3]\nmodel: tiny\nfps:\n"
    (tmp_path / "c.yaml").write_text(f"{text}max-failed: 0.05\nvideo-root:\nretry-failed: true\n")
    expected = {"num_frames": 8, "retention_ratio": 1.0, "pruner_param": ["alpha=0.3"], "model": "tiny", "fps": None}
    expected |= {"max_failed": "0.05", "video_root": [], "retry_failed": True}
    assert read_config_file(str(tmp_path / "c.yaml"), PruneConfig) == expected
    assert parse("--no-retry-failed").retry_failed is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("frames: 8", "unknown option frames"),
        ("config: other.yaml", "unknown option"),
        ("num-frames: many", "num_frames must be a whole number"),
        ("retry-failed: 1", "retry_failed must be true or false"),
        ("pruner-param: alpha=1", "must be a list"),
        ("num-frames: 1\nnum_frames: 2", "num-frames is given twice"),
        ("- 1", "expected options"),
        ("a: [", "c.yaml"),
    ],
)
def test_a_bad_configuration_file_is_refused_by_name(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_config_file(str(tmp_path / "c.yaml"), PruneConfig)
