"""A question -> its prompt of cached tokens, ready for a model; or the row that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import pyarrow as pa
import torch
from torch import Tensor

from gstep.backbones import ModelSource, TextTower
from gstep.errors import is_out_of_memory
from gstep.language import Prompt, Visual, prompt_builder
from gstep.pruners.base import Pruner
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.errors import CorruptShard, FailedVideo, QuestionFault, UnknownVideo
from pipeline.generate.choices import lettered_prompt, letters
from pipeline.generate.engines import BATCH_SIZES, TRANSFORMERS, Engine, EngineSetup
from pipeline.generate.held_videos import ChosenVideos, HeldVideos
from pipeline.generate.late_pruning import LatePruning
from pipeline.generate.questions import Way
from pipeline.rows import AnswerRecord, QuestionRecord, failed_answer
from pipeline.runner.heartbeat import POISON, Heartbeat, exit_after_gpu_fault
from pipeline.storage.stores import Store


@dataclass(frozen=True)
class AnswerSetup:
    """The settings of an answering actor, which travel to every one.

    Attributes:
        live: the live rows of the videos that are asked about, so that no actor reads the whole index.
        retention_ratio: None reads all that is stored.
        prunings: what the tokens are pruned by before they go into a prompt, by the names that questions use (their
            ``pruning``); None leaves them as they are stored. Questions that name nothing have "".
        order: in which tokens are read from the cache.
        own_order: whether a method's own order in a prompt is kept of what is pruned here.
        positions: None is the family's default.
        rule, frame_times: as of prompt_builder.
        batch_size: questions that the model is given at once.
        device, dtype, attn: as of choose_runtime.
    """

    source: ModelSource
    store: Store
    live: pa.Table
    retention_ratio: float | None = None
    prunings: Mapping[str, LatePruning | None] = field(default_factory=lambda: {"": None})
    order: TokenOrder = "index"
    own_order: bool = True
    positions: str | None = None
    rule: str = "transformers-5"
    frame_times: str = "true"
    engine: EngineSetup = field(default_factory=EngineSetup)
    batch_size: int = BATCH_SIZES[TRANSFORMERS]
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"


@dataclass(frozen=True)
class PreparedQuestion:
    """A question with its prompt, and its answer row as far as that is known.

    Attributes:
        inside: a method that prunes inside the model, and the share that it keeps.
    """

    row: AnswerRecord
    prompt: Prompt
    how: Way
    inside: tuple[Pruner, float] | None = None

    def continuations(self) -> list[str]:
        """Return the texts whose log-probabilities are compared: letters, or the choices themselves."""
        choices = self.row["choices"]
        return letters(len(choices)) if self.how.method == "letter" else choices


class Embedder(Protocol):
    """An object that embeds texts: a language model or a SigLIP text tower."""

    def embedding(self, text: str) -> Tensor:
        """Return the embedding [Q,De] of a text."""


class Embedders:
    """The embedders of question texts that the prunings ask for: the language ``model``, or a tower, loaded once.

    The text to embed is that of the questions file, as in CDPruner's official code: without chat template, and
    without the choices that stand in a column of their own. One without a token is a ValueError.
    Raises ModelError where this node has another text tower than the driver.
    """

    def __init__(self, model: Embedder, device: str, lates: Sequence[LatePruning]) -> None:
        towers = {late.text_tower for late in lates if "text_embedding" in late.pruner.needs}
        self._by_tower = {tower: TextTower.load(tower, device) if tower else model for tower in towers}

    def embedding(self, late: LatePruning, text: str) -> Tensor | None:
        """Return the embedding [Q,De] of a text for a method that compares it with tokens, and None for others."""
        if "text_embedding" not in late.pruner.needs:
            return None
        return self._by_tower[late.text_tower].embedding(text)


def unforeseen_fault(question_id: str, error: Exception) -> QuestionFault:
    """Return the fault of a question for an error that is none; end this process where the GPU is broken since.

    A method that looks at the question runs on the GPU, as the language model does.
    """
    exit_after_gpu_fault(question_id, error)
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return QuestionFault("out-of-memory", str(error))
    return QuestionFault("internal", f"{type(error).__name__}: {error}")


class Asker:
    """The maker of prompts from questions and cached videos, for one engine."""

    def __init__(self, setup: AnswerSetup, engine: Engine, device: str, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._prunings = setup.prunings
        self._room = engine.context_length
        lates = [late for late in setup.prunings.values() if late is not None]
        self._builders = {
            positions: prompt_builder(setup.source, positions or setup.positions, setup.rule, setup.frame_times)
            for positions in {None, *(late.positions for late in lates)}
        }
        cache = TokenCache(str(setup.store), store=setup.store, live=setup.live)
        columns = dict.fromkeys(column for late in lates for _, column in late.evidence)
        videos = HeldVideos(
            cache,
            setup.retention_ratio,
            setup.order,
            heartbeat=heartbeat,
            evidence=tuple(columns),
        )
        self._videos = ChosenVideos(videos, lates, device, own_order=setup.own_order)
        self._embedders = Embedders(engine, device, lates)

    def inside(self, question: QuestionRecord) -> tuple[Pruner, float] | None:
        """Return the method and share by which the LLM prunes inside itself for a question, or None."""
        late = self._pruning(question)
        return None if late is None else late.inside

    def _pruning(self, question: QuestionRecord) -> LatePruning | None:
        """Return the pruning that a question is asked under, or None."""
        return self._prunings[question.get("pruning", "")]

    def ask(self, question: QuestionRecord, how: Way) -> PreparedQuestion | AnswerRecord:
        """Return the question with its prompt, or its error row if the prompt cannot be made."""
        try:
            with self._heartbeat.busy(heartbeat_name(question)):
                if len(hosts := self._heartbeat.deaths(heartbeat_name(question))) >= POISON:
                    raise _poison(hosts)
                return self._prepare(question, how)
        except QuestionFault as error:
            fault = error
        except FailedVideo as error:
            fault = QuestionFault("failed-video", str(error))
        except UnknownVideo as error:
            fault = QuestionFault("unknown-video", str(error))
        except CorruptShard as error:
            fault = QuestionFault("corrupt", str(error))
        except OSError as error:
            fault = QuestionFault("io", f"{error.filename or ''} {error.strerror or error}")
        except ValueError as error:  # what a prompt builder says of a text or of a video's tokens
            fault = QuestionFault("bad-prompt", str(error))
        except Exception as error:  # noqa: BLE001 - whatever one question provokes must not cost its neighbours
            fault = unforeseen_fault(question["question_id"], error)
        return failed_answer(question, fault)

    def _prepare(self, question: QuestionRecord, how: Way) -> PreparedQuestion | AnswerRecord:
        """Read the question's videos, prune them as asked, and build the prompt."""
        late = self._pruning(question)
        words = None if late is None else self._embedders.embedding(late, question["prompt"])
        held = [self._videos.get(video_id, late, words) for video_id in question["video_ids"]]
        visuals = [video.visual for video in held]
        builder = self._builders[None if late is None else late.positions]
        prompt = builder.build(_text(question, how), visuals, how.system)
        row: AnswerRecord = {
            **cast(AnswerRecord, question),
            "n_prompt_tokens": len(prompt),
            "n_visual_tokens": builder.n_visual(visuals),
            "n_total": sum(visual.n_frames * visual.tokens_per_frame for visual in visuals),
            "retention_ratio": late.retention_ratio if late else min(video.retention_ratio for video in held),
            "decode_warnings": sum(video.decode_warnings for video in held),
            "load_s": sum(video.seconds for video in held),
        }
        if late is None or late.inside is None:
            row["n_kept"] = sum(len(visual.index) for visual in visuals)
            row["kept_per_frame"] = [count for visual in visuals for count in kept_per_frame(visual)]
        else:  # the model chooses among the tokens of all videos
            row["n_kept"] = late.kept_inside(row["n_total"])
        known, more = builder.context_length, 1 if how.scored else how.decoding.max_new_tokens
        room = min(known, self._room)
        if len(prompt) + more > room:
            return failed_answer(row, too_long(len(prompt), room, known))
        if prompt.extent + more > known:
            return failed_answer(row, too_far(prompt.extent, known))
        return PreparedQuestion(row, prompt, how, self.inside(question))


