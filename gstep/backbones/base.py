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
from gstep.checkpoints.tensors import read_tensor_types
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
        deepstack_levels: the number of further vectors [D] of each token.
    """

    hidden_size: int
    newline: Tensor | None
    deepstack_levels: int = 0


class TowerWork(NamedTuple):
    """The matrix products of a vision tower for one T (a frame, or a temporal patch on Qwen).

    Attributes:
        patches: patches of one T.
        patch_weights: weights by which every patch is multiplied.
        token_weights: weights by which every token is multiplied, after patches are merged.
        attention: operations of queries with keys, and of the result with values, in all layers.
    """

    patches: int
    patch_weights: int
    token_weights: int
    attention: int


@dataclass(frozen=True)
class ModelFamily(ABC):
    """A model of a family before its weights are loaded, described by its config and preprocessor files.

    Attributes:
        source: the model.

    Class attributes:
        model_type: its name in the table of families.
        variant: "llava" or "qwen", for pruning methods that have different rules for each.
        gives: the evidence that its encoder can give, as (name, source) of gstep.evidence.
        default_max_frames: the default limit of frames that are sampled by time.
        stock_fps: the default frames a second of the stock processor; None if it samples a fixed number.
        min_rule: the stock processor's rule for the minimum number of frames: "rounded" or "stepped", see
            pipeline.video.sampling.
        prompts: the import path ``module:Class`` of the prompt builder of a family outside the table of families; None
            for such a family that does not answer questions.
    """

    source: ModelSource

    model_type: ClassVar[str]
    variant: ClassVar[str]
    gives: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    default_max_frames: ClassVar[int] = 32
    stock_fps: ClassVar[float | None] = None
    prompts: ClassVar[str | None] = None
    min_rule: ClassVar[str] = "rounded"

    def min_frames(self) -> int:
        """Return the minimum number of frames that the stock processor samples by time from a long enough clip.

        Raises ModelError if the checkpoint's files have no positive number.
        """
        return 1

    @abstractmethod
    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> Backbone:
        """Load the vision part, ready to encode; the language model is neither read nor allocated.

        ``frame_batch`` is the number of frames that a GPU encodes at once. A CPU encodes single frames, so that tokens
        do not depend on it (:meth:`Backbone.chunk_length`).

        Raises ModelError if weights are missing or do not have the shapes of the config.
        """

    def empty_tower(self, runtime: Runtime) -> tuple[nn.Module, NameRule] | None:
        """Build the vision part on the meta device; return it with the rule from names on disk to names in it.

        None for a family that does not implement it; then :meth:`check_tensors` checks nothing.
        """
        return None

    def check_tensors(self) -> bool:
        """Check by tensor names that the checkpoint has the vision part, unquantized; no weights are read.

        Returns False if nothing could be checked: the checkpoint's names are not available without a download, or the
        family has no :meth:`empty_tower`.

        Raises ModelError, with some names, if tensors are missing or quantized.
        """
        if (types := read_tensor_types(self.source)) is None:
            return False
        if (tower := self.empty_tower(Runtime("cpu", torch.float32, "sdpa"))) is None:
            return False
        check_names(self.source.name, *tower, types)
        return True

    @abstractmethod
    def preprocessor(self) -> Preprocessor:
        """Make the picklable preprocessor that the checkpoint's files describe, without weights or transformers.

        Raises ModelError if the files have a setting that is not implemented.
        """

    def with_limits(self, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None) -> ModelSource:
        """Return the same model with other limits of frame size or visual tokens than its preprocessor files have.

        Args:
            min_pixels, max_pixels: pixels of a frame on Qwen2.5-VL, of all sampled frames together on Qwen3-VL; None
                keeps the checkpoint's limit.
            max_video_tokens: turns on the stock processors' cap of long videos (cap_pixels_per_frame).

        Raises ModelError for a family whose frames have one size, and for limits that exclude each other.
        """
        raise ModelError(f"{self.source.name!r} sees every frame at one size: limits of pixels are for Qwen models")

    def with_pooling_head(self, siglip: str | Path) -> ModelSource:
        """Return the same model with the attention-pooling head of a SigLIP checkpoint, as a source of evidence.

        Args:
            siglip: the checkpoint of the model's vision tower, as a folder with safetensors or a Hugging Face id;
                "tiny" for the tiny LLaVA-OneVision. Only the head is read, here and when the model is loaded.

        Raises ModelError for a family without such a tower, and for a checkpoint without a head that fits.
        """
        raise ModelError(
            f"{self.source.name!r} has no SigLIP vision tower: a SigLIP checkpoint is for LLaVA-OneVision, leave it out"
        )

    def text_tower(self, siglip: str | Path) -> TextTowerSource:
        """Find the text tower and the pooling head of the SigLIP checkpoint behind the vision tower.

        ``siglip`` is a folder or a Hugging Face id, as for :meth:`with_pooling_head`. Raises ModelError for a family
        without such a tower, and for a checkpoint without a head and a text tower that fit.
        """
        head = self.with_pooling_head(siglip).pooling_head
        assert head is not None
        return TextTowerSource.resolve(head)

    @classmethod
    def check_gives(cls, evidence: Mapping[str, str]) -> None:
        """Raise ModelError if no model of this family can give some of the evidence, label -> source."""
        if missing := {
            key: source for key, source in evidence.items() if (name_of(key, source), source) not in cls.gives
        }:
            raise ModelError(f"the encoder of {cls.model_type} does not give {describe_evidence(missing)}")

    def check_evidence(self, evidence: Mapping[str, str]) -> None:
        """Raise ModelError if this model, with its pooling head if any, cannot give some evidence, label -> source."""
        self.check_gives(evidence)
        head_evidence = {name: source for name, source in evidence.items() if source in HEAD_SOURCES}
        if head_evidence and self.source.pooling_head is None:
            raise ModelError(
                f"{describe_evidence(head_evidence)} needs a SigLIP checkpoint, since {self.model_type} has no such "
                "head: name it with --siglip, for the published models google/siglip-so400m-patch14-384"
            )

    @abstractmethod
    def static(self) -> StaticParts:
        """Read hidden size, newline row and deepstack levels without building the model or importing transformers.

        Raises ModelError if the checkpoint lacks the newline row that its family puts after a video.
        """

    @abstractmethod
    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute (T, N) for resized frames of [height, width] pixels, from the config alone.

        T counts frames (temporal patches on Qwen), N the tokens of each.
        """

    @abstractmethod
    def tower_work(self, height: int, width: int) -> TowerWork:
        """Count the work of encoding one T of frames of [height, width] pixels, from the config alone."""

    def flops(self, n_frames: int, height: int, width: int) -> int | None:
        """Count the floating-point operations of encoding frames as in ``token_counts``, from the config alone.

        None for a family that does not know the work of its models.

        A multiplication and an addition are two. Only matrix products and convolutions count, as in
        ``torch.utils.flop_counter``; the other operations of these towers are memory traffic.
        """
        (T, N), work = self.token_counts(n_frames, height, width), self.tower_work(height, width)
        return T * (2 * work.patches * work.patch_weights + 2 * N * work.token_weights + work.attention)

    @abstractmethod
    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        """Compute the bytes of a video's visual tokens and evidence (names) in bfloat16, from the config alone.

        Frames are as in ``token_counts``. Keys that the config lacks have the family's defaults.
        """


