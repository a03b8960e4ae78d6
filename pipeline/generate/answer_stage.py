"""The GPU actor that answers: questions in, rows of answers out. One question's fault becomes its error row."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import torch

from gstep.backbones import choose_runtime
from pipeline.generate.answers import ANSWER_SCHEMA, answer_key
from pipeline.generate.asking import AnswerSetup, Asker, PreparedQuestion, heartbeat_name, unforeseen_fault
from pipeline.generate.choices import parse_letter
from pipeline.generate.engines import Engine, EngineDied, load_engine
from pipeline.generate.questions import QUESTION_SCHEMA, Way
from pipeline.rows import AnswerRecord, QuestionRecord, failed_answer, without_nulls
from pipeline.runner.heartbeat import Heartbeat, give_up_process

STAGE = "answer"
GROW_AFTER = 16  # batches after a failure before a larger one is tried
# A block of questions is one row, which Ray can neither split nor join with another.
TO_ASK = pa.schema([*QUESTION_SCHEMA, pa.field("pruning", pa.string()), pa.field("attempts", pa.int32())])
ASKED = pa.schema([pa.field("questions", pa.list_(pa.struct(list(TO_ASK))))])
# ``runtime``: JSON of what computed an answer.
ANSWERED = pa.schema([*(field.with_nullable(True) for field in ANSWER_SCHEMA), pa.field("runtime", pa.string())])
# What the actor hands over at a time is one row likewise.
_HANDED_OVER = pa.schema([pa.field("answers", pa.list_(pa.struct(list(ANSWERED))))])


def question_blocks(blocks: Iterable[Sequence[QuestionRecord]]) -> list[pa.Table]:
    """Pack blocks of questions as the actor's input: tables of ASKED, one row a block."""
    return [pa.Table.from_pylist([{"questions": list(block)}], schema=ASKED) for block in blocks]


def answered_rows(handed_over: pa.Table) -> pa.Table:
    """Unpack the answers that the actor returned, as ANSWERED."""
    return pa.Table.from_struct_array(handed_over["answers"].combine_chunks().flatten()).cast(ANSWERED)


