"""Small pictures of a cached video's sampled frames, decoded again from the source."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import av
from torch import Tensor

from gstep.backbones.preprocess import resize_frames
from pipeline.cache.header import SamplingIdentity
from pipeline.errors import ReplacedSource, VideoFault
from pipeline.inputs.forms import make_member_fetcher
from pipeline.inputs.named_videos import Roots
from pipeline.rows import VideoRow
from pipeline.storage.s3 import Objects
from pipeline.video.decode import DecodedVideo, DecodeRequest
from pipeline.video.decoders import Frames
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.source import prepare_unchanged_source

_QUANTISER = 5  # JPEG quality, 2 (best) to 31; at this size 5 has no visible artifacts and half the bytes of 2
# (maximum number of frames, width in pixels): keeps the pictures of a long video at a few megabytes.
_WIDTHS = ((64, 224), (256, 160), (1024, 112))
_MIN_WIDTH = 80


@dataclass(frozen=True)
class Thumbnails:
    """A frame preprocessor that shrinks frames to fit ``width`` x 9/7 ``width`` pixels, keeping their shape."""

    width: int

    def target_size(self, n_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to resize a frame to; a frame is never enlarged."""
        scale = min(1.0, self.width / width, self.width * 9 / 7 / height)
        return max(1, round(height * scale)), max(1, round(width * scale))

    def resize(self, frames: Frames, size: tuple[int, int]) -> Tensor:
        """Resize [k,H,W,3] uint8 frames to [k,h,w,3]."""
        return resize_frames(frames, size)


@dataclass(frozen=True)
class Pictures:
    """The JPEGs of the sampled frames; or an empty list, and the reason in ``missing``."""

    jpegs: list[bytes]
    missing: str = ""


def make_source_pictures(row: VideoRow, sampling: SamplingIdentity, objects: Objects, roots: Roots) -> Pictures:
    """Decode a video's sampled frames again, and return them as JPEGs, or the reason why there are none.

    The file is decoded in a child process. The source must lie below one of ``roots``, have the hash in the row, and
    give exactly the frames that the row names. No VideoFault is raised.
    """
    try:
        return Pictures(encode_jpegs(_decode_again(row, sampling, objects, roots).frames))
    except VideoFault as fault:
        is_unread = fault.fault_class in ("io", "policy")
        return Pictures([], fault.message if is_unread else f"decoding failed: {fault}")


def _decode_again(row: VideoRow, sampling: SamplingIdentity, objects: Objects, roots: Roots) -> DecodedVideo:
    """Decode the source of a row again, with the default decoder, to small frames.

    Raises:
        VideoFault: class "io" if the file is missing, is another one now or gives other frames; "policy" if it is not
            below ``roots``; another class if decoding fails.
    """
    request = DecodeRequest(
        path=row["uri"],
        sampling=_make_sampling(sampling),
        preprocessor=Thumbnails(_choose_picture_width(len(row["frame_indices"]))),
        start_s=row["start_s"],
        end_s=row["end_s"],
    )  # with the default decoder: a row must not select code to run here
    with (
        prepare_unchanged_source(row, objects, make_member_fetcher(row, objects, roots)) as source,
        DecodeSandbox() as sandbox,
    ):
        video = source.decode(sandbox, request)
    if video.record["source_hash"] != row["source_hash"]:
        raise ReplacedSource("the source file has changed since: its hash is another one")
    if video.frame_indices.tolist() != row["frame_indices"]:
        raise VideoFault("io", "decoded now, the source file gives other frames than those that were sampled")
    return video


def _make_sampling(settings: SamplingIdentity) -> Sampling:
    """Make the sampling that a cache's identity describes. Raises VideoFault for invalid settings."""
    try:
        options = {name: value for name, value in settings.items() if name != "time_rule"}
        return Sampling(**{"num_frames": None, **options})  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise VideoFault("io", f"the cache does not say how frames were sampled: {error}") from error


def _choose_picture_width(n_frames: int) -> int:
    """Return the width in pixels of pictures; more frames get smaller pictures."""
    return next((width for limit, width in _WIDTHS if n_frames <= limit), _MIN_WIDTH)


def shrink_frames(frames: Frames, size: tuple[int, int]) -> Frames:
    """Shrink [T,H,W,3] frames for a page: [T,h,w,3] uint8 in the shape of their source, (height, width) ``size``."""
    target = Thumbnails(_choose_picture_width(len(frames))).target_size(len(frames), *size)
    return resize_frames(frames, target).numpy()


def encode_jpegs(frames: Frames) -> list[bytes]:
    """Encode [T,h,w,3] uint8 RGB frames as T JPEG files."""
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
