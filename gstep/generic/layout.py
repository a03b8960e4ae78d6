"""How the rows of a video's features depend on its frames, and which columns of a prompt they fill.

Shapes: F frames, T steps of time (frames, or groups of frames), N tokens a step, D width, R rows behind the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gstep.backbones import ModelSource
from gstep.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """What the gate found out about a model: facts that are needed before its weights are loaded. JSON values.

    Attributes:
        hidden_size: D.
        deepstack_levels: the number of further vectors of each token.
        modality: "video" or "image", under which the model takes features.
        stacked: whether its features of a video are one tensor [1,rows,D] instead of a list of [rows,D].
        frames_per_step: frames that are encoded together.
        tail: R, rows behind the last frame's that depend on no frame (LLaVA-OneVision's newline).
        units_per_step: the processor's units of time (:func:`count_units`) of a step.
        axes: the numbers of a position: 1, or 3 (time, height, width).
        in_pieces: whether a video may be encoded in pieces of whole steps.
        in_batches: whether a batch of prompts gives the logits of single prompts.
        parity: how the gate showed that cached tokens give the stock model's logits.
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
        """Return the layout as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, source: ModelSource) -> Layout:
        """Return the layout that the gate attached to a model.

        Raises ModelError if the model was resolved without the gate.
        """
        if source.layout is None:
            raise ModelError(f"{source.name!r} was resolved without its check (ModelSource.resolve(..., gate=True))")
        return cls(**source.layout)


def flatten_features(output: Any) -> list[Tensor]:
    """Flatten an encoder's output to rows [rows,D]: of tokens, and of each deepstack level."""
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [torch.cat([part.flatten(0, -2) for part in level]) for level in levels]


def count_units(inputs: Mapping[str, Any]) -> int:
    """Count the units of time of a video in a processor's output: of its grids, or frames of pixels."""
    if (grid := inputs.get("video_grid_thw")) is not None:
        return int(grid[:, 0].sum())
    _, pixels = find_pixels(inputs)
    if pixels.ndim == 4 and len(pixels) == 1 and (metadata := inputs.get("video_metadata")):
        return len(metadata[0].frames_indices)  # one row of the patches of all frames (MiniCPM)
    return int(pixels.shape[pixels.ndim == 5])


