"""CPU seconds by kind of process, and memory, of a process and all that it starts."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

MAIN, OTHER = "main process", "other of Ray"
# What a command line holds, the first that is found: Ray's workers are called by their actors.
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


def kind_of(command: str) -> str:
    """Return the kind of a process by its command line, such as "decode actor"."""
    return next((kind for part, kind in KINDS.items() if part in command), OTHER)


class ProcessTree:
    """A process and its descendants, also those whose parent has ended; ``look`` at it often, or ended ones are missed.

    Attributes:
        peak_mb: the most that all held together at a look, in MB (10^6 bytes): the sum of proportional set sizes (PSS),
            in which pages that processes share, Ray's object store among them, count once.
    """

    def __init__(self, root: int) -> None:
        self.peak_mb = 0.0
        self._kinds = {root: MAIN}
        self._cpu_s: dict[int, float] = {}

    def look(self, *, memory: bool = False) -> None:
        """Record the CPU seconds of each living process, and with ``memory`` the total memory (some ms a process)."""
        living = self._living()
        for pid, seconds in living.items():
            self._cpu_s[pid] = seconds
            if self._kinds.get(pid, OTHER) == OTHER:  # Ray's workers get their names late, and lose them in the end
                self._kinds[pid] = kind_of(_read(pid, "cmdline"))
        if memory:
            self.peak_mb = max(self.peak_mb, sum(map(_pss, living)) / 1e6)

    def cpu_s(self) -> dict[str, float]:
        """Return the recorded CPU seconds summed by kind of process, ended ones included."""
        seconds: dict[str, float] = defaultdict(float)
        for pid, used in self._cpu_s.items():
            seconds[self._kinds[pid]] += used
        return dict(seconds)

    def end(self) -> None:
        """Kill the processes of the tree that still run."""
        for pid in self._living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _living(self) -> dict[int, float]:
        """Return the CPU seconds of the tree's running processes by process id."""
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        stats = {pid: fields for pid in pids if (fields := _read(pid, "stat").rpartition(")")[2].split())}
        inside = stats.keys() & self._kinds.keys()
        while more := {pid for pid, fields in stats.items() if int(fields[1]) in inside} - inside:
            inside |= more
        return {pid: (int(stats[pid][11]) + int(stats[pid][12])) / _TICKS for pid in inside}


def _pss(pid: int) -> int:
    """Return the proportional set size in bytes; 0 of a process that has ended."""
    sizes = (line.split()[1] for line in _read(pid, "smaps_rollup").splitlines() if line.startswith("Pss:"))
    return int(next(sizes, 0)) << 10


def _read(pid: int, name: str) -> str:
    """Return the content of a file in /proc of a process, "" where the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""
