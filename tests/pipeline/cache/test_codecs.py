"""Codecs of token vectors: what a reader gets of them, by this package and without it, and how a cache carries them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import NotACache, TokenCache
from pipeline.cache.codecs import BFLOAT16, CODECS, TokenCodec
from pipeline.cache.header import HEADER, get_codec, read_header, serialize_header
from pipeline.cache.merging import merge_table_fully
from tests.builders.caches import encoded, make_cache, make_identity, random_tokens, write_header, write_shard
from tests.examples import run_example
from tests.pipeline.verifying import remove, verified

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
