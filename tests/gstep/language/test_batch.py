"""Batches of ragged prompts: padding, and positions that transformers does not take for packed sequences."""

import pytest

from gstep.language.batch import group_by_cost


@pytest.mark.parametrize(
    ("lengths", "queries", "batches"),
    [
        ([300] * 3 + [12_080] + [310] * 5, None, [[3], [0, 1, 2, 4, 5, 6, 7, 8]]),
        ([300, 49_583, 320], None, [[1], [0, 2]]),
        ([6000, 6000, 6000], None, [[0, 1, 2]]),  # none is padded: no mask at all
        ([6000, 6001, 6002], None, [[2], [1], [0]]),
        ([6000, 6001, 6002], [20, 21, 22], [[0, 1, 2]]),  # their videos went through the model before
        ([6000, 6000, 6000], [20, 20, 5000], [[0, 1], [2]]),
        ([40_000, 30_000, 20], [20, 20, 20], [[0], [1, 2]]),
        ([5, 7, 9], None, [[0, 1, 2]]),
        ([], None, []),
    ],
)
def test_batches_are_made_by_what_they_cost(lengths, queries, batches):
    assert group_by_cost(lengths, lengths if queries is None else queries, 8) == batches
