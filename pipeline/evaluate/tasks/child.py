"""The process that runs a task's code: ``python -m pipeline.evaluate.tasks.child JOB RESULT``.

JOB is a JSON file with the request; the answer is written to RESULT as JSON. Code of tasks may end the process, print,
sleep, and send replies to paid services. Here, environment variables with keys of services are withheld, and Python
code reaches no network.
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

from gstep.lazy import format_suggestion
from pipeline.evaluate.tasks.numbers import as_number, compute_number, find_explanation
from pipeline.evaluate.tasks.survey import check_settings, survey_tasks

_MAX_FIELD = 60  # characters of a value by which a task may group its documents
_N_PROBED = 5  # documents on which the rule is tried before anything is asked
#: Errors of Hugging Face's libraries for files that would have to be downloaded.
_NOT_HERE = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
_NO_ANSWERS = ("", "None", "-1")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
#: Texts that stand for no reply; the second one is for tasks whose aggregation fails on empty replies.
_NOTHING = ("", "-")
_LETTER = "A"  # a reply that most rules understand
_TAGS = '[["<think>", "</think>"], ["<analysis>", "</analysis>"]]'  # the default of lmms-eval's --reasoning_tags


class Refusal(Exception):  # noqa: N818
    """The task cannot be asked or scored; the message is for the user."""


class _Network:
    """Blocks the network for Python code in this process, for good, from its creation on; counts blocked attempts."""

    def __init__(self) -> None:
        self.attempts = 0
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count and block an audit event that connects, sends or looks up a name; Unix sockets and other events pass.

        Raises:
            ConnectionError: the event is blocked.
        """
        if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
            if arguments[0].family == socket.AF_UNIX:
                return
        elif event not in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
            return
        self.attempts += 1
        raise ConnectionError("the rules of tasks reach no network here")


@contextmanager
def _without_pauses() -> Iterator[None]:
    """Make ``time.sleep`` return at once inside this context: rules wait seconds between attempts to reach a judge."""
    sleep, time.sleep = time.sleep, lambda seconds: None
    try:
        yield
    finally:
        time.sleep = sleep


