"""Calls of a pruning method that may be the user's, which tell a bug in the user's code from other errors."""

from __future__ import annotations

import torch

from gstep import PrunedTokens, VisualTokens
from gstep.errors import is_gpu_broken, is_out_of_memory
from gstep.evidence import EVIDENCE_SHAPES
from gstep.pruners.base import Pruner
from pipeline.errors import MethodFails, OwnCodeError, VideoFault
from pipeline.own_code import locate_user_error

_DRAWN_FRAMES = (8, 4)  # frames of the drawn tokens; the second number if the video has as many as the first
_working_methods: set[type[Pruner]] = set()  # methods that have pruned a video in this process


def prune_tokens(pruner: Pruner, visual: VisualTokens, retention_ratio: float, seed: int) -> PrunedTokens:
    """Prune the tokens of a video, and name the failing line if the method is the user's.

    Errors of this package's methods, GPU errors, and running out of memory pass unchanged.

    Raises:
        OwnCodeError: the user's code failed for this video.
        MethodFails: the user's code failed, has not pruned any video in this process, and fails at the same line for
            random tokens, so it would fail for every video.
        ValueError: tokens, evidence or ratio do not fit.
    """
    kind = type(pruner)
    try:
        pruned = pruner.prune(visual, retention_ratio, seed=seed)
    except Exception as error:
        place = locate_user_error(error, kind)
        if place is None or is_out_of_memory(error) or _may_be_gpu_fault(error):
            raise
        message = f"{place}: {type(error).__name__}: {error}, in the method {kind.__module__}:{kind.__qualname__}"
    else:
        _working_methods.add(kind)
        return pruned
    if (
        kind not in _working_methods
        and _locate_error_with_random_tokens(pruner, visual, retention_ratio, seed) == place
    ):
        raise MethodFails(f"{message}. It fails for drawn tokens too, so no video was tried after this: correct it")
    raise OwnCodeError(message)


def prune_or_raise_fault(pruner: Pruner, visual: VisualTokens, retention_ratio: float, seed: int) -> PrunedTokens:
    """Prune the tokens of a video, and convert errors that concern only this video to faults of the stage "prune".

    All other errors, such as those of a GPU, pass unchanged.

    Raises:
        VideoFault: class own-code if the user's code failed for this video; class internal for any ValueError.
        MethodFails: the user's method would fail for every video.
    """
    try:
        return prune_tokens(pruner, visual, retention_ratio, seed)
    except OwnCodeError as error:
        raise VideoFault("own-code", str(error), stage="prune") from None
    except ValueError as error:
        raise VideoFault("internal", f"the tokens cannot be pruned: {error}", stage="prune") from error


def _may_be_gpu_fault(error: Exception) -> bool:
    """Return True if the message says "CUDA error", or this process uses CUDA and its GPU no longer works."""
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return "CUDA error" in str(error) or (has_cuda and is_gpu_broken())


def _locate_error_with_random_tokens(
    pruner: Pruner, visual: VisualTokens, retention_ratio: float, seed: int
) -> str | None:
    """Prune random tokens and evidence with another number of frames than ``visual`` has; any exception is caught.

    Evidence whose name is not in EVIDENCE_SHAPES is left out.

    Returns:
        FILE:LINE of the user's code that failed, or None if nothing failed or the user's code is not to blame.
    """
    n_frames, per_frame, hidden = visual.tokens.shape
    drawn = next(count for count in _DRAWN_FRAMES if count != n_frames)
    sizes = {"T": drawn, "T*N": drawn * per_frame}
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(drawn, per_frame, hidden, generator=generator).to(visual.tokens)
    evidence = {
        name: torch.rand(
            [sizes.get(axis, size) for axis, size in zip(EVIDENCE_SHAPES[name], values.shape, strict=True)],
            generator=generator,
        ).to(values)
        for name, values in visual.evidence.items()
        if name in EVIDENCE_SHAPES
    }
    try:
        pruner.prune(VisualTokens(tokens, evidence, grid=visual.grid), retention_ratio, seed=seed)
    except Exception as error:  # noqa: BLE001 - code of the user's
        return locate_user_error(error, type(pruner))
    return None
