"""Sampling and checks for ``generate``, by its public hooks; an answer's random draws do not depend on its batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from gstep.language.types import Decoding

# Outside these limits the most likely token always wins, or all tokens are equally likely, and float32 overflows.
_TEMPERATURES = (1e-30, 1e30)
#: The message of a FloatingPointError: with NaN scores, every token would be equally likely.
NO_NUMBERS = "the scores of tokens are no numbers (NaN): float16 overflows where bfloat16 and float32 do not (--dtype)"


class SeededSampling(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that turns each sampled row's greedy choice into a random draw, by the Gumbel-max trick.

    argmax(log p + g) with g ~ Gumbel(0, 1) is a draw from p. Each row has its own generator, so an object serves one
    call of ``generate``.
    """

    def __init__(self, decodings: Sequence[Decoding]) -> None:
        self._rows = [(row, d) for row, d in enumerate(decodings) if d.temperature > 0]
        self._generators = {row: torch.Generator("cpu").manual_seed(d.seed) for row, d in self._rows}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V], with fresh noise in sampled rows and unchanged in greedy rows.

        If a row is sampled, the result is a float32 copy; otherwise ``scores`` itself.
        """
        if not self._rows:
            return scores
        noisy = scores.float().clone()
        for row, decoding in self._rows:
            noisy[row] = self._draw(noisy[row : row + 1], input_ids[row : row + 1], decoding, self._generators[row])
        return noisy

    def _draw(self, scores: Tensor, input_ids: Tensor, decoding: Decoding, generator: torch.Generator) -> Tensor:
        """Apply temperature, top-k, top-p and Gumbel noise to one row's scores [1, V]; return [V].

        The argmax of the result is a random draw. The temperature is clamped to [1e-30, 1e30].
        """
        coldest, hottest = _TEMPERATURES
        scores = scores / min(max(decoding.temperature, coldest), hottest)
        if decoding.top_k:
            scores = TopKLogitsWarper(decoding.top_k)(input_ids, scores)
        if decoding.top_p < 1.0:
            scores = TopPLogitsWarper(decoding.top_p)(input_ids, scores)
        # On the CPU and in float64, so that every device draws the same numbers.
        uniform = torch.rand(scores.shape[-1], generator=generator, dtype=torch.float64, device="cpu").clamp_min(1e-300)
        gumbel = -torch.log(-torch.log(uniform))
        return (scores[0] + gumbel.to(scores)).to(scores.dtype)


class RowLimits(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that ends each row at its own ``max_new_tokens``; ``prompt_length`` includes padding."""

    def __init__(self, decodings: Sequence[Decoding], prompt_length: int) -> None:
        self._limits = torch.tensor([d.max_new_tokens for d in decodings], device="cpu")
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        """Return True for each row that has reached its limit, [B] bool."""
        at_limit = self._limits <= input_ids.shape[1] - self._prompt_length
        return at_limit.to(input_ids.device)


class StepWatch(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that records NaN scores and times the first token.

    Attributes:
        first: the ``time.perf_counter()`` of the first token, when the prefill ends; None before.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self._has_nan: list[Tensor] = []  # [B] per step, on the device: reading the values would wait for the GPU

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record which rows have NaN scores, and return ``scores``.

        The first call also waits for the GPU and sets ``first``.

        Raises:
            FloatingPointError: scores of the first token are NaN in any row.
        """
        self._has_nan.append(scores.isnan().any(dim=-1))
        if self.first is None:
            if scores.is_cuda:
                torch.cuda.synchronize(scores.device)
            self.first = time.perf_counter()
            if self._has_nan[0].any():
                raise FloatingPointError(NO_NUMBERS)
        return scores

    def check(self, steps: Sequence[int]) -> None:
        """Raise FloatingPointError if a row had NaN scores in its first ``steps``; later steps only pad the row."""
        has_nan = torch.stack(self._has_nan, dim=1).tolist()
        if any(any(row[:count]) for row, count in zip(has_nan, steps, strict=True)):
            raise FloatingPointError(NO_NUMBERS)
