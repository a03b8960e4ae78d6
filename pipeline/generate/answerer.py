"""The actor that answers: a block of questions -> prompts -> engine -> rows of answers, or error rows.

Questions travel in blocks of one row each, which Ray can neither split nor join; the questions of a block share videos.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import torch

from gstep.backbones import choose_runtime
from gstep.language.decoding import NO_NUMBERS
from pipeline.generate.answer_setup import AnswerSetup
from pipeline.generate.answers import ANSWER_SCHEMA, make_answer_key
from pipeline.generate.engines import Engine, EngineCrashed, load_engine
from pipeline.generate.prompts import PreparedQuestion, PromptMaker, convert_error, make_heartbeat_name
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, parse_letter
from pipeline.rows import AnswerRecord, QuestionRecord, drop_nulls, make_failed_answer
from pipeline.runner.worker_heartbeat import Heartbeat, give_up_process

STAGE = "answer"
GROW_AFTER = 16  # batches after a failure before a larger one is tried
_RUN_FIELDS = (pa.field("pruning", pa.string()), pa.field("method_code", pa.string()), pa.field("attempts", pa.int32()))
REMAINING_SCHEMA = pa.schema([*QUESTION_SCHEMA, *_RUN_FIELDS])
_BLOCK_SCHEMA = pa.schema([pa.field("questions", pa.list_(pa.struct(list(REMAINING_SCHEMA))))])
# ``runtime``: JSON of the versions and settings that computed an answer.
ANSWERED_SCHEMA = pa.schema([*(field.with_nullable(True) for field in ANSWER_SCHEMA), pa.field("runtime", pa.string())])
# The answers of a part travel as one row, too.
_PART_SCHEMA = pa.schema([pa.field("answers", pa.list_(pa.struct(list(ANSWERED_SCHEMA))))])


def group_by_videos(questions: Sequence[QuestionRecord], size: int) -> list[list[QuestionRecord]]:
    """Group questions into blocks of at most ``size``; questions about the same videos stay together if they fit.

    Blocks are sorted by the lists of videos. Within the same videos, questions are sorted by pruning, in order of first
    appearance.
    """
    turns = {name: turn for turn, name in enumerate(dict.fromkeys(row.get("pruning", "") for row in questions))}
    sorted_questions = sorted(questions, key=lambda row: (row["video_ids"], turns[row.get("pruning", "")]))
    blocks: list[list[QuestionRecord]] = []
    for _, same_videos in groupby(sorted_questions, key=itemgetter("video_ids")):
        group = list(same_videos)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            if not blocks or len(blocks[-1]) + len(part) > size:
                blocks.append([])
            blocks[-1] += part
    return blocks


def pack_blocks(blocks: Iterable[Sequence[QuestionRecord]]) -> list[pa.Table]:
    """Convert each block of questions to a table of one row."""
    return [pa.Table.from_pylist([{"questions": list(block)}], schema=_BLOCK_SCHEMA) for block in blocks]


def unpack_answers(parts: pa.Table) -> pa.Table:
    """Convert the actor's output to one row per answer, with the columns of ANSWERED_SCHEMA."""
    return pa.Table.from_struct_array(parts["answers"].combine_chunks().flatten()).cast(ANSWERED_SCHEMA)


