"""A run of jobs.generate inside lmms-eval's process: the same checks, prompts and commits, without Ray."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from rich.console import Console

from pipeline.cache.header import read_header
from pipeline.cache.reader import TokenCache
from pipeline.console import make_speaker
from pipeline.errors import RunFailed, UnknownVideo, UsageError, convert_store_usage_errors
from pipeline.evaluate.lmms.arguments import EMPTY, ModelArguments, explain_flags
from pipeline.evaluate.tasks.questions import LMMS_SCHEMA, CachedIds, LmmsQuestion, cut_reply
from pipeline.generate.answers import AnswersTable
from pipeline.generate.questions import QUESTION_SCHEMA
from pipeline.generate.request import check_request
from pipeline.generate.run import answer
from pipeline.rows import AnswerRecord, drop_nulls
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import store_at

_MAX_EXAMPLES = 5  # examples in an error message


class CachedReplies:
    """Answers questions of lmms-eval from the cache that ``--model_args`` name, and stores the answers."""

    def __init__(self, arguments: ModelArguments, console: Console) -> None:
        """Check the arguments against the cache and the stored answers; load no model yet.

        Prints the cache's fingerprint if the arguments name none.

        Raises:
            UsageError: there is no cache, it has another fingerprint, or the arguments are invalid or contradict the
                cache or the answers.
            CorruptShard: a table of the cache or of the answers is damaged.
        """
        self._arguments = arguments
        self._console = console
        self._say = make_speaker(console)
        self._objects = Objects.from_environment()
        self._cache = store_at(arguments.cache, self._objects)
        with convert_store_usage_errors():
            identity = read_header(self._cache)["identity"]
        cache_fingerprint = arguments.check_fingerprint(identity)
        if arguments.fingerprint is None:
            self._say(
                f"note: the cache's fingerprint is {cache_fingerprint}. Give fingerprint={cache_fingerprint} in "
                "--model_args to refuse any other cache, and to keep the replies of caches apart in --use_cache"
            )
        with explain_flags():
            self._config = arguments.config(identity)
            check_request(self._config, self._console, QUESTION_SCHEMA.empty_table())
        self._ids: CachedIds | None = None

    def replies(self, questions: Sequence[LmmsQuestion]) -> list[str]:
        """Return a reply to each question, in order, cut at its stop texts.

        Only questions without a good stored answer are asked; new answers are committed in batches. With
        ``missing=empty``, failed questions get "" and a warning is printed.

        Raises:
            UsageError: the run cannot start; nothing was asked.
            UnknownVideo: the cache lacks a video, unless ``missing=empty``; nothing was asked.
            RunFailed: the run stopped, a question has no row, or one failed (unless ``missing=empty``).
        """
        system = self._config.system
        rows = [
            question.row(video_id, system)
            for question, video_id in zip(questions, self._find_videos(questions), strict=True)
        ]
        table = pa.Table.from_pylist(rows, schema=LMMS_SCHEMA)
        with explain_flags():
            # As an evaluation, because users cannot change the texts of a task.
            answer(self._config, self._console, table, evaluation={}, here=True)
        rows_by_id = self._read_answer_rows(table)
        if failures := [
            f"{question.where}: {row.get('error_class', 'removed')}: {row['error_message']}"
            for question in questions
            if (row := rows_by_id[question.question_id])["status"] != "ok"
        ]:
            self._refuse_or_warn(failures)
        return [cut_reply(rows_by_id[question.question_id].get("answer", ""), question.until) for question in questions]

    def _read_answer_rows(self, questions: pa.Table) -> dict[str, AnswerRecord]:
        """Return all stored live answers by question id, including error rows.

        Raises:
            RunFailed: one of ``questions`` has no row.
        """
        live = AnswersTable(store_at(self._config.out, self._objects)).live()
        rows = {row["question_id"]: drop_nulls(row, AnswerRecord) for row in live.to_pylist()}
        if absent := [name for name in questions["question_id"].to_pylist() if name not in rows]:
            raise RunFailed(f"{len(absent)} questions have no row in {self._config.out}, e.g. {absent[0]}")
        return rows

    def _find_videos(self, questions: Sequence[LmmsQuestion]) -> list[str]:
        """Return the id of each question's video, in order. The first call reads the cache's ids.

        With ``missing=empty``, the id of a missing video is the question's key, and a failed video keeps its id.

        Raises:
            UsageError: a key matches several videos.
            UnknownVideo: a video is missing or failed, unless ``missing=empty``.
        """
        if self._ids is None:
            with convert_store_usage_errors():
                cache = TokenCache(self._arguments.cache, store=self._cache)
                self._ids = CachedIds(cache.video_ids, cache.failed)
        video_ids = list[str]()
        absent = list[str]()
        for question in questions:
            try:
                video = self._ids.find(question.key)
            except UsageError as error:
                raise UsageError(f"{question.where}: {error}") from error
            video_ids.append(video or question.key)
            if video is None:
                near = self._ids.near(question.key) if len(absent) < _MAX_EXAMPLES else ""
                absent.append(
                    f"{question.where}: no id is {question.key!r} or ends with '/{question.key}' (suffix ignored){near}"
                )
            elif fault := self._ids.failed.get(video):
                absent.append(f"{question.where}: {video!r} failed when it was pruned ({fault})")
        if absent and self._arguments.missing != EMPTY:
            raise UnknownVideo(
                f"{len(absent)} of {len(questions)} questions are about videos that {self._cache} does not have:\n  "
                + "\n  ".join(absent[:_MAX_EXAMPLES])
                + "\nPrune them into the cache, name ids with video_id=TEMPLATE, or take empty replies: missing=empty"
            )
        return video_ids

    def _refuse_or_warn(self, failures: Sequence[str]) -> None:
        """Raise RunFailed with the number of ``failures`` and up to five of them; only warn if ``missing=empty``.

        Call it only with failures: it raises or warns for an empty sequence too.
        """
        message = f"{len(failures)} questions have no answer:\n  " + "\n  ".join(failures[:_MAX_EXAMPLES])
        if self._arguments.missing != EMPTY:
            raise RunFailed(
                f"{message}\nRerun the command to ask these questions again, or give missing=empty in --model_args for "
                "empty replies"
            )
        self._say(f"warning: empty replies (missing=empty): {message}")
