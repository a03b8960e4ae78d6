"""Compilation of the GPU kernels of a pruning method while an encoder loads its model."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

import torch

from gstep import VisualTokens
from gstep.pruners.base import Pruner

MAX_TOKENS = 16_384  # of the random video; methods compile nothing else for longer videos


@contextmanager
def compile_meanwhile(
    pruner: Pruner, ratio: float, shape: tuple[int, int, int], device: torch.device | str
) -> Iterator[None]:
    """Compile the kernels that ``pruner`` needs in a thread while the block runs; wait for the thread on exit.

    The thread prunes a random video. Triton stores compiled kernels in ~/.triton/cache or $TRITON_CACHE_DIR, where
    later processes find them. A failure only warns. Does nothing for methods that need evidence from the encoder.

    Args:
        shape: (T, N, D) of most videos.
    """
    if pruner.sources:
        yield
        return
    with suppress(ImportError):  # without Triton methods compile nothing
        import_module("gstep.selection.gpu.check")  # here, since imports in two threads may deadlock
    thread = threading.Thread(
        target=_prune_random_video, args=(pruner, ratio, shape, device), name="compile", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _prune_random_video(pruner: Pruner, ratio: float, shape: tuple[int, int, int], device: torch.device | str) -> None:
    """Prune a random video of this shape and wait for the GPU; T is reduced if the video exceeds MAX_TOKENS tokens.

    Any exception becomes a RuntimeWarning.
    """
    n_frames, per_frame, hidden = shape
    n_frames = max(1, min(n_frames, MAX_TOKENS // per_frame))
    generator = torch.Generator(device).manual_seed(0)
    try:
        tokens_TND = torch.randn(
            (n_frames, per_frame, hidden), generator=generator, device=device, dtype=torch.bfloat16
        )
        pruner.prune(VisualTokens(tokens_TND), ratio)
        if tokens_TND.is_cuda:
            torch.cuda.synchronize(tokens_TND.device)
    except Exception as error:  # noqa: BLE001 - no video is affected yet
        cause = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{pruner.name} could not be tried before the first video ({cause})", RuntimeWarning, stacklevel=2
        )
