"""Decode one video file or folder of frames to the sampled, resized frames, or to a VideoFault."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import av
import numpy as np
from av.error import DecoderNotFoundError, FFmpegError, PatchWelcomeError
from numpy.typing import ArrayLike, NDArray

from gstep.backbones.preprocess import resize_frames
from gstep.errors import TooFewFrames, UnsupportedVideo
from pipeline.errors import FaultClass, VideoFault
from pipeline.own_code import locate_user_error
from pipeline.rows import BY_DECODING, SIZES_DIFFER, VideoRecord
from pipeline.video.containers import count_missing_bytes, has_overstated_table, open_regular, sniff
from pipeline.video.damage import check_decodable
from pipeline.video.decoders import DECODERS, Frames, choose_decoders, find_version, load_decoder
from pipeline.video.frame_folders import (
    JPEGS,
    compute_file_sample,
    fingerprint_frames,
    index_frames,
    list_frame_names,
    round_to_frames,
)
from pipeline.video.packets import MAX_PIXELS
from pipeline.video.probe import IndexMismatch, VideoIndex, index_by_decoding, probe
from pipeline.video.sampling import (
    Sampling,
    choose_frames,
    count_frames_by_rate,
    find_clip_range,
    find_clip_rate,
    snap_frames,
)
from pipeline.video.shared_frames import create_memory

#: Takes the shape [T,h,w,3] of a video's frames and returns an array for them.
Allocate = Callable[[tuple[int, ...]], Frames]
# A line of FFmpeg's log, except the one that is normal if decoding begins at an open group of pictures.
_FFMPEG_LINE = re.compile(rb"^\[[^\]]+ @ 0x[0-9a-f]+\] (?!mmco: unref short failure)", re.MULTILINE)
_MAX_LOG_BYTES = 4 * 2**20  # about 60,000 lines
_MAX_HOLES = 3  # listed in a note about a damaged file
_CREDENTIALS = re.compile(r"(\w+://)[^/@\s]+@")
_TORCH_OUT_OF_MEMORY = re.compile("can't allocate memory|not enough memory|alloc_cpu", re.IGNORECASE)


class FramePreprocessor(Protocol):
    """The interface to a model's rule for frame sizes (``gstep.backbones.Preprocessor`` has it). It must pickle."""

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) in pixels to which ``n_frames`` frames of [height, width] are resized.

        Raises:
            UnsupportedVideo: the model takes no video of this shape; its subclass TooFewFrames if frames are too few.
        """

    def resize(self, frames: Frames, size: tuple[int, int]) -> ArrayLike:
        """Resize [k,H,W,3] uint8 frames to [k,h,w,3] uint8, ``size`` = (h, w); return an array or a CPU tensor."""


@dataclass(frozen=True)
class DecodeRequest:
    """A request to decode chosen frames of one video.

    Attributes:
        path: what ``decode_video`` opens: a local file, a folder of JPEG frames, or ``/proc/self/fd/N`` for an open
            file. Before that it may be any name, which the source and the child process replace.
        start_s: start of the clip; None for the start of the video.
        end_s: end of the clip, not included; None for the end of the video.
        decoder: "auto" or "pyav" for PyAV; "decord", "torchcodec" or "nvdec", which fall back to PyAV where they fail
            or are known to be wrong; or the import path "package.module:Class" of a
            ``pipeline.video.decoders.FrameDecoder``, which has no fallback and is not imported yet.
    """

    path: str | Path
    sampling: Sampling
    preprocessor: FramePreprocessor
    start_s: float | None = None
    end_s: float | None = None
    decoder: str = "auto"

    def __post_init__(self) -> None:
        """Raise ValueError if ``decoder`` is neither a known name nor an import path."""
        if self.decoder != "auto" and self.decoder not in DECODERS and ":" not in self.decoder:
            raise ValueError(
                f"unknown decoder {self.decoder!r}; known: auto, {', '.join(DECODERS)}, package.module:Class"
            )


@dataclass(frozen=True)
class DecodedVideo:
    """The T sampled frames of one video, and the facts about them.

    Attributes:
        frames: [T,h,w,3] uint8 RGB, C-contiguous, resized.
        frame_indices: [T] int64 frame numbers in the file, ascending; an index repeats where the clip has too few
            frames.
        timestamps: [T] float64 seconds of these frames from the start of the file, as players show them.
        record: the columns of the videos table that decoding determines. Those that the file does not state are absent
            or None.
        attempts: 2 if PyAV decoded it after another decoder ended the process or sent an invalid message, otherwise 1.
        cpu_s: CPU seconds of the process while it decoded the video.
    """

    frames: Frames
    frame_indices: NDArray[np.int64]
    timestamps: NDArray[np.float64]
    record: VideoRecord
    attempts: int = 1
    cpu_s: float = 0.0

    def add_columns(self, columns: VideoRecord) -> DecodedVideo:
        """Return a copy whose record also has ``columns``, which replace existing ones."""
        return replace(self, record={**self.record, **columns})

    def add_note(self, note: str) -> DecodedVideo:
        """Return a copy whose ``backend_note``, which must exist, begins with ``note``; "" adds nothing."""
        return self.add_columns({"backend_note": "; ".join(filter(None, (note, self.record["backend_note"])))})


def allocate_frames(shape: tuple[int, ...]) -> Frames:
    """Return a new, uninitialized uint8 array for [T,h,w,3] frames in this process's own memory."""
    return np.empty(shape, np.uint8)


