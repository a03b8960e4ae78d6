"""How long each pruning method takes on the same tokens, beside GSTEP; selection alone, without an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from gstep import PRUNERS, VisualTokens, make_pruner
from gstep.evidence import EVIDENCE_SHAPES
from gstep.pruners.base import Pruner
from jobs.benchmark.shown import figure_table
from jobs.benchmark.timing import medians_in_turn
from jobs.benchmark.tokens import structured_tokens

# Widths of evidence whose size the tokens do not decide: those of SigLIP so400m.
WIDTHS = {"Dv": 1152, "Dk": 72, "De": 1152, "Q": 1}


@dataclass(frozen=True)
class MethodTime:
    """The measurement of one method on one video; seconds are medians.

    Attributes:
        n_tokens: M.
        n_kept: tokens kept.
        seconds: of one selection.
        ratio: to GSTEP's in the same run.
    """

    method: str
    n_tokens: int
    n_kept: int
    seconds: float
    ratio: float


def measure(
    frames: Sequence[int],
    tokens_per_frame: int,
    hidden: int,
    retention_ratio: float,
    repeats: int,
    device: str,
    methods: Sequence[str] | None = None,
) -> Iterator[MethodTime]:
    """Time every method, or these and GSTEP, on one made-up video per length, ``repeats`` times in turn."""
    names = [name for name in PRUNERS if name != "none" and (methods is None or name in ("gstep", *methods))]
    for count in frames:
        tokens = structured_tokens(count, tokens_per_frame, hidden).to(device)
        runs = {name: _run(make_pruner(name), tokens, retention_ratio) for name in names}
        found = medians_in_turn(runs, repeats)
        for name, (seconds, n_kept) in found.items():
            yield MethodTime(name, count * tokens_per_frame, n_kept, seconds, seconds / found["gstep"][0])


def _run(pruner: Pruner, tokens: Tensor, retention_ratio: float) -> Callable[[], int]:
    """Return a function that prunes the tokens once, waits for the GPU, and returns the number of kept tokens."""
    visual = VisualTokens(tokens, _evidence(pruner, tokens))

    def run() -> int:
        kept = pruner.prune(visual, retention_ratio).n_kept
        if tokens.is_cuda:
            torch.cuda.synchronize(tokens.device)
        return kept

    return run


def _evidence(pruner: Pruner, tokens: Tensor) -> dict[str, Tensor]:
    """Make up the evidence that the method needs; only its size decides the time."""
    n_frames, per_frame, _ = tokens.shape
    lengths = {"T": n_frames, "N": per_frame, "T*N": n_frames * per_frame, **WIDTHS}
    rng = torch.Generator().manual_seed(1)
    return {
        name: torch.rand([lengths[axis] for axis in EVIDENCE_SHAPES[name]], generator=rng).to(tokens.device)
        for name in sorted(pruner.needs)
    }


def as_table(times: Sequence[MethodTime], title: str) -> Table:
    """Lay out a row per method and length."""
    rows = [
        (str(item.n_tokens), item.method, str(item.n_kept), f"{item.seconds:.3f}", f"{item.ratio:.2f}")
        for item in times
    ]
    return figure_table(title, ("tokens", "method", "kept", "seconds", "to gstep"), rows)
