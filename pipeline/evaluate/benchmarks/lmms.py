"""Tasks of lmms-eval as benchmarks: ``--benchmark lmms:TASK`` or ``lmms:TASK@METRIC``.

A document of the task is a question, and its id is the document's number. Videos are named by their paths below
HF_HOME, which ``--data`` names. The task's own code gives prompts and settings, and scores the replies; it runs in a
process of its own (:mod:`pipeline.evaluate.tasks`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pipeline.console import Say
from pipeline.errors import NotResults, UsageError
from pipeline.evaluate.benchmarks.annotations import FaultKind, NotAskable, VideoFolder, data_folder
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS, Benchmark, OwnScores, Split
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions, QuestionCollector
from pipeline.evaluate.protocols import LMMS_EVAL_0_7, QUESTIONS, PromptTemplate, Protocol
from pipeline.evaluate.tasks.numbers import list_parted_fields
from pipeline.evaluate.tasks.process import VERSION, DescribedTask, TaskDocument, TaskProcess
from pipeline.evaluate.tasks.questions import cut_reply, read_settings
from pipeline.generate.questions import REASONING
from pipeline.storage.stores import Store

PREFIX = "lmms:"
_MAX_SPLITS = 6


@dataclass(frozen=True, kw_only=True)
class LmmsTask(Benchmark):
    """A task of lmms-eval.

    Attributes:
        shown_metric: the metric whose number the tables show; None: the task's first one.
        process: runs the task's code; None until it is opened.
        task: its documents and settings; None until it is opened.
        own: the numbers that results hold, as of ``OWN_NUMBERS``; {} for none.
    """

    shown_metric: str | None = None
    process: TaskProcess | None = None
    task: DescribedTask | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def task_name(self) -> str:
        """The name of the task in lmms-eval."""
        return self.name.removeprefix(PREFIX)

    @property
    def scores_questions(self) -> bool:
        """True if the task's number is a mean over questions, so that each of them has a score."""
        return self.own.get("mean_over") is not None

    def open(self, model_type: str, data: Path | str | None, say: Say) -> LmmsTask:
        """Load the task in a process of its own. ``data`` is the folder HF_HOME, with annotations and videos.

        Raises UsageError without lmms-eval, for an unknown task, and for a task that cannot be asked or scored here.
        """
        remedy = "it must be HF_HOME, the folder below which lmms-eval keeps its videos"
        if data is None:
            raise UsageError(f"--data must name the folder of {self.name}: {remedy}")
        home = data_folder(data, remedy).absolute()
        process = TaskProcess(self.task_name, self.shown_metric, model_type, home, say)
        task = process.describe()
        decoding, _ = read_settings(self.task_name, task.settings)
        protocol = Protocol(
            name=f"lmms-eval-{task.version}",
            prompt=PromptTemplate("{question}"),
            models=LMMS_EVAL_0_7,
            decoding=decoding,
            parser=self.name,
            reasoning=REASONING,
        )
        askable = [document for document in task.documents if document.fault is None]
        # A table by a field that every question repeats would be about wordings.
        parts = _list_parts(task.documents)
        names = [name for name in parts if not all(one.fields[name] in one.prompt for one in askable)]
        splits = tuple(map(_make_split, names[:_MAX_SPLITS]))
        return replace(self, protocols=(protocol,), splits=splits, process=process, task=task)

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> LoadedQuestions:
        """Return the documents as questions about videos below ``data``, and the faults of the other documents.

        Links may lead into the ``roots``. Raises UsageError if no question is left.
        """
        assert self.task is not None  # it was opened
        home = Path(str(data)).absolute()
        videos, collector, parts = VideoFolder(home, roots), QuestionCollector(), _list_parts(self.task.documents)
        for number, document in enumerate(self.task.documents):
            where = f"document {number}"
            try:
                path = _find_video(document, home, videos)
                fields = {name: document.fields[name] for name in parts}
                item = Item(
                    question_id=str(number),
                    video_ids=(path,),
                    path=path,
                    question=document.prompt,
                    expected=None,
                    splits=fields,
                    cluster=path,
                )
                collector.keep(where, item)
            except NotAskable as fault:
                collector.leave_out(where, str(number), fault)
        return collector.finish(str(home), f"it must have the annotations and videos of {self.name}")

    def score_replies(
        self, items: Sequence[Item], replies: Mapping[str, Mapping[str, str]], protocol: Protocol
    ) -> OwnScores:
        """Score the replies by the task's own rules; a question that failed is an empty reply to them.

        Documents that the task's number leaves out have no score. Raises RunFailed if the task's code ends.
        """
        assert self.process is not None and self.task is not None  # it was opened
        _, stops = read_settings(self.task_name, self.task.settings)
        arms = {
            label: {item.question_id: cut_reply(of_arm.get(item.question_id, ""), stops) for item in items}
            for label, of_arm in replies.items()
        }
        answer = self.process.score(arms)
        mean_over = answer["mean_over"]
        # A field that has few values among the questions of a run may have too many among all documents to be a split.
        if mean_over not in (None, QUESTIONS) and not all(mean_over in item.splits for item in items):
            answer |= {"scores": None, "mean_over": None, "weights": {}}
        scores, own = answer["scores"], answer["own"]
        numbers: dict[str, Any] = {
            "lmms_eval": self.task.version,
            "task": self.task_name,
            **{name: answer[name] for name in ("metric", "mean_over", "weights", "percent")},
            "splits": [split.name for split in self.splits],
            "numbers": own,
        }
        notes = list(_describe_scoring(answer, numbers))
        failed = [
            question_id
            for label, of_arm in (scores or {}).items()
            for question_id, score in of_arm.items()
            if score > 0 and question_id not in replies[label]
        ]
        if failed:
            notes.append(
                f"the task's rule gives points to {len(failed)} failed answers, which it reads as empty replies; they "
                f"count as wrong in tables, so that numbers in {OWN_NUMBERS} are higher"
            )
        return OwnScores(scores=scores, numbers=numbers, notes=notes)

    def stored_in(self, store: Store) -> LmmsTask:
        """Return the task as its results show it: the splits, the parts of its number and their weights.

        Raises NotResults for a damaged file. Results that were not scored yet have none.
        """
        if not store.exists(OWN_NUMBERS):
            return self
        try:
            own: dict[str, Any] = json.loads(store.read(OWN_NUMBERS))
            names, metric, weights = list(map(str, own["splits"])), str(own["metric"]), dict(own["weights"])
            mean_over = own["mean_over"]
            own |= {"numbers": dict(own["numbers"]), "percent": own["percent"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotResults(f"{store}: {OWN_NUMBERS} is damaged ({error!r}): run its jobs.evaluate again") from error
        first = [] if mean_over in (None, QUESTIONS) else [mean_over]
        splits = tuple(map(_make_split, dict.fromkeys([*first, *names])))
        notes = () if mean_over is not None else (_explain_number(own),)
        return replace(
            self,
            splits=splits,
            weights=weights,
            made_of={"Metric": metric},
            notes=notes,
            own=own,
        )

    def metric(self, stored: str) -> str:
        """Return what the task's number is a mean over, as its results say."""
        return str(self.own.get("mean_over") or stored)

    def arm_share(self, label: str) -> float | None:
        """Return the task's own number of an arm as a share; None if there is none from 0 to 1."""
        number = self.own.get("numbers", {}).get(label, {}).get(self.own.get("metric"))
        if not isinstance(number, int | float):
            return None
        share = number / 100 if self.own["percent"] else float(number)
        return share if 0 <= share <= 1 else None


def lmms_benchmark(name: str) -> Benchmark:
    """Return the benchmark ``lmms:TASK`` or ``lmms:TASK@METRIC``; nothing is read yet."""
    task, _, metric = name.removeprefix(PREFIX).partition("@")
    protocol = Protocol(name=f"lmms-eval-{VERSION}", prompt=PromptTemplate("{question}"), parser=f"{PREFIX}{task}")
    return LmmsTask(name=f"{PREFIX}{task}", title=task, protocols=(protocol,), shown_metric=metric or None)


def _find_video(document: TaskDocument, home: Path, videos: VideoFolder) -> str:
    """Return the path of a document's video below HF_HOME. Raises NotAskable."""
    if document.fault is not None:
        kind, message = document.fault
        raise NotAskable(cast(FaultKind, kind), message)
    path = os.path.relpath(home / document.video, home)  # links stay as they are: find judges them
    return videos.find([path], [PurePosixPath(path).as_posix()])


def _list_parts(documents: Sequence[TaskDocument]) -> list[str]:
    """List the fields over whose values a task's number may be a mean, of the documents that can be asked."""
    return list_parted_fields([document.fields for document in documents if document.fault is None])


def _make_split(name: str) -> Split:
    """Return the split by a field of documents."""
    return Split(name, name.replace("_", " ").capitalize())


def _describe_scoring(answer: dict[str, Any], numbers: dict[str, Any]) -> Iterator[str]:
    """Yield lines about what a user should know of the scores: judges, failing rules, documents that do not count."""
    if n_judged := sum(answer["judged"].values()):
        of = ", ".join(f"{name} {n}" for name, n in answer["judged"].items() if n)
        yield (
            f"{n_judged} replies were for a judge on the network, which is not asked: the task's rule scored them as "
            f"if it had not answered ({of})"
        )
    if answer["nothing"]:
        yield f"the task makes no number of empty replies, which stand as {answer['nothing']!r}"
    if errors := answer["errors"]:
        yield f"the task's rule failed on {len(errors)} replies, which count as empty replies, e.g. {errors[0]}"
    if lacking := [label for label, of_arm in numbers["numbers"].items() if numbers["metric"] not in of_arm]:
        known = ", ".join(numbers["numbers"][lacking[0]])
        yield f"the task made no number {numbers['metric']} of {', '.join(lacking)}: it has {known or 'none'}"
    failed: dict[str, dict[str, None]] = {}  # an error -> the metrics that it ended
    for of_arm in numbers["numbers"].values():
        for metric, number in of_arm.items():
            if isinstance(number, str):
                failed.setdefault(number, {})[metric] = None
    for error, metrics in failed.items():
        yield f"the task made no number {', '.join(metrics)}: {error}"
    if numbers["mean_over"] is None:
        yield f"{_explain_number(numbers)} {OWN_NUMBERS} has all numbers."


def _explain_number(own: dict[str, Any]) -> str:
    """Return a sentence about a number that is no mean over questions."""
    if not own["numbers"]:
        return f"{own['metric']} was about removed questions too: run jobs.evaluate again for a number without them."
    return f"{own['metric']} is the task's own number of a whole method: no mean over questions, and without interval."
