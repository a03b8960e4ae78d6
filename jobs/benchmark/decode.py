"""The cost of decoding: CPU seconds a clip beside other libraries, and beside the minimum that its frames need."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import numpy as np
import torch
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from gstep.backbones.preprocess import FixedSizePreprocessor, resize_frames
from jobs.benchmark.shared import figure_table, machine, machine_line, say, seconds_of
from jobs.command import count
from jobs.frame.json_document import CommandResult
from pipeline.cache.reader import TokenCache
from pipeline.errors import UsageError
from pipeline.inputs.video_list import VideoList
from pipeline.video.containers import sniff
from pipeline.video.decode import DecodeRequest, decode_video, fingerprint
from pipeline.video.probe import probe
from pipeline.video.sampling import Sampling, choose_frames
from pipeline.video.sandbox import DecodeSandbox

SIZE = (384, 384)  # frame size of LLaVA-OneVision
IN_PROCESS, IN_CHILD, FLOOR, JOB = "ours, in this process", "ours, with the child process", "the least", "the job"
_PREPROCESSOR = FixedSizePreprocessor(image_mean=(0.5,) * 3, image_std=(0.5,) * 3, height=SIZE[0], width=SIZE[1])
FPS = 24  # frames a second of the clips
_SOURCE = "bigbuckbunny.mp4"  # repeated forwards and backwards to the length of a clip
_ENCODER_OPTIONS = {  # {0}: frames from a keyframe to the next
    "libx264": {
        "preset": "veryfast",
        "crf": "23",
        "x264-params": "keyint={0}:min-keyint={0}:scenecut=0:bframes=2",
    },
    "libx265": {
        "preset": "ultrafast",
        "crf": "26",
        "x265-params": "keyint={0}:min-keyint={0}:scenecut=0:log-level=error",
    },
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8", "row-mt": "1", "b": "2M"},
    "libsvtav1": {"preset": "11", "crf": "40"},
}


@dataclass(frozen=True)
class Clip:
    """The settings of a clip to encode.

    Attributes:
        encoder: FFmpeg's name of the encoder.
        width: width in pixels.
        height: height in pixels.
        seconds: length in seconds, at 24 frames a second.
        group: frames from a keyframe to the next.
    """

    encoder: str
    width: int
    height: int
    seconds: int
    group: int


CLIPS = {
    "h264-720p-10s-g250": Clip("libx264", 1280, 720, 10, 250),
    "h264-720p-10s-g30": Clip("libx264", 1280, 720, 10, 30),
    "hevc-720p-10s-g250": Clip("libx265", 1280, 720, 10, 250),
    "vp9-720p-10s-g128": Clip("libvpx-vp9", 1280, 720, 10, 128),
    "av1-720p-10s-g128": Clip("libsvtav1", 1280, 720, 10, 128),
    "h264-1080p-60s-g250": Clip("libx264", 1920, 1080, 60, 250),
    "h264-1080p-60s-g30": Clip("libx264", 1920, 1080, 60, 30),
    "h264-720p-600s-g250": Clip("libx264", 1280, 720, 600, 250),
}
#: Clips that take minutes to decode once in all ways.
LONG_CLIPS = {
    "hevc-1080p-60s-g250": Clip("libx265", 1920, 1080, 60, 250),
    "vp9-1080p-60s-g128": Clip("libvpx-vp9", 1920, 1080, 60, 128),
    "av1-1080p-60s-g128": Clip("libsvtav1", 1920, 1080, 60, 128),
    "h264-1080p-600s-g250": Clip("libx264", 1920, 1080, 600, 250),
    "h264-2160p-600s-g250": Clip("libx264", 3840, 2160, 600, 250),
}
_ENCODED_FRAMES = 500  # frames of a long clip that are encoded; their packets are repeated


@dataclass
class ClipTimes:
    """The measurements of one clip.

    Attributes:
        clip: the name of the clip.
        frames: the indices of the decoded frames.
        n_bytes: bytes of these frames, which pass the object store.
        cpu_s: way of decoding -> CPU seconds, the best of all rounds, because other work only adds; None if a library
            is not installed or cannot read the clip.
        videos_per_s: way -> videos a second of the whole job and of DataLoader loops, if measured; None likewise.
    """

    clip: str
    frames: list[int]
    n_bytes: int
    cpu_s: dict[str, float | None] = field(default_factory=dict)
    videos_per_s: dict[str, float | None] = field(default_factory=dict)

    def over_floor(self, way: str) -> float | None:
        """Compute a way's CPU seconds divided by the floor's; None if either was not measured."""
        seconds, floor = self.cpu_s.get(way), self.cpu_s.get(FLOOR)
        return None if seconds is None or not floor else seconds / floor


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``decode``."""
    parser.add_argument("--clips", nargs="+", metavar="NAME", help="only clips whose names contain a NAME [all]")
    parser.add_argument("--long", action="store_true", help="longer clips of 1080p and 2160p too, which take minutes")
    parser.add_argument("--frames", type=count, default=32, metavar="T", help="frames a clip [32]")
    parser.add_argument("--fps", type=_parse_positive, metavar="F", help="instead of --frames: F frames a second")
    parser.add_argument(
        "--snap", type=_parse_positive, default=5.0, metavar="S", help="the seconds of --snap-to-keyframes [5]"
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="measure N times, and show the best [3]")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="make the clips there, and keep them")
    parser.add_argument(
        "--loop", nargs=2, type=count, metavar="N", help="measure the job and DataLoader loops too, over N and N videos"
    )
    parser.add_argument("--workers", type=count, default=2, metavar="N", help="decode workers of these loops [2]")


