"""How an answer is decoded, in the words of vLLM's SamplingParams."""

from __future__ import annotations

from typing import Any

from gstep.errors import ModelError
from gstep.language.types import Decoding
from gstep.language.weights import ends_of

# Settings of generation_config.json that change what a model says, and that vLLM does not have: what each is when off.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
}


def sampling_params(decoding: Decoding, generation: Any) -> dict[str, Any]:
    """Return keyword arguments of vLLM's SamplingParams for one answer.

    Of a checkpoint's GenerationConfig vLLM itself uses only the tokens that end an answer; the rest is set here.
    """
    drawn = {"top_p": decoding.top_p, "top_k": decoding.top_k, "seed": decoding.seed} if decoding.temperature else {}
    return {
        "max_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        "repetition_penalty": generation.repetition_penalty or 1.0,
        "stop_token_ids": ends_of(generation),
        "ignore_eos": True,  # only stop_token_ids end an answer, not what the tokenizer declares as its end
        "detokenize": False,
        **drawn,
    }


def check_served(name: str, generation: Any) -> None:
    """Raise ModelError where a checkpoint's generation settings ask for more than vLLM does."""
    for setting, off in _NOT_SERVED.items():
        value = getattr(generation, setting, None)
        if value not in off:
            raise ModelError(
                f"{name!r}: generation_config.json sets {setting} to {value!r}, which vLLM does not have: "
                "answers would be others than the model's own"
            )
