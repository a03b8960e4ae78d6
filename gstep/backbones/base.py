"""A model before its weights are loaded (``ModelFamily``), and loaded (``Backbone``): frames in, visual tokens out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gstep.backbones.preprocess import Preprocessor, as_frames
from gstep.backbones.runtime import NameRule, Runtime, check_names
from gstep.backbones.siglip import TextTowerSource
from gstep.checkpoints.source import ModelSource
from gstep.checkpoints.tensors import stored_types
from gstep.errors import ModelError, is_out_of_memory
from gstep.evidence import HEAD_SOURCES, describe_evidence, name_of
from gstep.types import VisualTokens

if TYPE_CHECKING:
    from gstep.backbones.gpu_forms import FusedSteps
    from gstep.backbones.siglip import PoolingHead


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
        stock_fps: frames a second that the stock processor samples where nothing else is said; None for a count.
        min_rule: where the stock processor places the least frames that it samples: "rounded" or "stepped", as
            pipeline.video.sampling explains.
    """

    source: ModelSource

    model_type: ClassVar[str]
    variant: ClassVar[str]
    gives: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    default_max_frames: ClassVar[int] = 32
    stock_fps: ClassVar[float | None] = None
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

    def empty_tower(self, runtime: Runtime) -> tuple[nn.Module, NameRule] | None:
        """Build the vision part on the meta device, with the rule that maps names on disk to names in it.

        None for a family that does not tell.
        """
        return None

    def check_tensors(self) -> bool:
        """Check by names that the checkpoint has the vision part, unquantized; no weight is read or downloaded.

        Return False where nothing could be checked: the names are not known here, or the family tells none.

        Raises ModelError, naming some, where tensors are missing or quantized.
        """
        if (stored := stored_types(self.source)) is None:
            return False
        if (built := self.empty_tower(Runtime("cpu", torch.float32, "sdpa"))) is None:
            return False
        check_names(self.source.name, *built, stored)
        return True

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


class ModelExtra(TypedDict, total=False):
    """The facts about one video that a language model needs besides its tokens, as they are stored: JSON values.

    ``grid``, [rows, columns] in which the N tokens of a frame (temporal patch) lie row by row, is always there; a
    family adds what its positions depend on.
    """

    grid: list[int]
    video_grid_thw: list[int]
    spatial_merge_size: int
    temporal_patch_size: int
    second_per_grid_ts: float
    tokens_per_second: int
    patch_timestamps: list[float]
    deepstack_levels: int


@dataclass(frozen=True)
class SampledVideo:
    """The sampled frames of one video as an encoder gets them, without their pixels.

    Attributes:
        height: of the resized frames, in pixels.
        width: likewise.
        timestamps: seconds from the start of the source, one a frame.
        start_s: where the clip starts in the source, in seconds; None for its beginning.
        fps: average frames a second of the whole source.
        clip_frames: frames of the source inside the clip.
        clip_fps: frames a second of the clip, where the source's rate varies; None for ``fps``.
    """

    height: int
    width: int
    timestamps: Sequence[float]
    start_s: float | None
    fps: float
    clip_frames: int
    clip_fps: float | None = None

    @property
    def n_frames(self) -> int:
        """Sampled frames, repeated ones counted."""
        return len(self.timestamps)

    @property
    def sampled_fps(self) -> float:
        """Sampled frames a second of the clip, as VideoMetadata.sampled_fps of transformers (video_utils.py)."""
        return self.n_frames / self.clip_frames * (self.clip_fps or self.fps)

    @property
    def times_in_clip(self) -> list[float]:
        """Seconds from the start of the clip; 0 for a frame that came up before it and is still on screen."""
        return [max(0.0, at - (self.start_s or 0.0)) for at in self.timestamps]


_NOTHING: Mapping[str, str] = MappingProxyType({})


