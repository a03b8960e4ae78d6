"""The processes below a process, as Linux lists them."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.waiting import wait_until


def family(pid: int) -> dict[int, str]:
    """Return process id -> title of every descendant of ``pid`` that is no zombie."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(folder.name)] = int(parent)
                titles[int(folder.name)] = _title(folder)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: titles[child] for child in found - {pid} if child in titles}


def raylets(pid: int) -> list[int]:
    """Return the raylets below ``pid`` in the order in which they were started.

    The start time orders them and not the process id, which begins anew after 32768 processes on some machines.
    """
    named = [child for child, title in family(pid).items() if Path(title.partition(" ")[0]).name == "raylet"]
    return sorted(named, key=_started)


def _started(pid: int) -> int:
    """Return the clock ticks from the boot to the start of a process: field 22 of proc_pid_stat(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _title(folder: Path) -> str:
    """Read the title of a process without the name of an actor, which Ray puts before its class while it works."""
    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return re.sub(r"^ray::worker-[0-9a-f]{32}:", "ray::", title)


def resident_mb(pid: int) -> float:
    """Measure the memory of a process that it shares with nobody, in MB; 0 where it has ended."""
    with suppress(OSError):
        _, resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * 4096 / 1e6
    return 0.0


def assert_all_gone(pids: list[int], timeout: float = 90) -> None:
    """Assert that none of the processes is left within ``timeout`` seconds."""

    def left() -> dict[int, str]:
        found = {}
        for folder in (Path(f"/proc/{pid}") for pid in pids):
            with suppress(OSError):
                found[int(folder.name)] = _title(folder)
        return found

    wait_until(lambda: not left(), lambda: f"the end of {left()}", timeout)


def titled(process: subprocess.Popen[str], title: str) -> int:
    """Wait for a worker of a run with a Ray of its own whose process title begins so, while the run goes on."""

    def look() -> int | None:
        return next((pid for pid, name in family(process.pid).items() if name.startswith(title)), None)

    def running() -> None:
        assert process.poll() is None, process.communicate()[0]

    return wait_until(look, f"a process {title}", meanwhile=running)
