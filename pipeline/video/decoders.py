"""What delivers the pixels of chosen frames: decord where it is right, PyAV for everything, or a user's own class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import av
import numpy as np
from numpy.typing import NDArray

from gstep.lazy import LazyTable, load_object
from pipeline.video.probe import IndexMismatch, Orientation, VideoIndex, decoded_frames, open_container, prepared

Frames = NDArray[np.uint8]

DECODERS: LazyTable = LazyTable(
    "decoder", {"decord": "pipeline.video.decoders:DecordDecoder", "pyav": "pipeline.video.decoders:PyavDecoder"}
)
_LIBRARIES = {"decord": "decord", "pyav": "av"}  # by the names of their packages
_CHUNK_FRAMES = 8
_CHUNK_BYTES = 64 * 2**20
_SEEK_GAIN = 12  # frames: reading on is cheaper than a seek that skips fewer
_SEEKABLE = ("mov", "matroska")  # elsewhere FFmpeg may land behind the keyframe that was asked for


class FrameDecoder(Protocol):
    """Delivers frames of one file. ``DECODERS`` names the built-in ones; ``package.module:Class`` names any other.

    Attributes:
        version: recorded beside the decoder's name with every video.
    """

    version: str

    def __init__(self, index: VideoIndex) -> None:
        """Open ``index.path``."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """The frames of ``index`` that ``indices`` (distinct, ascending) name, in this order.

        They come in chunks of [k,H,W,3] uint8 RGB, turned as they are shown, H and W being those of ``index``. Chunks
        are small (``chunk_length``), so that memory stays bounded. May raise anything.
        """

    def close(self) -> None:
        """Release the file."""


def load_decoder(name: str) -> type[FrameDecoder]:
    """The class that ``name`` stands for: a name of ``DECODERS`` or ``package.module:Class``.

    Raises KeyError for an unknown name, ImportError or AttributeError where a path names nothing.
    """
    decoder: type[FrameDecoder] = load_object(name) if ":" in name else DECODERS[name]
    return decoder


def decoder_version(name: str | None) -> str | None:
    """The version of the decoder called ``name``, whose library is not imported for it where it is a built-in one."""
    if name is None:
        return None
    try:
        return version(_LIBRARIES[name]) if name in _LIBRARIES else str(load_decoder(name).version)
    except (PackageNotFoundError, KeyError, ImportError, AttributeError):
        return None


def chunk_length(height: int, width: int) -> int:
    """How many [height,width,3] frames are read at a time: 8, fewer where they pass 64 MiB, at least 1."""
    return max(1, min(_CHUNK_FRAMES, _CHUNK_BYTES // (height * width * 3)))


class DecordDecoder:
    """decord, one thread. It opens files without saying which demuxer, so only sniffed files may reach it.

    Raises decord's DECORDError for what it cannot read, and IndexMismatch where it counts other frames than the index.
    """

    def __init__(self, index: VideoIndex) -> None:
        import decord  # noqa: PLC0415 - not there on every platform

        decord.logging.set_level(decord.logging.ERROR)
        self.version = str(decord.__version__)
        self._chunk = chunk_length(index.height, index.width)
        # fault_tol: an error for the first damaged frame, instead of a silent copy of its neighbour.
        self._video = decord.VideoReader(index.path, ctx=decord.cpu(0), num_threads=1, fault_tol=1e-6)
        if len(self._video) != len(index.timestamps):
            raise IndexMismatch(f"decord counts {len(self._video)} frames, the file lists {len(index.timestamps)}")

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """See ``FrameDecoder.read``."""
        for start in range(0, len(indices), self._chunk):
            yield self._video.get_batch(indices[start : start + self._chunk].tolist()).asnumpy()

    def close(self) -> None:
        """Release the file."""
        del self._video


class PyavDecoder:
    """PyAV, one thread. It seeks only forward, and only over enough frames to be worth it.

    Raises IndexMismatch where a frame of the index does not come out of the decoder.
    """

    version = str(av.__version__)

    def __init__(self, index: VideoIndex) -> None:
        self._index = index
        self._container: Any = open_container(index.path, index.demuxer)
        self._stream = prepared(self._container.streams[index.stream])

    def read(self, indices: NDArray[np.int64]) -> Iterator[Frames]:
        """See ``FrameDecoder.read``. Frames of another size than the first one are scaled to it."""
        index = self._index
        frames = self._by_count(indices) if index.pts is None else self._by_time(index.pts, indices)
        step = chunk_length(index.height, index.width)
        for start in range(0, len(indices), step):
            chunk = np.empty((min(step, len(indices) - start), index.height, index.width, 3), dtype=np.uint8)
            for row, frame in zip(chunk, frames, strict=False):
                row[:] = self._pixels(frame)
            yield chunk

    def close(self) -> None:
        """Release the file."""
        self._container.close()

    def _pixels(self, frame: Any) -> Frames:
        """[H,W,3] as shown."""
        index = self._index
        width, height = index.width, index.height
        if index.orientation.transpose:
            width, height = height, width
        stored: Frames = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
        return turned(stored, index.orientation)

    def _by_count(self, indices: NDArray[np.int64]) -> Iterator[Any]:
        """The decoded frames number ``indices`` of the file, read from its beginning."""
        wanted: list[int] = indices.tolist()
        found = 0
        for number, frame in enumerate(decoded_frames(self._container, self._stream)):
            if number == wanted[found]:
                yield frame
                found += 1
                if found == len(wanted):
                    return
        raise IndexMismatch(f"frame {wanted[found]} does not come out of the decoder")

    def _by_time(self, pts: NDArray[np.int64], indices: NDArray[np.int64]) -> Iterator[Any]:
        """The decoded frames whose presentation times are ``pts[indices]``, skipping groups of pictures by seeking."""
        position, found = -1, 0
        while found < len(indices):
            self._seek(pts, position, int(indices[found]))
            for frame in decoded_frames(self._container, self._stream):
                target = int(indices[found])
                if frame.pts is None or frame.pts < pts[target]:
                    continue
                if frame.pts > pts[target]:
                    raise IndexMismatch(f"frame {target} does not come out of the decoder")
                yield frame
                position, found = target, found + 1
                if found == len(indices) or self._keyframe_ahead(pts, position, int(indices[found])) is not None:
                    break
            else:
                raise IndexMismatch(f"frame {indices[found]} does not come out of the decoder")

    def _seek(self, pts: NDArray[np.int64], position: int, target: int) -> None:
        keyframe = self._keyframe_ahead(pts, position, target)
        if keyframe is not None:
            self._container.seek(int(self._index.seek_times[keyframe]), stream=self._stream)

    def _keyframe_ahead(self, pts: NDArray[np.int64], position: int, target: int) -> int | None:
        """The last keyframe up to frame ``target``, if it lies far enough behind frame ``position``; else None."""
        if self._index.demuxer not in _SEEKABLE:
            return None
        keyframe = int(np.searchsorted(self._index.keyframes, pts[target], side="right")) - 1
        if keyframe < 0:
            return None
        skipped = int(np.searchsorted(pts, self._index.keyframes[keyframe])) - position - 1
        return keyframe if skipped >= _SEEK_GAIN else None


def turned(frame: Frames, orientation: Orientation) -> Frames:
    """A stored [H,W,3] frame as it is shown: a view, [W,H,3] where it is transposed."""
    if orientation.transpose:
        frame = frame.transpose(1, 0, 2)
    rows = slice(None, None, -1) if orientation.flip_rows else slice(None)
    columns = slice(None, None, -1) if orientation.flip_columns else slice(None)
    return frame[rows, columns]


def decoders_for(decoder: str, index: VideoIndex) -> Sequence[str]:
    """Names of the decoders to try for ``decoder`` ("auto", "decord", "pyav" or an import path), the best one first."""
    if decoder == "auto":
        return ("pyav",) if index.not_for_decord else ("decord", "pyav")
    return ("decord", "pyav") if decoder == "decord" else (decoder,)
