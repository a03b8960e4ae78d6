"""The GPU actor that answers: questions in, rows of answers out. One question's fault becomes its error row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
import torch
from torch import Tensor

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import LanguageModel, Prompt, Visual, load_language_model, prompt_builder
from gstep.pruners.base import Pruner
from pipeline.cache.reader import TokenCache, TokenOrder
from pipeline.errors import CorruptShard, FailedVideo, QuestionFault, UnknownVideo
from pipeline.execution.gpu_fault import exit_after_gpu_fault
from pipeline.execution.heartbeat import POISON, Heartbeat
from pipeline.generate.answers import ANSWER_SCHEMA
from pipeline.generate.choices import lettered_prompt, letters, parse_letter
from pipeline.generate.held_videos import ChosenVideos, HeldVideos
from pipeline.generate.late_pruning import LatePruning, embedder_of
from pipeline.generate.questions import QUESTION_SCHEMA, Instructions
from pipeline.rows import AnswerRecord, QuestionRecord, failed_answer, without_nulls
from pipeline.storage.stores import Store

STAGE = "answer"
GROW_AFTER = 16  # batches after one that did not fit
# A block of questions is one row, which Ray can neither split nor join with another.
TO_ASK = pa.schema([*QUESTION_SCHEMA, pa.field("pruning", pa.string()), pa.field("attempts", pa.int32())])
ASKED = pa.schema([pa.field("questions", pa.list_(pa.struct(list(TO_ASK))))])
# ``runtime``: JSON of what computed an answer.
ANSWERED = pa.schema([*(field.with_nullable(True) for field in ANSWER_SCHEMA), pa.field("runtime", pa.string())])


def question_blocks(blocks: Iterable[Sequence[QuestionRecord]]) -> list[pa.Table]:
    """What the actor takes: ASKED, a row a block."""
    return [pa.Table.from_pylist([{"questions": list(block)}], schema=ASKED) for block in blocks]


@dataclass(frozen=True)
class AnswerSetup:
    """What an actor needs to know; it travels to every one.

    Attributes:
        live: the live rows of the videos that are asked about, so that no actor reads the whole index.
        retention_ratio: None reads all that is stored.
        prunings: what the tokens are pruned by before they go into a prompt, by the names that questions use (their
            ``pruning``); None leaves them as they are stored. Questions that name nothing have "".
        order: in which tokens are read from the cache.
        own_order: whether a method's own order in a prompt is kept of what is pruned here.
        positions: None is the family's default.
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
    batch_size: int = 8
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"


@dataclass(frozen=True)
class Asked:
    """A question that is ready for the model, its row as far as that is known.

    Attributes:
        inside: a method that prunes inside the model, and the share that it keeps.
    """

    row: AnswerRecord
    prompt: Prompt
    how: Instructions
    inside: tuple[Pruner, float] | None = None

    def continuations(self) -> list[str]:
        """What is scored."""
        choices = self.row["choices"]
        return letters(len(choices)) if self.how.method == "letter" else choices


