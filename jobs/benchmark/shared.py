"""The harness of all measurements: flags, ways that run in turn, the result, and CPU and memory of processes."""

from __future__ import annotations

import argparse
import os
import platform
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import active_children
from pathlib import Path
from statistics import median
from tempfile import TemporaryFile
from typing import Any, TypeVar

import torch
from rich.table import Table

from jobs.command import count
from jobs.frame.json_document import CommandResult
from pipeline.console import CleanConsole
from pipeline.errors import RunFailed

K = TypeVar("K")
T = TypeVar("T")
_WORDS = {"", "method", "tokens of", "way"}  # titles of columns of text
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
_LOOK_S = 0.25  # seconds between looks at a child
_LOOKS_PER_MEMORY = 8  # the first eight looks, and later each eighth, measure memory


def add_flag(
    parser: argparse.ArgumentParser,
    name: str,
    default: Any,
    help_text: str,
    metavar: str | None = None,
    kind: Callable[[str], Any] | None = None,
    choices: Iterable[Any] | None = None,
) -> None:
    """Add a flag that takes one value, or one or more values if its default is a list; its help ends with the default.

    ``kind`` parses a value; by default these are whole numbers from 1, or texts if the default has a text.
    """
    values = default if isinstance(default, list) else [] if default is None else [default]
    parser.add_argument(
        name,
        default=default,
        type=kind or (str if any(isinstance(value, str) for value in values) else count),
        nargs="+" if isinstance(default, list) else None,
        metavar=metavar,
        choices=choices,
        help=help_text + f" [{' '.join(map(str, values))}]" * bool(values),
    )


def describe_machine(device: str = "cpu") -> dict[str, str | int]:
    """Return the name of the processor (the GPU's for a CUDA device), torch's threads and torch's version."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else _read_cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def format_machine(device: str = "cpu") -> str:
    """Describe the machine in one line, such as "AMD EPYC, 1 thread, torch 2.13.0"; a GPU without threads."""
    about = describe_machine(device)
    threads = "" if device.startswith("cuda") else f", {about['threads']} thread{'s' * (about['threads'] != 1)}"
    return f"{about['processor']}{threads}, torch {str(about['torch']).partition('+')[0]}"


def _read_cpu_name() -> str:
    """Return the processor's model name from /proc/cpuinfo, or what the platform calls it elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux
        return platform.processor() or platform.machine()


def say(line: str) -> None:
    """Print a dim line of progress on stderr."""
    CleanConsole(stderr=True).print(line, style="dim", markup=False, highlight=False)


def make_figure_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
    """Make a table of figures; columns whose titles are in _WORDS are aligned left, all others right."""
    table = Table(title=title, title_justify="left", show_edge=False, caption=caption or None, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def parse_existing_folder(text: str) -> Path:
    """Parse the path of an existing folder for argparse; raise ArgumentTypeError if there is none."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def format_figure(value: float | None) -> str:
    """Format a number with three decimals below 0.1, two below 10, and otherwise one; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.{3 if abs(value) < 0.1 else 2 if abs(value) < 10 else 1}f}"


def format_figure_rows(columns: Iterable[Mapping[str, float | None]]) -> list[tuple[str, ...]]:
    """Return table rows with one row per figure, its name first, and one cell per item; "-" where an item lacks it."""
    items = list(columns)
    names = dict.fromkeys(name for figures in items for name in figures)
    return [(name, *(format_figure(figures.get(name)) for figures in items)) for name in names]


def make_result(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    note: str = "",
    *,
    device: str = "cpu",
    **record: object,
) -> CommandResult:
    """Return the result of a measurement: a table with ``note`` below it, and a JSON document with ``record``.

    Both name the machine.
    """
    table = make_figure_table(f"{title}, on {format_machine(device)}", columns, rows, note)
    return CommandResult(0, {"machine": describe_machine(device), **record}, [table])


def time_call(work: Callable[[], T]) -> tuple[float, T]:
    """Call ``work``, and return its wall seconds and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def time_work(work: Callable[[], T], device: str) -> tuple[T, float, float | None]:
    """Call ``work``; return its result, its wall seconds until the device has finished, and the peak memory in bytes.

    The peak is torch's on a GPU; on a CPU it is this process's, or None if the system does not tell.
    """
    if device.startswith("cuda"):

        def finish() -> T:
            result = work()
            torch.cuda.synchronize(device)
            return result

        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        seconds, value = time_call(finish)
        return value, seconds, torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # Linux alone
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    seconds, value = time_call(work)
    with suppress(OSError):
        peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        return value, seconds, None if peak is None else 1024.0 * int(peak[1])
    return value, seconds, None


def find_known_maximum(*values: float | None) -> float | None:
    """Return the largest of the values that are not None; None if all are."""
    return max((value for value in values if value is not None), default=None)


@dataclass
class Turns:
    """The runs of one way.

    Attributes:
        cpu_s: CPU seconds of each run, of this process and of its multiprocessing children that exist throughout.
        result: the result of the last run.
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    result: Any = None

    @property
    def median_s(self) -> float:
        """The median of the wall seconds."""
        return median(self.wall_s)


