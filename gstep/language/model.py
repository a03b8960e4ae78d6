"""A language model that answers prompts of cached visual tokens, through the official entry ``mm_encoder_outputs``."""

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
from gstep.language.batch import MASK_ELEMENTS, Batch, batches_by_cost, encoder_outputs
from gstep.language.decoding import FirstToken, RowLimits, SeededSampling
from gstep.language.layer_pruning import CACHE, PruneInside, visual_places
from gstep.language.prompt import text_ids, tokenizer_of
from gstep.language.types import Answer, Decoding, Prompt, Score, has_linear_attention, placeholder_of
from gstep.language.weights import ends_of, load_llm
from gstep.pruners.base import Pruner


class LanguageModel:
    """The LLM of one checkpoint on one device; it holds no weight of the vision part.

    Attributes:
        mask_elements: the most that the attention mask of a batch may have.
        copied_tokens: how many tokens of a prompt's keys and values, copied for each of its choices, are held at once.
    """

    mask_elements = MASK_ELEMENTS
    copied_tokens = 2**16

    def __init__(self, model: Any, tokenizer: Any, device: str) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = device

    @classmethod
    def load(cls, source: ModelSource, runtime: Runtime) -> Self:
        """Load the model, as :func:`gstep.language.load_language_model`."""
        return cls(load_llm(source, runtime), tokenizer_of(source), runtime.device)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return int(self.model.config.get_text_config().max_position_embeddings)

    @torch.inference_mode()
    def embedding(self, text: str) -> Tensor:
        """Return the mean input embedding [1,D] float32 of a text's tokens, on the model's device.

        Raises ValueError for an empty one.
        """
        ids = torch.tensor(text_ids(self.tokenizer, text), device=self.device)
        mean: Tensor = self.model.get_input_embeddings()(ids).float().mean(0, keepdim=True)
        return mean

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Prompt], last: int = 0) -> list[Tensor]:
        """Return the logits at every token of each prompt, or at its ``last`` ones, [L,V] in the compute dtype.

        Those must follow the last video: prompts on the same videos then go through the model together up to there.
        """
        batch, cache = self._batch_with_cache(prompts, last) if last else (Batch.of(prompts), None)
        output = self._forward(batch, prompts=prompts if cache is None else (), past=cache, logits_to_keep=last)
        masks = batch.mask[:, -last:].to(self.device)
        return [row[mask.bool()] for row, mask in zip(output.logits, masks, strict=True)]

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt],
        decodings: Sequence[Decoding],
        *,
        share_prefix: bool = True,
        inside: tuple[Pruner, float] | None = None,
    ) -> list[Answer]:
        """Answer a batch of prompts, which may differ in length and in their options.

        Args:
            share_prefix: prompts on the same videos (the same Visual objects) go through the model together up to
                there, once for all of them.
            inside: a method that prunes inside the model (it has a ``layer``), and the share of visual tokens that it
                keeps. What it keeps depends on the question, so nothing is shared then.

        Raises ValueError where the model cannot be pruned at that layer.
        """
        if inside is not None:
            with self._prune_inside(prompts, *inside).hooked(self.model):
                return self.generate(prompts, decodings, share_prefix=False)
        started = time.perf_counter()
        batch, cache = self._batch_with_cache(prompts) if share_prefix else (Batch.of(prompts), None)
        clock = FirstToken()
        tokens = self._generate_ids(batch, cache, prompts if cache is None else (), decodings, clock).cpu()
        ended, first = time.perf_counter(), clock.at
        assert first is not None
        return [
            self._answer(row, decoding, first - started, ended - first)
            for row, decoding in zip(tokens.tolist(), decodings, strict=True)
        ]

    def _generate_ids(
        self,
        batch: Batch,
        past: DynamicCache | None,
        prompts: Sequence[Prompt],
        decodings: Sequence[Decoding],
        clock: FirstToken,
    ) -> Tensor:
        """Run ``generate`` on ``batch`` with the keys and values in ``past``; return the new token ids, [B,new].

        ``prompts`` are those whose videos ``past`` does not hold, so that their tokens have to go in.
        """
        length = batch.input_ids.shape[1]
        output: Tensor = self.model.generate(
            **self._inputs(batch, prompts, past),
            generation_config=self._config(decodings),
            logits_processor=LogitsProcessorList([SeededSampling(decodings), clock]),
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
        """Score each continuation of each prompt; ``share_prefix`` and ``inside`` as for :meth:`generate`.

        Raises ValueError for a continuation without a token.
        """
        ids = [[text_ids(self.tokenizer, text) for text in texts] for texts in continuations]
        pruning = self._prune_inside(prompts, *inside).hooked(self.model) if inside else nullcontext()
        with pruning as active:
            batch, cache = self._batch_with_cache(prompts) if share_prefix and not active else (Batch.of(prompts), None)
            new = prompts if cache is None else ()
            output = self._forward(batch, prompts=new, past=cache, use_cache=True, logits_to_keep=1)
            first = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            return [
                self._scores(batch.rows([row]), output[CACHE], row, first[row], texts, active)
                for row, texts in enumerate(ids)
            ]

    def _scores(
        self,
        prompt: Batch,
        cache: DynamicCache,
        row: int,
        first: Tensor,
        continuations: list[list[int]],
        inside: PruneInside | None,
    ) -> list[Score]:
        """Score the continuations of one prompt, whose keys and values are row ``row`` of ``cache``."""
        logprobs = [float(first[ids[0]]) for ids in continuations]
        longer = [i for i, ids in enumerate(continuations) if len(ids) > 1]
        at_once = max(1, self.copied_tokens // prompt.input_ids.shape[1])
        for part in (longer[start : start + at_once] for start in range(0, len(longer), at_once)):
            with inside.of([row] * len(part)) if inside else nullcontext():
                rest = self._later_logprobs(prompt, cache, row, [continuations[i] for i in part])
            for i, value in zip(part, rest, strict=True):
                logprobs[i] += value
        return [Score(value, len(ids)) for value, ids in zip(logprobs, continuations, strict=True)]

    def _later_logprobs(
        self, prompt: Batch, cache: DynamicCache, row: int, continuations: list[list[int]]
    ) -> list[float]:
        """Return each continuation's log-probability of its tokens after the first, summed; each has two or more."""
        # The rows end where they are padded, so that each follows its prompt without a gap.
        inputs = [ids[:-1] for ids in continuations]
        width = max(map(len, inputs))
        padded = torch.tensor([ids + [ids[0]] * (width - len(ids)) for ids in inputs], device="cpu")
        here = torch.arange(width, device="cpu")
        mask = (here < torch.tensor([[len(ids)] for ids in inputs], device="cpu")).long()
        start = prompt.positions[:, 0, -1:, None] + 1  # text follows text: the last position of a prompt is its own
        tail = Batch(padded, mask, (start + here).expand(-1, len(inputs), -1))
        output = self._forward(tail.after(prompt.rows([0] * len(inputs))), past=_rows(cache, [row] * len(inputs)))
        following = torch.log_softmax(output.logits.float(), dim=-1)
        targets = [torch.tensor(ids[1:], device=following.device) for ids in continuations]
        return [float(rest[: len(t)].gather(-1, t[:, None]).sum()) for rest, t in zip(following, targets, strict=True)]

    def _prune_inside(self, prompts: Sequence[Prompt], method: Pruner, retention_ratio: float) -> PruneInside:
        """Make the pruning context for a batch of prompts, marking which of their tokens are visual."""
        batch = Batch.of(prompts)
        _, video = placeholder_of(self.model.config)
        prunable = torch.zeros_like(batch.mask, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            kept = [len(visual.index) for visual in prompt.visuals]
            newline = any(visual.newline is not None for visual in prompt.visuals)
            prunable[row, batch.mask.shape[1] - len(prompt) :] = visual_places(prompt.input_ids, video, kept, newline)
        return PruneInside(method, retention_ratio, prunable, batch.mask.bool())

    def _batch_with_cache(self, prompts: Sequence[Prompt], last: int = 1) -> tuple[Batch, DynamicCache | None]:
        """Return the batch of all prompts, and the key-value cache of their videos if computing that first saves work.

        It does where prompts share videos, or where one attention mask for all would be too large; otherwise the cache
        is None. With linear attention the cache also holds the texts, but for their ``last`` tokens.
        """
        shared: list[int] = []  # the first prompt of each group
        group = []
        for i, prompt in enumerate(prompts):
            place = next((g for g, first in enumerate(shared) if _same_prefix(prompts[first], prompt)), len(shared))
            if place == len(shared):
                shared.append(i)
            group.append(place)
        whole = [len(prompt) for prompt in prompts]
        batches = batches_by_cost(whole, whole, len(whole), self.mask_elements)
        at_once = len(batches) == 1 or not all(p.prefix_length for p in prompts)
        if len(shared) == len(prompts) and at_once:
            return Batch.of(prompts), None
        firsts = [prompts[i] for i in shared]
        prefix = Batch.of(firsts, [slice(p.prefix_length) for p in firsts])
        cache = self._prefix_cache(firsts)
        if has_linear_attention(self.model.config):  # padding within a row would change the state
            return Batch.of(prompts), self._cache_of_all_but(last, prompts, prefix, cache, group)
        cache.reorder_cache(torch.tensor(group, device=self.device))
        tails = Batch.of(prompts, [slice(p.prefix_length, None) for p in prompts])
        return tails.after(prefix.rows(group)), cache

    def _cache_of_all_but(
        self, last: int, prompts: Sequence[Prompt], prefixes: Batch, cache: DynamicCache, group: Sequence[int]
    ) -> DynamicCache:
        """Compute the cache of each prompt but its ``last`` tokens, padded on the left.

        Texts of one length go together, so that no padding lies between a video and its text.

        Args:
            prefixes, cache: the different beginnings of the prompts, up to the end of their videos.
            group: the beginning of each prompt, a row of these.
        """
        texts: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            texts.setdefault(len(prompt) - prompt.prefix_length - last, []).append(row)
        caches, order = list[DynamicCache](), list[int]()
        for length, rows in texts.items():
            whole = [prefixes.input_ids.shape[1] + length] * len(rows)
            for part in batches_by_cost(whole, [length] * len(rows), len(rows), self.mask_elements):
                chosen = [rows[i] for i in part]
                order += chosen
                beginnings = [group[i] for i in chosen]
                caches.append(_rows(cache, beginnings))
                if length:
                    spans = [slice(prompts[i].prefix_length, -last) for i in chosen]
                    batch = Batch.of([prompts[i] for i in chosen], spans).after(prefixes.rows(beginnings))
                    self._forward(batch, past=caches[-1], use_cache=True, logits_to_keep=1)
        joined = _stacked(caches, max(len(prompt) for prompt in prompts) - last)
        joined.reorder_cache(torch.tensor(order, device=self.device).argsort())
        return joined

    def _prefix_cache(self, prompts: Sequence[Prompt]) -> DynamicCache:
        """Compute the key-value cache of each prompt up to the end of its videos, in batches that fit into memory."""
        lengths = [prompt.prefix_length for prompt in prompts]
        parts = batches_by_cost(lengths, lengths, len(lengths), self.mask_elements)
        caches = []
        for part in parts:
            firsts = [prompts[i] for i in part]
            batch = Batch.of(firsts, [slice(prompt.prefix_length) for prompt in firsts])
            caches.append(self._forward(batch, prompts=firsts, use_cache=True, logits_to_keep=1)[CACHE])
        if len(caches) > 1:
            caches = [_stacked(caches, max(cache.get_seq_length() for cache in caches))]
        places = [row for part in parts for row in part]
        caches[0].reorder_cache(torch.tensor(places, device=self.device).argsort())
        return caches[0]

    def _forward(
        self, batch: Batch, *, prompts: Sequence[Prompt] = (), past: DynamicCache | None = None, **keywords: Any
    ) -> Any:
        """Run the model over the part of ``batch`` that ``past`` does not hold."""
        done = 0 if past is None else past.get_seq_length()
        return self.model(**self._inputs(batch, prompts, past, done), **keywords)

    def _inputs(
        self, batch: Batch, prompts: Sequence[Prompt], past: DynamicCache | None, done: int = 0
    ) -> dict[str, Any]:
        """Return ``batch`` from token ``done`` on, and the videos of ``prompts``, as transformers takes them."""
        inputs = {
            "input_ids": batch.input_ids[:, done:].to(self.device),
            "attention_mask": batch.mask.to(self.device),
            "position_ids": batch.position_ids()[..., done:].to(self.device),
            CACHE: past,
        }
        if visuals := [visual for prompt in prompts for visual in prompt.visuals]:
            inputs["mm_encoder_outputs"] = encoder_outputs(visuals, self.model)
        return inputs

    def _config(self, decodings: Sequence[Decoding]) -> Any:
        """Return generation settings that are greedy for all rows; SeededSampling adds the noise of sampled rows."""
        config = copy.deepcopy(self.model.generation_config)
        config.update(
            do_sample=False,
            num_beams=1,
            max_new_tokens=max(d.max_new_tokens for d in decodings),
            pad_token_id=self._pad_id(),
            use_cache=True,
        )
        return config

    def _pad_id(self) -> int:
        """Return the id to pad generated rows with: the model's, the tokenizer's, or a token that ends answers."""
        generation = self.model.generation_config
        known = (generation.pad_token_id, self.tokenizer.pad_token_id, *ends_of(generation), 0)
        return next(int(i) for i in known if i is not None)

    def _answer(self, row: list[int], decoding: Decoding, prefill_s: float, decode_s: float) -> Answer:
        """Make the Answer of one row: cut it at its limit and at the first end token, and decode the text."""
        ends = ends_of(self.model.generation_config)
        ids = row[: decoding.max_new_tokens]
        stop = next((i for i, token in enumerate(ids) if token in ends), None)
        ids = ids if stop is None else ids[:stop]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(text, tuple(ids), "length" if stop is None else "stop", prefill_s, decode_s)


def _same_prefix(a: Prompt, b: Prompt) -> bool:
    """Return whether two prompts are the same up to the end of their videos."""
    return (
        len(a.visuals) == len(b.visuals) > 0
        and all(x is y for x, y in zip(a.visuals, b.visuals, strict=True))
        and torch.equal(a.input_ids[: a.prefix_length], b.input_ids[: b.prefix_length])
        and torch.equal(a.positions[:, : a.prefix_length], b.positions[:, : b.prefix_length])
    )


def _rows(cache: DynamicCache, index: Sequence[int]) -> DynamicCache:
    """Copy some rows of a cache, which may repeat."""
    chosen = copy.copy(cache)
    chosen.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in chosen.layers:
        for name, states in vars(layer).items():  # a layer of linear attention holds its states in dicts
            if isinstance(states, dict):
                setattr(layer, name, dict(states))
    chosen.reorder_cache(torch.tensor(index))
    return chosen


def _stacked(caches: Sequence[DynamicCache], length: int) -> DynamicCache:
    """Return the rows of several caches as one of ``length`` tokens, padded or (of padding) cut on the left."""
    whole = _rows(caches[0], range(1))
    for layer, parts in zip(whole.layers, zip(*(cache.layers for cache in caches), strict=True), strict=True):
        if hasattr(layer, "conv_states"):
            for states in ("conv_states", "recurrent_states"):
                held = [getattr(part, states) for part in parts]
                setattr(layer, states, {i: torch.cat([part[i] for part in held]) for i in held[0]})
        else:
            layer.keys = torch.cat([_fitted(part.keys, length) for part in parts])
            layer.values = torch.cat([_fitted(part.values, length) for part in parts])
    return whole


def _fitted(states_BHLE: Tensor, length: int) -> Tensor:
    """Pad or cut keys or values on the left to ``length`` tokens."""
    return nn.functional.pad(states_BHLE, (0, 0, length - states_BHLE.shape[-2], 0))
