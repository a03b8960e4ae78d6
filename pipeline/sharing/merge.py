"""``jobs.merge``: one cache of several that were made alike. Token shards are linked or copied, never rewritten.

A cache is a set of rows and of files that never change, so one of several is their union. The header comes first, then
the token shards that a live row of the union names, then the files of the tables, whose rows then count, and at last
these are merged, which leaves out the rows that others superseded. Whatever is interrupted the same command ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import CacheHeader, differences, fingerprint, header_bytes
from pipeline.cache.live_rows import RULE_COLUMNS, live_and_earlier, ok_rows, rule_columns
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.merging import merge, merge_at_once
from pipeline.cache.reader import HEADER, check_version, read_header
from pipeline.cache.table import SortedFile, TableFile, check_content, made_with_of, read_small
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.execution.claim import Claim
from pipeline.execution.cluster import provenance
from pipeline.execution.request import new_run_id
from pipeline.execution.run_record import RUNS, RunFile
from pipeline.rewrite.rewrite import check_place
from pipeline.storage.stores import LocalStore, Store

OnEqual = Literal["rule", "refuse"]
_COLUMNS = ("video_id", *RULE_COLUMNS, "clip_key", "source_size", "earlier_attempts", "token_shard", "checksum")
_TRIES: Final = 5  # readings of caches that are merged meanwhile
_THREADS: Final = 4  # each copies a whole shard in memory
_TOLD: Final = 1000  # token shards between two lines about progress
_SHOWN: Final = 5
_VERSIONS = ("gstep-cache", "pyarrow")


@dataclass
class MergedCaches:
    """The result of merging caches.

    Attributes:
        run_id: it names the record in runs/.
        videos: live rows of the merged cache.
        equal: videos of which several of the caches have a row; one of them counts.
        linked: token shards that share their bytes with the cache they are from.
        copied: token shards that were copied, ``copied_bytes`` in all.
        there: token shards that were there already.
        foreign: files of tables that were left out, since their rows were made with other settings.
    """

    run_id: str
    videos: int = 0
    equal: int = 0
    linked: int = 0
    copied: int = 0
    copied_bytes: int = 0
    there: int = 0
    foreign: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield lines for the user about the result."""
        yield f"{self.videos:,} videos; of {self.equal:,} several caches had a row"
        yield (
            f"token shards: {self.linked:,} linked, {self.copied:,} copied ({self.copied_bytes:,} bytes), "
            f"{self.there:,} were there"
        )
        if self.foreign:
            yield f"warning: {len(self.foreign)} files were made with other settings and left out: {self.foreign[0]}"


def merge_caches(
    sources: Sequence[Store],
    out: Store,
    say: Callable[[str], object],
    on_equal: OnEqual = "rule",
    *,
    records: bool = True,
) -> MergedCaches:
    """Merge caches of one identity into ``out``, which is a new place or such a cache.

    A video that several have is that of the rule of live rows, with removed ones first; with ``refuse`` one whose
    tokens differ is an error. Nothing is changed in ``sources``. Without ``records`` those of runs stay behind.

    Raises NotACache, IdentityMismatch, UsageError for equal ids or a cache of an earlier version, all before anything
    is written; CorruptShard where a file is damaged, and OSError.
    """
    sources = [source for source in sources if source.root != out.root]
    header = _common_header([*sources, *[out] * out.exists(HEADER)])
    check_place(out, header)
    identity = fingerprint(header["identity"])
    done = MergedCaches(new_run_id())
    held = [out, *sources] if out.exists(HEADER) else list(sources)
    found = _live_rows(held, identity)
    if on_equal == "refuse":
        _refuse_equal(found.rows)
    out.make()
    with Claim(out, done.run_id, say):
        check_place(out, header)
        if not out.exists(HEADER):
            out.put(HEADER, header_bytes(header))
        about = {"merged_from": [str(source) for source in sources]}
        record = RunFile(out, {**provenance(done.run_id, _VERSIONS), **about}) if records else nullcontext()
        with record:
            _take_videos(held, found, out, identity, done, say)
            for source in sources if records else ():
                _take_records(source, out)
            if records:
                merge(out, identity, everything=True)
            else:  # nobody reads a copy yet
                merge_at_once(out, identity)
    return done


def _common_header(sources: Sequence[Store]) -> CacheHeader:
    """Return the header that all caches share. Raises NotACache, UsageError, IdentityMismatch."""
    for source in sources:
        check_version(source)
    first, *others = headers = [read_header(source) for source in sources]
    for source, header in zip(sources[1:], others, strict=True):
        wrong = differences(first["identity"], header["identity"], has=f"{sources[0]} has", other=str(source))
        if wrong:
            lines = "\n  ".join(wrong)
            raise IdentityMismatch(f"these caches were not made alike:\n  {lines}\nMerge only caches of one identity.")
        if first["newline"] != header["newline"]:
            raise IdentityMismatch(f"{sources[0]} and {source} have another row after a video's tokens (newline)")
    return next((header for header in headers if "hidden_size" in header), first)


