"""A process that runs the code of a task of lmms-eval: ``python -m pipeline.evaluate.tasks.child JOB RESULT``.

JOB is a JSON file with the request, and the answer is written as JSON to RESULT. The modules of tasks read HF_HOME as
they are imported, end the process where a file is missing, print, sleep between attempts, and post replies to paid
services. None of that reaches the process that asks: this one has an environment of its own, without keys of services,
and its sockets reach no network, so that a judge is never paid by accident.

No other module of the pipeline imports lmms_eval, besides the model ``gstep_cached`` (``pipeline.evaluate.lmms``).
"""

from __future__ import annotations

import inspect
import json
import random
import re
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gstep.lazy import did_you_mean
from pipeline.evaluate.tasks.numbers import as_number, explain, number_of
from pipeline.evaluate.tasks.survey import check_settings, survey_tasks

_MAX_FIELD = 60  # characters of a field's value that may name a part
_N_PROBED = 5  # documents whose rule is tried before anything is asked
#: Errors of Hugging Face's libraries for what would have to be downloaded.
_NOT_HERE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
_NO_ANSWERS = ("", "None", "-1")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
#: What stands for no reply; the second one for tasks whose aggregation fails on an empty reply.
_NOTHING = ("", "-")
_LETTER = "A"  # a reply that most rules understand
_TAGS = '[["<think>", "</think>"], ["<analysis>", "</analysis>"]]'  # the default of lmms-eval's --reasoning_tags


class Refusal(Exception):  # noqa: N818
    """A task that cannot be asked or scored; the message is for the user."""


