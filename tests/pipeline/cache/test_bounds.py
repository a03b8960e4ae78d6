"""Damaged and hostile bytes: refused before memory is taken for their claims, or what was written is read."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import CorruptShard, NotACache, TokenCache
from pipeline.cache.bounds import check_unpacked
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import CHECKSUM, HEADER, read_header
from pipeline.cache.live import LiveVideos
from pipeline.cache.reader import TokenOrder
from pipeline.cache.schema import hash_bytes, slice_footer
from pipeline.cache.table import VideosTable, make_small_name, serialize_sorted
from pipeline.cache.token_shard import read_shard_video_ids
from pipeline.inspect.report import render_video_report
from pipeline.runner.run_record import read_committed, read_record
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.checks import check_token_shard
from tests.builders import caches
from tests.builders.caches import encoded_with, make_cache, random_tokens, read_live, write_header, write_shard
from tests.pipeline.damage import rewrite_row, set_column, shards
from tests.pipeline.verifying import kinds, verified

MANY = 2**31 - 1
N_BOMB = 9_000_000  # values of 8 bytes


@pytest.fixture
def store(tmp_path):
    return make_cache(tmp_path / "c", {"a": random_tokens(0, (4, 25, 16))}, hidden_size=16)


@pytest.mark.parametrize(
    "change",
    [
        {"n_frames": MANY},
        {"n_frames": MANY, "tokens_per_frame": 1, "n_total": MANY},
        {"n_frames": 0, "n_total": 0},
        {"tokens_per_frame": -25, "n_frames": -4},
        {"n_tokens": MANY, "n_total": MANY, "n_frames": 1, "tokens_per_frame": MANY},
        {"row_counts": [MANY, MANY]},
        {"row_counts": None},
        {"first_row_group": -1},
        {"hidden_size": MANY},
        {"kept_per_frame": []},
        {"frame_indices": []},
        {"timestamps": [0.0] * 2, "frame_indices": [0] * 2},
        {"temporal_density": [0.5]},
        {"manifest": "[" * 100_000},
        {"model_extra": "no JSON"},
    ],
    ids=str,
)
def test_a_row_that_contradicts_itself_is_refused_before_memory_is_taken(store, change):
    """n_frames of 2^31 - 1 made jobs.inspect ask for 17 GB."""
    rewrite_row(store, "a", lambda row: row.update(change))
    for read in (lambda cache: cache.get("a"), lambda cache: render_video_report(cache, "a")):
        with pytest.raises(CorruptShard, match="'a'"):
            read(TokenCache(store.root))


def write(table: pa.Table, n_rows: int, **options: object) -> bytes:
    file = io.BytesIO()
    with pq.ParquetWriter(file, table.schema, **{"compression": "zstd", **options}) as writer:
        writer.write_table(table, row_group_size=n_rows)
    return file.getvalue()


def put_tokens(store: LocalStore, data: bytes, **row: object) -> None:
    """Put the bytes for the token shard of "a", with a row that fits them."""
    (file,) = shards(store)
    store.put(f"tokens/{file.name}", data)
    footer = hash_bytes(slice_footer(memoryview(data)))
    rewrite_row(store, "a", lambda old: old.update(row, footer_hash=footer))


def repeat_tokens(store: LocalStore, n_rows: int, **columns: pa.Array) -> bytes:
    """A token shard of one group: the first row of the store's so many times, with some columns replaced."""
    (file,) = shards(store)
    table = pq.read_table(file).slice(0, 1).take(pa.array(np.zeros(n_rows, np.int64)))
    for name, values in columns.items():
        table = set_column(table, pa.field(name, values.type), values)
    return write(table, n_rows, write_statistics="video_id" not in columns)


def one_group(n_rows: int) -> dict[str, object]:
    counts = {"n_tokens": n_rows, "n_total": n_rows, "n_frames": 1, "tokens_per_frame": n_rows}
    frames = {"frame_indices": [0], "timestamps": [0.0], "temporal_density": None, "n_repeated": 0}
    return {**counts, **frames, "row_counts": [n_rows], "kept_per_frame": [n_rows], "retention_ratio": 1.0}