class Backbone(ABC):
    """The vision part of a video LLM on one device, in eval mode; :meth:`ModelFamily.load` makes it."""

    pooling_head: PoolingHead | None = None

    def __init__(
        self, family: ModelFamily, model: Any, preprocessor: Preprocessor, runtime: Runtime, frame_batch: int
    ) -> None:
        self.family = family
        self.model = model
        self.preprocessor = preprocessor
        self.device = runtime.device
        self.on_cpu = torch.device(runtime.device).type == "cpu"
        self.dtype = runtime.dtype
        self.frame_batch = frame_batch
        self.steps = None if self.on_cpu else self._suit_gpu()

    def _suit_gpu(self) -> FusedSteps | None:
        """Change the loaded model to the form that a GPU runs fast (gstep.backbones.gpu_forms); None without one."""
        return None

    @property
    def form(self) -> str:
        """The form of the vision tower, for the provenance of a run: "stock", "gpu" or "gpu, kernels"."""
        if self.steps is None:
            return "stock"
        return "gpu, kernels" if self.steps.kernels else "gpu"

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """D, the width of a visual token."""

    def newline(self) -> Tensor | None:
        """Return the row [D] that follows a video's tokens, on the device in the compute dtype, or None without one."""
        return None

    @abstractmethod
    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Encode consecutive frames of one video, [t,h,w,3] uint8 as ``preprocessor.resize`` makes them, to [T,N,D].

        The evidence, which was checked, comes with them: [T,...] each in float32.
        """

    def encode_pass(self, videos: Sequence[Tensor], evidence: Mapping[str, str]) -> list[VisualTokens]:
        """Encode several videos, each given and returned as by ``encode_chunk``, where a family can in one pass."""
        return [self.encode_chunk(frames, evidence) for frames in videos]

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the vision tower up to the last one that visual tokens are made from; () without any."""
        return ()

    def chunk_length(self, height: int, width: int, frame_batch: int) -> int:
        """Return the number of frames of [height, width] pixels to encode at once, at most ``frame_batch``."""
        return frame_batch

    def pass_share(self, n_frames: int, height: int, width: int) -> Fraction:
        """Return the share of one pass of the tower that frames of [height, width] pixels take; above 1 for several."""
        patches = -(-n_frames // self.preprocessor.frames_per_patch)
        length = self.chunk_length(height, width, self.frame_batch)
        return Fraction(patches * self.preprocessor.frames_per_patch, length)

    @torch.no_grad()
    def encode(self, frames: Tensor | NDArray[np.uint8], evidence: Mapping[str, str] = _NOTHING) -> VisualTokens:
        """Encode one video, [t,h,w,3] uint8 as ``preprocessor.resize`` makes it, to [T,N,D] in the compute dtype.

        T is t, or the number of temporal patches. Frames are encoded in fixed chunks of this one video, so its tokens
        never depend on which videos were encoded before or beside it, nor on the evidence that is asked for; on a CPU
        nor on ``frame_batch``. This holds on one machine: other kinds of CPU or GPU round otherwise. A GPU whose memory
        is full gets chunks of half the size, and so on, for this video.

        Args:
            evidence: label -> source (gstep.evidence), as in ``Pruner.sources``: what the result holds besides the
                tokens, by its label, in float32.

        Raises ValueError for anything but at least one uint8 frame, ModelError for evidence that cannot be given,
        torch.OutOfMemoryError where even the smallest chunk does not fit.
        """
        self.family.check_evidence(evidence)
        frames_THWC = as_frames(frames)
        if not len(frames_THWC):
            raise ValueError("a video needs at least one frame")
        # A CPU's library chooses its kernel by a product's shape, and the kernel decides in which order a row's sum is
        # rounded (oneDNN with AMX in bfloat16, for example). With one frame at a time every product has the same
        # shape, whatever the video's length or ``frame_batch``; a frame's hundreds of rows keep the cores busy.
        _, height, width, _ = frames_THWC.shape
        batch = 1 if self.on_cpu else self.frame_batch
        while True:
            length = self.chunk_length(height, width, batch)
            try:
                return self._encoded([*torch.split(frames_THWC, length)], evidence)
            except Exception as error:
                batch = min(batch, length, len(frames_THWC)) // 2
                if not is_out_of_memory(error) or not batch or self.chunk_length(height, width, batch) >= length:
                    raise
            torch.cuda.empty_cache()  # not in the handler, where the error still holds the tensors

    @torch.no_grad()
    def encode_together(
        self, videos: Sequence[Tensor | NDArray[np.uint8]], evidence: Mapping[str, str] = _NOTHING
    ) -> list[VisualTokens]:
        """Encode several small videos in one pass of the tower, each as by :meth:`encode`.

        On a CPU every frame goes alone all the same, so a video's tokens have the same bits whichever videos share its
        pass. A GPU's library chooses its kernels by the number of rows of the whole pass, so the last bits of a
        product may depend on it there.

        Raises as :meth:`encode`, whichever video it concerns, and torch.OutOfMemoryError where the pass does not fit.
        """
        if self.on_cpu or len(videos) == 1:
            return [self.encode(frames, evidence) for frames in videos]
        self.family.check_evidence(evidence)
        return self.encode_pass([as_frames(frames) for frames in videos], evidence)

    def _encoded(self, frames: Sequence[Tensor], evidence: Mapping[str, str]) -> VisualTokens:
        """Encode chunks of frames one after the other into the tensors of the whole video: tokens, evidence, levels."""
        if len(frames) == 1:
            return self.encode_chunk(frames[0], evidence)
        n_patches, done = sum(-(-len(chunk) // self.preprocessor.frames_per_patch) for chunk in frames), 0
        wholes: list[Tensor] = []
        for chunk in frames:
            visual = self.encode_chunk(chunk, evidence)
            parts = (visual.tokens, *(visual.evidence[name] for name in evidence), *visual.deepstack)
            wholes = wholes or [part.new_empty((n_patches, *part.shape[1:])) for part in parts]
            for whole, part in zip(wholes, parts, strict=True):
                whole[done : done + len(part)] = part
            done += len(visual.tokens)
        tokens, *others = wholes
        return VisualTokens(tokens, dict(zip(evidence, others, strict=False)), tuple(others[len(evidence) :]))

    @abstractmethod
    def model_extra(self, video: SampledVideo) -> ModelExtra:
        """Return the facts about one video that its tokens do not tell."""
