"""The cost of decoding: CPU seconds a clip beside other libraries, and beside the least that its frames need."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import torch
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from gstep.backbones.preprocess.base import resize_frames
from gstep.backbones.preprocess.fixed import FixedSizePreprocessor
from jobs.benchmark.clips import CLIPS, LONG_CLIPS, make_clips
from jobs.benchmark.shared import figure_table, machine, machine_line, say, seconds_of
from jobs.command import count
from jobs.frame.json_document import Done
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError
from pipeline.video.containers import sniff
from pipeline.video.decode import DecodeRequest, decode_video, fingerprint
from pipeline.video.probe import probe
from pipeline.video.sampling import Sampling, choose_frames
from pipeline.video.sandbox import DecodeSandbox

SIZE = (384, 384)  # frame size of LLaVA-OneVision
HERE, CHILD, FLOOR, JOB = "ours, in this process", "ours, with the child process", "the least", "the job"
_PREPROCESSOR = FixedSizePreprocessor(image_mean=(0.5,) * 3, image_std=(0.5,) * 3, height=SIZE[0], width=SIZE[1])


@dataclass
class ClipTimes:
    """The measurements of one clip.

    Attributes:
        clip: its name.
        frames: the frames that were decoded.
        n_bytes: of these frames, which go through the object store.
        cpu_s: CPU seconds by way of decoding, the best of all rounds, since other work only adds; None where a library
            is not installed or cannot read the clip.
        videos_per_s: of the whole job and of DataLoader loops, where they were measured; None likewise.
    """

    clip: str
    frames: list[int]
    n_bytes: int
    cpu_s: dict[str, float | None] = field(default_factory=dict)
    videos_per_s: dict[str, float | None] = field(default_factory=dict)

    def over_floor(self, way: str) -> float | None:
        """Return a way's CPU seconds divided by the floor's, or None where either was not measured."""
        seconds, floor = self.cpu_s.get(way), self.cpu_s.get(FLOOR)
        return None if seconds is None or not floor else seconds / floor


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--clips", nargs="+", metavar="NAME", help="some of them only, by what their names hold [all]")
    parser.add_argument("--long", action="store_true", help="longer clips of 1080p and 2160p too, which take minutes")
    parser.add_argument("--frames", type=count, default=32, metavar="T", help="frames a clip [32]")
    parser.add_argument("--fps", type=_positive, metavar="F", help="so many frames a second instead")
    parser.add_argument("--snap", type=_positive, default=5.0, metavar="S", help="seconds to keyframes [5]")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="rounds; the best is shown [3]")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="make the clips there, and keep them")
    parser.add_argument(
        "--loop", nargs=2, type=count, metavar="N", help="the whole job too, and DataLoader loops, over N and N videos"
    )
    parser.add_argument("--workers", type=count, default=2, metavar="N", help="decode workers of these loops [2]")


def _positive(text: str) -> float:
    """Parse a finite number above 0, as a flag's type."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def run(arguments: argparse.Namespace) -> Done:
    """Time the decoding of each clip. Raises UsageError for an unknown clip name."""
    clips = [*CLIPS, *LONG_CLIPS] if arguments.long else [*CLIPS]
    names = [name for name in clips if any(part in name for part in arguments.clips or [""])]
    if not names:
        raise UsageError(f"--clips: no name holds {' or '.join(arguments.clips)}; there are {', '.join(clips)}")
    if arguments.loop and arguments.loop[0] == arguments.loop[1]:
        raise UsageError("--loop takes two different numbers of videos: what a video more takes counts")
    sampling = Sampling(None if arguments.fps else arguments.frames, arguments.fps)
    torch.set_num_threads(1)
    found = []
    with TemporaryDirectory() as temporary:
        say("making the clips")
        for name, path in make_clips(arguments.folder or Path(temporary), names).items():
            say(f"decoding {name}")
            times = measure(name, path, sampling, arguments.repeats, arguments.snap)
            if arguments.loop:
                times.videos_per_s = videos_per_second(path, times.frames, arguments.loop, arguments.workers)
            found.append(times)
    frames = f"{arguments.fps:g} frames a second" if arguments.fps else f"{arguments.frames} frames"
    title = f"CPU seconds for {frames} of a clip at 384 x 384, best of {arguments.repeats}, {machine_line()}"
    record = [
        {"clip": one.clip, "bytes": one.n_bytes, "cpu_s": one.cpu_s, "videos_per_s": one.videos_per_s} for one in found
    ]
    return Done(0, {"machine": machine(), "clips": record}, [as_table(found, title)])


