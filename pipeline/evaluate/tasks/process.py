"""The process that runs a task's code, from the side of the run that asks it: a request in, typed records out.

Also the list of tasks for the terminal: ``--benchmark lmms:list``.
"""

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
#: Folder below HF_HOME with TASK.parquet or TASK.jsonl, which replace a task's annotations on the hub.
ANNOTATIONS = "annotations"
_ORDER = (FITS, IN_PART, UNKNOWN, NEEDS_JUDGE, UNFIT, UNLOADABLE)  # of the list of tasks
_CHILD = "pipeline.evaluate.tasks.child"
_LAST_LINES, _LAST_BYTES = 4, 4096  # of what a process said before it died
_KEYS = ("KEY", "KEY_ID", "SECRET", "TOKEN")  # ends of names of variables that hold keys of services


@dataclass(frozen=True)
class TaskDocument:
    """A document of a task: what is asked about which video; or its ``fault``, and then the rest is empty.

    Attributes:
        prompt: the whole text of the question.
        video: the path of its video.
        fields: its short texts and whole numbers, but not the right answer.
        fault: kind and message, where it cannot be asked.
    """

    prompt: str = ""
    video: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    fault: tuple[str, str] | None = None

    @classmethod
    def read(cls, record: dict[str, Any]) -> TaskDocument:
        """Read a document as the process describes it."""
        if fault := record.get("fault"):
            return cls(fault=(fault[0], fault[1]))
        return cls(record["prompt"], record["video"], record["fields"])


@dataclass(frozen=True)
class DescribedTask:
    """A task for one model type: how and what it asks.

    Attributes:
        version: of lmms-eval.
        metric: whose number the tables show.
        metrics: all that the task has.
        settings: its ``generation_kwargs``.
        documents: by their number.
    """

    version: str
    metric: str
    metrics: Sequence[str]
    settings: Mapping[str, Any]
    documents: Sequence[TaskDocument]


class TaskProcess:
    """Runs the code of one task in processes of its own, one for each call. Raises UsageError without lmms-eval.

    Args:
        name: of the task.
        metric: to be shown; None: the task's first.
        model_type: whose prompts the task takes, where it has several.
        home: HF_HOME, an absolute path: the task finds annotations and videos below it.
        say: prints a line before each process, since importing lmms-eval takes seconds.
    """

    def __init__(self, name: str, metric: str | None, model_type: str, home: Path, say: Say) -> None:
        self._name, self._home, self._say = name, home, say
        files = [home / ANNOTATIONS / f"{name}{suffix}" for suffix in (".parquet", ".jsonl", ".json")]
        rows = next((str(file) for file in files if file.is_file()), None)
        self._request = {"task": name, "metric": metric, "model_type": model_type, "rows": rows}

    def describe(self) -> DescribedTask:
        """Return the task's documents and settings.

        Raises UsageError for a task that cannot be asked or scored here.
        """
        self._say(f"reading the task {self._name} of lmms-eval")
        answer = run_child(self._request, self._home)
        if refusal := answer.get("refusal"):
            remedy = self._describe_remedy() if "annotations" in refusal else ""
            raise UsageError(f"--benchmark lmms:{self._name}: {refusal}{remedy}")
        documents = [TaskDocument.read(record) for record in answer.pop("documents")]
        return DescribedTask(documents=documents, **answer)

    def _describe_remedy(self) -> str:
        """Return what to do where the annotations cannot be loaded."""
        if rows := self._request["rows"]:
            return f". They were read from {rows}, which must have rows in the columns of the data set"
        return (
            f". They must be below HF_HOME ({self._home}), since nothing is downloaded: run lmms-eval's own command "
            f"for this task once, with --limit 1, or write them to {ANNOTATIONS}/{self._name}.parquet"
        )

    def score(self, arms: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
        """Return the task's numbers for the replies of each arm: see ``LoadedTask.score``. Raises RunFailed."""
        n_replies = sum(map(len, arms.values()))
        self._say(f"scoring {n_replies:,} replies by the rules of {self._name}")
        answer = run_child({**self._request, "arms": arms}, self._home)
        if refusal := answer.get("refusal"):
            raise RunFailed(f"lmms:{self._name} could be asked, and cannot be scored now: {refusal}")
        return answer


def list_tasks(say: Say) -> list[TaskFit]:
    """Return the tasks of lmms-eval about videos, and how far they fit. Raises UsageError without lmms-eval."""
    _refuse_without_lmms_eval("list")
    say("reading the tasks of lmms-eval, which takes a minute")
    with tempfile.TemporaryDirectory(prefix="gstep-lmms-") as home:
        return [TaskFit(**record) for record in run_child({}, Path(home))["tasks"]]


def render_tasks(tasks: Sequence[TaskFit]) -> RenderableType:
    """Return a table for each fit. Tasks of a folder that do not fit for the same reason share a row."""
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
    """Run the process on a request, with HF_HOME at ``home``, and return its answer.

    Raises UsageError without lmms-eval, and RunFailed with the last lines that the process printed if it dies.
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
        said = "\n  ".join(_read_end(log).splitlines()[-_LAST_LINES:])
        raise RunFailed(f"lmms:{request.get('task', 'list')}: its code ended with {done.returncode}:\n  {said}")


def _read_end(log: Path) -> str:
    """Return the end of a log, which may be long."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        return file.read().decode(errors="replace")


def _refuse_without_lmms_eval(task: str) -> None:
    """Raise UsageError if this environment has no lmms-eval."""
    if find_spec("lmms_eval") is None:
        raise UsageError(f"--benchmark lmms:{task}: {REMEDY}")


def _make_environment(home: Path, cache: Path | None = None) -> dict[str, str]:
    """Return the environment of the process: HF_HOME as it is named, and nothing of Hugging Face downloaded.

    Keys of services are withheld, since not all code of tasks reaches them through Python's sockets. ``cache`` is the
    folder for converted annotations; None: it is below HF_HOME.
    """
    root = str(Path(__file__).parents[3])  # the clone or site-packages that this module is from
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    # Each stays, as clients of services are not made without.
    withheld = {name: "withheld" for name in os.environ if name.endswith(_KEYS)}
    cached = {} if cache is None else {"HF_DATASETS_CACHE": str(cache)}
    return {**os.environ, **withheld, **offline, **cached, "HF_HOME": str(home), "PYTHONPATH": paths}
