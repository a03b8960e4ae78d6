"""The setup of a run that answers questions, which every worker gets, and the driver's forecast of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import pyarrow as pa
from rich.console import Console

from gstep.backbones import ModelSource
from gstep.language import PromptBuilder
from pipeline.cache.live import INDEX_COLUMNS
from pipeline.cache.reader import TokenOrder, count_tokens
from pipeline.errors import QuestionFault, UsageError, convert_usage_errors
from pipeline.generate.config import GenerateConfig
from pipeline.generate.engines import choose_batch_size
from pipeline.generate.late_pruning import LatePruning
from pipeline.rows import AnswerRecord, QuestionRecord, VideoRecord, drop_nulls, make_failed_answer, make_removed_answer
from pipeline.storage.stores import Store

# Columns to read from the videos table, including those that TokenCache needs.
LIVE_COLUMNS = (
    *INDEX_COLUMNS,
    *("error_message", "n_tokens", "n_total", "n_frames", "tokens_per_frame", "hidden_size"),
    *("retention_ratio", "nested"),
)


@dataclass(frozen=True)
class AnswerSetup:
    """Everything that a worker needs to answer questions; it can be pickled.

    Attributes:
        live: the live rows of the questions' videos (LIVE_COLUMNS), so that no worker reads the whole table.
        prunings: name (the ``pruning`` of questions) -> pruning of the cached tokens, None for the stored tokens. Every
            question is asked under each. A single pruning has the name "".
        order: the order in which stored tokens are read.
        largest_video: the maximum number of visual tokens of a video in a prompt.
        device, dtype: of the model; "auto" until the driver chooses them.
    """

    config: GenerateConfig
    source: ModelSource
    cache: Store
    live: pa.Table
    prunings: Mapping[str, LatePruning | None] = field(default_factory=lambda: {"": None})
    order: TokenOrder = "index"
    largest_video: int = 0
    device: str = "auto"
    dtype: str = "auto"

    @property
    def batch_size(self) -> int:
        """The maximum number of questions that the model gets at once."""
        return choose_batch_size(self.config)

    @property
    def own_order(self) -> bool:
        """True if prompts keep the order of tokens that a method defines."""
        return self.config.order != "index"

    @property
    def read_ratio(self) -> float | None:
        """The retention ratio to read; None, for all stored tokens, if the run prunes or has several prunings."""
        return self.config.retention_ratio if self.prunings.get("", ...) is None else None


class PromptForecast:
    """A forecast for questions, made from the videos' rows before any token is read.

    Attributes:
        videos: the live rows of the questions' videos, by id.
        removed: the reason for each video that was removed from the cache or from the answers.
    """

    def __init__(
        self,
        setup: AnswerSetup,
        builder: PromptBuilder,
        near: Mapping[str, str] | None = None,
        barred: Mapping[str, str] | None = None,
    ) -> None:
        """Index the rows of ``setup.live``.

        Args:
            near: id without a row -> a text that suggests similar ids, for messages.
            barred: id of a video that was removed from the answers -> the reason.
        """
        self._setup = setup
        self._builder = builder
        self._near = near or {}
        self.videos = {row["video_id"]: drop_nulls(row, VideoRecord) for row in setup.live.to_pylist()}
        self.removed = {
            video_id: f"{video_id!r} was removed from the cache {setup.cache}: {row.get('error_message', '')}"
            for video_id, row in self.videos.items()
            if row["status"] == "removed"
        } | {video_id: f"{video_id!r} was removed from the answers: {why}" for video_id, why in (barred or {}).items()}

    @cached_property
    def cached(self) -> dict[str, VideoRecord]:
        """The rows of the videos that have tokens, by id."""
        return {video_id: row for video_id, row in self.videos.items() if row["status"] == "ok"}

    def n_visual(self, videos: Sequence[VideoRecord], pruning: str = "") -> int:
        """Compute the maximum number of visual tokens, newlines included, that a prompt about these videos has.

        ``pruning`` is a name in ``setup.prunings``.
        """
        late = self._setup.prunings[pruning]
        builder = self._builder
        if late is not None:
            n_kept = sum(
                late.max_tokens(row["n_frames"], row["tokens_per_frame"], builder.hidden_size) for row in videos
            )
        else:
            n_kept = sum(count_tokens(row, self._setup.read_ratio) for row in videos)
        return n_kept + (len(videos) if builder.needs_newline else 0)

    def largest_video(self) -> int:
        """Compute the maximum number of visual tokens of a video in a prompt, under any pruning; 0 without videos."""
        sizes = (self.n_visual([row], name) for row in self.cached.values() for name in self._setup.prunings)
        return max(sizes, default=0)

    def check_ratio(self, stored_ratio: float) -> None:
        """Raise UsageError if the cache cannot serve the ratio that is read.

        The ratio must not exceed ``stored_ratio``; a smaller one needs a nested method. Nothing is checked if all
        stored tokens are read.
        """
        ratio = self._setup.read_ratio
        if ratio is None:
            return
        if ratio > stored_ratio + 1e-9:
            raise UsageError(
                f"--retention-ratio {ratio}: the cache stores {stored_ratio}; prune into another --out for more"
            )
        with convert_usage_errors():
            for row in self.cached.values():
                count_tokens(row, ratio)

    def check_context(self, questions: pa.Table, console: Console) -> None:
        """Print a note if visual tokens alone make some prompts too long; raise UsageError if they do for all prompts.

        A prompt is a question under one pruning. Questions with a video that has no tokens are left out.
        """
        sizes = [
            self.n_visual([self.cached[video_id] for video_id in video_ids], pruning)
            for video_ids in questions["video_ids"].to_pylist()
            if all(video_id in self.cached for video_id in video_ids)
            for pruning in self._setup.prunings
        ]
        context = self._builder.context_length
        too_large = [size for size in sizes if size > context]
        if not too_large:
            return
        text = (
            f"{len(too_large)} of {len(sizes)} prompts have up to {max(too_large)} visual tokens, and the model takes "
            f"{context}"
        )
        if len(too_large) == len(sizes):
            raise UsageError(f"{text} tokens with the answer: lower --retention-ratio")
        console.print(f"note: {text}: they become rows of class prompt-too-long", highlight=False, markup=False)

    def split(self, questions: Sequence[QuestionRecord]) -> tuple[list[QuestionRecord], list[AnswerRecord]]:
        """Split questions into those for the model and, as finished rows, those that need none (failed or removed)."""
        for_model: list[QuestionRecord] = []
        rows: list[AnswerRecord] = []
        for question in questions:
            row = self._make_settled_row(question)
            if row is None:
                for_model.append(question)
            else:
                rows.append(row)
        return for_model, rows

    def _make_settled_row(self, question: QuestionRecord) -> AnswerRecord | None:
        """Return the finished row of a question that needs no model, or None if the model must answer it.

        A question about a removed video gets a removed row, whatever its other videos. Otherwise it fails if a video is
        not in the cache or failed there (the first of them is named), or if its visual tokens alone exceed the model's
        context.
        """
        cache = self._setup.cache
        rows = []
        for video_id in question["video_ids"]:
            if video_id in self.removed:
                return make_removed_answer(question, self.removed[video_id])
        for video_id in question["video_ids"]:
            row = self.videos.get(video_id)
            if row is None:
                message = f"{video_id!r} is not in the cache {cache}"
                if near := self._near.get(video_id):
                    message += f"{near} Correct the question, or prune the video; then --retry-failed"
                else:
                    message += ": prune it, then --retry-failed"
                return make_failed_answer(question, QuestionFault("unknown-video", message))
            if row["status"] != "ok":
                message = f"{video_id!r} failed: {row['error_class']}: {row['error_message']}"
                return make_failed_answer(question, QuestionFault("failed-video", message))
            rows.append(row)
        n_visual = self.n_visual(rows, question.get("pruning", ""))
        context = self._builder.context_length
        if n_visual <= context:
            return None
        row_with_count: AnswerRecord = {**cast(AnswerRecord, question), "n_visual_tokens": n_visual}
        return make_failed_answer(row_with_count, make_length_fault(n_visual, context))


def make_length_fault(n_tokens: int, max_tokens: int, context_length: int | None = None) -> QuestionFault:
    """Create the fault of a prompt whose ``n_tokens`` and answer exceed ``max_tokens``.

    Args:
        context_length: the context of the model, if ``max_tokens`` may be the smaller limit of the engine's memory.
    """
    limit = (
        f"the model's {max_tokens}"
        if context_length is None or max_tokens == context_length
        else f"the {max_tokens} that the engine has memory for"
    )
    return QuestionFault(
        "prompt-too-long",
        f"a prompt of {n_tokens} tokens and its answer do not fit {limit}: lower --retention-ratio or "
        "--max-new-tokens, or ask about fewer videos",
    )
