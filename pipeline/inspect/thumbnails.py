"""Small pictures of a cached video's sampled frames, decoded again from its source file."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import av
from torch import Tensor

from gstep.backbones.preprocess import resize_frames
from pipeline.cache.header import SamplingIdentity
from pipeline.errors import ReplacedSource, VideoFault
from pipeline.inputs.forms import fetch_again
from pipeline.inputs.named_videos import Roots
from pipeline.rows import VideoRow
from pipeline.storage.s3 import Objects
from pipeline.video.decode import DecodedVideo, DecodeRequest
from pipeline.video.decoders import Frames
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.source import prepare_unchanged_source

_QUANTISER = 5  # JPEG quality, 2 (best) to 31: no artefacts at this size, half the bytes of 2
# Up to this many frames get this width, so that the pictures of a long video stay a few megabytes.
_WIDTHS = ((64, 224), (256, 160), (1024, 112))
_MIN_WIDTH = 80


@dataclass(frozen=True)
class Thumbnails:
    """A frame preprocessor that shrinks frames, in their own shape, into a box of ``width`` x 9/7 ``width``."""

    width: int

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) in pixels that a frame is resized to."""
        scale = min(1.0, self.width / width, self.width * 9 / 7 / height)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def resize(self, frames: Frames, size: tuple[int, int]) -> Tensor:
        """Resize [k,H,W,3] uint8 frames to [k,h,w,3]."""
        return resize_frames(frames, size)


@dataclass(frozen=True)
class Pictures:
    """The JPEGs of the sampled frames; or none, and the reason in ``missing``."""

    jpegs: list[bytes]
    missing: str = ""


def source_pictures(row: VideoRow, sampling: SamplingIdentity, objects: Objects, roots: Roots) -> Pictures:
    """Decode a video's sampled frames again as JPEGs; there are none if its source file is gone or changed.

    The file is decoded in a child process that may crash or hang without harm. Only the very frames that the row names
    are shown, of a file with the hash that the row names, which must lie below ``roots``. ``sampling`` is the one in
    the cache's identity.
    """
    try:
        return Pictures(to_jpegs(_decode_again(row, sampling, objects, roots).frames))
    except VideoFault as fault:
        is_unread = fault.fault_class in ("io", "policy")
        return Pictures([], fault.message if is_unread else f"decoding failed: {fault}")


def _decode_again(row: VideoRow, sampling: SamplingIdentity, objects: Objects, roots: Roots) -> DecodedVideo:
    """Decode the source file again.

    Raises VideoFault, "io" where it is not the file that the cache was made from, "policy" where it is not below
    ``roots``.
    """
    request = DecodeRequest(
        path=row["uri"],
        sampling=_sampling(sampling),
        preprocessor=Thumbnails(_width(len(row["frame_indices"]))),
        start_s=row["start_s"],
        end_s=row["end_s"],
    )  # with the default decoder: a row must not choose what code runs here
    with prepare_unchanged_source(row, objects, fetch_again(row, objects, roots)) as source, DecodeSandbox() as sandbox:
        video = source.decode(sandbox, request)
    if video.record["source_hash"] != row["source_hash"]:
        raise ReplacedSource("the source file has changed since: its hash is another one")
    if video.frame_indices.tolist() != row["frame_indices"]:
        raise VideoFault("io", "decoded now, the source file gives other frames than those that were sampled")
    return video


def _sampling(settings: SamplingIdentity) -> Sampling:
    """Return the sampling that the cache's identity describes. Raises VideoFault where it is none."""
    try:
        options = {name: value for name, value in settings.items() if name != "time_rule"}
        return Sampling(**{"num_frames": None, **options})  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise VideoFault("io", f"the cache does not say how frames were sampled: {error}") from error


def _width(n_frames: int) -> int:
    """Return the width of pictures for a page with so many frames."""
    return next((width for limit, width in _WIDTHS if n_frames <= limit), _MIN_WIDTH)


def shrink(frames: Frames, size: tuple[int, int]) -> Frames:
    """Shrink [T,H,W,3] frames for a page: to the shape of their source, whose (height, width) is ``size``."""
    target = Thumbnails(_width(len(frames))).target_size(len(frames), *size)
    return resize_frames(frames, target).numpy()


def to_jpegs(frames: Frames) -> list[bytes]:
    """Encode [T,h,w,3] uint8 RGB as T JPEG files."""
    encoder = av.CodecContext.create("mjpeg", "w")
    encoder.height, encoder.width = frames.shape[1:3]
    encoder.pix_fmt, encoder.time_base = "yuvj420p", Fraction(1, 25)
    encoder.thread_count = 1
    encoder.options = {"qmin": str(_QUANTISER), "qmax": str(_QUANTISER)}
    packets = []
    for number, frame in enumerate(frames):
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuvj420p")
        picture.pts = number
        packets += encoder.encode(picture)
    return [bytes(packet) for packet in packets + encoder.encode(None)]
