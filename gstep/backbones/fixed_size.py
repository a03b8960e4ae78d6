"""The base of LLaVA-OneVision and InternVL, which resize every frame to the fixed input size of the vision tower."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gstep.backbones.base import ModelFamily
from gstep.backbones.preprocess import FixedSizePreprocessor
from gstep.backbones.runtime import NameRule, Runtime, build_empty_model
from gstep.errors import ModelError

# Class defaults of LlavaOnevisionVideoProcessor and InternVLVideoProcessor (models/*/video_processing_*.py), for
# missing settings. The published files of InternVL have other values.
DEFAULTS: Mapping[str, Any] = {
    "size": {"height": 384, "width": 384},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class FixedSizeFamily(ModelFamily):
    """A family that encodes square frames of one size with the stock model, built without its language model."""

    video_processor: ClassVar[str]  # the name of the stock class

    @abstractmethod
    def image_side(self) -> int:
        """Return the side of the vision tower's square input in pixels."""

    @abstractmethod
    def check_features(self) -> None:
        """Raise ModelError if config.json takes visual tokens from layers that are not implemented."""

    @abstractmethod
    def names_in_memory(self, key: str) -> Sequence[str]:
        """List the names that a tensor called ``key`` on disk may have in the module, most likely first."""

    def pixel_defaults(self) -> Mapping[str, Any]:
        """Return the preprocessor settings to use where the checkpoint's file has none."""
        return DEFAULTS

    def empty_tower(self, runtime: Runtime) -> tuple[Any, NameRule]:
        model: Any = build_empty_model(self.source.parse_stock_config(), runtime)
        del model.language_model
        return model, self.names_in_memory

    def preprocessor(self) -> FixedSizePreprocessor:
        """Build the preprocessor from the checkpoint's settings over ``pixel_defaults()``; null counts as missing.

        Raises:
            ModelError: the checkpoint names another video processor, a setting is not implemented, config.json takes
                visual tokens from unsupported layers, or the frame size differs from the vision tower's input size.
        """
        source = self.source
        kind = source.preprocessor.get("video_processor_type", self.video_processor)
        if kind != self.video_processor:
            raise ModelError(f"{source.name!r} asks for the video processor {kind!r}, which is not implemented")
        self.check_features()
        settings = {name: value for name, value in source.preprocessor.items() if value is not None}
        preprocessor = FixedSizePreprocessor.from_settings({**self.pixel_defaults(), **settings})
        side = self.image_side()
        if (preprocessor.height, preprocessor.width) != (side, side):
            raise ModelError(
                f"{source.name!r}: the preprocessor setting size, {preprocessor.height} x {preprocessor.width}, does "
                f"not fit the vision tower of {side} x {side} pixels in config.json"
            )
        return preprocessor
