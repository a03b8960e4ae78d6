"""How long the exact selection of GSTEP takes, all its forms side by side on the same tokens.

Shapes: T frames, N tokens a frame, M = T*N tokens, D hidden size, B budget.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gstep.density import spatio_temporal_density
from gstep.selection.lazy import Counts
from gstep.selection.reference import density_guided_fps
from jobs.benchmark.peak_memory import peak_memory
from jobs.benchmark.selection_forms import ALPHA, BETA, Form, Outcome, Run, Task, all_forms, plain_steps
from jobs.benchmark.tokens import INPUTS, structured_tokens

_ENOUGH = 60.0  # seconds after which a form is not repeated
_ORACLE_TOKENS = 2048  # up to here a selection in float64 is no work

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        inputs: names in INPUTS.
        frames: T of each size.
        ratios: shares of tokens kept.
        forms: names in ``all_forms()``.
        repeats: runs of each form, of which the median counts.
    """

    inputs: Sequence[str]
    frames: Sequence[int]
    tokens_per_frame: int
    hidden: int
    ratios: Sequence[float]
    forms: Sequence[str]
    repeats: int


@dataclass(frozen=True)
class FormTime:
    """One form on one input, size and ratio.

    Attributes:
        seconds: the median of ``runs``; where ``extrapolated``, it stands for all steps by ``steps`` of them.
        to_plain: to the plain form's in the same run; None where that was not measured.
        steps: steps of the plain form that were run.
        gb_per_s: what the plain form read of its tokens.
        products: pairs of tokens multiplied in all D dimensions, over M * B.
        bounds: pairs multiplied in the subspace, over M * B.
        residual: the mean share of a token's squared length outside of the subspace.
        gave_up: whether the bound was found useless.
        memory_mb: 10^6 bytes beyond the tokens, at the peak; None where it was not measured.
    """

    input: str
    n_tokens: int
    ratio: float
    budget: int
    form: str
    seconds: float
    runs: list[float]
    to_plain: float | None = None
    extrapolated: bool = False
    steps: int | None = None
    gb_per_s: float | None = None
    products: float | None = None
    bounds: float | None = None
    residual: float | None = None
    gave_up: bool | None = None
    memory_mb: float | None = None


@dataclass(frozen=True)
class Agreement:
    """How many of the first ``compared`` tokens of the form that gstep.prune uses are among those of another form."""

    input: str
    n_tokens: int
    ratio: float
    against: str
    compared: int
    share: float


class Measured(NamedTuple):
    """All forms on one input, size and ratio."""

    times: list[FormTime]
    agreements: list[Agreement]


def measure(settings: Settings, say: Say) -> Iterator[Measured]:
    """Every input, size and ratio in turn; ``say`` is told what comes next.

    The first input and ratio also tell the peak memory, which hardly depends on the input.
    """
    forms = {name: form for name, form in all_forms().items() if name in settings.forms}
    say("warming up")
    _warm_up(forms, settings)
    for name in settings.inputs:
        for count in settings.frames:
            say(f"making tokens: {name}, {count * settings.tokens_per_frame}")
            tokens = INPUTS[name].make(count, settings.tokens_per_frame, settings.hidden)
            density = spatio_temporal_density(tokens)[0].flatten()
            tasks = [Task(tokens, density, ratio) for ratio in settings.ratios]
            memory = _memory(forms, tasks[0], say) if name == settings.inputs[0] else {}
            runs = {form: forms[form].start(tokens) for form in forms}
            for task in tasks:
                measured = _measured(name, task, runs, settings, say)
                if task is tasks[0]:
                    times = [replace(item, memory_mb=memory.get(item.form)) for item in measured.times]
                    measured = measured._replace(times=times)
                yield measured


def _warm_up(forms: Mapping[str, Form], settings: Settings) -> None:
    """Every form once, on few tokens: what libraries take on their first use is no form's."""
    tokens = structured_tokens(4, settings.tokens_per_frame, settings.hidden)
    task = Task(tokens, spatio_temporal_density(tokens)[0].flatten(), settings.ratios[0])
    for form in forms.values():
        form.start(tokens)(task)


