"""The selection of GSTEP: the paper's loop, the fast form of gstep.prune, and whole methods, on the same tokens.

Shapes: T frames, N tokens per frame, M = T*N tokens, D hidden size, B budget.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import normalize

from gstep import VisualTokens, budget_for, make_pruner
from gstep.backbones import choose_runtime
from gstep.density import ZERO_DISTANCE, spatio_temporal_density
from gstep.selection.dispatch import select_fastest
from jobs.benchmark.shared import add_flag, make_result, run_in_turn, say
from jobs.benchmark.tokens import INPUTS
from jobs.command import share
from jobs.frame.json_document import CommandResult
from pipeline.errors import convert_usage_errors

NOTES = {"structured": "low-rank content plus noise, made up", "iid": "standard normal numbers, the worst case"}
ALPHA, BETA = 0.5, 1e-6  # the defaults of gstep.prune
PREFIX = 200  # steps of the loop that are timed if all steps would take too long; all steps cost the same
# Limits up to which all steps of the loop run: about 20 s at 10 GB/s.
_WHOLE_TOKENS, _WHOLE_BYTES = 25_000, 2e11


@dataclass(frozen=True)
class SelectionTimes:
    """The median times in seconds for one input, size and ratio.

    Attributes:
        loop: Eqs. (9)-(12) with one matrix-vector product per step, extrapolated from the first ``count_loop_steps``
            steps.
        selection: the selection of gstep.prune, given the density.
        gstep: all of gstep.prune, with the density and the copy of the kept tokens.
        same: the share of the selection's first ``count_loop_steps`` + 1 picks that the loop picked too.
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
    """Add the flags of this measurement."""
    add_flag(parser, "--frames", [8, 32, 128, 384], "frames, a synthetic video for each number", "T")
    add_flag(parser, "--tokens-per-frame", 196, "tokens of a frame", "N")
    add_flag(parser, "--hidden", 3584, "hidden size", "D")
    add_flag(parser, "--retention-ratios", [0.25, 0.10], "kept shares", "R", share)
    add_flag(parser, "--inputs", [*INPUTS], "kinds of tokens", choices=INPUTS)
    add_flag(parser, "--threads", 1, "CPU threads", "N")
    add_flag(parser, "--device", "cpu", "device of the tokens", choices=("cpu", "cuda"))
    add_flag(parser, "--repeats", 3, "measure N times, and show medians", "N")


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure every input, size and ratio, and return the table.

    Sets torch's number of threads, and prints a line after each measurement.

    Raises:
        UsageError: the device is not available.
    """
    with convert_usage_errors():
        choose_runtime(arguments.device)
    torch.set_num_threads(arguments.threads)
    times = []
    for name, n_frames in product(arguments.inputs, arguments.frames):
        tokens = INPUTS[name](n_frames, arguments.tokens_per_frame, arguments.hidden).to(arguments.device)
        for ratio in arguments.retention_ratios:
            times.append(measure(name, tokens, ratio, arguments.repeats))
            say(f"{name}, {times[-1].n_tokens} tokens, {ratio:g}: done")
    notes = [f"{name}: {NOTES[name]}" for name in dict.fromkeys(item.input for item in times)]
    return make_result(
        f"Seconds of a selection, D = {arguments.hidden}",
        ("tokens of", "M", "kept", "loop", "selection", "times faster", "whole gstep", "vidcom2", "same"),
        map(format_row, times),
        "\n".join([*notes, f"~: from the first {PREFIX} steps, which all cost the same"]),
        device=arguments.device,
        hidden=arguments.hidden,
        repeats=arguments.repeats,
        times=times,
    )


def measure(name: str, tokens_TND: Tensor, ratio: float, repeats: int) -> SelectionTimes:
    """Time the loop, the selection, and the whole methods gstep and vidcom2 on one video, in turn; return the medians.

    A step of the loop and gstep run once before, unmeasured. The loop's time is extrapolated if not all of its steps
    are timed (``count_loop_steps``).
    """
    tokens_MD = tokens_TND.flatten(0, 1)
    density_M = spatio_temporal_density(tokens_TND)[0].flatten()
    n_tokens, hidden = tokens_MD.shape
    budget = budget_for(ratio, n_tokens)
    steps = count_loop_steps(n_tokens, hidden, budget)
    unit_DM = normalize(tokens_MD.float(), dim=1).T.contiguous()  # the layout that torch.mv reads fastest
    pruners = {method: make_pruner(method) for method in ("gstep", "vidcom2")}

    def prune(method: str) -> Tensor:
        return pruners[method].prune(VisualTokens(tokens_TND), ratio).index.cpu()

    # Only a result on the CPU is complete: a GPU queues its work.
    forms: dict[str, Callable[[], Tensor]] = {
        "loop": lambda: select_by_loop(unit_DM, density_M, steps).cpu(),
        "selection": lambda: select_fastest(tokens_MD, density_M, budget, alpha=ALPHA, beta=BETA).cpu(),
        "gstep": partial(prune, "gstep"),
        "vidcom2": partial(prune, "vidcom2"),
    }
    select_by_loop(unit_DM, density_M, 1)  # the libraries' first use is not measured
    prune("gstep")
    turns = run_in_turn(forms, repeats)
    medians = {form: runs.median_s for form, runs in turns.items()}
    medians["loop"] *= max(1, budget - 1) / steps
    same = torch.isin(turns["selection"].result[: steps + 1], turns["loop"].result).float().mean().item()
    return SelectionTimes(name, n_tokens, ratio, budget, loop_steps=steps, same=same, **medians)


def count_loop_steps(n_tokens: int, hidden: int, budget: int) -> int:
    """Return the number of steps of the loop to time, at least 1: B - 1, or at most PREFIX if all take too long."""
    fits = n_tokens <= _WHOLE_TOKENS and 4.0 * n_tokens * hidden * budget <= _WHOLE_BYTES
    return max(1, budget - 1 if fits else min(budget - 1, PREFIX))


def select_by_loop(unit_DM: Tensor, density_M: Tensor, steps: int) -> Tensor:
    """Select by a literal loop of Eqs. (9)-(12) in float32: [steps + 1] int64; ties go to the lowest index.

    Args:
        unit_DM: unit vectors of the tokens, one per column.
    """
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


def format_row(item: SelectionTimes) -> tuple[str, ...]:
    """Format a row of the table; a ~ marks a loop time that was extrapolated."""
    mark = "~" if item.loop_steps < item.n_kept - 1 else ""
    seconds = (f"{value:.3g}" for value in (item.selection, item.loop / item.selection, item.gstep, item.vidcom2))
    about = (item.input, f"{item.n_tokens:,}", f"{100 * item.ratio:g}%", f"{mark}{item.loop:.3g}")
    return (*about, *seconds, f"{item.same:.2%}")