def decode_video(
    request: DecodeRequest,
    announce: Callable[[str], None] = lambda backend: None,
    allocate: Allocate = allocate_frames,
) -> DecodedVideo:
    """Decode one video in this process: open it, choose frames, read and resize them.

    File descriptor 2 is redirected meanwhile for the whole process, and FFmpeg's log level and callback stay changed.

    Args:
        announce: called with the name of each decoder before it opens the file.
        allocate: returns the array that the final frames are written to.

    Raises:
        VideoFault: decoding failed. Every Exception is converted, also a bug ("internal"); ``backend`` is the last
            decoder that was announced.
    """
    start, cpu_start = time.perf_counter(), time.process_time()
    decoding = _Decoding(request, announce, allocate)
    try:
        with redirect_ffmpeg_log() as decoding.warnings:
            video = decoding.video()
            warnings = max(decoding.warnings(), video.record["decode_warnings"] or 0)
        video = video.add_columns({"decode_warnings": warnings, "decode_s": time.perf_counter() - start})
        return replace(video, cpu_s=time.process_time() - cpu_start)
    except VideoFault as fault:
        fault.backend = fault.backend or decoding.backend
        raise
    except Exception as error:  # the error boundary of a video: anything becomes its error row
        raise convert_error(error, decoding.backend) from error