class LoadedTask:
    """A task of lmms-eval with its documents, loaded for one request.

    Attributes:
        metric: the metric that tables show, METRIC or METRIC/PART.
    """

    def __init__(self, request: Mapping[str, Any], network: _Network) -> None:
        """Import the task's code, load its annotations, and remove all handlers of loguru.

        Args:
            request: ``task``, ``model_type``, and optionally ``metric`` and ``rows``, a local file in place of the
                annotations.

        Raises:
            Refusal: the task is unknown or a group or tag, does not ask one prompt with one reply per document, has
                several filters, lacks the metric or counts less of it as better, or its code exits or cannot load its
                annotations.
        """
        from lmms_eval.tasks import TaskManager  # noqa: PLC0415 - seconds
        from loguru import logger  # noqa: PLC0415

        logger.remove()  # every aggregation writes a line
        self.name = request["task"]
        self._network = network
        places = list(map(str, _find_folders(self.name)))
        manager = TaskManager(include_path=places, include_defaults=False, model_name=request["model_type"])
        if self.name not in manager.all_subtasks:
            _check_name(self.name, manager := TaskManager(model_name=request["model_type"]))
        rows = request.get("rows")
        config = {}
        try:
            with _without_pauses():
                config = manager._get_config(self.name)
                if reason := check_settings(config):
                    raise Refusal(reason)
                overrides = {} if rows is None else _make_local_data_config(Path(rows), config)
                self.task = manager.load_task_or_group([{"task": self.name, **overrides}])[self.name]
        except Refusal:
            raise
        except SystemExit as error:
            raise Refusal(f"its code ends the process: {error}") from error
        except Exception as error:
            raise Refusal(_explain_loading(config, error)) from error
        self._aggregations: Mapping[str, Any] = self.task.aggregation()
        self._documents = self.task.eval_docs_no_media
        # Documents with their media, because doc_to_visual may need a column that the others lack.
        self._with_media = self.task.test_docs() if self.task.has_test_docs() else self.task.validation_docs()
        if len(self.task._filters) != 1:
            raise Refusal("it reads each reply through several filters")
        self.metric = self._choose_metric(request.get("metric"))

    def _choose_metric(self, name: str | None) -> str:
        """Return ``name``, METRIC or METRIC/PART; None chooses the first metric for which more is better.

        PART is not checked. More is better for metrics about which the task says nothing.

        Raises:
            Refusal: the task has no such metric, or less is better for it (with None, for all).
        """
        better = self.task.higher_is_better()
        usable = [metric for metric in self._aggregations if better.get(metric, True)]
        names = f"it has the metrics {', '.join(self._aggregations)}"
        if name is None:
            if not usable:
                raise Refusal(f"less is better for all of its metrics: {names}")
            return usable[0]
        if name.partition("/")[0] not in self._aggregations:
            raise Refusal(f"{names}, not {name}")
        if name.partition("/")[0] not in usable:
            raise Refusal(f"less is better for {name}, and tables here are about losses: {names}")
        return name

    def describe(self) -> dict[str, Any]:
        """Return the fields of ``DescribedTask``, with documents as ``_ask`` returns them.

        If any document has a right answer, those without one (empty, None or -1) get only the fault "no-answer".

        Raises:
            Refusal: the rule sends every reply that is tried to a judge.
        """
        self._refuse_judge()
        documents = [self._ask(number) for number in range(len(self._documents))]
        answered = [
            self._get_right_answer(self._copy_document(number)) not in _NO_ANSWERS for number in range(len(documents))
        ]
        if any(answered):  # otherwise the task does not publish its answers
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
        """Return a document's ``prompt``, ``video`` and ``fields``, or the ``fault`` (kind, message) that prevents it.

        The kinds are "missing-video" (the task's code exits, or raises an OSError or an error with "not exist" in its
        text), "other-media" (it does not show exactly one path) and "bad-row" (another error, or a prompt that is not
        text).
        """
        document = self._copy_document(number)
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
            kinds = ", ".join(sorted({"a path" if isinstance(item, str) else type(item).__name__ for item in shown}))
            return {"fault": ["other-media", f"it shows {len(shown)} ({kinds or 'nothing'}), and not one video file"]}
        return {"prompt": prompt, "video": shown[0], "fields": self._fields(document)}

    def _copy_document(self, number: int) -> dict[str, Any]:
        """Return a shallow copy of a document, because rules may write into it."""
        return dict(self._documents[number])

    def _get_right_answer(self, document: dict[str, Any]) -> str:
        """Return a document's right answer as text; "" if the task has none or its code fails."""
        try:
            target = self.task.doc_to_target(document)
        except Exception:  # noqa: BLE001 - the code of a task
            return ""
        return "" if target is None else str(target)

    def _fields(self, document: dict[str, Any]) -> dict[str, str]:
        """Return a document's texts of 1 to 60 characters and whole numbers as texts, without the right answer."""
        target = self._get_right_answer(document)
        values = {name: str(value) for name, value in document.items() if isinstance(value, str | int)}
        return {name: value for name, value in values.items() if value != target and 0 < len(value) <= _MAX_FIELD}

    def _refuse_judge(self) -> None:
        """Raise Refusal if the rule needs the network for every reply that is tried.

        The right answer and "A" are tried on up to five documents. The first reply that needs no network ends the
        check, even if the rule fails on it.
        """
        before = self._network.attempts
        tried = 0
        for number in range(min(_N_PROBED, len(self._documents))):
            for reply in (self._get_right_answer(self._copy_document(number)), _LETTER):
                attempts = self._network.attempts
                self._process(number, reply)
                tried += 1
                if self._network.attempts == attempts:
                    return
        if tried and self._network.attempts > before:
            raise Refusal("its rule sends replies to a judge on the network; lmms-eval's own command can ask it")

    def _process(self, number: int, reply: str) -> dict[str, Any] | Exception:
        """Filter a reply and return the rule's results, metric -> result of any form, or the error that was raised.

        A SystemExit becomes a RuntimeError. The document's number seeds the random generators of Python and NumPy, so
        that rules that guess an option guess the same one every time.
        """
        random.seed(number)
        np.random.seed(number)
        try:
            with _without_pauses():
                return dict(self.task.process_results(self._copy_document(number), [self._filter_reply(reply)]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the code of a task
            return error if isinstance(error, Exception) else RuntimeError(f"its code ends the process: {error}")

    def _filter_reply(self, reply: str) -> Any:
        """Apply the task's filter to a reply and, if the result is text, remove its reasoning, as lmms-eval does."""
        from lmms_eval.api.instance import Instance  # noqa: PLC0415
        from lmms_eval.api.reasoning import parse_reasoning_tags_config, strip_reasoning_tags  # noqa: PLC0415

        request = Instance("generate_until", (), 0, {"task": self.name, "doc_id": 0, "repeats": 1})
        request.resps = [reply]
        self.task._filters[0].apply([request], None)
        (text,) = request.filtered_resps.values()
        tags = parse_reasoning_tags_config(_TAGS, getattr(self.task.config, "reasoning_tags", None))
        return strip_reasoning_tags(text, tags) if tags and isinstance(text, str) else text

    def score(self, arms: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Score the replies of each arm by the task's rules and aggregations.

        Args:
            arms: label -> document number as text -> reply. All arms have the same documents; there is at least one of
                each.

        Returns:
            - ``metric``: METRIC or METRIC/PART, whose number tables show.
            - ``own``: label -> metric -> number, None or the text of an error.
            - ``nothing``: what stood for empty replies: "", or "-" if the metric cannot be aggregated with "".
            - ``judged``: label -> number of replies that the rule tried to send to a judge.
            - ``errors``: lines about replies on which the rule failed; they are scored as empty replies.
            - ``scores``, ``mean_over``, ``weights``, ``percent``: from ``_explain``.
        """
        numbers = [int(number) for number in next(iter(arms.values()))]
        for nothing in _NOTHING:
            results, counts = self._process_arms(arms, numbers, nothing)
            own = {label: self._aggregate_all(of_arm) for label, of_arm in results.items()}
            if not any(isinstance(of_arm.get(self.metric.partition("/")[0]), str) for of_arm in own.values()):
                break
        metric = self._name_shown_metric(own.values())
        explained = self._explain(metric, numbers, results)
        return {"metric": metric, "own": own, "nothing": nothing, **counts, **explained}

    def _process_arms(
        self, arms: Mapping[str, Mapping[str, str]], numbers: Sequence[int], nothing: str
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
        """Apply the task's rule to all replies; return (label -> results in the order of ``numbers``, counts).

        The counts are "judged": label -> number of replies that the rule tried to send over the network, and "errors":
        a line per reply on which the rule failed. ``nothing`` stands for empty replies, and for replies on which the
        rule fails. A result is {} if it fails again.
        """
        results: dict[str, list[dict[str, Any]]] = {}
        judged = dict[str, int]()
        errors = list[str]()
        for label, replies in arms.items():
            results[label] = []
            judged[label] = 0
            for number in numbers:
                attempts = self._network.attempts
                result = self._process(number, replies[str(number)] or nothing)
                judged[label] += self._network.attempts > attempts
                if isinstance(result, Exception):
                    errors.append(f"document {number}: {type(result).__name__}: {result}")
                    result = self._process(number, nothing)  # as for a question without an answer
                results[label].append({} if isinstance(result, Exception) else result)
        return results, {"judged": judged, "errors": errors}

    def _name_shown_metric(self, own: Iterable[Mapping[str, Any]]) -> str:
        """Return the metric that tables show, as METRIC/PART if it has several numbers.

        If the user named no part, it is the first part of the first arm that has any.
        """
        if self.metric in self._aggregations:
            for of_arm in own:
                names = [name for name in of_arm if name.partition("/")[0] == self.metric]
                if names and self.metric not in names:
                    return names[0]
        return self.metric

    def _aggregate_all(self, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the task's numbers of an arm by METRIC, or by METRIC/PART for metrics with several numbers.

        Values that are not finite numbers become None, and a failed aggregation gives the text of its error. Metrics
        without any result are left out.
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
            parts = _list_named_numbers(value)
            numbers |= {f"{metric}/{part}" if part else metric: as_number(number) for part, number in parts.items()}
        return numbers

    def _aggregate(self, metric: str, results: list[Any]) -> Any:
        """Return what the task's aggregation makes of results; its errors pass.

        Pauses (``time.sleep``) are skipped. An aggregation with a parameter ``args`` gets one whose ``output_path`` is
        a temporary folder, which is deleted with all that is written to it.
        """
        function = self._aggregations[metric]
        with _without_pauses():
            if "args" not in inspect.signature(function).parameters:
                return function(results)
            # Some aggregations write a file for a submission below args.output_path: here a folder that is deleted.
            with tempfile.TemporaryDirectory() as folder:
                return function(results, args=Namespace(output_path=folder))

    def _explain(
        self, name: str, numbers: Sequence[int], results: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """Return the scores of documents if the metric is a mean of them, with the keys below.

        To test this, each document is also scored with its right answer, the first two numbers in it as "X - Y", an
        empty reply and "A". A metric is not a mean if only some arms have a result for a document.

        Args:
            name: METRIC or METRIC/PART.
            results: label -> results in the order of ``numbers``.

        Returns:
            - ``scores``: label -> document number as text -> score in [0, 1], of documents that count; None if the
              metric is not a mean.
            - ``mean_over``: "questions" or a field; None if the metric is not a mean.
            - ``weights``: weights of the field's values; {} without a field.
            - ``percent``: whether the number is a percentage. If the metric is not a mean: whether any number, of an
              arm or of a test reply, is above 1 (None if no document has a result in all arms).
        """
        metric, _, part = name.partition("/")
        has_metric = [[metric in result for result in of_one] for of_one in zip(*results.values(), strict=True)]
        places = [i for i, of_one in enumerate(has_metric) if all(of_one)]
        none: dict[str, Any] = {"scores": None, "mean_over": None, "weights": {}, "percent": None}
        if not places:
            return none
        is_paired = all(all(of_one) == any(of_one) for of_one in has_metric)
        of_documents = []
        keys = []
        fields = []
        for i in places:
            document = self._copy_document(numbers[i])
            tried = []
            target = self._get_right_answer(document)
            span = " - ".join(_NUMBER.findall(target)[:2])  # the form that rules about times read
            for reply in (target, span, "", _LETTER):
                result = self._process(numbers[i], reply)
                tried.append(result.get(metric) if isinstance(result, dict) else None)
            arms = [of_arm[i][metric] for of_arm in results.values()]
            of_documents.append([*arms, *(arms[0] if result is None else result for result in tried)])
            keys.append(json.dumps(document, sort_keys=True, default=str))
            fields.append(self._fields(document))

        def aggregate(of_mixture: list[Any]) -> Any:
            return _list_named_numbers(self._aggregate(metric, of_mixture)).get(part)

        means = find_explanation(of_documents, aggregate, fields, keys, n_methods=len(results)) if is_paired else None
        if means is None:
            own = [compute_number(of_reply, aggregate) for of_reply in zip(*of_documents, strict=True)]
            return {**none, "percent": max((number for number in own if number is not None), default=0) > 1}
        counted = [i for i, counts in enumerate(means.counted) if counts]
        scores = {
            label: {str(numbers[places[i]]): means.values[i][place] for i in counted}
            for place, label in enumerate(results)
        }
        weights = dict(means.weights)
        return {"scores": scores, "mean_over": means.mean_over, "weights": weights, "percent": means.percent}


def _list_named_numbers(value: Any) -> dict[str, Any]:
    """Return the numbers of an aggregation by name: a mapping's by key, a list's by index, a single one by ""."""
    if isinstance(value, Mapping):
        return {str(name): number for name, number in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): number for index, number in enumerate(value)}
    return {"": value}


def _find_folders(name: str) -> list[Path]:
    """Return the folders of YAML files that contain a task's name."""
    import lmms_eval.tasks  # noqa: PLC0415 - seconds

    files = Path(lmms_eval.tasks.__file__).parent.rglob("*.yaml")
    return sorted({file.parent for file in files if name.encode() in file.read_bytes()})


def _check_name(name: str, manager: Any) -> None:
    """Raise Refusal if lmms-eval has no task of this name, or if it is the name of a group or tag."""
    if name not in manager.all_tasks:
        near = format_suggestion(name, manager.all_tasks)
        raise Refusal(f"lmms-eval has no such task{near}; --benchmark lmms:list lists those about videos")
    if name in (*manager.all_groups, *manager.all_tags):
        members = manager.task_index[name]["task"]
        if not isinstance(members, list):  # a group with its own file
            members = manager._get_config(name).get("task", [])
        names = ", ".join(member for member in members if isinstance(member, str))
        raise Refusal(f"it is a group: give each of its tasks an --out, and lay them out with --results ({names})")


def _make_local_data_config(rows: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of a task's config that make it read a local .parquet or JSON file as its only split."""
    split = config.get("test_split") or config.get("validation_split")
    kind = "parquet" if rows.suffix == ".parquet" else "json"
    return {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": {split: str(rows)}}}


def _explain_loading(config: Mapping[str, Any], error: BaseException) -> str:
    """Return why a task could not be loaded: its data set is not here, or another error, which is quoted.

    The former is a ConnectionError, or LocalEntryNotFoundError or OfflineModeIsEnabled of Hugging Face's libraries.
    Errors of retries (with ``last_attempt``) and DatasetGenerationError are replaced by their cause.
    """
    attempt = getattr(error, "last_attempt", None)
    cause = attempt.exception() if attempt is not None else error
    if type(cause).__name__ == "DatasetGenerationError":  # its own message explains nothing
        cause = cause.__cause__ or cause
    if isinstance(cause, ConnectionError) or type(cause).__name__ in _NOT_HERE:
        return f"its annotations, the data set {config.get('dataset_path')} of the Hugging Face hub, are not here"
    return f"its annotations cannot be loaded: {type(cause).__name__}: {cause}"


def _list_tasks() -> dict[str, Any]:
    """Return {"tasks": all tasks about videos, each as a dict of ``TaskFit``}."""
    from lmms_eval.tasks import TaskManager  # noqa: PLC0415 - seconds

    with _without_pauses():
        return {"tasks": [asdict(task) for task in survey_tasks(TaskManager())]}


class _LaterModule(ModuleType):
    """A stand-in that imports a package on first use; lmms-eval imports slow packages that few tasks use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks these names up
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def main(job: str, result: str) -> None:
    """Carry out the request in the file ``job``, and write the answer, or {"refusal": message}, to the file ``result``.

    {} lists the tasks; a request with ``task`` describes it, or scores its ``arms`` if it has this key. Other errors
    than Refusal pass. The network stays blocked in this process, and the package ``evaluate`` is imported lazily.
    """
    request = json.loads(Path(job).read_text())
    network = _Network()
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
