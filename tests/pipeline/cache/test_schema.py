"""The Parquet contract: where row groups end, what every column means, and what a footer is."""

from pipeline.cache.schema import tier_row_counts


def test_row_groups_end_at_the_tiers():
    assert tier_row_counts(6272, 1568, 0.25, nested=True) == [627, 313, 314, 314]
    assert tier_row_counts(6272, 6272, 1.0, nested=True) == [627, 313, 314, 314, 1568, 3136]
    assert tier_row_counts(6272, 1568, 0.25, nested=False) == [1568]
    assert tier_row_counts(4, 1, 0.25, nested=True) == [1]
    assert all(n > 0 for m in range(1, 60) for n in tier_row_counts(m, max(1, m // 4), 0.25, nested=True))
