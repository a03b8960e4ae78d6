"""The processor of families that see every frame at one size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gstep.backbones.preprocess.base import Preprocessor, check_settings, rgb_triple
from gstep.errors import ModelError


@dataclass(frozen=True)
class FixedSizePreprocessor(Preprocessor):
    """A preprocessor that resizes every frame to one size, whatever its shape (LLaVA-OneVision: 384 x 384)."""

    height: int
    width: int

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> FixedSizePreprocessor:
        """Make a preprocessor of the settings of a checkpoint's preprocessor file, merged over the class defaults.

        Raises ModelError, naming the setting, where one asks for something that is not implemented here.
        """
        check_settings(settings)
        size = settings["size"]
        if not (isinstance(size, Mapping) and set(size) == {"height", "width"}):
            raise ModelError(
                f"the preprocessor setting size={size!r} is not implemented: it must give height and width"
            )
        mean, std = rgb_triple(settings, "image_mean"), rgb_triple(settings, "image_std")
        return cls(image_mean=mean, image_std=std, height=int(size["height"]), width=int(size["width"]))

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels, the same for every video."""
        return self.height, self.width

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "size": [self.height, self.width]}
