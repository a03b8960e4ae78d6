"""Ways of answering questions about every video: from a cache, from texts of equal length, from the videos."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple, Protocol

import torch

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, Prompt, Visual, prompt_builder
from gstep.language.prompt import load_tokenizer
from gstep.language.types import read_placeholder
from gstep.serving.live import LivePruning
from gstep.serving.options import PRUNING_WORKER, make_live_overrides
from pipeline import TokenCache
from pipeline.errors import UsageError
from pipeline.generate.engines import BATCH_SIZES, TRANSFORMERS, VLLM, load_engine
from pipeline.generate.engines.vllm import VllmEngine
from pipeline.options import EngineOptions
from pipeline.rows import JsonObject

#: Way of answering from a cache -> its engine.
CACHED = {"cached-vllm": VLLM, "text-vllm": VLLM, "cached-transformers": TRANSFORMERS}
ONLINE = "online-vllm"
#: Way of answering from the videos with pruning inside vLLM -> its method: of this package, and vLLM's own.
PRUNING = {"live-vllm": "gstep", "evs-vllm": "evs"}
MODES = (*CACHED, ONLINE, *PRUNING)


@dataclass(frozen=True)
class ServingWork:
    """The work of the benchmark. It can be pickled."""

    model: str
    cache: str
    num_frames: int
    ratios: tuple[float, ...]
    questions: tuple[int, ...]
    max_new_tokens: int
    repeats: int


class Pass(NamedTuple):
    """The times and counts of one pass over all requests, which are sent at once.

    Attributes:
        seconds: wall seconds, including reading tokens (or decoding and encoding videos).
        first_token_s: seconds to the first token of the median request; None if unknown.
        reused_tokens: prompt tokens that the prefix cache had; None without a prefix cache.
        visual_tokens: the mean per prompt; None for texts.
        sent_bytes: bytes sent to the engine's process; None for an engine in this process.
    """

    requests: int
    seconds: float
    first_token_s: float | None
    prompt_tokens: int
    reused_tokens: int | None
    visual_tokens: float | None
    sent_bytes: int | None


Ask = Callable[[], Pass]


class ServingWay(Protocol):
    """One way of answering, with its engine loaded; ``close`` must be called at the end."""

    def make_ask(self, ratio: float, questions: int) -> Ask:
        """Make a function that asks ``questions`` questions about every video; its first call is cold."""

    def close(self) -> None:
        """End the engine and its process."""


class CachedWay:
    """The way of answering from a cache with an engine of this package.

    Each ``make_ask`` for a ratio uses a slightly different number of tokens per video, so that no engine finds rows or
    prefixes in its caches.
    """

    def __init__(self, mode: str, job: ServingWork) -> None:
        """Load the engine of ``mode``, a key of CACHED; with "text-vllm", visual tokens are replaced by random words.

        Whether ``job.cache`` was made with ``job.model`` is not checked.
        """
        source = ModelSource.resolve(job.model)
        self._cache = TokenCache(job.cache)
        options = EngineOptions(engine=CACHED[mode])
        self._engine = load_engine(options, source, choose_runtime(), self._cache.max_tokens + 1)
        self._sent = SentBytes(self._engine.client) if isinstance(self._engine, VllmEngine) else None
        self._builder = prompt_builder(source)
        tokenizer = load_tokenizer(source)
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        self._words = [token for token in range(len(tokenizer)) if token not in special] if mode == "text-vllm" else []
        self._decoding = Decoding(max_new_tokens=job.max_new_tokens)
        self._rounds: Counter[float] = Counter()

    def make_ask(self, ratio: float, questions: int) -> Ask:
        """Make a function that asks about every video, with a number of tokens not used before at this ratio."""
        number = self._rounds[ratio]
        self._rounds[ratio] += 1
        # Later rounds take one token more, one less, two more and so on; they only take fewer if the ratio is the
        # stored ratio.
        n_fewer = number if ratio >= self._cache.retention_ratio else (number + 1) // 2 * (-1 if number % 2 else 1)
        read = functools.cache(functools.partial(self._read, ratio, n_fewer))  # each video once a round
        return functools.partial(self._ask, read, questions, f"{ratio} {number}")

    def close(self) -> None:
        """End the engine and its process."""
        self._engine.close()

    def _read(self, ratio: float, n_fewer: int, video_id: str) -> Visual:
        """Read a video with ``n_fewer`` tokens fewer than the ratio gives (more if negative), at least one."""
        row = self._cache.metadata(video_id)
        tokens = max(1, int(ratio * row["n_total"]) - n_fewer)
        share = (tokens + 0.5) / row["n_total"] if tokens < row["n_tokens"] else None
        return self._cache.get(video_id, share).visual

    def _ask(self, read: Callable[[str], Visual], questions: int, seed: str) -> Pass:
        """Read all videos, build all prompts and generate the answers, timed as one pass.

        An engine in this process gets batches of its usual size, vLLM all prompts at once. ``seed``, for random words,
        differs by ratio and round, so that texts of other rounds share no prefix.
        """
        start_s = time.perf_counter()
        sent_before = self._sent.total if self._sent else 0
        before = getattr(self._engine, "reused_tokens", 0)
        prompts: list[Prompt] = []
        for number_of_video, video_id in enumerate(self._cache.video_ids):
            visual = read(video_id)
            video_prompts = [self._builder.build(text, [visual]) for text in make_questions(questions)]
            prompts += (
                self._replace_by_words(video_prompts, Random(f"{seed} {number_of_video}"))
                if self._words
                else video_prompts
            )
        first_token_s: list[float] = []
        batch_size = len(prompts) if self._sent else BATCH_SIZES[TRANSFORMERS]
        for start in range(0, len(prompts), batch_size):
            part = prompts[start : start + batch_size]
            self._engine.generate(part, [self._decoding] * len(part))
            first_token_s += getattr(self._engine, "first_token_s", [])
        return Pass(
            requests=len(prompts),
            seconds=time.perf_counter() - start_s,
            first_token_s=median(first_token_s) if first_token_s else None,
            prompt_tokens=sum(map(len, prompts)),
            reused_tokens=getattr(self._engine, "reused_tokens", 0) - before if self._sent else None,
            visual_tokens=None if self._words else fmean(self._builder.n_visual(prompt.visuals) for prompt in prompts),
            sent_bytes=self._sent.total - sent_before if self._sent else None,
        )

    def _replace_by_words(self, prompts: Sequence[Prompt], generator: Random) -> list[Prompt]:
        """Replace the video's tokens by random words, the same ones in all ``prompts``, which are about one video."""
        first, end = prompts[0].spans[0]
        words = torch.tensor(generator.choices(self._words, k=end - first))
        word_prompts = []
        for prompt in prompts:
            ids = torch.cat([prompt.input_ids[:first], words, prompt.input_ids[end:]])
            positions = torch.arange(len(ids)).expand(len(prompt.positions), -1)
            word_prompts.append(Prompt(ids, positions, (), prompt.prefix_length))  # no visuals: only words
        return word_prompts