def run_in_turn(ways: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, Turns]:
    """Run all ways once per round, ``repeats`` rounds, so that a disturbance of the machine affects all of them.

    Returns:
        For each way, the wall and CPU seconds of every round, and the result of the last round.
    """
    turns = {name: Turns() for name in ways}
    for name, work in [*ways.items()] * repeats:
        cpu_start_s = _read_cpu_seconds()
        elapsed_s, turns[name].result = time_call(work)
        turns[name].wall_s.append(elapsed_s)
        turns[name].cpu_s.append(_read_cpu_seconds() - cpu_start_s)
    return turns


def _read_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its living multiprocessing children, with all threads."""
    tasks = [
        path.relative_to("/proc") for child in active_children() for path in Path(f"/proc/{child.pid}").glob("task/*")
    ]
    stats = [_read(task, "schedstat").split() for task in tasks]
    return time.process_time() + sum(int(fields[0]) for fields in stats if fields) / 1e9


def classify_process(command: str) -> str:
    """Return the kind of a process by its command line, such as "decode actor"; OTHER if no pattern matches."""
    return next((kind for part, kind in KINDS.items() if part in command), OTHER)


class ProcessTree:
    """A process and its descendants, including those whose parent has ended, as seen by ``look``.

    A process that starts and ends between two looks is missed.

    Attributes:
        peak_mb: the maximum over looks of the memory of all processes together, in MB (10^6 bytes), in which shared
            pages, such as Ray's object store, count once (PSS).
    """

    def __init__(self, root: int) -> None:
        self.peak_mb = 0.0
        self._kinds = {root: MAIN}
        self._cpu_s: dict[int, float] = {}

    def look(self, *, memory: bool = False) -> None:
        """Record the CPU seconds and the kind of each living process; ``memory`` also updates ``peak_mb``."""
        cpu_s_by_pid = self._read_cpu_s()
        for pid, seconds in cpu_s_by_pid.items():
            self._cpu_s[pid] = seconds
            if self._kinds.get(pid, OTHER) == OTHER:  # Ray's workers get their names late, and lose them in the end
                self._kinds[pid] = classify_process(_read(pid, "cmdline"))
        if memory:
            self.peak_mb = max(self.peak_mb, sum(map(_read_pss, cpu_s_by_pid)) / 1e6)

    def cpu_s(self) -> dict[str, float]:
        """Return the recorded CPU seconds by kind of process, including ended processes."""
        seconds: dict[str, float] = defaultdict(float)
        for pid, seconds_of_process in self._cpu_s.items():
            seconds[self._kinds[pid]] += seconds_of_process
        return dict(seconds)

    def end(self) -> None:
        """Kill the running processes of the tree, including its root, with SIGKILL."""
        for pid in self._read_cpu_s():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _read_cpu_s(self) -> dict[int, float]:
        """Read the CPU seconds of each running process of the tree: process id -> seconds."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        stats = {pid: fields for pid in pids if (fields := _read(pid, "stat").rpartition(")")[2].split())}
        tree = stats.keys() & self._kinds.keys()
        while children := {pid for pid, fields in stats.items() if int(fields[1]) in tree} - tree:
            tree |= children
        return {pid: (int(stats[pid][11]) + int(stats[pid][12])) / _TICKS for pid in tree}


def run_watched(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[str, ProcessTree]:
    """Run a command in its own session; return its stdout and the figures of its processes.

    Processes that it leaves behind are killed.

    Raises:
        RunFailed: the command fails; the message is the last line that it wrote to stderr.
    """
    with TemporaryFile("w+", errors="replace") as stdout, TemporaryFile("w+", errors="replace") as stderr:
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, start_new_session=True)
        tree = ProcessTree(child.pid)
        looks = 0
        try:
            while child.poll() is None:
                tree.look(
                    memory=looks < _LOOKS_PER_MEMORY or looks % _LOOKS_PER_MEMORY == 0
                )  # so that short runs are measured too
                looks += 1
                time.sleep(_LOOK_S)
        finally:
            tree.end()
            child.wait()
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read())
    if child.returncode:
        raise RunFailed((texts[1].strip().splitlines() or ["it wrote nothing to stderr"])[-1])
    return texts[0], tree


def _read_pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes; 0 if it has ended."""
    sizes = (line.split()[1] for line in _read(pid, "smaps_rollup").splitlines() if line.startswith("Pss:"))
    return int(next(sizes, 0)) << 10


def _read(process: int | Path, name: str) -> str:
    """Read a file of a process in /proc, or of a task below it; "" if that fails. NUL bytes become blanks."""
    try:
        return Path("/proc", str(process), name).read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""
