"""Decoded frames -> patches, exactly as the stock video processors of Qwen2.5-VL and Qwen3-VL make them.

Both keep a video's shape and choose its size by its pixels: Qwen2.5-VL counts those of a frame, Qwen3-VL those of the
whole video. Sides are multiples of a token's (28 or 32 pixels). Two frames make one temporal patch; an odd last frame
is repeated. Follows Qwen2VLVideoProcessor and Qwen3VLVideoProcessor (transformers 5.23, models/qwen2_vl and qwen3_vl,
video_processing_*.py), whose patches come in the order of tokens: the 2 x 2 patches of a token lie side by side.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from gstep.backbones.preprocess.base import Preprocessor, check_settings, rgb_triple
from gstep.errors import ModelError, TooFewFrames, UnsupportedVideo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_ASPECT_RATIO = 200
# The cap of a long video: at least so many times min_pixels a frame, and such a share of max_video_tokens.
_FLOOR, _SHARE = 1.05, 0.9


@dataclass(frozen=True)
class DynamicSizePreprocessor(Preprocessor):
    """A preprocessor that keeps the shape of frames and chooses a size between ``min_pixels`` and ``max_pixels``.

    Attributes:
        patch_size: pixels of a patch's side.
        temporal_patch_size: frames of a patch.
        merge_size: patches of a token's side.
        min_pixels: ``size["shortest_edge"]`` of the settings: of a frame (Qwen2.5-VL) or of a video (Qwen3-VL).
        max_pixels: ``size["longest_edge"]``, likewise.
        max_video_tokens: what the cap of long videos goes by; None without ``cap_pixels_per_frame``.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    max_video_tokens: int | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Make a preprocessor of the settings of a checkpoint's preprocessor file, merged over the class defaults.

        Raises ModelError, naming the setting, where one asks for something that is not implemented here.
        """
        check_settings(settings)
        size = settings["size"]
        if not (isinstance(size, Mapping) and set(size) == {"shortest_edge", "longest_edge"}):
            raise ModelError(
                f"the preprocessor setting size={size!r} is not implemented: it must give shortest_edge and "
                "longest_edge, the least and the most pixels"
            )
        # Unset means no cap: transformers 5.23 still does so, although it announced a change for an earlier version.
        capped = bool(settings.get("cap_pixels_per_frame"))
        return cls(
            image_mean=rgb_triple(settings, "image_mean"),
            image_std=rgb_triple(settings, "image_std"),
            patch_size=positive_count(settings, "patch_size"),
            temporal_patch_size=positive_count(settings, "temporal_patch_size"),
            merge_size=positive_count(settings, "merge_size"),
            min_pixels=positive_count(size, "shortest_edge"),
            max_pixels=positive_count(size, "longest_edge"),
            max_video_tokens=positive_count(settings, "max_video_tokens") if capped else None,
        )

    @property
    def frames_per_patch(self) -> int:
        """Decoded frames that make one T of the tokens."""
        return self.temporal_patch_size

    @property
    def factor(self) -> int:
        """Pixels of a token's side."""
        return self.patch_size * self.merge_size

    @abstractmethod
    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels, multiples of ``factor``. Raises UnsupportedVideo for shapes not taken."""

    def grid_thw(self, n_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Return (T, H, W) in patches of ``n_frames`` resized frames of [height, width] pixels."""
        return -(-n_frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size

    def patches(self, frames: Tensor | NDArray[np.uint8], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Cut [t,h,w,3] uint8 into [T*H*W, 3*temporal_patch_size*patch_size**2] on ``device``, in order of tokens."""
        pixels = self.normalise(frames, device, dtype)
        if missing := -len(pixels) % self.temporal_patch_size:
            import torch  # noqa: PLC0415 - it made the pixels, so it is loaded

            pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
        T, H, W = self.grid_thw(len(pixels), *pixels.shape[2:])
        patch, merge = self.patch_size, self.merge_size
        blocks = pixels.view(T, -1, 3, H // merge, merge, patch, W // merge, merge, patch)
        return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(T * H * W, -1)

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "pixels": [self.min_pixels, self.max_pixels],
            "max_video_tokens": self.max_video_tokens,
        }


class PerFramePreprocessor(DynamicSizePreprocessor):
    """The preprocessor of Qwen2.5-VL, whose pixel limits are those of one frame."""

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels, multiples of ``factor``.

        Raises UnsupportedVideo above an aspect ratio of 200.
        """
        most = self.max_pixels
        if self.max_video_tokens is not None:
            total = int(self.max_video_tokens * self.factor * self.factor * _SHARE)
            most = max(min(most, total * self.temporal_patch_size // n_frames), int(self.min_pixels * _FLOOR))
        check_shape(height, width)
        return fit(height, width, 1, 1, self.factor, self.min_pixels, most)


class PerVideoPreprocessor(DynamicSizePreprocessor):
    """The preprocessor of Qwen3-VL, whose pixel limits are those of all sampled frames together."""

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels, multiples of ``factor``.

        Raises UnsupportedVideo above an aspect ratio of 200, TooFewFrames for fewer than a temporal patch has.
        """
        times = self.temporal_patch_size
        if n_frames < times:
            raise TooFewFrames(
                f"the model takes no video of fewer than {times} sampled frames, this one has {n_frames}: sample more, "
                "or take a longer clip"
            )
        most = self.max_pixels
        if self.max_video_tokens is not None:
            of_a_frame = min(self.max_video_tokens * self.factor * self.factor, most // n_frames)
            most = max(of_a_frame, int(self.min_pixels * _FLOOR)) * n_frames
        if height < self.factor or width < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        check_shape(height, width)
        return fit(height, width, n_frames, round(n_frames / times) * times, self.factor, self.min_pixels, most)


def check_shape(height: int, width: int) -> None:
    """Raise UnsupportedVideo if a frame's aspect ratio is above 200, the most that the models take."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise UnsupportedVideo(
            f"frames of {width}x{height} pixels have an aspect ratio of {ratio:.0f}; the model takes none above "
            f"{MAX_ASPECT_RATIO}: crop or pad the video"
        )


def fit(
    height: int, width: int, n_frames: int, n_counted: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return (height, width) as smart_resize of both stock processors does: multiples of ``factor``, pixels in bounds.

    ``n_counted`` is the number of frames that the bounds apply to, ``n_frames`` the one that the scale goes by.
    """
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = n_counted * rows * columns
    if pixels > max_pixels:
        scale = math.sqrt((n_frames * height * width) / max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (n_frames * height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return rows, columns


def positive_count(settings: Mapping[str, Any], name: str) -> int:
    """Return the setting ``name`` if it is a positive integer, else raise ModelError."""
    value = settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"the preprocessor setting {name}={value!r} is not implemented: it must be a positive integer")
    return value
