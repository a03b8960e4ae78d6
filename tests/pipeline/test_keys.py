"""Hashes in place of texts: found again, also where they share a half."""

import numpy as np
import pyarrow as pa

from pipeline.keys import find, find_repeated, hash_clips, hash_column, hash_texts


def clip(uri: str, start: float | None = None, end: float | None = None) -> int:
    kind = {"start_s": pa.array([start], pa.float64()), "end_s": pa.array([end], pa.float64())}
    return hash_clips(pa.table({"uri": [uri], **kind})).item()


def test_texts_that_differ_have_keys_that_differ():
    texts = [*map(str, range(1000)), "a", "a\0", "\0a", "ä", "a" * 5000]
    keys = hash_texts(pa.array(texts))
    assert len({tuple(key) for key in keys.tolist()}) == len(texts)
    assert (hash_texts(pa.chunked_array([texts[:10], texts[10:]])) == keys).all()
    assert (hash_texts(pa.array(texts).slice(5)) == keys[5:]).all()


def test_a_clip_is_its_uri_and_its_times():
    clips = [("a",), ("b",), ("a", 0.0), ("a", 1.0), ("a", None, 1.0), ("a", 1.0, 1.0), ("a", None, 0.0)]
    assert len({clip(*one) for one in clips}) == len(clips)
    assert clip("a", -0.0) == clip("a", 0.0) and clip("a", 1.0) == clip("a", 1)


def test_keys_are_found_where_they_share_a_half():
    high, low = np.array([1, 5, 5, 5, 9], np.uint64), np.array([7, 1, 2, 4, 7], np.uint64)
    wanted = np.array([[5, 2], [5, 3], [5, 4], [9, 7], [9, 8], [0, 7], [1, 7], [10, 7]], np.uint64)
    assert find(wanted, high, low).tolist() == [2, -1, 3, 4, -1, -1, 0, -1]
    assert find(wanted, high[:0], low[:0]).tolist() == [-1] * 8


def test_the_first_of_equal_keys_is_not_repeated():
    keys = hash_column(pa.chunked_array([["b", "a", "c"], ["a", "d", "b"], ["a"]]))
    assert np.flatnonzero(find_repeated(keys)).tolist() == [3, 5, 6]
    last = np.array([True, True, False, False, False, True, True])
    assert np.flatnonzero(find_repeated(keys, last)).tolist() == [1, 5, 6]
    nothing = hash_column(pa.chunked_array([], pa.string()))
    assert not find_repeated(keys[:1]).any() and find_repeated(nothing).shape == (0,)
