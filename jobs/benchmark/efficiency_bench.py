"""The timed parts of answering a question about a video, from the video itself and from a cache of its tokens.

Decoding and encoding do not depend on the question or on the retention ratio. They are measured once for each video,
repeat and kind of evidence, and count for every online question. A cache is read from files that were just written and
are still in the system's memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from gstep import PrunedTokens, VisualTokens, make_pruner
from gstep.backbones import Backbone, ModelSource, Runtime, StaticParts, choose_runtime, family_of
from gstep.checkpoints.random_weights import has_no_weights
from gstep.evidence import HEAD_SOURCES, is_per_frame
from gstep.language import Decoding, LanguageModel, PromptBuilder, Visual, load_language_model, prompt_builder
from pipeline.cache.header import HEADER, CacheHeader, fingerprint, serialise_header
from pipeline.cache.reader import TokenCache
from pipeline.cache.token_shard import TokenShard
from pipeline.cache.writer import VideoItem, commit_records, write_token_shard
from pipeline.errors import RunFailed, UsageError, usage_errors
from pipeline.generate.late_pruning import LatePruning, parse_pruning_grid, resolve_pruning
from pipeline.generate.prompts import TextEmbeddings
from pipeline.inputs.video_list import VideoList
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.prune.encode_stage import VideoEncoder, collect_kept_tokens, make_pruning_columns, to_sampled_video
from pipeline.prune.recipe import Recipe, list_needed_evidence, resolve
from pipeline.rows import ManifestRow, TodoRow, VideoRecord
from pipeline.storage.stores import LocalStore

T = TypeVar("T")
FULL = "none"
_QUESTION = (
    "Question {number}: what happens in this video after the person has looked at the camera?\n"
    "A. They sit down.\nB. They leave the room.\nC. They ride a bike.\nD. Nothing happens.\n"
    "Answer with the option's letter from the given choices directly."
)


@dataclass(frozen=True)
class Arm:
    """A pruning method at a retention ratio; ``late`` is its pruning of cached tokens, None for full retention."""

    method: str
    retention_ratio: float
    late: LatePruning | None = None

    @property
    def evidence(self) -> frozenset[str]:
        """The labels of the evidence that the encoder computes."""
        return frozenset() if self.late is None else frozenset(column for _, column in self.late.evidence)

    @property
    def stores_kept(self) -> bool:
        """True if the arm's cache stores only the kept tokens; otherwise each question selects from all tokens."""
        return self.late is not None and self.late.inside is None and self.late.pruner.cacheable

    @property
    def cached_evidence(self) -> list[str]:
        """The labels of the evidence that the arm's cache stores."""
        return [] if self.stores_kept else sorted(self.evidence)


@dataclass(frozen=True)
class Measurement:
    """The arms, videos and settings of a measurement.

    Attributes:
        recipe: the recipe of all tokens of the videos, with the evidence of all methods.
        arms: the arms, full retention first.
        random: True if the weights are random.
    """

    recipe: Recipe
    manifest: pa.Table
    runtime: Runtime
    builder: PromptBuilder
    arms: tuple[Arm, ...]
    questions: int
    max_new_tokens: int
    repeats: int
    random: bool


