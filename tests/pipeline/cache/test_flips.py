"""Bits all over a small cache, flipped: a read raises, or gives exactly what was written."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from pipeline import CorruptShard, NotACache, TokenCache
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.header import CHECKSUM, HEADER, read_header
from pipeline.cache.reader import TokenOrder
from pipeline.cache.schema import slice_footer
from pipeline.cache.table import VideosTable
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore
from pipeline.verify.checks import check_commit, check_token_shard
from tests.builders.caches import (
    encoded_with,
    make_identity,
    random_evidence,
    random_tokens,
    read_live,
    write_header,
    write_shard,
)

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
def store(tmp_path) -> LocalStore:
    """A cache of one video, coded and with evidence."""
    identity = make_identity(codec="int4", evidence={"token_attention": "last_layer"})
    store = write_header(tmp_path, codec="int4", identity=identity)
    evidence = {"token_attention": random_evidence(SHAPE)["token_attention"]}
    write_shard(store, "run", encoded_with("v", random_tokens(0, SHAPE), 0.25, "gstep", evidence))
    assert isinstance(store, LocalStore)
    return store


def test_bits_of_a_token_shard(store):
    """In the pages, where verify finds whatever a read refuses, and in the footer."""
    (name,), (commit,) = store.names("tokens", ".parquet"), store.names("videos", ".parquet")
    row, header = VideosTable(store).read_row(commit, 0), read_header(store)
    flipped, live, sound = Flipped(store.root, name), read_live(store), TokenCache(store.root)

    def read(order: TokenOrder = "selection") -> bytes | None:
        cache = TokenCache(store.root, store=flipped, live=live)
        try:
            return bytes_of(*cache.get_rows([sound.metadata("v")], None, order, tuple(sound.evidence)))
        except CorruptShard:
            return None

    written, by_index = read(), read("index")
    assert None not in (written, by_index) and not check_token_shard(flipped, name, [(commit, row)], header).problems
    n_pages, n_raised, step = len(flipped.data) - len(slice_footer(memoryview(bytes(flipped.data)))), 0, 13
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


def test_bytes_all_over_a_videos_shard(store):
    """Each is another bit of its byte."""
    (commit,) = store.names("videos", ".parquet")
    flipped, header = Flipped(store.root, commit), read_header(store)
    for bit in flipped.flips(step=8 * 64 + 1):
        for read in (read_live, lambda store: TokenCache(store.root, store=store)):
            with pytest.raises(CorruptShard, match="hash in its name"):
                read(flipped)
        assert [problem.kind for problem in check_commit(flipped, commit, header).problems] == ["commit"], bit
    assert len(read_live(flipped)) == 1


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