class BatchSize:
    """The number of questions to answer at once, which falls when memory runs short and rises again after a while."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._calm = 0
        self.now = largest

    def ended(self, fitted: int, short: bool) -> None:
        """Adjust the batch size: down to the ``fitted`` questions that ran if memory was ``short``, up again later."""
        if short:
            self.now, self._calm = max(1, fitted), 0
            return
        self._calm += 1
        if self._calm >= GROW_AFTER:
            self.now, self._calm = min(self._largest, 2 * self.now), 0


class Answerer:
    """The actor that answers questions; it holds one language model and never a vision tower."""

    def __init__(self, setup: AnswerSetup, heartbeats: Any = None, engine: Engine | None = None) -> None:
        """Load the engine that ``setup`` describes, unless a loaded ``engine`` is given."""
        self._heartbeat = Heartbeat(STAGE, heartbeats)
        self._heartbeat.start()
        runtime = choose_runtime(setup.device, setup.dtype, setup.attn)
        self._handed_over_at_once = setup.batch_size
        self._size = BatchSize(setup.batch_size)
        with self._heartbeat.loading():
            self._engine = engine or load_engine(setup.engine, setup.source, runtime)
            self._asker = Asker(setup, self._engine, runtime.device, self._heartbeat)
        self._provenance = json.dumps(self._engine.describe())

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        rows = [row for block in batch["questions"].to_pylist() for row in block]
        for answers in self.answer_parts([without_nulls(row, QuestionRecord) for row in rows]):
            part = [{**answer, "runtime": self._provenance} for answer in answers]
            yield pa.Table.from_pylist([{"answers": part}], schema=_HANDED_OVER)

    def answer_parts(self, questions: Sequence[QuestionRecord]) -> Iterator[list[AnswerRecord]]:
        """Yield the answers as soon as they are known, in the order of the questions.

        They come so many at a time whatever batches were made. Ray counts the parts of a call that it tries again, and
        takes the same number for the same.
        """
        known: dict[tuple[str, str | None], AnswerRecord] = {}
        size = self._handed_over_at_once
        parts = deque(
            [answer_key(row) for row in questions[start : start + size]] for start in range(0, len(questions), size)
        )
        for answer in self.answer(questions):
            known[answer_key(answer)] = answer
            while parts and all(key in known for key in parts[0]):
                yield [known.pop(key) for key in parts.popleft()]

    def answer(self, questions: Sequence[QuestionRecord]) -> Iterator[AnswerRecord]:
        """Yield a row for each question, answered or failed.

        Those that are scored, those that are generated, and those for which the model prunes inside itself make batches
        of their own.
        """
        understood = [(question, Way.parse(question["decoding"])) for question in questions]
        kinds = [(how.scored, self._asker.inside(question)) for question, how in understood]
        for kind in sorted(dict.fromkeys(kinds), key=lambda kind: kind[0]):
            waiting: list[PreparedQuestion] = []
            for (question, how), other in zip(understood, kinds, strict=True):
                if other != kind:
                    continue
                asked = self._asker.ask(question, how)
                if isinstance(asked, PreparedQuestion):
                    waiting.append(asked)
                else:
                    yield asked
                if len(waiting) >= self._size.now:
                    # What has room for more waits for it: a long question must not make the batches of others small.
                    *full, waiting = self._batches(waiting)
                    if len(waiting) >= self._size.now:
                        full, waiting = [*full, waiting], []
                    for batch in full:
                        yield from self._answer_together(batch)
            for batch in filter(None, self._batches(waiting)):
                yield from self._answer_together(batch)

    def _batches(self, questions: list[PreparedQuestion]) -> list[list[PreparedQuestion]]:
        """Return batches that the engine can afford, of which the last may have room for more questions.

        A question that was in hand when a process died goes alone, to know which it was.
        """
        died = [bool(self._heartbeat.deaths(heartbeat_name(asked.row))) for asked in questions]
        calm = [asked for asked, suspect in zip(questions, died, strict=True) if not suspect]
        alone = [[asked] for asked, suspect in zip(questions, died, strict=True) if suspect]
        inside = any(asked.inside for asked in questions)
        plan = self._engine.batches([asked.prompt for asked in calm], self._size.now, inside=inside)
        return [*alone, *([calm[i] for i in part] for part in plan or [[]])]

    def _answer_together(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Answer one batch, reported to the heartbeat, and adjust the batch size."""
        with self._heartbeat.holding(*(heartbeat_name(asked.row) for asked in batch)) as held:
            self._short, self._fitted = False, 0
            rows = self._answer_batch(batch)
            self._size.ended(self._fitted, self._short)
            held.done(n=len(batch))
            return rows

    def _answer_batch(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Answer a batch; if it fails, answer its parts, down to the one question that gets the error row."""
        try:
            rows = self._score(batch) if batch[0].how.scored else self._generate(batch)
            self._fitted = max(self._fitted, len(batch))
            return [{**row, "status": "ok", "batch_size": len(batch)} for row in rows]
        except EngineDied as error:
            give_up_process(batch[0].row["question_id"], error)
        except Exception as error:  # noqa: BLE001 - whatever one question provokes must not cost its neighbours
            fault = unforeseen_fault(batch[0].row["question_id"], error)
        self._short |= fault.fault_class == "out-of-memory"
        # Outside of the handlers, whose exception would keep the failed batch's tensors alive.
        if fault.fault_class == "out-of-memory" and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(batch) == 1:
            return [failed_answer(batch[0].row, fault)]
        if fault.fault_class != "out-of-memory":
            return [row for asked in batch for row in self._answer_batch([asked])]
        half = len(batch) // 2
        return [row for part in (batch[:half], batch[half:]) for row in self._answer_batch(part)]

    def _generate(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Decode an answer to each question, and return the rows."""
        decodings = [asked.how.decoding for asked in batch]
        answers = self._engine.generate([asked.prompt for asked in batch], decodings, inside=batch[0].inside)
        rows = []
        for asked, answer in zip(batch, answers, strict=True):
            row: AnswerRecord = {
                **asked.row,
                "answer": answer.text,
                "finish": answer.finish,
                "n_new_tokens": len(answer.token_ids),
                "prefill_s": answer.prefill_s,
                "decode_s": answer.decode_s,
            }
            if "choices" in asked.row and (choice := parse_letter(answer.text, asked.row["choices"])) is not None:
                row["choice"] = choice
            rows.append(row)
        return rows

    def _score(self, batch: list[PreparedQuestion]) -> list[AnswerRecord]:
        """Score the choices of each question, and return the rows; the likeliest choice is the answer."""
        started = time.perf_counter()
        texts = [asked.continuations() for asked in batch]
        all_scores = self._engine.score([asked.prompt for asked in batch], texts, inside=batch[0].inside)
        seconds = time.perf_counter() - started
        rows = []
        for asked, names, scores in zip(batch, texts, all_scores, strict=True):
            sums = [score.logprob for score in scores]
            row: AnswerRecord = {
                **asked.row,
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


def _largest(values: Sequence[float]) -> int:
    """Return the index of the largest value, the first of equals."""
    return values.index(max(values))
