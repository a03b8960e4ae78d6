"""The ffmpeg command line: containers that PyAV would not write, and what their frames and times are for players."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from tests.pipeline.videos import Frames, numbered_frame

LIT, DARK = np.array([240, 200, 90]), np.array([20, 30, 100])
_SHOWN = re.compile(r"showinfo.* pts_time:(\S+) .* s:(\d+)x(\d+) ")


class Shown(NamedTuple):
    """What a player shows of a file: [F,H,W,3] uint8 RGB frames, and their [F] seconds from the file's start."""

    frames: Frames
    timestamps: NDArray[np.float64]


def ffmpeg(*argv: object, given: bytes | None = None) -> str:
    """Run ``ffmpeg <argv>`` with ``given`` on its standard input; return what it logged."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostats", "-y", *map(str, argv)]
    done = subprocess.run(command, input=given or b"", capture_output=True, timeout=120, check=False)
    log = done.stderr.decode(errors="replace")
    assert done.returncode == 0, log
    return log


def make_clip(path: Path, *options: object, count: int = 32, size: tuple[int, int] = (64, 96), first: int = 0) -> Path:
    """Encode ``count`` numbered frames in colour, 25 a second, as ``options`` say; all encoders run one thread."""
    height, width = size
    gray = np.stack([numbered_frame(first + number, height, width) for number in range(count)])
    frames = np.where(gray > 128, LIT, DARK).astype(np.uint8)
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", 25, "-i", "-")
    ffmpeg(*raw, "-threads", 1, *options, path, given=frames.tobytes())
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
