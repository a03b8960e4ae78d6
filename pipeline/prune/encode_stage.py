"""The GPU actor: frames -> visual tokens -> the kept tokens. One video's fault becomes its error row."""

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
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from torch import Tensor

from gstep import PrunedTokens, VisualTokens, make_pruner
from gstep.backbones import Backbone, ModelSource, SampledVideo, choose_runtime, family_of
from gstep.backbones.positions import position_faults
from gstep.backbones.preprocess import as_frames
from gstep.errors import is_out_of_memory
from gstep.evidence import is_per_frame, name_of
from gstep.lazy import pause_garbage_collector
from pipeline.cache.changed_code import check_code
from pipeline.cache.codecs import BFLOAT16, CODECS
from pipeline.cache.writer import Bits, KeptTokens, VideoItem
from pipeline.errors import MethodFails, OwnCodeError, VideoFault
from pipeline.own_method import prune_tokens
from pipeline.prune.batches import pack, unpack
from pipeline.prune.warm_up import compiled_beside
from pipeline.rows import Json, VideoRecord, failed_video, may_succeed_elsewhere
from pipeline.runner.heartbeat import POISON, Heartbeat, HeldItems, exit_after_gpu_fault

T = TypeVar("T")
CAREFUL = 100  # videos taken one by one after a death: more than a process has in hand or on their way


@dataclass(frozen=True)
class EncodeSetup:
    """The settings of an encoder, which travel to every actor."""

    source: ModelSource
    pruner: str
    retention_ratio: float
    seed: int = 0
    pruner_params: dict[str, Json] = field(default_factory=dict)  # as the method's class takes them
    pruner_code: str | None = None  # of a user's own method: the hash that the cache's identity has
    evidence: dict[str, str] = field(default_factory=dict)  # to be stored, label -> where in the encoder
    device: str = "auto"
    dtype: str = "auto"
    attn: str = "auto"
    codec: str = BFLOAT16.name
    batch_frames: int | None = None  # in one pass of the tower, of several videos too; None: of one video
    even: bool = False  # whether frames are taken at even times
    tower_hash: str | None = None  # of the source (gstep.checkpoints.tensors), which rows say
    shape: tuple[int, int, int] | None = None  # (frames, height, width) of most videos: a GPU compiles for it ahead

    def bytes_per_video(self, n_frames: int, height: int, width: int) -> int:
        """Estimate the bytes of the kept tokens of a video of [n_frames, height, width] pixels, before the codec."""
        whole = family_of(self.source).token_bytes(n_frames, height, width, self._names())
        return round(self.retention_ratio * whole)

    def stored_bytes_per_video(self, n_frames: int, height: int, width: int) -> int:
        """Estimate the bytes that the cache stores of such a video: evidence is never coded."""
        tokens = self.retention_ratio * family_of(self.source).token_bytes(n_frames, height, width)
        saved = tokens * (1 - CODECS[self.codec].share)
        return round(self.bytes_per_video(n_frames, height, width) - saved)

    def encoder(self) -> VideoEncoder:
        """Load the vision tower and return the encoder. Raises ModelError where it cannot be loaded."""
        return VideoEncoder(self)

    def _names(self) -> tuple[str, ...]:
        """Return the names of the stored evidence; a name appears twice if it is stored from two sources."""
        return tuple(name_of(labelled, source) for labelled, source in self.evidence.items())


@dataclass
class Turn:
    """The turn of a video at the device.

    Attributes:
        seconds: that its kernels took, once the turn is over.
    """

    seconds: float = 0.0


