"""The cost of decoding: CPU seconds per clip, beside other libraries and beside the minimum that its frames need."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import av
import numpy as np
import torch

from gstep.backbones.preprocess import FixedSizePreprocessor, resize_frames
from jobs.benchmark.shared import add_flag, format_figure_rows, make_result, run_in_turn, say
from jobs.frame.json_document import CommandResult
from pipeline.inputs.video_list import VideoList
from pipeline.video.containers import sniff
from pipeline.video.decode import DecodeRequest, decode_video, fingerprint_file
from pipeline.video.probe import probe
from pipeline.video.sampling import Sampling, choose_frames
from pipeline.video.sandbox import DecodeSandbox

SIZE = (384, 384)  # frame size of LLaVA-OneVision
IN_PROCESS, IN_CHILD, FLOOR = "ours, in this process", "ours, with the child process", "the least"
_FLOOR_PARTS = ("needed packets decoded", "converted and resized")
_PREPROCESSOR = FixedSizePreprocessor(image_mean=(0.5,) * 3, image_std=(0.5,) * 3, height=SIZE[0], width=SIZE[1])
FPS = 24  # frames per second of the clips
_SOURCE = "bigbuckbunny.mp4"  # repeated forwards and backwards to the length of a clip
#: Codec -> FFmpeg's encoder and its options; {0} is the number of frames from one keyframe to the next.
_ENCODERS = {
    "h264": (
        "libx264",
        {"preset": "veryfast", "crf": "23", "x264-params": "keyint={0}:min-keyint={0}:scenecut=0:bframes=2"},
    ),
    "hevc": (
        "libx265",
        {"preset": "ultrafast", "crf": "26", "x265-params": "keyint={0}:min-keyint={0}:scenecut=0:log-level=error"},
    ),
    "vp9": ("libvpx-vp9", {"deadline": "realtime", "cpu-used": "8", "row-mt": "1", "b": "2M"}),
    "av1": ("libsvtav1", {"preset": "11", "crf": "40"}),
}


class Clip(NamedTuple):
    """The settings of a synthetic clip, which is 16:9 and has 24 frames per second.

    Attributes:
        codec: a key of _ENCODERS.
        height: a multiple of 18.
        group: the number of frames from one keyframe to the next.
    """

    codec: str
    height: int
    seconds: int
    group: int

    @classmethod
    def parse(cls, name: str) -> Clip:
        """Parse a name such as h264-720p-10s-g250; raise argparse.ArgumentTypeError for another text."""
        settings = re.fullmatch(rf"({'|'.join(_ENCODERS)})-([1-9]\d*)p-([1-9]\d*)s-g([1-9]\d*)", name)
        if settings is None or int(settings[2]) % 18:
            raise argparse.ArgumentTypeError(
                f"{name} is not a clip: write CODEC-HEIGHTp-SECONDSs-gFRAMES such as {CLIPS[0]}, with a codec of "
                f"{', '.join(_ENCODERS)} and a height in steps of 18"
            )
        return cls(settings[1], *(int(settings[number]) for number in (2, 3, 4)))

    def __str__(self) -> str:
        return f"{self.codec}-{self.height}p-{self.seconds}s-g{self.group}"


CLIPS = [
    Clip("h264", 720, 10, 250),
    Clip("h264", 720, 10, 30),
    Clip("hevc", 720, 10, 250),
    Clip("vp9", 720, 10, 128),
    Clip("av1", 720, 10, 128),
    Clip("h264", 1080, 60, 250),
    Clip("h264", 1080, 60, 30),
    Clip("h264", 720, 600, 250),
]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this measurement."""
    clips = "clips to make, CODEC-HEIGHTp-SECONDSs-gFRAMES with FRAMES from a keyframe to the next"
    add_flag(parser, "--clips", CLIPS, clips, "NAME", Clip.parse)
    add_flag(parser, "--frames", 32, "frames per clip", "T")
    add_flag(parser, "--fps", None, "instead of --frames: F frames per second", "F", _parse_positive)
    add_flag(parser, "--snap", 5.0, "the seconds of --snap-to-keyframes", "S", _parse_positive)
    add_flag(parser, "--repeats", 3, "measure N times, and show the best", "N")
    add_flag(parser, "--folder", None, "make the clips there, and keep them", "DIR", Path)


