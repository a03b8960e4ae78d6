"""``jobs.diff``: the videos or the answers in which two places differ, by their rows, without reading a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cache.header import CacheIdentity, differences, fingerprint
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.reader import HEADER, read_header
from pipeline.errors import NotACache
from pipeline.generate.answers import HEADER as ANSWERS_HEADER
from pipeline.generate.answers import read_answers, read_answers_header
from pipeline.storage.stores import Store

#: What rows are compared by: whether they are ok, their tokens or answer, and what else.
_STATUS = ("status", "error_class")
_TOKENS, _ANSWER = ("checksum",), ("answer", "choice")
_ROW = (
    *("n_tokens", "n_total", "retention_ratio", "uri", "start_s", "end_s", "source_size", "source_hash"),
    *("decode_warnings", "backend", "fps", "duration_s", "width", "height", "manifest", "model_extra"),
)
_ANSWER_ROW = ("prompt", "target", "n_visual_tokens", "n_kept", "retention_ratio", "finish", "decoding")
_EXAMPLES: Final = 5
_unlike = partial(differences, has="the first has", other="the second")


@dataclass(frozen=True)
class Differing:
    """The ids that differ in one way: how many, and some of them."""

    count: int
    examples: list[str]

    @classmethod
    def of(cls, ids: pa.ChunkedArray) -> Differing:
        """Count ids and keep the first ones."""
        return cls(len(ids), sorted(ids.slice(0, _EXAMPLES).to_pylist()))


@dataclass(frozen=True)
class Difference:
    """The differences between two places of one kind.

    Attributes:
        item: "video" or "question".
        identity: a line for each setting in which they differ.
        n_equal: items that both have, alike in all that is compared.
        only_first, only_second: items of which the other has no row.
        status: items that are ok in one and failed, or failed otherwise, in the other.
        content: items whose tokens (answers) differ.
        rows: items alike in those whose other columns differ.
        columns: column -> of how many items in ``rows`` it differs.
    """

    item: str
    identity: list[str]
    n_equal: int
    only_first: Differing
    only_second: Differing
    status: Differing
    content: Differing
    rows: Differing
    columns: dict[str, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Return whether nothing differs."""
        return not self.identity and not any(differing.count for _, differing in self.ways())

    def ways(self) -> Iterator[tuple[str, Differing]]:
        """Yield each way of differing, in words, with its items."""
        content = "other tokens" if self.item == "video" else "other answers"
        yield "only in the first", self.only_first
        yield "only in the second", self.only_second
        yield "another status", self.status
        yield content, self.content
        yield "other columns", self.rows


def compare(first: Store, second: Store) -> Difference:
    """Compare two caches, or two folders of answers.

    Raises NotACache where a place is neither, or they are of two kinds; CorruptShard and OSError.
    """
    kinds = [_kind(store) for store in (first, second)]
    if kinds[0] != kinds[1]:
        raise NotACache(f"{first} holds {kinds[0]} and {second} {kinds[1]}: compare two of one kind")
    if kinds[0] == "answers":
        lines = _unlike(read_answers_header(first)["identity"], read_answers_header(second)["identity"])
        return _difference("question", lines, _answers(first), _answers(second), _ANSWER, _ANSWER_ROW)
    one, other = read_header(first)["identity"], read_header(second)["identity"]
    return _difference("video", _unlike(one, other), _videos(first, one), _videos(second, other), _TOKENS, _ROW)


def _kind(store: Store) -> str:
    """Return what a place holds: "a cache" or "answers". Raises NotACache."""
    if store.exists(HEADER):
        return "a cache"
    if store.exists(ANSWERS_HEADER):
        return "answers"
    raise NotACache(f"{store} is neither a pruned-token cache nor a folder of answers")


def _videos(store: Store, identity: CacheIdentity) -> pa.Table:
    """Return the live rows of a cache: ``id``, and the columns that are compared."""
    names = (*_STATUS, *_TOKENS, *_ROW)
    rows = LiveVideos.open(store, fingerprint(identity)).live(("video_id", *names))
    return rows.select(["video_id", *names]).rename_columns({"video_id": "id"})


def _answers(store: Store) -> pa.Table:
    """Return the live answers: ``id``, with the pruning where there are several, and the columns that are compared."""
    rows = read_answers(str(store), store=store)
    ids = pc.binary_join_element_wise(rows["question_id"], rows["pruning"], " ", null_handling="skip")
    names = (*_STATUS, *_ANSWER, *_ANSWER_ROW)
    return pa.table([ids, *(rows[name] for name in names)], names=["id", *names])


def _difference(
    item: str, identity: list[str], first: pa.Table, second: pa.Table, content: Sequence[str], row: Sequence[str]
) -> Difference:
    """Join the rows of both by their ids, and sort the ids by how they differ."""
    only_first = first.join(second, "id", join_type="left anti")["id"]
    only_second = second.join(first, "id", join_type="left anti")["id"]
    both = first.join(second, "id", join_type="inner", left_suffix="_1", right_suffix="_2")
    by_column = {name: _unequal(both, name) for name in (*_STATUS, *content, *row)}
    any_status, any_content, any_row = (
        reduce(pc.or_, [by_column[name] for name in names]) for names in (_STATUS, content, row)
    )
    before = pc.or_(any_status, any_content)
    other_content, other_row = pc.and_not(any_content, any_status), pc.and_not(any_row, before)
    counts = {name: pc.sum(pc.and_(by_column[name], other_row)).as_py() or 0 for name in row}
    n_equal = len(both) - (pc.sum(pc.or_(before, other_row)).as_py() or 0)
    return Difference(
        item=item,
        identity=identity,
        n_equal=n_equal,
        only_first=Differing.of(only_first),
        only_second=Differing.of(only_second),
        status=Differing.of(both["id"].filter(any_status)),
        content=Differing.of(both["id"].filter(other_content)),
        rows=Differing.of(both["id"].filter(other_row)),
        columns={name: count for name, count in counts.items() if count},
    )


def _unequal(both: pa.Table, name: str) -> pa.ChunkedArray:
    """Return of each row whether its two values differ; null equals null alone."""
    one, other = both[f"{name}_1"], both[f"{name}_2"]
    return pc.coalesce(pc.not_equal(one, other), pc.xor(pc.is_null(one), pc.is_null(other)))


def render(difference: Difference) -> RenderableType:
    """Render the differences for the terminal: settings, then a line for each way of differing."""
    lines: list[RenderableType] = [Text(line) for line in difference.identity]
    table = Table.grid(padding=(0, 2))
    table.add_row("equal", f"{difference.n_equal:,}")
    for words, differing in difference.ways():
        some = ", ".join(differing.examples) + (", ..." if differing.count > len(differing.examples) else "")
        table.add_row(words, f"{differing.count:,}", Text(some))
    if difference.columns:
        table.add_row("", "", Text(", ".join(f"{name} {count:,}" for name, count in difference.columns.items())))
    return Group(*lines, table)
