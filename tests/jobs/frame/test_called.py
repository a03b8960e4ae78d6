"""Commands by the name that they were called by, their completion in a shell, and methods of the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import prune
from jobs.__main__ import COMMANDS, main
from jobs.command import LogConsole, exit_code_of, wide_console
from jobs.frame.called import as_called, import_from_here
from pipeline.errors import UsageError
from tests.paths import ROOT


@pytest.fixture
def by_name(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/gstep-cache"])


HINT = "look: python -m jobs.inspect c; python -m jobs.benchmark read; that jobs.prune wrote"


def test_hints_stay_what_they_are_for_python_m():
    assert as_called(HINT) == HINT


def test_hints_errors_and_help_name_the_console_script(by_name, capsys, tmp_path):
    said = "look: gstep-cache inspect c; gstep-cache benchmark read; that jobs.prune wrote"
    assert as_called(HINT) == said

    def refuse():
        raise UsageError(HINT)

    assert exit_code_of(refuse, LogConsole()) == 2
    LogConsole().print(HINT)
    wide_console().print(HINT)
    told = capsys.readouterr()
    assert told.err.count(said) == 2 and said in told.out and "python -m" not in told.err + told.out
    document = tmp_path / "d.json"
    exit_code_of(refuse, LogConsole(), document=document)
    assert said in document.read_text()
    capsys.readouterr()
    for flag in ("--help", "--help-all", "--nope"):
        with pytest.raises(SystemExit):
            prune.main([flag])
    told = capsys.readouterr()
    assert "gstep-cache prune videos/ --out cache" in told.out and "gstep-cache prune: error:" in told.err
    assert "python -m" not in told.out + told.err


def test_a_mistyped_command_or_choice_gets_the_likely_one(capsys):
    for argv, near in ((["prnue"], "prune"), (["benchmark", "raed"], "read"), (["prune", "--device", "cud"], "cuda")):
        with pytest.raises(SystemExit, match="2"):
            main(argv)
        assert f"(did you mean {near}?)" in capsys.readouterr().err


def test_the_current_folder_comes_last_on_the_path_of_the_console_script(monkeypatch, tmp_path, by_name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/a")  # and the path as it is now again behind the test
    before = [*sys.path]
    for _ in range(2):
        import_from_here()
    assert sys.path == [*before, str(tmp_path)]


def completions(line: str, tmp_path: Path) -> list[str]:
    """What a shell gets that has ``line`` before its cursor: argcomplete's protocol, without a shell."""
    file = tmp_path / "completions"
    environment = {
        **os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line.encode())), "COMP_TYPE": "9",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(file), "_ARGCOMPLETE_IFS": "\n", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    code = "import sys; sys.argv = ['gstep-cache']; from jobs.__main__ import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, check=True)
    return [word.strip() for word in file.read_text().split("\n")]


def test_a_shell_completes_commands_flags_and_choices(tmp_path):
    assert set(COMMANDS) <= set(completions("gstep-cache ", tmp_path))
    assert completions("gstep-cache pru", tmp_path) == ["prune"]
    assert completions("gstep-cache prune --retention", tmp_path) == ["--retention-ratio"]
    assert completions("gstep-cache prune --token-codec int", tmp_path) == ["int8", "int4"]
    assert "selection" in completions("gstep-cache benchmark ", tmp_path)
