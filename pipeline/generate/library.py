"""``pipeline.answer_questions``: what ``python -m jobs.generate`` does, called from Python."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from pipeline.cache.reader import TokenCache
from pipeline.generate.config import GenerateConfig
from pipeline.generate.request import prepare
from pipeline.generate.run import AnswerRun
from pipeline.generate.summary import AnswerSummary
from pipeline.options import config_of
from pipeline.runner.library import ProgressOption, checked_outcome, console_for, run_here


def answer_questions(
    cache: TokenCache | str | os.PathLike[str],
    questions: object,
    *,
    out: str | os.PathLike[str] = "answers",
    progress: ProgressOption = True,
    **options: Any,
) -> AnswerSummary:
    """Answer questions about cached videos with the cache's language model, on Ray.

    >>> asked = [{"question_id": 1, "video_id": "bikes.mp4", "prompt": "What happens here?"}]
    >>> summary = pipeline.answer_questions("my-cache", asked, out="answers", retention_ratio=0.10)
    >>> pipeline.read_answers(summary.out).select(["question_id", "answer"]).to_pylist()

    The same call again asks what has no answer yet. Ray, loggers and settings are left as they were, as
    :func:`pipeline.prune_videos` says.

    Args:
        cache: a path, or a TokenCache, which is read anew.
        questions: a file as for ``python -m jobs.generate --questions``; or rows with question_id, video_id, prompt and
            optional choices, answer, system and options of decoding: dicts, or a table of Arrow, pandas or Polars.
        out: the answers to create or to continue.
        progress: as of ``prune_videos``.
        options: those of ``python -m jobs.generate --help-all`` by their names, ``--max-new-tokens 8`` as
            ``max_new_tokens=8``.

    Returns what ``out`` holds of these questions; ``failed`` has question_id -> class of the error.

    Raises UsageError, RunFailed and TooManyFailed as ``prune_videos``, and CorruptShard for a damaged cache.
    """
    given = None if isinstance(questions, str | os.PathLike) else questions
    place = str(cache.store) if isinstance(cache, TokenCache) else cache
    named = questions if given is None else "questions from Python"
    config = config_of(GenerateConfig, "answer_questions", {"cache": place, "questions": named, "out": out, **options})
    console = console_for(progress)
    with run_here():
        summary = AnswerRun(config, console, partial(prepare, config, console, given)).run()
    return checked_outcome(summary, config, summary.n_questions)
