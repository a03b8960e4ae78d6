"""Answers from a cache, by rows that vLLM's workers look up or that requests bring, and from texts as long as those."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean, median

import torch

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, Prompt, Visual, prompt_builder
from gstep.language.prompt import tokenizer_of
from jobs.benchmark.serving.ways import Ask, Job, Pass, SentBytes, questions_of
from pipeline import TokenCache
from pipeline.generate.engines import BATCH_SIZES, TRANSFORMERS, VLLM, EngineSetup, load_engine
from pipeline.generate.engines.cached_rows import read_outline
from pipeline.generate.engines.vllm import VllmEngine

#: Ways -> their engine.
CACHED = {"cached-vllm": VLLM, "cached-vllm-rows": VLLM, "text-vllm": VLLM, "cached-transformers": TRANSFORMERS}


Read = Callable[[str], Visual]


def reader(cache: TokenCache, ratio: float, less: int, *, outlines: bool) -> Read:
    """Return what reads the cached videos of a round as prompts take them, each once. It raises as TokenCache.get.

    It takes ``less`` tokens of each video fewer than the ratio says, and with ``outlines`` leaves their rows out.
    """

    @functools.cache
    def read(video_id: str) -> Visual:
        row = cache.metadata(video_id)
        tokens = max(1, int(ratio * row["n_total"]) - less)
        share = (tokens + 0.5) / row["n_total"] if tokens < row["n_tokens"] else None
        return read_outline(cache, row, share, "index") if outlines else cache.get(video_id, share).visual

    return read


class CachedWay:
    """The way of answering from a cache with an engine of this package.

    Each time questions are to find nothing that is held, they are asked about another number of a video's tokens, a
    few more or less than the ratio says: rows and prefixes of other numbers have other names.
    """

    def __init__(self, mode: str, job: Job) -> None:
        source, self._cache = ModelSource.resolve(job.model), TokenCache(job.cache)
        self._reads_rows = mode in ("cached-vllm-rows", "cached-transformers")
        read_by = self._cache if mode == "cached-vllm" else None
        setup = EngineSetup(CACHED[mode], largest_video=self._cache.most_tokens + 1, cache=read_by)
        self._engine = load_engine(setup, source, choose_runtime())
        self._sent = SentBytes(self._engine.client) if isinstance(self._engine, VllmEngine) else None
        self._builder = prompt_builder(source)
        tokenizer = tokenizer_of(source)
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._words = [token for token in range(len(tokenizer)) if token not in special] if mode == "text-vllm" else []
        self._decoding = Decoding(max_new_tokens=job.max_new_tokens)
        self._rounds: Counter[float] = Counter()

    def fresh(self, ratio: float, questions: int) -> Ask:
        """Return what asks so many questions about every video, of a number of their tokens that nothing holds."""
        number = self._rounds[ratio]
        self._rounds[ratio] += 1
        # One more, one less, two more, ...; of all that are stored there is only less.
        less = number if ratio >= self._cache.retention_ratio else (number + 1) // 2 * (-1 if number % 2 else 1)
        return functools.partial(
            self._ask, reader(self._cache, ratio, less, outlines=not self._reads_rows), questions, number
        )

    def close(self) -> None:
        """End the engine and its process."""
        self._engine.close()

    def _ask(self, read: Read, questions: int, number: int) -> Pass:
        """Build all prompts and ask them."""
        started, sent = time.perf_counter(), self._sent.total if self._sent else 0
        before = getattr(self._engine, "reused_tokens", 0)
        prompts = self._prompts(read, questions, number)
        firsts: list[float] = []
        most = len(prompts) if self._sent else BATCH_SIZES[TRANSFORMERS]
        for start in range(0, len(prompts), most):
            part = prompts[start : start + most]
            self._engine.generate(part, [self._decoding] * len(part))
            firsts += getattr(self._engine, "first_token_s", [])
        return Pass(
            requests=len(prompts),
            seconds=time.perf_counter() - started,
            first_token_s=median(firsts) if firsts else None,
            prompt_tokens=sum(map(len, prompts)),
            reused_tokens=getattr(self._engine, "reused_tokens", 0) - before if self._sent else None,
            visual_tokens=None if self._words else fmean(self._builder.n_visual(one.visuals) for one in prompts),
            sent_bytes=self._sent.total - sent if self._sent else None,
        )

    def _prompts(self, read: Read, questions: int, number: int) -> list[Prompt]:
        """Build a prompt for each question about each video, or a text of the same length."""
        prompts = []
        for place, video_id in enumerate(self._cache.video_ids):
            visual = read(video_id)
            built = [self._builder.build(text, [visual]) for text in questions_of(questions)]
            prompts += self._as_texts(built, Random(f"{number} {place}")) if self._words else built
        return prompts

    def _as_texts(self, prompts: Sequence[Prompt], draw: Random) -> list[Prompt]:
        """Return prompts in which words, the same in each, stand for the tokens of the one video."""
        first, end = prompts[0].spans[0]
        words = torch.tensor(draw.choices(self._words, k=end - first))
        texts = []
        for prompt in prompts:
            ids = torch.cat([prompt.input_ids[:first], words, prompt.input_ids[end:]])
            positions = torch.arange(len(ids)).expand(len(prompt.positions), -1)
            texts.append(Prompt(ids, positions, (), prompt.prefix_length))
        return texts
