"""One prune run on the driver: it checks everything, streams videos through the graph, and commits shard by shard."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa
from rich.console import Console

from gstep.backbones import family_of
from gstep.checkpoints.identity import tower_hash
from pipeline.cache.codecs import codec_of
from pipeline.cache.header import deepstack_levels, header_bytes
from pipeline.cache.ledger import Ledger
from pipeline.cache.live_rows import VIDEOS
from pipeline.cache.merging import WAITING_AT_END, try_merge
from pipeline.cache.reader import HEADER, made_with, read_header
from pipeline.errors import LimitReached
from pipeline.execution.cluster import choose_device, provenance
from pipeline.execution.request import refusing
from pipeline.execution.run import Run, Streamed
from pipeline.execution.run_record import RunFile, committed_shards
from pipeline.inputs.discovery import Discovery
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import check_decoder_device
from pipeline.prune.facts import Facts, token_bytes
from pipeline.prune.map_batches import PruneStages
from pipeline.prune.passes import Commits, Passes
from pipeline.prune.request import PruneRequest, match_cache, prepare
from pipeline.prune.resume import (
    discovery_of,
    recut_clips,
    recut_line,
    refuse_empty,
    remaining,
    retry_candidates,
    skipped_lines,
    within_limit,
)
from pipeline.prune.summary import Summary, lost_line, summarise
from pipeline.rows import JsonObject

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow", "av", "decord", "torchcodec")


@dataclass(frozen=True)
class Todo:
    """The videos that are left to do, and the cache's rows.

    Attributes:
        n_waiting: how many videos without a row ``--limit`` leaves for another run.
        ledger: the rows of the cache.
        committed: the token shards that earlier runs recorded as committed.
        discovery: has the videos that are known from the start, and finds those of containers that were never indexed.
    """

    n_waiting: int
    ledger: Ledger
    committed: list[str]
    discovery: Discovery

    @property
    def videos(self) -> pa.Table:
        """The rows (TODO_SCHEMA) of all that are known by now."""
        return self.discovery.found().todo

    def __len__(self) -> int:
        return len(self.discovery)


class PruneRun(Run[PruneConfig, PruneRequest, Todo, Summary]):
    """The prune run: decode, encode and prune, write; the driver commits (``pipeline.prune.graph``).

    Args:
        given: videos that a caller has at hand; None where the options name them.
        list_failed: whether the summary lists the videos that failed.
    """

    def __init__(
        self, options: PruneConfig, console: Console, given: object = None, *, list_failed: bool = False
    ) -> None:
        super().__init__(options, console)
        self._given, self._list_failed = given, list_failed
        self._facts: Facts | None = None
        self._fetched = 0

    def prepare(self) -> PruneRequest:
        return prepare(self.options, self.console, self._given)

    def match(self, request: PruneRequest) -> PruneRequest:
        return match_cache(request, self.console)

    def remaining(self, request: PruneRequest) -> Todo:
        committed = committed_shards(request.store)
        ledger = Ledger(request.store, made_with(request.store)).refresh()
        if ledger.foreign:
            self.say(
                f"warning: {len(ledger.foreign)} files of {request.store}/{VIDEOS} were made with other settings than "
                f"its header has; their rows do not count: {ledger.foreign[0]}"
            )
        if lost := ledger.lost(committed):
            self.say(f"warning: {lost_line(len(lost), lost)}")
        todo, counts = remaining(request.manifest, ledger, self.options, request.objects)
        for line in skipped_lines(counts, self.options):
            self.console.print(line, highlight=False)
        if self.options.fps is None and (recut := recut_clips(request.manifest, ledger)):
            self.say(recut_line(recut))
        known, n_waiting = within_limit(todo, self.options.limit)
        return Todo(n_waiting, ledger, committed, discovery_of(request, ledger, known))

    def stream(self, request: PruneRequest, todo: Todo) -> Streamed:
        with todo.discovery:
            return self._stream(request, todo)

    def _stream(self, request: PruneRequest, todo: Todo) -> Streamed:
        """Run the remaining videos through the graph, while others are found. Raises RunFailed."""
        config = self.options
        device, dtype = choose_device(config, request.dtype, self.say)
        n_videos = todo.discovery.expected()
        refuse_empty(request, todo.discovery)
        self.monitor.start()
        check_decoder_device(config.decoder, device)
        if not request.store.names(VIDEOS, ".parquet"):
            with refusing():
                static = family_of(request.source).static()
            request.store.put(HEADER, header_bytes(request.header(dtype, static)))
        with refusing():
            tower = tower_hash(request.source)
        encode = replace(request.encode_setup(device, dtype), tower_hash=tower)
        setups = PruneStages(request.decode_setup(), encode)
        facts = self._facts = Facts(token_bytes(request), device == "cuda", config.max_hours)
        about: JsonObject = {
            "config": config.as_record(),
            "device": device,
            "dtype": dtype,
            "videos": n_videos,
        }
        run_file = RunFile(request.store, {**provenance(request.run_id, _RECORDED_VERSIONS), **about})
        header, limit = request.store.read(HEADER), config.outside_limit(n_videos)
        commits = Commits(request, header, limit, run_file, self.say, facts, self.monitor)
        passes = Passes(self.options, self.console, setups, commits, todo.ledger, run_file, self.monitor)
        with run_file:
            try:
                n_failed = passes.first(todo.discovery if request.indexing.left else todo.videos)
                run_file.note(videos=len(todo))
                n_failed -= passes.second(retry_candidates(todo.videos, commits.retryable, config.max_attempts))
            except LimitReached as reached:
                n_failed = len(commits.failed)
                run_file.note(ended_by=facts.reached)
                self.say(f"note: {reached}: what is done is written; the same command goes on")
        self._fetched = commits.fetched
        return Streamed(run_file, n_failed)

    def summarise(self, request: PruneRequest, todo: Todo, n_failed: int, wall_s: float) -> Summary:
        header, discovery = read_header(request.store), todo.discovery
        n_waiting = todo.n_waiting + within_limit(discovery.beyond, 0)[1]
        if discovery.n_left:
            self.say(f"note: videos of {discovery.n_left} containers are not known yet, and not counted")
        held = summarise(
            todo.ledger.refresh(),
            pa.concat_tables([request.manifest, discovery.found().videos]),
            deepstack_levels(header),
            codec_of(header["identity"]),
            n_waiting=n_waiting,
            list_failed=self._list_failed,
            committed=todo.committed,
        )
        held = replace(held, n_new=len(todo), n_new_failed=n_failed, wall_s=wall_s, out=str(request.store))
        held = replace(held, fetched_bytes=self._fetched + request.indexing.fetched)
        if (facts := self._facts) is None:
            return held
        if facts.reached:  # what is left was not begun, and waits as with --limit
            left, n_new = held.n_missing, facts.videos
            n_videos, n_waiting = held.n_videos - left, held.n_waiting + left
            held = replace(held, n_new=n_new, n_missing=0, n_videos=n_videos, n_waiting=n_waiting)
        return replace(held, facts=facts.as_record(wall_s))

    def tidy(self, request: PruneRequest, todo: Todo) -> None:
        try_merge(request.store, made_with(request.store), WAITING_AT_END, self.say)
