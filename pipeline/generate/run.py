"""The life of a run that answers questions: ``answer``, which calls these steps in order.

check_request      generate/request.py       options, questions, cache and model: errors before anything starts
Claim              runner/claim.py           the lock on the folder of the answers
select_todo        generate/request.py       the stored answers, and the questions to ask (generate/remaining.py)
split              generate/answer_setup.py  the questions for the model, and the rows that need no model
AnswerJob          generate/job.py           the plan for the cluster, and the graph (generate/answerer.py)
Stream             runner/stream.py          the graph's shards; a new graph when the cluster's nodes change
CommittedAnswers   below                     commits and counts each shard
summarise_answers  generate/summary.py       counts of the committed rows
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from gstep.backbones import choose_runtime
from pipeline.cache.merging import MAX_WAITING_AT_END, MAX_WAITING_FILES
from pipeline.cache.reader import TokenCache
from pipeline.console import Say, make_speaker
from pipeline.errors import convert_usage_errors
from pipeline.generate.answer_setup import AnswerSetup
from pipeline.generate.answerer import Answerer, group_by_videos, pack_blocks, unpack_answers
from pipeline.generate.answers import AnswersIdentity, commit_answers, make_answer_key, try_merge_answers
from pipeline.generate.config import GenerateConfig
from pipeline.generate.job import ANSWERING, AnswerJob, Questions, choose_device_for_models
from pipeline.generate.late_pruning import PruningSpec
from pipeline.generate.questions import AnswerMode, read_given_questions
from pipeline.generate.request import AnswerRequest, check_request
from pipeline.generate.summary import AnswerSummary, summarize_answers
from pipeline.options import make_config
from pipeline.rows import AnswerRecord, QuestionRecord, drop_nulls
from pipeline.runner.claim import Claim
from pipeline.runner.cluster.connection import check_device, collect_provenance
from pipeline.runner.job import Watch, convert_store_errors, print_options
from pipeline.runner.monitor import Monitor
from pipeline.runner.python_calls import ProgressOption, check_outcome, isolate_run, make_console
from pipeline.runner.run_record import RunFile, make_run_id
from pipeline.runner.stream import Stream, commit_all

_RECORDED_VERSIONS = ("gstep-cache", "torch", "transformers", "ray", "pyarrow")


def answer(
    config: GenerateConfig,
    console: Console,
    questions: pa.Table | None = None,
    specs: Mapping[str, PruningSpec | None] | None = None,
    evaluation: AnswersIdentity | None = None,
    *,
    here: bool = False,
) -> AnswerSummary:
    """Ask the questions that have no answer in ``config.out`` yet, and return the counts over all questions.

    Prints the options, notes and progress, creates the folder, and may merge small files at the end. If no question is
    left, no cluster is started and no record is written.

    Args:
        questions: table with the columns of QUESTION_SCHEMA and carried columns. None reads ``config.questions``, or
            makes those of ``config.ask``.
        specs: name -> pruning under which every question is asked. None uses the pruning of the options.
        here: answer in this process instead of on Ray, and commit every batch, so that a killed run loses at most one.

    Raises:
        UsageError: the options, files, model or cluster do not allow the run, or another run holds the folder
            (CacheLocked). The model was not asked.
        CorruptShard: a file of the cache's table or of the answers is damaged.
        RunFailed: the run stopped, or the store failed. Committed rows stay, and a rerun resumes.
    """
    say = make_speaker(console)
    run_id = make_run_id()
    with convert_store_errors(say):
        request = check_request(config, console, questions, specs, evaluation)
        print_options(config, console)
        request.store.make()
        with Claim(request.store, run_id, say, join=config.join) as claim:
            request = request.match_answers()  # again, because another run may have written before the claim
            start = time.monotonic()
            record = None
            table, todo = request.select_todo()
            with Monitor(request.store, run_id, claim.set_progress) as monitor:
                if todo:
                    record = answer_and_commit(request, run_id, todo, monitor, here=here)
                else:  # no cluster, no record
                    check_device(config, say)
            wall_s = time.monotonic() - start
            live = table.select_live_answers(request.questions, request.setup.prunings)
            summary = summarize_answers(live, request.n_questions, set(map(make_answer_key, todo)), wall_s)
            summary = replace(summary, out=str(request.store), log=monitor.log)
            if record is not None:
                record.save(summary=summary.as_record())
                try_merge_answers(request.store, MAX_WAITING_AT_END, say)
            return summary


def answer_and_commit(
    request: AnswerRequest, run_id: str, todo: list[QuestionRecord], monitor: Monitor, *, here: bool
) -> RunFile:
    """Commit the rows of ``todo`` that need no model, then the model's answers to the others; return the run's record.

    If a question needs the model, its device is chosen first: for this process with ``here``, otherwise by joining or
    starting the cluster. Then the header of the answers is written, the run's record is begun, and rows are committed.

    Raises:
        UsageError: the cluster or machine lacks the resources of the flags (nothing is written), or, with ``here``, the
            model cannot be loaded (rows that need no model stay committed).
        RunFailed: no cluster can be joined or started, or the run stopped (MethodFails if a user method fails for every
            video). Committed rows stay.
    """
    config = request.config
    setup = request.setup
    say = make_speaker(request.console)
    for_model, settled_rows = request.forecast.split(todo)
    if for_model:  # before any row is written, because the cluster may lack the resources of the flags
        device, dtype = choose_device_here(config) if here else choose_device_for_models(config, say)
        setup = replace(setup, device=device, dtype=dtype)
    request.write_header()
    facts = {**collect_provenance(run_id, _RECORDED_VERSIONS), "config": config.as_record(), "questions": len(todo)}
    with RunFile(request.store, facts) as record:
        commits = CommittedAnswers(request, run_id, record, monitor)
        commits.commit_settled(settled_rows)
        if for_model:
            record.save(device=setup.device, dtype=setup.dtype)
            if here:
                answer_here(setup, for_model, commits, say)
            else:
                monitor.start()
                job = AnswerJob(setup, request.console, record)
                job.n_shards = commits.n_settled_shards
                commit_all(Stream(job, Questions(for_model), Watch(monitor)), commits.commit)
    return record


def answer_here(setup: AnswerSetup, questions: list[QuestionRecord], done: CommittedAnswers, say: Say) -> None:
    """Load the model into this process, answer the questions sorted by video, and commit each batch.

    Progress is passed to ``say`` at intervals of ``config.log_interval`` seconds or more.

    Raises:
        UsageError: the model cannot be loaded.
        MethodFails: a user method fails for every video.
    """
    with convert_usage_errors():
        answerer = Answerer(setup)
    last_line_at = time.monotonic()
    blocks = pack_blocks(group_by_videos(questions, setup.batch_size))
    for number, batch in enumerate(chain.from_iterable(map(answerer, blocks)), done.n_settled_shards):
        done.commit(number, unpack_answers(batch))
        if time.monotonic() - last_line_at > setup.config.log_interval:
            say(f"{len(done.keys)} of {len(questions)} questions answered, {done.n_failed} of them failed")
            last_line_at = time.monotonic()


def choose_device_here(config: GenerateConfig) -> tuple[str, str]:
    """Choose the (device, dtype) of this process. Raises UsageError if the options do not fit it."""
    with convert_usage_errors():
        runtime = choose_runtime(config.device, config.dtype, config.attn)
    return runtime.device, runtime.dtype_name


class CommittedAnswers:
    """The writer of one run's rows, which also counts them.

    Attributes:
        n_settled_shards: shards of rows that needed no model; the shards of answers are numbered from here.
        keys: (question_id, pruning) of the rows that the model has answered, or failed to answer.
        n_failed: failed rows, including those that needed no model.
    """

    def __init__(self, request: AnswerRequest, run_id: str, record: RunFile, monitor: Monitor) -> None:
        """Set the counts to zero; nothing is written."""
        self._request = request
        self._run_id = run_id
        self._record = record
        self._monitor = monitor
        self._runtimes: list[str] = []
        self.keys: set[tuple[str, str | None]] = set()
        self.n_settled_shards = self.n_failed = 0

    def commit_settled(self, rows: Sequence[AnswerRecord]) -> None:
        """Commit rows that need no model, in shards of ``questions_per_shard``, and count the failed ones."""
        size = self._request.config.questions_per_shard
        for start in range(0, len(rows), size):
            self._write(self.n_settled_shards, rows[start : start + size])
            self.n_settled_shards += 1
        self.n_failed += sum(row["status"] == "failed" for row in rows)

    def commit(self, number: int, rows: pa.Table) -> None:
        """Commit rows of the model as shard ``number``, count them, and add new runtimes of workers to the record.

        Rows that arrive a second time, after an interrupt, are written again but not counted. After every
        MAX_WAITING_FILES shards, small files are merged; if that fails, a warning is printed.
        """
        if new := [text for text in pc.unique(rows["runtime"]).to_pylist() if text not in self._runtimes]:
            self._runtimes.extend(new)
            self._record.save(runtimes=[json.loads(text) for text in self._runtimes])
        answers = [drop_nulls(row, AnswerRecord) for row in rows.drop_columns(["runtime"]).to_pylist()]
        self._write(number, answers)
        uncounted = [row for row in answers if make_answer_key(row) not in self.keys]
        self.keys.update(map(make_answer_key, uncounted))
        n_failed = sum(row["status"] == "failed" for row in uncounted)
        self.n_failed += n_failed
        self._monitor.count_rows(ANSWERING.item, len(uncounted) - n_failed, n_failed)
        if (number + 1) % MAX_WAITING_FILES == 0:
            try_merge_answers(self._request.store, MAX_WAITING_FILES, make_speaker(self._request.console))

    def _write(self, number: int, rows: Sequence[AnswerRecord]) -> None:
        """Write rows, with their carried columns, as shard ``number``."""
        request = self._request
        commit_answers(request.store, self._run_id, number, rows, request.config.format, request.questions)


def answer_questions(
    cache: TokenCache | str | os.PathLike[str],
    questions: object = None,
    *,
    out: str | os.PathLike[str] = "answers",
    progress: ProgressOption = True,
    **options: Any,
) -> AnswerSummary:
    """Answer questions about cached videos with the cache's language model, on Ray.

    >>> questions = [{"question_id": 1, "video_id": "bikes.mp4", "prompt": "What happens here?"}]
    >>> summary = pipeline.answer_questions("my-cache", questions, out="answers", retention_ratio=0.10)
    >>> pipeline.read_answers(summary.out).select(["question_id", "answer"]).to_pylist()

    Calling it again asks only the questions without an answer. A running Ray is used and kept; otherwise Ray is
    started, and shut down at the end.

    Args:
        cache: a path, or a TokenCache, which is opened again.
        questions: a file as for ``python -m jobs.generate --questions``; or rows with question_id, video_id, prompt or
            messages, and optional choices, answer, system and decoding options: dicts, or a table of Arrow, pandas or
            Polars. None with ``ask=["What happens here?"]``, which asks every video of the cache.
        progress: True shows the progress, False shows nothing, and a function is called with each Progress.
        options: the options of ``python -m jobs.generate --help-all``: ``--max-new-tokens 8`` is ``max_new_tokens=8``.

    Returns:
        The counts over these questions in ``out``; ``failed`` maps question_id to the error class.

    Raises:
        UsageError: an option, a question, the cache or the stored answers do not allow the request.
        RunFailed: the run stopped before every question had a row. Calling again resumes.
        TooManyFailed: more questions failed than ``max_failed`` allows, none is answered, or one failed by a bug.
        CorruptShard: a file of the cache's table or of the answers is damaged.
    """
    place = str(cache.store) if isinstance(cache, TokenCache) else cache
    is_file = questions is None or isinstance(questions, str | os.PathLike)
    source = questions if is_file else "questions from Python"
    config = make_config(
        GenerateConfig, "answer_questions", {"cache": place, "questions": source, "out": out, **options}
    )
    console = make_console(progress)
    with isolate_run():
        table = None if is_file else read_given_questions(questions, AnswerMode.of(config), config.limit)
        summary = answer(config, console, table)
    return check_outcome(summary, config, summary.n_questions)
