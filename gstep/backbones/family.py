"""A model before any weight is loaded, and what its family can do: no pixels and no tokens yet."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from torch import Tensor

from gstep.backbones.preprocess.base import Preprocessor
from gstep.backbones.siglip.text import TextTowerSource
from gstep.checkpoints.source import ModelSource
from gstep.errors import ModelError
from gstep.evidence import HEAD_SOURCES, describe_evidence, name_of

if TYPE_CHECKING:
    from gstep.backbones.base import Backbone
    from gstep.backbones.runtime import Runtime


@dataclass(frozen=True)
class StaticParts:
    """The parts of a model that the header of a cache holds.

    Attributes:
        hidden_size: D, the width of a visual token.
        newline: [D] on the CPU, in the dtype stored on disk; None for a family without one.
        deepstack_levels: vectors of D that a token has besides its own.
    """

    hidden_size: int
    newline: Tensor | None
    deepstack_levels: int = 0


class TowerWork(NamedTuple):
    """The matrix products of a vision tower for one T (a frame, or a temporal patch on Qwen).

    Attributes:
        patches: of one T.
        of_patches: weights by which every patch is multiplied.
        of_tokens: weights by which every token is multiplied, once patches are merged.
        attention: operations of queries with keys, and of the result with values, in all layers.
    """

    patches: int
    of_patches: int
    of_tokens: int
    attention: int


@dataclass(frozen=True)
class ModelFamily(ABC):
    """The description of one model of a family, made of its config and preprocessor files.

    Attributes:
        source: the model.

    Class attributes:
        model_type: its name in the table of families.
        variant: the family's rules, of methods that have other ones for LLaVA than for Qwen.
        gives: the evidence it can give besides tokens, as pairs of a name and a source (gstep.evidence).
        default_max_frames: where frames are sampled by time and nothing else is said.
        min_rule: where the stock processor places the least frames that it samples: "rounded" or "stepped", as
            pipeline.video.sampling explains.
    """

    source: ModelSource

    model_type: ClassVar[str]
    variant: ClassVar[str]
    gives: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    default_max_frames: ClassVar[int] = 32
    min_rule: ClassVar[str] = "rounded"

    def min_frames(self) -> int:
        """Return the least frames that the stock processor samples of a clip by time, as far as it has them.

        Raises ModelError where the checkpoint's files give no positive number.
        """
        return 1

    @abstractmethod
    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> Backbone:
        """Load the vision part, ready to encode; no weight of the language model is read, and no memory taken for one.

        ``frame_batch`` is how many frames go through at once on a GPU; on a CPU they go one by one, so that tokens
        never depend on it (:meth:`Backbone.chunk_length`).

        Raises ModelError where weights are missing or have another shape than the config says.
        """

    @abstractmethod
    def preprocessor(self) -> Preprocessor:
        """Make the picklable preprocessor that the checkpoint's files describe, without weights or transformers.

        Raises ModelError where the files ask for something not implemented.
        """

    def limited(self, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None) -> ModelSource:
        """Return the same model with other limits of frame size or visual tokens than its preprocessor files set.

        Args:
            min_pixels, max_pixels: of a frame on Qwen2.5-VL, of all sampled frames together on Qwen3-VL.
            max_video_tokens: turns on the stock processors' cap of long videos (cap_pixels_per_frame).

        Raises ModelError for a family whose frames have one size, and for limits that exclude each other.
        """
        raise ModelError(f"{self.source.name!r} sees every frame at one size: limits of pixels are for Qwen models")

    def with_pooling_head(self, siglip: str | Path) -> ModelSource:
        """Return the same model with the attention-pooling head of a SigLIP checkpoint, which gives evidence.

        Args:
            siglip: a folder with safetensors or a Hugging Face id: the checkpoint that the model's vision tower was
                made of. "tiny" goes with the tiny LLaVA-OneVision. Only the head is read, here and where the model is
                loaded.

        Raises ModelError for a family without such a tower, and for a checkpoint without a head that fits.
        """
        raise ModelError(
            f"{self.source.name!r} has a vision tower of its own: a SigLIP checkpoint is for LLaVA-OneVision"
        )

    def text_tower(self, siglip: str | Path) -> TextTowerSource:
        """Find the text tower of the SigLIP checkpoint that the vision tower was made of, and its pooling head.

        Raises ModelError as :meth:`with_pooling_head` does, and for a checkpoint without a text tower that fits.
        """
        head = self.with_pooling_head(siglip).pooling_head
        assert head is not None
        return TextTowerSource.resolve(head)

    @classmethod
    def check_gives(cls, evidence: Mapping[str, str]) -> None:
        """Raise ModelError where no model of this family gives some of the evidence, label -> source."""
        if missing := {
            key: source for key, source in evidence.items() if (name_of(key, source), source) not in cls.gives
        }:
            raise ModelError(f"the encoder of {cls.model_type} does not give {describe_evidence(missing)}")

    def check_evidence(self, evidence: Mapping[str, str]) -> None:
        """Raise ModelError where this model, with its pooling head if any, lacks some evidence, label -> source."""
        self.check_gives(evidence)
        of_head = {name: source for name, source in evidence.items() if source in HEAD_SOURCES}
        if of_head and self.source.pooling_head is None:
            raise ModelError(
                f"{describe_evidence(of_head)} must be read from a SigLIP checkpoint, since one of {self.model_type} "
                "has no such head: name it with --siglip, for the published models google/siglip-so400m-patch14-384"
            )

    @abstractmethod
    def static(self) -> StaticParts:
        """Read hidden size, newline row and deepstack levels without building the model; imports no transformers.

        Raises ModelError where the checkpoint has no newline row although its family puts one after a video.
        """

    @abstractmethod
    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return (T, N) for frames of [height, width] pixels, from the config alone.

        T counts frames (temporal patches on Qwen), N the tokens of each; the preprocessor has resized the frames.
        """

    @abstractmethod
    def tower_work(self, height: int, width: int) -> TowerWork:
        """Count the work of encoding one T of frames of [height, width] pixels, from the config alone."""

    def flops(self, n_frames: int, height: int, width: int) -> int:
        """Count the floating-point operations of encoding frames as in ``token_counts``, from the config alone.

        A multiplication and an addition are two. Only matrix products and convolutions count, as in
        ``torch.utils.flop_counter``; the other operations of these towers are memory traffic.
        """
        (T, N), work = self.token_counts(n_frames, height, width), self.tower_work(height, width)
        return T * (2 * work.patches * work.of_patches + 2 * N * work.of_tokens + work.attention)

    @abstractmethod
    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        """Return the bytes of all visual tokens and of that evidence (by names) in bfloat16.

        Frames are as in ``token_counts``.

        Known from the config alone, for planning; a family's default stands in for what the config leaves out.
        """
