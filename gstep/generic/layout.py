"""How the rows of a video's features depend on its frames, and which columns of a prompt they fill.

Shapes: F frames, T steps of time (frames or groups of frames), N tokens per step, D hidden size, R rows of the tail,
which is behind the last step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.generic.halves import make_features, move_inputs


@dataclass(frozen=True)
class Layout:
    """The results of the gate for a model, which are needed before its weights are loaded. All are JSON values.

    Attributes:
        hidden_size: D.
        deepstack_levels: the number of further vectors of each token.
        modality: "video" or "image", the key under which the model accepts features.
        stacked: True if its features of a video are one tensor [1, rows, D] instead of a list of [rows, D].
        frames_per_step: the number of frames that are encoded together.
        tail: R, the number of rows behind the last step that depend on no frame (LLaVA-OneVision's newline).
        units_per_step: the number of the processor's units of time (:func:`count_units`) in a step.
        axes: 1, or 3 if a position has time, height and width.
        in_pieces: True if a video may be encoded in pieces of whole steps.
        in_batches: True if a batch of prompts gives the logits of single prompts.
        parity: what the gate measured.
    """

    hidden_size: int
    deepstack_levels: int
    modality: str
    stacked: bool
    frames_per_step: int
    tail: int
    units_per_step: float
    axes: int = 1
    in_pieces: bool = False
    in_batches: bool = False
    parity: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, source: ModelSource) -> Layout:
        """Return the layout that the gate attached to a model. Raises ModelError if it attached none."""
        if source.layout is None:
            raise ModelError(f"{source.name!r} was resolved without its check (ModelSource.resolve(..., gate=True))")
        return cls(**source.layout)


def flatten_features(output: Any) -> list[Tensor]:
    """Flatten an encoder's output to rows [rows, D]: those of the tokens, then those of each deepstack level."""
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [torch.cat([part.flatten(0, -2) for part in level]) for level in levels]


def count_units(inputs: Mapping[str, Any]) -> int:
    """Count the units of time of a video in a processor's output: T of its grids, or otherwise its frames of pixels.

    If one row has the pixels of all frames (MiniCPM), ``video_metadata`` counts them.

    Raises:
        ModelError: the output has neither a grid nor pixels.
    """
    if (grid := inputs.get("video_grid_thw")) is not None:
        return int(grid[:, 0].sum())
    _, pixels = find_pixels(inputs)
    if pixels.ndim == 4 and len(pixels) == 1 and (metadata := inputs.get("video_metadata")):
        return len(metadata[0].frames_indices)  # one row has the patches of all frames (MiniCPM)
    return int(pixels.shape[pixels.ndim == 5])


def find_pixels(inputs: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return (name, values) of the first ``pixel_values...`` tensor of an output. Raises ModelError without one."""
    for name, value in inputs.items():
        if name.startswith("pixel_values") and isinstance(value, Tensor):
            return name, value
    raise ModelError(f"the processor of this model makes no pixels of a video, but {', '.join(inputs)}")


def count_steps(config: Any, inputs: Mapping[str, Any], units_per_step: float, n_rows: int, tail: int) -> int:
    """Count the steps T of a video: the runs of placeholders in its prompt, or its units of time in steps.

    Runs count only if there are several, of equal length, and not more than the units.

    Args:
        n_rows: the number of rows of features, including the ``tail``.

    Raises:
        ModelError: no placeholder occurs ``n_rows`` times, or the rows do not divide into the steps.
    """
    steps = _count_runs(find_placeholders(config, inputs["input_ids"], n_rows)[0])
    units = count_units(inputs)
    if not 0 < steps <= units:  # more runs than units: the runs are not whole frames
        steps = max(1, math.ceil(units / units_per_step))
    if (n_rows - tail) % steps:
        raise ModelError(f"{n_rows - tail} rows of features do not divide into {steps} steps of time")
    return steps


def _count_runs(mask_L: Tensor) -> int:
    """Count the runs of True in a prompt's mask, if there are several of equal length; 0 otherwise."""
    _, lengths = torch.unique_consecutive(mask_L, return_counts=True)
    lengths = lengths[0 if mask_L[0] else 1 :: 2]
    return len(lengths) if len(lengths) > 1 and len(lengths.unique()) == 1 else 0


def list_separators(config: Any, input_ids: Tensor) -> list[tuple[int, ...]]:
    """List the texts between a prompt's placeholders (of the kind that occurs most often) as token ids.

    Adjacent placeholders have no text between them.
    """
    mask = max((input_ids[0] == i for i in list_placeholder_ids(config)), key=lambda mask: int(mask.sum()))
    columns = mask.nonzero()[:, 0].tolist()
    ids = input_ids[0].tolist()
    return [tuple(ids[a + 1 : b]) for a, b in itertools.pairwise(columns) if b > a + 1]


def list_placeholder_ids(config: Any) -> list[int]:
    """List the ids of a model's placeholders, without repetitions, those for videos before those for images."""
    values = [getattr(config, f"{kind}_token_{end}", None) for kind in ("video", "image") for end in ("id", "index")]
    return list(dict.fromkeys(value for value in values if isinstance(value, int)))


def find_placeholders(config: Any, input_ids: Tensor, n_rows: int) -> Tensor:
    """Return the mask, [1, L] bool, of the first placeholder that occurs ``n_rows`` times, or raise ModelError."""
    masks = [input_ids == i for i in list_placeholder_ids(config)]
    for mask in masks:
        if int(mask.sum()) == n_rows:
            return mask
    counts = ", ".join(str(int(mask.sum())) for mask in masks)
    raise ModelError(f"no placeholder occurs {n_rows} times in the prompt of this video, but {counts or 'none'}")


def find_time_axis(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the axis of time in the pixels of one video, and the number of entries of a unit along it."""
    _, pixels = find_pixels(inputs)
    if inputs.get("video_grid_thw") is None:
        return int(pixels.ndim == 5), 1
    return 0, len(pixels) // count_units(inputs)


def split_inputs(inputs: Mapping[str, Any], units: int) -> list[dict[str, Any]]:
    """Split a processor's output for one video into pieces of ``units`` units of time; the last may be shorter.

    Pixels, other tensors of the same length, the grid and frame counts are split; other values are shared. The result
    is a single copy if the video is not longer, its grid has several rows, or its pixels have no known form.
    """
    grid = inputs.get("video_grid_thw")
    name, pixels = find_pixels(inputs)
    total = count_units(inputs)
    axis, rows = find_time_axis(inputs)
    if total <= units or pixels.shape[axis] != total * rows or (grid is not None and len(grid) > 1):
        return [dict(inputs)]
    lead = pixels.shape[:axis]
    pieces = []
    for start in range(0, total, units):
        end = min(start + units, total)
        piece = dict(inputs)
        for key, value in inputs.items():
            is_timed = isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == pixels.shape[axis]
            if (key == name or is_timed) and value.shape[:axis] == lead and key not in ("input_ids", "attention_mask"):
                piece[key] = value.narrow(axis, start * rows, (end - start) * rows)
            elif "frames" in key and isinstance(value, Tensor) and value.numel() == 1 and int(value) == total:
                piece[key] = torch.full_like(value, end - start)  # other numbers might be equal by chance
        if grid is not None:
            piece["video_grid_thw"] = torch.cat([torch.full_like(grid[:, :1], end - start), grid[:, 1:]], dim=1)
        pieces.append(piece)
    return pieces


def encode_pieces(
    method: Callable[..., Any],
    inputs: Mapping[str, Any],
    layout: Layout,
    steps: int,
    device: torch.device | str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Encode one video, ``steps`` steps at once; return the rows of tokens and of each deepstack level.

    If the layout does not allow pieces, the video is encoded at once. Only the tail of the last piece is kept.
    """
    units = max(1, round(steps * layout.units_per_step)) if layout.in_pieces else count_units(inputs)
    pieces = split_inputs(inputs, units)
    parts = []
    for number, piece in enumerate(pieces, 1):
        levels = flatten_features(make_features(method, move_inputs(piece, device, dtype)))
        end = None if number == len(pieces) or not layout.tail else -layout.tail
        parts.append([level[:end] for level in levels])
    return [torch.cat(level) for level in zip(*parts, strict=True)]


def find_dependence(encode: Callable[[Tensor], tuple[list[Tensor], float]], frames: Tensor) -> tuple[int, int, float]:
    """Find the frames behind each row of tokens, by changing one frame at a time and comparing the rows.

    Args:
        encode: maps frames, [F, 3, H, W] uint8, to the rows of features of each level, of which only the first is
            compared, and the processor's units of time.
        frames: the frames to change; F should be a multiple of the frames that may be encoded together.

    Returns:
        (frames encoded together, rows behind the last step, units of time per step).

    Raises:
        ModelError: no row depends on the frames, a row depends on anything but one group of consecutive frames, or the
            number of rows depends on the pixels.
    """
    n = len(frames)
    (base, *_), units = encode(frames)
    changed = torch.zeros(n, len(base), dtype=torch.bool)
    for i in range(n):
        other = frames.clone()
        other[i] = 255 - other[i]
        (rows, *_), _ = encode(other)
        if rows.shape != base.shape:
            raise ModelError("the number of visual tokens of this model depends on the pixels")
        changed[i] = (rows != base).any(-1).cpu()
    touched = changed.any(0)
    if not touched.any():
        raise ModelError("the features of this model do not depend on the frames")
    last = int(touched.nonzero().max())
    tail = len(base) - 1 - last if touched[:last].all() else 0  # constant rows between frames belong to the frames
    steps = len({tuple(row.tolist()) for row in changed})
    block = torch.arange(len(base)) // max(1, (len(base) - tail) // steps)
    if n % steps or any((changed[i] & (block != i // (n // steps))).any() for i in range(n)):
        counts = ", ".join(map(str, changed.sum(1).tolist()))
        raise ModelError(
            f"the visual tokens of this model mix frames: of {len(base)} rows {counts} change with each of {n} frames"
        )
    return n // steps, tail, units / steps


def probe_units(
    encode: Callable[[Mapping[str, Any]], list[Tensor]], inputs: Mapping[str, Any], base: Tensor
) -> tuple[int, int]:
    """Find the steps of a video without its frames, by changing the pixels of its first and last unit of time.

    Args:
        encode: maps a processor's output to the rows of features of each level; it is called three times.
        inputs: the processor's output for the video.
        base: its rows of features.

    Returns:
        (T, rows behind the last step). T is 1 if every frame changes every row. (units, 0), without a probe, if one row
        has the pixels of all frames.

    Raises:
        ModelError: rows mix frames in another way, or do not depend on them.
    """
    name, pixels = find_pixels(inputs)
    axis, entries = find_time_axis(inputs)
    units = count_units(inputs)
    if pixels.shape[axis] != units * entries:  # all patches are in one row (MiniCPM): the metadata counts the frames
        return units, 0

    def change(start: int, count: int) -> Tensor:
        """Replace ``count`` units of time by noise; return which rows change, [rows] bool."""
        other = pixels.clone()
        part = other.narrow(axis, start * entries, count * entries)
        noise = torch.rand(part.shape, generator=torch.Generator().manual_seed(0), device="cpu")
        part.copy_(2 * noise - 1 if part.is_floating_point() else (255 * noise).round())
        return (encode({**inputs, name: other})[0] != base).any(-1).cpu()

    changed = [change(0, 1), change(units - 1, 1)]
    if not all(rows.any() for rows in changed):
        raise ModelError("the features of this model do not depend on the frames")
    first_end = int(changed[0].nonzero().max()) + 1
    last = int(changed[1].nonzero().min())
    last_end = int(changed[1].nonzero().max()) + 1
    tail = len(base) - last_end if change(0, units)[:last_end].all() else 0  # as in find_dependence
    n_rows = len(base) - tail
    if first_end > n_rows - last or n_rows % (n_rows - last):
        raise ModelError(
            f"the visual tokens of this model mix frames: of {len(base)} rows {int(changed[0].sum())} change "
            f"with the first frames and {int(changed[1].sum())} with the last"
        )
    return n_rows // (n_rows - last), tail


def mark_kept_columns(mask_L: Tensor, rows: Tensor) -> Tensor:
    """Mark the columns to keep, [L] bool: all texts, and the placeholders (True in ``mask_L``) numbered ``rows``."""
    keep = ~mask_L
    keep[mask_L.nonzero()[:, 0][rows]] = True
    return keep


def list_kept_rows(index: Tensor, n_tokens: int, tail: int) -> Tensor:
    """Return the indices of a video's rows of features to keep: the kept tokens, and the tail."""
    return torch.cat([index, torch.arange(n_tokens, n_tokens + tail, device=index.device)])


def choose_default_positions(axes: int) -> str:
    """Return the default policy for positions: "original" for three axes, otherwise "contiguous"."""
    return "original" if axes == 3 else "contiguous"


def compute_prompt_positions(model: Any, inputs: Mapping[str, Any], keep: Tensor, policy: str | None) -> Tensor:
    """Compute the positions of the kept columns of a prompt by the model's own rule, [A, K].

    A is 1, or 3 for a model with positions in time, height and width.

    Args:
        inputs: the whole prompt, with everything that the rule reads.
        keep: [L] bool.
        policy: "original", the positions in the whole prompt; "contiguous", renumbered over the kept columns; None for
            :func:`choose_default_positions`.
    """
    others = {key: value for key, value in inputs.items() if key != "input_ids"}
    positions = model._prepare_position_ids_for_generation(inputs["input_ids"], others)
    # If there are four rows, the first numbers the tokens; models use it to detect packed sequences.
    positions_AL: Tensor = positions[-3:, 0] if positions.ndim == 3 else positions
    if (policy or choose_default_positions(len(positions_AL))) == "contiguous":
        return torch.arange(int(keep.sum()), device=keep.device).expand(len(positions_AL), -1).clone()
    kept: Tensor = positions_AL[:, keep]
    return kept
