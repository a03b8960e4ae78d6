"""A run of jobs.generate in this very process: the same checks, prompts, answers and commits, without Ray."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa
from rich.console import Console

from gstep.backbones import choose_runtime
from pipeline.cache.header import read_header
from pipeline.cache.reader import TokenCache
from pipeline.errors import RunFailed, UnknownVideo, UsageError, store_usage_errors, usage_errors
from pipeline.evaluate.lmms.arguments import EMPTY, Arguments, explain_flags
from pipeline.evaluate.lmms.questions import LMMS_SCHEMA, CachedIds, LmmsQuestion
from pipeline.generate.answerer import Answerer, group_by_videos, pack_blocks, unpack_answers
from pipeline.generate.answers import AnswersTable
from pipeline.generate.questions import QUESTION_SCHEMA
from pipeline.generate.run import AnswerRun
from pipeline.rows import AnswerRecord, QuestionRecord, without_nulls
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

_SHOWN = 5  # examples shown in an error


class AnswersHere(AnswerRun):
    """An answer run in this process that commits every batch, so that a killed run loses one."""

    def choose_device(self) -> tuple[str, str]:
        """Return the device and dtype that this process computes on."""
        with usage_errors():
            runtime = choose_runtime(self.options.device, self.options.dtype, self.options.attn)
        return runtime.device, runtime.dtype_name

    def answer(self, questions: list[QuestionRecord]) -> None:
        """Answer the questions batch by batch in this process, and commit each batch."""
        with usage_errors():
            answerer = Answerer(self.worker_setup())
        said = time.monotonic()
        for block in pack_blocks(group_by_videos(questions, self.setup.batch_size)):
            for part in answerer(block):
                self.commit(self.n_shards, unpack_answers(part))
                self.n_shards += 1
            if time.monotonic() - said > self.options.log_interval:
                self.say(f"{len(self.answered)} of {len(questions)} questions answered, {self.n_failed} of them failed")
                said = time.monotonic()


class CachedReplies:
    """The source of replies to lmms-eval's questions: the cache and answers that ``--model_args`` name.

    Raises UsageError where these do not go together, before a model is loaded.
    """

    def __init__(self, arguments: Arguments, console: Console) -> None:
        self._arguments, self._console = arguments, console
        self._objects = Objects.from_environment()
        self._cache = store_at(arguments.cache, self._objects)
        with store_usage_errors():
            held = read_header(self._cache)["identity"]
        found = arguments.check_fingerprint(held)
        if arguments.fingerprint is None:
            self._say(
                f"note: the cache's fingerprint is {found}; with fingerprint={found} in --model_args another cache is "
                "refused, and --use_cache of lmms-eval tells replies from different caches apart"
            )
        with explain_flags():
            self._config = arguments.config(held)
            self._run(QUESTION_SCHEMA.empty_table()).prepare()
        self._ids: CachedIds | None = None

    def replies(self, asked: Sequence[LmmsQuestion]) -> list[str]:
        """Return a reply to each question, in order; ask only those that have no answer yet.

        Raises UsageError where nothing was asked, RunFailed where not every question has a reply; what was answered
        stays, and the same command goes on.
        """
        system = self._config.system
        rows = [one.row(video_id, system) for one, video_id in zip(asked, self._videos(asked), strict=True)]
        table = pa.Table.from_pylist(rows, schema=LMMS_SCHEMA)
        with explain_flags():
            self._run(table).run()
        given = self._given(table)
        failed = [(one, row) for one in asked if (row := given[one.question_id])["status"] != "ok"]
        if failed:
            self._refuse([f"{one.where}: {row['error_class']}: {row['error_message']}" for one, row in failed])
        return [one.reply(given[one.question_id].get("answer", "")) for one in asked]

    def _run(self, questions: pa.Table) -> AnswersHere:
        """Return the run that answers these questions (QUESTION_SCHEMA)."""
        return AnswersHere(self._config, self._console, questions)

    def _given(self, questions: pa.Table) -> dict[str, AnswerRecord]:
        """Return the committed live answers to these questions, by id. Raise RunFailed if one is missing."""
        live = AnswersTable(store_at(self._config.out, self._objects)).live()
        rows = {row["question_id"]: without_nulls(row, AnswerRecord) for row in live.to_pylist()}
        if absent := [name for name in questions["question_id"].to_pylist() if name not in rows]:
            raise RunFailed(f"{len(absent)} questions have no row in {self._config.out}, e.g. {absent[0]}")
        return rows

    def _videos(self, asked: Sequence[LmmsQuestion]) -> list[str]:
        """Return the video of each question. Raise UnknownVideo if one is missing, unless ``missing=empty``."""
        if self._ids is None:
            with store_usage_errors():
                cache = TokenCache(self._arguments.cache, store=self._cache)
                self._ids = CachedIds(cache.video_ids, cache.failed)
        found, absent = [], []
        for one in asked:
            try:
                video = self._ids.find(one.key)
            except UsageError as error:
                raise UsageError(f"{one.where}: {error}") from error
            found.append(video or one.key)
            if video is None:
                absent.append(f"{one.where}: no id is {one.key!r}, ends with '/{one.key}', or is so but for its suffix")
            elif fault := self._ids.failed.get(video):
                absent.append(f"{one.where}: {video!r} failed when it was pruned ({fault})")
        if absent and self._arguments.missing != EMPTY:
            raise UnknownVideo(
                f"{len(absent)} of {len(asked)} questions are about videos that {self._cache} does not have:\n  "
                + "\n  ".join(absent[:_SHOWN])
                + "\nPrune them into the cache, name ids with video_id=TEMPLATE, or take empty replies: missing=empty"
            )
        return found

    def _refuse(self, failed: Sequence[str]) -> None:
        """Raise RunFailed for questions that failed; with ``missing=empty`` print a warning instead."""
        said = f"{len(failed)} questions have no answer:\n  " + "\n  ".join(failed[:_SHOWN])
        if self._arguments.missing != EMPTY:
            raise RunFailed(
                f"{said}\nThe others have theirs; the same command asks these again, and missing=empty in --model_args "
                "replies nothing to them"
            )
        self._say(f"warning: empty replies (missing=empty): {said}")

    def _say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)
