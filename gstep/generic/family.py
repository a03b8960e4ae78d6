"""The generic family: the checkpoint's own processor and encoder make tokens from frames in their source size."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep.backbones.base import Backbone, ModelExtra, ModelFamily, SampledVideo, StaticParts, TowerWork
from gstep.backbones.preprocess import Preprocessor, as_frames
from gstep.backbones.runtime import Runtime
from gstep.checkpoints.source import ModelSource
from gstep.errors import ModelError, TooFewFrames, UnsupportedVideo, is_gpu_broken, is_out_of_memory
from gstep.generic.halves import TOWER, find_encoder, load_model
from gstep.generic.layout import Layout, count_steps, count_units, encode_pieces, list_placeholder_ids
from gstep.generic.processor import (
    Recorder,
    encode_record,
    load_processor,
    make_metadata,
    render_conversation,
    replay_record,
    run_processor,
)
from gstep.types import VisualTokens

#: The maximum size of one video's frames in bytes: they are sent whole from the decoder to the encoder.
MAX_FRAME_BYTES = 2**30
_PLAN_FRAMES = 32  # frames of a dry run; longer videos are extrapolated
_LONG = 16  # number of frames that is enough for any model


@dataclass(frozen=True)
class SourceSizePreprocessor(Preprocessor):
    """A preprocessor that keeps frames in their source size: the checkpoint's own processor resizes them."""

    processor: Mapping[str, Any]

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return ``(height, width)`` unchanged.

        Raises:
            UnsupportedVideo: the frames together are larger than MAX_FRAME_BYTES (1 GiB).
        """
        n_bytes = 3 * n_frames * height * width
        if n_bytes > MAX_FRAME_BYTES:
            most = MAX_FRAME_BYTES // (3 * height * width)
            raise UnsupportedVideo(
                f"{n_frames} frames of {width}x{height} pixels are {n_bytes / 2**30:.1f} GiB, and models of the "
                f"generic family take frames in their source size, at most {MAX_FRAME_BYTES / 2**30:g} GiB per video: "
                f"sample at most {most} frames, or scale the video down"
            )
        return height, width

    def settings(self) -> dict[str, Any]:
        """Return the content of the processor files, for the fingerprint of a cache."""
        return {"resize": "by the model's own processor", "processor": dict(self.processor)}


class GenericFamily(ModelFamily):
    """Any transformers model that makes features from videos and accepts them as input, before it is loaded."""

    model_type: ClassVar[str] = "generic"
    variant: ClassVar[str] = "llava"

    @property
    def layout(self) -> Layout:
        """The results of the gate for this model. Raises ModelError if it was resolved without the gate."""
        return Layout.of(self.source)

    def preprocessor(self) -> SourceSizePreprocessor:
        return SourceSizePreprocessor((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), self.source.preprocessor)

    def with_limits(self, min_pixels: int | None, max_pixels: int | None, max_video_tokens: int | None) -> ModelSource:
        """Raise ModelError: the limits of a generic model are set in its processor's files."""
        raise ModelError(
            f"{self.source.name!r} is read by its own processor: set its limits of pixels or tokens in its "
            "preprocessor files, in a copy of the checkpoint's folder"
        )

    def check_tensors(self) -> bool:
        """Return True if the gate compared the names of all tensors, False if the weights were not on this machine."""
        return bool(self.layout.parity["names"])

    def static(self) -> StaticParts:
        return StaticParts(self.layout.hidden_size, None, self.layout.deepstack_levels)

    def token_counts(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Count (T, N) by a dry run of the processor; T is extrapolated from 32 frames for longer videos.

        Raises:
            UnsupportedVideo: the processor refuses the video; TooFewFrames if more frames would help.
            ModelError: the processor cannot be loaded, or its output does not divide into steps.
        """
        T, N = _count_tokens(self.source, min(n_frames, _PLAN_FRAMES), height, width)
        return math.ceil(T * max(1.0, n_frames / _PLAN_FRAMES)), N

    def tower_work(self, height: int, width: int) -> TowerWork:
        """Raise ModelError: the work of this vision tower is unknown."""
        raise ModelError(f"the work of the vision tower of {self.source.name!r} is not known")

    def flops(self, n_frames: int, height: int, width: int) -> int | None:
        """Return None: the work is unknown."""
        return None

    def token_bytes(self, n_frames: int, height: int, width: int, evidence: Sequence[str] = ()) -> int:
        """Compute the size in bytes of a video's tokens and deepstack levels in bfloat16; ``evidence`` is not used."""
        layout = self.layout
        T, N = self.token_counts(n_frames, height, width)
        return 2 * T * N * layout.hidden_size * (1 + layout.deepstack_levels)

    def load(self, runtime: Runtime, *, frame_batch: int = 32) -> GenericBackbone:
        """Load the whole model except its language model, and its processor.

        Raises:
            ModelError: weights or the processor cannot be loaded.
        """
        return GenericBackbone(self, load_model(self.source, runtime, TOWER), self.preprocessor(), runtime, frame_batch)


@lru_cache(maxsize=64)
def _count_tokens(source: ModelSource, n_frames: int, height: int, width: int) -> tuple[int, int]:
    """Count a video's visual tokens, (T, N), by running the model's processor on frames that take no memory.

    The video's times are unknown, and two frames per second are assumed. Rows in the layout's ``tail`` are not counted.
    If the prompt has no placeholders, N is 0 or negative. Results are cached.

    Raises:
        UnsupportedVideo: the processor refuses the video; TooFewFrames if 16 frames would be accepted.
        ModelError: the processor cannot be loaded, its output has neither a grid nor pixels, or the rows do not divide
            into steps.
    """
    reader = VideoReader(source, None)
    frames = torch.zeros(1, dtype=torch.uint8, device="cpu").expand(n_frames, 3, height, width)
    inputs, _ = reader.read(frames, describe_untimed_video(n_frames, height, width))
    layout = Layout.of(source)
    T = max(1, math.ceil(count_units(inputs) / layout.units_per_step))
    n_rows = reader.count_placeholders(inputs)
    steps = count_steps(reader.config, inputs, layout.units_per_step, n_rows, layout.tail) if n_rows else T
    return steps, (n_rows - layout.tail) // steps


def describe_untimed_video(n_frames: int, height: int, width: int) -> SampledVideo:
    """Describe a video whose times are unknown, as two frames per second."""
    return SampledVideo(height, width, [i / 2 for i in range(n_frames)], None, 2.0, n_frames)


class VideoReader:
    """A model's processor for a video alone: it turns frames into the inputs of the encoder."""

    def __init__(self, source: ModelSource, device: str | None) -> None:
        """Load the processor and render a question about a video.

        Args:
            device: the device on which frames are resized; None keeps them where they are.

        Raises:
            ModelError: the processor cannot be loaded, or the chat template accepts no video.
        """
        self._processor = load_processor(source)
        _, self.config = source.find_stock_class()
        self._device = device
        try:
            self._text = render_conversation(source, self._processor, [{"role": "user", "content": [
                {"type": "video"}, {"type": "text", "text": "?"}]}])  # fmt: skip
        except ValueError as error:
            raise ModelError(f"{source.name!r} takes no question about a video: {error}") from error

    def read(self, frames: Tensor, video: SampledVideo) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Prepare the frames of a video, [F, 3, H, W] uint8.

        If the processor fails, it is tried again with the first frame repeated 16 times, to find out whether more
        frames would help. Out of memory, ImportError, NotImplementedError and a broken GPU are passed on unchanged.

        Args:
            video: the size and times of the frames, for the processor's metadata.

        Returns:
            The processor's output, and the output of its video processor.

        Raises:
            TooFewFrames: the processor refuses these frames, fewer than 16, but accepts 16.
            UnsupportedVideo: the processor refuses the frames for another reason; the message has its error.
        """
        try:
            return self._read(frames, video)
        except Exception as error:
            is_own_fault = is_out_of_memory(error) or isinstance(error, ImportError | NotImplementedError)
            if is_own_fault or (self._device is not None and is_gpu_broken()):
                raise
            reason = f"the model's own processor refuses the video ({type(error).__name__}: {error})"
        count = f"{video.n_frames} frame{'s' * (video.n_frames != 1)}"
        frames, few = frames[:1].expand(_LONG, -1, -1, -1), len(frames) < _LONG
        try:
            self._read(frames, describe_untimed_video(_LONG, *frames.shape[2:]))
        except Exception:  # noqa: BLE001 - of any type: more frames do not help
            few = False
        if few:
            raise TooFewFrames(f"{reason}; {count} sampled: sample more, or take a longer clip")
        raise UnsupportedVideo(f"{reason}; {count} of {video.width}x{video.height} pixels: scale or crop the video")

    def _read(self, frames: Tensor, video: SampledVideo) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Run a copy of the processor whose video processor is recorded; return both outputs."""
        processor = copy.copy(self._processor)
        processor.video_processor = recorder = Recorder(processor.video_processor)
        inputs = run_processor(processor, self._text, frames, make_metadata(video), self._device)
        return inputs, recorder.output

    def replay_video_record(self, record: str) -> dict[str, Any]:
        """Return what the processor makes from a video's record. Raises ValueError for an unusable record."""
        return replay_record(self._processor, self._text, record)

    def count_placeholders(self, inputs: Mapping[str, Any]) -> int:
        """Count a video's placeholders in a prompt: those of the first kind that occurs more than once.

        If no kind does, the result is 1 if a kind occurs once, otherwise 0.
        """
        counts = [int((inputs["input_ids"] == i).sum()) for i in list_placeholder_ids(self.config)]
        return next((count for count in counts if count > 1), max(counts, default=0))


class GenericBackbone(Backbone):
    """A whole model except its language model, and its processor, on one device."""

    family: GenericFamily

    def __init__(
        self, family: GenericFamily, model: Any, preprocessor: Preprocessor, runtime: Runtime, frame_batch: int
    ) -> None:
        super().__init__(family, model, preprocessor, runtime, frame_batch)
        self.layout = family.layout
        self._reader = VideoReader(family.source, None if self.on_cpu else self.device)
        _, self._method = find_encoder(model)

    @property
    def hidden_size(self) -> int:
        """The hidden size D of a visual token."""
        return self.layout.hidden_size

    @torch.no_grad()
    def encode(
        self,
        frames: Tensor | NDArray[np.uint8],
        evidence: Mapping[str, str] = {},
        video: SampledVideo | None = None,
    ) -> VisualTokens:
        """Encode one video of frames in their source size, uint8 [t, H, W, 3], to tokens [T, N, D].

        The tokens have the compute dtype, and ``extra`` has the processor's record and the tail, if any. If the gate
        found that the model can encode in pieces, a CPU encodes single steps, so that tokens do not depend on the
        length of the video, and a GPU ``frame_batch`` frames at once, halved when memory runs out.

        Args:
            video: the facts that the processor writes into prompts, such as times; None assumes two frames per second.

        Raises:
            ValueError: ``frames`` is not uint8 [t, H, W, 3], or has no frame.
            ModelError: evidence is requested, which no generic model gives; the tokens do not divide into steps; or the
                processor's output lacks an input of the encoder or cannot be recorded.
            UnsupportedVideo: the processor refuses the video; TooFewFrames if more frames would help.
            torch.OutOfMemoryError: even the smallest piece does not fit.
        """
        self.family.check_evidence(evidence)
        frames_TCHW = as_frames(frames).permute(0, 3, 1, 2)
        if not len(frames_TCHW):
            raise ValueError("a video needs at least one frame")
        video = video or describe_untimed_video(len(frames_TCHW), *frames_TCHW.shape[2:])
        inputs, output = self._reader.read(frames_TCHW, video)
        steps = 1 if self.on_cpu else max(1, self.frame_batch // self.layout.frames_per_step)
        while True:
            try:
                levels = encode_pieces(self._method, inputs, self.layout, steps, self.device, self.dtype)
                break
            except Exception as error:
                if not is_out_of_memory(error) or steps == 1 or not self.layout.in_pieces:
                    raise
                steps //= 2
            torch.cuda.empty_cache()  # not in the handler, where the error still holds the tensors
        return self._make_tokens(levels, inputs, output)

    def _make_tokens(self, levels: list[Tensor], inputs: dict[str, Any], output: Mapping[str, Any]) -> VisualTokens:
        """Make the tokens of a video from its rows; ``extra`` gets the processor's record and the tail, if any.

        Args:
            levels: the features of the tokens and of each deepstack level, [T*N + tail, D].
            inputs: the processor's output, from which T is counted.
            output: the output of its video processor, for the record.

        Raises:
            ModelError: the rows do not divide into steps, or the output cannot be recorded.
        """
        layout = self.layout
        n_rows = len(levels[0])
        T = count_steps(self._reader.config, inputs, layout.units_per_step, n_rows, layout.tail)
        n = n_rows - layout.tail
        tokens, *deepstack = (level[:n].reshape(T, -1, level.shape[-1]) for level in levels)
        extra = {"record": encode_record(output)}
        if layout.tail:
            bits = levels[0][n:].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
            extra["tail"] = base64.b64encode(bits).decode()
        return VisualTokens(tokens, {}, tuple(deepstack), extra)

    def encode_together(
        self,
        videos: Sequence[Tensor | NDArray[np.uint8]],
        evidence: Mapping[str, str] = {},
        sampled: Sequence[SampledVideo] | None = None,
    ) -> list[VisualTokens]:
        """Encode several videos one by one; return their tokens in order."""
        facts: Sequence[SampledVideo | None] = sampled or [None] * len(videos)
        return [self.encode(frames, evidence, video) for frames, video in zip(videos, facts, strict=True)]

    def encode_chunk(self, frames: Tensor, evidence: Mapping[str, str]) -> VisualTokens:
        return self.encode(frames, evidence)

    def model_extra(self, video: SampledVideo) -> ModelExtra:
        """Return an empty dict: the facts about a video come with its tokens (``VisualTokens.extra``)."""
        return {}


def read_tail(extra: Mapping[str, Any], layout: Layout) -> Tensor:
    """Read the rows behind a video's last step, [R, D] bfloat16; [0, D] if the layout has none.

    Raises:
        ValueError: the rows are missing or have another size.
    """
    if not layout.tail:
        return torch.empty(0, layout.hidden_size, dtype=torch.bfloat16, device="cpu")
    try:
        bits = np.frombuffer(base64.b64decode(extra["tail"], validate=True), np.int16)
        return torch.from_numpy(bits.copy()).view(torch.bfloat16).reshape(layout.tail, layout.hidden_size)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the cache lacks the rows behind this video ({error}): prune the video again") from error
