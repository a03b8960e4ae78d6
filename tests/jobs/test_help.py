"""``--help``: complete by the tables that it is made from, and short enough to be read."""

import re
from importlib import import_module

import pytest

from gstep.methods import METHODS, VIDEO_METHODS
from jobs import doctor, evaluate, generate, inspect, prune, recode, reprune, serve
from jobs.__main__ import COMMANDS


def help_of(command, flag, capsys):
    """What the help says of one flag, and the paragraph of the next flag's beginning."""
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help-all"])
    options = capsys.readouterr().out.split("\noptions:\n")[1]
    return " ".join(options.split(f"\n  {flag} ")[1].split("\n  --")[0].split())


@pytest.mark.parametrize(("command", "methods"), [(prune, VIDEO_METHODS), (generate, METHODS)])
def test_every_method_of_the_table_is_listed_where_it_runs(command, methods, capsys):
    said = help_of(command, "--pruner", capsys)
    assert ", ".join(methods) in said
    assert not [name for name in METHODS.keys() - methods.keys() if name in said.replace(",", "").split()]


@pytest.mark.parametrize("command", [doctor, prune, generate, evaluate, serve, inspect])
def test_help_is_a_screen_of_the_usual_options_and_leads_to_all(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 60 and "--help-all" in short and "--s3-endpoint" not in short
    assert all(
        f"--{name.replace('_', '-')}" in short or name.upper() in short
        for name in command.USUAL
        if name not in ("caches", "place", "item")
    )
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help-all"])
    assert "--s3-endpoint" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_no_help_lists_more_options_than_a_reader_takes_in(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        import_module(COMMANDS[name][0]).main(["--help"])
    assert len(re.findall(r"^  -", capsys.readouterr().out, re.MULTILINE)) <= 25


@pytest.mark.parametrize("command", [generate, evaluate, recode, reprune])
def test_the_flag_about_your_own_method_is_no_flag_of_s3(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help-all" if hasattr(command, "USUAL") else "--help"])
    sections = capsys.readouterr().out.split("\n\n")
    (titled,) = (section for section in sections if "\n  --on-changed " in section)
    assert titled.startswith("your own method:") and "--s3-endpoint" not in titled