def measure(name: str, path: Path, sampling: Sampling, repeats: int, snap_s: float) -> ClipTimes:
    """Measure one clip in all ways, in turns; ``snap_s`` is --snap-to-keyframes of the way that moves frames."""
    index = probe(str(path), sniff(path))
    assert index.packets is not None and index.pts is not None
    index.packets.close()
    shown, *end = index.unrounded()
    chosen = np.unique(choose_frames(shown, sampling, None, None, *end))
    pts, keys = index.pts[chosen].tolist(), index.keyframes.tolist()
    request = DecodeRequest(path, sampling, _PREPROCESSOR)
    snapped = replace(request, sampling=replace(sampling, snap_to_keyframes_s=snap_s))
    found = ClipTimes(name, chosen.tolist(), decode_video(request).frames.nbytes)
    decoded = needed(str(path), pts, keys)
    parts = ("needed packets decoded", "converted and resized")
    with DecodeSandbox(timeout_s=3600) as sandbox:
        sandbox.decode(request)
        ways: dict[str, Callable[[], object]] = {
            parts[0]: lambda: needed(str(path), pts, keys),
            parts[1]: lambda: [_resized(frame) for frame in decoded],
            HERE: lambda: decode_video(request),
            CHILD: lambda: sandbox.decode(request),
            "read and hashed": lambda: fingerprint(path),
            "indexed": lambda: _read_index(path),
            f"ours, within {snap_s:g} s of keyframes": lambda: decode_video(snapped),
            "plain PyAV": lambda: _by_plain_pyav(str(path), pts),
            **{library: partial(decode, str(path), found.frames) for library, decode in LIBRARIES.items()},
        }
        for way, call in [*ways.items()] * repeats:
            seconds, best = _cpu_s(call), found.cpu_s.get(way)
            found.cpu_s[way] = seconds if best is None or seconds is None else min(best, seconds)
    found.cpu_s[FLOOR] = sum(found.cpu_s[part] or 0.0 for part in parts)
    return found


def needed(path: str, pts: Sequence[int], keys: Sequence[int]) -> list[Any]:
    """Decode the frames of ``pts`` from the fewest packets that they need: the floor, with none of our code."""
    kept: list[Any] = []
    groups: dict[int, set[int]] = {}
    for time_of_frame in pts:
        groups.setdefault(keys[bisect_right(keys, time_of_frame) - 1], set()).add(time_of_frame)
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for key, missing in groups.items():
            container.seek(key, stream=stream)
            chosen = frozenset(missing)
            for packet in container.demux(stream):
                stream.codec_context.skip_frame = "DEFAULT" if packet.pts in chosen else "NONREF"
                for frame in packet.decode():
                    if frame.pts in missing:
                        missing.discard(frame.pts)
                        kept.append(frame)
                if not missing:
                    break
    return kept


