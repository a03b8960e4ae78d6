"""``jobs.merge``: make one cache from several caches of the same identity by linking or copying their token shards.

Token shards are taken first, then removed rows, then the files of the videos tables, which make the rows visible. So an
interrupt leaves no row without tokens and revives no removed video.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import (
    HEADER,
    CacheHeader,
    compute_fingerprint,
    list_differences,
    read_header,
    write_new_header,
)
from pipeline.cache.live import (
    RULE_COLUMNS,
    LiveVideos,
    find_live_indices,
    make_rule_columns,
    select_ok,
    select_removed,
)
from pipeline.cache.merging import merge_table_files
from pipeline.cache.schema import TOKENS
from pipeline.cache.table import build_table, check_content, parse_file_name, serialize_small
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.rewrite.recode import check_rewrite_target
from pipeline.rewrite.remove import erase_removed
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import collect_provenance
from pipeline.runner.run_record import RUNS, RunFile, make_run_id
from pipeline.storage.stores import LocalStore, Store, request_threads

OnEqual = Literal["rule", "refuse"]
_COLUMNS = ("video_id", *RULE_COLUMNS, "clip_key", "source_size", "earlier_attempts", "token_shard", "checksum")
_TRIES: Final = 5  # attempts to read caches whose table files other runs merge meanwhile
_THREADS: Final = 4  # each holds a whole shard in memory
_SHARDS_PER_LINE: Final = 1000  # token shards between two lines of progress
_MAX_EXAMPLES: Final = 5


@dataclass
class CacheMergeResult:
    """The result of ``merge_caches``.

    Attributes:
        videos: the number of live rows of the merged cache; failed and removed videos count too.
        equal: the number of live rows that lost against a row of the same video in another cache.
        linked: the number of token shards that are hard links to the files of their cache.
        foreign: files of the videos tables that were left out because their rows have another identity.
        removed: ids of videos that at least one of the caches has removed.
        moved: the number of other videos that were copied to new shards, away from tokens of removed videos.
    """

    run_id: str
    videos: int = 0
    equal: int = 0
    linked: int = 0
    copied: int = 0
    copied_bytes: int = 0
    foreign: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    moved: int = 0

    def lines(self) -> Iterator[str]:
        """Yield lines for the terminal: the counts, then foreign files and removed videos if there are any."""
        yield f"{self.videos:,} videos; of {self.equal:,} several caches had a row"
        yield f"token shards: {self.linked:,} linked, {self.copied:,} copied ({self.copied_bytes:,} bytes)"
        if self.foreign:
            yield f"warning: {len(self.foreign)} files were made with other settings and left out: {self.foreign[0]}"
        if self.removed:
            yield f"{len(self.removed):,} removed videos stay removed; {self.moved:,} others moved to new token shards"


class _UnitedTables(NamedTuple):
    """The videos tables of several caches, each read once.

    Attributes:
        rows: _COLUMNS of the live rows of all caches, and the column ``cache``: the cache's number, from 0.
        files: for each cache, the names of the table's files whose rows count.
        foreign: paths of the other files.
    """

    rows: pa.Table
    files: list[list[str]]
    foreign: list[str]


def merge_caches(
    sources: Sequence[Store], out: Store, say: Callable[[str], object], on_equal: OnEqual = "rule"
) -> CacheMergeResult:
    """Merge caches of one identity into ``out``, which is empty or already holds such a cache; return the counts.

    The sources stay unchanged; ``out`` itself and repeats among them are skipped. If several caches have a row of a
    video, the rule of ``pipeline.cache.live`` selects one. A video that any cache has removed stays removed, and is
    erased from ``out``. The records of runs are copied too. Rerun after an interrupt: existing files are not taken
    again.

    Args:
        on_equal: "refuse" to raise UsageError if two caches have different tokens of one video.

    Raises:
        NotACache: a source has no valid header, or ``out`` holds other files. Nothing is written.
        IdentityMismatch: the caches have different identities or newline rows. Nothing is written.
        UsageError: ``on_equal`` refuses, or nothing can be written to ``out``.
        CacheLocked: another run is writing to ``out``.
        CorruptShard: a file is damaged.
    """
    others = {source.root: source for source in sources if source.root != out.root}
    stores = [*[out] * out.exists(HEADER), *others.values()]
    header = _check_common_header(stores)
    check_rewrite_target(out, header)
    identity = compute_fingerprint(header["identity"])
    union = _read_union(stores, identity)
    if on_equal == "refuse":
        _refuse_different_tokens(union.rows)
    out.make()
    result = CacheMergeResult(make_run_id())
    with Claim(out, result.run_id, say):
        check_rewrite_target(out, header)
        if not out.exists(HEADER):
            write_new_header(out, header)
        about = {"merged_from": [str(store) for store in stores if store is not out]}
        with RunFile(out, {**collect_provenance(result.run_id), **about}):
            _take_videos(stores, union, identity, out, result, say)
            for source in stores:
                for name in source.names(RUNS, ".json"):
                    _take_file(source, out, name)
            result.moved = erase_removed(out, identity, result.run_id, say).moved
            merge_table_files(out, identity, everything=True)
    return result


def _check_common_header(stores: Sequence[Store]) -> CacheHeader:
    """Return the header that all caches share: the first one with "hidden_size", or the first one if none has it.

    Raises:
        NotACache: a cache has no valid header.
        IdentityMismatch: two caches differ in identity or in the newline row.
    """
    first, *other_headers = headers = [read_header(store) for store in stores]
    for store, header in zip(stores[1:], other_headers, strict=True):
        differences = list_differences(
            first["identity"], header["identity"], old_subject=f"{stores[0]} has", new_subject=str(store)
        )
        if differences:
            lines = "\n  ".join(differences)
            raise IdentityMismatch(f"these caches were not made alike:\n  {lines}\nMerge only caches of one identity.")
        if first["newline"] != header["newline"]:
            raise IdentityMismatch(f"{stores[0]} and {store} differ in the row after a video's tokens (newline)")
    return next((header for header in headers if "hidden_size" in header), first)


def _read_union(stores: Sequence[Store], identity: str) -> _UnitedTables:
    """Read the current live rows of each cache, and list the files of its table."""
    tables = []
    files = []
    foreign = list[str]()
    for number, store in enumerate(stores):
        videos, rows = LiveVideos.read(store, identity, _COLUMNS)
        numbers = pa.array(np.full(len(rows), number, np.int32))
        # Names of token shards are few and long.
        names = rows["token_shard"].combine_chunks().dictionary_encode().cast(pa.dictionary(pa.int32(), pa.string()))
        position = rows.schema.get_field_index("token_shard")
        tables.append(rows.select(_COLUMNS).set_column(position, "token_shard", names).append_column("cache", numbers))
        files.append([file.name for file in videos.files if file.name not in videos.table.foreign])
        foreign += [f"{store}/{name}" for name in videos.table.foreign]
    return _UnitedTables(pa.concat_tables(tables).unify_dictionaries().combine_chunks(), files, foreign)


def _refuse_different_tokens(rows: pa.Table) -> None:
    """Raise UsageError if the ok rows of a video have different checksums in several caches."""
    kinds = select_ok(rows).group_by("video_id").aggregate([("checksum", "count_distinct")])
    wrong = kinds.filter(pc.greater(kinds["checksum_count_distinct"], 1))["video_id"]
    if len(wrong):
        some = ", ".join(wrong.slice(0, _MAX_EXAMPLES).to_pylist())
        raise UsageError(
            f"{len(wrong)} videos have different tokens in several caches ({some}): let the rule select a row with "
            "--on-equal rule, or remove them from one with python -m jobs.remove"
        )


def _take_videos(
    stores: Sequence[Store],
    union: _UnitedTables,
    identity: str,
    out: Store,
    result: CacheMergeResult,
    say: Callable[[str], object],
) -> None:
    """Bring token shards, then removed rows, then the files of the videos tables into ``out``.

    If another run merged away a listed file, all tables are read again, up to _TRIES readings in all. ``result`` is
    completed in place.

    Raises:
        CorruptShard: a file is damaged.
        FileNotFoundError: files were still disappearing at the last reading.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            _take_live_tokens(stores, union.rows, out, result, say)
            if result.removed:  # before other rows of these videos
                rows = [row for source in stores for row in LiveVideos.read_removed(source, identity)]
                out.put(*serialize_small(result.run_id, 0, build_table(rows), identity))
            for source, files in zip(stores, union.files, strict=True):
                for name in files:
                    _take_file(source, out, name)
            result.foreign = union.foreign
            return
        except FileNotFoundError:
            if not tries_left:
                raise
        union = _read_union(stores, identity)


