"""Define the Parquet format of the cache: its columns, their types and meanings, and how files are written and read.

A token shard counts only once a row of the videos table names it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gstep.evidence import is_frame_evidence
from gstep.types import budget_for
from pipeline.cache.codecs import BFLOAT16, CODECS, TokenCodec
from pipeline.errors import CorruptShard
from pipeline.rows import VIDEO_COLUMNS

TOKENS, VIDEOS = "tokens", "videos"  # folders of a cache
SCHEMA_VERSION = 3
# The version of a cache with coded tokens names the codec, so that versions that lack the codec report its name.
CODED_VERSIONS = {codec.name: f"{SCHEMA_VERSION}+{codec.name}" for codec in CODECS.values() if codec is not BFLOAT16}
VERSIONS: tuple[int | str, ...] = (SCHEMA_VERSION, *CODED_VERSIONS.values())
MADE_WITH = "made_with"  # the metadata key of a videos file for the fingerprint of its rows' identity
_LEVEL = "the token at this deepstack level"  # the meaning of deepstack columns
# Row groups end at these shares: a reader of 10 % of the tokens reads only the row groups up to there.
TIERS = (0.10, 0.15, 0.20, 0.25, 0.50)


def make_field(name: str, kind: pa.DataType, meaning: str, *, nullable: bool = True) -> pa.Field:
    """Build an Arrow field with ``meaning`` in its metadata, under the key "meaning"."""
    return pa.field(name, kind, nullable=nullable, metadata={"meaning": meaning})


def build_token_schema(
    hidden_size: int,
    deepstack_levels: int = 0,
    evidence: Mapping[str, int] = MappingProxyType({}),
    codec: TokenCodec = BFLOAT16,
) -> pa.Schema:
    """Build the schema of a token shard, which has a row per token; the rows of a video are in order of selection.

    For a method without such an order, they are in the order of its own prompt (VisionZip: a frame's merged tokens
    last), or by index.

    Args:
        hidden_size: D.
        deepstack_levels: the number of vectors stored besides the token.
        evidence: label -> numbers per token, or per frame. These columns come last, so that other reads skip their
            bytes. Evidence of a frame is in the row of the frame's first token, and null in the frame's other rows.
        codec: how tokens and deepstack vectors are stored; evidence is always bfloat16.
    """
    return pa.schema(
        [
            make_field("video_id", pa.string(), "the video this token belongs to", nullable=False),
            make_field("rank", pa.int32(), "order of selection, 0 first; null for methods without an order"),
            make_field("index", pa.int32(), "flat position t*N + i before pruning", nullable=False),
            make_field("frame", pa.int32(), "t, the sampled frame (temporal patch on Qwen)", nullable=False),
            *_build_vector_fields("token", "hidden_size little-endian bfloat16 values", hidden_size, codec),
            make_field(
                "merged", pa.bool_(), "a merged token at its target's index; null where the method never merges"
            ),
            make_field("density", pa.float32(), "rho, Eq. (8); null for methods without a density"),
            *(
                field
                for level in range(deepstack_levels)
                for field in _build_vector_fields(f"deepstack_{level}", _LEVEL, hidden_size, codec)
            ),
            *(_build_evidence_field(name, width) for name, width in evidence.items()),
        ]
    )


def _build_vector_fields(name: str, meaning: str, hidden_size: int, codec: TokenCodec) -> list[pa.Field]:
    """Build the columns that store vectors with a codec; ``meaning`` is used for bfloat16 only."""
    coded_meanings = {
        name: f"{codec.bits}-bit whole numbers; of 4 bits each plus 8, and the first in a byte's high half",
        f"{name}_scale": f"float16 that each {codec.group} of those are multiplied by",
        f"{name}_kept": "pairs of uint16: a channel, and its bfloat16 bits, which replace what the others give",
    }
    meanings = {name: meaning} if codec is BFLOAT16 else coded_meanings
    widths = codec.widths(name, hidden_size)
    return [make_field(part, pa.binary(width), meanings[part], nullable=False) for part, width in widths.items()]


def _build_evidence_field(name: str, width: int) -> pa.Field:
    """Build the bfloat16 column of an evidence label with ``width`` numbers, nullable if the evidence is per frame."""
    of_frame = is_frame_evidence(name)
    subject = "frame, beside the first of its tokens" if of_frame else "token"
    meaning = f"evidence of the {subject}, little-endian bfloat16"
    return make_field(name, pa.binary(2 * width), meaning, nullable=of_frame)


def _parse_type(name: str) -> pa.DataType:
    """Return the Arrow type of a name such as "int32" or "list<int32>"."""
    item = name.removeprefix("list<").removesuffix(">")
    return pa.type_for_alias(name) if item == name else pa.list_(pa.type_for_alias(item))


VIDEO_SCHEMA = pa.schema(
    make_field(name, _parse_type(spec.kind), spec.meaning, nullable=spec.nullable)
    for name, spec in VIDEO_COLUMNS.items()
)
#: Nullable columns that were added later without a new schema version -> the date since when files have them.
LATER: Mapping[str, str] = {name: spec.since for name, spec in VIDEO_COLUMNS.items() if spec.since}
# Columns that are computed from the others, to find and compare the rows of an id.
KEY_COLUMNS = ("id_high", "id_low", "clip_key", "rewritten", "earlier_attempts", "tie_break")


def complete_columns(
    table: pa.Table, columns: Sequence[str], schema: pa.Schema, later: Collection[str], place: str
) -> pa.Table:
    """Return ``columns`` of the rows of a stored file, in this order and without the file's metadata.

    Args:
        schema: the present schema of the table.
        later: the columns that older files may lack; they are filled with nulls.
        place: the file's name for the error message.

    Raises:
        CorruptShard: the file lacks any other column. The kind is "schema".
    """
    missing_names = set(columns).difference(table.schema.names)
    if lost_names := sorted(missing_names.difference(later)):
        raise CorruptShard(f"{place}: it has no column {', '.join(lost_names)}; restore the file", "schema")
    for name in missing_names:
        field = schema.field(name)
        table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(list(columns)).replace_schema_metadata(None)


def compute_tier_row_counts(n_total: int, n_kept: int, retention_ratio: float, *, nested: bool) -> list[int]:
    """Return the number of rows in each of a video's row groups, for a video with ``n_kept`` of ``n_total`` tokens.

    Row groups end at the budgets of TIERS below ``retention_ratio``, so that a reader of a smaller ratio reads a
    prefix. Equal budgets end one group. If not ``nested``, there is one group.
    """
    ends = {budget_for(tier, n_total) for tier in TIERS if nested and tier < retention_ratio}
    inner = sorted(end for end in ends if end < n_kept)
    return [end - start for start, end in zip([0, *inner], [*inner, n_kept], strict=True)]


def write_parquet(
    table: pa.Table, row_groups: Sequence[int] | None = None, *, bloom_column: str | None = None
) -> pa.Buffer:
    """Serialize a table to a Parquet file in memory, with page checksums.

    Fixed-size binary columns are not compressed; all others get zstd and statistics.

    Args:
        row_groups: the number of rows of each row group, which must sum to the rows of the table. None writes one
            group.
        bloom_column: a column that gets a Bloom filter per row group; ignored before pyarrow 26.
    """
    vectors = [f.name for f in table.schema if pa.types.is_fixed_size_binary(f.type)]
    other_columns = [f.name for f in table.schema if f.name not in vectors]
    options = {}
    if bloom_column is not None and "bloom_filter_options" in inspect.signature(pq.ParquetWriter.__init__).parameters:
        bloom = {"ndv": max(row_groups or [1]), "fpp": 0.01}  # one false positive in a hundred
        options["bloom_filter_options"] = {bloom_column: bloom}  # pyarrow 26 and later
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        table.schema,
        use_dictionary=False,
        # Token vectors hardly compress, so they stay uncompressed for speed; the other columns compress well.
        compression={**dict.fromkeys(vectors, "none"), **dict.fromkeys(other_columns, "zstd")},
        write_statistics=other_columns,
        write_page_checksum=True,
        store_schema=True,
        **options,
    ) as writer:
        start = 0
        for rows in row_groups or [len(table)]:
            writer.write_table(table.slice(start, rows), row_group_size=max(rows, 1))
            start += rows
    assert start == len(table), (start, len(table))
    return sink.getvalue()


# Arrow's thread pool and torch in one process abort at exit when threads have only just started ("terminate called
# without an active exception", one short process in seven). There are few columns here, so one thread reads them.
READ_THREADS = False


def open_parquet(source: Any, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a Parquet file so that every page is checked against its checksum when it is read, column by column.

    Args:
        metadata: the parsed footer, if it is known; the file's footer is then not read.
    """
    return pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True, pre_buffer=False)


