"""Make one cache from another: read it video by video, change each video, and commit shard by shard.

``Rewrite`` itself is ``jobs.recode``; ``pipeline.rewrite.reprune`` subclasses it to change the videos as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.changed_code import check_cache_code, delete_superseded, restart_cache
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import (
    HEADER,
    CacheHeader,
    change_codec,
    compute_fingerprint,
    get_codec,
    read_header,
    refuse_occupied_location,
    write_new_header,
)
from pipeline.cache.live import RULE_COLUMNS, LiveVideos, find_live_indices, make_rule_columns, select_ok, sort_by_shard
from pipeline.cache.merging import MAX_WAITING_AT_END, MAX_WAITING_FILES, merge_unless_damaged
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.cache.schema import KEY_COLUMNS, VIDEOS
from pipeline.cache.table import VideosTable
from pipeline.cache.token_shard import parse_shard_id
from pipeline.cache.writer import KeptTokens, VideoItem, commit_records, make_batches, write_token_shard
from pipeline.errors import RunFailed, UsageError, VideoFault, convert_store_usage_errors
from pipeline.rewrite.remove import erase_removed
from pipeline.rows import JsonObject, VideoRecord, make_failed_video
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import collect_provenance
from pipeline.runner.run_record import COMMITTED_KEY, RunFile, check_out_folder, find_newest_record, make_run_id
from pipeline.storage.stores import Store

_VERSIONS = ("gstep-cache", "torch", "pyarrow")
_SHARD_VIDEOS = 1024
# Columns that say where and how the source stores a video.
_PLACE_COLUMNS = frozenset({"run_id", "token_shard", "first_row_group", "row_counts", "footer_hash", "checksum"})
_PLACE_COLUMNS |= {"token_codec", "token_block", *KEY_COLUMNS}


@dataclass(frozen=True)
class Rewrite:
    """The plan of a rewritten cache; this class keeps each video's tokens, and writing applies the codec.

    Attributes:
        source: the cache to read.
        header: the header of the new cache.
        config: the options of ``jobs.prune`` that would make the new cache, without ``out``, as far as the source's
            records tell.
        evidence: the columns of evidence to read with the tokens.
        order: the order in which a video's tokens are read.
    """

    source: TokenCache
    header: CacheHeader
    config: JsonObject
    evidence: Sequence[str]
    order: ClassVar[TokenOrder] = "selection"

    def change(self, video: CachedVideo, record: VideoRecord) -> VideoItem:
        """Return the new record and tokens of an ok video; subclasses raise VideoFault to make it a failed row.

        Args:
            video: the stored tokens, in the order ``self.order``.
            record: all other columns of its row except those that locate the tokens.
        """
        return VideoItem(record, KeptTokens.of(video, video.deepstack, video.evidence))


@dataclass
class RewriteResult:
    """The counts of a completed rewrite.

    Attributes:
        run_id: the id of this run; its record is in runs/ unless there was nothing to do.
        videos: rows that this run wrote, including failed and removed videos.
        failed: videos with tokens in the source that got a failed row.
        done: rows of the source that the new cache already had.
    """

    run_id: str
    videos: int = 0
    failed: int = 0
    done: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def lines(self) -> Iterator[str]:
        """Yield one line of counts for the terminal, and a warning if videos failed."""
        yield (
            f"{self.videos:,} videos written in {self.seconds:.1f} s, {self.done:,} already there; {self.bytes:,} bytes"
        )
        if self.failed:
            yield f"warning: {self.failed:,} of them failed"


def plan_recoding(source: TokenCache, codec: str) -> Rewrite:
    """Plan a cache of the same tokens in another codec; nothing is written.

    Raises:
        UsageError: the source does not store bfloat16 tokens.
    """
    check_stores_bfloat16(source, "recode")
    config = {**read_newest_config(source.store), "token_codec": codec}
    return Rewrite(source, change_codec(source.header, codec), config, tuple(source.evidence))


def check_stores_bfloat16(cache: TokenCache, verb: str) -> None:
    """Raise UsageError unless a cache stores bfloat16 tokens; ``verb`` ("recode" or "prune") is for the message."""
    if cache.codec is not BFLOAT16:
        raise UsageError(
            f"{cache.store} stores {cache.codec.name} tokens already: {verb} the cache of bfloat16 tokens that it was "
            "made from"
        )


def read_newest_config(store: Store) -> JsonObject:
    """Return the options of the newest run of a cache whose record has options; {} if there is no such record."""
    record = find_newest_record(store)
    return {} if record is None else record["config"]


def check_rewrite_target(out: Store, header: CacheHeader, *, redo: bool = False) -> bool:
    """Raise UsageError unless ``out`` is empty or a cache that has no rows yet or has the header's identity.

    Returns:
        True if other code of the user method made the rows of ``out``, so that the caller must replace them: only with
        ``redo``, or if none of them has tokens. Otherwise False.

    Raises:
        UsageError: ``out`` is relative inside a Ray job or cannot be read; as NotACache if it holds other files, as
            IdentityMismatch if it has another identity, or tokens by other code without ``redo``.
        CorruptShard: a file of the table is damaged.
    """
    check_out_folder(out)
    with convert_store_usage_errors():
        refuse_occupied_location(out)
        if not out.names(VIDEOS, ".parquet"):
            return False
        old_identity, refusal = read_header(out)["identity"], f"{out} holds rows of another kind"
        return check_cache_code(out, old_identity, header["identity"], refusal, redo=redo)


def update_rewritten_cache(
    job: Rewrite, out: Store, say: Callable[[str], object], *, redo: bool = False
) -> RewriteResult:
    """Bring ``out`` up to date with the source of a rewrite, and return the counts.

    A video is skipped unless the source's row outranks the row in ``out`` by status, then by attempts. It is erased if
    the source has removed it. If the run fails, committed videos stay.

    Args:
        redo: make videos of ``out`` again if other code of the user method made them.

    Raises:
        UsageError: ``out`` has another identity, other files, or other code without ``redo``, or cannot be written.
        CacheLocked: another run is writing to ``out``.
        CorruptShard: the source is damaged.
        RunFailed: another cache was begun at ``out`` meanwhile, or a user method fails for every video (MethodFails).
    """
    check_rewrite_target(out, job.header, redo=redo)
    start = time.monotonic()
    out.make()
    result = RewriteResult(make_run_id())
    with Claim(out, result.run_id, say):
        if check_rewrite_target(out, job.header, redo=redo):
            restart_cache(out, read_header(out), job.header["identity"], result.run_id)
        elif not out.names(VIDEOS, ".parquet"):
            write_new_header(out, job.header)
        made_with = compute_fingerprint(read_header(out)["identity"])
        todo = _find_rows_to_rewrite(job.source, out, made_with, result)
        if len(todo):
            about: JsonObject = {
                "rewritten_from": str(job.source.store),
                "config": {**job.config, "out": str(out)},
                "decoding_rules": (find_newest_record(job.source.store) or {}).get("decoding_rules", 1),
                "videos": len(todo),
            }
            with RunFile(out, {**collect_provenance(result.run_id, _VERSIONS), **about}) as record:
                _write_videos(job, todo, out, record, result, say)
        erase_removed(out, made_with, result.run_id, say)  # also what an interrupted rewrite left
        if len(todo):
            delete_superseded(out, read_header(out))
            merge_unless_damaged(out, made_with, MAX_WAITING_AT_END, say)
    result.seconds = time.monotonic() - start
    return result


def _write_videos(
    job: Rewrite, todo: pa.Table, out: Store, record: RunFile, result: RewriteResult, say: Callable[[str], object]
) -> None:
    """Write and commit the videos of ``todo`` shard by shard; ``out`` has its header already.

    After each shard, ``result`` and ``record`` are updated and ``say`` receives a line. ``result.failed`` starts as the
    number of ok rows in ``todo`` and decreases with each ok row written, so it is right only at the end. The small
    files of the table are merged every MAX_WAITING_FILES shards.

    Raises:
        RunFailed: the header of ``out`` has changed or is gone, so another cache was begun there.
    """
    header = out.read(HEADER)
    codec = get_codec(job.header["identity"])
    shards = list[str]()
    made_with = compute_fingerprint(read_header(out)["identity"])
    result.failed = len(select_ok(todo))

    def n_bytes(video: VideoItem) -> float:
        tokens = video.kept
        return 0.0 if tokens is None else codec.share * tokens.tokens.nbytes * (1 + len(tokens.deepstack))

    for number, videos in enumerate(make_batches(_change_videos(job, todo), n_bytes, max_items=_SHARD_VIDEOS)):
        rows = write_token_shard(videos, store=out, run_id=result.run_id, codec=codec)
        if not out.exists(HEADER) or out.read(HEADER) != header:
            raise RunFailed(f"{out}: another cache was begun here since this command began; nothing more is written")
        commit_records(out, result.run_id, number, rows, made_with=made_with)
        names = sorted({row["token_shard"] for row in rows if row["status"] == "ok"})
        shards += map(parse_shard_id, names)
        record.note(**{COMMITTED_KEY: shards})
        result.videos += len(rows)
        result.failed -= sum(row["status"] == "ok" for row in rows)
        result.bytes += sum(out.open(name).size() for name in names)
        say(f"{result.videos:,} of {len(todo):,} videos, {result.bytes:,} bytes")
        if number % MAX_WAITING_FILES == MAX_WAITING_FILES - 1:
            merge_unless_damaged(out, made_with, MAX_WAITING_FILES, say)


def _find_rows_to_rewrite(source: TokenCache, out: Store, made_with: str, result: RewriteResult) -> pa.Table:
    """Return the source's live rows that outrank the rows of ``out``, with their row locations, sorted by token shard.

    Only status and attempts are compared; on a tie, the row of ``out`` wins. Sets ``result.done`` to the number of
    skipped rows.
    """
    columns = (*RULE_COLUMNS, "token_shard", "first_row_group")
    _, rows = LiveVideos.read(source.store, compute_fingerprint(source.identity), columns)
    _, old_rows = LiveVideos.read(out, made_with, RULE_COLUMNS)
    rule = make_rule_columns(pa.concat_tables([old_rows.select(RULE_COLUMNS), rows.select(RULE_COLUMNS)]))
    zeros = np.zeros_like(rule["tie"])
    live, _ = find_live_indices(
        {**rule, "rewritten": zeros, "tie": zeros}
    )  # of equal rows, the first counts: that of ``out``
    todo = rows.take(pa.array(live[live >= len(old_rows)] - len(old_rows)))
    result.done = len(rows) - len(todo)
    return sort_by_shard(todo)


def _change_videos(job: Rewrite, todo: pa.Table) -> Iterator[VideoItem]:
    """Yield the changed videos of ``todo`` in order; rows of failed and removed videos are copied.

    If tokens exceed the range of the codec or ``job.change`` raises VideoFault, the video is yielded as a failed row.
    """
    codec = get_codec(job.header["identity"])
    for row in VideosTable(job.source.store).read_rows(todo):
        about_video = {name: value for name, value in row.items() if value is not None and name not in _PLACE_COLUMNS}
        record: VideoRecord = {**about_video}  # type: ignore[typeddict-item]
        if row["status"] == "ok":
            (video,) = job.source.get_rows([row], None, job.order, job.evidence)
            try:
                codec.check_range(video.tokens, *video.deepstack)
                yield job.change(video, record)
            except VideoFault as fault:
                yield VideoItem(make_failed_video(record, fault))
        else:
            yield VideoItem(record)
