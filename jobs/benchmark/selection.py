"""The selection of GSTEP: the paper's loop, the fast form of gstep.prune, and whole methods, on the same tokens.

Shapes: T frames, N tokens a frame, M = T*N tokens, D hidden size, B budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

from gstep import VisualTokens, budget_for, make_pruner
from gstep.backbones import choose_runtime
from gstep.density import ZERO_DISTANCE, spatio_temporal_density
from gstep.selection.dispatch import fast_density_guided_fps
from jobs.benchmark.shared import figure_table, machine, machine_line, medians_in_turn, say
from jobs.benchmark.tokens import INPUTS
from jobs.command import count, share
from jobs.frame.json_document import CommandResult
from pipeline.errors import usage_errors

ALPHA, BETA = 0.5, 1e-6  # the defaults of gstep.prune
PREFIX = 200  # steps of the loop that are timed if all steps would take too long; all steps cost the same
# The loop runs whole up to here: about 20 s at 10 GB/s.
_WHOLE_TOKENS, _WHOLE_BYTES = 25_000, 2e11


@dataclass(frozen=True)
class SelectionTimes:
    """The median times of one input, size and ratio, in seconds.

    Attributes:
        loop: Eqs. (9)-(12) with a matrix-vector product a step, extrapolated from the first ``loop_steps`` steps.
        selection: the selection of gstep.prune, given the density.
        gstep: the whole of gstep.prune, with the density and the copy of the kept tokens.
        vidcom2: the whole of another method.
        same: the share of the loop's picks that the selection has among its first picks of the same number.
    """

    input: str
    n_tokens: int
    ratio: float
    n_kept: int
    loop: float
    loop_steps: int
    selection: float
    gstep: float
    vidcom2: float
    same: float


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``selection``."""
    parser.add_argument(
        "--frames",
        type=count,
        nargs="+",
        default=[8, 32, 128, 384],
        metavar="T",
        help="frames, a synthetic video for each number [8 32 128 384]",
    )
    parser.add_argument("--tokens-per-frame", type=count, default=196, metavar="N", help="tokens of a frame [196]")
    parser.add_argument("--hidden", type=count, default=3584, metavar="D", help="numbers a token [3584]")
    parser.add_argument(
        "--retention-ratios", type=share, nargs="+", default=[0.25, 0.10], metavar="R", help="kept shares [0.25 0.10]"
    )
    parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=[*INPUTS], help="kinds of tokens [all]")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="threads of the processor [1]")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the tokens [cpu]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="measure N times, and show medians [3]")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure every input, size and ratio; return the table. Sets torch's number of threads for the process.

    Raises UsageError if the device is not available.
    """
    with usage_errors():
        choose_runtime(arguments.device)
    torch.set_num_threads(arguments.threads)
    times = []
    for name in arguments.inputs:
        for n_frames in arguments.frames:
            tokens = INPUTS[name].make(n_frames, arguments.tokens_per_frame, arguments.hidden).to(arguments.device)
            for ratio in arguments.retention_ratios:
                times.append(measure(name, tokens, ratio, arguments.repeats))
                say(f"{name}, {times[-1].n_tokens} tokens, {ratio:g}: done")
    about = {"machine": machine(arguments.device), "hidden": arguments.hidden, "repeats": arguments.repeats}
    title = f"Seconds of a selection, D = {arguments.hidden}, on {machine_line(arguments.device)}"
    return CommandResult(0, {**about, "times": times}, [as_table(times, title)])


def measure(name: str, tokens_TND: Tensor, ratio: float, repeats: int) -> SelectionTimes:
    """Time the loop, the selection and whole methods on one video, in turns, so that disturbances affect all alike.

    ``name`` is the kind of input, for the result.
    """
    tokens_MD = tokens_TND.flatten(0, 1)
    density_M = spatio_temporal_density(tokens_TND)[0].flatten()
    n_tokens, hidden = tokens_MD.shape
    budget = budget_for(ratio, n_tokens)
    steps = loop_steps(n_tokens, hidden, budget)
    unit_DM = normalize(tokens_MD.float(), dim=1).T.contiguous()  # the layout that torch.mv reads fastest
    pruners = {method: make_pruner(method) for method in ("gstep", "vidcom2")}

    def prune(method: str) -> Tensor:
        return pruners[method].prune(VisualTokens(tokens_TND), ratio).index.cpu()

    # Only a result on the CPU is complete: a GPU queues its work.
    forms: dict[str, Callable[[], Tensor]] = {
        "loop": lambda: select_by_loop(unit_DM, density_M, steps).cpu(),
        "selection": lambda: fast_density_guided_fps(tokens_MD, density_M, budget, alpha=ALPHA, beta=BETA).cpu(),
        "gstep": partial(prune, "gstep"),
        "vidcom2": partial(prune, "vidcom2"),
    }
    select_by_loop(unit_DM, density_M, 1)  # the libraries' first use is not measured
    prune("gstep")
    timed = medians_in_turn(forms, repeats)
    medians = {form: seconds for form, (seconds, _) in timed.items()}
    medians["loop"] *= max(1, budget - 1) / steps
    same = torch.isin(timed["selection"][1][: steps + 1], timed["loop"][1]).float().mean().item()
    return SelectionTimes(name, n_tokens, ratio, budget, loop_steps=steps, same=same, **medians)


def loop_steps(n_tokens: int, hidden: int, budget: int) -> int:
    """Compute the number of steps of the paper's loop to time: B - 1, or at most PREFIX if all would take too long."""
    fits = n_tokens <= _WHOLE_TOKENS and 4.0 * n_tokens * hidden * budget <= _WHOLE_BYTES
    return max(1, budget - 1 if fits else min(budget - 1, PREFIX))


def select_by_loop(unit_DM: Tensor, density_M: Tensor, steps: int) -> Tensor:
    """Select by a literal loop of Eqs. (9)-(12) in float32: [steps + 1] int64; ties go to the lowest index."""
    term_M = (1 - ALPHA) * torch.log(density_M.float() + BETA)
    nearest_M = torch.full_like(term_M, torch.inf)
    order = torch.empty(steps + 1, dtype=torch.int64, device=unit_DM.device)
    order[0] = pick = density_M.argmax()
    for step in range(1, steps + 1):
        term_M[pick] = -torch.inf
        distance_M = torch.threshold(1 - torch.mv(unit_DM.T, unit_DM[:, pick]), ZERO_DISTANCE, 0.0)
        nearest_M = torch.minimum(nearest_M, distance_M)
        order[step] = pick = torch.argmax(ALPHA * torch.log(nearest_M + BETA) + term_M)
    return order


def as_table(times: Sequence[SelectionTimes], title: str) -> Table:
    """Make a table with a row for each input, size and ratio; a ~ marks an extrapolated time of the loop."""
    titles = ("tokens of", "M", "kept", "loop", "selection", "times faster", "whole gstep", "vidcom2", "same")
    rows = []
    for item in times:
        mark = "~" if item.loop_steps < item.n_kept - 1 else ""
        seconds = (f"{value:.3g}" for value in (item.selection, item.loop / item.selection, item.gstep, item.vidcom2))
        about = (item.input, f"{item.n_tokens:,}", f"{100 * item.ratio:g}%", f"{mark}{item.loop:.3g}")
        rows.append((*about, *seconds, f"{item.same:.2%}"))
    inputs = dict.fromkeys(item.input for item in times)
    notes = [f"{name}: {INPUTS[name].note}" for name in inputs]
    notes.append(f"~: from the first {PREFIX} steps, which all cost the same")
    return figure_table(title, titles, rows, "\n".join(notes))