def _memory(forms: Mapping[str, Form], task: Task, say: Say) -> dict[str, float | None]:
    """Before any form has started, so that only the tokens are there."""
    peaks = {}
    for name, form in forms.items():
        if name != "cuda":  # a forked child has no GPU
            say(f"{len(task.density)} tokens, {name}: memory")
            peaks[name] = peak_memory(partial(_start_and_run, form, task))
    return peaks


def _start_and_run(form: Form, task: Task) -> None:
    form.start(task.tokens)(task)


def _measured(name: str, task: Task, runs: Mapping[str, Run], settings: Settings, say: Say) -> Measured:
    """All forms in turn, again and again, so that a disturbance of the machine falls on all of them."""
    where = f"{name}, {len(task.density)} tokens, ratio {task.ratio:g}"
    seconds: dict[str, list[float]] = {form: [] for form in runs}
    outcomes: dict[str, Outcome] = {}
    for number in range(settings.repeats):
        for form, run in runs.items():
            if sum(seconds[form]) < _ENOUGH:
                say(f"{where}, {form}: run {number + 1} of {settings.repeats}")
                begun = time.perf_counter()
                outcomes[form] = run(task)
                seconds[form].append(time.perf_counter() - begun)
    times = [_form_time(name, task, form, seconds[form], outcomes[form].counts) for form in runs]
    return Measured(_beside_plain(times), _agreements(name, task, outcomes))


def _form_time(name: str, task: Task, form: str, runs: list[float], counts: Counts | None) -> FormTime:
    n_tokens = len(task.density)
    item = FormTime(name, n_tokens, task.ratio, task.budget, form, statistics.median(runs), runs)
    if form == "plain":
        return _of_all_steps(item, task.tokens.shape[-1])
    if counts is None:
        return item
    pairs = n_tokens * task.budget
    return replace(
        item,
        products=counts.products / pairs,
        bounds=counts.bounds / pairs,
        residual=counts.residual,
        gave_up=counts.gave_up,
    )


def _of_all_steps(item: FormTime, hidden: int) -> FormTime:
    """The plain form's time for all B - 1 steps from that of those that were run; they all cost the same."""
    steps = plain_steps(item.n_tokens, hidden, item.budget)
    item = replace(item, steps=steps, gb_per_s=4e-9 * item.n_tokens * hidden * steps / item.seconds)
    if steps >= item.budget - 1:
        return item
    return replace(item, extrapolated=True, seconds=item.seconds * (item.budget - 1) / steps)


def _beside_plain(times: list[FormTime]) -> list[FormTime]:
    plain = next((item.seconds for item in times if item.form == "plain"), None)
    return times if plain is None else [replace(item, to_plain=item.seconds / plain) for item in times]


def _agreements(name: str, task: Task, outcomes: Mapping[str, Outcome]) -> list[Agreement]:
    """The form that gstep.prune uses on a CPU against all others that select, and on few tokens against float64."""
    if "lazy+bound" not in outcomes:
        return []
    ours = outcomes["lazy+bound"].kept
    others = {form: outcomes[form].kept for form in ("plain", "lazy", "cuda") if form in outcomes}
    if len(task.density) <= _ORACLE_TOKENS:
        others["float64"] = density_guided_fps(task.rows.double(), task.density, task.budget, alpha=ALPHA, beta=BETA)
    return [_agreement(name, task, against, ours, kept) for against, kept in others.items()]


def _agreement(name: str, task: Task, against: str, ours: Tensor, theirs: Tensor) -> Agreement:
    compared = min(len(ours), len(theirs))
    shared = torch.isin(ours[:compared], theirs[:compared]).sum().item()
    return Agreement(name, len(task.density), task.ratio, against, compared, shared / compared)
