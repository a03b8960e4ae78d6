"""Watch a process and all that it starts: CPU seconds by kind of process, and the memory of all together."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
MAIN, OTHER = "main process", "other of Ray"
# What a command line holds, the first that is found: Ray's workers are called by their actors.
KINDS = {
    "(Decoder)": "decode actor",
    "(Encoder)": "encode actor",
    "Writer": "write actor",
    "Heartbeats": "heartbeat actor",
    "multiprocessing.": "decode child",
    "/raylet/raylet ": "raylet",
    "/gcs/gcs_server ": "gcs",
    "pipeline.loop": "DataLoader worker",
}
_TICKS = os.sysconf("SC_CLK_TCK")


class _Seen(NamedTuple):
    """A process at one moment; the start tells it from a later one of the same number."""

    pid: int
    parent: int
    start: int
    cpu_s: float


def kind_of(command: str) -> str:
    """Return what a process is for, by its command line."""
    return next((kind for part, kind in KINDS.items() if part in command), OTHER)


class ProcessTree:
    """A process and its descendants, also those whose parent has ended; look often, as what ends takes its times along.

    Attributes:
        peak_bytes: the most that all held together at a look: the sum of proportional set sizes (PSS), in which pages
            that processes share, Ray's object store among them, count once.
    """

    def __init__(self, root: int) -> None:
        self.peak_bytes = 0
        self._root = root
        self._known: dict[tuple[int, int], tuple[str, float]] = {}  # (number, start) -> (kind, CPU seconds)

    def look(self, *, memory: bool = False) -> None:
        """Note what each process has used; ``memory`` takes some milliseconds a process."""
        living = self._living()
        for one in living:
            kind, _ = self._known.get((one.pid, one.start), (OTHER, 0.0))
            if one.pid == self._root:
                kind = MAIN
            elif kind == OTHER:  # Ray's workers get their names late, and lose them when they end
                kind = kind_of(_read(one.pid, "cmdline"))
            self._known[one.pid, one.start] = kind, one.cpu_s
        if memory:
            self.peak_bytes = max(self.peak_bytes, sum(_pss(one.pid) for one in living))

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of all processes, those that ended included, by kind."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for kind, used in self._known.values():
            seconds[kind] += used
        return dict(seconds)

    def end(self) -> None:
        """Kill what is left of it."""
        for one in self._living():
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)

    def _living(self) -> list[_Seen]:
        processes = {one.pid: one for one in _processes()}
        inside = {self._root}
        inside |= {one.pid for one in processes.values() if (one.pid, one.start) in self._known}
        for one in sorted(processes.values(), key=lambda one: one.start):  # parents start first
            if one.parent in inside:
                inside.add(one.pid)
        return [processes[pid] for pid in inside if pid in processes]


def _processes() -> Iterator[_Seen]:
    for name in os.listdir(PROC):  # noqa: PTH208 - a Path for each takes as long as reading it
        if name.isdigit() and (text := _read(int(name), "stat")):
            fields = text.rpartition(")")[2].split()
            yield _Seen(int(name), int(fields[1]), int(fields[19]), (int(fields[11]) + int(fields[12])) / _TICKS)


def _pss(pid: int) -> int:
    """Return the proportional set size in bytes; 0 of a process that has ended."""
    line = next((line for line in _read(pid, "smaps_rollup").splitlines() if line.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024


def _read(pid: int, name: str) -> str:
    """Return a file of a process; nothing where it has ended."""
    try:
        return (PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""
