"""Policies and ways to decode that do not exist, and how much room a prompt takes."""

import pytest
import torch

from gstep.language import Decoding, Prompt, PromptPolicy
from tests.gstep.language.prompts import builder


def test_unknown_policies_and_options_are_refused():
    with pytest.raises(ValueError, match="unknown positions 'odd'; known: contiguous, original"):
        builder("tiny", "odd")
    with pytest.raises(ValueError, match="unknown rule"):
        PromptPolicy("original", "transformers-3")
    with pytest.raises(ValueError, match="unknown thought 'shut'; known: open, closed"):
        PromptPolicy("original", thought="shut")
    with pytest.raises(ValueError, match="unknown frame_times 'guessed'; known: true, stock"):
        builder("tiny", frame_times="guessed")  # on a model that would not mind
    wrong = {
        "max_new_tokens": (0,),
        "temperature": (-1.0, float("nan")),
        "top_p": (0.0,),
        "top_k": (-1,),
        "seed": (-1,),
    }
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=name):
            Decoding(**{name: value})


def test_a_prompt_takes_the_room_of_its_tokens_or_of_positions_with_gaps():
    ids = torch.zeros(4, dtype=torch.int64)
    dense, gaps = (Prompt(ids, torch.tensor([positions]), (), 2) for positions in ([0, 1, 1, 2], [0, 5, 9, 10]))
    assert (len(dense), dense.extent, gaps.extent) == (4, 4, 11)