class _Decoding:
    """The state of one decoding.

    Attributes:
        warnings: returns the number of errors that FFmpeg has logged so far.
        backend: the name of the decoder that opened the file last; None before the first.
    """

    def __init__(self, request: DecodeRequest, announce: Callable[[str], None], allocate: Allocate) -> None:
        self._request = request
        self._announce = announce
        self._allocate = allocate
        self.warnings: Callable[[], int] = int
        self.backend: str | None = None

    def video(self) -> DecodedVideo:
        """Decode the file or folder of frames; the record includes the size, hash and sample of the source.

        Raises:
            VideoFault: the path is not a video that may be read; "corrupt" if the file is cut off or a sample table
                exhausts the memory with entries that it does not hold; or a step below found a fault.
            Exception: any error of a decoder.
        """
        # A relative "http:x" must not look like an address to FFmpeg.
        path = os.path.abspath(self._request.path)  # noqa: PTH100
        if os.path.isdir(path):  # noqa: PTH112
            return self._decode_folder(path)
        demuxer = sniff(path)
        size, digest = fingerprint_file(path)
        if n_missing := count_missing_bytes(path, demuxer):
            raise VideoFault("corrupt", f"the file is cut off: {n_missing} of its {size + n_missing} bytes are missing")
        try:
            index = probe(path, demuxer)
        except MemoryError as error:
            if demuxer == "mov" and has_overstated_table(path):
                raise VideoFault("corrupt", "a table of samples states more entries than it holds") from error
            raise
        assert index.packets is not None
        with closing(index.packets):
            source: VideoRecord = {
                "source_size": size,
                "source_hash": digest,
                "source_sample": compute_file_sample(path),
            }
            return self._read_by_any(index).add_columns(source)

    def _decode_folder(self, path: str) -> DecodedVideo:
        """Decode a folder of JPEG frames, whatever decoder is requested; round the clip to whole frames."""
        index = index_frames(path)
        size, digest = fingerprint_frames(path, list_frame_names(path))
        clip = round_to_frames(self._request.start_s, self._request.end_s, index.fps)
        source: VideoRecord = {"source_size": size, "source_hash": digest, "source_sample": compute_file_sample(path)}
        return self._read(index, JPEGS, clip).add_columns(source)

    def _read_by_any(self, index: VideoIndex) -> DecodedVideo:
        """Read the frames with the first decoder of the request that succeeds; errors of earlier ones are only noted.

        If PyAV is last and its frames do not match the index, the whole file is decoded once to make another index, and
        PyAV tries again. After the last decoder, ``backend_note`` begins with why the earlier one failed, or else why
        the first index did not match.

        Raises:
            Exception: the error of the last attempt, whatever it is.
        """
        note = ""
        clip = self._request.start_s, self._request.end_s
        *first_choices, last = choose_decoders(self._request.decoder)
        for name in first_choices:
            try:
                return self._read(index, name, clip)
            except Exception as error:  # noqa: BLE001 - whatever fails there, PyAV reads the file
                note = f"{name}: {_describe_error(error)}"
        try:
            video = self._read(index, last, clip)
        except IndexMismatch as error:
            if last != "pyav":
                raise
            scanned = index_by_decoding(index)
            holes_text = "".join(f"; nothing decodes {hole}" for hole in scanned.holes[:_MAX_HOLES])
            note = note or f"{BY_DECODING}: {error}{holes_text}"
            video = self._read(scanned, last, clip)
        return video.add_note(note)

    def _read(self, index: VideoIndex, backend: str, clip: tuple[float | None, float | None]) -> DecodedVideo:
        """Choose the frames of ``clip`` (start, end in seconds) by ``index``, and read them with one decoder.

        Sets and announces ``backend`` before the decoder opens the file.

        Returns:
            The video. Its record lacks the columns of the source and the seconds of decoding. Its ``backend_note``
            says which part of the film was not read, and whether frame sizes differ.

        Raises:
            VideoFault: the clip is empty or damaged, or the model does not take its frames.
            Exception: the decoder's own error.
        """
        sampling = self._request.sampling
        self._check(index, clip)
        times, *end = index.find_true_times()
        indices = choose_frames(times, sampling, *clip, *end)
        first, stop = find_clip_range(times, *clip, *end)
        if sampling.snap_to_keyframes_s is not None and index.pts is not None:
            keyframes = np.searchsorted(index.pts, index.keyframes)
            keyframes = keyframes[(keyframes >= first) & (keyframes < stop)]
            indices = snap_frames(indices, index.timestamps, keyframes, sampling.snap_to_keyframes_s)
        self.backend = backend
        self._announce(backend)
        kind = load_decoder(backend)
        with closing(kind(index)) as decoder:
            frames, sizes = self._resize_frames(decoder.read(np.unique(indices)), indices)
            version = find_version(kind) if ":" in backend else str(decoder.version)
        height, width = sizes[-1]  # of the largest frame
        unread = index.packets.note if index.packets is not None else ""
        record: VideoRecord = {
            **index.record,
            "codec": index.codec,
            "fps": index.fps,
            "clip_fps": find_clip_rate(times, index.fps, *clip, *end),
            "duration_s": index.duration_s,
            "source_frames": len(index.timestamps),
            "clip_frames": stop - first,
            "frames_by_rate": count_frames_by_rate(len(indices), times, sampling, *clip, end[0]),
            "n_repeated": len(indices) - len(np.unique(indices)),
            "source_width": width,
            "source_height": height,
            "backend": backend,
            "backend_version": version,
            "backend_note": "; ".join(filter(None, (unread, _describe_sizes({*sizes, (index.height, index.width)})))),
            "decode_warnings": self._check(index, clip),  # again: decoding may have met what reading had not
        }
        return DecodedVideo(frames, indices, index.timestamps[indices], record)

    def _check(self, index: VideoIndex, clip: tuple[float | None, float | None]) -> int:
        """Return the largest count of signs of damage outside FFmpeg's log.

        The counts are corrupt packets, holes, and 1 for an unread part.

        Raises:
            VideoFault: "corrupt" if too much of the clip does not decode (``check_decodable``).
        """
        n_corrupt = 0 if index.packets is None else index.packets.n_corrupt
        n_unread = int(index.packets is not None and index.packets.note != "")
        return max(n_corrupt, n_unread, len(check_decodable(index, clip, max(n_corrupt, self.warnings()))))

    def _resize_frames(
        self, chunks: Iterator[Frames], indices: NDArray[np.int64]
    ) -> tuple[Frames, list[tuple[int, int]]]:
        """Resize frames as they arrive, so that full-size frames never pile up, and copy repeated frames.

        The size that the model wants follows from the frame with the most pixels. Only frames of the largest size so
        far go through the preprocessor, others through ``gstep``'s ``resize_frames``. If a frame is larger than all
        before it, the resized frames before it are resized once more. The final frames are in an array from the
        request's ``allocate``.

        Args:
            chunks: arrays [k,H,W,3] of the distinct frames of ``indices``.
            indices: [T] chosen frames, ascending, possibly repeated.

        Returns:
            The frames [T,h,w,3], and the distinct sizes (H, W) that they had, the largest last.

        Raises:
            VideoFault: "too-short" or "unsupported" if the model takes no such video or a frame exceeds MAX_PIXELS.
            IndexMismatch: the chunks are not RGB, or hold fewer frames.
        """
        unique, inverse = np.unique(indices, return_inverse=True)
        repeats = len(unique) < len(indices)
        allocate = allocate_frames if repeats else self._allocate
        sizes: list[tuple[int, int]] = []
        n_done = 0
        for chunk in chunks:
            if chunk.ndim != 4 or chunk.shape[3] != 3:
                raise IndexMismatch(f"frames of shape {chunk.shape[1:]}, which are not RGB")
            source = chunk.shape[1:3]
            if not sizes or math.prod(source) > math.prod(sizes[-1]):
                size = self._find_target_size(len(indices), *source)
                if not sizes:
                    frames = allocate((len(unique), *size, 3))
                elif size != frames.shape[1:3]:
                    resized_frames = resize_frames(frames[:n_done], size)  # before its memory is used again
                    frames = allocate((len(unique), *size, 3))
                    frames[:n_done] = resized_frames
                sizes.append(source)
            elif source not in sizes:
                sizes.insert(0, source)
            resize = self._request.preprocessor.resize if source == sizes[-1] else resize_frames
            frames[n_done : n_done + len(chunk)] = resize(chunk, size)
            n_done += len(chunk)
        if n_done != len(unique):
            raise IndexMismatch(f"the decoder delivered {n_done} of {len(unique)} frames")
        if repeats:
            frames = frames.take(inverse, axis=0, out=self._allocate((len(indices), *size, 3)))
        return frames, sizes

    def _find_target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which the model wants ``n_frames`` frames of [height, width] resized.

        Raises:
            VideoFault: "unsupported" above MAX_PIXELS or if the model takes no such video, "too-short" for too few
                frames.
        """
        if height * width > MAX_PIXELS:
            raise VideoFault("unsupported", f"frames of {width}x{height} are larger than {MAX_PIXELS} pixels")
        try:
            return self._request.preprocessor.target_size(n_frames, height, width)
        except TooFewFrames as error:
            raise VideoFault("too-short", str(error)) from error
        except UnsupportedVideo as error:
            raise VideoFault("unsupported", str(error)) from error


def _describe_sizes(sizes: set[tuple[int, int]]) -> str:
    """Return the note about a video whose frames have several sizes (height, width); "" for one size."""
    if len(sizes) == 1:
        return ""
    (height, width), *_, (max_height, max_width) = sorted(sorted(sizes), key=math.prod)
    return f"{SIZES_DIFFER}: {len(sizes)} sizes from {width}x{height} to {max_width}x{max_height}"


def fingerprint_file(path: str | Path) -> tuple[int, str]:
    """Return a file's size in bytes and the hash of its content, "blake2b:<hex>"; the whole file is read."""
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return file.tell(), f"blake2b:{digest.hexdigest()}"


