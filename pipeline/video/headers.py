"""Read packet headers without decoding: which packets show a frame, and in which order frames are shown.

VP8, VP9, AV1 and MPEG-4 may store packets that show no frame. AVI and raw streams state no presentation times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import av
import numpy as np

_VOP = b"\x00\x00\x01\xb6"  # the start code of a frame of MPEG-4
#: Codecs whose headers determine the order in which frames are shown.
ORDERED_CODECS = ("h264", "mpeg4", "mpeg1video")
# The start of a B-frame.
_B_FRAMES = {
    "mpeg4": re.compile(_VOP + rb"[\x80-\xbf]"),
    "mpeg1video": re.compile(rb"\x00\x00\x01\x00.[\x18-\x1f\x58-\x5f\x98-\x9f\xd8-\xdf]", re.DOTALL),
}
_KEYFRAME = re.compile(_VOP + rb"[\x00-\x3f]")
_MAX_EMPTY_VOP = 19  # largest frame without content, in bytes; FFmpeg's own bound
_VOL = re.compile(rb"\x00\x00\x01[\x20-\x2f](.{4,32})", re.DOTALL)
_PACKED = re.compile(rb"DivX\d+(?:b|Build)\d+p")  # how XviD and DivX mark packets of two frames
_H264_SLICES, _H264_IDR, _H264_PARAMETERS = (1, 2, 5), 5, 7  # types of units
_H264_HIGH = (44, 83, 86, 100, 110, 118, 122, 128, 138, 139, 134, 135, 244)  # profiles whose parameters state chroma
_H264_HEADER_BYTES, _SLICE_HEADER_BYTES = 512, 32
_SEARCHED_BYTES = 4096  # bytes of a packet in which its first picture begins


class _Bits:
    """A reader of the bits of ``data``, most significant first; 64 zeros follow the end."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "big") << 64
        self._left = 8 * len(data) + 64

    def read(self, count: int) -> int:
        """Read ``count`` bits as an unsigned number, or as many as are left (0 without any)."""
        count = min(count, self._left)
        self._left -= count
        return self._value >> self._left & ((1 << count) - 1)

    def read_ue(self) -> int:
        """Read an unsigned number in the Exp-Golomb code ue(v) of H.264."""
        n_zeros = 0
        while self._left and not self.read(1):
            n_zeros += 1
        return (1 << n_zeros) - 1 + self.read(n_zeros)


def is_vp8_shown(data: memoryview) -> bool:
    """Return True if a packet of VP8, which must not be empty, shows a frame; keyframes always count as shown."""
    return bool(data[0] & 0x10) or not data[0] & 1


def is_vp9_shown(data: memoryview) -> bool:
    """Return True if a packet of VP9 shows at least one of its frames (a superframe has several), or is not VP9."""
    if _is_vp9_frame_shown(data[0]):
        return True
    marker = data[-1]
    starts = [0]
    width, count = 1 + (marker >> 3 & 3), 1 + (marker & 7)
    index_bytes = 2 + width * count
    if marker >> 5 == 0b110 and len(data) > index_bytes and data[-index_bytes] == marker:
        sizes = bytes(data[1 - index_bytes : -1])
        for i in range(0, width * (count - 1), width):
            starts.append(starts[-1] + int.from_bytes(sizes[i : i + width], "little"))
    return any(_is_vp9_frame_shown(data[start]) for start in starts if start < len(data))


def _is_vp9_frame_shown(byte: int) -> bool:
    """Return True if a VP9 frame with this first byte is shown or shows an earlier frame, or if it is not VP9."""
    shift = 0 if byte & 0x30 == 0x30 else 1  # profile 3 has one more bit
    return byte >> 6 != 0b10 or bool(byte >> shift & 0b101)  # show_existing_frame, frame_type, show_frame


