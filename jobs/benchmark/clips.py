"""The clips that are decoded, made from a real one: played forwards and backwards as often as they are long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av

from jobs.benchmark.tokens import sample_clips

FPS = 24
_SOURCE = "bigbuckbunny.mp4"
_OPTIONS: dict[str, Callable[[int], dict[str, str]]] = {
    "libx264": lambda group: {
        "preset": "veryfast",
        "crf": "23",
        "x264-params": f"keyint={group}:min-keyint={group}:scenecut=0:bframes=2",
    },
    "libx265": lambda group: {
        "preset": "ultrafast",
        "crf": "26",
        "x265-params": f"keyint={group}:min-keyint={group}:scenecut=0:log-level=error",
    },
    "libvpx-vp9": lambda group: {"deadline": "realtime", "cpu-used": "8", "row-mt": "1", "b": "2M"},
    "libsvtav1": lambda group: {"preset": "11", "crf": "40"},
}


@dataclass(frozen=True)
class Clip:
    """The settings of a clip to encode.

    Attributes:
        encoder: FFmpeg's name of it.
        width: pixels.
        height: pixels.
        seconds: how long it is, at 24 frames a second.
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
#: Clips that take minutes to decode once by every way.
LONG_CLIPS = {
    "hevc-1080p-60s-g250": Clip("libx265", 1920, 1080, 60, 250),
    "vp9-1080p-60s-g128": Clip("libvpx-vp9", 1920, 1080, 60, 128),
    "av1-1080p-60s-g128": Clip("libsvtav1", 1920, 1080, 60, 128),
    "h264-1080p-600s-g250": Clip("libx264", 1920, 1080, 600, 250),
    "h264-2160p-600s-g250": Clip("libx264", 3840, 2160, 600, 250),
}
_ENCODED = 500  # frames of a long clip that are encoded; their packets are repeated


def make_clips(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Make the named clips that ``folder`` lacks, and return all by name.

    Raises ManifestError without the sample clips.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.mp4" for name in names}
    missing = [name for name in names if not paths[name].exists()]
    if missing:
        source = next(clip for clip in sample_clips() if clip.endswith(_SOURCE))
        with av.open(source) as container:
            frames = list(container.decode(video=0))
        frames += frames[::-1]
        for name in missing:
            part, clip = paths[name].with_suffix(".part.mp4"), (CLIPS | LONG_CLIPS)[name]
            if name in CLIPS:
                _encode(part, clip, FPS * clip.seconds, frames)
            else:
                once = paths[name].with_suffix(".once.mp4")
                _encode(once, clip, _ENCODED // clip.group * clip.group, frames)
                _repeat(once, part, clip)
                once.unlink()
            part.rename(paths[name])
    return paths


def _encode(path: Path, clip: Clip, count: int, frames: Sequence[av.VideoFrame]) -> None:
    """Encode ``count`` frames into ``path``, repeating ``frames`` as often as needed."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream(clip.encoder, rate=FPS, options=_OPTIONS[clip.encoder](clip.group))
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
