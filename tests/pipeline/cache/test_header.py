"""The header of a cache: sealed by a checksum, and compared leaf by leaf."""

from pipeline.cache.header import differences


def test_differences_name_the_leaf():
    lines = differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    assert lines == ["a.c: the cache has 2, this run 3"]