LONG = "0" * 4_000_000
BOMBS: dict[str, tuple[int, int, Callable[[], dict[str, pa.Array]]]] = {  # rows, rows that its row says, other columns
    "vectors of one dictionary entry": (2_000_000, 2_000_000, dict),
    "a row group of more rows than the row has": (100, 25, dict),
    "wider vectors than the row has": (
        25,
        25,
        lambda: {"token": pa.array([bytes(4_000_000)] * 25, pa.binary(4_000_000))},
    ),
    "texts instead of positions": (25, 25, lambda: {"index": pa.array([LONG] * 25)}),
    "lists instead of ranks": (1, 1, lambda: {"rank": pa.array([np.zeros(N_BOMB, np.int64)])}),
    "positions beyond the video": (1, 1, lambda: {"frame": pa.array([MANY], pa.int32())}),
    "long ids": (25, 25, lambda: {"video_id": pa.array([LONG] * 25)}),
}


@pytest.mark.parametrize(("n_rows", "n_said", "make_columns"), BOMBS.values(), ids=BOMBS)
def test_a_token_shard_that_unpacks_to_more_than_it_can_hold_is_refused(store, n_rows, n_said, make_columns):
    """A shard of 74 kB unpacked to 928 MB."""
    columns = make_columns()
    put_tokens(store, repeat_tokens(store, n_rows, **columns), **one_group(n_said))
    before = pa.default_memory_pool().max_memory()
    for order in ("index", "selection"):
        for verify in (False, True):
            if verify or "video_id" not in columns:  # which verification alone reads
                with pytest.raises(CorruptShard):
                    TokenCache(store.root).get("a", order=order, verify=verify)
    assert kinds(verified(store))
    if "video_id" in columns:
        with pytest.raises(ValueError, match="too many for a file"):
            read_shard_video_ids(store, *store.names("tokens", ".parquet"))
    assert pa.default_memory_pool().max_memory() == before  # of making the file