def hash_bytes(*parts: Any) -> str:
    """Hash the concatenation of bytes-like parts with BLAKE2b to ``blake2b:<32 hex digits>``."""
    return f"blake2b:{hash_bytes_to_hex(*parts)}"


def hash_bytes_to_hex(*parts: Any) -> str:
    """Hash the concatenation of bytes-like parts with BLAKE2b to 32 hex digits."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


FOOTER_TAIL = 8  # bytes: 4 of the footer length, 4 of the magic


def parse_footer_length(tail: bytes) -> int:
    """Return the length in bytes of a Parquet footer, including the last FOOTER_TAIL bytes, from these last bytes.

    Raises:
        ValueError: the file does not end in PAR1.
    """
    if len(tail) != FOOTER_TAIL or tail[4:] != b"PAR1":
        raise ValueError("not a Parquet file: it does not end in PAR1")
    return int.from_bytes(tail[:4], "little") + FOOTER_TAIL


def slice_footer(data: memoryview) -> memoryview:
    """Return the footer of a whole Parquet file, including the length and magic at its end.

    Raises:
        ValueError: ``data`` does not end in PAR1.
    """
    return data[len(data) - parse_footer_length(bytes(data[-FOOTER_TAIL:])) :]


def parse_footer(footer: bytes) -> pq.FileMetaData:
    """Parse Parquet metadata from the bytes of a footer as ``slice_footer`` returns it."""
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