def find_pixels(inputs: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Find the pixels in a processor's output: (name, values).

    Raises ModelError for a processor that makes none.
    """
    for name, value in inputs.items():
        if name.startswith("pixel_values") and isinstance(value, Tensor):
            return name, value
    raise ModelError(f"the processor of this model makes no pixels of a video, but {', '.join(inputs)}")


def count_steps(config: Any, inputs: Mapping[str, Any], units_per_step: float, n_rows: int, tail: int) -> int:
    """Count T: the runs of placeholders in a prompt, or what the processor says of the video's length.

    Raises ModelError if the rows of features do not divide into the steps.
    """
    steps, units = _count_runs(find_placeholders(config, inputs["input_ids"], n_rows)[0]), count_units(inputs)
    if not 0 < steps <= units:  # more runs than units are parts of frames
        steps = max(1, math.ceil(units / units_per_step))
    if (n_rows - tail) % steps:
        raise ModelError(f"{n_rows - tail} rows of features do not divide into {steps} steps of time")
    return steps


def _count_runs(mask_L: Tensor) -> int:
    """Count the runs of placeholders in a prompt, if there are several and all have one length; 0 otherwise."""
    _, lengths = torch.unique_consecutive(mask_L, return_counts=True)
    lengths = lengths[0 if mask_L[0] else 1 :: 2]
    return len(lengths) if len(lengths) > 1 and len(lengths.unique()) == 1 else 0


def placeholder_ids(config: Any) -> list[int]:
    """List the ids of a model's placeholders of videos and images, those of videos first."""
    values = [getattr(config, f"{kind}_token_{end}", None) for kind in ("video", "image") for end in ("id", "index")]
    return list(dict.fromkeys(value for value in values if isinstance(value, int)))


def find_placeholders(config: Any, input_ids: Tensor, n_rows: int) -> Tensor:
    """Find the places of a video's ``n_rows`` rows in a prompt, [1,L] bool: the special token that occurs as often.

    Raises ModelError if no placeholder occurs ``n_rows`` times.
    """
    masks = [input_ids == i for i in placeholder_ids(config)]
    for mask in masks:
        if int(mask.sum()) == n_rows:
            return mask
    counts = ", ".join(str(int(mask.sum())) for mask in masks)
    raise ModelError(f"no placeholder occurs {n_rows} times in the prompt of this video, but {counts or 'none'}")


def split_inputs(inputs: Mapping[str, Any], units: int) -> list[dict[str, Any]]:
    """Split a processor's output for one video into pieces of ``units`` units of time; pixels are cut, never frames.

    The last piece may be shorter. Returns a single piece if the output has no form that can be cut.
    """
    grid, (name, pixels) = inputs.get("video_grid_thw"), find_pixels(inputs)
    total = count_units(inputs)
    if total <= units:
        return [dict(inputs)]
    if grid is None and pixels.shape[axis := int(pixels.ndim == 5)] == total:
        lead, rows = pixels.shape[:axis], 1
    elif grid is not None and len(grid) == 1 and len(pixels) % total == 0:
        axis, lead, rows = 0, pixels.shape[:0], len(pixels) // total
    else:
        return [dict(inputs)]
    pieces = []
    for start in range(0, total, units):
        end = min(start + units, total)
        piece = dict(inputs)
        for key, value in inputs.items():
            is_timed = isinstance(value, Tensor) and value.ndim > axis and value.shape[axis] == pixels.shape[axis]
            if (key == name or is_timed) and value.shape[:axis] == lead and key not in ("input_ids", "attention_mask"):
                piece[key] = value.narrow(axis, start * rows, (end - start) * rows)
            elif "frames" in key and isinstance(value, Tensor) and value.numel() == 1 and int(value) == total:
                piece[key] = torch.full_like(value, end - start)  # of other numbers one may be equal by chance
        if grid is not None:
            piece["video_grid_thw"] = torch.cat([torch.full_like(grid[:, :1], end - start), grid[:, 1:]], dim=1)
        pieces.append(piece)
    return pieces


def find_dependence(encode: Callable[[Tensor], tuple[list[Tensor], float]], frames: Tensor) -> tuple[int, int, float]:
    """Find the frames behind each row of features: change one frame at a time, and look which rows change.

    Args:
        encode: maps frames, [F,3,H,W] uint8, to the rows of features of each level, and the processor's units of time.
        frames: the frames to change; F should be a multiple of the frames that may be encoded together.

    Returns (frames encoded together, rows behind the last frame's, units of time of a step).

    Raises ModelError if rows mix frames in another way than in groups of consecutive frames.
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
    tail = len(base) - 1 - last if touched[:last].all() else 0  # constant rows between the frames are of the frames
    steps = len({tuple(row.tolist()) for row in changed})
    block = torch.arange(len(base)) // max(1, (len(base) - tail) // steps)
    if n % steps or any((changed[i] & (block != i // (n // steps))).any() for i in range(n)):
        counts = ", ".join(map(str, changed.sum(1).tolist()))
        raise ModelError(
            f"the visual tokens of this model mix frames: of {len(base)} rows {counts} change with each of {n} frames"
        )
    return n // steps, tail, units / steps


def keep_columns(mask_L: Tensor, rows: Tensor) -> Tensor:
    """Choose the columns of a prompt that stay, [L] bool: all but the placeholders of rows that are not in ``rows``."""
    keep = ~mask_L
    keep[mask_L.nonzero()[:, 0][rows]] = True
    return keep


def kept_rows(index: Tensor, n_tokens: int, tail: int) -> Tensor:
    """Return the rows of a video's features that stay: the kept tokens, and the rows behind the last step."""
    return torch.cat([index, torch.arange(n_tokens, n_tokens + tail, device=index.device)])


def prompt_positions(model: Any, inputs: Mapping[str, Any], keep: Tensor, policy: str) -> Tensor:
    """Compute the positions of the kept columns of a prompt by the model's own rule, [A,K].

    A is 1, or 3 for a model with positions in time, height and width.

    Args:
        keep: [L] bool.
        policy: "original", the positions in the whole prompt; or "contiguous", renumbered over the kept columns.
    """
    others = {key: value for key, value in inputs.items() if key != "input_ids"}
    place = model._prepare_position_ids_for_generation(inputs["input_ids"], others)
    # Of four rows the first counts the tokens; models take it for the texts of a packed sequence.
    place_AL: Tensor = place[-3:, 0] if place.ndim == 3 else place
    if policy == "contiguous":
        return torch.arange(int(keep.sum()), device="cpu").expand(len(place_AL), -1).clone()
    return place_AL[:, keep]
