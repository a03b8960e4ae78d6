"""The encode stage: a GPU (or CPU) actor encodes frames to visual tokens and prunes them."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from torch import Tensor

from gstep import PrunedTokens, VisualTokens, make_pruner
from gstep.backbones import Backbone, ModelSource, SampledVideo, choose_runtime, family_of
from gstep.backbones.positions import count_position_faults
from gstep.backbones.preprocess import as_frames
from gstep.errors import TooFewFrames, UnsupportedVideo, is_out_of_memory
from gstep.evidence import get_evidence_name, is_frame_evidence
from gstep.lazy import pause_garbage_collector
from pipeline.cache.changed_code import check_class_code
from pipeline.cache.codecs import BFLOAT16, CODECS
from pipeline.cache.writer import KeptTokens, VideoItem
from pipeline.errors import MethodFails, VideoFault
from pipeline.own_method import prune_or_raise_fault
from pipeline.prune.batches import pack, unpack_batch
from pipeline.prune.warm_up import compile_meanwhile
from pipeline.rows import Json, VideoRecord, make_failed_video, may_succeed_elsewhere
from pipeline.runner.worker_heartbeat import POISON, Heartbeat, ItemsInHand, exit_after_gpu_fault
from pipeline.runner.worker_reports import describe_crashes

T = TypeVar("T")
CAREFUL = 100  # videos encoded one by one after a crash: more than a process has in hand or queued


@dataclass(frozen=True)
class EncodeSetup:
    """The settings of an encoder, which are sent to every encode actor."""

    source: ModelSource
    pruner: str
    retention_ratio: float
    seed: int = 0
    pruner_params: dict[str, Json] = field(default_factory=dict)  # as the method's class takes them
    pruner_code: str | None = None  # of a user method: the hash in the cache's identity
    evidence: dict[str, str] = field(default_factory=dict)  # to store: label -> source in the encoder
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"
    codec: str = BFLOAT16.name
    batch_frames: int | None = None  # per pass of the tower, of several videos; None: passes of one video
    even: bool = False  # True if frames are sampled at evenly spaced times
    tower_hash: str | None = None  # of the source (gstep.checkpoints.tensors), for the rows
    shape: tuple[int, int, int] | None = None  # (frames, height, width) of most videos, to compile for

    def estimate_video_bytes(self, n_frames: int, height: int, width: int) -> int:
        """Estimate the bytes of a video's kept tokens and evidence in bfloat16."""
        names = tuple(
            get_evidence_name(key, source) for key, source in self.evidence.items()
        )  # twice if from two sources
        return round(self.retention_ratio * family_of(self.source).token_bytes(n_frames, height, width, names))

    def estimate_stored_bytes(self, n_frames: int, height: int, width: int) -> int:
        """Estimate the bytes of a video's kept tokens and evidence in the cache; only tokens are compressed."""
        tokens = self.retention_ratio * family_of(self.source).token_bytes(n_frames, height, width)
        saved_bytes = tokens * (1 - CODECS[self.codec].share)
        return round(self.estimate_video_bytes(n_frames, height, width) - saved_bytes)

    def encoder(self) -> VideoEncoder:
        """Load the vision tower, and return the encoder. Raises ModelError if that fails."""
        return VideoEncoder(self)


@dataclass
class DeviceTurn:
    """The time that a video has at the device.

    Attributes:
        seconds: the duration of its kernels; 0 until the turn is over.
    """

    seconds: float = 0.0