def _take_live_tokens(
    stores: Sequence[Store], rows: pa.Table, out: Store, result: CacheMergeResult, say: Callable[[str], object]
) -> None:
    """Link or copy the token shards that live rows of the union name to ``out``.

    The live row of each video is selected over all caches first. Sets the counts in ``result``, which do not include
    shards that ``out`` already has. ``say`` receives a line per thousand shards of a cache.
    """
    order, _ = find_live_indices(make_rule_columns(rows))
    winners = rows.take(pa.array(order))
    live = select_ok(winners)
    result.videos = len(order)
    result.equal = len(rows) - len(order)
    result.removed = select_removed(winners)["video_id"].to_pylist()
    for number, source in enumerate(stores):
        names = live.filter(pc.equal(live["cache"], number))["token_shard"].unique().to_pylist()
        with request_threads(_THREADS) as pool:
            try:
                for n_taken, n_bytes in enumerate(pool.map(partial(_take_file, source, out), names), 1):
                    result.linked += n_bytes == 0
                    result.copied += n_bytes is not None and n_bytes > 0
                    result.copied_bytes += n_bytes or 0
                    if n_taken % _SHARDS_PER_LINE == 0:
                        say(f"{n_taken:,} of {len(names):,} token shards of {source}")
            except Exception:
                pool.shutdown(cancel_futures=True)  # no copy is under way when another run may take the claim
                raise


def _take_file(source: Store, out: Store, name: str) -> int | None:
    """Link or copy the file ``name`` from ``source`` to ``out`` unless ``out`` has it.

    Token shards are linked between local stores on one file system. Copied token shards and small table files are
    checked against the hash in their names first; CorruptShard is raised if they differ.

    Returns:
        The number of copied bytes, 0 for a linked token shard, and None if ``out`` has the file or is ``source``.
    """
    if source is out or out.exists(name):
        return None
    of_tokens = name.startswith(TOKENS)
    if of_tokens and source.folder is not None and isinstance(out, LocalStore):
        file = source.folder / name
        # A symbolic link in a cache from elsewhere may lead to any file of this machine: its content is checked below.
        if file.resolve() == source.folder.resolve() / name and out.link(name, file):
            return 0
    data = source.read(name)
    if not name.startswith(RUNS) and not parse_file_name(name).is_sorted:
        check_content(source, name, data, "rows" if of_tokens else "commit")
    out.put(name, data)
    return len(data)