class VideoEncoder:
    """The encoder and pruner of one video after another, for a run's actors and for ``jobs.verify --live``.

    Several threads may call it: the frames of one video go to a GPU, and the kept tokens of another come back, while a
    third is encoded and a fourth is pruned on a stream of its own. A GPU encodes one video at a time and prunes one
    beside it; a CPU, whose cores both would share, does one or the other. It holds one vision tower, ``backbone`` if
    that is loaded already, and never the LLM. Raises ModelError where the tower cannot be loaded.
    """

    _room = Fraction(1)  # the part of a pass that several videos may fill

    def __init__(self, setup: EncodeSetup, backbone: Backbone | None = None) -> None:
        self._setup = setup
        self._runtime = choose_runtime(setup.device, setup.dtype, setup.attn)
        self._pruner = make_pruner(setup.pruner, **setup.pruner_params)
        check_code(type(self._pruner), setup.pruner_code)
        frame_batch = {} if setup.batch_frames is None else {"frame_batch": setup.batch_frames}
        if backbone is None:
            with self._compiling():
                backbone = family_of(setup.source).load(self._runtime, **frame_batch)
        self.backbone = backbone
        self._described = self._runtime.describe()
        self._described["tower_form"] = self.backbone.form
        self._encoding = self._pruning = threading.Lock()
        self._copies = self._prunes = None
        if self._runtime.device.startswith("cuda"):
            self._copies, self._prunes = (torch.cuda.Stream(self._runtime.device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._pruning = threading.Lock()

    def _compiling(self) -> AbstractContextManager[None]:
        """Return the context beside which a built-in method compiles its kernels on a GPU."""
        setup = self._setup
        if setup.shape is None or ":" in setup.pruner or not self._runtime.device.startswith("cuda"):
            return nullcontext()
        family = family_of(setup.source)
        shape = *family.token_counts(*setup.shape), family.static().hidden_size
        return compiled_beside(self._pruner, setup.retention_ratio, shape, self._runtime.device)

    def encode_one(self, record: VideoRecord, frames: NDArray[np.uint8]) -> VideoItem:
        """Encode and prune a decoded video; return its kept tokens and its record.

        Args:
            frames: [t,h,w,3], as the preprocessor resized them.

        Raises VideoFault, whatever happens, but MethodFails where a user's own method fails for every video.
        """
        video_id = record["video_id"]
        loaded = _guarded("encode", video_id, lambda: self._loaded(frames))
        visual, encode_s = _guarded("encode", video_id, lambda: self._encode(loaded))
        pruned, prune_s = _guarded("prune", video_id, lambda: self._prune(visual))
        return _guarded("prune", video_id, lambda: self._stored(record, visual, pruned, prune_s, encode_s))

    def passes(self, videos: Iterable[VideoItem]) -> Iterator[list[VideoItem]]:
        """Yield the videos of a bundle in order, grouped by the pass of the tower that they share.

        A video that has failed, or that fills a pass, is a group of its own; without ``batch_frames`` every video is.
        """
        together, taken = list[VideoItem](), Fraction(0)
        for video in videos:
            share, record = Fraction(1), video.record
            if video.frames is not None and self._setup.batch_frames is not None:
                share = self.backbone.pass_share(len(record["frame_indices"]), record["height"], record["width"])
            if together and taken + share > self._room:
                yield together
                together, taken = [], Fraction(0)
            together.append(video)
            taken += share
        if together:
            yield together

    def encode_together(self, videos: Sequence[VideoItem]) -> list[VideoItem | None]:
        """Encode decoded videos in one pass of the tower, and prune each; None stands for one that must go alone.

        What fails here may be another video's doing, so that ``encode_one`` decides on a video's fault. After a pass
        that did not fit the GPU's memory the next ones have half the frames.
        """
        names = ", ".join(video.record["video_id"] for video in videos)
        try:
            return self._together(videos, names)
        except Exception as error:  # noqa: BLE001 - as in _guarded
            exit_after_gpu_fault(names, error)
            if is_out_of_memory(error):
                self._room /= 2
        torch.cuda.empty_cache()  # not in a handler, where the error still holds the tensors
        return [None] * len(videos)

    def _together(self, videos: Sequence[VideoItem], names: str) -> list[VideoItem | None]:
        """Encode and prune as ``encode_together``. Raise whatever the pass raises; what pruning raises is None."""
        loaded = [self._loaded(video.shaped()) for video in videos]
        with self._turn(self._encoding) as turn:
            visuals = self.backbone.encode_together(loaded, self._sources)
            checked = [_attempted(names, partial(self._checked, visual)) for visual in visuals]
        n_tokens = [math.prod(visual.tokens.shape[:2]) for visual in visuals]
        del visuals
        found: list[VideoItem | None] = []
        for video, visual, n in zip(videos, checked, n_tokens, strict=True):
            kept = None if visual is None else _attempted(names, partial(self._prune, visual))
            if visual is None or kept is None:
                found.append(None)
                continue
            seconds = (kept[1], turn.seconds * n / sum(n_tokens))
            found.append(_attempted(names, partial(self._stored, video.record, visual, kept[0], *seconds, len(videos))))
        return found

    def _encode(self, frames: Tensor | NDArray[np.uint8]) -> tuple[VisualTokens, float]:
        """Encode frames as ``encoded``; return the tokens and the seconds."""
        with self._turn(self._encoding) as turn:
            visual = self._checked(self.backbone.encode(frames, self._sources))
        return visual, turn.seconds

    def _prune(self, visual: VisualTokens) -> tuple[PrunedTokens, float]:
        """Prune tokens as ``pruned``; return the kept tokens and the seconds.

        Where a GPU's memory is full, PyTorch gives back the memory that it caches, and the tokens are pruned again.
        """
        try:
            return self._prune_once(visual)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        torch.cuda.empty_cache()  # not in the handler, where the error still holds the tensors
        return self._prune_once(visual)

    def _prune_once(self, visual: VisualTokens) -> tuple[PrunedTokens, float]:
        with self._turn(self._pruning, self._prunes) as turn:
            try:
                pruned = prune_tokens(self._pruner, visual, self._setup.retention_ratio, self._setup.seed)
            except OwnCodeError as error:
                raise VideoFault("own-code", str(error), stage="prune") from None
            except ValueError as error:
                raise VideoFault("internal", f"the tokens cannot be pruned: {error}", stage="prune") from error
        return pruned, turn.seconds

    @contextmanager
    def _turn(self, lock: threading.Lock, stream: torch.cuda.Stream | None = None) -> Iterator[Turn]:
        """Let a thread launch kernels while it holds ``lock``, on ``stream`` of a GPU; they are complete at the end.

        The next thread launches its own while they run, so that the GPU never waits for a host between two videos. The
        end waits after an error too: memory that the error frees may belong to another stream at once.
        """
        turn = Turn()
        if self._copies is None:
            with lock:
                started = time.perf_counter()
                yield turn
                turn.seconds = time.perf_counter() - started
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

    def _loaded(self, frames: NDArray[np.uint8]) -> Tensor:
        """Return the frames on the device; from pinned memory the copy runs beside the kernels of another video."""
        if self._copies is None:
            return as_frames(frames)
        pinned = torch.empty(frames.shape, dtype=torch.uint8, pin_memory=True)
        np.copyto(pinned.numpy(), frames)
        with torch.cuda.stream(self._copies):
            loaded = pinned.to(self._runtime.device, non_blocking=True)
        self._copies.synchronize()
        return loaded

    def _stored(
        self,
        record: VideoRecord,
        visual: VisualTokens,
        pruned: PrunedTokens,
        prune_s: float,
        encode_s: float,
        n_videos: int = 1,
    ) -> VideoItem:
        """Return the video's complete record and its kept tokens on the CPU, in the precision of the cache.

        The record says if ``n_videos`` shared a pass whose products may have been rounded by it: not on a CPU.
        """
        shared = n_videos > 1 and not self.backbone.on_cpu
        runtime = self._described | ({"shared_pass": f"{n_videos} videos"} if shared else {})
        # The default stream runs the kernels of the next video by now, and these copies would wait for them.
        with torch.cuda.stream(self._copies) if self._copies else nullcontext():
            extra = self.backbone.model_extra(without_pixels(record))
            faults = position_faults(extra, record["timestamps"], even=self._setup.even)
            done: VideoRecord = {
                **record,
                **pruned_columns(pruned, visual),
                "uneven_positions": faults.uneven,
                "shared_positions": faults.shared,
                "encode_s": encode_s,
                "prune_s": prune_s,
                "runtime": json.dumps(runtime),
                "tower_hash": self._setup.tower_hash,
                "model_extra": json.dumps(extra),
            }
            return VideoItem(done, kept_tokens(pruned, visual, self._setup.evidence))

    def encoded(self, frames: Tensor | NDArray[np.uint8]) -> VisualTokens:
        """Encode frames to all visual tokens and the needed evidence, in the precision of the cache.

        They are complete on return, for whichever stream reads them.
        """
        return self._encode(frames)[0]

    @property
    def _sources(self) -> dict[str, str]:
        """The evidence that the method or the cache needs, label -> where in the encoder it is from."""
        return {**self._pruner.sources, **self._setup.evidence}

    def _checked(self, visual: VisualTokens) -> VisualTokens:
        """Round a video's tokens and evidence to the precision of the cache. Raise VideoFault if that is impossible."""
        # Tokens are rounded to storage precision before pruning, so the selection can be derived again from the cache.
        tokens_TND, *deepstack = (level.to(torch.bfloat16) for level in (visual.tokens, *visual.deepstack))
        for level, values_TND in enumerate(deepstack):  # pruning checks the tokens themselves
            _check_finite(f"deepstack level {level}", values_TND)
        CODECS[self._setup.codec].check_reach(tokens_TND, *deepstack)
        evidence = {name: values.to(torch.bfloat16) for name, values in visual.evidence.items()}
        for name in self._setup.evidence:
            _check_finite(f"the evidence {name}", evidence[name])
        return VisualTokens(tokens_TND, evidence, tuple(deepstack))

    def pruned(self, visual: VisualTokens) -> PrunedTokens:
        """Prune the tokens. Raise VideoFault("internal") where the method cannot prune them."""
        return self._prune(visual)[0]


def _guarded(stage: str, video_id: str, work: Callable[[], T]) -> T:
    """Return ``work()``; convert whatever it raises to a VideoFault of this stage and video, but for MethodFails."""
    try:
        return work()
    except (VideoFault, MethodFails):
        raise
    except Exception as error:  # noqa: BLE001 - whatever one video provokes must not cost its neighbours
        exit_after_gpu_fault(video_id, error)
        if is_out_of_memory(error):
            fault = VideoFault("out-of-memory", str(error), stage=stage)
        else:
            fault = VideoFault("internal", f"{type(error).__name__}: {error}", stage=stage)
    raise fault  # outside the handlers, or it would keep the error and with it the tensors of the video


def _attempted(names: str, work: Callable[[], T]) -> T | None:
    """Return ``work()``, or None where it raises; the process ends if the error broke the GPU's context."""
    try:
        return _guarded("prune", names, work)
    except VideoFault:
        return None


class Encoder:
    """The encode actor: a VideoEncoder, error rows and a heartbeat. A call takes one bundle and yields one.

    Two calls may run at a time, of which one computes. If a process dies with videos in hand, by a signal or by an
    error that breaks the GPU's context, each is tried once more, and gets an error row after that; the run goes on. To
    find which video it was, a process that follows a dead one takes its first videos one by one.
    """

    def __init__(self, setup: EncodeSetup, heartbeats: ActorHandle | None = None) -> None:
        self._heartbeat = Heartbeat("encode", heartbeats)
        self._heartbeat.start()
        self._alone = threading.Lock()
        self._careful = CAREFUL if self._heartbeat.one_died else 0  # videos
        with self._heartbeat.loading(), pause_garbage_collector():
            self.encoder = setup.encoder()

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        yield pack(self.encode(unpack(batch)))

    def encode(self, videos: Sequence[VideoItem]) -> list[VideoItem]:
        """Encode the videos of a bundle; a fault of one makes its error row."""
        if self._careful > 0:
            with self._alone:
                self._careful -= len(videos)
                return [self._suspect(video) for video in videos]
        with self._heartbeat.holding(*(video.record["video_id"] for video in videos)) as held:
            return [done for together in self.encoder.passes(videos) for done in self._pass(together, held)]

    def _pass(self, videos: Sequence[VideoItem], held: HeldItems) -> Iterator[VideoItem]:
        """Encode the videos that share a pass, and those alone that fail in it; yield them in order."""
        found: Sequence[VideoItem | None] = [None]
        if len(videos) > 1:
            self._heartbeat.rest()
            found = self.encoder.encode_together(videos)
        for video, pruned in zip(videos, found, strict=True):
            if pruned is None:
                yield self._video(video, held)
            else:
                held.done(failed=False)
                yield pruned

    def _suspect(self, video: VideoItem) -> VideoItem:
        """Encode alone a video that may have killed the previous process, so that another death is surely its own."""
        with self._heartbeat.holding(video.record["video_id"]) as held:
            hosts = self._heartbeat.deaths(video.record["video_id"])
            if len(hosts) < POISON:
                return self._video(video, held)
            held.done(made=False, fault="crash")
        return VideoItem(failed_video(video.record, _repeated_crash(hosts)))

    def _video(self, video: VideoItem, held: HeldItems) -> VideoItem:
        """Encode one video of a bundle, reported to the heartbeat."""
        self._heartbeat.rest()
        if video.frames is None:
            held.done(made=False)
            return VideoItem(video.record)
        pruned = self._pruned(video)
        fault = pruned.record.get("error_class")
        held.done(may_succeed_elsewhere(pruned.record), made=pruned.kept is not None, fault=fault)
        return pruned

    def _pruned(self, video: VideoItem) -> VideoItem:
        """Encode and prune one video; a fault makes its error row."""
        record, started = video.record, time.perf_counter()
        try:
            return self.encoder.encode_one(record, _guarded("encode", record["video_id"], video.shaped))
        except VideoFault as error:
            fault = error.with_traceback(None)  # the traceback would keep the frames of the video
        return VideoItem({**failed_video(record, fault), "encode_s": time.perf_counter() - started})


def _repeated_crash(hosts: list[str]) -> VideoFault:
    """Return the fault of a video with which the encode process died several times."""
    where = ", ".join(dict.fromkeys(hosts))
    message = f"the encode process died {len(hosts)} times with this video in hand, on {where}; Ray's logs say how"
    return VideoFault("crash", message, stage="encode")


def pruned_columns(pruned: PrunedTokens, visual: VisualTokens) -> VideoRecord:
    """Return the columns of the videos table that pruning decides."""
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
    """Return the arrays that the cache stores of a video: kept tokens and evidence, in order of selection.

    Each deepstack level [T,N,D] and each evidence [T,N,...] is taken at the same places, and evidence of frames [T,...]
    as a whole.
    """
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
    """Return the bits of evidence at the kept places; evidence of frames is taken whole."""
    rows = values if is_per_frame(labelled) else values.flatten(0, 1)[places]
    return _bits(rows.reshape(len(rows), -1))


def _bits(values: Tensor) -> Bits:
    """Convert a tensor to the bits of bfloat16, as int16."""
    return np.asarray(values.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy())


def _check_finite(what: str, values: Tensor) -> None:
    """Raise VideoFault("internal") if a value is not finite."""
    if not values.isfinite().all():
        raise VideoFault("internal", f"{what} has values that are not finite", stage="encode")


def without_pixels(record: VideoRecord) -> SampledVideo:
    """Return the facts about a decoded video's frames that positions depend on, from its record."""
    return SampledVideo(
        height=record["height"],
        width=record["width"],
        timestamps=record["timestamps"],
        start_s=record.get("start_s"),
        fps=record["fps"],
        clip_frames=record["clip_frames"],
        clip_fps=record.get("clip_fps"),
    )
