"""The GPU actor: frames -> visual tokens -> the kept tokens. One video's fault becomes its error row."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from gstep import PrunedTokens, VisualTokens, make_pruner
from gstep.backbones import Backbone, ModelSource, SampledVideo, choose_runtime, family_of
from gstep.evidence import is_per_frame, name_of
from gstep.lazy import importing_much
from pipeline.cache.writer import Bits, KeptTokens, PrunedVideo
from pipeline.errors import VideoFault
from pipeline.execution.gpu_fault import exit_after_gpu_fault
from pipeline.execution.heartbeat import POISON, Heartbeat
from pipeline.prune.batches import decoded_frames, encoded_batch, records
from pipeline.rows import VideoRecord, failed_video, may_succeed_elsewhere


@dataclass(frozen=True)
class EncodeSetup:
    """What an encoder needs to know; it travels to every actor."""

    source: ModelSource
    pruner: str
    retention_ratio: float
    seed: int = 0
    pruner_params: dict[str, Any] = field(default_factory=dict)  # as the method's class takes them
    evidence: dict[str, str] = field(default_factory=dict)  # to be stored, label -> where in the encoder
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"

    def bytes_per_video(self, n_frames: int, height: int, width: int) -> int:
        """About what the kept tokens of [n_frames, height, width] pixels take as they are stored."""
        whole = family_of(self.source).token_bytes(n_frames, height, width, self._names())
        return round(self.retention_ratio * whole)

    def encoder(self) -> VideoEncoder:
        """Load the vision tower and return what encodes with it. Raises ModelError where it cannot be loaded."""
        return VideoEncoder(self)

    def _names(self) -> tuple[str, ...]:
        """Of the evidence that is stored; one of two sources is there twice."""
        return tuple(name_of(labelled, source) for labelled, source in self.evidence.items())


class VideoEncoder:
    """Encodes and prunes one video after another: what an actor of a run does, and ``jobs.verify --live``.

    Holds one vision tower, ``backbone`` where that is loaded already; never the LLM. Raises ModelError where it cannot
    be loaded.
    """

    def __init__(self, setup: EncodeSetup, backbone: Backbone | None = None) -> None:
        self._setup = setup
        self._runtime = choose_runtime(setup.device, setup.dtype, setup.attn)
        self._pruner = make_pruner(setup.pruner, **setup.pruner_params)
        self.backbone = backbone or family_of(setup.source).load(self._runtime)
        self._provenance = json.dumps(self._runtime.describe())
        self._stage = "encode"  # what a video is in at this moment: "encode" or "prune"

    def encode_one(self, record: VideoRecord, frames: NDArray[np.uint8]) -> PrunedVideo:
        """The kept tokens of a video that was decoded, and its record.

        Args:
            frames: [t,h,w,3], as the preprocessor resized them.

        Raises VideoFault, whatever happens.
        """
        self._stage = "encode"
        try:
            return self._video(record, frames)
        except VideoFault:
            raise
        except torch.OutOfMemoryError as error:
            fault = VideoFault("out-of-memory", str(error), stage=self._stage)
        except Exception as error:  # noqa: BLE001 - whatever one video provokes must not cost its neighbours
            exit_after_gpu_fault(record["video_id"], error)
            fault = VideoFault("internal", f"{type(error).__name__}: {error}", stage=self._stage)
        raise fault  # outside of the handlers: it must not hold the error, which holds the tensors of the video

    def _video(self, record: VideoRecord, frames: NDArray[np.uint8]) -> PrunedVideo:
        started = time.perf_counter()
        visual = self.encoded(frames)
        encoded = time.perf_counter()
        self._stage = "prune"
        pruned = self._pruned(visual)
        done: VideoRecord = {
            **record,
            **pruned_columns(pruned, visual),
            "encode_s": encoded - started,
            "prune_s": time.perf_counter() - encoded,
            "runtime": self._provenance,
            "model_extra": json.dumps(self.backbone.model_extra(without_pixels(record))),
        }
        return PrunedVideo(done, kept_tokens(pruned, visual, self._setup.evidence))

    def encoded(self, frames: NDArray[np.uint8]) -> VisualTokens:
        """All tokens and the evidence that pruning or the cache wants, in storage precision."""
        visual = self.backbone.encode(frames, {**self._pruner.sources, **self._setup.evidence})
        self._wait()
        # Storage precision first, then prune: every selection can be derived again from what is stored.
        tokens_TND, *deepstack = (level.to(torch.bfloat16) for level in (visual.tokens, *visual.deepstack))
        for level, values_TND in enumerate(deepstack):  # of the tokens themselves pruning finds it out
            _check_finite(f"deepstack level {level}", values_TND)
        evidence = {name: values.to(torch.bfloat16) for name, values in visual.evidence.items()}
        for name in self._setup.evidence:
            _check_finite(f"the evidence {name}", evidence[name])
        return VisualTokens(tokens_TND, evidence, tuple(deepstack))

    def _pruned(self, visual: VisualTokens) -> PrunedTokens:
        try:
            pruned = self._pruner.prune(visual, self._setup.retention_ratio, seed=self._setup.seed)
        except ValueError as error:
            raise VideoFault("internal", f"the tokens cannot be pruned: {error}", stage="prune") from error
        self._wait()
        return pruned

    def _wait(self) -> None:
        """Kernels run behind the host's back; a stage's seconds must hold its own."""
        if self._runtime.device.startswith("cuda"):
            torch.cuda.synchronize()


class Encoder:
    """The actor: a VideoEncoder, the error boundary of its stage, and a heartbeat.

    A video with which its process dies, by a signal or by an error that breaks the GPU's context, is tried once more,
    and is an error row after that: its neighbours and the run go on.
    """

    def __init__(self, setup: EncodeSetup, heartbeats: Any = None) -> None:
        self._heartbeat = Heartbeat("encode", heartbeats)
        self._heartbeat.start()
        with self._heartbeat.busy("the model, being loaded"), importing_much():
            self.encoder = setup.encoder()

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        for row, record in enumerate(records(batch)):
            self._heartbeat.rest()
            with self._heartbeat.holding(record["video_id"]) as held:
                video = self._video(batch, row, record)
                held.failed = may_succeed_elsewhere(video.record) if record["status"] == "ok" else None
                held.made = video.kept is not None
                encoded = encoded_batch(video)
            yield encoded

    def _video(self, batch: pa.Table, row: int, record: VideoRecord) -> PrunedVideo:
        if record["status"] != "ok":
            return PrunedVideo(record)
        if len(hosts := self._heartbeat.deaths(record["video_id"])) >= POISON:
            return PrunedVideo(failed_video(record, _poison(hosts)))
        started = time.perf_counter()
        try:
            return self.encoder.encode_one(record, decoded_frames(batch, row, record))
        except VideoFault as error:
            fault = error.with_traceback(None)  # which holds the frames of the video
        except Exception as error:  # noqa: BLE001 - a record that does not fit its frames
            fault = VideoFault("internal", f"{type(error).__name__}: {error}", stage="encode")
        return PrunedVideo({**failed_video(record, fault), "encode_s": time.perf_counter() - started})


def _poison(hosts: list[str]) -> VideoFault:
    where = ", ".join(dict.fromkeys(hosts))
    message = f"the encode process died {len(hosts)} times with this video in hand, on {where}; Ray's logs say how"
    return VideoFault("crash", message, stage="encode")


def pruned_columns(pruned: PrunedTokens, visual: VisualTokens) -> VideoRecord:
    """The columns of the videos table that pruning the tokens [T,N,D] decides."""
    n_frames, per_frame, hidden_size = visual.tokens.shape
    columns: VideoRecord = {
        "n_frames": n_frames,
        "tokens_per_frame": per_frame,
        "hidden_size": hidden_size,
        "retention_ratio": pruned.retention_ratio,
        "nested": pruned.nested,
        "n_tokens": len(pruned.index),
        "n_total": pruned.n_total,
        "kept_per_frame": torch.bincount((pruned.index // per_frame).cpu(), minlength=n_frames).tolist(),
    }
    if pruned.temporal_density is not None:
        columns["temporal_density"] = pruned.temporal_density.tolist()
    return columns


def kept_tokens(pruned: PrunedTokens, visual: VisualTokens, evidence: Iterable[str] = ()) -> KeptTokens:
    """What is stored of a video: the kept tokens, first selected first, of each deepstack level [T,N,D] and each
    evidence [T,N,...] the same places, and evidence of frames [T,...] whole."""
    order = pruned.selection_order()
    places = pruned.index[order]

    def ordered(values: Tensor | None, dtype: torch.dtype) -> Any:
        return None if values is None else values[order].to(dtype).cpu().numpy()

    return KeptTokens(
        tokens=_bits(pruned.tokens[order]),
        index=ordered(pruned.index, torch.int32),
        rank=ordered(pruned.rank, torch.int32),
        merged=ordered(pruned.merged, torch.bool),
        density=ordered(pruned.density, torch.float32),
        deepstack=[_bits(level.flatten(0, 1)[places]) for level in visual.deepstack],
        evidence={name: _evidence_bits(name, visual.evidence[name], places) for name in evidence},
    )


def _evidence_bits(labelled: str, values: Tensor, places: Tensor) -> Bits:
    rows = values if is_per_frame(labelled) else values.flatten(0, 1)[places]
    return _bits(rows.reshape(len(rows), -1))


def _bits(values: Tensor) -> Bits:
    return np.asarray(values.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy())


def _check_finite(what: str, values: Tensor) -> None:
    if not values.isfinite().all():
        raise VideoFault("internal", f"{what} has values that are not finite", stage="encode")


def without_pixels(record: VideoRecord) -> SampledVideo:
    """What a decoded video's record says of its frames."""
    return SampledVideo(
        height=record["height"],
        width=record["width"],
        timestamps=record["timestamps"],
        start_s=record.get("start_s"),
        fps=record["fps"],
        clip_frames=record["clip_frames"],
    )
