"""Look at this machine or cluster before a run does: what is ok, slow or wrong, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gstep.lazy import pause_garbage_collector
from jobs.command import LogConsole, Parser, exit_code_of, wide_console
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import Done, add_json
from pipeline.errors import RunFailed, UsageError
from pipeline.prune.config import PruneConfig

if TYPE_CHECKING:
    from pipeline.doctor.finding import Finding

EPILOG = """\
The flags are those of jobs.prune, so that what is looked at is the run that you mean: its model, its frames, its
videos (of which a few are decoded) and its place, where a file is written and removed again. It takes a minute or two.

Exit code: 0 nothing is wrong; 1 a run would fail or be wrong, or Ray did not start; 2 refused; 130 interrupted.
"""
_COLOURS = {"ok": "green", "slow": "yellow", "wrong": "bold red", "unknown": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 where something is wrong, else 0."""
    parser = Parser("python -m jobs.doctor", description=__doc__, epilog=EPILOG)
    add_json(parser)
    add_flags(parser, PruneConfig)
    arguments = parser.parse_args(argv)
    console = LogConsole()

    def look() -> Done:
        with pause_garbage_collector():
            from pipeline.doctor.doctor import Doctor  # noqa: PLC0415 - --help needs neither torch nor Ray

        found, config = [], from_flags(PruneConfig, arguments)
        if config.plan or config.dry_run:
            raise UsageError("--plan and --dry-run are for jobs.prune: leave them out")
        for finding in Doctor(config, lambda line: console.print(line, style="dim")).findings():
            found.append(finding)
            console.print(_line(finding))
        if not arguments.json:
            wide_console().print(_page(found))
        return Done(1 if any(finding.state == "wrong" for finding in found) else 0, found)

    return exit_code_of(look, console, failed=(RunFailed,), document=arguments.json)


def _line(finding: Finding) -> Text:
    """Format a finding's coloured state and its name."""
    return Text.assemble((f"{finding.state:8}", _COLOURS[finding.state]), finding.name)


def _page(found: Iterable[Finding]) -> Table:
    """Lay out the findings in a table: state and name, what was found, and the remedy."""
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for title in ("", "what", "seen", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in found:
        state = Text(finding.state, _COLOURS[finding.state])
        table.add_row(state, Text(finding.name), Text(finding.says), Text(finding.remedy))
    return table


if __name__ == "__main__":
    sys.exit(main())
