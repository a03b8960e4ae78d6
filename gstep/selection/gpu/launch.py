"""Density-guided farthest point sampling on a GPU, with the semantics of
``gstep.selection.reference.density_guided_fps``.

Up to MAX_GRAM_TOKENS a video is served by ``gstep.selection.gpu.gram``, beyond by ``gstep.selection.gpu.lazy``, and
where neither can by the plain form of ``gstep.selection.reference``. Checked in Triton's interpreter on a CPU; not yet
run, and no speed measured, on a GPU: there ``gstep.selection.gpu.check`` compares them with the plain form before a
process's first selection.

Shapes: M tokens, D hidden size, B budget.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from gstep.selection.reference import density_guided_fps

Video = tuple[Tensor, Tensor, int]

#: Up to so many tokens one program holds a video's distances in registers.
MAX_GRAM_TOKENS = 8192
_MEMORY_SHARE = 0.5  # of the free memory, that Gram matrices may take
_MIN_ALPHA = 0.05  # below, keys order tokens less finely than scores do

_reported: list[str] = []  # why the kernels failed in this process, the first time
_broken: list[str] = []  # why they are not tried again


def select_on_gpu(
    tokens_MD: Tensor,
    density_M: Tensor,
    budget: int,
    *,
    alpha: float = 0.5,
    beta: float = 1e-6,
    start: str = "density",
) -> Tensor:
    """``density_guided_fps`` of one video: the same arguments, the same picks up to near-ties, [B] int64.

    Give 16-bit tokens as the encoder made them: tensor cores multiply them and accumulate in float32. float32 tokens
    are multiplied in float32, never TF32; float64 ones, alpha below 0.05 and extreme beta are left to the plain form.
    """
    return select_batch_on_gpu([(tokens_MD, density_M, budget)], alpha=alpha, beta=beta, start=start)[0]


def select_batch_on_gpu(
    videos: Sequence[Video], *, alpha: float = 0.5, beta: float = 1e-6, start: str = "density"
) -> list[Tensor]:
    """``select_on_gpu`` of videos (tokens [M,D], density [M], budget) on one device that may differ in all else.

    Any failure of the kernels is warned of, once a process, and answered by the plain form. Only what the GPU reports
    after the launches (a sticky CUDA error) cannot be: no further work on that GPU would succeed.
    """
    if videos and alpha >= _MIN_ALPHA and not _broken:
        device = videos[0][0].device
        try:
            with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return _select(videos, alpha, beta, start)
        except Exception as error:  # noqa: BLE001 - whatever fails, the plain form has the answer
            _report(error)
    return [_plain(video, alpha, beta, start) for video in videos]


def _select(videos: Sequence[Video], alpha: float, beta: float, start: str) -> list[Tensor]:
    from gstep.selection.gpu import check, gram, lazy  # noqa: PLC0415 - Triton need not be there

    tasks = [gram.prepare(*video, alpha=alpha, beta=beta, start=start) for video in videos]
    for task in tasks:
        if task is not None and task.tokens.is_cuda:
            check.check_kernels(task.tokens.device, task.tokens.dtype, task.tokens.shape[1])
    orders: dict[int, Tensor] = {}
    widths = {at: gram.gram_width(len(task.tokens)) for at, task in enumerate(tasks) if task is not None}
    for batch in gram_batches(widths, _memory_for_grams(videos[0][0].device)):
        orders.update(zip(batch, gram.gram_form([task for at in batch if (task := tasks[at])]), strict=True))
    for at, task in enumerate(tasks):
        if at not in orders:
            orders[at] = _plain(videos[at], alpha, beta, start) if task is None else lazy.LazyForm(task).select()
    return [orders[at] for at in range(len(videos))]


def gram_batches(widths: dict[int, int], n_bytes: float) -> Iterator[list[int]]:
    """The videos that the Gram form serves, in batches whose matrices take at most ``n_bytes`` together.

    ``widths``: the length of the rows of each video's matrix. Videos of a batch differ in it by less than a half, as
    all are given room for the widest. What fits in no batch is left out.
    """
    batch: list[int] = []
    widest = 0
    for at in sorted(widths, key=lambda at: -widths[at]):
        width = widths[at]
        if width > MAX_GRAM_TOKENS or width * width * 4 > n_bytes:
            continue
        if batch and (2 * width <= widest or (len(batch) + 1) * widest * widest * 4 > n_bytes):
            yield batch
            batch = []
        widest = widest if batch else width
        batch.append(at)
    if batch:
        yield batch


def _memory_for_grams(device: torch.device) -> float:
    """Bytes; on a CPU, which is Triton's interpreter, there is no limit."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return _MEMORY_SHARE * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _plain(video: Video, alpha: float, beta: float, start: str) -> Tensor:
    tokens_MD, density_M, budget = video
    return density_guided_fps(tokens_MD, density_M, budget, alpha=alpha, beta=beta, start=start)


def _report(error: Exception) -> None:
    """Warn once a process; after any failure but running out of memory the kernels are not tried again."""
    cause = f"{type(error).__name__}: {error}"
    if not isinstance(error, torch.OutOfMemoryError):
        _broken.append(cause)
    if not _reported:
        _reported.append(cause)
        warnings.warn(
            f"the GPU kernels of GSTEP's sampling failed, its slower plain form serves instead ({cause})",
            RuntimeWarning,
            stacklevel=3,
        )
