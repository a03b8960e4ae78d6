"""Tools that measurements share: machine, progress lines, tables, timing in turns, and CPU and memory of processes."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from rich.table import Table

from pipeline.console import CleanConsole

T = TypeVar("T")
_WORDS = {"", "method", "tokens of", "way"}  # titles of columns without numbers
MAIN, OTHER = "main process", "other of Ray"
# Part of a command line -> kind of process; the first match counts. Ray's workers have the names of their actors.
KINDS = {
    "(Decoder)": "decode actor",
    "(Encoder)": "encode actor",
    "ray::Writer": "write actor",
    ":Writer.": "write actor",
    "ray::Heartbeats": "heartbeat actor",
    "multiprocessing.": "decode child",
    "/raylet/raylet ": "raylet",
    "/gcs/gcs_server ": "gcs",
    '"plain loop"': "DataLoader worker",
}
_TICKS = os.sysconf("SC_CLK_TCK")


def machine(device: str = "cpu") -> dict[str, str | int]:
    """Return the processor, threads and torch version, JSON-able."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else _read_cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def machine_line(device: str = "cpu") -> str:
    """Describe the machine in a line: "AMD EPYC, 1 thread, torch 2.13.0"; a GPU has no threads to name."""
    about = machine(device)
    threads = "" if device.startswith("cuda") else f", {about['threads']} thread{'s' * (about['threads'] != 1)}"
    return f"{about['processor']}{threads}, torch {str(about['torch']).partition('+')[0]}"


def _read_cpu_name() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux
        return platform.processor() or platform.machine()


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    CleanConsole(stderr=True).print(line, style="dim", markup=False, highlight=False)


def figure_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
    """Make a table of figures: columns whose titles are in _WORDS are aligned left, all other columns right."""
    table = Table(title=title, title_justify="left", show_edge=False, caption=caption or None, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def existing_folder(text: str) -> Path:
    """Parse the path of an existing folder, as a flag's type."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def seconds_of(work: Callable[[], T]) -> tuple[float, T]:
    """Run ``work`` and return its wall seconds and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def medians_in_turn(forms: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, tuple[float, T]]:
    """Run all forms ``repeats`` times in turn; return each form's (median seconds, last result) by its name.

    Turns spread a disturbance of the machine over all forms.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    results: dict[str, T] = {}
    for _ in range(repeats):
        for name, work in forms.items():
            elapsed_s, results[name] = seconds_of(work)
            seconds[name].append(elapsed_s)
    return {name: (median(seconds[name]), result) for name, result in results.items()}


def kind_of(command: str) -> str:
    """Look up the kind of a process by its command line, such as "decode actor"."""
    return next((kind for part, kind in KINDS.items() if part in command), OTHER)


class ProcessTree:
    """A process and its descendants, orphans included; call ``look`` often, or it misses processes that end between.

    Attributes:
        peak_mb: the maximum over looks of the memory of all processes together, in MB (10^6 bytes): the sum of
            proportional set sizes (PSS), in which shared pages, Ray's object store among them, count once.
    """

    def __init__(self, root: int) -> None:
        self.peak_mb = 0.0
        self._kinds = {root: MAIN}
        self._cpu_s: dict[int, float] = {}

    def look(self, *, memory: bool = False) -> None:
        """Record the CPU seconds of each living process.

        With ``memory`` it also raises ``peak_mb`` to the memory of now, which takes some ms a process.
        """
        cpu_s_by_pid = self._read_cpu_s()
        for pid, seconds in cpu_s_by_pid.items():
            self._cpu_s[pid] = seconds
            if self._kinds.get(pid, OTHER) == OTHER:  # Ray's workers get their names late, and lose them in the end
                self._kinds[pid] = kind_of(_read(pid, "cmdline"))
        if memory:
            self.peak_mb = max(self.peak_mb, sum(map(_read_pss, cpu_s_by_pid)) / 1e6)

    def cpu_s(self) -> dict[str, float]:
        """Sum the recorded CPU seconds by kind of process, ended processes included."""
        seconds: dict[str, float] = defaultdict(float)
        for pid, seconds_of_process in self._cpu_s.items():
            seconds[self._kinds[pid]] += seconds_of_process
        return dict(seconds)

    def end(self) -> None:
        """Kill the running processes of the tree."""
        for pid in self._read_cpu_s():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read_cpu_s(self) -> dict[int, float]:
        """Read the CPU seconds of the tree's running processes, process id -> seconds."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        stats = {pid: fields for pid in pids if (fields := _read(pid, "stat").rpartition(")")[2].split())}
        tree = stats.keys() & self._kinds.keys()
        while children := {pid for pid, fields in stats.items() if int(fields[1]) in tree} - tree:
            tree |= children
        return {pid: (int(stats[pid][11]) + int(stats[pid][12])) / _TICKS for pid in tree}


def _read_pss(pid: int) -> int:
    """Read the proportional set size in bytes; 0 for an ended process."""
    sizes = (line.split()[1] for line in _read(pid, "smaps_rollup").splitlines() if line.startswith("Pss:"))
    return int(next(sizes, 0)) << 10


def _read(pid: int, name: str) -> str:
    """Read a file of a process in /proc; "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""
