"""The class that lmms-eval calls with requests."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from pipeline.console import CleanConsole
from pipeline.errors import UsageError
from pipeline.evaluate.lmms.answering import CachedReplies
from pipeline.evaluate.lmms.arguments import ModelArguments
from pipeline.evaluate.tasks.questions import LmmsQuestion, find_video_key, make_question, make_unique


class GstepCached(lmms):  # type: ignore[misc]
    """A model of lmms-eval that answers a task's questions from cached tokens; it reads no video file."""

    is_simple = True

    def __init__(self, **model_args: Any) -> None:
        """Check ``model_args`` against the cache and the stored answers; load no model yet.

        Raises:
            UsageError: WORLD_SIZE is above 1 (several processes), or an argument is missing, unknown, invalid or
                contradicts the cache or the answers.
            CorruptShard: a table of the cache or of the answers is damaged.
        """
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "gstep_cached answers in one process: start lmms-eval without accelerate or torchrun; on several GPUs "
                "python -m jobs.evaluate or jobs.generate answers the same questions"
            )
        self._arguments = ModelArguments.read(model_args)
        self._replies = CachedReplies(self._arguments, CleanConsole(stderr=True))

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return a reply to each request, in order; answers are stored in batches, so that a rerun resumes.

        Raises:
            UsageError: a request cannot be converted to a question, or the run cannot start.
            UnknownVideo: the cache lacks a video, unless ``missing=empty``.
            RunFailed: the run stopped, or a question has no good answer (unless ``missing=empty``).
        """
        ids = make_unique(
            f"{task}/{split}/{doc_id}" for *_, doc_id, task, split in (request.args for request in requests)
        )
        return self._replies.replies(
            [self._make_question(request, question_id) for request, question_id in zip(requests, ids, strict=True)]
        )

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Raise UsageError: lmms-eval 0.7 turns log-likelihoods into text before a task sees them."""
        raise UsageError(
            "gstep_cached generates replies only: lmms-eval 0.7 cannot score log-likelihoods of any model; ask the "
            "same questions with python -m jobs.generate --choices loglikelihood"
        )

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Raise UsageError: later rounds show further images, which no cache holds."""
        raise UsageError("gstep_cached answers one question at a time, and takes no tasks of several rounds")

    def _make_question(self, request: Instance, question_id: str) -> LmmsQuestion:
        """Convert a request of lmms-eval to a question.

        Raises:
            UsageError: the task's output_type is not generate_until, the document names no video, or a setting is not
                supported.
        """
        if len(request.args) != 6 or not isinstance(request.args[1], Mapping):
            raise UsageError("gstep_cached answers tasks whose output_type is generate_until, and no other")
        prompt, settings, doc_to_visual, doc_id, task, split = request.args
        doc = self.task_dict[task][split][doc_id]
        folder = _find_video_folder(task, doc_to_visual)
        try:
            key = find_video_key(doc, self._arguments.video_id, folder)
        except UsageError as error:
            raise UsageError(f"task {task}, document {doc_id}: {error}") from error
        return make_question(question_id, task, doc_id, key, prompt, settings, self._arguments.seed)


def _find_video_folder(task: str, doc_to_visual: Any) -> str | None:
    """Return the video folder of an MVBench task, or of a local task that includes one; None for other tasks."""
    from lmms_eval.tasks.mvbench.utils import DATA_LIST  # noqa: PLC0415 - reads HF_HOME when it is imported

    settings = getattr(getattr(doc_to_visual, "__self__", None), "lmms_eval_specific_kwargs", None) or {}
    folder: str | None = DATA_LIST.get(settings.get("sub_task", task.removeprefix("mvbench_")))
    return folder
