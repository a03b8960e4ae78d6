"""The language model of a checkpoint of the generic family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from gstep.backbones import ModelSource, Runtime
from gstep.generic.family import read_tail
from gstep.generic.halves import LLM, keep_positions, load_model
from gstep.generic.layout import Layout
from gstep.language.batch import Batch
from gstep.language.model import LanguageModel
from gstep.language.prompt import load_tokenizer, tokenize_text
from gstep.language.types import Answer, Decoding, Prompt, Score
from gstep.language.weights import read_generation_config
from gstep.pruners.base import Pruner
from gstep.types import Visual


@dataclass
class Features(ModelOutput):  # type: ignore[misc]
    """The fields that models' ``forward`` reads from ``mm_encoder_outputs``."""

    last_hidden_state: Any = None
    pooler_output: Any = None
    deepstack_features: Any = None


def wrap_features(levels: Sequence[Sequence[Tensor]], layout: Layout) -> dict[str, Any]:
    """Make the ``mm_encoder_outputs`` from rows of features.

    Args:
        levels: the rows [K, D] of each video, for the tokens and then for each deepstack level.
    """
    tokens, *deepstack = (list(level) for level in levels)
    pooled: Any = torch.cat(tokens)[None] if layout.stacked else tokens
    return {layout.modality: Features(pooler_output=pooled, deepstack_features=deepstack or None)}


class GenericLanguageModel(LanguageModel):
    """The language model of one checkpoint on one device, without its vision part.

    Every prompt is computed whole. Prompts share a batch only if the gate found that a batch gives the logits of single
    prompts.
    """

    layout: Layout

    @classmethod
    def load(cls, source: ModelSource, runtime: Runtime) -> Self:
        """Load the model, without its vision part, and its tokenizer.

        Raises:
            ModelError: weights, the tokenizer or generation_config.json cannot be loaded, or the model was resolved
                without the gate.
        """
        model = load_model(source, runtime, LLM)
        model.generation_config = read_generation_config(source, model.config)
        language_model = cls(model, load_tokenizer(source), runtime.device)
        language_model.layout = Layout.of(source)
        return language_model

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Prompt], last: int = 0) -> list[Tensor]:
        """Compute the logits of each prompt, [L, V], or only of its ``last`` tokens if that is not 0."""
        if len(prompts) > 1 and not self.layout.in_batches:
            return [logits for prompt in prompts for logits in self.logits([prompt], last)]
        return super().logits(prompts, last)

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], decodings: Sequence[Decoding], **options: Any) -> list[Answer]:
        """Answer prompts, in one batch or one by one; return an Answer per prompt, in order.

        The option ``share_prefix`` has no effect.

        Raises:
            ValueError: ``inside`` is given: pruning inside the model is not supported.
            FloatingPointError: the model's scores are NaN for a token of an answer.
        """
        if len(prompts) > 1 and not self.layout.in_batches:
            pairs = zip(prompts, decodings, strict=True)
            return [answer for prompt, decoding in pairs for answer in self.generate([prompt], [decoding], **options)]
        return super().generate(prompts, decodings, **options)

    @torch.inference_mode()
    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[str]],
        *,
        share_prefix: bool = True,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[list[Score]]:
        """Compute the log-probability of each continuation of each prompt; a list of Scores per prompt, in order.

        The first tokens of all continuations share one pass; a continuation of several tokens has another pass.
        ``share_prefix`` has no effect.

        Raises:
            ValueError: a continuation has no token, or ``inside`` is given: pruning inside the model is not supported.
        """
        if inside is not None:
            self._prune_inside(prompts, *inside)
        scores = []
        for prompt, texts in zip(prompts, continuations, strict=True):
            ids = [tokenize_text(self.tokenizer, text) for text in texts]
            first = self._compute_logprobs(prompt, 1)[0] if texts else None
            rows = []
            for tokens in ids:
                assert first is not None
                logprob = float(first[tokens[0]])
                if len(tokens) > 1:
                    later = self._compute_logprobs(_extend(prompt, tokens[:-1]), len(tokens))[1:]
                    logprob += sum(float(row[token]) for row, token in zip(later, tokens[1:], strict=True))
                rows.append(Score(logprob, len(tokens)))
            scores.append(rows)
        return scores

    def _compute_logprobs(self, prompt: Prompt, last: int) -> Tensor:
        """Compute the log-probabilities of the tokens after each of the prompt's ``last`` tokens, [last, V] float32."""
        output = self._run_forward(Batch.of([prompt]), prompts=[prompt], logits_to_keep=last)
        return torch.log_softmax(output.logits[0, -last:].float(), dim=-1)

    def _generate_ids(self, *args: Any) -> Tensor:
        """Run ``generate`` so that it keeps the positions of the prompts; return the new token ids, [B, new]."""
        with keep_positions(self.model):
            return super()._generate_ids(*args)

    def _prune_inside(self, prompts: Sequence[Prompt], method: Pruner, retention_ratio: float) -> NoReturn:
        """Raise ValueError: pruning inside the model is not supported."""
        raise ValueError(f"{method.name} prunes inside a model, which models of the generic family do not allow")

    def _make_batch_and_cache(self, prompts: Sequence[Prompt], last: int = 1) -> tuple[Batch, None]:
        """Make the batch of all prompts, without a cache of their videos."""
        return Batch.of(prompts), None

    def _encoder_outputs(self, visuals: Sequence[Visual]) -> dict[str, Any]:
        """Make the ``mm_encoder_outputs`` for a batch's videos, in the order of its rows, tails included."""

        def place(rows: Tensor) -> Tensor:
            return rows.to(self.device, self.model.dtype)

        tails = [place(read_tail(visual.extra, self.layout)) for visual in visuals]
        tokens = [torch.cat([place(v.tokens), tail]) for v, tail in zip(visuals, tails, strict=True)]
        levels = [[place(v.deepstack[i]) for v in visuals] for i in range(self.layout.deepstack_levels)]
        return wrap_features([tokens, *levels], self.layout)

    def _position_ids(self, batch: Batch) -> Tensor:
        """Make the position ids: [B, L], or [3, B, L]."""
        return batch.positions[0] if len(batch.positions) == 1 else batch.positions


def _extend(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Return a prompt with more text tokens, at positions after its last; their ``token_inputs`` are 0."""
    n = len(ids)
    new = torch.tensor(ids, dtype=torch.int64, device="cpu")
    positions = prompt.positions[:, -1:] + 1 + torch.arange(n, device="cpu")
    return Prompt(
        input_ids=torch.cat([prompt.input_ids, new]),
        positions=torch.cat([prompt.positions, positions], dim=1),
        visuals=prompt.visuals,
        prefix_length=prompt.prefix_length,
        spans=prompt.spans,
        token_inputs={
            k: torch.cat([v, torch.zeros(n, dtype=v.dtype, device="cpu")]) for k, v in prompt.token_inputs.items()
        },
    )