class _Found(NamedTuple):
    """The live rows of caches, _COLUMNS and the number of each one's cache, and the table's files that they are of."""

    rows: pa.Table
    files: list[list[TableFile]]


def _live_rows(stores: Sequence[Store], identity: str) -> _Found:
    """Read the live rows of each cache. Raises CorruptShard, OSError."""
    tables, files = [], []
    for number, store in enumerate(stores):
        opened = LiveVideos.open(store, identity)
        rows = opened.live(_COLUMNS)
        numbers = pa.array(np.full(len(rows), number, np.int32))
        # Names of token shards are few and long.
        names = rows["token_shard"].combine_chunks().dictionary_encode().cast(pa.dictionary(pa.int32(), pa.string()))
        place = rows.schema.get_field_index("token_shard")
        tables.append(rows.select(_COLUMNS).set_column(place, "token_shard", names).append_column("cache", numbers))
        files.append(opened.files)
    return _Found(pa.concat_tables(tables).unify_dictionaries().combine_chunks(), files)


def _refuse_equal(rows: pa.Table) -> None:
    """Raise UsageError where caches hold other tokens of one video."""
    kinds = ok_rows(rows).group_by("video_id").aggregate([("checksum", "count_distinct")])
    wrong = kinds.filter(pc.greater(kinds["checksum_count_distinct"], 1))["video_id"]
    if len(wrong):
        some = ", ".join(wrong.slice(0, _SHOWN).to_pylist())
        raise UsageError(
            f"{len(wrong)} videos have other tokens in several caches ({some}): take the row that counts with "
            "--on-equal rule, or remove them from one with python -m jobs.remove"
        )


def _take_videos(
    held: Sequence[Store],
    found: _Found,
    out: Store,
    identity: str,
    done: MergedCaches,
    say: Callable[[str], object],
) -> None:
    """Bring tokens and then the rows that name them into ``out``; of a cache that is written to, those of one moment.

    Where a cache's files were merged away meanwhile, it is read again.
    """
    for left in reversed(range(_TRIES)):
        try:
            _take_live_tokens(held, found.rows, out, done, say)
            for source, files in zip(held, found.files, strict=True):
                if source is not out:
                    _take_rows(source, files, out, identity, done)
            return
        except FileNotFoundError:
            if not left:
                raise
        found = _live_rows(held, identity)
        done.there, done.foreign = -done.linked - done.copied, []  # what was taken is there now


def _take_live_tokens(
    held: Sequence[Store], rows: pa.Table, out: Store, done: MergedCaches, say: Callable[[str], object]
) -> None:
    """Bring the token shards that live rows name into ``out``; ``rows`` has the number in ``held`` of each row."""
    order, _ = live_and_earlier(rule_columns(rows))
    live = rows.take(pa.array(order))
    done.videos, done.equal = len(live), len(rows) - len(live)
    for number, source in enumerate(held):
        if source is not out:
            mine = ok_rows(live.filter(pc.equal(live["cache"], number)))
            _take_tokens(source, out, mine["token_shard"].unique().to_pylist(), done, say)


def _take_tokens(
    source: Store, out: Store, names: Sequence[str], done: MergedCaches, say: Callable[[str], object]
) -> None:
    """Take over token shards into ``out``, as links or copies. Raises CorruptShard, OSError."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for number, n_bytes in enumerate(pool.map(partial(_take_file, source, out), names), 1):
            if n_bytes is None:
                done.there += 1
            elif n_bytes:
                done.copied += 1
                done.copied_bytes += n_bytes
            else:
                done.linked += 1
            if number % _TOLD == 0:
                say(f"{number:,} of {len(names):,} token shards of {source}")


def _take_file(source: Store, out: Store, name: str) -> int | None:
    """Bring a token shard into ``out``: return the bytes that were copied, 0 for a link, None where it was there."""
    if out.exists(name):
        return None
    if source.folder is not None and isinstance(out, LocalStore) and out.link(name, source.folder / name):
        return 0
    data = source.read(name)
    check_content(source, name, data, "rows")
    out.put(name, data)
    return len(data)


def _take_rows(source: Store, files: Sequence[TableFile], out: Store, identity: str, done: MergedCaches) -> None:
    """Copy ``files`` of a table into ``out``. Raises CorruptShard, OSError."""
    for file in files:
        data = source.read(file.name)
        if file.level:
            made_with = SortedFile(source, file).made_with
        else:
            made_with = made_with_of(read_small(source, file.name, data, ()).schema.metadata)
        if made_with not in (None, identity):
            done.foreign.append(f"{source}/{file.name}")
        elif not out.exists(file.name):
            out.put(file.name, data)


def _take_records(source: Store, out: Store) -> None:
    """Copy the records of a cache's runs into ``out``. Raises OSError."""
    for name in source.names(RUNS, ".json"):
        if not out.exists(name):
            out.put(name, source.read(name))
