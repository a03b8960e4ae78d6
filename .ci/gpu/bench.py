"""What all measurements share: sizes, inputs and the report."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


class Bench:
    """The settings of all measurements, and the report of their figures. Each measurement's process has a copy.

    Attributes:
        work: a folder for models, clips and caches.
        rehearse: True to run on a CPU at toy sizes.
        name: the measurement of this process; "" in the main process.
    """

    def __init__(self, folder: Path, work: Path, rehearse: bool) -> None:
        """Choose the sizes; ``folder`` is for the report and the logs."""
        self.work = work
        self.rehearse = rehearse
        self.name = ""
        self.device = "cpu" if rehearse else "cuda"
        self.frames, self.repeats = (4, 1) if rehearse else (32, 5)
        self.size, self.clip_s = ((320, 180), 1.0) if rehearse else ((1280, 720), 10.0)
        self.clips, self.copies = (4, 1) if rehearse else (48, 8)
        self._folder = folder
        self._out = sys.stdout

    def begin(self, name: str) -> None:
        """Set the measurement of this process, and redirect all output except figures to the measurement's log."""
        self.name = name
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        with self._log(name).open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def read_last_line(self, name: str) -> str:
        """Return up to 200 characters of the last line of a measurement's log, or "no output"."""
        return (self._log(name).read_text(errors="replace").strip().splitlines() or ["no output"])[-1][:200]

    def say(self, label: str, value: object, unit: str = "") -> None:
        """Write a figure as one line to stdout and report.txt; floats get four significant digits."""
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        line = " | ".join(filter(None, (self.name, label, f"{text} {unit}".strip())))
        print(line, file=self._out, flush=True)
        with (self._folder / "report.txt").open("a", encoding="utf-8") as report:
            print(line, file=report)

    def wait_for(self, name: str) -> Path:
        """Wait without a timeout until an input exists in the folder ``work``, and return its path."""
        while not (self.work / name).exists():
            time.sleep(0.1)
        return self.work / name


def run_command(main: Callable[[Sequence[str]], int], *argv: object) -> dict[str, Any]:
    """Run a command of this package in this process with ``--json``, and return its JSON document.

    Raises:
        RuntimeError: its exit code is not 0.
    """
    with redirect_stdout(io.StringIO()) as stdout:
        code = main([*map(str, argv), "--json"])
    if code != 0:
        raise RuntimeError(f"exit code {code}: {' '.join(stdout.getvalue().split())[-500:]}")
    return json.loads(stdout.getvalue())
