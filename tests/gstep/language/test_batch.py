"""Batches of ragged prompts: padding, and positions that transformers does not take for packed sequences."""

import random

import pytest
import torch

from gstep.language.batch import MASK_ELEMENTS, PADDED_TOKENS, Batch, group_by_cost


def test_a_batch_is_padded_on_the_left_with_a_token_of_the_prompt(prompts):
    batch = Batch.of(prompts)
    for row, prompt in enumerate(prompts):
        start = batch.mask.shape[1] - len(prompt)
        assert batch.mask[row].tolist() == [0] * start + [1] * len(prompt)
        assert torch.equal(batch.input_ids[row, start:], prompt.input_ids)
        assert torch.equal(batch.positions[:, row, start:], prompt.positions)
        assert (batch.input_ids[row, :start] == prompt.input_ids[0]).all()


def test_no_positions_look_like_packed_sequences(name, prompts):
    """Transformers takes a first row that does not count up by one for several sequences and masks them apart."""
    batch = Batch.of(prompts)
    ids = batch.position_ids()
    if len(batch.positions) == 1:
        assert torch.equal(ids, batch.positions[0])
    else:
        assert torch.equal(ids[1:], batch.positions)
        for row, mask in zip(ids[0], batch.mask.bool(), strict=True):
            assert torch.equal(row[mask], torch.arange(int(mask.sum())))


def masked_elements(lengths, queries):
    same = len(set(lengths)) == 1 and lengths == queries
    return 0 if len(lengths) == 1 or same else len(lengths) * max(lengths) * max(queries)


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


def test_no_batch_of_several_rows_costs_more_than_it_may():
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.choice([50, 300, 5000, 30_000]) + draw.randrange(3) for _ in range(draw.randrange(1, 30))]
        queries = [draw.randrange(1, length + 1) for length in lengths]
        planned = group_by_cost(lengths, queries, 8)
        assert sorted(row for batch in planned for row in batch) == list(range(len(lengths)))
        for batch in planned:
            rows = [lengths[i] for i in batch]
            assert len(batch) <= 8
            assert len(batch) == 1 or len(rows) * max(rows) <= PADDED_TOKENS
            assert masked_elements(rows, [queries[i] for i in batch]) <= MASK_ELEMENTS
