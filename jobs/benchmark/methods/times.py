"""How long each pruning method takes on the same tokens, beside GSTEP; selection alone, without an encoder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor

from gstep import PRUNERS, VisualTokens, make_pruner
from gstep.evidence import EVIDENCE_SHAPES
from gstep.pruners.base import Pruner
from jobs.benchmark.tokens import structured_tokens
from pipeline.rows import Json, JsonObject

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
        pruners = {name: make_pruner(name) for name in names}
        runs = {name: _run(pruner, tokens, retention_ratio) for name, pruner in pruners.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        kept: dict[str, int] = {}
        for _ in range(repeats):
            for name, run in runs.items():
                started = time.perf_counter()
                kept[name] = run()
                seconds[name].append(time.perf_counter() - started)
        base = statistics.median(seconds["gstep"])
        for name, values in seconds.items():
            median = statistics.median(values)
            yield MethodTime(name, count * tokens_per_frame, kept[name], median, median / base)


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
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("tokens", "method", "kept", "seconds", "to gstep"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for item in times:
        row = (str(item.n_tokens), item.method, str(item.n_kept), f"{item.seconds:.3f}", f"{item.ratio:.2f}")
        table.add_row(*row)
    return table


def as_record(times: Sequence[MethodTime], **more: Json) -> JsonObject:
    """Return the times as the JSON document of ``--json``."""
    return {**more, "times": [asdict(item) for item in times]}
