"""Conversion of decoded frames to pixel values in plain torch, bit-identical to the stock video processors.

The stock processors need torchvision; this module needs only torch, so that decode processes stay light. Frames are
resized in the decode process (uint8 in, uint8 out) and normalized on the device that encodes. The rules of the Qwen
families follow Qwen2VLVideoProcessor and Qwen3VLVideoProcessor (transformers 5.23). Patches are in token order: the 2 x
2 patches of a token are adjacent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from gstep.errors import ModelError, TooFewFrames, UnsupportedVideo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BICUBIC = 3  # PIL.Image.Resampling.BICUBIC, as preprocessor files write it

# Settings that change pixel values -> the values that are implemented. Other values are refused, never ignored.
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_center_crop": (None, False),
    "resample": (BICUBIC, None),  # None means the class default, which is bicubic for all families
}


@dataclass(frozen=True)
class Preprocessor(ABC):
    """The rule from a video's frames to pixel values: plain data that pickles and never imports transformers.

    Attributes:
        image_mean: mean per RGB channel, for pixel values scaled to [0, 1].
        image_std: standard deviation per RGB channel, for pixel values scaled to [0, 1].
    """

    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def frames_per_patch(self) -> int:
        """The number of decoded frames that make one T of the tokens (2 on Qwen models)."""
        return 1

    @abstractmethod
    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Choose the (height, width) in pixels to which ``n_frames`` frames of [height, width] pixels are resized.

        Raises:
            UnsupportedVideo: the model does not take videos of this shape.
        """

    def resize(self, frames: Tensor | NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
        """Resize each frame of [T,H,W,3] uint8 RGB on the CPU to [T,h,w,3] uint8, exactly as the stock processor."""
        return resize_frames(frames, size)

    def normalise(self, frames: Tensor | NDArray[np.uint8], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Normalize [t,h,w,3] uint8 to a contiguous [t,3,h,w] on ``device``.

        Computes (x - 255 mean) / (255 std) in float32, then casts to ``dtype``.

        Raises:
            ValueError: ``frames`` is not uint8 [t,h,w,3].
        """
        import torch  # noqa: PLC0415

        # The factor is folded into mean and std, as in the stock processor: dividing x by 255 first differs by 5e-7.
        scale = 1.0 / (1 / 255)
        mean, std = (
            (torch.tensor(value, dtype=torch.float32, device="cpu") * scale).to(device)[:, None, None]
            for value in (self.image_mean, self.image_std)
        )
        pixels = as_frames(frames).to(device, non_blocking=True).permute(0, 3, 1, 2).to(torch.float32)
        return pixels.sub_(mean).div_(std).to(dtype).contiguous()

    def settings(self) -> dict[str, Any]:
        """Return all settings that determine the pixel values, as JSON values for a cache's fingerprint."""
        return {
            "resize": "bicubic antialias uint8",
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "frames_per_patch": self.frames_per_patch,
        }


def resize_frames(frames: Tensor | NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
    """Resize [T,H,W,3] uint8 to ``size`` (h, w) on the CPU, bicubic with antialiasing: [T,h,w,3] uint8.

    Frames of this size already are returned without a copy.

    Raises:
        ValueError: ``frames`` is not uint8 [T,H,W,3].
    """
    from torch.nn.functional import interpolate  # noqa: PLC0415

    frames_THWC = as_frames(frames)
    if frames_THWC.shape[1:3] == size:
        return frames_THWC
    frames_TCHW = frames_THWC.permute(0, 3, 1, 2)
    # On uint8, torch rounds after each of the two passes, as torchvision does; on floats the result would differ.
    frames_TChw = interpolate(frames_TCHW, size=size, mode="bicubic", antialias=True, align_corners=False)
    return frames_TChw.permute(0, 2, 3, 1).contiguous()


def as_frames(frames: Tensor | NDArray[np.uint8]) -> Tensor:
    """Check that ``frames`` is uint8 [T,H,W,3], and return it as a tensor; T may be 0.

    A tensor is returned as it is, and an array as a tensor that shares its memory; only an array that is read-only or
    has a negative stride is copied.

    Raises:
        ValueError: ``frames`` has another type, dtype or shape.
    """
    import torch  # noqa: PLC0415

    if isinstance(frames, np.ndarray) and frames.dtype == np.uint8:
        # torch supports neither; arrays from Ray's object store are read-only, and a flip converts BGR to RGB.
        is_supported = frames.flags.writeable and all(stride >= 0 for stride in frames.strides)
        frames = torch.from_numpy(frames if is_supported else frames.copy())
    if not isinstance(frames, torch.Tensor):
        shape = f"{frames.dtype} {list(frames.shape)}" if isinstance(frames, np.ndarray) else type(frames).__name__
        raise ValueError(f"frames must be uint8 [T,H,W,3], got {shape}")
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"frames must be uint8 [T,H,W,3], got {frames.dtype} {list(frames.shape)}")
    return frames


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ModelError unless the settings in _IMPLEMENTED and rescale_factor (1/255) have values that are implemented.

    Missing settings pass.
    """
    for name, implemented in _IMPLEMENTED.items():
        value = settings.get(name, implemented[0])
        if value not in implemented:
            raise ModelError(
                f"the preprocessor setting {name}={value!r} is not implemented; expected {implemented[0]!r}"
            )
    factor = settings.get("rescale_factor", 1 / 255)
    if factor != 1 / 255:
        raise ModelError(f"the preprocessor setting rescale_factor={factor!r} is not implemented; expected 1/255")


def read_rgb_triple(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """Read the setting ``name``, which must be present, as three floats; raise ModelError if it has another form."""
    value = settings[name]
    if not (isinstance(value, list | tuple) and len(value) == 3 and all(isinstance(v, int | float) for v in value)):
        raise ModelError(f"the preprocessor setting {name}={value!r} is not three numbers, one per color channel")
    red, green, blue = (float(v) for v in value)
    return red, green, blue


@dataclass(frozen=True)
class FixedSizePreprocessor(Preprocessor):
    """A preprocessor that resizes every frame to a fixed ``height`` and ``width``, whatever its aspect ratio."""

    height: int
    width: int

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FixedSizePreprocessor:
        """Create a preprocessor from a checkpoint's settings, including ``size``, ``image_mean`` and ``image_std``.

        Raises:
            ModelError: a setting has a value that is not implemented.
        """
        check_settings(settings)
        size = settings["size"]
        if not (isinstance(size, Mapping) and set(size) == {"height", "width"}):
            raise ModelError(
                f"the preprocessor setting size={size!r} is not implemented: it must give height and width"
            )
        mean, std = read_rgb_triple(settings, "image_mean"), read_rgb_triple(settings, "image_std")
        height, width = read_positive_count(size, "height"), read_positive_count(size, "width")
        return cls(image_mean=mean, image_std=std, height=height, width=width)

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the fixed (height, width) in pixels."""
        return self.height, self.width

    def settings(self) -> dict[str, Any]:
        """Return all settings that determine the pixel values, as JSON values."""
        return {**super().settings(), "size": [self.height, self.width]}


MAX_ASPECT_RATIO = 200
# The size cap of long videos, as in the stock processors.
_FLOOR = 1.05  # a frame is never capped below this multiple of min_pixels
_SHARE = 0.9  # the share of max_video_tokens that Qwen2.5-VL uses


@dataclass(frozen=True)
class DynamicSizePreprocessor(Preprocessor):
    """A preprocessor that keeps the aspect ratio of frames and chooses a size within pixel limits.

    Attributes:
        patch_size: the side of a patch in pixels.
        temporal_patch_size: the number of frames in a temporal patch.
        merge_size: the side of a token in patches.
        min_pixels: ``size["shortest_edge"]`` of the settings: pixels per frame (Qwen2.5-VL) or per video (Qwen3-VL).
        max_pixels: ``size["longest_edge"]``, in the same unit.
        max_video_tokens: the number of tokens that caps the frame size of long videos; None for no cap.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    max_video_tokens: int | None = None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Create a preprocessor from a checkpoint's preprocessor settings.

        Args:
            settings: the settings merged over the class defaults, so that none is missing. ``max_video_tokens`` is
                ignored unless ``cap_pixels_per_frame`` is true.

        Raises:
            ModelError: a setting has a value that is not implemented.
        """
        check_settings(settings)
        size = settings["size"]
        if not (isinstance(size, Mapping) and set(size) == {"shortest_edge", "longest_edge"}):
            raise ModelError(
                f"the preprocessor setting size={size!r} is not implemented: it must give shortest_edge and "
                "longest_edge, the minimum and maximum of pixels"
            )
        # Unset means no cap, still in transformers 5.23, although a change was announced for an earlier version.
        capped = bool(settings.get("cap_pixels_per_frame"))
        return cls(
            image_mean=read_rgb_triple(settings, "image_mean"),
            image_std=read_rgb_triple(settings, "image_std"),
            patch_size=read_positive_count(settings, "patch_size"),
            temporal_patch_size=read_positive_count(settings, "temporal_patch_size"),
            merge_size=read_positive_count(settings, "merge_size"),
            min_pixels=read_positive_count(size, "shortest_edge"),
            max_pixels=read_positive_count(size, "longest_edge"),
            max_video_tokens=read_positive_count(settings, "max_video_tokens") if capped else None,
        )

    @property
    def frames_per_patch(self) -> int:
        """The number of decoded frames that make one T of the tokens."""
        return self.temporal_patch_size

    @property
    def factor(self) -> int:
        """The side of a token in pixels."""
        return self.patch_size * self.merge_size

    @abstractmethod
    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Choose the (height, width) in pixels to which frames are resized, multiples of ``factor``."""

    def grid_thw(self, n_frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Compute the grid of patches (T, H, W) of resized frames; an incomplete last temporal patch counts."""
        return -(-n_frames // self.temporal_patch_size), height // self.patch_size, width // self.patch_size

    def patches(self, frames: Tensor | NDArray[np.uint8], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Normalize resized frames [t,h,w,3] uint8 and cut them into flattened patches in token order, on ``device``.

        If t is not a multiple of ``temporal_patch_size``, the last frame is repeated.

        Returns:
            [T*H*W, 3*temporal_patch_size*patch_size**2] in ``dtype``.
        """
        pixels = self.normalise(frames, device, dtype)
        if missing := -len(pixels) % self.temporal_patch_size:
            import torch  # noqa: PLC0415 - loaded already, since the pixels exist

            pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
        T, H, W = self.grid_thw(len(pixels), *pixels.shape[2:])
        patch, merge = self.patch_size, self.merge_size
        blocks = pixels.view(T, -1, 3, H // merge, merge, patch, W // merge, merge, patch)
        return blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(T * H * W, -1)

    def settings(self) -> dict[str, Any]:
        """Return all settings that determine the pixel values, as JSON values."""
        return {
            **super().settings(),
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "pixels": [self.min_pixels, self.max_pixels],
            "max_video_tokens": self.max_video_tokens,
        }


class PerFramePreprocessor(DynamicSizePreprocessor):
    """The preprocessor of Qwen2.5-VL, whose pixel limits apply to each frame."""

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Choose the (height, width) in pixels to which frames are resized, multiples of ``factor``.

        If ``max_video_tokens`` is set, all frames together have at most 0.9 of these tokens, but a frame's limit never
        falls below 1.05 ``min_pixels``.

        Raises:
            UnsupportedVideo: the aspect ratio of the frames is above 200.
        """
        limit = self.max_pixels
        if self.max_video_tokens is not None:
            total = int(self.max_video_tokens * self.factor * self.factor * _SHARE)
            limit = max(min(limit, total * self.temporal_patch_size // n_frames), int(self.min_pixels * _FLOOR))
        check_shape(height, width)
        return choose_size_in_limits(height, width, 1, 1, self.factor, self.min_pixels, limit)


class PerVideoPreprocessor(DynamicSizePreprocessor):
    """The preprocessor of Qwen3-VL, whose pixel limits apply to all sampled frames together."""

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Choose the (height, width) in pixels to which frames are resized, multiples of ``factor``.

        If ``max_video_tokens`` is set, each frame is also limited to that many tokens, but not below 1.05
        ``min_pixels``. Frames with a side below ``factor`` are scaled up first.

        Raises:
            TooFewFrames: the video has fewer frames than a temporal patch.
            UnsupportedVideo: the aspect ratio of the frames is above 200.
        """
        times = self.temporal_patch_size
        if n_frames < times:
            raise TooFewFrames(
                f"the model takes no video of fewer than {times} sampled frames, this one has {n_frames}: sample more, "
                "or take a longer clip"
            )
        limit = self.max_pixels
        if self.max_video_tokens is not None:
            frame_limit = min(self.max_video_tokens * self.factor * self.factor, limit // n_frames)
            limit = max(frame_limit, int(self.min_pixels * _FLOOR)) * n_frames
        if height < self.factor or width < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        check_shape(height, width)
        return choose_size_in_limits(
            height, width, n_frames, round(n_frames / times) * times, self.factor, self.min_pixels, limit
        )


def check_shape(height: int, width: int) -> None:
    """Raise UnsupportedVideo if the longer side is more than 200 times the shorter side."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise UnsupportedVideo(
            f"frames of {width}x{height} pixels have an aspect ratio of {ratio:.0f}; the model takes none above "
            f"{MAX_ASPECT_RATIO}: crop or pad the video"
        )


def choose_size_in_limits(
    height: int, width: int, n_frames: int, n_bounded: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Choose the (height, width) to which frames are resized, by the rule of both stock processors' smart_resize.

    Both are multiples of ``factor``. First the sides are rounded to the nearest multiples. If ``n_bounded`` frames of
    this size have more than ``max_pixels`` or less than ``min_pixels``, the sides are instead scaled down or up so that
    ``n_frames`` original frames would meet the limit. A side never shrinks below ``factor`` then, even if
    ``max_pixels`` is exceeded. Unlike smart_resize, this function accepts any aspect ratio.
    """
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    pixels = n_bounded * rows * columns
    if pixels > max_pixels:
        scale = math.sqrt((n_frames * height * width) / max_pixels)
        rows = max(factor, math.floor(height / scale / factor) * factor)
        columns = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (n_frames * height * width))
        rows = math.ceil(height * scale / factor) * factor
        columns = math.ceil(width * scale / factor) * factor
    return rows, columns


def read_positive_count(settings: Mapping[str, Any], name: str) -> int:
    """Read the setting ``name``, which must be present, as a positive integer; raise ModelError otherwise."""
    value = settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"the preprocessor setting {name}={value!r} is not implemented: it must be a positive integer")
    return value