def heartbeat_name(row: QuestionRecord | AnswerRecord) -> str:
    """Return the name under which heartbeats know a question and its pruning, unique in a run."""
    pruning = row.get("pruning")
    return f"{row['question_id']} under {pruning}" if pruning else row["question_id"]


def _poison(hosts: Sequence[str]) -> QuestionFault:
    """Return the fault of a question that was in hand whenever the model's process died."""
    where = ", ".join(dict.fromkeys(hosts))
    message = f"the model's process died {len(hosts)} times with this question in hand, on {where}; Ray's logs say how"
    return QuestionFault("crash", message)


def kept_per_frame(visual: Visual) -> list[int]:
    """Count a video's kept tokens by frame, [T]."""
    counts: list[int] = torch.bincount(visual.index // visual.tokens_per_frame, minlength=visual.n_frames).tolist()
    return counts


def too_long(n_tokens: int, room: int, known: int | None = None) -> QuestionFault:
    """Return the fault of a prompt that does not fit the context, with the remedy.

    Args:
        room: tokens that the engine has room for, of the model's ``known`` context.
    """
    whose = f"the model's {room}" if known is None or room == known else f"the {room} that the engine has memory for"
    return QuestionFault(
        "prompt-too-long",
        f"a prompt of {n_tokens} tokens and its answer do not fit {whose}: lower --retention-ratio or "
        "--max-new-tokens, or ask about fewer videos",
    )


def too_far(extent: int, context_length: int) -> QuestionFault:
    """Return the fault of a prompt whose tokens fit, but whose positions before pruning do not."""
    return QuestionFault(
        "prompt-too-long",
        f"the positions of a prompt and its answer reach {extent}, and the model knows {context_length}: use "
        "--positions contiguous (with another --out), or ask about fewer videos",
    )


def _text(question: QuestionRecord, how: Way) -> str:
    """Return the user message of a question, with lettered choices unless the choices' texts are scored."""
    if "choices" not in question or how.method == "loglikelihood":
        return question["prompt"]
    return lettered_prompt(question["prompt"], question["choices"])
