"""What all measurements share: the machine that they ran on, lines of progress, tables, and times of work in turns."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
_WORDS = {"", "method", "tokens of", "way"}  # titles of columns that hold no numbers


def machine(device: str = "cpu") -> dict[str, str | int]:
    """Return the processor, threads and torch version, JSON-able."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.startswith("cuda") else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def machine_line(device: str = "cpu") -> str:
    """Describe the machine in a line: "AMD EPYC, 1 thread, torch 2.13.0"; a GPU has no threads to name."""
    about = machine(device)
    threads = "" if device.startswith("cuda") else f", {about['threads']} thread{'s' * (about['threads'] != 1)}"
    return f"{about['processor']}{threads}, torch {str(about['torch']).partition('+')[0]}"


def _cpu_name() -> str:
    """Return the processor's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux
        return platform.processor() or platform.machine()


def say(line: str) -> None:
    """Print a line of progress on stderr."""
    Console(stderr=True).print(line, style="dim", markup=False, highlight=False)


def figure_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Table:
    """Lay out figures: numbers stand right, words left."""
    table = Table(title=title, title_justify="left", show_edge=False, caption=caption or None, caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    for row in rows:
        table.add_row(*row)
    return table


def folder(text: str) -> Path:
    """Check that a folder exists, as a flag's type."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def seconds_of(work: Callable[[], T]) -> tuple[float, T]:
    """Run ``work`` and return its wall seconds and its result."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def medians_in_turn(forms: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, tuple[float, T]]:
    """Run all forms in turn, again and again; return the median seconds and the last result of each, by its name.

    A disturbance of the machine falls on all of them so.
    """
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    results: dict[str, T] = {}
    for _ in range(repeats):
        for name, work in forms.items():
            took, results[name] = seconds_of(work)
            seconds[name].append(took)
    return {name: (median(seconds[name]), result) for name, result in results.items()}