class OnlineWay:
    """The way of answering with vLLM alone: its loader decodes each video, and its model encodes and may prune it."""

    def __init__(self, mode: str, job: ServingWork) -> None:
        """Load vLLM with its model, to answer from the video files that ``job.cache`` was made from.

        vLLM may read all files below the common folder of the videos. A ``mode`` of PRUNING prunes to the first of
        ``job.ratios``.

        Raises:
            UsageError: a video of the cache is not a whole local file.
        """
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - tens of seconds to import

        source = ModelSource.resolve(job.model)
        runtime = choose_runtime()
        name, revision = source.pretrained()
        self._files = list_whole_files(TokenCache(job.cache))
        self._llm = LLM(
            model=name,
            revision=revision,
            dtype=runtime.dtype_name,
            limit_mm_per_prompt={"image": 0, "video": 1},
            allowed_local_media_path=os.path.commonpath([str(file.parent) for file in self._files]),
            # This loader takes a fixed number of frames; the Qwen families' own loaders take two a second.
            media_io_kwargs={"video": {"num_frames": job.num_frames, "video_backend": "opencv"}},
            max_model_len=-1,
            disable_log_stats=False,
            enforce_eager=runtime.device == "cpu",
            **_make_pruning_options(mode, source, job.ratios[0]),
        )
        if mode in PRUNING and runtime.device == "cpu":
            self._llm.collective_rpc("enable_pruning")
        self._video_token = read_placeholder(self._llm.model_config.hf_config)[1]
        self._params = SamplingParams(max_tokens=job.max_new_tokens, temperature=0.0)
        self._sent = SentBytes(self._llm.llm_engine.engine_core)

    def make_ask(self, ratio: float, questions: int) -> Ask:
        """Empty all caches of vLLM, and make a function that asks ``questions`` questions about every video.

        ``ratio`` is ignored: the engine has its own.
        """
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        messages = [[_make_message(file, text)] for file in self._files for text in make_questions(questions)]
        return functools.partial(self._ask, messages)

    def close(self) -> None:
        """End the engine and its process."""
        self._llm.llm_engine.engine_core.shutdown()

    def _ask(self, messages: list[list[JsonObject]]) -> Pass:
        """Send all messages at once, and measure until the last answer."""
        start = time.perf_counter()
        sent_before = self._sent.total
        outputs = self._llm.chat(messages, self._params, use_tqdm=False)
        return Pass(
            requests=len(messages),
            seconds=time.perf_counter() - start,
            first_token_s=float(median(output.metrics.first_token_latency for output in outputs)),
            prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
            reused_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            visual_tokens=sum(output.prompt_token_ids.count(self._video_token) for output in outputs) / len(outputs),
            sent_bytes=self._sent.total - sent_before,
        )


