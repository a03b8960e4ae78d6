"""Runs the code of lmms-eval's tasks in child processes, and renders the list of tasks (``--benchmark lmms:list``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.console import Say
from pipeline.errors import RunFailed, UsageError
from pipeline.evaluate.tasks.survey import FITS, IN_PART, NEEDS_JUDGE, UNFIT, UNKNOWN, UNLOADABLE, TaskFit

VERSION = "0.7.3"
REMEDY = (
    "it needs lmms-eval: pip install -e '.[lmms]' && pip install --no-deps lmms_eval=="
    + VERSION
    + " in an environment "
    "of its own, see 'In lmms-eval' of pipeline/evaluate/README.md"
)
#: Folder below HF_HOME with TASK.parquet, .jsonl or .json files, which replace a task's annotations on the hub.
ANNOTATIONS = "annotations"
_ORDER = (FITS, IN_PART, UNKNOWN, NEEDS_JUDGE, UNFIT, UNLOADABLE)  # order of the list of tasks
_CHILD = "pipeline.evaluate.tasks.child"
_LAST_LINES, _LAST_BYTES = 4, 4096  # limits of the output that the error of a failed process shows
_KEYS = ("KEY", "KEY_ID", "SECRET", "TOKEN")  # name endings of variables that hold keys of services


@dataclass(frozen=True)
class TaskDocument:
    """A document of a task: a question about a video, or the fault for which it cannot be asked.

    Attributes:
        prompt: the whole text of the question.
        fields: the document's texts of 1 to 60 characters and whole numbers, as texts, without the right answer.
        fault: kind and message of the fault, all else is empty then; None if the document can be asked.
    """

    prompt: str = ""
    video: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    fault: tuple[str, str] | None = None

    @classmethod
    def read(cls, record: dict[str, Any]) -> TaskDocument:
        """Convert a document of the child process's answer."""
        if fault := record.get("fault"):
            return cls(fault=(fault[0], fault[1]))
        return cls(record["prompt"], record["video"], record["fields"])


@dataclass(frozen=True)
class DescribedTask:
    """The documents and settings of a task, for one model type.

    Attributes:
        version: the version of lmms-eval.
        metric: the metric that tables show, METRIC or METRIC/PART.
        settings: the task's ``generation_kwargs``.
        documents: in the order of the task; the position of a document is its number.
    """

    version: str
    metric: str
    metrics: Sequence[str]
    settings: Mapping[str, Any]
    documents: Sequence[TaskDocument]