class _Network:
    """The network of this process: every attempt of Python code to reach it fails, and is counted."""

    def __init__(self) -> None:
        self.attempts = 0
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise ConnectionError for a connection or a name to look up; local sockets are let through."""
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            if arguments[0].family == socket.AF_UNIX:
                return
        elif event not in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            return
        self.attempts += 1
        raise ConnectionError("the rules of tasks reach no network here")


@contextmanager
def _without_pauses() -> Iterator[None]:
    """Let ``time.sleep`` return at once: rules wait seconds between attempts to reach a judge."""
    sleep, time.sleep = time.sleep, lambda seconds: None
    try:
        yield
    finally:
        time.sleep = sleep


class LoadedTask:
    """A task of lmms-eval with its documents."""

    def __init__(self, request: Mapping[str, Any], network: _Network) -> None:
        """Load the task and its annotations. Raises Refusal."""
        from lmms_eval.tasks import TaskManager  # noqa: PLC0415 - seconds
        from loguru import logger  # noqa: PLC0415

        logger.remove()  # every aggregation writes a line
        self.name, self._network = request["task"], network
        places = list(map(str, _find_folders(self.name)))
        manager = TaskManager(include_path=places, include_defaults=False, model_name=request["model_type"])
        if self.name not in manager.all_subtasks:
            _check_name(self.name, manager := TaskManager(model_name=request["model_type"]))
        rows, config = request.get("rows"), {}
        try:
            with _without_pauses():
                config = manager._get_config(self.name)
                if reason := check_settings(config):
                    raise Refusal(reason)
                overrides = {} if rows is None else _read_from(Path(rows), config)
                self.task = manager.load_task_or_group([{"task": self.name, **overrides}])[self.name]
        except Refusal:
            raise
        except SystemExit as error:
            raise Refusal(f"its code ends the process: {error}") from error
        except Exception as error:
            raise Refusal(_explain_loading(config, error)) from error
        self._aggregations: Mapping[str, Any] = self.task.aggregation()
        self._documents = self.task.eval_docs_no_media
        # Documents with their media: doc_to_visual may need a column that the others lack.
        self._with_media = self.task.test_docs() if self.task.has_test_docs() else self.task.validation_docs()
        if len(self.task._filters) != 1:
            raise Refusal("it reads each reply through several filters")
        self.metric = self._choose_metric(request.get("metric"))

    def _choose_metric(self, name: str | None) -> str:
        """Return the metric of this name, by default the first one of which more is better. Raises Refusal."""
        better = self.task.higher_is_better()
        usable = [metric for metric in self._aggregations if better.get(metric, True)]
        names = f"it has the metrics {', '.join(self._aggregations)}"
        if name is None:
            if not usable:
                raise Refusal(f"of none of its metrics more is better: {names}")
            return usable[0]
        if name.partition("/")[0] not in self._aggregations:
            raise Refusal(f"{names}, not {name}")
        if name.partition("/")[0] not in usable:
            raise Refusal(f"less is better for {name}, and tables here are about losses: {names}")
        return name

    def describe(self) -> dict[str, Any]:
        """Return the documents as questions, and what they have in common. Raises Refusal if only a judge can score."""
        self._refuse_judge()
        documents = [self._ask(number) for number in range(len(self._documents))]
        answered = [self._target(self._document(number)) not in _NO_ANSWERS for number in range(len(documents))]
        if any(answered):  # else the task does not tell its answers
            for number in [number for number, has_answer in enumerate(answered) if not has_answer]:
                documents[number] = {"fault": ["no-answer", "it has no right answer"]}
        return {
            "version": version("lmms_eval"),
            "metric": self.metric,
            "metrics": list(self._aggregations),
            "settings": dict(self.task.config.generation_kwargs or {}),
            "documents": documents,
        }

    def _ask(self, number: int) -> dict[str, Any]:
        """Return a document's prompt, videos and fields, or the ``fault`` for which it cannot be asked."""
        document = self._document(number)
        try:
            prompt = self.task.fewshot_context(document, 0, None, False, False, None)
            visuals = self.task.doc_to_visual(dict(self._with_media[number]))
        except SystemExit as error:  # many tasks exit where a file is missing
            return {"fault": ["missing-video", str(error)]}
        except Exception as error:  # noqa: BLE001 - the code of a task
            kind = "missing-video" if isinstance(error, OSError) or "not exist" in str(error) else "bad-row"
            return {"fault": [kind, f"{type(error).__name__}: {error}"]}
        if not isinstance(prompt, str):
            return {"fault": ["bad-row", f"its prompt is {type(prompt).__name__}, and not text"]}
        shown = list(visuals) if isinstance(visuals, list | tuple) else [visuals]
        if len(shown) != 1 or not isinstance(shown[0], str):
            kinds = ", ".join(sorted({"a path" if isinstance(one, str) else type(one).__name__ for one in shown}))
            return {"fault": ["other-media", f"it shows {len(shown)} ({kinds or 'nothing'}), and not one video file"]}
        return {"prompt": prompt, "video": shown[0], "fields": self._fields(document)}

    def _document(self, number: int) -> dict[str, Any]:
        """Return a fresh copy of a document: rules may write into it."""
        return dict(self._documents[number])

    def _target(self, document: dict[str, Any]) -> str:
        """Return the right answer as text; "" where the task does not tell it."""
        try:
            target = self.task.doc_to_target(document)
        except Exception:  # noqa: BLE001 - the code of a task
            return ""
        return "" if target is None else str(target)

    def _fields(self, document: dict[str, Any]) -> dict[str, str]:
        """Return the short texts and whole numbers of a document that are not its right answer."""
        target = self._target(document)
        values = {name: str(value) for name, value in document.items() if isinstance(value, str | int)}
        return {name: value for name, value in values.items() if value != target and 0 < len(value) <= _MAX_FIELD}

    def _refuse_judge(self) -> None:
        """Raise Refusal if the rule wants the network for every reply that is tried, before hours go into replies."""
        before, tried = self._network.attempts, 0
        for number in range(min(_N_PROBED, len(self._documents))):
            for reply in (self._target(self._document(number)), _LETTER):
                attempts = self._network.attempts
                self._process(number, reply)
                tried += 1
                if self._network.attempts == attempts:
                    return
        if tried and self._network.attempts > before:
            raise Refusal("its rule sends replies to a judge on the network; lmms-eval's own command can ask it")

    def _process(self, number: int, reply: str) -> dict[str, Any] | Exception:
        """Return what the task's rule makes of a reply: metric -> result of any form; or the error that it raised.

        Rules that draw an option where a reply names none draw the same one for every method, and whenever they score.
        """
        random.seed(number)
        np.random.seed(number)
        try:
            with _without_pauses():
                return dict(self.task.process_results(self._document(number), [self._filter(reply)]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the code of a task
            return error if isinstance(error, Exception) else RuntimeError(f"its code ends the process: {error}")

    def _filter(self, reply: str) -> Any:
        """Return a reply as the task's filters and its tags of reasoning leave it, as lmms-eval's evaluator does."""
        from lmms_eval.api.instance import Instance  # noqa: PLC0415
        from lmms_eval.api.reasoning import parse_reasoning_tags_config, strip_reasoning_tags  # noqa: PLC0415

        request = Instance("generate_until", (), 0, {"task": self.name, "doc_id": 0, "repeats": 1})
        request.resps = [reply]
        self.task._filters[0].apply([request], None)
        (text,) = request.filtered_resps.values()
        tags = parse_reasoning_tags_config(_TAGS, getattr(self.task.config, "reasoning_tags", None))
        return strip_reasoning_tags(text, tags) if tags and isinstance(text, str) else text

    def score(self, arms: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Return the task's numbers of each arm, and the number of each document where the main one is their mean.

        Args:
            arms: label -> document number -> reply; every arm has the same documents.
        """
        numbers = [int(number) for number in next(iter(arms.values()))]
        for nothing in _NOTHING:
            results, counts = self._process_arms(arms, numbers, nothing)
            own = {label: self._aggregate_all(of_arm) for label, of_arm in results.items()}
            if not any(isinstance(of_arm.get(self.metric.partition("/")[0]), str) for of_arm in own.values()):
                break
        metric = self._name_part(own.values())
        explained = self._explain(metric, numbers, results)
        return {"metric": metric, "own": own, "nothing": nothing, **counts, **explained}

    def _process_arms(
        self, arms: Mapping[str, Mapping[str, str]], numbers: Sequence[int], nothing: str
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
        """Return what the rule makes of the replies of each arm, with ``nothing`` for empty replies.

        The second value has the number of replies for a judge by arm, ``judged``, and the ``errors`` of the rule.
        """
        results: dict[str, list[dict[str, Any]]] = {}
        judged, errors = dict[str, int](), list[str]()
        for label, replies in arms.items():
            results[label], judged[label] = [], 0
            for number in numbers:
                attempts = self._network.attempts
                result = self._process(number, replies[str(number)] or nothing)
                judged[label] += self._network.attempts > attempts
                if isinstance(result, Exception):
                    errors.append(f"document {number}: {type(result).__name__}: {result}")
                    result = self._process(number, nothing)  # as for a question without an answer
                results[label].append({} if isinstance(result, Exception) else result)
        return results, {"judged": judged, "errors": errors}

    def _name_part(self, own: Iterable[Mapping[str, Any]]) -> str:
        """Return the metric with the part that counts: of one with several numbers the first, if none is named."""
        if self.metric in self._aggregations:
            for of_arm in own:
                names = [name for name in of_arm if name.partition("/")[0] == self.metric]
                if names and self.metric not in names:
                    return names[0]
        return self.metric

    def _aggregate_all(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the task's own numbers by metric; an error is its text.

        Of a metric with several numbers each is METRIC/PART.
        """
        numbers: dict[str, Any] = {}
        for metric in self._aggregations:
            of_metric = [result[metric] for result in results if metric in result]
            if not of_metric:
                continue
            try:
                value = self._aggregate(metric, of_metric)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the code of a task
                numbers[metric] = f"{type(error).__name__}: {error}"
                continue
            parts = _list_parts(value)
            numbers |= {f"{metric}/{part}" if part else metric: as_number(one) for part, one in parts.items()}
        return numbers

    def _aggregate(self, metric: str, results: list[Any]) -> Any:
        """Return what the task's aggregation makes of the results of documents."""
        function = self._aggregations[metric]
        with _without_pauses():
            if "args" not in inspect.signature(function).parameters:
                return function(results)
            # Aggregations that write a file to submit write it below args.output_path: here a folder that is deleted.
            with tempfile.TemporaryDirectory() as folder:
                return function(results, args=Namespace(output_path=folder))

    def _explain(
        self, name: str, numbers: Sequence[int], results: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """Return each document's number where the metric is a mean of them: scores, mean_over, weights, percent.

        Of a metric that is no mean, ``percent`` says whether it makes numbers above 1. It is none either where the
        rule gives some arms alone a result for a document: their numbers are about unlike documents.
        """
        metric, _, part = name.partition("/")
        has_metric = [[metric in result for result in of_one] for of_one in zip(*results.values(), strict=True)]
        places = [i for i, of_one in enumerate(has_metric) if all(of_one)]
        none: dict[str, Any] = {"scores": None, "mean_over": None, "weights": {}, "percent": None}
        if not places:
            return none
        is_paired = all(all(of_one) == any(of_one) for of_one in has_metric)  # else numbers are of unlike documents
        of_documents, keys, fields = [], [], []
        for i in places:
            document, tried = self._document(numbers[i]), []
            target = self._target(document)
            span = " - ".join(_NUMBER.findall(target)[:2])  # as rules about times read it
            for reply in (target, span, "", _LETTER):
                result = self._process(numbers[i], reply)
                tried.append(result.get(metric) if isinstance(result, dict) else None)
            arms = [of_arm[i][metric] for of_arm in results.values()]
            of_documents.append([*arms, *(arms[0] if result is None else result for result in tried)])
            keys.append(json.dumps(document, sort_keys=True, default=str))
            fields.append(self._fields(document))

        def aggregate(of_mixture: list[Any]) -> Any:
            return _list_parts(self._aggregate(metric, of_mixture)).get(part)

        means = explain(of_documents, aggregate, fields, keys, n_methods=len(results)) if is_paired else None
        if means is None:
            own = [number_of(of_reply, aggregate) for of_reply in zip(*of_documents, strict=True)]
            return {**none, "percent": max((number for number in own if number is not None), default=0) > 1}
        counted = [i for i, counts in enumerate(means.counted) if counts]
        scores = {
            label: {str(numbers[places[i]]): means.values[i][place] for i in counted}
            for place, label in enumerate(results)
        }
        weights = dict(means.weights)
        return {"scores": scores, "mean_over": means.mean_over, "weights": weights, "percent": means.percent}


def _list_parts(value: Any) -> dict[str, Any]:
    """Return the numbers that an aggregation made, by name: several by place or key; a single one by the name ""."""
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    if isinstance(value, list | tuple):
        return {str(place): one for place, one in enumerate(value)}
    return {"": value}


def _find_folders(name: str) -> list[Path]:
    """Return the folders of lmms-eval's tasks with a file that mentions a task; an index of all takes three seconds."""
    import lmms_eval.tasks  # noqa: PLC0415 - seconds

    files = Path(lmms_eval.tasks.__file__).parent.rglob("*.yaml")
    return sorted({file.parent for file in files if name.encode() in file.read_bytes()})


def _check_name(name: str, manager: Any) -> None:
    """Raise Refusal if lmms-eval has no task of this name, or a group of tasks has it."""
    if name not in manager.all_tasks:
        near = did_you_mean(name, manager.all_tasks)
        raise Refusal(f"lmms-eval has no such task{near}; --benchmark lmms:list lists those about videos")
    if name in (*manager.all_groups, *manager.all_tags):
        members = manager.task_index[name]["task"]
        if not isinstance(members, list):  # a group with a file of its own
            members = manager._get_config(name).get("task", [])
        names = ", ".join(member for member in members if isinstance(member, str))
        raise Refusal(f"it is a group: give each of its tasks an --out, and lay them out with --results ({names})")


def _read_from(rows: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a task's config that make it read a local file instead of a data set of the hub."""
    split = config.get("test_split") or config.get("validation_split")
    kind = "parquet" if rows.suffix == ".parquet" else "json"
    return {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": {split: str(rows)}}}


def _explain_loading(config: Mapping[str, Any], error: BaseException) -> str:
    """Return why a task could not be loaded, as far as the errors of its attempts tell."""
    attempt = getattr(error, "last_attempt", None)
    cause = attempt.exception() if attempt is not None else error
    if type(cause).__name__ == "DatasetGenerationError":  # says nothing by itself
        cause = cause.__cause__ or cause
    if isinstance(cause, ConnectionError) or type(cause).__name__ in _NOT_HERE:
        return f"its annotations, the data set {config.get('dataset_path')} of the Hugging Face hub, are not here"
    return f"its annotations cannot be loaded: {type(cause).__name__}: {cause}"


def _list_tasks() -> dict[str, Any]:
    """Return the tasks about videos."""
    from lmms_eval.tasks import TaskManager  # noqa: PLC0415 - seconds

    with _without_pauses():
        return {"tasks": [asdict(task) for task in survey_tasks(TaskManager())]}


class _LaterModule(ModuleType):
    """A package that is imported when a name of it is used: lmms-eval imports some that take seconds, and few need."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of a module
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def main(job: str, result: str) -> None:
    """Do the job in the file ``job``, and write its answer, or the ``refusal``, to the file ``result``."""
    request, network = json.loads(Path(job).read_text()), _Network()
    sys.modules["evaluate"] = _LaterModule("evaluate")  # it imports the pipelines of transformers
    try:
        if "task" not in request:
            answer = _list_tasks()
        else:
            task = LoadedTask(request, network)
            answer = task.score(request["arms"]) if "arms" in request else task.describe()
    except Refusal as refusal:
        answer = {"refusal": str(refusal)}
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