def _make_pruning_options(mode: str, source: ModelSource, ratio: float) -> JsonObject:
    """Return the additional arguments of vLLM's LLM for a mode of PRUNING; {} for another mode."""
    if mode not in PRUNING:
        return {}
    live = LivePruning("gstep", ratio)
    options: JsonObject = {"video_pruning_rate": live.rate, "worker_extension_cls": PRUNING_WORKER}
    if PRUNING[mode] == live.method:
        return {**options, "hf_overrides": make_live_overrides(source, live)}
    return {**options, "video_pruning_method": PRUNING[mode]}


def list_whole_files(cache: TokenCache) -> list[Path]:
    """Return the local files that the videos of a cache were made from, in the cache's order.

    Raises:
        UsageError: a video is not a local file, or is a clip of a file.
    """
    files = []
    for video_id in cache:
        row = cache.metadata(video_id)
        file = Path(row["uri"]).resolve()
        if not file.is_file() or row["start_s"] is not None or row["end_s"] is not None:
            raise UsageError(
                f"{ONLINE} reads whole local files, and video {video_id} ({row['uri']}) is none: give a --cache of "
                f"such files, or leave out the ways from the videos: --modes {' '.join(CACHED)}"
            )
        files.append(file)
    return files


def _make_message(file: Path, text: str) -> JsonObject:
    """Make a chat message with a video and a question."""
    video: JsonObject = {"type": "video_url", "video_url": {"url": file.as_uri()}}
    return {"role": "user", "content": [video, {"type": "text", "text": text}]}


class SentBytes:
    """A counter of the bytes sent to an engine's process, in ``total``; it wraps the encoder of the engine's client."""

    def __init__(self, client: Any) -> None:
        """Replace the encoder of ``client`` for good, to count the bytes of each later message."""
        self.total = 0
        encode = client.encoder.encode

        def encode_and_count(message: object) -> Any:
            parts = encode(message)
            self.total += sum(memoryview(part).nbytes for part in parts)
            return parts

        client.encoder.encode = encode_and_count


def make_questions(count: int) -> list[str]:
    """Return ``count`` different questions."""
    return [f"Question {number}: what happens in this video, and why?" for number in range(count)]
