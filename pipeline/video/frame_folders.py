"""Videos that are folders of JPEG frames: 00001.jpg, 00002.jpg and so on, as MVBench has for TVQA.

A folder is a video only if its path gives the rate: ``tvqa/frames_fps3_hq/castle_s07e04_seg02_clip_14`` has three
frames per second. Frame number k is then at k / 3 s, and a clip extends from the frame nearest to its start (at least
the first) to the frame nearest to its end, both included (``read_frame`` of github.com/OpenGVLab/Ask-Anything,
``video_chat2/mvbench.ipynb``).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import NamedTuple

import av
import numpy as np
from numpy.typing import NDArray

from pipeline.errors import VideoFault
from pipeline.keys import hash_mark, hash_sample, list_sample_spans
from pipeline.video.containers import open_regular
from pipeline.video.decoders import Frames
from pipeline.video.packets import MAX_PIXELS
from pipeline.video.probe import VideoIndex

FIRST_FRAME = "00001.jpg"
_RATE = re.compile(r"(?:^|[_.-])fps(\d+(?:\.\d+)?)(?=$|[_.-])")
_FRAME = re.compile(r"\d{5,}\.jpg")
_MAX_FRAME_BYTES = 2**26  # bytes of a frame's file


def find_frame_rate(path: str) -> float | None:
    """Return the frames per second that a path states as "fpsN", or None; the last positive rate in the path counts."""
    rates = [float(match[1]) for part in PurePath(path).parts for match in _RATE.finditer(part)]
    return next((rate for rate in reversed(rates) if rate > 0), None)


def is_frame_folder(path: str) -> bool:
    """Return True if the path states a frame rate and is a folder with a file 00001.jpg."""
    return find_frame_rate(path) is not None and os.path.isfile(os.path.join(path, FIRST_FRAME))  # noqa: PTH113, PTH118


def list_frame_names(path: str) -> list[str]:
    """List the file names of a folder's frames in order of their numbers; other files are left out.

    Frames are files named by at least five digits and ".jpg". They must be 00001.jpg, 00002.jpg and so on, without
    gaps.

    Raises:
        VideoFault: "unsupported" if the folder has no frames, "corrupt" if they are not numbered like this (a number is
            missing, or a name has surplus zeros), "io" if the folder cannot be read.
    """
    try:
        with os.scandir(path) as entries:
            names = sorted((entry.name for entry in entries if _FRAME.fullmatch(entry.name)), key=lambda n: int(n[:-4]))
    except OSError as error:
        raise VideoFault("io", f"{path} cannot be read: {error.strerror or error}") from error
    if not names:
        raise VideoFault("unsupported", f"{path} is a folder without frames (none is called {FIRST_FRAME})")
    expected_names = [f"{number:05}.jpg" for number in range(1, len(names) + 1)]
    if names != expected_names:
        missing_name = next(
            name for name, name_in_folder in zip(expected_names, names, strict=True) if name != name_in_folder
        )
        raise VideoFault(
            "corrupt", f"{path} has {len(names)} frames, and none is called {missing_name}: unpack it again"
        )
    return names


def read_frame(path: str, name: str) -> bytes:
    """Return the content of a frame's file.

    Raises:
        VideoFault: "policy" if it is a link or not a regular file; "unsupported" if it is not a JPEG or is larger than
            64 MiB; "corrupt" if it is cut off (no end marker in the last 4 KiB); "io" if it cannot be opened.
    """
    file_path = os.path.join(path, name)  # noqa: PTH118
    try:
        # A link may lead anywhere, and opening a FIFO would block.
        descriptor = os.open(file_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if os.path.islink(file_path):  # noqa: PTH114
            raise VideoFault("policy", f"{file_path} is a link; put the frame itself there") from error
        raise VideoFault("io", f"{file_path} cannot be read: {error.strerror or error}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise VideoFault("policy", f"{file_path} is not a regular file")
        data = file.read(_MAX_FRAME_BYTES + 1)
    if not data.startswith(b"\xff\xd8\xff") or len(data) > _MAX_FRAME_BYTES:
        raise VideoFault("unsupported", f"{file_path} is not a JPEG image of at most {_MAX_FRAME_BYTES >> 20} MiB")
    if b"\xff\xd9" not in data[-4096:]:
        raise VideoFault("corrupt", f"{file_path} is cut off: a JPEG image ends with its marker")
    return data


def fingerprint_frames(path: str, names: Iterable[str]) -> tuple[int, str]:
    """Return the total bytes of all frames, and a hash of their lengths and contents in order, "blake2b:<hex>".

    Raises:
        VideoFault: a frame cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = 0
    for name in names:
        data = read_frame(path, name)
        digest.update(len(data).to_bytes(8, "big") + data)
        size += len(data)
    return size, f"blake2b:{digest.hexdigest()}"