def _parse_positive(text: str) -> float:
    """Parse a finite number above 0, as a flag's type."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure the CPU seconds of decoding synthetic clips in several ways, and return the table.

    Only clips whose names hold a word of ``--clips`` are made; without words, all. They stay in ``--folder`` if it is
    given, and a clip that is there already is used as it is. ``--loop`` adds videos a second of jobs.prune and of
    DataLoader loops, from the difference of two numbers of videos. Sets torch to one thread in this process. Raises
    UsageError for a word that no clip has, and if both numbers of ``--loop`` are equal.
    """
    clips = [*CLIPS, *LONG_CLIPS] if arguments.long else [*CLIPS]
    names = [name for name in clips if any(part in name for part in arguments.clips or [""])]
    for part in arguments.clips or []:
        if not any(part in name for name in clips):
            raise UsageError(f"--clips: no name holds {part}; there are {', '.join(clips)}")
    if arguments.loop and arguments.loop[0] == arguments.loop[1]:
        raise UsageError("--loop takes two different numbers of videos: the difference is measured")
    sampling = Sampling(None if arguments.fps else arguments.frames, arguments.fps)
    torch.set_num_threads(1)
    clip_times = []
    with TemporaryDirectory() as temporary:
        say("making the clips")
        for name, path in make_clips(arguments.folder or Path(temporary), names).items():
            say(f"decoding {name}")
            times = measure(name, path, sampling, arguments.repeats, arguments.snap)
            if arguments.loop:
                times.videos_per_s = videos_per_second(path, times.frames, arguments.loop, arguments.workers)
            clip_times.append(times)
    frames = f"{arguments.fps:g} frames a second" if arguments.fps else f"{arguments.frames} frames"
    title = f"CPU seconds for {frames} of a clip at 384 x 384, best of {arguments.repeats}, {machine_line()}"
    record = [
        {"clip": t.clip, "bytes": t.n_bytes, "cpu_s": t.cpu_s, "videos_per_s": t.videos_per_s} for t in clip_times
    ]
    return CommandResult(0, {"machine": machine(), "clips": record}, [as_table(clip_times, title)])