def is_av1_shown(data: memoryview) -> bool:
    """Return True if a frame header in a packet of AV1 shows a frame, or if the packet has no frame header."""
    offset = 0
    has_header = False
    while offset < len(data):
        kind, offset = data[offset], offset + 1 + (data[offset] >> 2 & 1)
        size, shift = 0, 0
        while kind & 2 and offset < len(data):
            size |= (data[offset] & 0x7F) << shift
            offset, shift = offset + 1, shift + 7
            if not data[offset - 1] & 0x80:
                break
        if kind >> 3 & 15 in (3, 6) and offset < len(data):  # a frame header, a frame
            has_header = True
            if data[offset] & 0x90:  # show_existing_frame, frame_type (2 bits), show_frame
                return True
        offset = offset + size if kind & 2 else len(data)
    return not has_header


_CHECKS = {"vp8": is_vp8_shown, "vp9": is_vp9_shown, "av1": is_av1_shown}
#: Codecs that may store packets that show no frame.
HIDING_CODECS = (*_CHECKS, "mpeg4")


class ShownPackets:
    """Tells which packets of a stream with a codec in HIDING_CODECS show a frame.

    Call ``is_packet_shown`` for each packet, in file order: MPEG-4 headers change how later packets are read.
    """

    def __init__(self, codec: str, extradata: bytes) -> None:
        """Read the number of MPEG-4 clock bits from ``extradata``, which the container stores for the decoder.

        Other codecs do not use it.
        """
        self._check = _CHECKS.get(codec)  # None for MPEG-4
        self._clock_bits = read_clock_bits(extradata)

    def is_packet_shown(self, packet: av.Packet) -> bool:
        """Return True if a packet, which must not be empty, shows a frame, or if its headers do not tell."""
        if self._check is not None:
            return self._check(memoryview(packet))
        if packet.is_keyframe:
            self._clock_bits = read_clock_bits(bytes(memoryview(packet)[:_SEARCHED_BYTES])) or self._clock_bits
        return packet.size > _MAX_EMPTY_VOP or not self._clock_bits or is_coded(bytes(packet), self._clock_bits)


def read_clock_bits(data: bytes) -> int:
    """Return the number of clock bits in each MPEG-4 frame header, as the layer header in ``data`` states it.

    The result is 0 if ``data`` has no layer header, otherwise 1 to 16.
    """
    match = _VOL.search(data)
    if match is None:
        return 0
    bits = _Bits(match[1])
    bits.read(9)
    version = bits.read(7) >> 3 if bits.read(1) else 1
    if bits.read(4) == 15:  # extended pixel aspect ratio: two explicit bytes
        bits.read(16)
    if bits.read(1):
        bits.read(3)
        if bits.read(1):
            bits.read(79)
    if bits.read(2) == 3 and version != 1:
        bits.read(4)
    bits.read(1)
    return max(1, (bits.read(16) - 1).bit_length())


def is_coded(data: bytes, clock_bits: int) -> bool:
    """Return False if an MPEG-4 frame has no content, so that players keep showing the frame before it.

    Data without a frame gives True.
    """
    offset = data.find(_VOP)
    if offset < 0:
        return True
    bits = _Bits(data[offset + 4 :])
    bits.read(2)
    while bits.read(1):
        pass
    bits.read(2 + clock_bits)
    return bool(bits.read(1))


def is_keyframe(packet: av.Packet) -> bool:
    """Return True if a packet of MPEG-4 holds a keyframe."""
    return _KEYFRAME.search(packet) is not None


def is_packed(data: bytes) -> bool:
    """Return True if MPEG-4 parameters say that a packet may hold two frames."""
    return _PACKED.search(data) is not None