class FileState(NamedTuple):
    """The state of a video's file or folder.

    Attributes:
        size: bytes; -1 if it is gone.
        mark: the ``hash_mark`` of its content; 0 if unknown.
    """

    size: int
    mark: int


def read_source_state(path: str) -> FileState:
    """Return the size and mark of a file, or of all frames of a folder together, without reading their content.

    The mark is a hash of the newest modification time. A folder without frames has size 0.

    Raises:
        OSError, ValueError: the path does not exist or cannot be read.
    """
    status = [os.stat(path)]  # noqa: PTH116 - a Path for each of a million files would double the time
    if stat.S_ISDIR(status[0].st_mode):
        with os.scandir(path) as entries:
            status = [entry.stat() for entry in entries if _FRAME.fullmatch(entry.name)]
    newest = max((entry.st_mtime_ns for entry in status), default=0)
    return FileState(sum(stat.st_size for stat in status), hash_mark(str(newest)) or 0)


def count_source_bytes(path: str) -> int:
    """Return the bytes of a file, or of all frames of a folder; raise OSError or ValueError if there is none."""
    return read_source_state(path).size


def compute_file_sample(path: str) -> int:
    """Return the ``hash_sample`` of a file, or of a folder's first, middle and last frame.

    Raises:
        VideoFault: the file cannot be opened, or the folder is not a complete folder of frames.
    """
    if os.path.isdir(path):  # noqa: PTH112
        names = list_frame_names(path)
        return hash_sample(len(names), [read_frame(path, names[index]) for index in (0, len(names) // 2, -1)])
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return hash_sample(
            size, [os.pread(file.fileno(), end - start, start) for start, end in list_sample_spans(size)]
        )


def round_to_frames(start_s: float | None, end_s: float | None, rate: float) -> tuple[float | None, float | None]:
    """Round the bounds of a clip to whole frames of a folder with ``rate`` frames per second.

    Returns:
        (start, end) in seconds, end excluded, such that the frame nearest to the end belongs to the clip. None and
        bounds that are negative or not finite stay as they are.
    """
    if start_s is not None and 0 <= start_s < math.inf:
        start_s = max(1, round(start_s * rate)) / rate
    if end_s is not None and 0 <= end_s < math.inf:
        end_s = (round(end_s * rate) + 1) / rate
    return start_s, end_s


#: The recorded name of the decoder of folders of frames, which is used whatever decoder is requested.
JPEGS = "pipeline.video.frame_folders:JpegDecoder"


def index_frames(path: str) -> VideoIndex:
    """Index a folder of frames; only the first frame is decoded, for its size and pixel format.

    Frame number k, from 1, is at k / rate seconds. The index has no ``packets`` and no ``pts``.

    Raises:
        VideoFault: "unsupported" if the path does not state a frame rate; other classes if frames are missing or the
            first one cannot be read or has no picture.
        FFmpegError: PyAV cannot decode the first frame.
    """
    rate = find_frame_rate(path)
    if rate is None:
        raise VideoFault(
            "unsupported",
            f"{path} is a folder, not a video file; the path of a folder of JPEG frames must state their rate, as in "
            "frames_fps3/NAME",
        )
    names = list_frame_names(path)
    first = _decode_frame(path, FIRST_FRAME)
    return VideoIndex(
        path=path,
        demuxer="",
        stream=0,
        codec="mjpeg",
        width=first.width,
        height=first.height,
        pixel_format=first.format.name,
        fps=rate,
        timestamps=np.arange(1, len(names) + 1) / rate,
        duration_s=(len(names) + 1) / rate,
    )


class JpegDecoder:
    """The ``FrameDecoder`` of folders of JPEG frames."""

    version = str(av.__version__)

    def __init__(self, index: VideoIndex) -> None:
        self._path = index.path
        self._names = list_frame_names(index.path)

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """Yield the frames with the numbers ``indices``, from 0, as [1,H,W,3] uint8 RGB, each in its own size."""
        for i in indices.tolist():
            yield _decode_frame(self._path, self._names[i]).to_ndarray(format="rgb24", interpolation="BICUBIC")[None]

    def close(self) -> None:
        """Do nothing."""


def _decode_frame(path: str, name: str) -> av.VideoFrame:
    """Read and decode a frame's file.

    Raises:
        VideoFault: the file is not a readable JPEG, has no picture ("corrupt") or more than MAX_PIXELS ("unsupported").
        FFmpegError: PyAV cannot decode the data.
    """
    decoder = av.CodecContext.create("mjpeg", "r")
    decoder.thread_count = 1
    pictures = [*decoder.decode(av.Packet(read_frame(path, name))), *decoder.decode(None)]
    if not pictures:
        raise VideoFault("corrupt", f"{path}/{name} cannot be decoded")
    if pictures[0].width * pictures[0].height > MAX_PIXELS:
        raise VideoFault("unsupported", f"{path}/{name} is larger than {MAX_PIXELS} pixels")
    return pictures[0]
