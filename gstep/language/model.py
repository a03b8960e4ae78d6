"""A language model that answers prompts with cached visual tokens, passed to transformers as ``mm_encoder_outputs``."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

from gstep.backbones import ModelSource, Runtime
from gstep.language.batch import MASK_ELEMENTS, Batch, encoder_outputs, group_by_cost
from gstep.language.decoding import RowLimits, SeededSampling, StepWatch
from gstep.language.layer_pruning import CACHE, InsidePruning, mark_prunable
from gstep.language.prompt import load_tokenizer, tokenize_text
from gstep.language.types import (
    Answer,
    Decoding,
    Prompt,
    Score,
    has_linear_attention,
    read_context_length,
    read_placeholder,
)
from gstep.language.weights import list_end_ids, load_llm
from gstep.pruners.base import Pruner
from gstep.types import Visual


class LanguageModel:
    """The language model of one checkpoint on one device, without its vision part.

    Attributes:
        mask_elements: the maximum size of a batch's attention mask.
        copied_tokens: the maximum number of tokens in copies of a prompt's cache, one copy per continuation.
    """

    mask_elements = MASK_ELEMENTS
    copied_tokens = 2**16

    def __init__(self, model: Any, tokenizer: Any, device: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = device

    @classmethod
    def load(cls, source: ModelSource, runtime: Runtime) -> Self:
        """Load the model, without its vision part, and its tokenizer, for any family.

        Raises:
            ModelError: a file is missing or not valid, weights are quantized or of another shape, or transformers is
                too old.
        """
        return cls(load_llm(source, runtime), load_tokenizer(source), runtime.device)

    @property
    def n_bytes(self) -> int:
        """The size of all weights and buffers in bytes."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def context_length(self) -> int:
        """The maximum number of tokens in a prompt and its answer; 2^31 if the config has no limit."""
        return read_context_length(self.model.config)

    @torch.inference_mode()
    def embedding(self, text: str) -> Tensor:
        """Compute the mean input embedding of a text's tokens, [1, D] float32, on the model's device.

        Raises:
            ValueError: the text has no token.
        """
        ids = torch.tensor(tokenize_text(self.tokenizer, text), device=self.device)
        mean: Tensor = self.model.get_input_embeddings()(ids).float().mean(0, keepdim=True)
        return mean

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Prompt], last: int = 0) -> list[Tensor]:
        """Compute the logits of each prompt: a list of [L, V] in the compute dtype, without padding.

        Args:
            last: if not 0, only the logits of each prompt's ``last`` tokens, which must follow its last video; prompts
                with the same beginning then share its computation.
        """
        batch, cache = self._make_batch_and_cache(prompts, last) if last else (Batch.of(prompts), None)
        output = self._run_forward(batch, prompts=prompts if cache is None else (), past=cache, logits_to_keep=last)
        masks = batch.mask[:, -last:].to(self.device)
        logits = output.logits[:, -masks.shape[1] :]  # some models of the generic family ignore logits_to_keep
        return [row[mask.bool()] for row, mask in zip(logits, masks, strict=True)]

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        decodings: Sequence[Decoding],
        *,
        share_prefix: bool = True,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[Answer]:
        """Answer a batch of prompts, which may differ in length and in their options; one Answer per prompt, in order.

        Args:
            share_prefix: if True, prompts with the same Visual objects and the same tokens up to the end of their last
                video share the computation of these tokens.
            inside: a method with a ``layer``, before which it prunes, and the share of visual tokens to keep. Nothing
                is shared then.

        Raises:
            ValueError: the method cannot prune inside this model (:func:`check_prune_layer`).
            WrongSelection: the method returned an invalid selection.
            FloatingPointError: the model's scores are NaN for a token of an answer.
        """
        if inside is not None:
            with self._prune_inside(prompts, *inside).apply_hooks(self.model):
                return self.generate(prompts, decodings, share_prefix=False)
        start = time.perf_counter()
        batch, cache = self._make_batch_and_cache(prompts) if share_prefix else (Batch.of(prompts), None)
        watch = StepWatch()
        tokens = self._generate_ids(batch, cache, prompts if cache is None else (), decodings, watch).cpu()
        end = time.perf_counter()
        first = watch.first
        assert first is not None
        answers = [
            self._make_answer(row, decoding, first - start, end - first)
            for row, decoding in zip(tokens.tolist(), decodings, strict=True)
        ]
        watch.check([len(answer.token_ids) + (answer.finish == "stop") for answer in answers])
        return answers

    def _generate_ids(
        self,
        batch: Batch,
        past: DynamicCache | None,
        prompts: Sequence[Prompt],
        decodings: Sequence[Decoding],
        watch: StepWatch,
    ) -> Tensor:
        """Run the model's ``generate`` on ``batch``; return the new token ids, [B, new], padded after an early end.

        Args:
            past: the cache of the first columns of the batch, which is extended in place; None if nothing is cached.
            prompts: the prompts whose videos are not in ``past``.
            watch: gets the scores of every step.
        """
        length = batch.input_ids.shape[1]
        output: Tensor = self.model.generate(
            **self._make_inputs(batch, prompts, past),
            generation_config=self._make_config(decodings),
            logits_processor=LogitsProcessorList([SeededSampling(decodings), watch]),
            stopping_criteria=StoppingCriteriaList([RowLimits(decodings, length)]),
        )
        return output[:, length:]

    @torch.inference_mode()
    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Sequence[str]],
        *,
        share_prefix: bool = True,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[list[Score]]:
        """Compute the log-probability of each continuation of each prompt; NaN scores are not refused.

        Args:
            share_prefix, inside: those of :meth:`generate`.

        Returns:
            A list per prompt with a Score per continuation, in order.

        Raises:
            ValueError: a continuation has no token, or the method cannot prune inside this model
                (:func:`check_prune_layer`).
            WrongSelection: the method returned an invalid selection.
        """
        ids = [[tokenize_text(self.tokenizer, text) for text in texts] for texts in continuations]
        pruning = self._prune_inside(prompts, *inside).apply_hooks(self.model) if inside else nullcontext()
        with pruning as active:
            batch, cache = (
                self._make_batch_and_cache(prompts) if share_prefix and not active else (Batch.of(prompts), None)
            )
            new = prompts if cache is None else ()
            output = self._run_forward(batch, prompts=new, past=cache, use_cache=True, logits_to_keep=1)
            first = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            return [
                self._score_continuations(batch.rows([row]), output[CACHE], row, first[row], texts, active)
                for row, texts in enumerate(ids)
            ]

    def _score_continuations(
        self,
        prompt: Batch,
        cache: DynamicCache,
        row: int,
        first: Tensor,
        continuations: list[list[int]],
        inside: InsidePruning | None,
    ) -> list[Score]:
        """Score the continuations of one prompt, in batches of at most ``copied_tokens`` copied tokens or of one.

        Args:
            prompt: a batch with the prompt as its only row.
            cache: the keys and values of all prompts, which stay unchanged; the prompt's are in ``row``.
            first: [V], the log-probabilities of the first token after the prompt.
            continuations: token ids, at least one each.
        """
        logprobs = [float(first[ids[0]]) for ids in continuations]
        multi_token = [i for i, ids in enumerate(continuations) if len(ids) > 1]
        batch_size = max(1, self.copied_tokens // prompt.input_ids.shape[1])
        for part in (multi_token[start : start + batch_size] for start in range(0, len(multi_token), batch_size)):
            with inside.apply_to_rows([row] * len(part)) if inside else nullcontext():
                later_logprobs = self._score_later_tokens(prompt, cache, row, [continuations[i] for i in part])
            for i, value in zip(part, later_logprobs, strict=True):
                logprobs[i] += value
        return [Score(value, len(ids)) for value, ids in zip(logprobs, continuations, strict=True)]

    def _score_later_tokens(
        self, prompt: Batch, cache: DynamicCache, row: int, continuations: list[list[int]]
    ) -> list[float]:
        """Compute the log-probability of each continuation after its first token; each has two tokens or more."""
        # Padding is on the right, so that each continuation follows its prompt without a gap.
        inputs = [ids[:-1] for ids in continuations]
        width = max(map(len, inputs))
        input_ids = torch.tensor([ids + [ids[0]] * (width - len(ids)) for ids in inputs], device="cpu")
        offset = torch.arange(width, device="cpu")
        mask = (offset < torch.tensor([[len(ids)] for ids in inputs], device="cpu")).long()
        start = prompt.positions[:, 0, -1:, None] + 1  # text follows text: positions continue after the prompt's last
        tail = Batch(input_ids, mask, (start + offset).expand(-1, len(inputs), -1))
        output = self._run_forward(
            tail.prepend_prefix(prompt.rows([0] * len(inputs))), past=_copy_rows(cache, [row] * len(inputs))
        )
        logprobs = torch.log_softmax(output.logits.float(), dim=-1)
        targets = [torch.tensor(ids[1:], device=logprobs.device) for ids in continuations]
        return [float(rows[: len(t)].gather(-1, t[:, None]).sum()) for rows, t in zip(logprobs, targets, strict=True)]

    def _prune_inside(self, prompts: Sequence[Prompt], method: Pruner, retention_ratio: float) -> InsidePruning:
        """Return the object that prunes these prompts inside the model; all visual tokens but newlines are prunable."""
        batch = Batch.of(prompts)
        _, video = read_placeholder(self.model.config)
        prunable = torch.zeros_like(batch.mask, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            counts = [len(visual.index) for visual in prompt.visuals]
            newline = any(visual.newline is not None for visual in prompt.visuals)
            prunable[row, batch.mask.shape[1] - len(prompt) :] = mark_prunable(prompt.input_ids, video, counts, newline)
        return InsidePruning(method, retention_ratio, prunable, batch.mask.bool())

    def _make_batch_and_cache(self, prompts: Sequence[Prompt], last: int = 1) -> tuple[Batch, DynamicCache | None]:
        """Make the batch of all prompts, and compute the key-value cache of their videos if that saves work.

        It saves work if prompts have a common beginning (:func:`_has_same_prefix`), or if all prompts have videos and
        together exceed the limits of a batch. On models with linear attention, the cache also contains the texts,
        except the ``last`` tokens of each prompt.

        Returns:
            The batch with all tokens of the prompts, and the cache of its first columns or None.
        """
        first_of_group: list[int] = []  # the first prompt of each group of prompts on the same videos
        group = []  # each prompt's group
        for i, prompt in enumerate(prompts):
            matches = (g for g, first in enumerate(first_of_group) if _has_same_prefix(prompts[first], prompt))
            number = next(matches, len(first_of_group))
            if number == len(first_of_group):
                first_of_group.append(i)
            group.append(number)
        lengths = [len(prompt) for prompt in prompts]
        batches = group_by_cost(lengths, lengths, len(lengths), self.mask_elements)
        fits_in_one_batch = len(batches) == 1 or not all(p.prefix_length for p in prompts)
        if len(first_of_group) == len(prompts) and fits_in_one_batch:
            return Batch.of(prompts), None
        group_prompts = [prompts[i] for i in first_of_group]
        prefix = Batch.of(group_prompts, [slice(p.prefix_length) for p in group_prompts])
        cache = self._compute_prefix_cache(group_prompts)
        if has_linear_attention(self.model.config):  # padding within a row would change the state
            return Batch.of(prompts), self._compute_cache_without_last(last, prompts, prefix, cache, group)
        cache.reorder_cache(torch.tensor(group, device=self.device))
        tails = Batch.of(prompts, [slice(p.prefix_length, None) for p in prompts])
        return tails.prepend_prefix(prefix.rows(group)), cache

    def _compute_cache_without_last(
        self, last: int, prompts: Sequence[Prompt], prefixes: Batch, cache: DynamicCache, group: Sequence[int]
    ) -> DynamicCache:
        """Compute the cache of each prompt without its ``last`` tokens, padded on the left.

        Texts of equal length share a batch, so that no padding lies between a video and its text.

        Args:
            prefixes, cache: the distinct beginnings of the prompts, up to the end of their videos, and their cache,
                which stays unchanged.
            group: the row of each prompt's beginning in ``prefixes``.
        """
        texts: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            texts.setdefault(len(prompt) - prompt.prefix_length - last, []).append(row)
        caches = list[DynamicCache]()
        order = list[int]()
        for length, rows in texts.items():
            lengths = [prefixes.input_ids.shape[1] + length] * len(rows)
            for part in group_by_cost(lengths, [length] * len(rows), len(rows), self.mask_elements):
                batch_rows = [rows[i] for i in part]
                order += batch_rows
                prefix_rows = [group[i] for i in batch_rows]
                caches.append(_copy_rows(cache, prefix_rows))
                if length:
                    spans = [slice(prompts[i].prefix_length, -last) for i in batch_rows]
                    batch = Batch.of([prompts[i] for i in batch_rows], spans).prepend_prefix(prefixes.rows(prefix_rows))
                    self._run_forward(batch, past=caches[-1], use_cache=True, logits_to_keep=1)
        stack = _stack_caches(caches, max(len(prompt) for prompt in prompts) - last)
        stack.reorder_cache(torch.tensor(order, device=self.device).argsort())
        return stack

    def _compute_prefix_cache(self, prompts: Sequence[Prompt]) -> DynamicCache:
        """Compute the key-value cache of each prompt up to the end of its videos, in batches within ``mask_elements``.

        The rows are in the order of the prompts, and padded on the left.
        """
        lengths = [prompt.prefix_length for prompt in prompts]
        parts = group_by_cost(lengths, lengths, len(lengths), self.mask_elements)
        caches = []
        for part in parts:
            part_prompts = [prompts[i] for i in part]
            batch = Batch.of(part_prompts, [slice(prompt.prefix_length) for prompt in part_prompts])
            caches.append(self._run_forward(batch, prompts=part_prompts, use_cache=True, logits_to_keep=1)[CACHE])
        if len(caches) > 1:
            caches = [_stack_caches(caches, max(cache.get_seq_length() for cache in caches))]
        order = [row for part in parts for row in part]
        caches[0].reorder_cache(torch.tensor(order, device=self.device).argsort())
        return caches[0]

    def _run_forward(
        self, batch: Batch, *, prompts: Sequence[Prompt] = (), past: DynamicCache | None = None, **keywords: Any
    ) -> Any:
        """Run the model over the tokens of ``batch`` that are not in ``past``, which is extended in place.

        ``prompts`` are those whose videos are among these tokens.
        """
        start = 0 if past is None else past.get_seq_length()
        return self.model(**self._make_inputs(batch, prompts, past, start), **keywords)

    def _make_inputs(
        self, batch: Batch, prompts: Sequence[Prompt], past: DynamicCache | None, start: int = 0
    ) -> dict[str, Any]:
        """Make the keyword arguments of forward for the tokens of ``batch`` from column ``start`` on, on the device.

        The attention mask covers all columns. The videos of ``prompts`` must be among the new tokens.
        """
        inputs = {
            "input_ids": batch.input_ids[:, start:].to(self.device),
            "attention_mask": batch.mask.to(self.device),
            "position_ids": self._position_ids(batch)[..., start:].to(self.device),
            CACHE: past,
            **{name: values[:, start:].to(self.device) for name, values in batch.token_inputs.items()},
        }
        if visuals := [visual for prompt in prompts for visual in prompt.visuals]:
            inputs["mm_encoder_outputs"] = self._encoder_outputs(visuals)
        return inputs

    def _encoder_outputs(self, visuals: Sequence[Visual]) -> dict[str, Any]:
        """Make the ``mm_encoder_outputs`` for a batch's videos, in the order of its rows."""
        return encoder_outputs(visuals, self.model)

    def _position_ids(self, batch: Batch) -> Tensor:
        """Make the position ids of a batch: [B, L], or [4, B, L] for M-RoPE."""
        return batch.position_ids()

    def _make_config(self, decodings: Sequence[Decoding]) -> Any:
        """Copy the model's GenerationConfig, made greedy, with a padding id and the largest ``max_new_tokens``."""
        config = copy.deepcopy(self.model.generation_config)
        config.update(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max(d.max_new_tokens for d in decodings),
            pad_token_id=self._choose_pad_id(),
            use_cache=True,
        )
        return config

    def _choose_pad_id(self) -> int:
        """Return the padding id: the first of the model's, the tokenizer's, the end ids, and 0."""
        generation = self.model.generation_config
        candidates = (generation.pad_token_id, self.tokenizer.pad_token_id, *list_end_ids(generation), 0)
        return next(int(i) for i in candidates if i is not None)

    def _make_answer(self, row: list[int], decoding: Decoding, prefill_s: float, decode_s: float) -> Answer:
        """Make the Answer of one row of generated ids, cut at its limit and before its first end token."""
        ends = list_end_ids(self.model.generation_config)
        ids = row[: decoding.max_new_tokens]
        stop = next((i for i, token in enumerate(ids) if token in ends), None)
        ids = ids if stop is None else ids[:stop]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(text, tuple(ids), "length" if stop is None else "stop", prefill_s, decode_s)


def _has_same_prefix(a: Prompt, b: Prompt) -> bool:
    """Return True if two prompts have the same video objects, and the same ids and positions up to the end of them.

    Prompts without videos never do.
    """
    return (
        len(a.visuals) == len(b.visuals) > 0
        and all(x is y for x, y in zip(a.visuals, b.visuals, strict=True))
        and torch.equal(a.input_ids[: a.prefix_length], b.input_ids[: b.prefix_length])
        and torch.equal(a.positions[:, : a.prefix_length], b.positions[:, : b.prefix_length])
    )


def _copy_rows(cache: DynamicCache, index: Sequence[int]) -> DynamicCache:
    """Copy the rows ``index`` of a cache, which may repeat, into a new cache; ``cache`` stays unchanged."""
    rows = copy.copy(cache)
    rows.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in rows.layers:
        for name, states in vars(layer).items():  # a layer of linear attention has its states in dicts
            if isinstance(states, dict):
                setattr(layer, name, dict(states))
    rows.reorder_cache(torch.tensor(index))
    return rows


def _stack_caches(caches: Sequence[DynamicCache], length: int) -> DynamicCache:
    """Join the rows of several caches, in order, into a new cache of ``length`` tokens, padded or cut on the left.

    States of linear attention are joined without padding.
    """
    stack = _copy_rows(caches[0], range(1))
    for layer, parts in zip(stack.layers, zip(*(cache.layers for cache in caches), strict=True), strict=True):
        if hasattr(layer, "conv_states"):
            for states in ("conv_states", "recurrent_states"):
                parts_of_state = [getattr(part, states) for part in parts]
                setattr(layer, states, {i: torch.cat([part[i] for part in parts_of_state]) for i in parts_of_state[0]})
        else:
            layer.keys = torch.cat([_fit_length(part.keys, length) for part in parts])
            layer.values = torch.cat([_fit_length(part.values, length) for part in parts])
    return stack


def _fit_length(states_BHLE: Tensor, length: int) -> Tensor:
    """Pad keys or values with zeros, or cut them, on the left to ``length`` tokens."""
    return nn.functional.pad(states_BHLE, (0, 0, length - states_BHLE.shape[-2], 0))
