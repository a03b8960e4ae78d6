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
from pipeline.cache.schema import footer_of
from pipeline.cache.table import VideosTable
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore
from pipeline.verify.checks import check_commit, check_token_shard
from tests.pipeline.caches import encoded, random_tokens, read_live, write_header, write_shard
from tests.pipeline.evidence import encoded_with, random_evidence

SHAPE = (2, 5, 2)  # 10 tokens of 2 numbers, of which 2 are kept, in two row groups


class Flipped(LocalStore):
    """A cache of which one file comes with one bit that is not what was written."""

    def __init__(self, root: Path, name: str) -> None:
        super().__init__(root)
        self.name, self.data = name, bytearray(LocalStore(root).read(name))

    def flips(self, first: int = 0, stop: int | None = None, step: int = 1) -> Iterator[int]:
        """Each bit, or one of ``step``, of bytes [first, stop) in turn, flipped for one step."""
        for bit in range(8 * first, 8 * (len(self.data) if stop is None else stop), step):
            self.data[bit // 8] ^= 1 << bit % 8
            yield bit
            self.data[bit // 8] ^= 1 << bit % 8

    def read(self, name: str) -> bytes:
        return bytes(self.data) if name == self.name else super().read(name)

    def open(self, name: str) -> LocalFile:
        return LocalFile(pa.BufferReader(bytes(self.data))) if name == self.name else super().open(name)


def everything(video: CachedVideo) -> bytes:
    """All bytes that a read gives, and their shapes."""
    columns = (video.tokens, video.index, video.rank, video.frame, video.merged, video.density)
    tensors = [t for t in (*columns, *video.deepstack, *video.evidence.values()) if t is not None]
    shapes = repr([(t.shape, t.dtype) for t in tensors]).encode()
    return shapes + b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def small_cache(out: Path, *, evidence: bool, codec: str = "bfloat16") -> LocalStore:
    store = write_header(out, deepstack_levels=0, codec=codec)
    tokens = random_tokens(0, SHAPE)
    row = encoded("v", tokens, 0.25, "gstep")
    if evidence:
        given = {"token_attention": random_evidence(SHAPE)["token_attention"]}
        identity = read_header(store)["identity"] | {"evidence": {"token_attention": "last_layer"}}
        write_header(store, identity=identity)
        row = encoded_with("v", tokens, 0.25, "gstep", given)
    write_shard(store, "run", row)
    assert isinstance(store, LocalStore)
    return store


@pytest.mark.slow
@pytest.mark.parametrize(("evidence", "codec"), [(False, "bfloat16"), (True, "int4")])
def test_bits_of_every_byte_of_a_token_shard(tmp_path, evidence, codec):
    """The pages, and the footer where there is no evidence; some also by the other order of reading."""
    store = small_cache(tmp_path, evidence=evidence, codec=codec)
    (name,), (commit,) = store.names("tokens", ".parquet"), store.names("videos", ".parquet")
    row, header = VideosTable(store).read_row(commit, 0), read_header(store)
    flipped = Flipped(tmp_path, name)
    sound, live = TokenCache(tmp_path), read_live(store)
    rows, asked = [sound.metadata("v")], tuple(sound.evidence)

    def read(order: TokenOrder = "selection") -> bytes | None:
        cache = TokenCache(tmp_path, store=flipped, live=live)
        try:
            return everything(*cache.get_rows(rows, None, order, asked))
        except CorruptShard:
            return None

    written, by_index = read(), read("index")
    assert None not in (written, by_index) and not check_token_shard(flipped, name, [(commit, row)], header).problems
    pages = len(flipped.data) - len(footer_of(memoryview(bytes(flipped.data))))
    n_raised = 0
    for bit in flipped.flips(stop=pages, step=3):
        got = read()
        assert got in (None, written), bit
        if bit % 8 == bit // 8 % 8:
            assert read("index") in (None, by_index), bit
            if got is None:  # whatever a read refuses, verify finds
                assert check_token_shard(flipped, name, [(commit, row)], header).problems, bit
        n_raised += got is None
    assert n_raised > 4 * pages / 3  # of eight thirds a byte
    if not evidence:
        assert all(read() is None for _ in flipped.flips(first=pages, step=3))
    assert read() == written


def test_bytes_all_over_a_videos_shard(tmp_path):
    """Each is another bit of its byte."""
    store = small_cache(tmp_path, evidence=False)
    (commit,) = store.names("videos", ".parquet")
    flipped, header = Flipped(tmp_path, commit), read_header(store)
    for bit in flipped.flips(step=8 * 16 + 1):
        with pytest.raises(CorruptShard, match="hash in its name"):
            read_live(flipped)
        with pytest.raises(CorruptShard):
            TokenCache(tmp_path, store=flipped)
        assert [problem.kind for problem in check_commit(flipped, commit, header).problems] == ["commit"], bit
    assert len(read_live(flipped)) == 1


def test_every_bit_of_the_header(tmp_path):
    """A flip in the name of the checksum makes a header of another version of this program; all else is as it was."""
    store = write_header(tmp_path, hidden_size=2, newline=base64.b64encode(bytes(range(4))).decode())
    written = {name: value for name, value in read_header(store).items() if name != CHECKSUM}
    flipped, read = Flipped(tmp_path, HEADER), 0
    for bit in flipped.flips():
        try:
            header = read_header(flipped)
        except NotACache:
            continue
        read += 1
        assert {name: header[name] for name in written} == written, bit
    assert 0 < read < len(flipped.data)
