"""Token shards: the Parquet contract, vectors from their pages, what the driver commits, and codecs.

What a reader gets of coded vectors is the same by this package and without it.
"""

from __future__ import annotations

import io
import math
import os
import shutil
from dataclasses import replace
from threading import Barrier
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gstep import PrunedTokens
from pipeline import CorruptShard, NotACache, TokenCache
from pipeline.cache import schema
from pipeline.cache.codecs import BFLOAT16, CODECS, TokenCodec
from pipeline.cache.header import HEADER, get_codec, read_fingerprint, read_header, serialize_header
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.pages import copy_vectors_to_rows, find_plain_columns, get_plain_page_range
from pipeline.cache.schema import VIDEO_SCHEMA, build_token_schema, compute_tier_row_counts
from pipeline.cache.token_shard import TokenRequest, TokenShard, hash_vectors, read_videos
from pipeline.cache.writer import KeptTokens, commit_records, write_token_shard
from pipeline.errors import RunFailed
from pipeline.storage.stores import LocalStore
from tests.builders.caches import encoded, make_cache, make_identity, random_tokens, write_header, write_shard
from tests.examples import run_example
from tests.pipeline.damage import rewrite_row
from tests.pipeline.verifying import remove, verified

VIDEO = encoded("v", random_tokens(0), 0.25, "gstep")


@pytest.mark.parametrize("count", [0, 3])
def test_tensors_without_rows_become_arrays_of_their_width(count):
    index = torch.arange(count)
    pruned = PrunedTokens(torch.ones(count, 8), index, index, None, n_total=12, retention_ratio=0.25)
    shapes = {"token_attention": (count, 1), "token_key": (count, 4), "frame_feature": (0, 6)}
    evidence = {name: torch.ones(shape) for name, shape in shapes.items()} | {"token_attention": torch.ones(count)}
    for order in (slice(None), index.flip(0)):
        kept = KeptTokens.of(pruned, [torch.ones(count, 8)], evidence, order)
        assert [values.shape for values in (kept.tokens, *kept.deepstack)] == [(count, 8), (count, 8)]
        assert {name: values.shape for name, values in kept.evidence.items()} == shapes
        assert kept.tokens.dtype == np.int16 and (kept.index.shape, kept.rank.shape) == ((count,), (count,))


def test_tokens_on_a_disk_that_is_not_shared_are_not_committed(tmp_path):
    store = write_header(tmp_path / "drivers")
    rows = write_token_shard([VIDEO], store=write_header(tmp_path / "nodes"), run_id="run")
    with pytest.raises(FileNotFoundError, match="use a folder that all nodes share"):
        commit_records(store, "run", 0, rows, made_with=read_fingerprint(store))
    assert len(TokenCache(tmp_path / "drivers")) == 0


def last_bit(values):
    changed = values.copy()
    if values.dtype == np.float32:
        changed.flat[-1] = np.nextafter(changed.flat[-1], np.float32(np.inf))
    else:
        changed.flat[-1] ^= 1
    return changed


@pytest.mark.parametrize(("method", "columns"), [("gstep", ["rank", "density"]), ("visionzip", ["merged"])])
@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_a_shard_is_named_by_every_byte_of_its_columns_and_a_checksum_is_of_all_vectors(
    tmp_path, method, columns, codec
):
    """One bit anywhere gives another name, and the same bytes the same."""
    store, video = write_header(tmp_path, method=method), encoded("v", random_tokens(0), 0.25, method)
    evidence = {"token_attention": np.arange(len(video.kept.index), dtype=np.int16)[:, None]}
    whole = replace(video.kept, deepstack=[video.kept.tokens ^ np.int16(3)], evidence=evidence)

    def hashes_of(**change) -> tuple[str, str]:
        """Write the video with other columns; return the name of its shard and its checksum."""
        changed = replace(video, kept=replace(whole, **change))
        (row,) = write_token_shard([changed], store=store, run_id="run", codec=CODECS[codec])
        (table,) = read_videos(store, [row])
        assert hash_vectors(table) == row["checksum"]
        return row["token_shard"], row["checksum"]

    vectors = [
        hashes_of(tokens=whole.tokens ^ np.int16(1)),
        hashes_of(deepstack=[whole.deepstack[0] ^ np.int16(256)]),
        hashes_of(evidence={name: last_bit(values) for name, values in evidence.items()}),
    ]
    others = [hashes_of(**{name: last_bit(getattr(whole, name))}) for name in ("index", *columns)]
    first, checksum = hashes_of()
    assert hashes_of() == (first, checksum)
    assert len({first, *(name for name, _ in (*vectors, *others))}) == 1 + len(vectors) + len(others)
    assert len({checksum, *(of_vectors for _, of_vectors in vectors)}) == 1 + len(vectors)
    assert {of_columns for _, of_columns in others} == {checksum}  # which is of the vectors alone


