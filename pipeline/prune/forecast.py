"""The dry run: its checks, and a report of what a run would do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gstep.backbones import family_of
from gstep.types import budget_for
from pipeline.cache.header import CacheIdentity
from pipeline.cache.ledger import Ledger
from pipeline.cache.reader import made_with
from pipeline.errors import CacheLocked, UsageError
from pipeline.execution.claim import holder, who
from pipeline.execution.request import store_refusing
from pipeline.prune.config import PruneConfig
from pipeline.prune.manifest_checks import Example, sure_failures
from pipeline.prune.request import PruneRequest, prepare
from pipeline.prune.resume import Tally, remaining, within_limit
from pipeline.storage.stores import Store

_SHOWN = 5  # ids that the report lists


@dataclass(frozen=True)
class Forecast:
    """The work of a run with the same flags, if it started now.

    Attributes:
        out: the cache, as named.
        tally: the manifest's videos by what is to be done with them.
        n_todo: how many videos the run would process; ``--limit`` leaves the others for another run.
        doomed: videos of these that are sure to fail, by what is wrong with them.
        first_ids: the first ids of the videos to process.
        identity: what every row of the cache would share; the dtype may be left to the cluster ("auto").
        grid: (T, N) of a video; if that depends on its shape, of one in full HD with the most frames that are sampled.
        kept: how many of its tokens are stored; an estimate if the method decides.
        video_bytes: the bytes of these on disk.
        one_size: whether every video has this grid.
        unlisted: containers whose videos are not known, and not counted.
    """

    out: str
    tally: Tally
    n_todo: int
    doomed: dict[str, Example]
    first_ids: list[str]
    identity: CacheIdentity
    grid: tuple[int, int]
    kept: int
    video_bytes: int
    one_size: bool
    unlisted: list[str]

    def as_record(self) -> dict[str, Any]:
        """Return the forecast as a JSON-able mapping."""
        return {**vars(self), "tally": self.tally._asdict()}


def forecast(config: PruneConfig, console: Console) -> Forecast:
    """Check the request as a run does and look at what is left; starts and writes nothing.

    Raises UsageError for whatever a run would refuse.
    """
    request = prepare(config, console)
    with store_refusing():
        if not config.join and (other := holder(request.store)):
            raise CacheLocked(f"{request.store}: another run writes here: {who(other)}")
        _check_writable(request.store)
        ledger = Ledger(request.store, made_with(request.store)).refresh()
        todo, counts = remaining(request.manifest, ledger, config, request.objects)
    todo, _ = within_limit(todo, config.limit)
    return _forecast(request, counts, todo)


def _forecast(request: PruneRequest, counts: Tally, todo: pa.Table) -> Forecast:
    shape = request.decode_setup().largest_frames()
    small = family_of(request.source).preprocessor().target_size(shape[0], 240, 240)
    T, N = family_of(request.source).token_counts(*shape)
    return Forecast(
        out=str(request.store),
        tally=counts,
        n_todo=len(todo),
        doomed=sure_failures(todo),
        first_ids=todo["video_id"].slice(0, _SHOWN).to_pylist(),
        identity=request.identity(request.dtype),
        grid=(T, N),
        kept=budget_for(request.retention_ratio, T * N),
        video_bytes=request.encode_setup(request.config.device, request.dtype).stored_bytes_per_video(*shape),
        one_size=request.sampling.fps is None and small == shape[1:],
        unlisted=list(request.unlisted),
    )


def _check_writable(store: Store) -> None:
    """Raise UsageError where a folder cannot be made or written to; an object store tells only once it is."""
    if store.folder is None:
        return
    there = next(path for path in (store.folder, *store.folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is no folder"
        raise UsageError(f"{store}: nothing can be written here: {there} {why}")


def render_forecast(plan: Forecast) -> RenderableType:
    """Render the forecast as a table for the terminal, with the identity below it."""
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(plan):
        table.add_row(name, Text(value))  # ids and addresses come from files and are no markup
    identity = Table.grid(padding=(0, 2))
    for name, value in _leaves(plan.identity):
        identity.add_row(f"  {name}", Text(value))
    return Group("dry run: nothing was started or written", table, "identity of every row", identity)


def _lines(plan: Forecast) -> list[tuple[str, str]]:
    counts, (T, N) = plan.tally, plan.grid
    waiting = counts.n_todo - plan.n_todo
    rest = f", {waiting} more wait (--limit)" if waiting else ""
    again = f"{counts.new} new, {counts.retried} failed before, {counts.redone} changed"
    largest = "" if plan.one_size else ", in full HD and of full length"
    wrong = [(f"{found.n} of the {plan.n_todo} {what}", found.first) for what, found in plan.doomed.items()]
    total = plan.video_bytes * (plan.n_todo - sum(found.n for found in plan.doomed.values()))
    lines = [
        ("cache", plan.out),
        ("videos", f"{plan.n_todo} to do{rest}, {counts.done} done, {counts.failed} failed before and left alone"),
        ("left to do", again),
        *(("will fail", f"{count}, e.g. {first}") for count, first in wrong),
        ("a video", f"{T} x {N} = {T * N} tokens, about {plan.kept} kept{largest}"),
        ("bytes", f"about {plan.video_bytes:,} a video, {total:,} in all{largest}"),
    ]
    if plan.unlisted:
        lines.append(
            ("not counted", f"the videos of {len(plan.unlisted)} containers, e.g. {plan.unlisted[0]} (--index)")
        )
    more = ", ..." if plan.n_todo > len(plan.first_ids) else ""
    return [*lines, ("first", ", ".join(plan.first_ids) + more)] if plan.first_ids else lines


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """List (dotted name, value) of every leaf of nested mappings."""
    leaves: list[tuple[str, str]] = []
    for name, value in values.items():
        leaves += (
            _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", str(value))]
        )
    return leaves
