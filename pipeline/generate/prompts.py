"""Prompts of questions: videos are read from the cache, pruned, and kept in memory for later questions."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from gstep import PrunedTokens
from gstep.backbones import TextTower
from gstep.errors import is_out_of_memory
from gstep.language import Prompt, Visual
from gstep.language.prompt import tokenize_text
from gstep.pruners import get_method_name
from gstep.pruners.base import Pruner
from pipeline.cache.cached_video import CachedVideo
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.errors import (
    CorruptShard,
    FailedVideo,
    MethodFails,
    OwnCodeError,
    QuestionFault,
    RemovedVideo,
    UnknownVideo,
)
from pipeline.generate.answer_setup import AnswerSetup, make_length_fault
from pipeline.generate.conversation import load_messages, make_chat
from pipeline.generate.engines import Engine
from pipeline.generate.late_pruning import LatePruning
from pipeline.generate.model import make_prompt_builder
from pipeline.generate.questions import AnswerMode, add_choices, list_letters
from pipeline.own_code import locate_user_error
from pipeline.rows import AnswerRecord, QuestionRecord, make_failed_answer, make_removed_answer
from pipeline.runner.worker_heartbeat import POISON, Heartbeat, exit_after_gpu_fault
from pipeline.runner.worker_reports import describe_crashes

_MAX_VIDEO_BYTES = 2**30  # for videos that a worker keeps in memory for later questions
_MAX_SELECTED_BYTES = 2**29  # for selections, and as much again for selected tokens
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A mapping that keeps the most recently used values, up to ``max_bytes`` as measured by ``size``.

    The newest value stays, even if it is larger.
    """

    def __init__(self, max_bytes: int, size: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        """Return the value of a key and mark it as used, or return None."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: K, value: V) -> V:
        """Store and return a value; drop the least recently used values beyond the limit."""
        if key in self._values:
            self._bytes -= self._size(self._values.pop(key))
        self._values[key] = value
        self._bytes += self._size(value)
        while self._bytes > self._max_bytes and len(self._values) > 1:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= self._size(oldest)
        return value


def count_bytes(visual: Visual) -> int:
    """Return the bytes of a video's tokens, indices, deepstack levels and evidence."""
    tensors = (visual.tokens, visual.index, *visual.deepstack, *visual.evidence.values())
    return sum(tensor.nbytes for tensor in tensors)


class VideoMemory:
    """A reader of cached videos that also prunes them for prompts, and keeps recent results in memory.

    A method that ignores the question selects once per video; if it is nested, at the largest ratio of its prunings,
    because the selections of smaller ratios are prefixes of that one.

    Attributes:
        read_s: the total seconds spent reading videos from the cache.
    """

    def __init__(
        self,
        cache: TokenCache,
        prunings: Iterable[LatePruning] = (),
        *,
        retention_ratio: float | None = None,
        order: TokenOrder = "index",
        own_order: bool = True,
        device: str = "cpu",
        heartbeat: Heartbeat | None = None,
        max_bytes: int = _MAX_VIDEO_BYTES,
    ) -> None:
        """Set up empty memory; nothing is read.

        Args:
            prunings: all prunings that ``prune`` will get; their evidence is read with the tokens.
            retention_ratio: the ratio at which tokens are read; None reads all stored tokens.
            own_order: whether pruned tokens keep the order that a method defines for prompts.
            device: the device on which methods select.
            max_bytes: the bytes of videos in memory; the last video stays even if it is larger.
        """
        rising = sorted(prunings, key=attrgetter("retention_ratio"))
        self._largest: dict[Hashable, LatePruning] = {_make_selection_key(late): late for late in rising}
        self._evidence = tuple(dict.fromkeys(column for late in rising for _, column in late.evidence))
        self._cache = cache
        self._ratio = retention_ratio
        self._order: TokenOrder = order
        self._own_order = own_order
        self._device = device
        self._heartbeat = heartbeat or Heartbeat("answer")
        self.read_s = 0.0
        self._videos: LruCache[str, CachedVideo] = LruCache(max_bytes, lambda video: count_bytes(video.visual))
        self._selections: LruCache[Hashable, PrunedTokens] = LruCache(
            _MAX_SELECTED_BYTES, lambda pruned: int(pruned.tokens.nbytes)
        )
        self._visuals: LruCache[Hashable, Visual] = LruCache(_MAX_SELECTED_BYTES, count_bytes)

    def read(self, video_id: str) -> CachedVideo:
        """Return a video with its stored tokens, from memory or from the cache.

        Raises:
            UnknownVideo: the cache has no tokens of it; FailedVideo or RemovedVideo if it failed or was removed.
            RatioNotCached: the cache cannot serve the ratio.
            EvidenceNotCached: the cache lacks the evidence of a pruning.
            CorruptShard: the shard of the tokens is damaged.
        """
        if (video := self._videos.get(video_id)) is not None:
            return video
        start = time.perf_counter()
        with self._heartbeat.busy(f"the tokens of {video_id}, being read"):
            video = self._cache.get(video_id, self._ratio, self._order, self._evidence)
        self.read_s += time.perf_counter() - start
        return self._videos.put(video_id, video)

    def prune(self, video: CachedVideo, late: LatePruning | None = None, words: Tensor | None = None) -> Visual:
        """Return a video's tokens pruned by ``late``, or unchanged if ``late`` is None or prunes inside the model.

        Args:
            words: the embedding [Q,De] of the question, for a method that needs it.

        Raises:
            OwnCodeError: a user method failed for this video.
            MethodFails: a user method fails for every video.
            ValueError: the method does not accept the tokens, evidence or ratio.
        """
        visual = video.visual
        if late is None or late.inside is not None:
            return visual
        if not late.pruner.cacheable:
            return late.reduce_video(visual, late.select(visual, self._device, words), own_order=self._own_order)
        method = _make_selection_key(late)
        if (pruned_visual := self._visuals.get((video.video_id, method, late.retention_ratio))) is not None:
            return pruned_visual
        if (pruned := self._selections.get((video.video_id, method))) is None:
            pruned = self._largest.get(method, late).select(visual, self._device)
            self._selections.put((video.video_id, method), pruned)
        if late.pruner.nested:  # smaller ratios are prefixes of one selection
            pruned = pruned.at(late.retention_ratio)
        pruned_visual = late.reduce_video(visual, pruned, own_order=self._own_order)
        return self._visuals.put((video.video_id, method, late.retention_ratio), pruned_visual)


def _make_selection_key(late: LatePruning) -> tuple[str, int, float | None]:
    """Return a key that is equal for prunings that can share one selection of a video."""
    # As JSON, because a user method may have a list as a parameter, which cannot be hashed.
    method = json.dumps([get_method_name(type(late.pruner)), late.pruner.params()], sort_keys=True)
    return method, late.seed, None if late.pruner.nested else late.retention_ratio


class Embedder(Protocol):
    """An object that embeds texts."""

    def embedding(self, text: str) -> Tensor:
        """Return the embedding [Q,De] of a text."""


class TextEmbeddings:
    """The embeddings of questions for methods that compare them with tokens.

    The embedded text is that of the questions file, without chat template and choices; for a conversation, it is the
    text of the last message.
    """

    def __init__(self, model: Embedder, device: str, prunings: Iterable[LatePruning]) -> None:
        """Load the text towers that the prunings need; prunings without one use ``model``.

        Raises:
            ModelError: a text tower on this node differs from the driver's, or cannot be loaded.
        """
        towers = {late.text_tower for late in prunings if "text_embedding" in late.pruner.needs}
        self._by_tower = {tower: TextTower.load(tower, device) if tower else model for tower in towers}

    def embedding(self, late: LatePruning, text: str) -> Tensor | None:
        """Return the embedding [Q,De] of a text, or None if the method of ``late`` does not need it."""
        if "text_embedding" not in late.pruner.needs:
            return None
        return self._by_tower[late.text_tower].embedding(text)


@dataclass(frozen=True)
class PreparedQuestion:
    """A question with its prompt, and its answer row as far as it is known before answering."""

    row: AnswerRecord
    prompt: Prompt
    mode: AnswerMode
    inside: tuple[Pruner, float] | None = None

    def list_continuations(self) -> list[str]:
        """Return the texts to score: the letters A, B, C and so on, or the choices themselves for "loglikelihood"."""
        choices = self.row["choices"]
        return list_letters(len(choices)) if self.mode.method == "letter" else choices


def make_heartbeat_name(row: QuestionRecord | AnswerRecord) -> str:
    """Return the name of a question and its pruning in heartbeats."""
    pruning = row.get("pruning")
    return f"{row['question_id']} under {pruning}" if pruning else row["question_id"]


def convert_error(question_id: str, error: Exception, pruner: Pruner | None = None) -> QuestionFault:
    """Convert an unforeseen error to the fault of a question; end this process if the error broke the GPU.

    Errors of user code (with ``pruner``, a method inside the model) become "own-code", running out of memory
    "out-of-memory", and all others "internal".

    Raises:
        MethodFails: ``error`` itself, because every other question would fail too.
    """
    if isinstance(error, MethodFails):  # every other question would fail, too
        raise error
    if isinstance(error, OwnCodeError):
        return QuestionFault("own-code", str(error))
    exit_after_gpu_fault(question_id, error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return QuestionFault("out-of-memory", str(error))
    if pruner is not None and (place := locate_user_error(error, type(pruner))) is not None:
        return QuestionFault("own-code", f"{place}: {type(error).__name__}: {error}, in the method {pruner.name}")
    return QuestionFault("internal", f"{type(error).__name__}: {error}")


class PromptMaker:
    """The maker of prompts from questions and cached videos, for one engine."""

    def __init__(self, setup: AnswerSetup, engine: Engine, device: str, heartbeat: Heartbeat) -> None:
        """Open the cache, and load the text towers that prunings need; no video is read yet.

        Raises:
            ModelError: a text tower cannot be loaded, or the model lacks a tokenizer or chat template.
        """
        self._heartbeat = heartbeat
        self._prunings = setup.prunings
        self._max_tokens = engine.context_length
        self._read_ratio = setup.read_ratio
        lates = [late for late in setup.prunings.values() if late is not None]
        self._builders = {
            positions: make_prompt_builder(setup.source, setup.config, positions)
            for positions in {None, *(late.positions for late in lates)}
        }
        self.videos = VideoMemory(
            TokenCache(str(setup.cache), store=setup.cache, live=setup.live),
            lates,
            retention_ratio=setup.read_ratio,
            order=setup.order,
            own_order=setup.own_order,
            device=device,
            heartbeat=heartbeat,
        )
        self._embeddings = TextEmbeddings(engine, device, lates)

    def inside(self, question: QuestionRecord) -> tuple[Pruner, float] | None:
        """Return (method, share) if the question's pruning runs inside the language model, otherwise None."""
        late = self._prunings[question.get("pruning", "")]
        return None if late is None else late.inside

    def make(self, question: QuestionRecord, mode: AnswerMode) -> PreparedQuestion | AnswerRecord:
        """Return the question with its prompt, or its error row if no prompt can be made.

        A video that was removed since the run began gives a removed row. A question that was in hand at POISON (2)
        crashes gets an error row without another try. Any other Exception becomes an error row too, for example OSError
        "io" and ValueError "bad-prompt", but one that broke the GPU ends this process with exit code 70.

        Raises:
            MethodFails: a user method fails for every video.
        """
        name = make_heartbeat_name(question)
        try:
            with self._heartbeat.busy(name):
                if len(crashes := self._heartbeat.find_crashes(name)) >= POISON:
                    raise QuestionFault("crash", describe_crashes("model's process", "question", crashes))
                return self._build_prompt(question, mode)
        except QuestionFault as error:
            fault = error
        except FailedVideo as error:
            fault = QuestionFault("failed-video", str(error))
        except RemovedVideo as error:  # removed since the run began
            return make_removed_answer(question, str(error))
        except UnknownVideo as error:
            fault = QuestionFault("unknown-video", str(error))
        except CorruptShard as error:
            fault = QuestionFault("corrupt", str(error))
        except OSError as error:
            fault = QuestionFault("io", f"{error.filename or ''} {error.strerror or error}")
        except ValueError as error:  # the prompt builder does not accept a text or a video's tokens
            fault = QuestionFault("bad-prompt", str(error))
        except Exception as error:  # noqa: BLE001 - an error of one question must not fail its neighbors
            fault = convert_error(question["question_id"], error)
        return make_failed_answer(question, fault)

    def _build_prompt(self, question: QuestionRecord, mode: AnswerMode) -> PreparedQuestion | AnswerRecord:
        """Read and prune the question's videos, and build its prompt; return an error row if that is too long."""
        late = self._prunings[question.get("pruning", "")]
        words = None if late is None else self._embeddings.embedding(late, question["prompt"])
        videos = []
        visuals = []
        read_s = self.videos.read_s
        for video_id in question["video_ids"]:
            videos.append(self.videos.read(video_id))
            visuals.append(self.videos.prune(videos[-1], late, words))
        ratio = late.retention_ratio if late else self._read_ratio
        shows_choices = (
            "choices" in question and mode.method != "loglikelihood"
        )  # otherwise the texts of choices are scored
        ending = add_choices("", question["choices"]) if shows_choices else ""
        builder = self._builders[None if late is None else late.positions]
        if "conversation" in question:
            messages = load_messages(question["conversation"])
            prompt = builder.build_chat(make_chat(messages, mode.system, ending), visuals)
        else:
            prompt = builder.build(question["prompt"] + ending, visuals, mode.system)
        row: AnswerRecord = {
            **cast(AnswerRecord, question),
            "n_prompt_tokens": len(prompt),
            "n_visual_tokens": builder.n_visual(visuals),
            "n_total": sum(visual.n_frames * visual.tokens_per_frame for visual in visuals),
            "retention_ratio": ratio or min(video.metadata["retention_ratio"] for video in videos),
            "decode_warnings": sum(video.metadata["decode_warnings"] or 0 for video in videos),
            "load_s": self.videos.read_s - read_s,
        }
        if late is None or late.inside is None:
            row["n_kept"] = sum(len(visual.index) for visual in visuals)
            row["kept_per_frame"] = [
                count
                for visual in visuals
                for count in torch.bincount(visual.index // visual.tokens_per_frame, minlength=visual.n_frames).tolist()
            ]
        else:  # the model selects among the tokens of all videos
            row["n_kept"] = late.count_kept_inside(row["n_total"])
        prepared = PreparedQuestion(row, prompt, mode, self.inside(question))
        if mode.scores_choices:
            n_answer = max(len(tokenize_text(builder.tokenizer, text)) for text in prepared.list_continuations())
        else:
            n_answer = mode.decoding.max_new_tokens
        fault = self._find_size_fault(prompt, n_answer, builder.context_length)
        return prepared if fault is None else make_failed_answer(row, fault)

    def _find_size_fault(self, prompt: Prompt, n_answer: int, context_length: int) -> QuestionFault | None:
        """Return the fault of a prompt that does not fit together with an answer of ``n_answer`` tokens, or None.

        A prompt does not fit if its tokens exceed the engine's memory or the context, or its positions exceed the
        context.
        """
        max_tokens = min(context_length, self._max_tokens)
        if len(prompt) + n_answer > max_tokens:
            return make_length_fault(len(prompt), max_tokens, context_length)
        if prompt.extent + n_answer > context_length:  # the tokens fit, but not their positions before pruning
            return QuestionFault(
                "prompt-too-long",
                f"the positions of a prompt and its answer reach {prompt.extent}, and the model knows "
                f"{context_length}: use --positions contiguous (with another --out), or ask about fewer videos",
            )
        return None