def _parse_positive(text: str) -> float:
    """Parse a finite number above 0 for argparse; raise ValueError or ArgumentTypeError for another text."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def run(arguments: argparse.Namespace) -> CommandResult:
    """Measure the CPU seconds of decoding synthetic clips in several ways, and return the table.

    Clips are made in ``--folder``, where they stay and existing ones are used as they are, or in a temporary folder.
    Sets torch to one thread in this process.

    Raises:
        ManifestError: the sample clips are not installed.
    """
    sampling = Sampling(None if arguments.fps else arguments.frames, arguments.fps)
    torch.set_num_threads(1)
    clips, figures = list[dict[str, object]](), dict[str, dict[str, float | None]]()
    with TemporaryDirectory() as temporary:
        for clip in arguments.clips:
            say(f"making and decoding {clip}")
            path = make_clip(arguments.folder or Path(temporary), clip)
            n_bytes, cpu_s = measure(path, sampling, arguments.repeats, arguments.snap)
            clips.append({"clip": str(clip), "bytes": n_bytes, "cpu_s": cpu_s})
            figures[str(clip)] = make_figures(n_bytes, cpu_s)
    frames = f"{arguments.fps:g} frames a second" if arguments.fps else f"{arguments.frames} frames"
    title = f"CPU seconds for {frames} of a clip at 384 x 384, best of {arguments.repeats}"
    return make_result(title, ["", *figures], format_figure_rows(figures.values()), clips=clips)


def make_clip(folder: Path, clip: Clip) -> Path:
    """Encode a clip to ``folder``, which is created if needed, and return its path; an existing file is not made again.

    The frames are those of a sample clip, repeated forwards and backwards. The file appears when it is complete.

    Raises:
        ManifestError: the sample clips are not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{clip}.mp4"
    if path.exists():
        return path
    source = next(row["uri"] for row in VideoList.read("sample").known.to_pylist() if row["video_id"] == _SOURCE)
    with av.open(source) as container:
        frames = list(container.decode(video=0))
    frames += frames[::-1]
    part = path.with_suffix(".part.mp4")
    encoder, options = _ENCODERS[clip.codec]
    with av.open(str(part), "w") as out:
        stream = out.add_stream(
            encoder, rate=FPS, options={name: value.format(clip.group) for name, value in options.items()}
        )
        stream.width, stream.height, stream.pix_fmt = clip.height * 16 // 9, clip.height, "yuv420p"
        stream.gop_size = clip.group
        for number in range(FPS * clip.seconds):
            frame = frames[number % len(frames)].reformat(stream.width, stream.height, "yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return part.rename(path)


def measure(path: Path, sampling: Sampling, repeats: int, snap_s: float) -> tuple[int, dict[str, float | None]]:
    """Measure all ways of decoding a clip in turn, some in a child process; the best of ``repeats`` rounds counts.

    Args:
        snap_s: the --snap-to-keyframes of one way.

    Returns:
        The bytes of the decoded frames, and CPU seconds by way: None for a library that is not installed or cannot read
        the clip. FLOOR is the sum of its two parts.
    """
    index = probe(str(path), sniff(path))
    assert index.packets is not None and index.pts is not None
    index.packets.close()
    times, *end = index.find_true_times()
    indices = np.unique(choose_frames(times, sampling, None, None, *end))
    pts, keys = index.pts[indices].tolist(), index.keyframes.tolist()
    request = DecodeRequest(path, sampling, _PREPROCESSOR)
    snap_request = replace(request, sampling=replace(sampling, snap_to_keyframes_s=snap_s))
    decoded = decode_needed_frames(str(path), pts, keys)
    with DecodeSandbox(timeout_s=3600) as sandbox:
        n_bytes = sandbox.decode(request).frames.nbytes
        ways: dict[str, Callable[[], object]] = {
            _FLOOR_PARTS[0]: partial(decode_needed_frames, str(path), pts, keys),
            _FLOOR_PARTS[1]: lambda: [_convert_and_resize(frame) for frame in decoded],
            IN_PROCESS: partial(decode_video, request),
            IN_CHILD: partial(sandbox.decode, request),
            "read and hashed": partial(fingerprint_file, path),
            "indexed": partial(_read_index, path),
            f"ours, within {snap_s:g} s of keyframes": partial(decode_video, snap_request),
        }
        for library, decode in LIBRARIES.items():
            with suppress(Exception):  # a library that is not installed, or cannot read this clip, has no figure
                decode(str(path), indices.tolist())
                ways[library] = partial(decode, str(path), indices.tolist())
        turns = run_in_turn(ways, repeats)
    cpu_s = {way: min(runs.cpu_s) for way, runs in turns.items()}
    floor_s = sum(cpu_s[part] for part in _FLOOR_PARTS)
    return n_bytes, {FLOOR: floor_s, **cpu_s, **{library: None for library in LIBRARIES if library not in cpu_s}}


def decode_needed_frames(path: str, pts: Sequence[int], keys: Sequence[int]) -> list[Any]:
    """Decode the frames at ``pts`` from the fewest packets that they need, with PyAV alone; return PyAV's frames.

    Args:
        keys: the pts of the clip's keyframes, ascending.
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
    """Decode frames by number with decord, and resize them to SIZE: [T,h,w,3] uint8."""
    import decord  # noqa: PLC0415 - not available on every platform

    return resize_frames(decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1).get_batch(frames).asnumpy(), SIZE)


def _decode_by_torchcodec(path: str, frames: list[int]) -> torch.Tensor:
    """Decode frames by number with torchcodec, and resize them to SIZE: [T,h,w,3] uint8."""
    from torchcodec.decoders import VideoDecoder  # noqa: PLC0415 - an extra

    video = VideoDecoder(path, num_ffmpeg_threads=1, dimension_order="NHWC", seek_mode="approximate")
    return resize_frames(video.get_frames_at(frames).data, SIZE)


LIBRARIES = {"decord": _decode_by_decord, "torchcodec": _decode_by_torchcodec}


def _convert_and_resize(frame: Any) -> Any:
    """Convert a PyAV frame to RGB and resize it to SIZE."""
    return resize_frames(frame.to_ndarray(format="rgb24", interpolation="BICUBIC", threads=1)[None], SIZE)


def _read_index(path: Path) -> None:
    """Index the clip with the pipeline's probe, and discard the index."""
    index = probe(str(path), sniff(path))
    assert index.packets is not None
    index.packets.close()


def make_figures(n_bytes: int, cpu_s: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return a clip's column of the table: CPU seconds by way, ratios to the floor, and MB of frames."""
    floor_s = cpu_s[FLOOR] or 1e-9
    ratios = {way: cpu_s[way] for way in (IN_PROCESS, IN_CHILD, *LIBRARIES)}
    return {
        **cpu_s,
        **{f"{way} / {FLOOR}": None if seconds is None else seconds / floor_s for way, seconds in ratios.items()},
        "MB through the object store": n_bytes / 1e6,
    }