def test_a_late_write_with_another_last_bit_replaces_nothing(tmp_path):
    """A node that was taken for dead computed the same videos on another kind of GPU, and its write comes last."""
    store = write_header(tmp_path)
    write_shard(store, "run", VIDEO)
    before = TokenCache(tmp_path).get("v", order="selection")
    other = replace(VIDEO.kept, tokens=last_bit(VIDEO.kept.tokens), density=last_bit(VIDEO.kept.density))
    (late,) = write_token_shard([replace(VIDEO, kept=other)], store=store, run_id="run")
    after = TokenCache(tmp_path).get("v", order="selection", verify=True)
    assert torch.equal(after.tokens.view(torch.int16), before.tokens.view(torch.int16))
    assert late["token_shard"] != after.metadata["token_shard"] and len(store.names("tokens", ".parquet")) == 2


def test_a_commit_of_many_shards_asks_a_distant_store_for_several_at_a_time(tmp_path):
    store, together = write_header(tmp_path), Barrier(2, timeout=60)
    videos = [encoded(video_id, random_tokens(0), 0.25, "gstep") for video_id in "ab"]
    rows = [row for video in videos for row in write_token_shard([video], store=store, run_id="r")]

    class Distant(LocalStore):
        def exists(self, name: str) -> bool:
            together.wait()  # one request at a time would wait for ever
            return super().exists(name)

    commit_records(Distant(tmp_path), "r", 0, rows, made_with=read_fingerprint(store))
    assert list(TokenCache(tmp_path).video_ids) == ["a", "b"]


def test_a_driver_that_was_stopped_in_its_commit_shows_no_video_whose_tokens_were_removed(tmp_path):
    """It goes on when nothing names its tokens any more: before it looks for them, or after it has put the rows."""
    store = write_header(tmp_path)
    made, rows = read_fingerprint(store), write_token_shard([VIDEO], store=store, run_id="run")

    class Stopped(LocalStore):
        def put(self, name, data) -> None:
            store.delete(rows[0]["token_shard"])
            super().put(name, data)

    with pytest.raises(RunFailed, match="was removed before its videos were committed"):
        commit_records(Stopped(tmp_path), "run", 0, rows, made_with=made)
    with pytest.raises(FileNotFoundError, match="removed meanwhile"):
        commit_records(store, "run", 0, rows, made_with=made)
    assert store.names("videos", ".parquet") == [] and len(TokenCache(tmp_path)) == 0