class VideoEncoder:
    """Encodes and prunes videos, for the actors of a run and for ``jobs.verify --live``. It never loads the LLM.

    Threads may share an encoder. A GPU then works on four videos at once: it copies the frames of one, encodes the
    second, prunes the third on another stream, and copies back the tokens of the fourth. A CPU encodes or prunes one
    video at a time.
    """

    _max_pass = Fraction(1)  # the share of a pass that several videos may fill

    def __init__(self, setup: EncodeSetup, backbone: Backbone | None = None) -> None:
        """Create the pruning method, and load the vision tower unless ``backbone`` is given.

        Raises:
            ModelError: the tower cannot be loaded.
            UsageError: the code of a user method on this node is not the run's.
            ValueError: the method cannot be imported or created.
        """
        self._setup = setup
        self._runtime = choose_runtime(setup.device, setup.dtype, setup.attn)
        self._pruner = make_pruner(setup.pruner, **setup.pruner_params)
        check_class_code(type(self._pruner), setup.pruner_code)
        frame_batch = {} if setup.batch_frames is None else {"frame_batch": setup.batch_frames}
        if backbone is None:
            with self._compile_kernels_meanwhile():
                backbone = family_of(setup.source).load(self._runtime, **frame_batch)
        self.backbone = backbone
        self._runtime_record = self._runtime.describe()
        self._runtime_record["tower_form"] = self.backbone.form
        self._encoding = self._pruning = threading.Lock()
        self._copies = self._prunes = None
        if self._runtime.device.startswith("cuda"):
            self._copies, self._prunes = (torch.cuda.Stream(self._runtime.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._pruning = threading.Lock()

    def _compile_kernels_meanwhile(self) -> AbstractContextManager[None]:
        """Return a context that compiles the GPU kernels of a built-in method in parallel with its block.

        It does nothing on a CPU, for a user method, and if ``EncodeSetup.shape`` is None.
        """
        setup = self._setup
        if setup.shape is None or ":" in setup.pruner or not self._runtime.device.startswith("cuda"):
            return nullcontext()
        family = family_of(setup.source)
        shape = *family.token_counts(*setup.shape), family.static().hidden_size
        return compile_meanwhile(self._pruner, setup.retention_ratio, shape, self._runtime.device)

    def encode_video_alone(self, record: VideoRecord, frames: NDArray[np.uint8]) -> VideoItem:
        """Encode and prune a decoded video, and return its complete record and kept tokens.

        If the GPU's context is broken, the process ends.

        Args:
            frames: [t,h,w,3] uint8, resized by the preprocessor.

        Raises:
            VideoFault: the video failed; this includes unexpected errors ("internal") and lack of GPU memory.
            MethodFails: a user method would fail for every video.
        """
        video_id = record["video_id"]
        frames_on_device = _run_guarded("encode", video_id, lambda: self._load_frames(frames))
        video = to_sampled_video(record)
        visual, encode_s = _run_guarded("encode", video_id, lambda: self._encode(frames_on_device, video))
        pruned, prune_s = _run_guarded("prune", video_id, lambda: self._prune(visual))
        make_item = partial(self._make_item, record, visual, pruned, encode_s=encode_s, prune_s=prune_s)
        return _run_guarded("prune", video_id, make_item)

    def iter_pass_groups(self, videos: Iterable[VideoItem]) -> Iterator[list[VideoItem]]:
        """Yield the videos of a batch in order, in groups that can share a pass of the vision tower.

        The shares of a group add up to at most one pass, or half of it for each time that ``encode_together`` ran out
        of memory. A video with a larger share is a group of its own, and so is a failed video. Without
        ``batch_frames``, so is every video.
        """
        group, group_share = list[VideoItem](), Fraction(0)
        for video in videos:
            share = Fraction(1)
            record = video.record
            if video.frames is not None and self._setup.batch_frames is not None:
                share = self.backbone.pass_share(len(record["frame_indices"]), record["height"], record["width"])
            if group and group_share + share > self._max_pass:
                yield group
                group, group_share = [], Fraction(0)
            group.append(video)
            group_share += share
        if group:
            yield group

    def encode_together(self, videos: Sequence[VideoItem]) -> list[VideoItem | None]:
        """Encode decoded videos in one pass of the vision tower, and prune each of them.

        No failure is raised, not even MethodFails, since another video of the pass may have caused it: the caller
        encodes the failed videos one by one. If GPU memory runs out in the pass, later groups of ``iter_pass_groups``
        are half as large. If the GPU's context is broken, the process ends.

        Returns:
            An item per video in order; None for a video that failed, and for all videos if the pass failed.
        """
        names = ", ".join(video.record["video_id"] for video in videos)
        try:
            return self._encode_pass(videos, names)
        except Exception as error:  # noqa: BLE001 - as in _run_guarded
            exit_after_gpu_fault(names, error)
            if is_out_of_memory(error):
                self._max_pass /= 2
        torch.cuda.empty_cache()  # not in a handler, where the error still holds the tensors
        return [None] * len(videos)

    def _encode_pass(self, videos: Sequence[VideoItem], names: str) -> list[VideoItem | None]:
        """Encode videos in one pass and prune each of them; None for a video that fails after the pass.

        The seconds of the pass are divided among the videos by their tokens. Errors of the pass itself and MethodFails
        are raised. ``names`` are the ids of the videos, printed if the process ends.
        """
        frames_on_device = [self._load_frames(video.reshape_frames()) for video in videos]
        sampled = [to_sampled_video(video.record) for video in videos]
        with self._turn(self._encoding) as turn:
            visuals = self.backbone.encode_together(frames_on_device, self._sources, sampled)
            rounded = [
                _try_alone(names, partial(self._round_tokens, visual, video))
                for visual, video in zip(visuals, sampled, strict=True)
            ]
        n_tokens = [math.prod(visual.tokens.shape[:2]) for visual in visuals]
        del visuals
        items: list[VideoItem | None] = []
        for video, visual, n in zip(videos, rounded, n_tokens, strict=True):
            pruned = None if visual is None else _try_alone(names, partial(self._prune, visual))
            if visual is None or pruned is None:
                items.append(None)
                continue
            kept, prune_s = pruned
            encode_s = turn.seconds * n / sum(n_tokens)
            make_item = partial(self._make_item, video.record, visual, kept, encode_s=encode_s, prune_s=prune_s)
            items.append(_try_alone(names, partial(make_item, n_videos=len(videos))))
        return items

    def _encode(self, frames: Tensor | NDArray[np.uint8], video: SampledVideo | None) -> tuple[VisualTokens, float]:
        """Encode frames to all tokens and the evidence that is needed, rounded for the cache; return (tokens, seconds).

        Raises:
            VideoFault: class "too-short" or "unsupported" if the model does not take the video; "internal" if deepstack
                or stored evidence is not finite, or the codec cannot represent the tokens.
        """
        try:
            with self._turn(self._encoding) as turn:
                visual = self._round_tokens(self.backbone.encode(frames, self._sources, video), video)
        except TooFewFrames as error:
            raise VideoFault("too-short", str(error), stage="encode") from None
        except UnsupportedVideo as error:
            raise VideoFault("unsupported", str(error), stage="encode") from None
        return visual, turn.seconds

    def _prune(self, visual: VisualTokens) -> tuple[PrunedTokens, float]:
        """Prune the tokens, with one retry if GPU memory runs out, and return (kept tokens, seconds).

        Before the retry, PyTorch's cached memory is freed. The seconds are those of the successful attempt. If memory
        runs out again, that error passes, as do other errors.

        Raises:
            VideoFault: class "internal" for a ValueError, "own-code" if a user method failed for this video.
            MethodFails: a user method would fail for every video.
        """
        try:
            return self._prune_once(visual)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # not in the handler, where the error still holds the tensors
        return self._prune_once(visual)

    def _prune_once(self, visual: VisualTokens) -> tuple[PrunedTokens, float]:
        """Prune the tokens without a retry, and return (kept tokens, seconds)."""
        with self._turn(self._pruning, self._prunes) as turn:
            pruned = prune_or_raise_fault(self._pruner, visual, self._setup.retention_ratio, self._setup.seed)
        return pruned, turn.seconds

    @contextmanager
    def _turn(self, lock: threading.Lock, stream: torch.cuda.Stream | None = None) -> Iterator[DeviceTurn]:
        """Hold ``lock`` while the block launches kernels; on exit, release it and wait for them.

        During this wait the next thread can launch its kernels. After an error the wait is needed too, because freed
        memory may be reused on another stream at once.

        Args:
            stream: the stream for the kernels on a GPU; None for the current stream.

        Yields:
            A turn whose ``seconds`` are set when the block has succeeded.
        """
        turn = DeviceTurn()
        if self._copies is None:
            with lock:
                start = time.perf_counter()
                yield turn
                turn.seconds = time.perf_counter() - start
            return
        stream = stream or torch.cuda.current_stream(torch.device(self._runtime.device))
        # A thread that waits for a blocking event leaves its core to the decoders.
        first, last = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        try:
            with lock, torch.cuda.stream(stream):
                first.record()
                yield turn
                last.record()
        except BaseException:
            stream.synchronize()
            raise
        last.synchronize()
        turn.seconds = first.elapsed_time(last) / 1e3

    def _load_frames(self, frames: NDArray[np.uint8]) -> Tensor:
        """Copy the frames to the GPU from pinned memory, and wait for the copy; on a CPU, wrap them as a tensor."""
        if self._copies is None:
            return as_frames(frames)
        pinned_frames = torch.empty(frames.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned_frames.numpy(), frames)
        with torch.cuda.stream(self._copies):
            device_frames = pinned_frames.to(self._runtime.device, non_blocking=True)
        self._copies.synchronize()
        return device_frames

    def _make_item(
        self,
        record: VideoRecord,
        visual: VisualTokens,
        pruned: PrunedTokens,
        *,
        encode_s: float,
        prune_s: float,
        n_videos: int = 1,
    ) -> VideoItem:
        """Return the complete record of a video and its kept tokens on the CPU, in the precision of the cache.

        Args:
            n_videos: the number of videos that shared the pass. The record states it on a GPU, where more than one may
                change the rounding.
        """
        is_shared = n_videos > 1 and not self.backbone.on_cpu
        runtime = self._runtime_record | ({"shared_pass": f"{n_videos} videos"} if is_shared else {})
        # The default stream runs the kernels of the next video now, and these copies would wait for them.
        with torch.cuda.stream(self._copies) if self._copies else nullcontext():
            extra = self.backbone.model_extra(to_sampled_video(record))
            faults = count_position_faults(extra, record["timestamps"], even=self._setup.even)
            complete: VideoRecord = {
                **record,
                **make_pruning_columns(pruned, visual),
                "uneven_positions": faults.uneven,
                "shared_positions": faults.shared,
                "encode_s": encode_s,
                "prune_s": prune_s,
                "runtime": json.dumps(runtime),
                "tower_hash": self._setup.tower_hash,
                "model_extra": json.dumps({**extra, **visual.extra}),
            }
            return VideoItem(complete, collect_kept_tokens(pruned, visual, self._setup.evidence))

    def encode_frames(self, frames: Tensor | NDArray[np.uint8], video: SampledVideo | None = None) -> VisualTokens:
        """Encode frames to all visual tokens and the evidence that is needed, in the precision of the cache.

        All kernels have finished on return.

        Args:
            frames: [t,h,w,3] uint8, resized by the preprocessor.
            video: the size and times of the frames. If None, the tokens have no grid and times.

        Raises:
            VideoFault: the model does not take the video, or the cache cannot hold its values. Other errors pass
                unchanged.
        """
        return self._encode(frames, video)[0]

    @property
    def _sources(self) -> dict[str, str]:
        """The evidence that the method needs or the cache stores: label -> source in the encoder."""
        return {**self._pruner.sources, **self._setup.evidence}

    def _round_tokens(self, visual: VisualTokens, video: SampledVideo | None) -> VisualTokens:
        """Round tokens and evidence to bfloat16, and add the grid and times of the tokens if ``video`` is given.

        Raises:
            VideoFault: deepstack or stored evidence is not finite, or the codec cannot represent the tokens. With
                bfloat16, the tokens are not checked here, but by the pruning.
        """
        # Tokens are rounded to storage precision before pruning, so the selection can be derived again from the cache.
        tokens_TND, *deepstack = (level.to(torch.bfloat16) for level in (visual.tokens, *visual.deepstack))
        for level, values_TND in enumerate(deepstack):  # pruning checks the tokens themselves
            _check_finite(f"deepstack level {level}", values_TND)
        CODECS[self._setup.codec].check_range(tokens_TND, *deepstack)
        evidence = {name: values.to(torch.bfloat16) for name, values in visual.evidence.items()}
        for name in self._setup.evidence:
            _check_finite(f"the evidence {name}", evidence[name])
        rounded = VisualTokens(tokens_TND, evidence, tuple(deepstack), visual.extra)
        if video is None:
            return rounded
        return rounded.with_positions(self.backbone.model_extra(video).get("grid"), video.timestamps)

    def prune(self, visual: VisualTokens) -> PrunedTokens:
        """Prune the tokens.

        If GPU memory runs out, PyTorch's cached memory is freed and the pruning is repeated once; a second such error
        passes.

        Raises:
            VideoFault: class "internal" if the tokens cannot be pruned, "own-code" if a user method failed for this
                video.
            MethodFails: a user method would fail for every video.
        """
        return self._prune(visual)[0]


def _run_guarded(stage: str, video_id: str, work: Callable[[], T]) -> T:
    """Return ``work()``, with errors converted to faults of the video; end the process if the GPU's context is broken.

    VideoFault and MethodFails pass unchanged. Other errors become a VideoFault of class "out-of-memory" if GPU memory
    ran out, or "internal".
    """
    try:
        return work()
    except (VideoFault, MethodFails):
        raise
    except Exception as error:  # noqa: BLE001 - an error of one video must not fail other videos
        exit_after_gpu_fault(video_id, error)
        if is_out_of_memory(error):
            fault = VideoFault("out-of-memory", str(error), stage=stage)
        else:
            fault = VideoFault("internal", f"{type(error).__name__}: {error}", stage=stage)
    raise fault  # outside the handlers, or it would keep the error and with it the tensors of the video


def _try_alone(names: str, work: Callable[[], T]) -> T | None:
    """Return ``work()``, or None if it fails. Only MethodFails is raised; a broken GPU context ends the process."""
    try:
        return _run_guarded("prune", names, work)
    except VideoFault:
        return None


class Encoder:
    """The encode actor: a VideoEncoder with a heartbeat, which turns faults into error rows.

    A call takes a batch (a row of BATCH_SCHEMA) and yields one. Two calls may run at a time, but only one computes. If
    the process crashes (by a signal or a broken GPU context), Ray starts another one, which tries each video in hand
    once more. A video that crashes a second process gets an error row. To identify it, a process after a crash encodes
    its first 100 or so videos singly.
    """

    def __init__(self, setup: EncodeSetup, heartbeats: ActorHandle | None = None) -> None:
        """Start the heartbeat, and load the model.

        Args:
            heartbeats: the actor that collects the workers' reports; None for no reports.

        Raises:
            WorkerGivenUp: too many processes of this worker have crashed.
            ModelError: the model cannot be loaded.
            UsageError: the code of a user method on this node is not the run's.
        """
        self._heartbeat = Heartbeat("encode", heartbeats)
        self._heartbeat.start()
        self._alone = threading.Lock()
        self._careful = CAREFUL if self._heartbeat.has_crashed_before else 0  # videos
        with self._heartbeat.report_loading(), pause_garbage_collector():
            self.encoder = setup.encoder()

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        yield pack(self.encode(unpack_batch(batch)))

    def encode(self, videos: Sequence[VideoItem]) -> list[VideoItem]:
        """Encode and prune the videos of a batch, and return them in order; a failed video becomes its error row.

        Reports each outcome to the heartbeat. Blocks while this worker is excluded. Raises MethodFails if a user method
        would fail for every video.
        """
        if self._careful > 0:
            with self._alone:
                self._careful -= len(videos)
                return [self._encode_suspect(video) for video in videos]
        with self._heartbeat.hold_items(*(video.record["video_id"] for video in videos)) as items:
            return [
                item for group in self.encoder.iter_pass_groups(videos) for item in self._encode_group(group, items)
            ]

    def _encode_group(self, videos: Sequence[VideoItem], items: ItemsInHand) -> Iterator[VideoItem]:
        """Encode videos in one pass, and again alone each video that this did not encode; yield them in order.

        Each outcome is reported to the heartbeat.
        """
        results: Sequence[VideoItem | None] = [None]
        if len(videos) > 1:
            self._heartbeat.wait_while_excluded()
            results = self.encoder.encode_together(videos)
        for video, result in zip(videos, results, strict=True):
            if result is None:
                yield self._encode_reported(video, items)
            else:
                items.release(is_failure=False)
                yield result

    def _encode_suspect(self, video: VideoItem) -> VideoItem:
        """Encode one video while no other is in hand, so that a crash is certainly its own.

        After POISON (2) crashes with the video in hand, it is not tried again, but gets an error row of class "crash".
        """
        with self._heartbeat.hold_items(video.record["video_id"]) as items:
            crashes = self._heartbeat.find_crashes(video.record["video_id"])
            if len(crashes) < POISON:
                return self._encode_reported(video, items)
            items.release(is_result=False, fault="crash")
        fault = VideoFault("crash", describe_crashes("encode process", "video", crashes), stage="encode")
        return VideoItem(make_failed_video(video.record, fault))

    def _encode_reported(self, video: VideoItem, items: ItemsInHand) -> VideoItem:
        """Encode one video, and report its outcome to the heartbeat. Blocks while this worker is excluded.

        A video that failed in decoding keeps its error record. A VideoFault becomes an error record.
        """
        self._heartbeat.wait_while_excluded()
        if video.frames is None:
            items.release(is_result=False)
            return VideoItem(video.record)
        record = video.record
        start = time.perf_counter()
        try:
            item = self.encoder.encode_video_alone(
                record, _run_guarded("encode", record["video_id"], video.reshape_frames)
            )
        except VideoFault as error:
            fault = error.with_traceback(None)  # the traceback would keep the frames of the video
            item = VideoItem({**make_failed_video(record, fault), "encode_s": time.perf_counter() - start})
        error_class = item.record.get("error_class")
        items.release(may_succeed_elsewhere(item.record), is_result=item.kept is not None, fault=error_class)
        return item


def make_pruning_columns(pruned: PrunedTokens, visual: VisualTokens) -> VideoRecord:
    """Return the columns of the videos table that describe a video's tokens and their pruning."""
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


def collect_kept_tokens(pruned: PrunedTokens, visual: VisualTokens, evidence: Iterable[str] = ()) -> KeptTokens:
    """Return the kept tokens, deepstack levels and evidence of a video as arrays for the cache, in order of selection.

    Args:
        evidence: the labels of the evidence to store. Evidence of tokens, [T,N,...], is taken at the kept indices;
            evidence of frames, [T,...], is stored whole.
    """
    order = pruned.compute_selection_order()
    kept_indices = pruned.index[order]

    def select_kept(values: Tensor) -> Tensor:
        return values.flatten(0, 1)[kept_indices]

    kept_evidence = {
        name: visual.evidence[name] if is_frame_evidence(name) else select_kept(visual.evidence[name])
        for name in evidence
    }
    return KeptTokens.of(pruned, map(select_kept, visual.deepstack), kept_evidence, order)


def _check_finite(subject: str, values: Tensor) -> None:
    """Raise VideoFault("internal") that names ``subject`` if a value is not finite."""
    if not values.isfinite().all():
        raise VideoFault("internal", f"{subject} has values that are not finite", stage="encode")


def to_sampled_video(record: VideoRecord) -> SampledVideo:
    """Return the size, times, clip and rates in a video's record, which the backbone needs."""
    return SampledVideo(
        height=record["height"],
        width=record["width"],
        timestamps=record["timestamps"],
        start_s=record.get("start_s"),
        fps=record["fps"],
        clip_frames=record["clip_frames"],
        clip_fps=record.get("clip_fps"),
    )
