"""The class that lmms-eval calls: requests in, replies out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms

from pipeline.console import CleanConsole
from pipeline.errors import UsageError
from pipeline.evaluate.lmms.answering import CachedReplies
from pipeline.evaluate.lmms.arguments import Arguments
from pipeline.evaluate.tasks.questions import LmmsQuestion, make_question, make_unique, video_key


class GstepCached(lmms):  # type: ignore[misc]
    """A model that answers a task's questions from cached tokens; it reads no video file.

    Raises UsageError for ``--model_args`` that are unknown or do not go with the cache or the answers.
    """

    is_simple = True

    def __init__(self, **model_args: Any) -> None:
        """Read ``model_args`` and check them against the cache; no model is loaded yet.

        Raises UsageError if lmms-eval runs in several processes.
        """
        super().__init__()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "gstep_cached answers in one process: start lmms-eval without accelerate or torchrun; on several GPUs "
                "python -m jobs.evaluate or jobs.generate answers the same questions"
            )
        self._arguments = Arguments.read(model_args)
        self._replies = CachedReplies(self._arguments, CleanConsole(stderr=True))

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Return a reply to each request. Raise UsageError, UnknownVideo or RunFailed."""
        ids = make_unique(
            f"{task}/{split}/{doc_id}" for *_, doc_id, task, split in (request.args for request in requests)
        )
        return self._replies.replies(
            [self._make_question(request, question_id) for request, question_id in zip(requests, ids, strict=True)]
        )

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Refuse log-likelihoods: lmms-eval 0.7 turns the number into text before a task sees it."""
        raise UsageError(
            "gstep_cached generates replies only: lmms-eval 0.7 cannot score log-likelihoods of any model; ask the "
            "same questions with python -m jobs.generate --choices loglikelihood"
        )

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Refuse tasks of several rounds: further rounds bring images that no cache holds."""
        raise UsageError("gstep_cached answers one question at a time, and takes no tasks of several rounds")

    def _make_question(self, request: Instance, question_id: str) -> LmmsQuestion:
        """Convert a request of lmms-eval to a question.

        Raises UsageError if the task's output_type is not generate_until, if the document names no video, and for
        settings that are not understood.
        """
        if len(request.args) != 6 or not isinstance(request.args[1], Mapping):
            raise UsageError("gstep_cached answers tasks whose output_type is generate_until, and no other")
        prompt, settings, doc_to_visual, doc_id, task, split = request.args
        doc, folder = self.task_dict[task][split][doc_id], _folder(task, doc_to_visual)
        try:
            key = video_key(doc, self._arguments.video_id, folder)
        except UsageError as error:
            raise UsageError(f"task {task}, document {doc_id}: {error}") from error
        return make_question(question_id, task, doc_id, key, prompt, settings, self._arguments.seed)


def _folder(task: str, doc_to_visual: Any) -> str | None:
    """Return the video folder of an MVBench task, also of one that includes it under another name.

    None for other tasks.
    """
    from lmms_eval.tasks.mvbench.utils import DATA_LIST  # noqa: PLC0415 - looks for HF_HOME as it is imported

    settings = getattr(getattr(doc_to_visual, "__self__", None), "lmms_eval_specific_kwargs", None) or {}
    folder: str | None = DATA_LIST.get(settings.get("sub_task", task.removeprefix("mvbench_")))
    return folder