class ModelExtra(TypedDict, total=False):
    """The facts about one video that a language model needs besides its tokens: JSON values, stored in the cache.

    ``grid``, [rows, columns] of the N tokens of a frame (temporal patch), is present in every family but ``generic``,
    whose encoder adds the processor's ``record`` and the rows ``tail`` (``VisualTokens.extra``) instead. A family adds
    the facts behind its positions.
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
        height: height of the resized frames, in pixels.
        width: width of the resized frames, in pixels.
        timestamps: each frame's seconds from the start of the source.
        start_s: the clip's start in the source, in seconds; None for the source's start.
        fps: average frames a second of the whole source.
        clip_frames: frames of the source inside the clip.
        clip_fps: frames a second of the clip if the source's rate varies; None for ``fps``.
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
        """The number of sampled frames, repeated frames included."""
        return len(self.timestamps)

    @property
    def sampled_fps(self) -> float:
        """Sampled frames a second of the clip, as VideoMetadata.sampled_fps of transformers (video_utils.py)."""
        return self.n_frames / self.clip_frames * (self.clip_fps or self.fps)

    @property
    def times_in_clip(self) -> list[float]:
        """Seconds from the start of the clip; 0 for a frame that appeared before it and is still on screen."""
        return [max(0.0, at - (self.start_s or 0.0)) for at in self.timestamps]


_NOTHING: Mapping[str, str] = MappingProxyType({})


class Backbone(ABC):
    """The vision part of a video LLM on one device, in eval mode; :meth:`ModelFamily.load` makes it."""

    pooling_head: PoolingHead | None = None

    def __init__(
        self, family: ModelFamily, model: Any, preprocessor: Preprocessor, runtime: Runtime, frame_batch: int
    ) -> None:
        """Take a loaded ``model``, in eval mode on the runtime's device; a GPU's is changed in place to its fast form.

        ``frame_batch`` is the number of frames that a GPU encodes at once.
        """
        self.family = family
        self.model = model
        self.preprocessor = preprocessor
        self.device = runtime.device
        self.on_cpu = torch.device(runtime.device).type == "cpu"
        self.dtype = runtime.dtype
        self.frame_batch = frame_batch
        self.steps = None if self.on_cpu else self._suit_gpu()

    def _suit_gpu(self) -> FusedSteps | None:
        """Change the loaded model in place to its fast form on a GPU (gstep.backbones.gpu_forms), or return None."""
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
        """Return the row [D] that follows a video's tokens, on the device in the compute dtype; None without it."""
        return None

    @abstractmethod
    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Encode consecutive resized frames of one video, [t,h,w,3] uint8, to tokens [T,N,D] and evidence [T,...].

        The evidence, label -> source, was checked before; it is float32.
        """

    def encode_pass(self, videos: Sequence[Tensor], evidence: Mapping[str, str]) -> list[VisualTokens]:
        """Encode several videos as by ``encode_chunk``; a family that can does it in one pass of the tower."""
        return [self.encode_chunk(frames, evidence) for frames in videos]

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the vision tower that visual tokens depend on, in order; () if the family lists none."""
        return ()

    def chunk_length(self, height: int, width: int, frame_batch: int) -> int:
        """Return the number of frames of [height, width] pixels to encode at once, usually at most ``frame_batch``."""
        return frame_batch

    def pass_share(self, n_frames: int, height: int, width: int) -> Fraction:
        """Compute the share of one pass of the tower that a video takes; above 1 if it takes several passes."""
        patches = -(-n_frames // self.preprocessor.frames_per_patch)
        length = self.chunk_length(height, width, self.frame_batch)
        return Fraction(patches * self.preprocessor.frames_per_patch, length)

    @torch.no_grad()
    def encode(
        self,
        frames: Tensor | NDArray[np.uint8],
        evidence: Mapping[str, str] = _NOTHING,
        video: SampledVideo | None = None,
    ) -> VisualTokens:
        """Encode one video of resized frames, [t,h,w,3] uint8, to tokens [T,N,D] in the compute dtype.

        T is t, or the number of temporal patches. Frames are encoded in fixed chunks of this video alone. Its tokens
        therefore depend neither on other videos nor on the requested evidence, and on a CPU not on ``frame_batch``.
        Other kinds of CPU or GPU round differently. If GPU memory runs out, the video is encoded again in chunks of
        half the size, and so on.

        Args:
            frames: frames as ``preprocessor.resize`` makes them.
            evidence: the evidence to compute too, label -> source, as in ``Pruner.sources``; float32 in the result.
            video: the times of the frames and the length of their clip, for a family whose tokens depend on them.

        Raises ValueError for anything but at least one uint8 frame, ModelError for evidence that the model cannot give,
        UnsupportedVideo for a video that the model does not take (TooFewFrames if it has too few frames),
        torch.OutOfMemoryError if even the smallest chunk does not fit.
        """
        self.family.check_evidence(evidence)
        frames_THWC = as_frames(frames)
        if not len(frames_THWC):
            raise ValueError("a video needs at least one frame")
        # A CPU's library chooses its kernel by a product's shape, and the kernel decides the order in which a row's sum
        # is rounded (oneDNN with AMX in bfloat16, for example). Single frames give every product the same shape, for
        # any length of video and any ``frame_batch``. A frame's hundreds of rows keep the cores busy.
        _, height, width, _ = frames_THWC.shape
        batch = 1 if self.on_cpu else self.frame_batch
        while True:
            length = self.chunk_length(height, width, batch)
            try:
                return self._encode_chunks([*torch.split(frames_THWC, length)], evidence)
            except Exception as error:
                batch = min(batch, length, len(frames_THWC)) // 2
                if not is_out_of_memory(error) or not batch or self.chunk_length(height, width, batch) >= length:
                    raise
            torch.cuda.empty_cache()  # not in the handler, where the error still holds the tensors

    @torch.no_grad()
    def encode_together(
        self,
        videos: Sequence[Tensor | NDArray[np.uint8]],
        evidence: Mapping[str, str] = _NOTHING,
        sampled: Sequence[SampledVideo] | None = None,
    ) -> list[VisualTokens]:
        """Encode several small videos in one pass of the tower, each as by :meth:`encode`.

        A CPU still encodes single frames, so that a video's tokens do not depend on the other videos. A GPU's library
        chooses its kernels by the number of rows of the whole pass, so the last bits of a product may depend on it.
        ``sampled`` describes the videos, in their order, as ``video`` of :meth:`encode`.

        Raises as :meth:`encode`, for any of the videos, and torch.OutOfMemoryError if the pass does not fit.
        """
        if self.on_cpu or len(videos) == 1:
            facts: Sequence[SampledVideo | None] = sampled or [None] * len(videos)
            return [self.encode(frames, evidence, video) for frames, video in zip(videos, facts, strict=True)]
        self.family.check_evidence(evidence)
        return self.encode_pass([as_frames(frames) for frames in videos], evidence)

    def _encode_chunks(self, frames: Sequence[Tensor], evidence: Mapping[str, str]) -> VisualTokens:
        """Encode one video's chunks of frames in order, into tensors of the whole video.

        Each chunk but the last must fill whole temporal patches.
        """
        if len(frames) == 1:
            return self.encode_chunk(frames[0], evidence)
        n_patches, start = sum(-(-len(chunk) // self.preprocessor.frames_per_patch) for chunk in frames), 0
        outputs: list[Tensor] = []
        for chunk in frames:
            visual = self.encode_chunk(chunk, evidence)
            parts = (visual.tokens, *(visual.evidence[name] for name in evidence), *visual.deepstack)
            outputs = outputs or [part.new_empty((n_patches, *part.shape[1:])) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[start : start + len(part)] = part
            start += len(visual.tokens)
        tokens, *extras = outputs
        return VisualTokens(tokens, dict(zip(evidence, extras, strict=False)), tuple(extras[len(evidence) :]))

    @abstractmethod
    def model_extra(self, video: SampledVideo) -> ModelExtra:
        """Compute the facts about one video that its prompt needs besides the tokens, from its size and times."""
