"""Batches of ragged prompts: padding, and positions that transformers does not take for packed sequences."""

import torch

from gstep.language.batch import Batch


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
    if name == "tiny":
        assert torch.equal(ids, batch.positions[0])
    else:
        assert torch.equal(ids[1:], batch.positions)
        for row, mask in zip(ids[0], batch.mask.bool(), strict=True):
            assert torch.equal(row[mask], torch.arange(int(mask.sum())))
