"""What every model family offers: decoded frames in, visual tokens out, without the language model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gstep.backbones.preprocess.base import Preprocessor, as_frames
from gstep.checkpoints.source import ModelSource
from gstep.checkpoints.tensors import TensorSource, read_tensors
from gstep.errors import ModelError
from gstep.evidence import HEAD_SOURCES, in_words
from gstep.types import VisualTokens

if TYPE_CHECKING:
    from gstep.backbones.siglip.head import PoolingHead


@dataclass(frozen=True)
class StaticParts:
    """What the header of a cache says about a model.

    Attributes:
        hidden_size: D, the width of a visual token.
        newline: [D] on the CPU, in the dtype stored on disk; None for a family without one.
        deepstack_levels: vectors of D that a token has besides its own.
    """

    hidden_size: int
    newline: Tensor | None
    deepstack_levels: int = 0


@dataclass(frozen=True)
class SampledVideo:
    """The sampled frames of one video as an encoder gets them, without their pixels.

    Attributes:
        height: of the resized frames, in pixels.
        width: likewise.
        timestamps: seconds from the start of the source, one a frame.
        start_s: where the clip starts in the source, in seconds; None for its beginning.
        fps: average frames a second of the source.
        clip_frames: frames of the source inside the clip.
    """

    height: int
    width: int
    timestamps: Sequence[float]
    start_s: float | None
    fps: float
    clip_frames: int

    @property
    def n_frames(self) -> int:
        """Sampled frames, repeated ones counted."""
        return len(self.timestamps)

    @property
    def sampled_fps(self) -> float:
        """Sampled frames a second of the clip, as VideoMetadata.sampled_fps of transformers (video_utils.py)."""
        return self.n_frames / self.clip_frames * self.fps

    @property
    def times_in_clip(self) -> list[float]:
        """Seconds from the start of the clip; 0 for a frame that came up before it and is still on screen."""
        return [max(0.0, at - (self.start_s or 0.0)) for at in self.timestamps]


_NOTHING: Mapping[str, str] = MappingProxyType({})


class Backbone(ABC):
    """The vision part of a video LLM on one device, in eval mode.

    Class attributes:
        model_type: its name in the table of families.
        variant: the family's rules, of methods that have other ones for LLaVA than for Qwen.
        gives: the evidence it can give besides tokens, as pairs of a name and a source (gstep.evidence).
    """

    model_type: ClassVar[str]
    variant: ClassVar[str]
    gives: ClassVar[frozenset[tuple[str, str]]] = frozenset()
    pooling_head: PoolingHead | None = None
    default_max_frames: ClassVar[int] = 32  # where frames are sampled by time and nothing else is said

    def __init__(
        self, model: Any, preprocessor: Preprocessor, *, device: str, dtype: torch.dtype, frame_batch: int
    ) -> None:
        self.model = model
        self.preprocessor = preprocessor
        self.device = device
        self.dtype = dtype
        self.frame_batch = frame_batch

    @classmethod
    @abstractmethod
    def load(
        cls,
        source: ModelSource,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        attn_implementation: str = "sdpa",
        frame_batch: int = 32,
    ) -> Self:
        """Build the vision part; no weight of the language model is read, and no memory is ever taken for one.

        ``frame_batch`` is how many frames go through at once on a GPU; on a CPU they go one by one (``chunk_length``).

        Raises ModelError where weights are missing or have another shape than the config says.
        """

    @classmethod
    @abstractmethod
    def preprocessor_for(cls, source: ModelSource) -> Preprocessor:
        """The preprocessor that the checkpoint's own files describe. Raises ModelError for what is not implemented."""

    @classmethod
    def limit_pixels(
        cls, source: ModelSource, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None
    ) -> ModelSource:
        """The same model with other limits of its frames' size; see :func:`gstep.backbones.limit_pixels`."""
        raise ModelError(f"{source.name!r} sees every frame at one size: limits of pixels are for Qwen models")

    @classmethod
    def with_pooling_head(cls, source: ModelSource, siglip: str | Path) -> ModelSource:
        """The same model with a SigLIP checkpoint's head; see :func:`gstep.backbones.with_pooling_head`."""
        raise ModelError(f"{source.name!r} has a vision tower of its own: a SigLIP checkpoint is for LLaVA-OneVision")

    @classmethod
    @abstractmethod
    def load_static(cls, source: ModelSource) -> StaticParts:
        """Hidden size and newline row, without building the model."""

    @classmethod
    @abstractmethod
    def token_counts(cls, source: ModelSource, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """(T, N) of frames of [height, width] pixels; from the config alone."""

    @classmethod
    @abstractmethod
    def token_bytes(
        cls, source: ModelSource, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()
    ) -> int:
        """Bytes of all visual tokens and of that evidence of them, bfloat16, of frames of [height, width] pixels; from
        the config alone."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """D, the width of a visual token."""

    @abstractmethod
    def newline(self) -> Tensor | None:
        """[D] on the device in the compute dtype: the row that follows a video's tokens; None where there is none."""

    @classmethod
    def check_evidence(cls, evidence: Mapping[str, str], *, has_pooling_head: bool = False) -> None:
        """Raises ModelError where this family cannot give some of the evidence, name -> source."""
        if lacking := {name: source for name, source in evidence.items() if (name, source) not in cls.gives}:
            raise ModelError(f"the encoder of {cls.model_type} does not give {in_words(lacking)}")
        of_head = {name: source for name, source in evidence.items() if source in HEAD_SOURCES}
        if of_head and not has_pooling_head:
            raise ModelError(
                f"{in_words(of_head)} must be read from a SigLIP checkpoint, since one of {cls.model_type} has no such "
                "head: name it with --siglip, for the published models google/siglip-so400m-patch14-384"
            )

    @abstractmethod
    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        """Some consecutive frames of one video, [t,h,w,3] uint8 as ``preprocessor.resize`` makes them -> [T,N,D].

        With the evidence, which was checked, [T,...] each in float32.
        """

    def chunk_length(self, height: int, width: int) -> int:
        """How many frames of [height, width] pixels go through at once: on a GPU ``frame_batch``, on a CPU one.

        By the shape of a matrix product a CPU's library chooses its kernel, and so the order in which a row's sum is
        rounded (oneDNN with AMX, in bfloat16, for one). One frame at a time every product has the same shape, whatever
        the video's length or ``frame_batch``; a frame's hundreds of rows keep the cores busy.
        """
        return 1 if self.on_cpu else self.frame_batch

    @property
    def on_cpu(self) -> bool:
        """Whether it runs on the CPU."""
        return torch.device(self.device).type == "cpu"

    @torch.no_grad()
    def encode(self, frames: Tensor | NDArray[np.uint8], evidence: Mapping[str, str] = _NOTHING) -> VisualTokens:
        """One video, [t,h,w,3] uint8 as ``preprocessor.resize`` makes it -> tokens [T,N,D] in the compute dtype.

        T is t, or the number of temporal patches. Frames go through in fixed chunks of this one video, so its tokens
        never depend on which videos were encoded before or beside it, nor on the evidence that is asked for; on a CPU
        nor on ``frame_batch``. On one machine, that is: other kinds of CPU or GPU round otherwise.

        Args:
            evidence: name -> source, as in ``Pruner.sources``: what the result holds besides the tokens, in float32.

        Raises ValueError for anything but at least one uint8 frame, ModelError for evidence that cannot be given.
        """
        self.check_evidence(evidence, has_pooling_head=self.pooling_head is not None)
        frames_THWC = as_frames(frames)
        if not len(frames_THWC):
            raise ValueError("a video needs at least one frame")
        length = self.chunk_length(*frames_THWC.shape[1:3])
        chunks = [self.encode_chunk(chunk, evidence) for chunk in torch.split(frames_THWC, length)]
        levels = zip(*(chunk.deepstack for chunk in chunks), strict=True)
        return VisualTokens(
            torch.cat([chunk.tokens for chunk in chunks]),
            {name: torch.cat([chunk.evidence[name] for chunk in chunks]) for name in evidence},
            tuple(map(torch.cat, levels)),
        )

    @abstractmethod
    def model_extra(self, video: SampledVideo) -> dict[str, Any]:
        """What an LLM, or whoever draws the tokens, must know about one video beyond its tokens, JSON-able.

        Always ``grid``: [rows, columns] in which the N tokens of a frame (temporal patch) lie, row by row.
        """


def load_weights(
    module: nn.Module,
    source: TensorSource,
    names: Callable[[str], Sequence[str]],
    *,
    device: str,
    dtype: torch.dtype,
) -> None:
    """Give a module built on the meta device its weights from disk: those that its state dict names, and no others.

    Args:
        names: the name on disk -> the names it may have in memory, the first that exists being taken.

    Raises ModelError, naming some, where weights are missing or have another shape.
    """
    expected = module.state_dict()

    def wanted(key: str) -> str | None:
        return next((name for name in names(key) if name in expected), None)

    tensors = read_tensors(source, wanted, device=device, dtype=dtype)
    if missing := [name for name in expected if name not in tensors]:
        raise ModelError(f"{source.name!r} lacks {_some(missing)}: download the whole checkpoint")
    wrong = [
        f"{name} {list(tensors[name].shape)} instead of {list(weight.shape)}"
        for name, weight in expected.items()
        if tensors[name].shape != weight.shape
    ]
    if wrong:
        raise ModelError(f"{source.name!r}: config.json does not fit the weights: {_some(wrong)}")
    module.load_state_dict(tensors, assign=True)


def rebuild_position_ids(module: nn.Module, device: str) -> None:
    """SigLIP's position ids are computed, never stored: they are the one buffer that is still on the meta device."""
    for part in module.modules():
        ids = getattr(part, "position_ids", None)
        if isinstance(ids, Tensor) and ids.is_meta:
            part.position_ids = torch.arange(ids.shape[-1], device=device)[None]
    check_loaded(module)


def check_loaded(module: nn.Module) -> None:
    """Hold that nothing is left on the meta device: no weight, and no buffer that is computed rather than stored."""
    left = [name for name, tensor in (*module.named_buffers(), *module.named_parameters()) if tensor.is_meta]
    assert not left, f"no values for {left}"


def _some(items: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
