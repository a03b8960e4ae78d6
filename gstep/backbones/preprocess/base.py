"""Decoded frames -> pixel values, exactly as the stock video processors of transformers make them, in plain torch.

The stock processors need torchvision; this module needs torch alone, so that decode processes stay light. Resizing
happens where frames are decoded (uint8 in, uint8 out); normalising happens on the GPU, where the floats are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gstep.errors import ModelError

if TYPE_CHECKING:  # decode actors pickle preprocessors without torch; only their children resize
    import torch
    from torch import Tensor

BICUBIC = 3  # PIL.Image.Resampling.BICUBIC, as preprocessor files write it

# What this module implements, for every setting that changes pixel values. Another value is refused, never ignored.
_IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_center_crop": (None, False),
    "resample": (BICUBIC, None),  # None: not set, so the class default, which is bicubic for every family here
}


@dataclass(frozen=True)
class Preprocessor(ABC):
    """The rule that makes pixel values of a video's frames. Plain data: it pickles, and never imports transformers.

    Attributes:
        image_mean: per channel, in units of a pixel value scaled to [0, 1].
        image_std: likewise.
    """

    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]

    @property
    def frames_per_patch(self) -> int:
        """Decoded frames that make one T of the tokens (2 on Qwen models)."""
        return 1

    @abstractmethod
    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) in pixels to which a video of ``n_frames`` frames of [height, width] is resized.

        Raises UnsupportedVideo where the model takes no video of this shape.
        """

    def resize(self, frames: Tensor | NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
        """Resize [T,H,W,3] uint8 RGB to [T,h,w,3] uint8 on the CPU, bicubic with antialias, bit for bit as the stock.

        A frame's result does not depend on the other frames, so a video may be resized in chunks.
        Raises ValueError where ``frames`` is not uint8 [T,H,W,3].
        """
        return resize_frames(frames, size)

    def normalise(self, frames: Tensor | NDArray[np.uint8], device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Normalise [t,h,w,3] uint8 to [t,3,h,w] on ``device``: (x - 255 mean) / (255 std) in float32, then cast."""
        import torch  # noqa: PLC0415

        # The factor is folded into mean and std as the stock does: dividing x by 255 first is off by 5e-7.
        scale = 1.0 / (1 / 255)
        mean, std = (
            (torch.tensor(value, dtype=torch.float32, device="cpu") * scale).to(device)[:, None, None]
            for value in (self.image_mean, self.image_std)
        )
        pixels = as_frames(frames).to(device, non_blocking=True).permute(0, 3, 1, 2).to(torch.float32)
        return pixels.sub_(mean).div_(std).to(dtype).contiguous()

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the pixel values, JSON-able, for the fingerprint of a cache."""
        return {
            "resize": "bicubic antialias uint8",
            "image_mean": list(self.image_mean),
            "image_std": list(self.image_std),
            "frames_per_patch": self.frames_per_patch,
        }


def resize_frames(frames: Tensor | NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
    """Resize [T,H,W,3] uint8 to [T,h,w,3] uint8 on the CPU, bicubic with antialias.

    Raises ValueError for other arrays.
    """
    from torch.nn.functional import interpolate  # noqa: PLC0415

    frames_THWC = as_frames(frames)
    if frames_THWC.shape[1:3] == size:
        return frames_THWC
    frames_TCHW = frames_THWC.permute(0, 3, 1, 2)
    # uint8 in, uint8 out: torch rounds after each of the two passes, as torchvision does; floats would differ.
    resized = interpolate(frames_TCHW, size=size, mode="bicubic", antialias=True, align_corners=False)
    return resized.permute(0, 2, 3, 1).contiguous()


def as_frames(frames: Tensor | NDArray[np.uint8]) -> Tensor:
    """Convert ``frames`` to a uint8 tensor [T,H,W,3]. Raises ValueError where they are anything else."""
    import torch  # noqa: PLC0415

    if isinstance(frames, np.ndarray):
        # Arrays from the object store are read-only, which torch cannot represent, so it gets a copy.
        frames = torch.from_numpy(frames if frames.flags.writeable else frames.copy())
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"frames must be uint8 [T,H,W,3], got {frames.dtype} {list(frames.shape)}")
    return frames


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a preprocessor setting that changes pixel values in a way not implemented here."""
    for name, implemented in _IMPLEMENTED.items():
        value = settings.get(name, implemented[0])
        if value not in implemented:
            raise ModelError(
                f"the preprocessor setting {name}={value!r} is not implemented; expected {implemented[0]!r}"
            )
    factor = settings.get("rescale_factor", 1 / 255)
    if factor != 1 / 255:
        raise ModelError(f"the preprocessor setting rescale_factor={factor!r} is not implemented; expected 1/255")


def rgb_triple(settings: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """Read the setting ``name`` as three floats, one a channel. Raises ModelError where it is something else."""
    value = settings[name]
    if not (isinstance(value, list | tuple) and len(value) == 3):
        raise ModelError(f"the preprocessor setting {name}={value!r} is not three numbers, one a colour channel")
    red, green, blue = (float(v) for v in value)
    return red, green, blue
