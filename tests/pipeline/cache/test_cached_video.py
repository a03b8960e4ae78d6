"""A video out of a cache: Arrow's columns as tensors, views where they can be."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.cache.cached_video import bfloat16, index_order, to_video, vector_bytes

INDEX = [7, 2, 2, 5]


def bits(*values: int) -> list[bytes]:
    """A vector of two bfloat16 for each value, in its bits."""
    return [np.array([value, value + 1], "<i2").tobytes() for value in values]


def token_rows(**more: pa.Array) -> pa.Table:
    columns = {
        "index": pa.array(INDEX, pa.int32()),
        "frame": pa.array([1, 0, 0, 1], pa.int32()),
        "rank": pa.nulls(4, pa.int32()),
        "merged": pa.nulls(4, pa.bool_()),
        "density": pa.nulls(4, pa.float32()),
        "token": pa.array(bits(10, 20, 30, 40), pa.binary(4)),
        "deepstack_0": pa.array(bits(11, 21, 31, 41), pa.binary(4)),
        "image_embedding": pa.array(bits(12, 22, 32, 42), pa.binary(4)),
        "token_attention": pa.array([b"\1\0", b"\2\0", b"\3\0", b"\4\0"], pa.binary(2)),
    }
    return pa.table({**columns, **more})


def video(table: pa.Table, levels: int = 0, evidence: tuple[str, ...] = (), **more):
    row, header = {"video_id": "v", "hidden_size": 2}, {"identity": {}, "deepstack_levels": levels}
    return to_video(row, table, header, {name: name for name in evidence}, **more)


def as_bits(tensor: torch.Tensor) -> list:
    return tensor.contiguous().view(torch.int16).tolist()


def test_columns_become_tensors_bit_for_bit():
    found = video(token_rows(), 1, ("token_attention", "image_embedding"))
    assert as_bits(found.tokens) == [[10, 11], [20, 21], [30, 31], [40, 41]]
    assert [as_bits(level) for level in found.deepstack] == [[[11, 12], [21, 22], [31, 32], [41, 42]]]
    assert list(found.evidence) == ["token_attention", "image_embedding"]
    assert as_bits(found.evidence["token_attention"]) == [1, 2, 3, 4]  # one number a token
    assert found.evidence["image_embedding"].shape == (4, 2)
    assert (found.index.dtype, found.index.tolist(), found.frame.tolist()) == (torch.int64, INDEX, [1, 0, 0, 1])
    assert (found.rank, found.merged, found.density) == (None, None, None)


def test_what_a_method_has_comes_with_its_type():
    more = {
        "rank": pa.array([0, 1, 2, 3], pa.int32()),
        "merged": pa.array([True, False, True, False]),
        "density": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32()),
    }
    found = video(token_rows(**more))
    assert (found.rank.dtype, found.merged.dtype, found.density.dtype) == (torch.int64, torch.bool, torch.float32)
    assert (found.rank.tolist(), found.merged.tolist(), found.density.tolist()) == (
        [0, 1, 2, 3],
        [True, False, True, False],
        [0.5, 1.5, 2.5, 3.5],
    )


def test_by_index_every_column_moves_along_and_equals_keep_their_order():
    merged = pa.array([True, False, True, False])
    table = token_rows(merged=merged)
    found = video(table, 1, ("token_attention",), order=index_order(table))
    assert found.index.tolist() == [2, 2, 5, 7] and found.frame.tolist() == [0, 0, 1, 1]
    assert as_bits(found.tokens) == [[20, 21], [30, 31], [40, 41], [10, 11]]
    assert as_bits(found.deepstack[0]) == [[21, 22], [31, 32], [41, 42], [11, 12]]
    assert as_bits(found.evidence["token_attention"]) == [2, 3, 4, 1]
    assert found.merged.tolist() == [False, True, False, True] and found.rank is None


def test_vectors_that_are_in_their_places_already_are_taken_as_they_are():
    table = token_rows()
    placed = {"token": np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int16)}
    found = video(table.drop_columns(["token"]), order=index_order(table), placed=placed)
    assert found.tokens.data_ptr() == placed["token"].ctypes.data and as_bits(found.tokens)[1] == [3, 4]
    assert found.index.tolist() == [2, 2, 5, 7]


def test_vectors_of_one_chunk_are_views_and_of_several_are_joined():
    column = token_rows()["token"]
    whole = vector_bytes(column)
    assert whole.address == column.chunk(0).buffers()[1].address
    assert vector_bytes(column.slice(1, 2)).to_pybytes() == b"".join(bits(20, 30))
    parts = pa.chunked_array([column.chunk(0).slice(0, 1), column.chunk(0).slice(1)])
    assert vector_bytes(parts).to_pybytes() == whole.to_pybytes()


def test_bits_are_seen_as_bfloat16_without_a_warning(recwarn):
    values = torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16)
    raw = values.view(torch.int16).numpy().tobytes()
    assert torch.equal(bfloat16(raw), values) and not recwarn.list
    with pytest.raises(ValueError):
        bfloat16(raw[:-1])
