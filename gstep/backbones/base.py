"""Interfaces of a model before (``ModelFamily``) and after (``Backbone``) its weights are loaded."""

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
from gstep.evidence import HEAD_SOURCES, describe_evidence, get_evidence_name
from gstep.types import VisualTokens

if TYPE_CHECKING:
    from gstep.backbones.gpu_forms import FusedSteps
    from gstep.backbones.siglip import PoolingHead


@dataclass(frozen=True)
class StaticParts:
    """The constants of a model that a cache's header stores.

    Attributes:
        hidden_size: D, the width of a visual token.
        newline: [D], the row that follows a video's tokens, on the CPU in the dtype stored on disk; None for families
            without one.
        deepstack_levels: the number of additional vectors [D] per token.
    """

    hidden_size: int
    newline: Tensor | None
    deepstack_levels: int = 0


class TowerWork(NamedTuple):
    """The size of a vision tower's matrix products for one T (a frame, or a temporal patch on Qwen).

    Attributes:
        patches: the number of patches in one T.
        patch_weights: the number of weights that every patch is multiplied by.
        token_weights: the number of weights that every token is multiplied by, after patches are merged.
        attention: floating-point operations of all layers' attention.
    """

    patches: int
    patch_weights: int
    token_weights: int
    attention: int


@dataclass(frozen=True)
class ModelFamily(ABC):
    """A model described by its config and preprocessor files, before its weights are loaded.

    ``family_of`` creates it. It is picklable.

    Class attributes:
        model_type: the family's name in the table of families.
        variant: "llava" or "qwen", for pruning methods that have different rules for each.
        gives: the evidence that the encoder can compute, as (name, source) of gstep.evidence.
        default_max_frames: the default maximum number of frames when frames are sampled at a given rate.
        stock_fps: the stock processor's default sampling rate in frames per second; None if it samples a fixed number.
        min_rule: how the stock processor applies its minimum number of frames: "rounded" or "stepped"
            (pipeline.video.sampling).
        prompts: for a family outside the table: the import path ``module:Class`` of its prompt builder, or None if it
            does not answer questions.
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
        """Return the minimum number of frames that the stock processor samples at a given rate from a long clip.

        Raises:
            ModelError: the checkpoint's setting is not a positive integer (Qwen families).
        """
        return 1

    @abstractmethod
    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> Backbone:
        """Load the vision part onto the runtime's device, in eval mode and without gradients.

        The language model is neither read nor allocated.

        Args:
            frame_batch: the number of frames that a GPU encodes at once. A CPU encodes single frames (temporal
                patches).

        Raises:
            ModelError: the preprocessor's settings are not supported, or weights are missing, quantized or do not fit
                config.json.
        """

    def empty_tower(self, runtime: Runtime) -> tuple[nn.Module, NameRule] | None:
        """Build the vision part on the meta device, with the rule that maps tensor names on disk to names in it.

        Returns:
            The module and the rule; None if not implemented.
        """
        return None

    def check_tensors(self) -> bool:
        """Check by name that the checkpoint has all tensors of the vision part, unquantized. No weights are read.

        Returns:
            False if nothing was checked: the names are not available without a download, or there is no
            :meth:`empty_tower`.

        Raises:
            ModelError: tensors are missing or quantized, or a weight file is damaged.
        """
        if (types := read_tensor_types(self.source)) is None:
            return False
        if (tower := self.empty_tower(Runtime("cpu", torch.float32, "sdpa"))) is None:
            return False
        check_names(self.source.name, *tower, types)
        return True

    @abstractmethod
    def preprocessor(self) -> Preprocessor:
        """Build the picklable preprocessor from the checkpoint's files; raise ModelError for unsupported settings."""

    def with_limits(self, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None) -> ModelSource:
        """Return the model with other limits for frame size or visual tokens; only the Qwen families implement this.

        Args:
            min_pixels, max_pixels: pixels per frame on Qwen2.5-VL, of all sampled frames together on Qwen3-VL; None
                keeps the checkpoint's limit.
            max_video_tokens: if given, turns on the stock processors' cap for long videos (cap_pixels_per_frame).

        Raises:
            ModelError: the family does not take limits, or the minimum exceeds the maximum.
        """
        raise ModelError(f"{self.source.name!r} sees every frame at one size: limits of pixels are for Qwen models")

    def with_pooling_head(self, siglip: str | Path) -> ModelSource:
        """Return the model with a SigLIP pooling head as a source of evidence; only LLaVA-OneVision implements this.

        Args:
            siglip: the checkpoint that the vision tower was made from: a folder with safetensors, a Hugging Face id, or
                "tiny" for the tiny LLaVA-OneVision.

        Raises:
            ModelError: the family has no SigLIP tower, or the checkpoint has no head that fits it.
        """
        raise ModelError(
            f"{self.source.name!r} has no SigLIP vision tower: a SigLIP checkpoint is for LLaVA-OneVision, leave it out"
        )

    def text_tower(self, siglip: str | Path) -> TextTowerSource:
        """Resolve the text tower of the SigLIP checkpoint that the vision tower was made from.

        ``siglip`` is a folder, a Hugging Face id or "tiny".

        Raises:
            ModelError: the family has no SigLIP tower, or the checkpoint has no pooling head and text tower that fit.
        """
        head = self.with_pooling_head(siglip).pooling_head
        assert head is not None
        return TextTowerSource.resolve(head)

    @classmethod
    def check_gives(cls, evidence: Mapping[str, str]) -> None:
        """Raise ModelError if models of this family cannot compute some evidence, label -> source (gstep.evidence)."""
        if missing := {
            key: source for key, source in evidence.items() if (get_evidence_name(key, source), source) not in cls.gives
        }:
            raise ModelError(f"the encoder of {cls.model_type} does not give {describe_evidence(missing)}")

    def check_evidence(self, evidence: Mapping[str, str]) -> None:
        """Raise ModelError if this model cannot compute some evidence, label -> source (gstep.evidence).

        Evidence from a SigLIP pooling head requires a model that was resolved with one.
        """
        self.check_gives(evidence)
        head_evidence = {name: source for name, source in evidence.items() if source in HEAD_SOURCES}
        if head_evidence and self.source.pooling_head is None:
            raise ModelError(
                f"{describe_evidence(head_evidence)} needs a SigLIP checkpoint, since {self.model_type} has no such "
                "head: name it with --siglip, for the published models google/siglip-so400m-patch14-384"
            )

    @abstractmethod
    def static(self) -> StaticParts:
        """Read hidden size, newline row and number of deepstack levels, without building the model.

        Raises:
            ModelError: the checkpoint lacks the newline row that the family puts after a video.
        """

    @abstractmethod
    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute (T, N) for ``n_frames`` resized frames of [height, width] pixels.

        T is the number of frames (of temporal patches on Qwen), N the number of tokens in each.
        """

    @abstractmethod
    def tower_work(self, height: int, width: int) -> TowerWork:
        """Count the matrix products for encoding one T of frames of [height, width] pixels.

        The generic family, whose work is unknown, raises ModelError.
        """

    def flops(self, n_frames: int, height: int, width: int) -> int | None:
        """Count the floating-point operations of matrix products and convolutions for encoding resized frames.

        A multiplication and an addition count as two. The generic family returns None.
        """
        T, N = self.token_counts(n_frames, height, width)
        work = self.tower_work(height, width)
        return T * (2 * work.patches * work.patch_weights + 2 * N * work.token_weights + work.attention)

    @abstractmethod
    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        """Compute the size in bytes of a video's visual tokens and evidence in bfloat16.

        Args:
            n_frames, height, width: of the resized frames.
            evidence: names (not labels) of the evidence to count, one entry for each tensor.
        """


class ModelExtra(TypedDict, total=False):
    """The facts about one video that a language model needs besides its tokens: JSON values, stored in the cache.

    ``grid`` is [rows, columns] of the N tokens in a frame (temporal patch). Each family adds the facts that its
    positions depend on. The generic family has none of these keys; its facts are in ``VisualTokens.extra``.
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
        height: of the resized frames in pixels.
        width: of the resized frames in pixels.
        timestamps: time of each frame in seconds from the start of the source.
        start_s: start of the clip in the source in seconds; None for the start of the source.
        fps: average frames per second of the whole source.
        clip_frames: number of source frames inside the clip.
        clip_fps: frames per second of the clip if the source's rate varies; None to use ``fps``.
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
        """Sampled frames per second of the clip, as VideoMetadata.sampled_fps of transformers."""
        return self.n_frames / self.clip_frames * (self.clip_fps or self.fps)

    @property
    def times_in_clip(self) -> list[float]:
        """Each frame's seconds from the start of the clip; 0 for a frame that appeared earlier and is still shown."""
        return [max(0.0, at - (self.start_s or 0.0)) for at in self.timestamps]


