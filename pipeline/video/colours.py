"""What a file says about its colours and the shape of its pixels. Frames are taken as they are stored all the same."""

from __future__ import annotations

from fractions import Fraction

import av

# FFmpeg's names of AVColorTransferCharacteristic, as ffprobe shows them; the numbers are those of H.273.
_TRANSFERS = {
    1: "bt709",
    4: "gamma22",
    5: "gamma28",
    6: "smpte170m",
    7: "smpte240m",
    8: "linear",
    9: "log100",
    10: "log316",
    11: "iec61966-2-4",
    12: "bt1361e",
    13: "iec61966-2-1",
    14: "bt2020-10",
    15: "bt2020-12",
    16: "smpte2084",
    17: "smpte428",
    18: "arib-std-b67",
}


def color_transfer(frame: av.VideoFrame, stream: av.VideoStream) -> str | None:
    """Return FFmpeg's name of the transfer function that a file or its first frame states; None where neither does."""
    stated = (int(stream.codec_context.color_trc), int(frame.color_trc))
    return next((_TRANSFERS[number] for number in stated if number in _TRANSFERS), None)


def pixel_shape(stream: av.VideoStream, *, turned: bool) -> str | None:
    """Return width by height of a pixel as it is shown, as "16:15"; None where the file does not state it.

    ``turned`` says that rows of the stored frame are shown as columns.
    """
    ratio: Fraction | None = stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio
    if not ratio:
        return None
    ratio = 1 / ratio if turned else ratio
    return f"{ratio.numerator}:{ratio.denominator}"
