"""``gstep-cache``: every command by its name, versions, ``--help``, and a folder whose files hide this package."""

import re
import shutil
import subprocess
import sys
from importlib import import_module

import pytest

from gstep.methods import METHODS, VIDEO_METHODS
from jobs import doctor, evaluate, generate, inspect, prune, recode, reprune, serve
from jobs.__main__ import COMMANDS, main
from jobs.command import VERSIONED_PACKAGES
from tests.builders.runs import run_here
from tests.interpreter import run_python
from tests.paths import ROOT, python_path


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
