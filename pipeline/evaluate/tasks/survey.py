"""Judges which tasks of lmms-eval fit, by their settings and compiled code; no data is read."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

FITS, IN_PART, UNKNOWN = "fits", "fits in part", "unknown until its data is here"
NEEDS_JUDGE, UNFIT, UNLOADABLE = "needs a judge", "does not fit", "cannot be loaded here"

# Packages that talk to a server; lmms_eval.llm_judge uses several of them.
_JUDGES = (
    *("aiohttp", "anthropic", "dashscope", "google.genai", "google.generativeai", "httpx", "litellm"),
    *("lmms_eval.llm_judge", "openai", "requests", "urllib.request", "zhipuai"),
)
# Names in code that returns images or frames instead of the path of one video.
_MEDIA = frozenset({"VideoReader", "VideoCapture", "cv2", "decord", "convert"})


@dataclass(frozen=True)
class TaskFit:
    """How well a task fits.

    Attributes:
        folder: its folder below lmms-eval's ``tasks``.
        fit: one of the constants of this module, such as FITS.
        reason: why it does not fit completely; "" for FITS.
    """

    name: str
    folder: str
    fit: str
    reason: str
    metrics: Sequence[str]


def survey_tasks(manager: Any) -> Iterator[TaskFit]:
    """Yield the fit of each task about videos, in the order of the ``lmms_eval.tasks.TaskManager``.

    The modules of the tasks are imported. A task whose module fails is UNLOADABLE, or left out if neither its settings
    nor its name mention video.
    """
    from lmms_eval.utils import load_yaml_config  # noqa: PLC0415 - seconds

    for name in manager.all_subtasks:
        file = manager.task_index[name]["yaml_path"]
        folder = str(Path(file).parent).rpartition("/tasks/")[2]
        try:
            config = load_yaml_config(file, mode="full")
            judgement = judge_task(config)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the code of a task
            config = {}  # or the settings without their functions, if these can be read
            with suppress(Exception, SystemExit):
                config = load_yaml_config(file, mode="simple")
            is_video = (config.get("dataset_kwargs") or {}).get("video") or "video" in name
            judgement = (UNLOADABLE, f"{type(error).__name__}: {error}") if is_video else None
        if judgement is not None:
            metrics = [str(entry.get("metric")) for entry in config.get("metric_list") or ()]
            yield TaskFit(name, folder, *judgement, metrics)


def judge_task(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (fit, reason) of a task, or None if neither its settings nor its ``doc_to_visual`` mention video.

    UNFIT follows from its settings. A judge that makes every result or the first metric gives NEEDS_JUDGE, a judge for
    some replies or metrics IN_PART, and code that may show images or frames UNKNOWN.

    Args:
        config: the task's settings, with the functions that they name.
    """
    shows = list(_walk_functions(config.get("doc_to_visual")))
    words = {word for function in shows for word in (function.__name__, *_list_words(function.__code__))}
    has_videos = (config.get("dataset_kwargs") or {}).get("video") or any("video" in word.lower() for word in words)
    if not has_videos:
        return None
    if reason := check_settings(config):
        return UNFIT, reason
    rule = config.get("process_results")
    metrics = [(str(entry.get("metric")), entry.get("aggregation")) for entry in config.get("metric_list") or ()]
    judged = [name for name, aggregation in metrics if _find_judge(aggregation)]
    if judge := _find_judge(rule):
        if not _is_judge_in_branches(rule):
            return NEEDS_JUDGE, f"its rule sends every reply to {judge}"
        return IN_PART, f"replies that its rules do not decide are for {judge}, and count as if it had not answered"
    if judged and judged[0] == metrics[0][0]:
        return NEEDS_JUDGE, f"{judged[0]} is made by a judge"
    if judged:
        return IN_PART, f"not {', '.join(judged)}, which a judge makes"
    if media := sorted(_MEDIA & words):
        return UNKNOWN, f"some documents may show something else than one video file ({', '.join(media)})"
    return FITS, ""