class _H264Parameters(NamedTuple):
    """The fields of an H.264 sequence parameter set that are needed to parse slice headers.

    Attributes:
        order_type: 0 if slices state positions in the shown order (of ``order_bits`` bits), 2 if stored order is shown
            order; 1 otherwise.
        has_planes: True if color planes are coded separately.
    """

    frame_bits: int
    order_type: int
    order_bits: int
    has_planes: bool
    only_frames: bool

    @classmethod
    def read(cls, data: bytes) -> _H264Parameters:
        """Parse an unescaped parameter set behind its unit's header byte; missing bits count as zeros."""
        bits = _Bits(data)
        profile = bits.read(8)
        has_planes = False
        bits.read(16)
        bits.read_ue()
        if profile in _H264_HIGH:
            if chroma_444 := bits.read_ue() == 3:
                has_planes = bool(bits.read(1))
            bits.read_ue()
            bits.read_ue()
            bits.read(1)
            for size in [16] * 6 + [64] * (6 if chroma_444 else 2) if bits.read(1) else []:
                if bits.read(1):
                    _skip_scaling_list(bits, size)
        frame_bits = min(16, 4 + bits.read_ue())
        order_type = bits.read_ue()
        order_bits = 0
        if order_type == 0:
            order_bits = min(16, 4 + bits.read_ue())
        elif order_type == 1:
            bits.read(1)
            bits.read_ue()
            bits.read_ue()
            for _ in range(min(bits.read_ue(), 255)):
                bits.read_ue()
        bits.read_ue()
        bits.read(1)
        bits.read_ue()
        bits.read_ue()
        return cls(frame_bits, order_type, order_bits, has_planes, bool(bits.read(1)))


def _skip_scaling_list(bits: _Bits, size: int) -> None:
    """Read past a scaling list of up to ``size`` differences."""
    scale = 8
    for _ in range(size):
        number = bits.read_ue()
        scale = (scale + (number + 1 >> 1) * (1 if number & 1 else -1)) % 256
        if scale == 0:
            return


class H264Picture(NamedTuple):
    """The header of the first slice of an H.264 picture.

    Attributes:
        starts_order: True for an IDR picture, from which the shown order is counted.
        is_reference: True if other pictures may refer to it.
        order: the low bits of its position in the shown order; None if slices do not state it.
        field: 0 for a top field, 1 for a bottom field, None for a frame.
    """

    starts_order: bool
    is_reference: bool
    frame_number: int
    order: int | None
    field: int | None


class H264Headers:
    """A reader of H.264 picture headers. Call ``read`` for each packet in file order."""

    def __init__(self, extradata: bytes) -> None:
        """Read the parameter set in ``extradata``, which the container stores for the decoder, and the units' framing.

        Extradata of MP4 and Matroska (which begins with a byte 1 and has more than 6 bytes) has one parameter set to
        read, and tells how many bytes (1 to 4) state the length of each unit in packets. Other extradata, which may be
        empty, consists of units behind start codes, as do the packets then. Malformed data raises no error: missing
        bits count as zeros.
        """
        self._length_bytes = 1 + (extradata[4] & 3) if extradata[:1] == b"\x01" and len(extradata) > 6 else 0
        self._parameters: _H264Parameters | None = None
        if self._length_bytes:
            size = int.from_bytes(extradata[6:8], "big")
            self._parameters = _H264Parameters.read(_remove_escapes(extradata[9 : 8 + size]))
        else:
            self.read(extradata)

    @property
    def order_bits(self) -> int:
        """The number of bits of ``H264Picture.order``; 0 if slices do not state it or no parameters are known."""
        return self._parameters.order_bits if self._parameters else 0

    @property
    def in_stored_order(self) -> bool:
        """True if the parameters say that pictures are shown in the order in which they are stored."""
        return self._parameters is not None and self._parameters.order_type == 2

    def read(self, data: bytes) -> H264Picture | None:
        """Return the header of the first picture in a packet, and remember the parameter sets before it.

        Returns:
            None if the packet has no picture, or if no parameter set came before.
        """
        for offset in self._iter_unit_offsets(data):
            kind = data[offset] & 31
            if kind == _H264_PARAMETERS:
                self._parameters = _H264Parameters.read(_remove_escapes(data[offset + 1 : offset + _H264_HEADER_BYTES]))
            elif kind in _H264_SLICES:
                slice_header = _remove_escapes(data[offset + 1 : offset + 1 + _SLICE_HEADER_BYTES])
                return self._read_slice(data[offset], slice_header)
        return None

    def _iter_unit_offsets(self, data: bytes) -> Iterator[int]:
        """Yield the offset of the header byte of each unit, which follows a start code or the unit's length."""
        offset = 0
        while self._length_bytes and offset + self._length_bytes < len(data):
            start = offset + self._length_bytes
            yield start
            offset = start + int.from_bytes(data[offset:start], "big")
        while not self._length_bytes and 0 <= (offset := data.find(b"\x00\x00\x01", offset)) < len(data) - 3:
            offset += 3
            yield offset

    def _read_slice(self, unit: int, data: bytes) -> H264Picture | None:
        """Parse an unescaped slice header behind ``unit``, its unit's header byte; None without parameters."""
        parameters = self._parameters
        bits = _Bits(data)
        if parameters is None:
            return None
        for _ in range(3):
            bits.read_ue()
        bits.read(2 if parameters.has_planes else 0)
        frame_number = bits.read(parameters.frame_bits)
        field = None
        if not parameters.only_frames and bits.read(1):
            field = bits.read(1)
        starts_order = unit & 31 == _H264_IDR
        if starts_order:
            bits.read_ue()
        order = bits.read(parameters.order_bits) if parameters.order_type == 0 else None
        return H264Picture(starts_order, bool(unit & 0x60), frame_number, order, field)


