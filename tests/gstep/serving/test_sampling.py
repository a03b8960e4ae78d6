"""What vLLM is told of decoding: nothing of a checkpoint's settings is lost on the way."""

import pytest
from transformers import GenerationConfig

from gstep.errors import ModelError
from gstep.language import Decoding
from gstep.serving.sampling import check_served, sampling_params


def test_a_greedy_answer_ends_where_the_checkpoint_says():
    generation = GenerationConfig(eos_token_id=[9, 7], repetition_penalty=1.05)
    assert sampling_params(Decoding(max_new_tokens=5), generation) == {
        "max_tokens": 5,
        "temperature": 0.0,
        "repetition_penalty": 1.05,
        "stop_token_ids": [7, 9],
        "ignore_eos": True,
        "detokenize": False,
    }


def test_a_drawn_answer_has_its_own_seed():
    params = sampling_params(Decoding(4, 0.7, 0.9, 20, 123), GenerationConfig(eos_token_id=None))
    assert {name: params[name] for name in ("temperature", "top_p", "top_k", "seed")} == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 123,
    }
    assert (params["stop_token_ids"], params["repetition_penalty"]) == ([], 1.0)


@pytest.mark.parametrize("setting", [{"no_repeat_ngram_size": 3}, {"suppress_tokens": [4]}, {"min_new_tokens": 2}])
def test_what_vllm_does_not_have_is_refused(setting):
    check_served("m", GenerationConfig(repetition_penalty=1.3))
    with pytest.raises(ModelError, match=next(iter(setting))):
        check_served("m", GenerationConfig(**setting))