def check_settings(config: Mapping[str, Any]) -> str:
    """Return why a task is not asked by one prompt with one reply per document; "" if it is.

    Reasons are another output type, examples before the question, repeated questions, and a class of its own.
    """
    output_type = config.get("output_type") or "generate_until"
    if output_type != "generate_until":
        return f"its output_type is {output_type}"
    if config.get("num_fewshot"):
        return "it shows examples before each question"
    if (config.get("repeats") or 1) > 1:
        return f"it asks each question {config['repeats']} times"
    return "" if "class" not in config else "it has a class of its own"


def _walk_functions(function: Any, seen: set[Any] | None = None) -> Iterator[FunctionType]:
    """Yield a function and the functions of lmms-eval that it uses, directly or through others, each once.

    Functions that it reaches as attributes of a module are not found.

    Args:
        function: a function, ``partial``, bound method, or a class, of which all methods are walked; nothing for
            others.
        seen: what was walked before; extended in place.
    """
    seen = set() if seen is None else seen
    function = getattr(function, "func", getattr(function, "__func__", function))
    if not isinstance(function, FunctionType | type) or function in seen:
        return
    seen.add(function)
    if isinstance(function, type):
        for method in vars(function).values():
            if isinstance(method, FunctionType):
                yield from _walk_functions(method, seen)
        return
    yield function
    enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in (*enclosed, *map(function.__globals__.get, set(_list_names(function.__code__)))):
        if isinstance(value, FunctionType | type) and "lmms_eval" in _find_source(value):
            yield from _walk_functions(value, seen)


def _find_source(value: FunctionType | type) -> str:
    """Return the source file of a function, or of the first Python method of a class; "" if there is none."""
    functions = [value] if isinstance(value, FunctionType) else vars(value).values()
    return next((member.__code__.co_filename for member in functions if isinstance(member, FunctionType)), "")


def _list_names(code: CodeType) -> Iterator[str]:
    """Yield the global and attribute names that a function uses, also those of functions inside it."""
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _list_names(value)


def _list_words(code: CodeType) -> Iterator[str]:
    """Yield the names and the text constants in a function, also those of functions directly inside it."""
    yield from _list_names(code)
    for value in code.co_consts:
        if isinstance(value, str):
            yield value
        elif isinstance(value, CodeType):
            yield from (text for text in value.co_consts if isinstance(text, str))


def _find_judge(function: Any) -> str | None:
    """Return the package through which a function, or code that it calls, talks to a server; None if it does not."""
    return next((judge for called in _walk_functions(function) for judge in _list_judges(called).values()), None)


def _list_judges(function: FunctionType) -> dict[str, str]:
    """Map each name in a function that refers to one of the packages ``_JUDGES`` to that package.

    The name is a global (such a package, or an object from it), or the name of a package that the function imports.
    """
    judges = {}
    for name in _list_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            module = value.__name__
        else:  # a class, function or object of such a package, or a name that the function itself imports
            module = name if value is None else str(getattr(value, "__module__", None) or type(value).__module__)
        if judge := next((judge for judge in _JUDGES if f"{module}.".startswith(f"{judge}.")), None):
            judges[name] = judge
    return judges


def _is_judge_in_branches(rule: Any) -> bool:
    """Return True if a rule names judges only in ``if`` statements and expressions, conditions and ``else`` included.

    A function or class of the rule's module that calls a judge counts as a judge. False if the rule's source cannot be
    read, or if it names no judge.
    """
    function = getattr(rule, "func", rule)
    asking = set(_list_judges(function))
    for name in _list_names(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType | type) and _find_judge(value):
            asking.add(name)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):
        return False

    def list_branch_flags(node: ast.AST, in_branch: bool) -> Iterator[bool]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Name) and child.id in asking:
                yield in_branch
            yield from list_branch_flags(child, in_branch or isinstance(child, ast.If | ast.IfExp))

    places = list(list_branch_flags(tree, in_branch=False))
    return bool(places) and all(places)