def test_a_commit_never_makes_a_cache_that_is_gone(tmp_path):
    store = write_header(tmp_path / "c")
    made, rows = read_fingerprint(store), write_token_shard([VIDEO], store=store, run_id="run")
    (tmp_path / "c").rename(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        commit_records(store, "run", 0, rows, made_with=made)
    with pytest.raises(FileNotFoundError):
        store.put("videos/x.parquet", b"x")
    assert not (tmp_path / "c").exists()


class Moved(LocalStore):
    """A cache that is moved away, and begun anew, between the look at the folder and the change of a file in it."""

    moving = False

    def _descriptor(self) -> int:
        held = super()._descriptor()
        if self.moving:
            self.moving = False
            self.root.rename(self.root.with_name("old"))
            write_header(self.root)
            (self.root / "videos").mkdir()
        return held


def test_a_cache_begun_anew_in_mid_write_gets_nothing_of_the_run_before(tmp_path):
    """Whether a token shard, a commit or a deletion is under way: it goes where the cache went, or fails."""
    for what, act in {
        "tokens": lambda store, rows, made: write_token_shard([VIDEO], store=store, run_id="other"),
        "commit": lambda store, rows, made: commit_records(store, "run", 1, rows, made_with=made),
        "delete": lambda store, rows, made: store.delete(*store.names("videos", ".parquet")),
        "afterwards": lambda store, rows, made: store.put("runs/run.json", b"{}"),
    }.items():
        place = tmp_path / what
        store = Moved(write_header(place / "c").root)
        made, rows = read_fingerprint(store), write_token_shard([VIDEO], store=store, run_id="run")
        commit_records(store, "run", 0, rows, made_with=made)
        store.moving = True
        act(store, rows, made)
        os.utime(place / "old", (1, 1))  # clocks tick every few milliseconds: the move was a while ago
        with pytest.raises(FileNotFoundError, match="replaced by another folder"):
            store.put("runs/run.json", b"{}")
        store.delete("cache.json")
        assert [path.name for path in (place / "c").rglob("*") if path.is_file()] == ["cache.json"]
        with pytest.raises(FileNotFoundError):
            commit_records(store, "run", 2, rows, made_with=made)
        assert TokenCache(place / "old").video_ids == ([] if what == "delete" else ["v"])


def test_row_groups_end_at_the_tiers():
    assert compute_tier_row_counts(6272, 1568, 0.25, nested=True) == [627, 313, 314, 314]
    assert compute_tier_row_counts(6272, 6272, 1.0, nested=True) == [627, 313, 314, 314, 1568, 3136]
    assert compute_tier_row_counts(6272, 1568, 0.25, nested=False) == [1568]
    assert compute_tier_row_counts(4, 1, 0.25, nested=True) == [1]
    assert all(n > 0 for m in range(1, 60) for n in compute_tier_row_counts(m, max(1, m // 4), 0.25, nested=True))


def test_columns_say_what_they_mean_and_those_of_tokens_are_as_wide_as_their_vectors():
    columns = build_token_schema(8, 2, {"token_key": 4, "token_attention": 1})
    assert all(field.metadata[b"meaning"] for field in (*VIDEO_SCHEMA, *columns))
    widths = {field.name: field.type.byte_width for field in columns if pa.types.is_fixed_size_binary(field.type)}
    assert widths == {"token": 16, "deepstack_0": 16, "deepstack_1": 16, "token_key": 8, "token_attention": 2}
    assert columns.names[-2:] == ["token_key", "token_attention"]  # who does not ask for them reads none of them


@pytest.mark.parametrize(
    ("change", "keep", "columns", "kind"),
    [
        ({"first_row_group": 6}, 25, ("token",), "rows"),
        ({"row_counts": [10, 5]}, 18, ("token",), "rows"),
        ({"row_counts": [9, 5, 5, 6]}, 18, ("token",), "rows"),
        ({}, 25, ("token", "deepstack_0"), "schema"),
    ],
)
def test_rows_and_columns_that_are_not_there_are_refused(tmp_path, change, keep, columns, kind):
    store = make_cache(tmp_path, {name: random_tokens(i, (4, 25, 16)) for i, name in enumerate("ab")})
    row = TokenCache(tmp_path).metadata("b")
    assert row["row_counts"] == [10, 5, 5, 5] and row["first_row_group"] == 4
    shard = TokenShard(store, row["token_shard"], row["footer_hash"])
    with pytest.raises(CorruptShard) as caught:
        shard.read(TokenRequest({**row, **change}, keep, columns))
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    "name", ["", None, "videos/x", "tokens/folder", "tokens/..", "tokens/x\0", f"tokens/{'x' * 999}", "../x"]
)
def test_a_name_of_no_token_shard_is_damage(tmp_path, name):
    """A bare OSError ended jobs.inspect, and a folder's name came from somebody's videos table."""
    store = make_cache(tmp_path / "c", {"a": random_tokens(0, (4, 25, 16))})
    shutil.copy(*(store.root / name for name in store.names("tokens", ".parquet")), tmp_path / "x")
    (store.root / "tokens" / "folder").mkdir()
    rewrite_row(store, "a", lambda row: row.update(token_shard=name))
    with pytest.raises(CorruptShard, match=r"(token_shard|which is no file|missing)"):
        TokenCache(store.root).get("a")


N, WIDTH = 3000, 6  # Arrow ends a page where 1,024 rows have gone into it, and it has enough
BITS = np.random.default_rng(0).integers(-(2**15), 2**15, (N, WIDTH // 2), np.int16)


def vectors_table(nullable: bool = False) -> pa.Table:
    kind = pa.binary(WIDTH)
    column = pa.FixedSizeBinaryArray.from_buffers(kind, N, [None, pa.py_buffer(BITS)])
    field = pa.field("token", kind, nullable=nullable)
    return pa.table({"n": pa.array(range(N)), "token": column}, schema=pa.schema([pa.field("n", pa.int64()), field]))


def put(data: bytes, places: np.ndarray, rows: int) -> np.ndarray | None:
    """What ``copy_vectors_to_rows`` makes of the column in the file's only row group."""
    metadata = pq.read_metadata(io.BytesIO(data))
    number, width = find_plain_columns(metadata)["token"]
    pages = get_plain_page_range(metadata.row_group(0), number)
    if pages is None:
        return None
    out = np.zeros((rows, width // 2), np.int16)
    n_rows = metadata.row_group(0).num_rows
    return out if copy_vectors_to_rows(memoryview(data)[slice(*pages)], n_rows, places, out) else None


def written(**more) -> bytes:
    file = io.BytesIO()
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True, "write_statistics": False}
    pq.write_table(vectors_table(more.pop("nullable", False)), file, **options | more)
    return file.getvalue()


PAGES = {
    "as-written-here": schema.write_parquet(vectors_table()).to_pybytes(),
    "several": written(data_page_size=100),
    "with-statistics": written(write_statistics=True),
}


@pytest.mark.parametrize("data", PAGES.values(), ids=PAGES)
def test_rows_go_to_their_places(data):
    order = np.random.default_rng(1).permutation(N)
    places = np.argsort(order)
    assert np.array_equal(put(data, places, N), BITS[order])
    assert np.array_equal(put(data, np.arange(1500)[::-1], 1500), BITS[:1500][::-1])  # the first ones of more


def test_other_pages_are_left_to_arrow():
    for more in (
        {"compression": "zstd"},
        {"use_dictionary": True},
        {"write_page_checksum": False},
        {"data_page_version": "2.0"},
        {"column_encoding": {"token": "BYTE_STREAM_SPLIT", "n": "PLAIN"}},
    ):
        assert put(written(**more), np.arange(N), N) is None, more
    assert find_plain_columns(pq.read_metadata(io.BytesIO(written(nullable=True)))) == {}


CODED = [codec for codec in CODECS.values() if codec is not BFLOAT16]
MOST = {"int8": 0.01, "int4": 0.11}  # relative error of normal numbers
by_name = pytest.mark.parametrize("codec", CODED, ids=lambda codec: codec.name)


def bits(values: torch.Tensor) -> Any:
    return values.to(torch.bfloat16).view(torch.int16).numpy()


def by_hand(codec: TokenCodec, columns: dict[str, Any], hidden: int) -> torch.Tensor:
    """Decode one number after the other, in Python's own arithmetic."""
    rows = []
    for numbers, scales, kept in zip(*(columns[name] for name in ("token", "token_scale", "token_kept")), strict=True):
        data, steps = numbers.tobytes(), np.frombuffer(scales.tobytes(), "<f2").tolist()
        row = []
        for i in range(hidden):
            if codec.bits == 8:
                number = data[i] - 256 * (data[i] > 127)
            else:
                number = (data[i // 2] >> 4 if i % 2 == 0 else data[i // 2] & 15) - 8
            row.append(number * steps[i // codec.group])
        values = torch.tensor(row, dtype=torch.float64).to(torch.bfloat16)
        for at, value in np.frombuffer(kept.tobytes(), "<u2").reshape(-1, 2).tolist():
            values.view(torch.int16)[at] = value - 65536 * (value > 32767)
        rows.append(values)
    return torch.stack(rows)


@by_name
@pytest.mark.parametrize("hidden", [1, 7, 160])
def test_what_is_read_is_what_the_columns_say_and_near_what_was_given(codec, hidden):
    normal = torch.randn(5, hidden, generator=torch.Generator().manual_seed(hidden))
    values = normal * 10.0 ** torch.arange(-3, 2)[:, None]
    columns = codec.encode("token", bits(values))
    assert {name: 2 * part.shape[1] for name, part in columns.items()} == codec.widths("token", hidden)
    found = codec.round_trip(bits(values))
    assert torch.equal(found, by_hand(codec, columns, hidden))
    error = (found.float() - values).norm(dim=1) / values.norm(dim=1)
    assert (error < MOST[codec.name]).all()


@by_name
def test_numbers_at_the_ends_of_what_there_is(codec):
    large = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)) * codec.largest / 8
    for values in (torch.zeros(1, 256), torch.full((1, 256), 2.0**-30), large):
        found, most = codec.round_trip(bits(values)).float(), MOST[codec.name] * values.abs().max()
        assert found.isfinite().all() and (found - values).abs().max() <= max(2.0**-24, most)
    for number in (16 * codec.largest, math.nan):
        with pytest.raises(ValueError, match=f"beyond the scales of {codec.name}"):
            codec.encode("token", bits(torch.full((1, 256), number)))


@by_name
def test_eight_outlier_channels_cost_the_others_nothing(codec):
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    channels = torch.arange(8) * 3 + 40  # most of them in one group
    rest = torch.ones(512, dtype=torch.bool)
    rest[channels] = False
    values[:, channels] = 50 * values[:, channels].sign() * (1 + values[:, channels].abs())

    def error(codec: TokenCodec) -> float:
        found = codec.round_trip(bits(values)).float()
        return ((found - values)[:, rest].norm() / values[:, rest].norm()).item()

    found = codec.round_trip(bits(values))
    assert torch.equal(found[:, channels], values[:, channels].to(torch.bfloat16))
    assert error(codec) < MOST[codec.name]
    assert error(TokenCodec("plain", codec.bits, codec.group)) > 2 * error(codec)


@by_name
def test_a_cache_gives_what_the_codec_gives_also_when_videos_have_left_it(tmp_path, codec):
    levels = {name: [random_tokens(10 * i + j, (4, 50, 48)) for j in range(3)] for i, name in enumerate("abc")}

    def write(place: TokenCodec) -> TokenCache:
        store = write_header(tmp_path / place.name, codec=place.name, deepstack_levels=2)
        write_shard(store, "run", *(encoded(name, levels[name][0], 0.25, "gstep", levels[name][1:]) for name in "abc"))
        return TokenCache(store.root)

    whole, coded = write(BFLOAT16), write(codec)
    for ratio, order, verify in ((None, "index", False), (0.10, "selection", True), (0.17, "index", True)):
        given = whole.get_many([*"abc"], ratio, order)
        for video, other in zip(given, coded.get_many([*"abc"], ratio, order, verify=verify), strict=True):
            assert torch.equal(video.index, other.index) and torch.equal(video.rank, other.rank)
            for vectors, found in zip((video.tokens, *video.deepstack), (other.tokens, *other.deepstack), strict=True):
                assert torch.equal(codec.round_trip(bits(vectors)), found) and found.is_contiguous()
    row = coded.metadata("a")
    assert (row["token_codec"], row["token_block"]) == (codec.name, codec.group)
    assert whole.metadata("a")["token_codec"] is None
    before = {name: coded.get(name) for name in "ac"}
    remove(coded.store, "b")
    merge_table_fully(coded.store, None)
    coded = TokenCache(tmp_path / codec.name)
    assert coded.video_ids == ["a", "c"] and verified(coded.store).exit_code == 0
    for name, video in before.items():
        after = coded.get(name, verify=True)
        assert all(map(torch.equal, (video.tokens, *video.deepstack), (after.tokens, *after.deepstack)))


@pytest.mark.parametrize("version", [3, "3+int3"])
def test_a_codec_that_is_not_known_is_refused_by_its_name(tmp_path, version):
    store = make_cache(tmp_path / "c", {"v": random_tokens(0)}, codec="int4")
    header = read_header(store)
    assert header["schema_version"] not in (1, 2, 3)  # by which a program from before codecs refuses
    header |= {"identity": make_identity(codec="int3"), "schema_version": version}
    store.put(HEADER, serialize_header(header))
    with pytest.raises(NotACache, match="int3"):
        TokenCache(tmp_path / "c")
    assert get_codec({}) is BFLOAT16


@by_name
def test_the_example_reads_them_without_this_package(tmp_path, codec, capsys):
    hidden = 250  # no multiple of a group
    store = make_cache(tmp_path, {"v": random_tokens(0, (2, 10, hidden))}, codec=codec.name, hidden_size=hidden)
    (name,) = store.names("tokens", ".parquet")
    video = TokenCache(tmp_path).get("v", order="selection").tokens.float()

    names = run_example("pipeline/examples/read_coded.py", tmp_path)
    lengths = capsys.readouterr().out.rpartition(" ")[2]
    assert float(lengths) == pytest.approx(video.norm(dim=1).mean().item(), rel=1e-2)
    for read in (pq.read_table, pd.read_parquet):
        floats = names["decode_floats"](read(tmp_path / name), hidden, codec.name)
        assert torch.equal(torch.from_numpy(floats).to(torch.bfloat16).float(), video)


def test_equal_magnitudes_are_kept_from_the_first_channel():
    (kept,) = CODECS["int4"].encode("token", bits(torch.tensor([[1.0, -1.0] * 32])))["token_kept"]
    assert kept.view("<u2")[::2].tolist() == list(range(8))


def test_bytes_of_wide_tokens():
    whole = BFLOAT16.token_bytes(3584)
    assert whole == 7168 and BFLOAT16.token_bytes(3584, 3) == 4 * whole
    assert CODECS["int4"].token_bytes(3584) <= 0.29 * whole and CODECS["int8"].token_bytes(3584) <= 0.52 * whole
    for codec in CODECS.values():
        assert codec.share == pytest.approx(codec.token_bytes(2**14) / 2**15, rel=0.01)
