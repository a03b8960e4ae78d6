"""What texts of other people's files reach the terminal as: no control characters, no markup, no line of their own."""

import io
import json
import os

import pytest
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jobs import inspect, verify
from jobs.command import LogConsole, run_to_exit_code
from jobs.frame.json_document import CommandResult
from pipeline.console import CleanConsole, clean, clean_line
from pipeline.errors import RunFailed, UsageError, VideoFault
from pipeline.runner.progress import CallbackConsole, LineReporter
from pipeline.runner.run_record import as_text
from pipeline.runner.stages import Wording
from tests.builders.caches import encoded, encoded_failure, random_tokens, write_header, write_shard

ESCAPE = "\x1b[2J\x9b1m\x1b]0;title\x1b\\"  # without those that Rich itself drops
CONTROLS = "".join(map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F)))
CONTROLS += "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))) + "\ud800\udfff"
HOSTILE = f"a{ESCAPE}\u202e\n2026-01-01 00:00:00 10/10 videos, 0 failed[red][/red][/x]:warning:[link=x]"
SHOWN = " ".join(clean(HOSTILE).split())


def is_clean(text: str) -> bool:
    return not set(text) & set(CONTROLS)


def printed(*things, **options) -> str:
    file = io.StringIO()
    CleanConsole(file=file, width=400).print(*things, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "thing",
    [
        HOSTILE,
        Text(HOSTILE.replace("\n", " ")),
        Text.assemble(("bold ", "bold"), (HOSTILE.replace("\n", " "), "red")),
        Group(HOSTILE, Padding(HOSTILE, 1)),
        Group(Padding(Text(HOSTILE), (0, 1))),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_whatever_is_printed_is_clean(thing):
    text = printed(thing, soft_wrap=True)
    assert is_clean(text) and SHOWN in " ".join(text.split())
    assert not any(line.startswith("2026") for line in text.splitlines())


def test_each_control_character_is_replaced_and_letters_stay():
    assert printed(CONTROLS, soft_wrap=True) == " " * len(CONTROLS) + "\n"
    kept = "naïve 日本語 עברית \u200d\u200c\u00a0\u3000 👩\u200d🔬"
    assert clean(kept) == kept


def test_cells_titles_and_columns_of_tables_are_clean():
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    assert is_clean(printed(table)) and printed(table).count("[red][/red][/x]:warning:") == 5
    assert is_clean(as_text(table)) and "[red]" in as_text(table)


def test_styles_stay_where_they_are():
    file = io.StringIO()
    console = CleanConsole(file=file, width=80, force_terminal=True, color_system="standard")
    console.print(Text.assemble("\x1b\x1b", ("red", "red")))
    assert file.getvalue() == "  \x1b[31mred\x1b[0m\n"


def test_errors_and_lines_of_a_command_are_clean(capsys):
    def fail():
        raise RunFailed(HOSTILE)

    def refuse():
        raise UsageError(f"these differ:\n  {ESCAPE}")

    assert run_to_exit_code(fail, LogConsole(), failures=(RunFailed,)) == 1
    assert run_to_exit_code(refuse, LogConsole()) == 2
    assert run_to_exit_code(lambda: CommandResult(0, {}, [HOSTILE, ""], HOSTILE), LogConsole()) == 0
    captured = capsys.readouterr()
    assert is_clean(captured.err) and is_clean(captured.out) and captured.out.splitlines() == [clean_line(HOSTILE), ""]
    failure, refusal, indented, after = captured.err.splitlines()
    assert clean_line(HOSTILE) in failure and clean_line(HOSTILE) in after
    assert (refusal, indented) == ("error: these differ:", f"  {clean(ESCAPE)}")  # the message's own newline


def test_lines_of_a_run_are_clean(capsys):
    notes = []
    CallbackConsole(notes.append).print(HOSTILE)
    assert notes[0].note == clean_line(HOSTILE)
    console = LogConsole()
    with LineReporter(console, 1, 60, Wording("pruning", HOSTILE, {}, "")):
        console.print(HOSTILE, style="dim")
    assert is_clean(capsys.readouterr().err)


@pytest.fixture
def hostile_cache(tmp_path):
    """A cache whose texts all try to leave their place: ids, paths, decoder, errors, method, runs."""
    store = write_header(tmp_path / "c", hidden_size=8)
    columns = {"backend": f"[bold]x[/]{ESCAPE}", "backend_version": "[/red]", "uri": f"/{HOSTILE}", "codec": HOSTILE}
    columns |= dict.fromkeys(("source_width", "source_height", "duration_s", "fps"), 1)
    columns["manifest"] = json.dumps({HOSTILE: HOSTILE})
    item = encoded(HOSTILE, random_tokens(0, (2, 4, 8)), 0.25, "gstep", **columns)
    write_shard(store, "run", item, encoded_failure(f"{HOSTILE}2", VideoFault("corrupt", HOSTILE)))
    return store


@pytest.mark.parametrize(
    ("command", "flags", "code"),
    [
        *((inspect, flags, 0) for flags in ([], [HOSTILE], [f"{HOSTILE}2"], ["--failed"])),
        *((inspect, [*flags, "--json"], 0) for flags in ([], [HOSTILE], ["--failed"])),
        (inspect, [HOSTILE[:-4]], 2),  # which suggests ids of the cache
        (verify, [], 0),
        (verify, ["--json"], 0),
    ],
)
def test_a_hostile_cache_is_shown_clean(hostile_cache, capsysbinary, command, flags, code):
    assert command.main([str(hostile_cache), *flags]) == code
    captured = capsysbinary.readouterr()
    for text in (captured.out.decode(), captured.err.decode()):
        assert is_clean(text.replace("\t", "")), text
        assert not any(line.lstrip().startswith("2026-01-01 00:00:00") for line in text.splitlines()), text
    if "--json" in flags:
        json.loads(captured.out)
    elif command is inspect and flags in ([], [HOSTILE]):
        assert b"[bold]x[/]" in captured.out  # no markup


def test_a_damaged_hostile_cache_is_reported_clean(hostile_cache, capsysbinary):
    (name,) = hostile_cache.names("tokens", ".parquet")
    os.truncate(hostile_cache.root / name, 1000)
    for flags in ([], ["--json"]):
        assert verify.main([str(hostile_cache), *flags]) == 1
        captured = capsysbinary.readouterr()
        assert is_clean(captured.out.decode()) and is_clean(captured.err.decode())