def prepare_measurement(folder: Path, arguments: argparse.Namespace) -> Measurement:
    """Resolve the model, the videos and the methods of the arguments, without loading weights.

    A model with random weights gets its small files in ``folder``, which must outlive the measurement.

    Raises UsageError, with the remedy, if any of them cannot be used.
    """
    model, siglip = arguments.model, arguments.siglip
    with usage_errors():
        runtime = choose_runtime(arguments.device, arguments.dtype, arguments.attn)
        random = arguments.random_weights or has_no_weights(model)
        if random:
            (folder / "model").mkdir()
        source = ModelSource.random(model, folder / "model") if random else ModelSource.resolve(model)
        grid = parse_pruning_grid(arguments.method, arguments.retention_ratio, siglip)
        if any(point.positions for point in grid):
            raise UsageError("--method: positions change no cost: use them in jobs.evaluate")
        pruned = [point for point in grid if point.method != FULL]
        evidence = {
            pair for point in pruned for pair in list_needed_evidence(point.method, source.family, point.params)
        }
        if siglip is not None and not {where for _, where in evidence} & HEAD_SOURCES:
            raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
        config = PruneConfig(
            videos=[arguments.videos],
            out=str(folder),
            model=model,
            siglip=siglip,
            pruner=FULL,
            retention_ratio=1.0,
            evidence=[f"{name}={where}" for name, where in sorted(evidence)],
            num_frames=arguments.num_frames,
            attn=arguments.attn,
        )
        manifest = VideoList.read(arguments.videos).known
        recipe = resolve(config, source=source)
        builder, identity = prompt_builder(recipe.source), recipe.identity(runtime.dtype_name)
        arms = [Arm(FULL, 1.0)]
        for point in pruned:
            late = resolve_pruning(point, identity, recipe.source, builder)
            arms.append(Arm(point.method_label, point.retention_ratio, late))
    sizes = (arguments.questions, arguments.max_new_tokens, arguments.repeats)
    return Measurement(recipe, manifest, runtime, builder, tuple(arms), *sizes, random)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The measurements of one question in one mode, in seconds and bytes; a step that a mode skips has 0 s.

    Attributes:
        mode: "online" from the video, "cached" from its tokens in a cache.
        visual_tokens: the visual tokens in most of the language model's layers.
        prompt_tokens: all tokens of the prompt, text included.
        kv_bytes: bytes of the prompt's keys and values after the prefill.
        llm_s: seconds of the whole ``generate``: ``prefill_s`` until its first token, ``token_decode_s`` from the first
            token to the last, and its overhead.
        peak_bytes: peak of torch's memory on a GPU, or of this process on a CPU, weights included; None if unknown.
        answer: the token ids of the answer.
    """

    mode: str
    video_id: str
    question: int
    repeat: int
    visual_tokens: int
    prompt_tokens: int
    kv_bytes: int
    video_decode_s: float = 0.0
    encode_s: float = 0.0
    read_s: float = 0.0
    prune_s: float
    prompt_s: float
    llm_s: float
    prefill_s: float
    token_decode_s: float
    bytes_read: int = 0
    peak_bytes: float | None
    answer: tuple[int, ...] = field(repr=False)

    @property
    def llm_with_tower_s(self) -> float:
        """The model's seconds as the paper's harness counts them: vision tower and pruning included."""
        return self.encode_s + self.prune_s + self.llm_s

    @property
    def total_s(self) -> float:
        """The seconds from the start to the answer; online this is the paper's E2E, reading the video included."""
        return self.video_decode_s + self.read_s + self.prompt_s + self.llm_with_tower_s

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """New tokens a second after the first, which the prefill gives; None for a single token."""
        return (len(self.answer) - 1) / self.token_decode_s if len(self.answer) > 1 else None


@dataclass
class ArmResult:
    """All measurements of one arm; ``build_s`` are the seconds from a video file to its row in the cache."""

    arm: Arm
    online: list[Sample] = field(default_factory=list)
    cached: list[Sample] = field(default_factory=list)
    build_s: list[float] = field(default_factory=list)


class TimedWork(NamedTuple, Generic[T]):
    """The result of a piece of work, its seconds, and the peak of memory meanwhile."""

    value: T
    seconds: float
    peak_bytes: float | None


def time_work(work: Callable[[], T], device: str) -> TimedWork[T]:
    """Run ``work`` and time it: on a GPU by CUDA events between synchronisations, else by wall clock.

    The peak of memory is torch's on the GPU, else this process's, or None if unknown. It is reset first.
    """
    if not device.startswith("cuda"):
        with suppress(OSError):  # Linux alone
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
        started = time.perf_counter()
        value = work()
        seconds = time.perf_counter() - started
        with suppress(OSError):
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
            return TimedWork(value, seconds, None if peak is None else 1024.0 * int(peak[1]))
        return TimedWork(value, seconds, None)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.current_stream(device)
    begin.record(stream)
    value = work()
    end.record(stream)
    end.synchronize()
    return TimedWork(value, begin.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated(device))


