"""Check this machine or cluster before a run: each check is ok, slow, wrong or unknown, with a remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gstep.lazy import pause_garbage_collector
from jobs.command import Parser, find_overridden_sampling, run_command
from jobs.frame.json_document import CommandResult
from pipeline.errors import UsageError
from pipeline.prune.config import PruneConfig

if TYPE_CHECKING:
    from pipeline.doctor.finding import Finding

EPILOG = """\
Pass the flags of your jobs.prune command: its model, frames, videos and output are checked. jobs.doctor decodes a few
of the videos. It writes a file to the output, and removes it again. The checks take a minute or two.

Exit code: 0 nothing is wrong; 1 a run would fail or be wrong, or Ray did not start; 2 refused; 130 interrupted.
"""
#: The options that --help shows.
USUAL = (
    *("videos", "out", "model", "pruner", "retention_ratio", "num_frames", "fps", "max_frames", "decoder", "device"),
    "video_root",
)
_COLOURS = {"ok": "green", "slow": "yellow", "wrong": "bold red", "unknown": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    """Check the machine or cluster for a run of jobs.prune; return the exit code."""
    parser = Parser("python -m jobs.doctor", description=__doc__, epilog=EPILOG)
    return run_command(parser, PruneConfig, _check, argv, find_overridden_sampling, USUAL, "interrupted")


def _check(config: PruneConfig, console: Console) -> CommandResult:
    """Check the settings and machines of a run, and print each finding; return all findings and their table.

    The exit code is 1 if any finding is "wrong".

    Raises:
        UsageError: ``--plan`` or ``--dry-run`` is set.
    """
    with pause_garbage_collector():
        from pipeline.doctor.doctor import Doctor  # noqa: PLC0415 - --help needs neither torch nor Ray

    if config.plan or config.dry_run:
        raise UsageError("--plan and --dry-run are for jobs.prune: leave them out")
    findings = []
    say = partial(console.print, style="dim", markup=False)  # an IPv6 address has brackets
    for finding in Doctor(config, say).iter_findings():
        findings.append(finding)
        console.print(_format_finding(finding))
    code = 1 if any(finding.state == "wrong" for finding in findings) else 0
    return CommandResult(code, findings, [_make_table(findings)])


def _format_finding(finding: Finding) -> Text:
    """Format a finding as a line: its state in color, and its name."""
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