@contextmanager
def redirect_ffmpeg_log() -> Iterator[Callable[[], int]]:
    """Redirect FFmpeg's log into memory, and yield a function that returns the number of error lines so far.

    FFmpeg writes to file descriptor 2, which is redirected for the whole process; Python's own stderr still goes to its
    old target. FFmpeg's callback and log level (ERROR) stay set afterwards. Between two calls of the function, lines
    beyond 4 MiB are not counted.
    """
    av.logging.restore_default_callback()  # to the descriptor: PyAV's own handler would drop the lines
    av.logging.set_libav_level(av.logging.ERROR)
    sys.stderr.flush()
    python_stderr = sys.stderr
    descriptor = os.dup(2)
    log = create_memory(_MAX_LOG_BYTES)
    n_lines = 0
    with os.fdopen(descriptor, "w", errors="replace", buffering=1) as stderr_copy:
        os.dup2(log, 2)
        sys.stderr = stderr_copy

        def count() -> int:
            nonlocal n_lines
            size = min(os.lseek(log, 0, os.SEEK_CUR), _MAX_LOG_BYTES)
            n_lines += len(_FFMPEG_LINE.findall(os.pread(log, size, 0)))
            os.lseek(log, 0, os.SEEK_SET)  # descriptor 2 shares this position
            return n_lines

        try:
            yield count
        finally:
            sys.stderr = python_stderr
            os.dup2(descriptor, 2)
            os.close(log)