def kv_bytes(text_config: Any, number_bytes: int, tokens: int, *, layer: int = 0, dropped: int = 0) -> int:
    """Compute the bytes of keys and values of ``tokens``, of which ``dropped`` are missing from ``layer`` on."""
    width = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    layers = text_config.num_hidden_layers
    numbers = layers * tokens - (layers - layer) * dropped
    return int(numbers * text_config.num_key_value_heads * width * 2 * number_bytes)


class Bench:
    """The run of a measurement: its loaded models, and the caches that it makes below ``folder``. Close it last."""

    def __init__(self, job: Measurement, folder: Path, say: Callable[[str], None]) -> None:
        """Load the vision tower, the decoder and the language model to be measured.

        Every answer gets its full length, as the end token is removed from the language model's generation config.
        ``folder`` gets the caches of the arms, and :meth:`run` writes them. ``say`` gets lines of progress.
        """
        self._job, self._say, self._device = job, say, job.runtime.device
        say(f"loading {job.recipe.source.name}")
        self.tower: Backbone = family_of(job.recipe.source).load(job.runtime)
        self._decoder = VideoDecoder(job.recipe.decode_setup())
        self.llm: LanguageModel = load_language_model(job.recipe.source, job.runtime)
        # Every answer has its full length: random weights, or another method, would end some answers sooner.
        self.llm.model.generation_config.eos_token_id = None
        self._embedders = TextEmbeddings(self.llm, self._device, [arm.late for arm in job.arms if arm.late is not None])
        self._decoding = Decoding(max_new_tokens=job.max_new_tokens)
        self._stores = {arm: LocalStore(folder / f"cache-{number}") for number, arm in enumerate(job.arms)}
        self._fingerprints: dict[Arm, str] = {}
        self._caches: dict[Arm, TokenCache] = {}
        self._n_commits = 0

    def close(self) -> None:
        """Close the decoder."""
        self._decoder.close()

    def run(self) -> list[ArmResult]:
        """Measure all arms in turns, so that disturbances of the machine affect all arms equally.

        All arms first answer from the videos, which fills the caches. Then the vision tower is freed, and all arms
        answer from caches: it can run only once. Raises RunFailed, UsageError.
        """
        results = [ArmResult(arm) for arm in self._job.arms]
        for arm, store in self._stores.items():
            header = self._make_header(arm)
            store.make()
            store.put(HEADER, serialise_header(header))
            self._fingerprints[arm] = fingerprint(header["identity"])
        self._measure("online", self._ask_online, results)
        del self.tower
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        self._caches = {arm: TokenCache(str(store)) for arm, store in self._stores.items()}
        self._measure("cached", self._ask_cached, results)
        return results

    def _measure(self, mode: str, ask: Callable[..., None], results: Sequence[ArmResult]) -> None:
        """Ask about the first video once as a warm-up, then about all videos in every repeat.

        ``ask`` adds the measurements to ``results``; those of the warm-up are discarded.
        """
        videos: list[ManifestRow] = self._job.manifest.to_pylist()
        self._say(f"{mode}: to warm up")
        ask(videos[0], 1, 0, [ArmResult(result.arm) for result in results])
        for repeat in range(1, self._job.repeats + 1):
            for row in videos:
                self._say(f"{mode}: {repeat} of {self._job.repeats}, {row['video_id']}")
                ask(row, self._job.questions, repeat, results)

    def _ask_online(self, row: ManifestRow, questions: int, repeat: int, results: Sequence[ArmResult]) -> None:
        """Decode and encode a video, ask every arm its questions, and write the video into each arm's cache.

        Samples and the seconds of building go into ``results``. A video is encoded once for each kind of evidence.
        """
        (record, frames), decode_s, _ = time_work(lambda: self._decode(row), "cpu")
        video = to_sampled_video(record)
        for evidence in dict.fromkeys(result.arm.evidence for result in results):
            setup = self._job.recipe.encode_setup(self._device, self._job.runtime.dtype_name)
            sources = {name: where for name, where in setup.evidence.items() if name in evidence}
            encoder = VideoEncoder(replace(setup, evidence=sources), self.tower)
            encode = partial(encoder.encode_frames, frames, video)
            tokens, encode_s, peak = time_work(encode, self._device)
            visual = self._make_visual(record, tokens)
            about: dict[str, Any] = {"mode": "online", "video_id": row["video_id"], "repeat": repeat}
            about |= {"video_decode_s": decode_s, "encode_s": encode_s}
            for result in (result for result in results if result.arm.evidence == evidence):
                for number in range(questions):
                    sample = self.ask(result.arm, visual, number, **about)
                    result.online.append(replace(sample, peak_bytes=_max_peak(peak, sample.peak_bytes)))
                encoded = {**record, "attempts": repeat + 1, "encode_s": encode_s}
                store_s = self._store(result.arm, encoded, tokens, visual)  # type: ignore[arg-type]
                result.build_s.append(decode_s + encode_s + store_s)

    def _decode(self, row: ManifestRow) -> tuple[VideoRecord, NDArray[np.uint8]]:
        """Decode a video. Raises RunFailed if it cannot be read."""
        todo: TodoRow = {**row, "attempts": 1}
        with self._decoder.open_archives([todo]) as archives, self._decoder.open(todo, archives) as source:
            record, frames = self._decoder.decode_one(todo, source)
        if frames is None:
            raise RunFailed(f"{record['video_id']}: {record['error_class']}: {record['error_message']}")
        return record, frames

    def _make_visual(self, record: VideoRecord, encoded: VisualTokens) -> Visual:
        """Make the Visual of all tokens of an encoded video, with its evidence."""
        n_frames, per_frame, _ = encoded.tokens.shape
        return Visual(
            tokens=encoded.tokens.flatten(0, 1),
            index=torch.arange(n_frames * per_frame, device="cpu"),
            n_frames=n_frames,
            tokens_per_frame=per_frame,
            extra={**self.tower.model_extra(to_sampled_video(record)), **encoded.extra},
            deepstack=tuple(level.flatten(0, 1) for level in encoded.deepstack),
            newline=self._read_newline(),
            evidence={
                name: values if is_per_frame(name) else values.flatten(0, 1)
                for name, values in encoded.evidence.items()
            },
            frame_indices=record["frame_indices"],
            fps=record["fps"],
        )

    def _read_newline(self) -> torch.Tensor | None:
        """Return the newline row [D] in bfloat16, the dtype of a cache; None if the model has none."""
        row = self.tower.newline()
        return None if row is None else row.to(torch.bfloat16)

    def ask(self, arm: Arm, visual: Visual, number: int, *, prunes: bool = True, **about: Any) -> Sample:
        """Ask one question about visual tokens, prune them by the arm, and time each part.

        Args:
            number: the number of the question.
            prunes: False if the tokens are pruned already; a method inside the model prunes in any case.
            about: other fields of the sample.

        Raises UsageError if the prompt is too long.
        """
        late, text = arm.late, _QUESTION.format(number=number)
        inside = None if late is None else late.inside

        def prune() -> Visual:
            if late is None or late.inside is not None or not prunes:
                return replace(visual, evidence={})
            pruned = late.select(visual, self._device, self._embedders.embedding(late, text))
            return late.reduce(visual, pruned, own_order=False)

        visual_kept, prune_s, prune_peak = time_work(prune, self._device)
        prompt, prompt_s, _ = time_work(lambda: self._job.builder.build(text, [visual_kept]), "cpu")
        if prompt.extent + self._decoding.max_new_tokens > self.llm.context_length:
            raise UsageError(
                f"a prompt of {prompt.extent} tokens and its answer do not fit into the model's context of "
                f"{self.llm.context_length}: take fewer --num-frames"
            )
        (answer,), llm_s, peak = time_work(
            lambda: self.llm.generate([prompt], [self._decoding], inside=inside), self._device
        )
        n_visual, layer = len(visual_kept.index), 0
        dropped = 0  # visual tokens that the model drops before the layer
        if late is not None and inside is not None:
            layer, dropped = late.pruner.layer or 0, n_visual - late.n_kept_inside(n_visual)
        text_config, number_bytes = self._job.builder.config.get_text_config(), self._job.runtime.dtype.itemsize
        return Sample(
            question=number,
            visual_tokens=n_visual - dropped,
            prompt_tokens=len(prompt),
            kv_bytes=kv_bytes(text_config, number_bytes, len(prompt), layer=layer, dropped=dropped),
            prune_s=prune_s if prunes else 0.0,
            prompt_s=prompt_s,
            llm_s=llm_s,
            prefill_s=answer.prefill_s,
            token_decode_s=answer.decode_s,
            peak_bytes=_max_peak(prune_peak, peak),
            answer=answer.token_ids,
            **about,
        )

    def _store(self, arm: Arm, record: VideoRecord, tokens: VisualTokens, visual: Visual) -> float:
        """Prune a video and write it into the arm's cache; return the seconds. Later repeats replace earlier rows."""

        def prune() -> PrunedTokens:
            if arm.late is None or not arm.stores_kept:
                return make_pruner(FULL).prune(tokens, 1.0)
            return arm.late.select(visual, self._device)

        pruned, prune_s, _ = time_work(prune, self._device)
        row: VideoRecord = {
            **record,
            **make_pruning_columns(pruned, tokens),
            "prune_s": prune_s,
            "runtime": json.dumps(self._job.runtime.describe()),
            "model_extra": json.dumps(dict(visual.extra)),
        }

        def write() -> None:
            store, kept_item = self._stores[arm], collect_kept_tokens(pruned, tokens, arm.cached_evidence)
            rows = write_token_shard([VideoItem(row, kept_item)], store=store, run_id="efficiency")
            self._n_commits += 1
            commit_records(store, "efficiency", self._n_commits, rows, made_with=self._fingerprints[arm])

        return prune_s + time_work(write, self._device).seconds

    def _ask_cached(self, row: ManifestRow, questions: int, repeat: int, results: Sequence[ArmResult]) -> None:
        """Ask every arm its questions about a video from the arm's cache; the samples go into ``results``."""
        video_id = row["video_id"]
        for result in results:
            arm, cache = result.arm, self._caches[result.arm]
            row_of_video = cache.metadata(video_id)
            rows = cache.rows_to_read(row_of_video, cache.check_options(None, "index", arm.cached_evidence, False))
            spans = TokenShard(cache.store, row_of_video["token_shard"], row_of_video["footer_hash"]).spans(rows)
            about: dict[str, Any] = {"mode": "cached", "video_id": video_id, "repeat": repeat}
            about["bytes_read"] = sum(end - start for start, end in spans)
            for number in range(questions):
                video, read_s, _ = time_work(lambda: cache.get(video_id, evidence=arm.cached_evidence), "cpu")  # noqa: B023
                sample = self.ask(arm, video.visual, number, prunes=not arm.stores_kept, read_s=read_s, **about)
                result.cached.append(sample)

    def _make_header(self, arm: Arm) -> CacheHeader:
        """Make the cache header of an arm: for its kept tokens, or for all tokens with evidence if it prunes later."""
        recipe = self._job.recipe
        cached = {name: where for name, where in recipe.evidence.items() if name in arm.cached_evidence}
        recipe = replace(recipe, evidence=cached)
        if arm.stores_kept and arm.late is not None:
            recipe = replace(recipe, pruner=arm.late.pruner, retention_ratio=arm.late.retention_ratio)
        static = StaticParts(self.tower.hidden_size, self._read_newline(), self._job.builder.deepstack_levels)
        return recipe.header(self._job.runtime.dtype_name, static)


def _max_peak(*peaks: float | None) -> float | None:
    """Return the highest of the peaks; None if all are unknown."""
    return max((peak for peak in peaks if peak is not None), default=None)