def make_clips(folder: Path, names: Sequence[str], others: Mapping[str, Clip] | None = None) -> dict[str, Path]:
    """Make the named clips, of CLIPS, LONG_CLIPS and ``others``, that ``folder`` lacks; return name -> path of all.

    Raises ManifestError if the sample clips are not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.mp4" for name in names}
    missing = [name for name in names if not paths[name].exists()]
    if missing:
        source = next(row["uri"] for row in VideoList.read("sample").known.to_pylist() if row["video_id"] == _SOURCE)
        with av.open(source) as container:
            frames = list(container.decode(video=0))
        frames += frames[::-1]
        for name in missing:
            part, clip = paths[name].with_suffix(".part.mp4"), {**CLIPS, **LONG_CLIPS, **(others or {})}[name]
            if name not in LONG_CLIPS:
                _encode(part, clip, FPS * clip.seconds, frames)
            else:
                once = paths[name].with_suffix(".once.mp4")
                _encode(once, clip, _ENCODED_FRAMES // clip.group * clip.group, frames)
                _repeat(once, part, clip)
                once.unlink()
            part.rename(paths[name])
    return paths


def _encode(path: Path, clip: Clip, count: int, frames: Sequence[av.VideoFrame]) -> None:
    """Encode ``count`` frames into ``path``, repeating ``frames`` as often as needed."""
    with av.open(str(path), "w") as out:
        options = {name: value.format(clip.group) for name, value in _ENCODER_OPTIONS[clip.encoder].items()}
        stream = out.add_stream(clip.encoder, rate=FPS, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = clip.width, clip.height, "yuv420p", clip.group
        for number in range(count):
            frame = frames[number % len(frames)].reformat(clip.width, clip.height, "yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))


def _repeat(once: Path, path: Path, clip: Clip) -> None:
    """Fill ``path`` by remuxing the packets of the encoded clip ``once`` over and over, to ``clip``'s full length."""
    with av.open(str(once)) as source, av.open(str(path), "w") as out:
        read = source.streams.video[0]
        stream = out.add_stream_from_template(read, opaque=True)
        for turn in range(-(-FPS * clip.seconds // read.frames)):
            source.seek(0, stream=read)
            for packet in islice((p for p in source.demux(read) if p.size), FPS * clip.seconds - turn * read.frames):
                packet.pts, packet.dts = (t + turn * read.duration for t in (packet.pts, packet.dts))
                packet.stream = stream
                out.mux(packet)


def measure(name: str, path: Path, sampling: Sampling, repeats: int, snap_s: float) -> ClipTimes:
    """Measure the CPU seconds of all ways on one clip, in turns, and the floor as the sum of its two parts.

    A way has its best of ``repeats`` rounds. ``snap_s`` is the --snap-to-keyframes of one way. A child process is
    started for the decode and ended.
    """
    index = probe(str(path), sniff(path))
    assert index.packets is not None and index.pts is not None
    index.packets.close()
    times, *end = index.find_true_times()
    indices = np.unique(choose_frames(times, sampling, None, None, *end))
    pts, keys = index.pts[indices].tolist(), index.keyframes.tolist()
    request = DecodeRequest(path, sampling, _PREPROCESSOR)
    snap_request = replace(request, sampling=replace(sampling, snap_to_keyframes_s=snap_s))
    clip_times = ClipTimes(name, indices.tolist(), decode_video(request).frames.nbytes)
    decoded = decode_needed_frames(str(path), pts, keys)
    parts = ("needed packets decoded", "converted and resized")
    with DecodeSandbox(timeout_s=3600) as sandbox:
        sandbox.decode(request)
        ways: dict[str, Callable[[], object]] = {
            parts[0]: lambda: decode_needed_frames(str(path), pts, keys),
            parts[1]: lambda: [_convert_and_resize(frame) for frame in decoded],
            IN_PROCESS: lambda: decode_video(request),
            IN_CHILD: lambda: sandbox.decode(request),
            "read and hashed": lambda: fingerprint(path),
            "indexed": lambda: _read_index(path),
            f"ours, within {snap_s:g} s of keyframes": lambda: decode_video(snap_request),
            **{library: partial(decode, str(path), clip_times.frames) for library, decode in LIBRARIES.items()},
        }
        for way, call in [*ways.items()] * repeats:
            seconds, best = _measure_cpu_s(call), clip_times.cpu_s.get(way)
            clip_times.cpu_s[way] = seconds if best is None or seconds is None else min(best, seconds)
    clip_times.cpu_s[FLOOR] = sum(clip_times.cpu_s[part] or 0.0 for part in parts)
    return clip_times


def decode_needed_frames(path: str, pts: Sequence[int], keys: Sequence[int]) -> list[Any]:
    """Decode the frames of ``pts`` from the fewest packets that they need, by PyAV alone: the floor.

    Returns PyAV's frames, unconverted. ``keys`` are the pts of the keyframes, ascending.
    """
    decoded: list[Any] = []
    groups: dict[int, set[int]] = {}
    for time_of_frame in pts:
        groups.setdefault(keys[bisect_right(keys, time_of_frame) - 1], set()).add(time_of_frame)
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for key, missing in groups.items():
            container.seek(key, stream=stream)
            targets = frozenset(missing)
            for packet in container.demux(stream):
                stream.codec_context.skip_frame = "DEFAULT" if packet.pts in targets else "NONREF"
                for frame in packet.decode():
                    if frame.pts in missing:
                        missing.discard(frame.pts)
                        decoded.append(frame)
                if not missing:
                    break
    return decoded


def _decode_by_decord(path: str, frames: list[int]) -> torch.Tensor:
    """Decode and resize frames with decord: [T,h,w,3] uint8."""
    import decord  # noqa: PLC0415 - not there on every platform

    return resize_frames(decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1).get_batch(frames).asnumpy(), SIZE)


def _decode_by_torchcodec(path: str, frames: list[int]) -> torch.Tensor:
    """Decode and resize frames with torchcodec: [T,h,w,3] uint8."""
    from torchcodec.decoders import VideoDecoder  # noqa: PLC0415 - an extra

    video = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC", seek_mode="approximate")
    return resize_frames(video.get_frames_at(frames).data, SIZE)


LIBRARIES = {"decord": _decode_by_decord, "torchcodec": _decode_by_torchcodec}


def _convert_and_resize(frame: Any) -> Any:
    """Convert a PyAV frame to RGB and resize it to SIZE."""
    return resize_frames(frame.to_ndarray(format="rgb24", interpolation="BICUBIC", threads=1)[None], SIZE)


def _read_index(path: Path) -> None:
    """Read the clip's packet index with the pipeline's probe, and discard it."""
    index = probe(str(path), sniff(path))
    assert index.packets is not None
    index.packets.close()


def _measure_cpu_s(call: Callable[[], object]) -> float | None:
    """Measure the CPU seconds of a call in this process and in decode children; None if the call raises any error."""
    started = time.process_time() + _children_cpu_s()
    try:
        call()
    except Exception:  # noqa: BLE001 - a library that is not here, or cannot read this clip, has no figure
        return None
    return time.process_time() + _children_cpu_s() - started


def _children_cpu_s() -> float:
    """Read the CPU seconds of all threads of the decode child processes."""
    children = multiprocessing.active_children()
    stats = [file for child in children for file in Path(f"/proc/{child.pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text(encoding="ascii").split()[0]) for file in stats) / 1e9


class ClipDataset(Dataset[torch.Tensor]):
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
    """Measure videos a second of jobs.prune and of each DataLoader loop: the slope between two ``counts`` of videos.

    The loops burn the CPU seconds of the job's small encoder for each video, so that all ways do the same work. A way
    that fails has None.
    """
    encode_s: list[float] = []

    def run_loop(library: str, count: int) -> None:
        videos = ClipDataset(path, frames, count, library)
        for _ in DataLoader(videos, batch_size=None, num_workers=workers, prefetch_factor=2):
            until = time.thread_time() + min(encode_s)
            while time.thread_time() < until:
                pass

    n_few, n_many = sorted(counts)
    ways: dict[str, Callable[[int], object]] = {JOB: lambda count: encode_s.append(_run_job(path, len(frames), count))}
    ways |= {f"loop with {library}": partial(run_loop, library) for library in LIBRARIES}
    speeds: dict[str, float | None] = {}
    for way, run_way in ways.items():
        try:
            long_s, short_s = (seconds_of(partial(run_way, count))[0] for count in (n_many, n_few))
            speeds[way] = (n_many - n_few) / (long_s - short_s)
        except Exception:  # noqa: BLE001 - a library that is not here, or cannot read this clip, has no figure
            speeds[way] = None
    return speeds


def _run_job(path: Path, n_frames: int, count: int) -> float:
    """Run ``jobs.prune`` on ``count`` copies of a clip; return the minimum seconds of encoding and pruning a copy."""
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


def as_table(clip_times: Sequence[ClipTimes], title: str) -> Table:
    """Make a table with a column for each clip, at least one.

    Its rows: CPU seconds of each way, ratios to the least that decoding needs, videos a second if measured, and MB
    through the object store.
    """

    def cells(values: Sequence[float | None]) -> list[str]:
        return ["-" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}" for value in values]

    table = figure_table(title, ["", *(times.clip for times in clip_times)], [])
    for way in (FLOOR, *(way for way in clip_times[0].cpu_s if way != FLOOR)):
        table.add_row(way, *cells([times.cpu_s[way] for times in clip_times]))
    for way in (IN_PROCESS, IN_CHILD, *LIBRARIES):
        table.add_row(f"{way} / {FLOOR}", *cells([times.over_floor(way) for times in clip_times]))
    for way in clip_times[0].videos_per_s:
        table.add_row(f"{way}, videos/s", *cells([times.videos_per_s[way] for times in clip_times]))
    table.add_row("MB through the object store", *(f"{times.n_bytes / 1e6:.1f}" for times in clip_times))
    return table
