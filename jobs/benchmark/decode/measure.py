"""CPU seconds of decoding a clip: the pipeline's way and its parts, other libraries', and the least possible."""

from __future__ import annotations

import multiprocessing
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from gstep.backbones.preprocess.base import resize_frames
from gstep.backbones.preprocess.fixed import FixedSizePreprocessor
from pipeline.video.containers import sniff
from pipeline.video.decode import DecodeRequest, decode_video, fingerprint
from pipeline.video.probe import probe
from pipeline.video.sampling import Sampling, choose_frames
from pipeline.video.sandbox import DecodeSandbox

SIZE = (384, 384)  # frame size of LLaVA-OneVision
HERE, CHILD, FLOOR = "ours, in this process", "ours, with the child process", "the least"
_PREPROCESSOR = FixedSizePreprocessor(image_mean=(0.5,) * 3, image_std=(0.5,) * 3, height=SIZE[0], width=SIZE[1])


@dataclass
class Times:
    """The CPU seconds of decoding one clip in every way: the best of all rounds, since other work only adds.

    Attributes:
        clip: its name.
        ways: by name; None where a library is not here or cannot read the clip.
        n_bytes: of the frames, which go through the object store.
        chosen: the frames that were decoded.
        per_second: videos/s of the whole job and of loops, where they were measured.
    """

    clip: str
    ways: dict[str, float | None] = field(default_factory=dict)
    n_bytes: int = 0
    chosen: list[int] = field(default_factory=list)
    per_second: dict[str, float | None] = field(default_factory=dict)

    def add(self, way: str, seconds: float | None) -> None:
        """Keep a round's seconds for a way if they are the fewest so far."""
        before = self.ways.get(way)
        self.ways[way] = seconds if before is None or seconds is None else min(before, seconds)

    def over_floor(self, way: str) -> float | None:
        """Return a way's CPU seconds divided by the floor's, or None where either was not measured."""
        seconds, floor = self.ways.get(way), self.ways.get(FLOOR)
        return None if seconds is None or not floor else seconds / floor


def measure(name: str, path: Path, sampling: Sampling, repeats: int, snap_s: float) -> Times:
    """Measure one clip in all ways, in turns, ``repeats`` times.

    ``snap_s`` is --snap-to-keyframes of the way that moves frames to keyframes.
    """
    index = probe(str(path), sniff(path))
    assert index.packets is not None and index.pts is not None
    index.packets.close()
    shown, *end = index.unrounded()
    chosen = np.unique(choose_frames(shown, sampling, None, None, *end))
    times, keys = index.pts[chosen].tolist(), index.keyframes.tolist()
    request = DecodeRequest(path, sampling, _PREPROCESSOR)
    snapped = replace(request, sampling=replace(sampling, snap_to_keyframes_s=snap_s))
    frames = needed(str(path), times, keys)
    found = Times(name, n_bytes=decode_video(request).frames.nbytes, chosen=chosen.tolist())
    with DecodeSandbox(timeout_s=3600) as sandbox:
        sandbox.decode(request)
        ways: dict[str, Callable[[], float]] = {
            "needed packets decoded": partial(_cpu, lambda: needed(str(path), times, keys)),
            "converted and resized": partial(_cpu, lambda: [_resized(frame) for frame in frames]),
            HERE: partial(_cpu, lambda: decode_video(request)),
            CHILD: lambda: _child_cpu(sandbox, request),
            "read and hashed": partial(_cpu, lambda: fingerprint(path)),
            "indexed": partial(_cpu, lambda: _indexed(path)),
            f"ours, within {snap_s:g} s of keyframes": partial(_cpu, lambda: decode_video(snapped)),
            "plain PyAV": partial(_cpu, lambda: _by_plain_pyav(str(path), times)),
            "decord": partial(_cpu, lambda: by_decord(str(path), chosen.tolist())),
            "torchcodec": partial(_cpu, lambda: by_torchcodec(str(path), chosen.tolist())),
        }
        for _ in range(repeats):
            for way, call in ways.items():
                found.add(way, _seconds(call))
    parts = found.ways["needed packets decoded"], found.ways["converted and resized"]
    found.ways[FLOOR] = sum(part or 0.0 for part in parts)
    return found


def needed(path: str, times: Sequence[int], keys: Sequence[int]) -> list[Any]:
    """Decode the frames shown at ``times`` from the fewest packets that they need: the floor, with none of our code."""
    kept: list[Any] = []
    groups: dict[int, set[int]] = {}
    for moment in times:
        groups.setdefault(keys[bisect_right(keys, moment) - 1], set()).add(moment)
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for key, missing in groups.items():
            container.seek(key, stream=stream)
            wanted = frozenset(missing)
            for packet in container.demux(stream):
                stream.codec_context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
                for frame in packet.decode():
                    if frame.pts in missing:
                        missing.discard(frame.pts)
                        kept.append(frame)
                if not missing:
                    break
    return kept


def _by_plain_pyav(path: str, times: Sequence[int]) -> None:
    """Decode frames with PyAV in the obvious way: seek to the keyframe before each, and decode up to it."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for moment in times:
            container.seek(moment, stream=stream)
            _resized(next(frame for frame in container.decode(stream) if frame.pts == moment))


def by_decord(path: str, chosen: list[int]) -> torch.Tensor:
    """Decode and resize frames with decord: [T,h,w,3] uint8."""
    import decord  # noqa: PLC0415 - not there on every platform

    return resize_frames(decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1).get_batch(chosen).asnumpy(), SIZE)


def by_torchcodec(path: str, chosen: list[int]) -> torch.Tensor:
    """Decode and resize frames with torchcodec: [T,h,w,3] uint8."""
    from torchcodec.decoders import VideoDecoder  # noqa: PLC0415 - an extra

    video = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC", seek_mode="approximate")
    return resize_frames(video.get_frames_at(chosen).data, SIZE)


def _resized(frame: Any) -> Any:
    """Convert a PyAV frame to RGB and resize it to SIZE."""
    return resize_frames(frame.to_ndarray(format="rgb24", interpolation="BICUBIC", threads=1)[None], SIZE)


def _indexed(path: Path) -> None:
    """Read the clip's packet index as the pipeline's probe does, and drop it."""
    index = probe(str(path), sniff(path))
    assert index.packets is not None
    index.packets.close()


def _seconds(call: Callable[[], float]) -> float | None:
    """Call a timing, or return None if the library is missing or cannot read the clip."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - a library that is not here, or cannot read this clip, has no figure
        return None


def _cpu(call: Callable[[], object]) -> float:
    """Return the CPU seconds that this process spends in a call."""
    started = time.process_time()
    call()
    return time.process_time() - started


def _child_cpu(sandbox: DecodeSandbox, request: DecodeRequest) -> float:
    """Return the CPU seconds of this process and of the sandbox's child, all threads, for one decode request."""
    before = sum(_child_times())
    return _cpu(lambda: sandbox.decode(request)) + sum(_child_times()) - before


def _child_times() -> Iterator[float]:
    """Yield the CPU seconds of each thread of the decode child processes started from this process."""
    for child in multiprocessing.active_children():
        for schedstat in Path(f"/proc/{child.pid}/task").glob("*/schedstat"):
            yield int(schedstat.read_text(encoding="ascii").split()[0]) / 1e9
