"""``gstep-cache`` and each command by its name, flags over a file, and errors as exit codes with a line each."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module

import pytest
from rich.console import Console

from gstep.methods import METHODS, VIDEO_METHODS
from jobs import command, doctor, evaluate, generate, inspect, prune, recode, reprune, serve
from jobs.__main__ import COMMANDS, main
from jobs.command import VERSIONED_PACKAGES, LogConsole, run_to_exit_code
from jobs.frame.json_document import CommandResult
from pipeline.errors import CorruptShard, RunFailed, UsageError
from pipeline.prune.config import PruneConfig
from tests.builders.runs import run_here
from tests.interpreter import run_python
from tests.paths import ROOT, python_path


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


PROGRAM = """
import atexit, os, signal, sys
from rich.console import Console
from jobs.command import run_to_exit_code
from jobs.frame.json_document import CommandResult, print_lines

"""
TABLE = f"""{PROGRAM}
sys.exit(run_to_exit_code(lambda: CommandResult(0, {{}}, ["a table"], "failed: 3 videos"), Console(stderr=True)))
"""
LINES = f"""{PROGRAM}
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
    program = TABLE.replace("a table", "\u89c6.mp4")
    done = run_python("-c", program, env={**os.environ, "PYTHONIOENCODING": "ascii"})
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


LEAVING = f"""{PROGRAM}
def work():
    sys.stdout.write("result")
    return 1

def leave():
    os.kill(os.getpid(), signal.SIGINT)
    print("unreachable")

atexit.register(leave)
sys.argv[0] = "NAME"
sys.exit(run_to_exit_code(work, Console(stderr=True)))
"""


def test_ctrl_c_once_the_work_has_ended_leaves_at_once_with_its_exit_code():
    left = run_python("-c", LEAVING.replace("NAME", "/bin/gstep-cache"))
    assert (left.returncode, left.stdout, left.stderr) == (1, "result", "")
    program = run_python("-c", LEAVING.replace("NAME", "mine.py"))  # a program of the user's goes on
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


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_runs_by_its_name_and_says_the_versions(name, capsys):
    for argv in ([name, "--version"], [name, "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(argv)
    said = capsys.readouterr().out
    assert len(re.findall(r"^  -", said, re.MULTILINE)) <= 25  # options: no more than a reader takes in
    lines = dict(line.split(" ", 1) for line in said.splitlines()[: len(VERSIONED_PACKAGES)])
    assert tuple(lines) == VERSIONED_PACKAGES and all(version[0].isdigit() for version in lines.values())
    assert "--version" in said and callable(import_module(COMMANDS[name][0]).main)


def test_the_name_alone_and_its_help_list_every_command(capsys):
    assert main([]) == 0
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(said.count(f"\n  {name:10} {what}") == 2 for name, (_, what) in COMMANDS.items())


def in_folder(folder, *argv: str) -> subprocess.CompletedProcess[str]:
    return run_python(*argv, cwd=folder, env={"PYTHONPATH": python_path(ROOT)})


def test_only_the_command_that_is_named_is_imported_and_the_current_folder_comes_last(tmp_path):
    code = (
        "import sys\nfrom jobs.__main__ import main\n"
        "sys.path = sys.path[1:]  # as for a console script\n"
        "try: main(['verify', '--version'])\nexcept SystemExit: pass\n"
        "print(sys.path[-1])\n"
        "print(*sorted(name for name in sys.modules if name.split('.')[0] in {'jobs', 'torch', 'ray', 'pyarrow'}))"
    )
    done = in_folder(tmp_path, "-c", code)
    *_, last, modules = done.stdout.splitlines()
    loaded = modules.split()
    assert last == str(tmp_path)
    assert "jobs.verify" in loaded and "jobs.prune" not in loaded
    assert {name.split(".")[0] for name in loaded} == {"jobs"}


@pytest.mark.parametrize("name", [*COMMANDS, ""])
def test_a_python_without_the_packages_is_told_of_the_environment_that_has_them(name):
    module = COMMANDS[name][0].removesuffix(".__main__") if name else "jobs"
    done = run_python("-S", "-m", module, "--help", env={})  # -S: no packages but Python's own
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        f"error: {sys.executable} is not the environment of gstep-cache: it lacks rich, numpy"
    )


def test_an_environment_that_is_made_already_is_named(tmp_path):
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("__pycache__"))
    for made in False, True:
        if made:
            (tmp_path / ".venv").mkdir()
        done = run_python("-S", "-m", "jobs.inspect", "cache", cwd=tmp_path, env={})
        assert (f"source {tmp_path}/.venv/bin/activate" in done.stderr) == made
        assert (f"cd {tmp_path} && python3 -m venv .venv && .venv/bin/pip install -e" in done.stderr) != made


@pytest.mark.parametrize("hiding", ["pipeline.py", "pipeline/__init__.py"])
def test_a_file_that_hides_the_package_is_named_in_one_line(tmp_path, hiding):
    file = tmp_path / hiding
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('not ours')")
    done = in_folder(tmp_path, "-m", "jobs.prune", "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"error: {file} hides the package") and "gstep-cache" in done.stderr
    if hiding == "pipeline.py":  # as the console script, which has not the current folder on its path
        assert in_folder(tmp_path, "-P", "-m", "jobs", "prune", "--help").returncode == 0


def help_of(command, flag: str = "--help") -> str:
    done = run_here(command, [flag])
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize(("command", "methods"), [(prune, VIDEO_METHODS), (generate, METHODS)])
def test_every_method_of_the_table_is_listed_where_it_runs(command, methods):
    options = help_of(command, "--help-all").split("\noptions:\n")[1]
    said = " ".join(options.split("\n  --pruner ")[1].split("\n  --")[0].split())
    assert ", ".join(methods) in said
    assert not [name for name in METHODS.keys() - methods.keys() if name in said.replace(",", "").split()]


@pytest.mark.parametrize("command", [doctor, prune, generate, evaluate, serve, inspect])
def test_help_is_a_screen_of_the_usual_options_and_leads_to_all(command):
    short = help_of(command)
    assert len(short.splitlines()) <= 60 and "--help-all" in short and "--s3-endpoint" not in short
    usual = set(command.USUAL) - {"caches", "place", "item"}
    assert all(f"--{name.replace('_', '-')}" in short or name.upper() in short for name in usual)
    assert "--s3-endpoint" in help_of(command, "--help-all")


@pytest.mark.parametrize("command", [generate, evaluate, recode, reprune])
def test_the_flag_about_your_own_method_is_no_flag_of_s3(command):
    sections = help_of(command, "--help-all" if hasattr(command, "USUAL") else "--help").split("\n\n")
    (titled,) = (section for section in sections if "\n  --on-changed " in section)
    assert titled.startswith("your own method:") and "--s3-endpoint" not in titled