def _remove_escapes(data: bytes) -> bytes:
    """Return the content of a unit without the bytes that were inserted to avoid start codes."""
    return data.replace(b"\x00\x00\x03", b"\x00\x00")


class ShownOrder:
    """Computes the order in which the packets of a stream with a codec in ORDERED_CODECS are shown.

    Call ``add`` for each packet that shows a frame, in file order, then ``find_ranks``.
    """

    def __init__(self, codec: str, extradata: bytes) -> None:
        """Start without packets.

        Args:
            codec: one of ORDERED_CODECS.
            extradata: the codec parameters that the container stores for the decoder; they are read only for H.264.
        """
        self._codec = codec
        self._headers = H264Headers(extradata) if codec == "h264" else None
        # Sort keys of packets: the number of the section that has its own order, then the position in the section.
        self._keys: list[tuple[int, int]] = []
        self._part, self._high, self._low = (
            0,
            0,
            0,
        )  # H.264: the section, and high and low bits of the last reference's position
        self._reference = -1  # MPEG-1, MPEG-4: the number of the last frame that others may refer to
        self._is_known = True

    def add(self, packet: av.Packet) -> None:
        """Add the next packet, by its header."""
        if self._headers is None:
            self._add_frame(is_b_frame=_B_FRAMES[self._codec].search(packet) is not None)
        else:
            self._add_picture(self._headers.read(bytes(packet)), self._headers)

    def _add_picture(self, picture: H264Picture | None, headers: H264Headers) -> None:
        """Add the next H.264 picture, whose position in the shown order counts from the last IDR picture.

        A missing header, a field, or a missing position (unless stored order is shown order) makes the order unknown
        for good.
        """
        if picture is None or picture.field is not None or (picture.order is None and not headers.in_stored_order):
            self._is_known = False
            return
        self._part += picture.starts_order
        if picture.order is None:
            self._keys.append((self._part, len(self._keys)))
            return
        if picture.starts_order:
            self._high = self._low = 0
        period = 1 << headers.order_bits
        turns = (self._low - picture.order >= period // 2) - (picture.order - self._low > period // 2)
        high = self._high + turns * period
        self._keys.append((self._part, high + picture.order))
        if picture.is_reference:
            self._high, self._low = high, picture.order

    def _add_frame(self, *, is_b_frame: bool) -> None:
        """Add the next MPEG-1 or MPEG-4 frame.

        A B-frame is shown at once; another frame is shown when the next frame that is not a B-frame arrives.
        """
        number = len(self._keys)
        self._keys.append((0, number))
        if not is_b_frame:
            if self._reference >= 0:
                self._keys[self._reference] = (0, number)
            self._reference, self._keys[number] = number, (1, 0)

    def find_ranks(self) -> list[int] | None:
        """Return each packet's rank in the shown order, from 0; None if headers do not determine it.

        They do not if a picture's position was unknown (H.264), or if two packets have the same position.
        """
        if not self._is_known or len(set(self._keys)) < len(self._keys):
            return None
        order = sorted(range(len(self._keys)), key=self._keys.__getitem__)
        ranks: list[int] = np.argsort(order).tolist()
        return ranks
