"""The decoders that deliver chosen frames: PyAV, another library that the user requests, or a user decoder."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import av
import av.filter
import numpy as np
from av.video.frame import PictureType
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from gstep.lazy import LazyTable, load_object
from pipeline.errors import VideoFault
from pipeline.own_code import hash_code, is_user_class
from pipeline.video.packets import PacketRun
from pipeline.video.probe import IndexMismatch, Orientation, VideoIndex, read_orientation

Frames = NDArray[np.uint8]

DECODERS: LazyTable = LazyTable(
    "decoder",
    {
        "pyav": "pipeline.video.decoders:PyavDecoder",
        "decord": "pipeline.video.decord_decoder:DecordDecoder",
        "torchcodec": "pipeline.video.torchcodec_decoder:TorchcodecDecoder",
        "nvdec": "pipeline.video.nvdec_decoder:NvdecDecoder",
    },
)
CODE = " code "  # in the version of a user's decoder, before the hash of its code
_PACKAGES = {"pyav": "av", "decord": "decord", "torchcodec": "torchcodec"}
# Pixel formats whose chroma samples FFmpeg copies regardless of their stated location.
_WITHOUT_SITING = ("yuv420p", "yuvj420p")
_CHUNK_FRAMES = 8
_CHUNK_BYTES = 64 * 2**20


class FrameDecoder(Protocol):
    """The interface of a decoder of one file.

    Attributes:
        version: recorded beside the decoder's name with every video.
    """

    version: str

    def __init__(self, index: VideoIndex) -> None:
        """Open ``index.path``."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """Yield the frames with the numbers ``indices`` (distinct, ascending), in this order.

        They come in small chunks [k,H,W,3] of uint8 RGB, rotated as players show them. H and W are those of the index,
        or of the frame itself where the frame size changes within the file. May raise any exception.
        """

    def close(self) -> None:
        """Release the file."""


def load_decoder(name: str) -> type[FrameDecoder]:
    """Import the decoder class for a name in ``DECODERS`` (KeyError for others) or a path ``package.module:Class``."""
    decoder: type[FrameDecoder] = load_object(name) if ":" in name else DECODERS[name]
    return decoder


def find_installed_version(name: str | None) -> str | None:
    """Return the version of a decoder; None for None, an unknown name, and a decoder that is not installed.

    The library of pyav, decord and torchcodec is not imported; nvdec and a user decoder are.

    Raises:
        UsageError: the class of a user decoder is in no file, or its code has a syntax error.
    """
    if name is None:
        return None
    try:
        return version(_PACKAGES[name]) if name in _PACKAGES else find_version(load_decoder(name))
    except (PackageNotFoundError, KeyError, ImportError, AttributeError):
        return None


def find_version(decoder: type[FrameDecoder]) -> str:
    """Return the version of a decoder class; for a user decoder, followed by CODE and the hash of its code.

    Raises:
        UsageError: that code is in no file or has a syntax error.
    """
    code = f"{CODE}{hash_code(decoder)}" if is_user_class(decoder) else ""
    return f"{decoder.version}{code}"


def compute_chunk_length(height: int, width: int) -> int:
    """Return the number of [height,width,3] frames to read at a time: 8, or as many as fit 64 MiB, but at least 1."""
    return max(1, min(_CHUNK_FRAMES, _CHUNK_BYTES // (height * width * 3)))


class LibraryDecoder:
    """The base of decoders in which another library reads the file, for files that it is known to get right.

    A subclass defines ``open`` and ``frames``, and may extend ``reason_against``. The library's own errors pass.
    """

    def __init__(self, index: VideoIndex) -> None:
        """Open the video with the library.

        Raises:
            IndexMismatch: ``reason_against`` gives a reason, or the library counts other frames than the index.
        """
        if reason := self.reason_against(index):
            raise IndexMismatch(reason)
        self._index = index
        self._chunk = compute_chunk_length(index.height, index.width)
        self._video: Any = self.open(index)
        if len(self._video) != len(index.timestamps):
            raise IndexMismatch(f"the decoder counts {len(self._video)} frames, the file lists {len(index.timestamps)}")

    @staticmethod
    def reason_against(index: VideoIndex) -> str:
        """Return why the library may deliver frames that no player shows, or "" if there is no reason.

        Reasons are missing times, containers other than MP4 and Matroska, hidden packets, and parameters that change.
        """
        if index.packets is None or index.pts is None:
            return "the file has no timestamps"
        if index.demuxer not in ("mov", "matroska"):
            return "it is neither MP4 nor Matroska"
        if any(packet.hidden for packet in index.packets.table):
            return "it has an edit list or packets that show no frame"
        return "its codec parameters change" if index.packets.parameters_change else ""

    def open(self, index: VideoIndex) -> Any:
        """Open the file with the library and return its reader, whose ``len`` must be the number of frames."""
        raise NotImplementedError

    def frames(self, indices: list[int]) -> Frames:
        """Return the frames [k,H,W,3] with the numbers ``indices`` (distinct, ascending)."""
        raise NotImplementedError

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """Yield the frames with the numbers ``indices`` (distinct, ascending) in chunks [k,H,W,3].

        Raises:
            IndexMismatch: the file marks a frame as a keyframe that is not one, which libraries believe; or the frames
                have another size than the index.
        """
        _check_keyframes(self._index, indices)
        index = self._index
        for start in range(0, len(indices), self._chunk):
            frames = self.frames(indices[start : start + self._chunk].tolist())
            if frames.shape[1:] != (index.height, index.width, 3):
                raise IndexMismatch(f"frames of shape {frames.shape[1:]} in a video of {index.height}x{index.width}")
            yield frames

    def close(self) -> None:
        """Release the file."""
        del self._video


class PyavDecoder:
    """The decoder with PyAV on one thread.

    It decodes only the packets that the chosen frames need, or all up to the last one if frames have no usable times or
    damage shifts them.
    """

    version = str(av.__version__)

    def __init__(self, index: VideoIndex) -> None:
        """Use the packets of the index, which must have them and keeps them open."""
        assert index.packets is not None
        self._index = index
        self._packets = index.packets
        self._codec: av.CodecContext | None = None  # a decoder to use instead of the stream's own, as on a GPU
        self._reformatter = VideoReformatter()
        self._plain_marks = _ChromaMarkFilter()
        self._orientation = index.orientation

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """Yield the frames with the numbers ``indices`` (distinct, ascending) as [1,H,W,3], each in its own size.

        Raises:
            IndexMismatch: a frame does not come out of the decoder, or the file marks a frame as a keyframe that is not
                one.
            VideoFault: "unsupported" for a color matrix that FFmpeg does not convert, or a rotation by an angle that is
                not a multiple of 90 degrees.
        """
        for frame in self._iter_frames(indices):
            yield self._pixels(frame)[None]

    def close(self) -> None:
        """Do nothing: the packets belong to the index."""

    def _pixels(self, frame: av.VideoFrame) -> Frames:
        """Convert a decoded frame to [H,W,3] uint8 RGB as players show it, in its own size.

        Raises:
            VideoFault: "unsupported" for a color matrix that FFmpeg does not convert.
        """
        width, height = frame.width, frame.height
        if frame.interlaced_frame or frame.format.name not in _WITHOUT_SITING:
            frame = self._plain_marks.mark_frame(frame)
        try:
            # One reformatter and one thread: for each frame, FFmpeg would set up a scaler with a thread for every core.
            rgb: Any = self._reformatter.reformat(frame, format="rgb24", interpolation="BICUBIC", threads=1)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            matrix = f"its color matrix (number {int(frame.colorspace)} of H.273)"
            raise VideoFault("unsupported", f"FFmpeg cannot convert the video to RGB from {matrix}") from error
        rows = np.frombuffer(rgb.planes[0], np.uint8).reshape(height, rgb.planes[0].line_size)
        return np.ascontiguousarray(orient_frame(rows[:, : 3 * width].reshape(height, width, 3), self._orientation))

    def _iter_frames(self, indices: NDArray[np.int64]) -> Iterator[av.VideoFrame]:
        """Yield the decoded frames with the numbers ``indices`` (distinct, ascending, at least one).

        Frames are identified by their presentation times, or by counting from the first packet in a file without times.
        Before each yield, ``_orientation`` is set to that of the frame: its own display matrix, otherwise the last one
        since the run's keyframe, otherwise that of the index.

        Raises:
            IndexMismatch: a frame does not come out (also for indices that repeat or descend), or the file marks a
                frame as a keyframe that is not one.
            VideoFault: "unsupported" for a rotation by an angle that is not a multiple of 90 degrees.
        """
        table = self._packets.table
        pts = self._index.pts
        # If frames are counted, or damage shifts them, decoding must begin at the first packet.
        decodes_all = pts is None or self._index.whole
        frame_times = (indices if pts is None else pts[indices]).tolist()
        for run in [PacketRun(0, len(table), tuple(frame_times))] if decodes_all else self._packets.runs(frame_times):
            missing_times = deque(run.times)
            times = None if decodes_all else run.times
            self._orientation = self._index.orientation
            degrees = 0 if self._orientation == Orientation() else None
            for number, frame in enumerate(self._packets.decode_frames(run.start, run.stop, times, self._codec)):
                if run.start and frame.pts == table[run.start].pts and not _is_intra_picture(frame):
                    raise IndexMismatch(f"the file marks the frame at {frame.pts} as a keyframe, but it is not one")
                if frame.rotation != degrees:  # first, since side data that was looked at keeps its frame in memory
                    degrees = frame.rotation
                    self._orientation = read_orientation(frame) or self._orientation
                time = number if pts is None else frame.pts
                if time is None or time < missing_times[0]:
                    continue
                if time > missing_times[0]:
                    break
                missing_times.popleft()
                yield frame
                if not missing_times:
                    break
            if missing_times:
                raise IndexMismatch(f"the frame at {missing_times[0]} does not come out of the decoder")


def _check_keyframes(index: VideoIndex, indices: NDArray[np.int64]) -> None:
    """Raise IndexMismatch if decoding cannot begin at one of the keyframes that precede the frames ``indices``.

    Each of these keyframes is decoded, but not the file's first. The second keyframe of the file is always decoded.
    """
    assert index.packets is not None and index.pts is not None
    before = np.searchsorted(index.keyframes, index.pts[indices], side="right") - 1
    times = set(index.keyframes[np.unique(before[before >= 0])].tolist())
    table = index.packets.table
    keys = [number for number, packet in enumerate(table) if packet.keyframe]
    for number in keys[1:2] + [number for number in keys[2:] if table[number].pts in times]:
        frame = next(index.packets.decode_frames(number, number + 1), None)
        if frame is None or not _is_intra_picture(frame):
            raise IndexMismatch(f"the file marks the frame at {table[number].pts} as a keyframe, but it is not one")


class _ChromaMarkFilter:
    """A filter that marks frames as progressive and their chroma location as unspecified, without changing pixels.

    FFmpeg's scaler then converts chroma as the models' own loaders (decord, torchcodec) and the ffmpeg command line do.
    """

    def __init__(self) -> None:
        self._graph = av.filter.Graph()
        self._shape = (0, 0, "")

    def mark_frame(self, frame: av.VideoFrame) -> av.VideoFrame:
        """Return the marked frame. A new size or pixel format rebuilds the filter."""
        shape = frame.width, frame.height, frame.format.name
        if shape != self._shape:
            self._graph = av.filter.Graph()
            self._shape = shape
            time_base = frame.time_base or Fraction(1, 25)
            source = self._graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=time_base
            )
            marks = self._graph.add("setparams", "field_mode=prog:chroma_location=unspecified")
            self._graph.link_nodes(source, marks, self._graph.add("buffersink")).configure()
        self._graph.push(frame)
        return self._graph.pull()


def _is_intra_picture(frame: av.VideoFrame) -> bool:
    """Return True if a decoded frame is an intra picture, which refers to no other frame."""
    return bool(frame.key_frame) or frame.pict_type in (PictureType.I, PictureType.SI, PictureType.BI)


def orient_frame(frame: Frames, orientation: Orientation) -> Frames:
    """Rotate and mirror a stored [H,W,3] frame as ``orientation`` says; the result is a view."""
    if orientation.transpose:
        frame = frame.transpose(1, 0, 2)
    rows = slice(None, None, -1) if orientation.flip_rows else slice(None)
    columns = slice(None, None, -1) if orientation.flip_columns else slice(None)
    return frame[rows, columns]


def choose_decoders(decoder: str) -> Sequence[str]:
    """List the decoders to try for a request's ``decoder``, the preferred one first.

    PyAV follows any other built-in decoder; "auto" is PyAV; a user decoder has no fallback. Names are not checked.
    """
    if decoder == "auto":
        return ("pyav",)
    return (decoder, "pyav") if decoder in DECODERS and decoder != "pyav" else (decoder,)