class Answerer:
    """The actor that answers questions; it holds one language model, and no vision tower."""

    def __init__(self, setup: AnswerSetup, heartbeats: Any = None, engine: Engine | None = None) -> None:
        """Start the heartbeat, open the cache, and load the model.

        Without ``heartbeats``, outside of Ray, nothing is reported. ``engine`` replaces the engine that ``setup``
        describes.

        Raises:
            ModelError: the model cannot be loaded.
            WorkerGivenUp: the heartbeats actor refuses another process of this worker, since too many crashed.
        """
        self._heartbeat = Heartbeat(STAGE, heartbeats)
        self._heartbeat.start()
        runtime = choose_runtime(setup.device, setup.dtype, setup.config.attn)
        self._part_size = setup.batch_size
        self._size = BatchSize(setup.batch_size)
        # For the batch being answered: whether memory ran out, and the size of its largest part that fitted.
        self._ran_short = False
        self._n_fitted = 0
        with self._heartbeat.report_loading():
            self._engine = engine or load_engine(setup.config, setup.source, runtime, setup.largest_video)
            self._prompts = PromptMaker(setup, self._engine, runtime.device, self._heartbeat)
        self._provenance = json.dumps(self._engine.describe())

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """Answer a packed block of questions; yield packed tables of answers as soon as each is complete.

        A table has ``batch_size`` answers (the last may have fewer), in the order of the questions.

        Raises:
            MethodFails: a user method fails for every video.
        """
        questions = [drop_nulls(row, QuestionRecord) for rows in block["questions"].to_pylist() for row in rows]
        for answers in self._answer_in_slices(questions):
            part = [{**answer, "runtime": self._provenance} for answer in answers]
            yield pa.Table.from_pylist([{"answers": part}], schema=_PART_SCHEMA)

    def _answer_in_slices(self, questions: Sequence[QuestionRecord]) -> Iterator[list[AnswerRecord]]:
        """Yield the answers in the order of the questions, in lists of a fixed size, as soon as each is complete.

        If Ray retries a call, it identifies the lists by number, so their content must not depend on the batches.
        """
        answers_by_key: dict[tuple[str, str | None], AnswerRecord] = {}
        keys = [make_answer_key(question) for question in questions]
        size = self._part_size
        parts = deque(keys[start : start + size] for start in range(0, len(keys), size))
        for answer in self.answer(questions):
            answers_by_key[make_answer_key(answer)] = answer
            while parts and all(key in answers_by_key for key in parts[0]):
                yield [answers_by_key.pop(key) for key in parts.popleft()]

    def answer(self, questions: Sequence[QuestionRecord]) -> Iterator[AnswerRecord]:
        """Yield one row per question, answered or failed, in the order in which they are computed.

        Generated answers come before scored choices. A batch has questions of one of these kinds, and with the same
        pruning inside the model, if any.

        Raises:
            MethodFails: a user method fails for every video.
        """
        kinds: dict[Any, list[tuple[QuestionRecord, AnswerMode]]] = {}
        for question in questions:
            mode = AnswerMode.parse(question["decoding"])
            inside = question.get("pruning", "") if self._prompts.inside(question) else None
            kinds.setdefault((mode.scores_choices, inside), []).append((question, mode))
        for kind in sorted(kinds, key=itemgetter(0)):
            waiting: list[PreparedQuestion] = []
            for question, mode in kinds[kind]:
                question_or_row = self._prompts.make(question, mode)
                if not isinstance(question_or_row, PreparedQuestion):
                    yield question_or_row
                    continue
                waiting.append(question_or_row)
                if len(waiting) >= self._size.now:
                    # A batch that is not full waits for more questions, so that a long question does not make the other
                    # batches small.
                    *full, waiting = self._batches(waiting)
                    if len(waiting) >= self._size.now:
                        full, waiting = [*full, waiting], []
                    for batch in full:
                        yield from self._answer_together(batch)
            for batch in filter(None, self._batches(waiting)):
                yield from self._answer_together(batch)

    def _batches(self, questions: list[PreparedQuestion]) -> list[list[PreparedQuestion]]:
        """Group questions into batches within the engine's limits; the last batch may be smaller, or empty.

        A question that was in hand at an earlier crash is a batch by itself, at the beginning.
        """
        suspects = list[list[PreparedQuestion]]()
        others = list[PreparedQuestion]()
        for question in questions:
            if self._heartbeat.find_crashes(make_heartbeat_name(question.row)):
                suspects.append([question])
            else:
                others.append(question)
        inside = any(question.inside for question in questions)
        plan = self._engine.batches([question.prompt for question in others], self._size.now, inside=inside)
        return [*suspects, *([others[i] for i in part] for part in plan or [[]])]

    def _answer_together(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Answer one batch, reported as in hand, and adjust the size of later batches to what fitted."""
        with self._heartbeat.hold_items(*(make_heartbeat_name(question.row) for question in batch)) as items:
            self._ran_short = False
            self._n_fitted = 0
            rows = self._answer_batch(batch)
            self._size.adjust(self._n_fitted, self._ran_short)
            items.release(n=len(batch))
            return rows

    def _answer_batch(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Answer a batch; if that fails, retry its halves (out of memory) or its single questions (any other error).

        A single question that fails gets an error row. Sets ``_n_fitted`` to the size of the largest batch that fitted,
        and ``_ran_short`` if memory ran out. If the engine crashed or an error broke the GPU, this ends the process
        with exit code 70.

        Raises:
            MethodFails: a user method fails for every video.
        """
        try:
            rows = self._score(batch) if batch[0].mode.scores_choices else self._generate(batch)
            self._n_fitted = max(self._n_fitted, len(batch))
            return [{**row, "status": "ok", "batch_size": len(batch)} for row in rows]
        except EngineCrashed as error:
            give_up_process(batch[0].row["question_id"], error)
        except Exception as error:  # noqa: BLE001 - an error of one question must not fail its neighbors
            inside = batch[0].inside
            fault = convert_error(batch[0].row["question_id"], error, None if inside is None else inside[0])
        # Not inside the handlers, whose exception would keep the failed batch's tensors alive.
        out_of_memory = fault.fault_class == "out-of-memory"
        self._ran_short |= out_of_memory
        if out_of_memory and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(batch) == 1:
            return [make_failed_answer(batch[0].row, fault)]
        half = len(batch) // 2
        parts = [batch[:half], batch[half:]] if out_of_memory else [[question] for question in batch]
        return [row for part in parts for row in self._answer_batch(part)]

    def _generate(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Generate an answer to each question; return the rows in order, still without a status.

        ``choice`` is the index of the choice that the answer names, and absent if it names none.
        """
        decodings = [question.mode.decoding for question in batch]
        answers = self._engine.generate([question.prompt for question in batch], decodings, inside=batch[0].inside)
        rows = []
        for question, answer in zip(batch, answers, strict=True):
            row: AnswerRecord = {
                **question.row,
                "answer": answer.text,
                "finish": answer.finish,
                "n_new_tokens": len(answer.token_ids),
                "prefill_s": answer.prefill_s,
                "decode_s": answer.decode_s,
            }
            if "choices" in row and (choice := parse_letter(answer.text, row["choices"])) is not None:
                row["choice"] = choice
            rows.append(row)
        return rows

    def _score(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Score the choices of each question; return the rows in order, still without a status.

        The answer is the letter or text of the likeliest choice, the first on ties; "loglikelihood" also records the
        likeliest per token. Every row has the seconds of the whole batch.

        Raises:
            FloatingPointError: a score is NaN.
        """
        start = time.perf_counter()
        texts = [question.list_continuations() for question in batch]
        all_scores = self._engine.score([question.prompt for question in batch], texts, inside=batch[0].inside)
        seconds = time.perf_counter() - start
        rows = []
        for question, names, scores in zip(batch, texts, all_scores, strict=True):
            sums = [score.logprob for score in scores]
            if any(map(math.isnan, sums)):
                raise FloatingPointError(NO_NUMBERS)
            row: AnswerRecord = {
                **question.row,
                "answer": names[_find_argmax(sums)],
                "choice": _find_argmax(sums),
                "choice_scores": sums,
                "choice_tokens": [score.n_tokens for score in scores],
                "prefill_s": seconds,
                "decode_s": 0.0,
            }
            if question.mode.method == "loglikelihood":
                row["choice_normalised"] = _find_argmax([score.logprob / score.n_tokens for score in scores])
            rows.append(row)
        return rows


def _find_argmax(values: Sequence[float]) -> int:
    """Return the index of the first largest value."""
    return values.index(max(values))


class BatchSize:
    """The number of questions to answer at once (``now``), which adapts to memory."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._n_since_shortage = 0
        self.now = largest

    def adjust(self, n_fitted: int, is_short: bool) -> None:
        """Set the size to ``n_fitted``, at least 1, if memory ran out; otherwise count a batch that fitted.

        After every GROW_AFTER such batches in a row, the size doubles, up to the initial size.

        Args:
            n_fitted: the size of the largest slice of the batch that fitted.
        """
        if is_short:
            self.now = max(1, n_fitted)
            self._n_since_shortage = 0
            return
        self._n_since_shortage += 1
        if self._n_since_shortage >= GROW_AFTER:
            self.now, self._n_since_shortage = min(self._largest, 2 * self.now), 0
