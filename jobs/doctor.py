"""Check this machine or cluster before a run: each check is ok, slow, wrong or unknown, with a remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from gstep.lazy import pause_garbage_collector
from jobs.command import LogConsole, Parser, run_to_exit_code, wide_console
from jobs.frame.flags import add_flags, from_flags
from jobs.frame.json_document import CommandResult, add_json
from pipeline.errors import RunFailed, UsageError
from pipeline.prune.config import PruneConfig

if TYPE_CHECKING:
    from pipeline.doctor.finding import Finding

EPILOG = """\
Pass the flags of your jobs.prune command: its model, frames, videos (a few are decoded) and output are checked. A file
is written to the output and removed again. It takes a minute or two.

Exit code: 0 nothing is wrong; 1 a run would fail or be wrong, or Ray did not start; 2 refused; 130 interrupted.
"""
_COLOURS = {"ok": "green", "slow": "yellow", "wrong": "bold red", "unknown": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine or cluster for a run of jobs.prune; return the exit code."""
    parser = Parser("python -m jobs.doctor", description=__doc__, epilog=EPILOG)
    add_json(parser)
    add_flags(parser, PruneConfig)
    arguments = parser.parse_args(argv)
    console = LogConsole()

    def check_and_print() -> CommandResult:
        """Check the settings and machines of a run, print each finding, and return all findings.

        Prints a table, too, but not with ``--json``. The exit code is 1 if a finding is wrong. Raises UsageError for
        ``--plan`` and ``--dry-run``.
        """
        with pause_garbage_collector():
            from pipeline.doctor.doctor import Doctor  # noqa: PLC0415 - --help needs neither torch nor Ray

        findings, config = [], from_flags(PruneConfig, arguments)
        if config.plan or config.dry_run:
            raise UsageError("--plan and --dry-run are for jobs.prune: leave them out")
        say = partial(console.print, style="dim", markup=False)  # an IPv6 address has brackets
        for finding in Doctor(config, say).findings():
            findings.append(finding)
            console.print(_format_finding(finding))
        if not arguments.json:
            wide_console().print(_make_table(findings))
        return CommandResult(1 if any(finding.state == "wrong" for finding in findings) else 0, findings)

    return run_to_exit_code(check_and_print, console, failures=(RunFailed,), document=arguments.json)


def _format_finding(finding: Finding) -> Text:
    """Format a finding as a line: its coloured state and its name."""
    return Text.assemble((f"{finding.state:8}", _COLOURS[finding.state]), finding.name)


def _make_table(findings: Iterable[Finding]) -> Table:
    """Make the table of the findings: state, name, explanation and remedy."""
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for title in ("", "what", "seen", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        state = Text(finding.state, _COLOURS[finding.state])
        table.add_row(state, Text(finding.name), Text(finding.says), Text(finding.remedy))
    return table


if __name__ == "__main__":
    sys.exit(main())