def many(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        field = table.schema.field(name)
        return set_column(table, field, pa.array([value] * len(table), field.type))

    return change


long_text = many("manifest", json.dumps({"a": " " * 100_000_000}))
TABLES = {
    "a long list": many("frame_indices", np.zeros(N_BOMB, np.int64)),
    "a text of a dictionary": lambda table: many("uri", LONG)(pa.concat_tables([table] * 25)),
    "many rows": lambda table: table.take(pa.array(np.zeros(400_000, np.int64))),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_a_videos_table_that_unpacks_to_more_than_it_can_hold_is_refused(store, change):
    """The only file of the table is replaced by another, packed as tightly as Parquet can."""
    (file,) = shards(store, "videos")
    table = change(pq.read_table(file))
    data = write(table, len(table))
    file.unlink()
    store.put(make_small_name("videos", "run", 0, data), data)
    with pytest.raises(CorruptShard, match="too many for a file"):
        TokenCache(store.root).metadata("a")
    assert kinds(verified(store)) == ["commit"]


def test_the_same_of_a_sorted_file_and_on_s3(store, server):
    far = ObjectStore(server.uri("c"), server.objects())
    far.put("cache.json", store.read("cache.json"))
    (file,) = shards(store, "videos")
    name, data = serialize_sorted(1, long_text(pq.read_table(file)), {}, None)
    file.unlink()
    for place in (store, far):
        place.put(name, data)
        with pytest.raises(CorruptShard, match="too many for a file"):
            LiveVideos.open(place).row("a")


def test_decompressed_pages_count_beside_the_values_that_arrow_makes_of_them():
    data = write(pa.table({"index": np.zeros(5_000_000, np.int64)}), 5_000_000, use_dictionary=False)
    metadata = pq.read_metadata(io.BytesIO(data))
    with pytest.raises(ValueError, match="it unpacks to 100,0"):
        check_unpacked(metadata, [0], [0], lambda start, end: memoryview(data)[start:end], len(data))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"token_shards": 5}', "[1]"])
def test_the_record_of_a_run_may_hold_anything(store, text):
    store.put("runs/run.json", text.encode())
    assert read_committed(store, "run") is None and read_record(store, "runs/run.json").get("config") is None
    assert kinds(verified(store)) == []


SHAPE = (2, 5, 2)  # 10 tokens of 2 numbers, of which 2 are kept, in two row groups


class Flipped(LocalStore):
    """A cache of which one file comes with one bit that is not what was written."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        self.name, self.data = name, bytearray(LocalStore(root).read(name))

    def flips(self, step: int = 1) -> Iterator[int]:
        """Flip each ``step``-th bit for one turn."""
        for bit in range(0, 8 * len(self.data), step):
            self.data[bit // 8] ^= 1 << bit % 8
            yield bit
            self.data[bit // 8] ^= 1 << bit % 8

    def read(self, name: str) -> bytes:
        return bytes(self.data) if name == self.name else super().read(name)

    def open(self, name: str) -> LocalFile:
        return LocalFile(pa.BufferReader(bytes(self.data))) if name == self.name else super().open(name)


def bytes_of(video: CachedVideo) -> bytes:
    """Return all bytes that a read gives, and their shapes."""
    columns = (video.tokens, video.index, video.rank, video.frame, video.merged, video.density)
    tensors = [t for t in (*columns, *video.evidence.values()) if t is not None]
    shapes = repr([(t.shape, t.dtype) for t in tensors]).encode()
    return shapes + b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


@pytest.fixture
def small(tmp_path) -> LocalStore:
    """A cache of one video, coded and with evidence."""
    identity = caches.make_identity(codec="int4", evidence={"token_attention": "last_layer"})
    store = write_header(tmp_path, codec="int4", identity=identity)
    evidence = {"token_attention": caches.random_evidence(SHAPE)["token_attention"]}
    write_shard(store, "run", encoded_with("v", random_tokens(0, SHAPE), 0.25, "gstep", evidence))
    return store


def test_bits_of_a_token_shard(small):
    """In the pages, where verify finds whatever a read refuses, and in the footer."""
    (name,), (commit,) = small.names("tokens", ".parquet"), small.names("videos", ".parquet")
    row, header = VideosTable(small).read_row(commit, 0), read_header(small)
    flipped, live, sound = Flipped(small.root, name), read_live(small), TokenCache(small.root)

    def read(order: TokenOrder = "selection") -> bytes | None:
        cache = TokenCache(small.root, store=flipped, live=live)
        try:
            return bytes_of(*cache.get_rows([sound.metadata("v")], None, order, tuple(sound.evidence)))
        except CorruptShard:
            return None

    written, by_index = read(), read("index")
    assert None not in (written, by_index) and not check_token_shard(flipped, name, [(commit, row)], header).problems
    n_pages, n_raised, step = len(flipped.data) - len(slice_footer(memoryview(bytes(flipped.data)))), 0, 47
    for bit in flipped.flips(step):
        data = read()
        assert data in (None, written), bit
        if bit >= 8 * n_pages:
            assert data is None, bit
            continue
        n_raised += data is None
        if bit % 3 == 0:
            assert read("index") in (None, by_index), bit
            if data is None:
                assert check_token_shard(flipped, name, [(commit, row)], header).problems, bit
    assert n_raised > 4 * n_pages / step  # half of the flips
    assert read() == written


def test_every_bit_of_the_header(tmp_path):
    """A flip in the name of the checksum makes a header of another version of this program; all else is as it was."""
    store = write_header(tmp_path, hidden_size=2, newline=base64.b64encode(bytes(range(4))).decode())
    written = {name: value for name, value in read_header(store).items() if name != CHECKSUM}
    flipped, n_read = Flipped(tmp_path, HEADER), 0
    for bit in flipped.flips():
        try:
            header = read_header(flipped)
        except NotACache:
            continue
        n_read += 1
        assert {name: header[name] for name in written} == written, bit
    assert 0 < n_read < len(flipped.data)