class BatchSize:
    """How many questions go at once: as many as fitted where some did not, and more again after a while."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._calm = 0
        self.now = largest

    def ended(self, fitted: int, short: bool) -> None:
        """A batch ended; ``short``: memory ran out, and ``fitted`` is the largest part of it that fitted."""
        if short:
            self.now, self._calm = max(1, fitted), 0
            return
        self._calm += 1
        if self._calm >= GROW_AFTER:
            self.now, self._calm = min(self._largest, 2 * self.now), 0


class Embedders:
    """What embeds questions for the methods that ask for it, each loaded once."""

    def __init__(self, model: LanguageModel, device: str, lates: Sequence[LatePruning]) -> None:
        towers = dict.fromkeys(late.text_tower for late in lates if "text_embedding" in late.pruner.needs)
        self._by_tower = {tower: embedder_of(tower, model, device) for tower in towers}

    def embedding(self, late: LatePruning, text: str) -> Tensor | None:
        """[Q,De] for a method that asks for one."""
        if "text_embedding" not in late.pruner.needs:
            return None
        return self._by_tower[late.text_tower].embedding(text)


class Answerer:
    """Holds one language model; never a vision tower."""

    def __init__(self, setup: AnswerSetup, heartbeats: Any = None) -> None:
        self._heartbeat = Heartbeat(STAGE, heartbeats)
        self._heartbeat.start()
        self._runtime = choose_runtime(setup.device, setup.dtype, setup.attn)
        self._builder = prompt_builder(setup.source, setup.positions, setup.rule)
        self._prunings = setup.prunings
        lates = [late for late in setup.prunings.values() if late is not None]
        cache = TokenCache(str(setup.store), store=setup.store, live=setup.live)
        columns = dict.fromkeys(column for late in lates for _, column in late.evidence)
        videos = HeldVideos(
            cache, setup.retention_ratio, setup.order, heartbeat=self._heartbeat, evidence=tuple(columns)
        )
        self._videos = ChosenVideos(videos, lates, self._runtime.device, own_order=setup.own_order)
        self._size = BatchSize(setup.batch_size)
        with self._heartbeat.busy("the model, being loaded"):
            self._model: LanguageModel = load_language_model(setup.source, self._runtime)
            self._embedders = Embedders(self._model, self._runtime.device, lates)
        self._provenance = json.dumps({**self._runtime.describe(), "model_bytes": self._model.n_bytes})

    def __call__(self, batch: pa.Table) -> pa.Table:
        rows = [row for block in batch["questions"].to_pylist() for row in block]
        answers = self.answer([without_nulls(row, QuestionRecord) for row in rows])
        return pa.Table.from_pylist([{**answer, "runtime": self._provenance} for answer in answers], schema=ANSWERED)

    def answer(self, questions: Sequence[QuestionRecord]) -> Iterator[AnswerRecord]:
        """A row for each question. Those that are scored, those that are generated, and those for which the model
        prunes inside itself make batches of their own."""
        understood = [(question, Instructions.parse(question["decoding"])) for question in questions]
        kinds = [(how.scored, self._inside(question)) for question, how in understood]
        for kind in sorted(dict.fromkeys(kinds), key=lambda kind: kind[0]):
            waiting: list[Asked] = []
            for (question, how), other in zip(understood, kinds, strict=True):
                if other != kind:
                    continue
                asked = self._ask(question, how)
                if isinstance(asked, Asked):
                    waiting.append(asked)
                else:
                    yield asked
                if len(waiting) >= self._size.now:
                    yield from self._answer_held(waiting)
                    waiting = []
            if waiting:
                yield from self._answer_held(waiting)

    def _pruning(self, question: QuestionRecord) -> LatePruning | None:
        return self._prunings[question.get("pruning", "")]

    def _inside(self, question: QuestionRecord) -> tuple[Pruner, float] | None:
        late = self._pruning(question)
        return None if late is None else late.inside

    def _ask(self, question: QuestionRecord, how: Instructions) -> Asked | AnswerRecord:
        """The question with its prompt, or its error row."""
        hosts = self._heartbeat.deaths(_named(question))
        try:
            if len(hosts) >= POISON:
                raise _poison(hosts)
            with self._heartbeat.busy(_named(question)):
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
        except (torch.OutOfMemoryError, MemoryError) as error:  # a method that looks at the question works here
            fault = QuestionFault("out-of-memory", str(error))
        except ValueError as error:  # what a prompt builder says of a text or of a video's tokens
            fault = QuestionFault("bad-prompt", str(error))
        except Exception as error:  # noqa: BLE001 - whatever one question provokes must not cost its neighbours
            exit_after_gpu_fault(question["question_id"], error)  # a method that looks at the question runs on the GPU
            fault = QuestionFault("internal", f"{type(error).__name__}: {error}")
        return failed_answer(question, fault)

    def _prepare(self, question: QuestionRecord, how: Instructions) -> Asked | AnswerRecord:
        late = self._pruning(question)
        words = None if late is None else self._embedders.embedding(late, question["prompt"])
        held = [self._videos.get(video_id, late, words) for video_id in question["video_ids"]]
        visuals = [video.visual for video in held]
        prompt = self._builder.build(_text(question, how), visuals, how.system)
        row: AnswerRecord = {
            **cast(AnswerRecord, question),
            "n_prompt_tokens": len(prompt),
            "n_visual_tokens": self._builder.n_visual(visuals),
            "n_total": sum(visual.n_frames * visual.tokens_per_frame for visual in visuals),
            "retention_ratio": late.retention_ratio if late else min(video.retention_ratio for video in held),
            "load_s": sum(video.seconds for video in held),
        }
        if late is None or late.inside is None:
            row["n_kept"] = sum(len(visual.index) for visual in visuals)
            row["kept_per_frame"] = [count for visual in visuals for count in kept_per_frame(visual)]
        else:  # the model chooses among the tokens of all videos
            row["n_kept"] = late.kept_inside(row["n_total"])
        context, more = self._builder.context_length, 1 if how.scored else how.decoding.max_new_tokens
        if len(prompt) + more > context:
            return failed_answer(row, too_long(len(prompt), context))
        if prompt.extent + more > context:
            return failed_answer(row, too_far(prompt.extent, context))
        return Asked(row, prompt, how, self._inside(question))

    def _answer_held(self, batch: list[Asked]) -> list[AnswerRecord]:
        """Answers of a batch. Those that were in hand when a process died go one by one, to know which it was."""
        died = [bool(self._heartbeat.deaths(_named(asked.row))) for asked in batch]
        calm = [asked for asked, suspect in zip(batch, died, strict=True) if not suspect]
        alone = [[asked] for asked, suspect in zip(batch, died, strict=True) if suspect]
        return [row for part in [*([calm] if calm else []), *alone] for row in self._answer_together(part)]

    def _answer_together(self, batch: list[Asked]) -> list[AnswerRecord]:
        with self._heartbeat.holding(*(_named(asked.row) for asked in batch)):
            self._short, self._fitted = False, 0
            rows = self._answer_batch(batch)
            self._size.ended(self._fitted, self._short)
            return rows

    def _answer_batch(self, batch: list[Asked]) -> list[AnswerRecord]:
        """The error boundary of this stage: a batch that fails is tried again in parts, down to one question."""
        try:
            started = time.perf_counter()
            rows = self._score(batch, started) if batch[0].how.scored else self._generate(batch)
            self._fitted = max(self._fitted, len(batch))
            return rows
        except (torch.OutOfMemoryError, MemoryError) as error:
            fault = QuestionFault("out-of-memory", str(error))
            self._short = True
        except Exception as error:  # noqa: BLE001 - as above
            exit_after_gpu_fault(batch[0].row["question_id"], error)
            fault = QuestionFault("internal", f"{type(error).__name__}: {error}")
        # Outside of the handlers, whose exception would keep the failed batch's tensors alive.
        if fault.fault_class == "out-of-memory" and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(batch) == 1:
            return [failed_answer(batch[0].row, fault)]
        if fault.fault_class == "internal":
            return [row for asked in batch for row in self._answer_batch([asked])]
        half = len(batch) // 2
        return [row for part in (batch[:half], batch[half:]) for row in self._answer_batch(part)]

    def _generate(self, batch: list[Asked]) -> list[AnswerRecord]:
        decodings = [asked.how.decoding for asked in batch]
        answers = self._model.generate([asked.prompt for asked in batch], decodings, inside=batch[0].inside)
        rows = []
        for asked, answer in zip(batch, answers, strict=True):
            row: AnswerRecord = {
                **asked.row,
                "status": "ok",
                "batch_size": len(batch),
                "answer": answer.text,
                "finish": answer.finish,
                "n_new_tokens": len(answer.token_ids),
                "prefill_s": answer.prefill_s,
                "decode_s": answer.decode_s,
            }
            choice = parse_letter(answer.text, asked.row["choices"]) if "choices" in asked.row else None
            if choice is not None:
                row["choice"] = choice
            rows.append(row)
        return rows

    def _score(self, batch: list[Asked], started: float) -> list[AnswerRecord]:
        texts = [asked.continuations() for asked in batch]
        all_scores = self._model.score([asked.prompt for asked in batch], texts, inside=batch[0].inside)
        seconds = time.perf_counter() - started
        rows = []
        for asked, names, scores in zip(batch, texts, all_scores, strict=True):
            sums = [score.logprob for score in scores]
            row: AnswerRecord = {
                **asked.row,
                "status": "ok",
                "batch_size": len(batch),
                "answer": names[_largest(sums)],
                "choice": _largest(sums),
                "choice_scores": sums,
                "choice_tokens": [score.n_tokens for score in scores],
                "prefill_s": seconds,
                "decode_s": 0.0,
            }
            if asked.how.method == "loglikelihood":
                row["choice_normalised"] = _largest([score.logprob / score.n_tokens for score in scores])
            rows.append(row)
        return rows


def _named(row: QuestionRecord | AnswerRecord) -> str:
    """What no two questions of a run share, as heartbeats name it."""
    pruning = row.get("pruning")
    return f"{row['question_id']} under {pruning}" if pruning else row["question_id"]


def _poison(hosts: Sequence[str]) -> QuestionFault:
    where = ", ".join(dict.fromkeys(hosts))
    message = f"the model's process died {len(hosts)} times with this question in hand, on {where}; Ray's logs say how"
    return QuestionFault("crash", message)


def kept_per_frame(visual: Visual) -> list[int]:
    """How many of a video's tokens are of each frame, [T]."""
    counts: list[int] = torch.bincount(visual.index // visual.tokens_per_frame, minlength=visual.n_frames).tolist()
    return counts


def too_long(n_tokens: int, context_length: int) -> QuestionFault:
    """The fault of a prompt that does not fit, with the remedy."""
    return QuestionFault(
        "prompt-too-long",
        f"a prompt of {n_tokens} tokens and its answer do not fit the model's {context_length}: lower "
        "--retention-ratio or --max-new-tokens, or ask about fewer videos",
    )


def too_far(extent: int, context_length: int) -> QuestionFault:
    """The fault of a prompt whose tokens fit, but not the positions that they had before pruning."""
    return QuestionFault(
        "prompt-too-long",
        f"the positions of a prompt and its answer reach {extent}, and the model knows {context_length}: use "
        "--positions contiguous (with another --out), or ask about fewer videos",
    )


def _text(question: QuestionRecord, how: Instructions) -> str:
    """The question as the user message says it: with lettered choices, unless their texts are what is scored."""
    if "choices" not in question or how.method == "loglikelihood":
        return question["prompt"]
    return lettered_prompt(question["prompt"], question["choices"])


def _largest(values: Sequence[float]) -> int:
    """Index of the largest value, the first of equals."""
    return values.index(max(values))
