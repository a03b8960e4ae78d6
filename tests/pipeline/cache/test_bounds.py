"""What a hostile row or file claims is refused before memory is taken for it, also where all its hashes are right."""

import io
import json
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import CorruptShard, TokenCache
from pipeline.cache.live import LiveVideos
from pipeline.cache.schema import hash_bytes, slice_footer
from pipeline.cache.table import make_small_name, serialize_sorted
from pipeline.cache.token_shard import read_shard_video_ids
from pipeline.inspect.report import render_video_report
from pipeline.runner.run_record import read_committed, read_record
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.caches import make_cache, random_tokens
from tests.pipeline.damage import rewrite_row, shards
from tests.pipeline.verifying import kinds, verified

MANY = 2**31 - 1
N_BOMB = 12_000_000  # values of 8 bytes


@pytest.fixture
def store(tmp_path):
    return make_cache(tmp_path / "c", {"a": random_tokens(0, (4, 25, 16))}, hidden_size=16)


@pytest.mark.parametrize(
    "change",
    [
        {"n_frames": MANY},
        {"n_frames": MANY, "tokens_per_frame": 1, "n_total": MANY},
        {"n_frames": 0, "n_total": 0},
        {"tokens_per_frame": MANY},
        {"tokens_per_frame": -25, "n_frames": -4},
        {"n_total": MANY},
        {"n_tokens": MANY, "n_total": MANY, "n_frames": 1, "tokens_per_frame": MANY},
        {"row_counts": [MANY, MANY]},
        {"row_counts": [10, None, 5, 5]},
        {"row_counts": None},
        {"first_row_group": -1},
        {"hidden_size": MANY},
        {"hidden_size": 0},
        {"kept_per_frame": []},
        {"frame_indices": []},
        {"timestamps": [0.0] * 2, "frame_indices": [0] * 2},
        {"temporal_density": [0.5]},
        {"manifest": "[" * 100_000},
        {"model_extra": "no JSON"},
        {"model_extra": "[1]"},
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


def repeat_tokens(store: LocalStore, n_rows: int) -> pa.Table:
    """The first row of the token shard, so many times."""
    (file,) = shards(store)
    return pq.read_table(file).slice(0, 1).take(pa.array(np.zeros(n_rows, np.int64)))


def one_group(n_rows: int) -> dict[str, object]:
    counts = {"n_tokens": n_rows, "n_total": n_rows, "n_frames": 1, "tokens_per_frame": n_rows}
    frames = {"frame_indices": [0], "timestamps": [0.0], "temporal_density": None, "n_repeated": 0}
    return {**counts, **frames, "row_counts": [n_rows], "kept_per_frame": [n_rows], "retention_ratio": 1.0}


def replace(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), pa.field(name, values.type), values)


BOMBS: dict[str, Callable[[LocalStore], object]] = {
    "vectors of one dictionary entry": lambda store: put_tokens(
        store, write(repeat_tokens(store, 2_000_000), 2_000_000), **one_group(2_000_000)
    ),
    "a row group of more rows than the row has": lambda store: put_tokens(
        store, write(repeat_tokens(store, 2_000_000), 2_000_000), **one_group(25)
    ),
    "wider vectors than the row has": lambda store: put_tokens(
        store,
        write(replace(repeat_tokens(store, 25), "token", pa.array([bytes(4_000_000)] * 25, pa.binary(4_000_000))), 25),
        **one_group(25),
    ),
    "texts instead of positions": lambda store: put_tokens(
        store, write(replace(repeat_tokens(store, 25), "index", pa.array(["0" * 4_000_000] * 25)), 25), **one_group(25)
    ),
    "lists instead of ranks": lambda store: put_tokens(
        store,
        write(replace(repeat_tokens(store, 1), "rank", pa.array([np.zeros(N_BOMB, np.int64)])), 1),
        **one_group(1),
    ),
    "positions beyond the video": lambda store: put_tokens(
        store, write(replace(repeat_tokens(store, 1), "frame", pa.array([MANY], pa.int32())), 1), **one_group(1)
    ),
    "no positions": lambda store: put_tokens(
        store, write(replace(repeat_tokens(store, 1), "index", pa.nulls(1, pa.int32())), 1), **one_group(1)
    ),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_token_shard_that_unpacks_to_more_than_it_can_hold_is_refused(store, bomb):
    """A shard of 74 kB unpacked to 928 MB."""
    bomb(store)
    before = pa.default_memory_pool().max_memory()
    for order in ("index", "selection"):
        for verify in (False, True):
            with pytest.raises(CorruptShard):
                TokenCache(store.root).get("a", order=order, verify=verify)
    assert kinds(verified(store))
    assert pa.default_memory_pool().max_memory() == before  # of making the file


def test_the_ids_of_a_token_shard_are_bounded_too(store):
    (file,) = shards(store)
    table = repeat_tokens(store, 25)
    data = write(replace(table, "video_id", pa.array(["a" * 4_000_000] * 25)), 25, write_statistics=False)
    put_tokens(store, data, **one_group(25))
    with pytest.raises(ValueError, match="too many for a file"):
        read_shard_video_ids(store, f"tokens/{file.name}")
    with pytest.raises(CorruptShard):
        TokenCache(store.root).get("a", verify=True)


def change_table(store: LocalStore | ObjectStore, change: Callable[[pa.Table], pa.Table], **options: object) -> None:
    """Replace the only file of the videos table by another, packed as tightly as Parquet can."""
    (name,) = store.names("videos", ".parquet")
    table = change(pq.read_table(io.BytesIO(store.read(name))))
    data = write(table, max(1, len(table)), **options)
    store.delete(name)
    store.put(make_small_name("videos", "run", 0, data), data)


def many(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return replace(table, name, pa.array([value] * len(table), table.schema.field(name).type))

    return change


TABLES: dict[str, tuple[Callable[[pa.Table], pa.Table], dict[str, object]]] = {
    "a long list": (many("frame_indices", np.zeros(N_BOMB, np.int64)), {}),
    "a long text": (many("manifest", json.dumps({"a": " " * 100_000_000})), {"use_dictionary": False}),
    "a text of a dictionary": (lambda table: many("uri", "x" * 4_000_000)(pa.concat_tables([table] * 25)), {}),
    "many rows": (lambda table: table.take(pa.array(np.zeros(400_000, np.int64))), {}),
    "another codec": (
        many("manifest", json.dumps({"a": " " * 100_000_000})),
        {"use_dictionary": False, "compression": "brotli"},
    ),
}


@pytest.mark.parametrize(("change", "options"), TABLES.values(), ids=TABLES)
def test_a_videos_table_that_unpacks_to_more_than_it_can_hold_is_refused(store, change, options):
    change_table(store, change, **options)
    with pytest.raises(CorruptShard, match="too many for a file"):
        TokenCache(store.root).metadata("a")
    assert kinds(verified(store)) == ["commit"]


def test_the_same_of_a_sorted_file_and_on_s3(store, server):
    far = ObjectStore(server.uri("c"), server.objects())
    table = many("manifest", json.dumps({"a": " " * 100_000_000}))(
        pq.read_table(io.BytesIO(store.read(*store.names("videos", ".parquet"))))
    )
    name, data = serialize_sorted(1, table, {}, None)
    far.put("cache.json", store.read("cache.json"))
    far.put(name, data)
    for place in (store, far):
        place.delete(*place.names("videos", ".parquet"))
        place.put(name, data)
        with pytest.raises(CorruptShard, match="too many for a file"):
            LiveVideos.open(place).row("a")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"token_shards": 5}', "[1]", "5", '"a"'])
def test_the_record_of_a_run_may_hold_anything(store, text):
    store.put("runs/run.json", text.encode())
    assert read_committed(store, "run") is None and read_record(store, "runs/run.json").get("config") is None
    assert kinds(verified(store)) == []