def _by_plain_pyav(path: str, pts: Sequence[int]) -> None:
    """Decode frames with PyAV in the obvious way: seek to the keyframe before each, and decode up to it."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for time_of_frame in pts:
            container.seek(time_of_frame, stream=stream)
            _resized(next(frame for frame in container.decode(stream) if frame.pts == time_of_frame))


def _by_decord(path: str, frames: list[int]) -> torch.Tensor:
    """Decode and resize frames with decord: [T,h,w,3] uint8."""
    import decord  # noqa: PLC0415 - not there on every platform

    return resize_frames(decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1).get_batch(frames).asnumpy(), SIZE)


def _by_torchcodec(path: str, frames: list[int]) -> torch.Tensor:
    """Decode and resize frames with torchcodec: [T,h,w,3] uint8."""
    from torchcodec.decoders import VideoDecoder  # noqa: PLC0415 - an extra

    video = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC", seek_mode="approximate")
    return resize_frames(video.get_frames_at(frames).data, SIZE)


LIBRARIES = {"decord": _by_decord, "torchcodec": _by_torchcodec}


def _resized(frame: Any) -> Any:
    """Convert a PyAV frame to RGB and resize it to SIZE."""
    return resize_frames(frame.to_ndarray(format="rgb24", interpolation="BICUBIC", threads=1)[None], SIZE)


def _read_index(path: Path) -> None:
    """Read the clip's packet index as the pipeline's probe does, and drop it."""
    index = probe(str(path), sniff(path))
    assert index.packets is not None
    index.packets.close()


def _cpu_s(call: Callable[[], object]) -> float | None:
    """Return the CPU seconds of a call in this process and in decode children; None where a library cannot do it."""
    started = time.process_time() + _children_s()
    try:
        call()
    except Exception:  # noqa: BLE001 - a library that is not here, or cannot read this clip, has no figure
        return None
    return time.process_time() + _children_s() - started


def _children_s() -> float:
    """Return the CPU seconds of all threads of the decode child processes."""
    children = multiprocessing.active_children()
    stats = [file for child in children for file in Path(f"/proc/{child.pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text(encoding="ascii").split()[0]) for file in stats) / 1e9


class Videos(Dataset[torch.Tensor]):
    """A dataset of ``count`` copies of one clip, each item its sampled and resized frames, uint8."""

    def __init__(self, path: Path, frames: list[int], count: int, library: str) -> None:
        self._decode = partial(LIBRARIES[library], str(path), frames)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return self._decode()


def videos_per_second(path: Path, frames: list[int], counts: Sequence[int], workers: int) -> dict[str, float | None]:
    """Return the throughput, in videos/s, of jobs.prune and of each DataLoader loop: the slope between two ``counts``.

    The loops burn the CPU seconds that the job's small encoder takes for a video, so that all do the same work.
    """
    encode_s: list[float] = []

    def run_loop(library: str, count: int) -> None:
        videos = Videos(path, frames, count, library)
        for _ in DataLoader(videos, batch_size=None, num_workers=workers, prefetch_factor=2):
            until = time.thread_time() + min(encode_s)
            while time.thread_time() < until:
                pass

    few, many = sorted(counts)
    ways: dict[str, Callable[[int], object]] = {JOB: lambda count: encode_s.append(_job(path, len(frames), count))}
    ways |= {f"loop with {library}": partial(run_loop, library) for library in LIBRARIES}
    found: dict[str, float | None] = {}
    for way, run_way in ways.items():
        try:
            of_many, of_few = (seconds_of(partial(run_way, count))[0] for count in (many, few))
            found[way] = (many - few) / (of_many - of_few)
        except Exception:  # noqa: BLE001 - a library that is not here, or cannot read this clip, has no figure
            found[way] = None
    return found


def _job(path: Path, n_frames: int, count: int) -> float:
    """Run ``jobs.prune`` on ``count`` copies of a clip; return the fastest one's seconds of encoding and pruning."""
    with TemporaryDirectory() as folder:
        manifest, out = Path(folder) / "videos.jsonl", Path(folder) / "cache"
        rows = [json.dumps({"video_id": str(number), "uri": str(path.resolve())}) for number in range(count)]
        manifest.write_text("\n".join(rows), encoding="utf-8")
        options = [manifest, "--out", out, "--num-frames", n_frames, "--video-root", path.resolve().parent]
        command = [sys.executable, "-m", "jobs.prune", *map(str, options)]
        subprocess.run(command, check=True, capture_output=True)
        cache = TokenCache(out)
        rows_of = [cache.metadata(video_id) for video_id in cache.video_ids]
        return float(min(row["encode_s"] + row["prune_s"] for row in rows_of))


def as_table(found: Sequence[ClipTimes], title: str) -> Table:
    """Lay out a row a decoding way and a column a clip; the last rows are our ways over the floor."""

    def cells(values: Sequence[float | None]) -> list[str]:
        return ["-" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}" for value in values]

    table = figure_table(title, ["", *(one.clip for one in found)], [])
    for way in (FLOOR, *(way for way in found[0].cpu_s if way != FLOOR)):
        table.add_row(way, *cells([one.cpu_s[way] for one in found]))
    for way in (HERE, CHILD, *LIBRARIES):
        table.add_row(f"{way} / {FLOOR}", *cells([one.over_floor(way) for one in found]))
    for way in found[0].videos_per_s:
        table.add_row(f"{way}, videos/s", *cells([one.videos_per_s[way] for one in found]))
    table.add_row("MB through the object store", *(f"{one.n_bytes / 1e6:.1f}" for one in found))
    return table
