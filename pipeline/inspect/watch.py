"""The newest run of a cache while it goes on, read from the cache alone: ``jobs.inspect CACHE --watch``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.cache.header import fingerprint
from pipeline.cache.ledger import Ledger
from pipeline.cache.reader import TokenCache
from pipeline.execution.monitoring.load import Progress
from pipeline.inspect.run_progress import RunProgress, latest_run
from pipeline.storage.stores import Store

_LOCAL_S, _STORE_S = 2.0, 10.0  # between two looks into a folder, and at an object store, where each look is requests
_RECENT_S = 60.0  # the rate is that of the last minute
AT_WORK = ("starting", "running")


def watch(cache: TokenCache, console: Console, every_s: float | None = None) -> RunProgress | None:
    """Show the run that writes to a cache, else its newest one, until that ends; return its last state.

    It is looked at ``every_s`` seconds, by default more often in a folder than in a store.

    Returns None where the cache has no run. Raises OSError, CorruptShard, and KeyboardInterrupt at Ctrl-C.
    """
    run = None
    every_s = every_s or (_STORE_S if cache.store.folder is None else _LOCAL_S)
    with Live(console=console, auto_refresh=False) as live:
        for run, rate in looks(cache.store, fingerprint(cache.identity), every_s):
            live.update(_shown(run, rate), refresh=True)
    if run is not None and not console.is_terminal:
        console.line()  # elsewhere the last state has no end of its line
    return run


def looks(store: Store, made_with: str, every_s: float) -> Iterator[tuple[RunProgress, float]]:
    """Yield a run's state with its videos a second of late, every ``every_s`` seconds until the run has ended."""
    ledger, recent = Ledger(store, made_with), deque[tuple[float, int]]()
    while (run := latest_run(store, ledger.refresh())) is not None:
        now = time.monotonic()
        recent.append((now, run.n_done))
        while now - recent[0][0] > _RECENT_S and len(recent) > 2:
            recent.popleft()
        since, before = recent[0]
        yield run, (run.n_done - before) / (now - since) if now > since else run.n_done / max(run.seconds, 1.0)
        if run.status not in AT_WORK:
            return
        time.sleep(every_s)


def _shown(run: RunProgress, rate: float) -> RenderableType:
    """Render the state of a run, with ``rate`` in videos a second."""
    lines: list[RenderableType] = [Text(run.describe())]
    if run.status == "running":
        left = f", {(run.n_videos - run.n_done) / rate:.0f} s left" if rate else ""
        lines += [ProgressBar(max(1, run.n_videos), run.n_done, width=60), Text(f"{rate:.2f} videos/s of late{left}")]
        lines += [_stages(run.now)] if run.now is not None else []
    return Group(*lines)


def _stages(now: Progress) -> RenderableType:
    """Render the stages with the items that they have to do and how busy their workers are."""
    table = Table("stage", "to do", "busy", "", show_edge=False)
    for stage, waiting in now.waiting.items():
        busy = f"{now.busy[stage]:.0%}" if stage in now.busy else "-"
        table.add_row(stage, str(waiting), busy, "the bottleneck" if stage == now.bottleneck else "")
    return table
