"""Tasks of lmms-eval as benchmarks: ``--benchmark lmms:TASK`` or ``lmms:TASK@METRIC``.

The task's own code makes the prompts and settings and scores the replies, in child processes
(:mod:`pipeline.evaluate.tasks`).
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
from pipeline.evaluate.benchmarks.annotations import FaultKind, NotAskable, VideoFolder, resolve_data_folder
from pipeline.evaluate.benchmarks.base import OWN_NUMBERS, Benchmark, BenchmarkScores, Split
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
    """A task of lmms-eval as a benchmark.

    Attributes:
        shown_metric: the metric that tables show; None: the first one for which more is better.
        process: runs the task's code; None before ``open``.
        task: its documents and settings; None before ``open``.
        own: the content of ``OWN_NUMBERS`` in the results; {} before ``load_stored_settings``.
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
        """True if the results say that the task's number is a mean over questions."""
        return self.own.get("mean_over") is not None

    def open(self, model_type: str, data: Path | str | None, say: Say) -> LmmsTask:
        """Describe the task in a child process; return the benchmark with protocol, splits, process and documents.

        The splits are the first six of ``list_parted_fields``, not counting fields whose values every prompt contains.

        Args:
            data: HF_HOME, the folder with annotations and videos.

        Raises:
            UsageError: ``data`` is None or not a folder, lmms-eval is not installed, the task is unknown or cannot be
                asked or scored here, or its decoding options are not supported.
            RunFailed: the child process failed.
        """
        remedy = "it must be HF_HOME, the folder below which lmms-eval keeps its videos"
        if data is None:
            raise UsageError(f"--data must name the folder of {self.name}: {remedy}")
        home = resolve_data_folder(data, remedy).absolute()
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
        # A table by a field that every prompt contains would compare wordings.
        parts = _list_split_fields(task.documents)
        names = [name for name in parts if not all(document.fields[name] in document.prompt for document in askable)]
        splits = tuple(map(_make_split, names[:_MAX_SPLITS]))
        return replace(self, protocols=(protocol,), splits=splits, process=process, task=task)

    def load(self, data: Path | str | None, roots: Sequence[Path] = ()) -> LoadedQuestions:
        """Return the documents as questions about videos below ``data``, and the faults of others. Needs ``open``.

        The id of a question is the document's number, its cluster is the video, and it has no options and no right
        answer.

        Raises:
            UsageError: no question is left.
        """
        assert self.task is not None  # it was opened
        home = Path(str(data)).absolute()
        videos = VideoFolder(home, roots)
        collector = QuestionCollector()
        parts = _list_split_fields(self.task.documents)
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
    ) -> BenchmarkScores:
        """Score the replies by the task's own rules, in a child process; failed questions count as empty replies there.

        Replies are cut at the task's stop texts first. Documents that the task's number leaves out get no score. There
        are no scores at all if the number is not a mean over questions, or is one over a field that not all of
        ``items`` have.

        Raises:
            RunFailed: the child process failed, or the task can no longer be loaded.
        """
        assert self.process is not None and self.task is not None  # it was opened
        _, stops = read_settings(self.task_name, self.task.settings)
        arms = {
            label: {item.question_id: cut_reply(of_arm.get(item.question_id, ""), stops) for item in items}
            for label, of_arm in replies.items()
        }
        answer = self.process.score(arms)
        mean_over = answer["mean_over"]
        # A field with few values among the questions of a run may have too many among all documents to be a split.
        if mean_over not in (None, QUESTIONS) and not all(mean_over in item.splits for item in items):
            answer |= {"scores": None, "mean_over": None, "weights": {}}
        scores = answer["scores"]
        own = answer["own"]
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
        return BenchmarkScores(scores=scores, numbers=numbers, notes=notes)

    def load_stored_settings(self, store: Store) -> LmmsTask:
        """Return the task with the splits, weights, metric, notes and numbers of the results in a store.

        The split over which the number is a mean comes first. Results that were not scored yet return the task itself.

        Raises:
            NotResults: the file of the numbers is damaged.
        """
        if not store.exists(OWN_NUMBERS):
            return self
        try:
            own: dict[str, Any] = json.loads(store.read(OWN_NUMBERS))
            names = list(map(str, own["splits"]))
            metric = str(own["metric"])
            weights = dict(own["weights"])
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
        """Return what the task's number is a mean over according to its results; ``stored`` if it is not a mean."""
        return str(self.own.get("mean_over") or stored)

    def get_arm_share(self, label: str) -> float | None:
        """Return the task's own number of an arm as a share; None if there is none, or it is outside [0, 1]."""
        number = self.own.get("numbers", {}).get(label, {}).get(self.own.get("metric"))
        if not isinstance(number, int | float):
            return None
        share = number / 100 if self.own["percent"] else float(number)
        return share if 0 <= share <= 1 else None


def make_lmms_benchmark(name: str) -> Benchmark:
    """Return the benchmark ``lmms:TASK`` or ``lmms:TASK@METRIC``; nothing is read or checked yet."""
    task, _, metric = name.removeprefix(PREFIX).partition("@")
    protocol = Protocol(name=f"lmms-eval-{VERSION}", prompt=PromptTemplate("{question}"), parser=f"{PREFIX}{task}")
    return LmmsTask(name=f"{PREFIX}{task}", title=task, protocols=(protocol,), shown_metric=metric or None)


def _find_video(document: TaskDocument, home: Path, videos: VideoFolder) -> str:
    """Return the path of a document's video below HF_HOME; raise NotAskable if the document has a fault or no video."""
    if document.fault is not None:
        kind, message = document.fault
        raise NotAskable(cast(FaultKind, kind), message)
    path = os.path.relpath(home / document.video, home)  # does not resolve links, which find checks
    return videos.find([path], [PurePosixPath(path).as_posix()])


def _list_split_fields(documents: Sequence[TaskDocument]) -> list[str]:
    """List the fields over whose values the task's number may be a mean; documents with faults do not count."""
    return list_parted_fields([document.fields for document in documents if document.fault is None])


def _make_split(name: str) -> Split:
    """Return a split by a field, whose title is the field's name in words."""
    return Split(name, name.replace("_", " ").capitalize())


def _describe_scoring(answer: dict[str, Any], numbers: dict[str, Any]) -> Iterator[str]:
    """Yield lines about judges, replaced empty replies, failed rules, missing numbers, and a number that is no mean."""
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
    failed: dict[str, dict[str, None]] = {}  # error -> the metrics without a number because of it
    for of_arm in numbers["numbers"].values():
        for metric, number in of_arm.items():
            if isinstance(number, str):
                failed.setdefault(number, {})[metric] = None
    for error, metrics in failed.items():
        yield f"the task made no number {', '.join(metrics)}: {error}"
    if numbers["mean_over"] is None:
        yield f"{_explain_number(numbers)} {OWN_NUMBERS} has all numbers."


def _explain_number(own: dict[str, Any]) -> str:
    """Return a sentence about a number that is not a mean over questions, or that was emptied by jobs.remove."""
    if not own["numbers"]:
        return f"{own['metric']} was about removed questions too: run jobs.evaluate again for a number without them."
    return f"{own['metric']} is the task's own number of a whole method: no mean over questions, and without interval."