_NOTHING: Mapping[str, str] = MappingProxyType({})


class Backbone(ABC):
    """The vision part of a video LLM on one device, in eval mode. :meth:`ModelFamily.load` creates it.

    Attributes:
        model: the loaded module; on a GPU it may have been modified in place.
        dtype: of weights and computation.
        steps: the fused steps that a modified tower uses; None for the stock tower.
        pooling_head: the SigLIP head that computes further evidence; None if none was loaded.
    """

    pooling_head: PoolingHead | None = None

    def __init__(
        self, family: ModelFamily, model: Any, preprocessor: Preprocessor, runtime: Runtime, frame_batch: int
    ) -> None:
        """Wrap a loaded model; on a GPU, modify it in place to use the fused implementation, if the family has one.

        Args:
            model: in eval mode, on the runtime's device.
            frame_batch: the number of frames that a GPU encodes at once.
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
        """Modify the loaded model in place to run faster on a GPU; return its fused steps, by default None."""
        return None

    @property
    def form(self) -> str:
        """The tower's implementation: "stock", "gpu" or "gpu, kernels" (Triton kernels)."""
        if self.steps is None:
            return "stock"
        return "gpu, kernels" if self.steps.kernels else "gpu"

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """D, the width of a visual token."""

    def newline(self) -> Tensor | None:
        """Return the row [D] that follows a video's tokens, on the device in the compute dtype; None without one."""
        return None

    @abstractmethod
    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Encode consecutive resized frames of one video, [t,h,w,3] uint8, in one pass of the tower.

        Args:
            evidence: label -> source of the evidence to compute, already checked by the caller.

        Returns:
            Tokens [T,N,D] in the compute dtype and evidence [T,...] in float32.
        """

    def encode_pass(self, videos: Sequence[Tensor], evidence: Mapping[str, str]) -> list[VisualTokens]:
        """Encode several videos, one ``VisualTokens`` each; some families run them in one pass of the tower."""
        return [self.encode_chunk(frames, evidence) for frames in videos]

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The layers of the vision tower that visual tokens depend on, in order; () if the family lists none."""
        return ()

    def chunk_length(self, height: int, width: int, frame_batch: int) -> int:
        """Return the number of frames of [height, width] pixels to encode at once, by default ``frame_batch``."""
        return frame_batch

    def pass_share(self, n_frames: int, height: int, width: int) -> Fraction:
        """Compute the share of one pass of the tower that a video needs; above 1 if it needs several passes."""
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

        Frames are encoded in fixed chunks of this video alone, so its tokens depend neither on other videos nor on the
        requested evidence, and on a CPU not on ``frame_batch``. If GPU memory runs out, the whole video is encoded
        again in chunks of half the size, until one fits.

        Args:
            frames: frames as ``preprocessor.resize`` returns them.
            evidence: label -> source of the evidence to compute as well; float32 in the result.
            video: the times of the frames; only the generic family uses them.

        Raises:
            ValueError: ``frames`` is not uint8 [t,h,w,3], or has no frame.
            ModelError: the model cannot compute the requested evidence.
            UnsupportedVideo: the generic family's processor refuses the video.
            torch.OutOfMemoryError: even the smallest chunk does not fit.
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
        """Encode several small videos, on a GPU in one pass of the tower; return their tokens in order.

        On a CPU, and for a single video, this calls :meth:`encode`, so that a CPU's tokens do not depend on the other
        videos. On a GPU the last bits may depend on them. A shared pass is not retried in smaller chunks.

        Args:
            videos: resized frames of each video, uint8 [t,h,w,3].
            evidence: label -> source of the evidence to compute.
            sampled: the times of each video's frames; None if unknown.

        Raises:
            ValueError: a video is not uint8 [t,h,w,3].
            ModelError: the model cannot compute the evidence.
            UnsupportedVideo: the generic family's processor refuses a video.
            torch.OutOfMemoryError: the pass does not fit.
        """
        if self.on_cpu or len(videos) == 1:
            facts: Sequence[SampledVideo | None] = sampled or [None] * len(videos)
            return [self.encode(frames, evidence, video) for frames, video in zip(videos, facts, strict=True)]
        self.family.check_evidence(evidence)
        return self.encode_pass([as_frames(frames) for frames in videos], evidence)

    def _encode_chunks(self, frames: Sequence[Tensor], evidence: Mapping[str, str]) -> VisualTokens:
        """Encode the chunks of one video in order and return the tokens and evidence of the whole video.

        A single chunk's result is returned as it is. Several results are joined along the frames, including the tensors
        of ``evidence`` (label -> source), without ``extra``, grid and times. Each chunk but the last must consist of
        whole temporal patches.
        """
        if len(frames) == 1:
            return self.encode_chunk(frames[0], evidence)
        n_patches = sum(-(-len(chunk) // self.preprocessor.frames_per_patch) for chunk in frames)
        start = 0
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
        """Compute the facts about one video that its prompt needs besides the tokens."""