class TaskProcess:
    """Runs the code of one task of lmms-eval: each call of a method starts a child process and waits for it.

    Args:
        metric: the metric that tables show; None selects the first one for which more is better.
        model_type: the model type whose prompts are used, if the task has prompts by model type.
        home: HF_HOME of the task, an absolute path. A file ``annotations/NAME.parquet`` (.jsonl, .json) in it replaces
            the task's data set.
        say: prints a line before each process.
    """

    def __init__(self, name: str, metric: str | None, model_type: str, home: Path, say: Say) -> None:
        """Look for a local file of annotations (.parquet before .jsonl before .json); start and print nothing."""
        self._name = name
        self._home = home
        self._say = say
        files = [home / ANNOTATIONS / f"{name}{suffix}" for suffix in (".parquet", ".jsonl", ".json")]
        rows = next((str(file) for file in files if file.is_file()), None)
        self._request = {"task": name, "metric": metric, "model_type": model_type, "rows": rows}

    def describe(self) -> DescribedTask:
        """Read the task in a new child process, after a line to ``say``; return its documents and settings.

        Raises:
            UsageError: lmms-eval is not installed, or the task cannot be asked or scored here.
            RunFailed: the child process failed.
        """
        self._say(f"reading the task {self._name} of lmms-eval")
        answer = run_child(self._request, self._home)
        if refusal := answer.get("refusal"):
            remedy = self._describe_remedy() if "annotations" in refusal else ""
            raise UsageError(f"--benchmark lmms:{self._name}: {refusal}{remedy}")
        documents = [TaskDocument.read(record) for record in answer.pop("documents")]
        return DescribedTask(documents=documents, **answer)

    def _describe_remedy(self) -> str:
        """Return the end of an error message about annotations: the file that was read, or where they must be."""
        if rows := self._request["rows"]:
            return f". They were read from {rows}, which must have rows in the columns of the data set"
        return (
            f". They must be below HF_HOME ({self._home}), since nothing is downloaded: run lmms-eval's own command "
            f"for this task once, with --limit 1, or write them to {ANNOTATIONS}/{self._name}.parquet"
        )

    def score(self, arms: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Score the replies of each arm by the task's own rules in a new child process, and return the task's numbers.

        The number of replies is passed to ``say`` first.

        Args:
            arms: label of an arm -> document number as text -> reply. All arms have the same documents.

        Returns:
            ``own`` (label -> metric -> number), ``scores`` of documents (None if the number is not their mean), and the
            other keys that ``LoadedTask.score`` of ``child.py`` lists.

        Raises:
            UsageError: lmms-eval is not installed.
            RunFailed: the child process failed, or the task can no longer be loaded.
        """
        n_replies = sum(map(len, arms.values()))
        self._say(f"scoring {n_replies:,} replies by the rules of {self._name}")
        answer = run_child({**self._request, "arms": arms}, self._home)
        if refusal := answer.get("refusal"):
            raise RunFailed(f"lmms:{self._name} could be asked, and cannot be scored now: {refusal}")
        return answer


def list_tasks(say: Say) -> list[TaskFit]:
    """Return the tasks of lmms-eval about videos with their fit, after a line to ``say``; takes a minute."""
    _refuse_without_lmms_eval("list")
    say("reading the tasks of lmms-eval, which takes a minute")
    with tempfile.TemporaryDirectory(prefix="gstep-lmms-") as home:
        return [TaskFit(**record) for record in run_child({}, Path(home))["tasks"]]


def render_tasks(tasks: Sequence[TaskFit]) -> RenderableType:
    """Return a line with counts and a table per fit, the best fit first.

    Tasks of the same folder with the same fit and reason share a row.
    """
    ordered = sorted(tasks, key=lambda task: (_ORDER.index(task.fit), task.folder, task.reason, task.name))
    counts = Counter(task.fit for task in tasks)
    parts: list[RenderableType] = [
        Text(f"{len(tasks)} tasks about videos: " + ", ".join(f"{counts[fit]} {fit}" for fit in _ORDER if counts[fit]))
    ]
    for fit, of_fit in groupby(ordered, key=lambda task: task.fit):
        table = Table(title=f"\n{fit.capitalize()}", title_justify="left", show_edge=False, box=None, pad_edge=False)
        for title in ("folder", "tasks", "first metric", *(["why"] if fit != FITS else [])):
            table.add_column(title, overflow="fold")
        for (folder, reason), same in groupby(of_fit, key=lambda task: (task.folder, task.reason)):
            family = list(same)
            metrics = " ".join(dict.fromkeys(task.metrics[0] for task in family if task.metrics))
            names = " ".join(task.name for task in family)
            table.add_row(folder, names, metrics, *([reason] if fit != FITS else []))
        parts.append(table)
    return Group(*parts)


def run_child(request: Mapping[str, Any], home: Path) -> dict[str, Any]:
    """Run the child process on a request in a temporary folder, and return its answer, which may be a ``refusal``.

    The child runs without a time limit.

    Args:
        request: what :mod:`pipeline.evaluate.tasks.child` reads; {} asks for the list of tasks.
        home: HF_HOME of the process.

    Raises:
        UsageError: lmms-eval is not installed.
        RunFailed: the process failed or wrote no answer. The message has the last lines that it printed.
    """
    _refuse_without_lmms_eval(request.get("task", "list"))
    with tempfile.TemporaryDirectory(prefix="gstep-lmms-") as name:
        job, result, log = (Path(name) / file for file in ("job.json", "result.json", "log"))
        job.write_text(json.dumps(request))
        with log.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", _CHILD, str(job), str(result)],
                cwd=name,  # tasks write files into their working directory
                env=_make_environment(home, Path(name) if request.get("rows") else None),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode == 0 and result.is_file():
            answer: dict[str, Any] = json.loads(result.read_text())
            return answer
        last_lines = "\n  ".join(_read_end(log).splitlines()[-_LAST_LINES:])
        raise RunFailed(f"lmms:{request.get('task', 'list')}: its code ended with {done.returncode}:\n  {last_lines}")


def _read_end(log: Path) -> str:
    """Return the last ``_LAST_BYTES`` bytes of a log as text."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        return file.read().decode(errors="replace")


def _refuse_without_lmms_eval(task: str) -> None:
    """Raise UsageError, with the way to install it, if lmms-eval is not installed."""
    if find_spec("lmms_eval") is None:
        raise UsageError(f"--benchmark lmms:{task}: {REMEDY}")


def _make_environment(home: Path, cache: Path | None = None) -> dict[str, str]:
    """Return the child's environment: this process's, offline, with HF_HOME, and with this package in PYTHONPATH.

    Variables whose names end in one of ``_KEYS`` become "withheld".

    Args:
        cache: folder for annotations that the datasets library converts; None keeps this process's setting.
    """
    root = str(Path(__file__).parents[3])  # the clone or site-packages that contains this module
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # The variables stay set, because clients of services cannot be created without them.
    withheld = {name: "withheld" for name in os.environ if name.endswith(_KEYS)}
    cached = {} if cache is None else {"HF_DATASETS_CACHE": str(cache)}
    return {**os.environ, **withheld, **offline, **cached, "HF_HOME": str(home), "PYTHONPATH": paths}