def convert_error(error: Exception, backend: str | None) -> VideoFault:
    """Convert an exception that was raised while a video was read to a VideoFault of the fitting class.

    An otherwise "internal" error in the code of a user decoder, which is imported to find out, gets the class
    "own-code", and its message begins with FILE:LINE. If the import fails, the class stays "internal".

    Args:
        backend: the decoder that was reading; None if there was none.
    """
    fault, message = _choose_fault_class(error), _describe_error(error)
    if fault == "internal" and backend is not None and ":" in backend:
        with suppress(Exception):  # importing the decoder may be what failed
            if (source_line := locate_user_error(error, load_decoder(backend))) is not None:
                fault, message = "own-code", f"{source_line}: {message}, in the decoder {backend}"
    return VideoFault(fault, message, backend=backend)


def _choose_fault_class(error: Exception) -> FaultClass:
    """Return the fault class of an exception that was raised while a video was read.

    "out-of-memory" for MemoryError, ENOMEM, EFBIG and torch's failed allocations; "unsupported" if FFmpeg has no
    decoder; "corrupt" for its other errors and IndexMismatch; "io" for missing files and other OSErrors; otherwise
    "internal".
    """
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.ENOMEM, errno.EFBIG):
        return "out-of-memory"  # files, as those in memory that hold frames, have the same limit
    if isinstance(error, RuntimeError) and _TORCH_OUT_OF_MEMORY.search(str(error)):
        return "out-of-memory"  # torch has no class of its own for this on CPUs
    if isinstance(error, DecoderNotFoundError | PatchWelcomeError):
        return "unsupported"
    if isinstance(error, FFmpegError | IndexMismatch):
        # Demuxers return EIO or EPERM for broken data, and the file has just been read to its end without an error.
        return "io" if isinstance(error, FileNotFoundError) else "corrupt"
    return "io" if isinstance(error, OSError) else "internal"


def _describe_error(error: Exception) -> str:
    """Describe an exception in one line, "CLASS: message", without the credentials of addresses in it."""
    text = error.strerror if isinstance(error, FFmpegError) else str(error)
    return _CREDENTIALS.sub(r"\1", f"{type(error).__name__}: {text}")
