"""The packets of a video file, read once: the index is made from them, and the decoder gets those that it needs."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import dropwhile, islice
from typing import NamedTuple

import av
from av.bitstream import BitStreamFilterContext
from av.codec.context import Flags
from av.container import InputContainer
from av.error import FFmpegError
from av.stream import Disposition

from pipeline.errors import VideoFault
from pipeline.rows import READ_IN_PART
from pipeline.video.continued_films import Continuation, ContinuedFile, find_continuation, has_more_film
from pipeline.video.headers import HIDING_CODECS, ORDERED_CODECS, ShownOrder, ShownPackets, is_keyframe, is_packed

MAX_PIXELS = 8192 * 8192  # largest frame: 200 MB in RGB
MAX_KEPT_BYTES = 256 * 2**20  # bytes of packets kept in memory; larger videos are read again
_OVERHEAD = 600  # bytes that PyAV and FFmpeg take for a packet beside its data
_STILL_IMAGES = Disposition.attached_pic | Disposition.timed_thumbnails
_SEEKABLE = ("mov", "matroska")  # elsewhere FFmpeg may seek past the requested keyframe
# Codecs whose keyframes FFmpeg's parser marks itself, whatever the container says.
_PARSED_CODECS = ("h264", "hevc", "mpeg1video", "mpeg2video", "mpeg4")
_GUESSED_RIGHT = ("mpeg4", "mpeg1video", "mpeg2video")  # codecs whose times in AVI FFmpeg guesses correctly
_KEEPING = ("h264", "hevc")  # codecs whose decoder keeps parameters until others replace them
_SKIPPING = ("h264", "hevc", "mpeg1video", "mpeg2video")  # codecs that reliably mark frames to which no other refers
# Decoders that may refuse every packet after an error, even keyframes, until they are flushed. In other decoders an
# unneeded flush would lose frames.
_STUCK_AFTER_ERRORS = ("libdav1d",)
_STATING = ("matroska", "avi", "flv", "asf")  # demuxers of containers that state the length of a stream
_WHOLE = 0.9  # share of a file up to its last packet; other streams have less than the rest behind it
# Largest normal gap in a file without a packet of its video, in bytes and as a share; a larger one may hold more of it.
_MAX_GAP, _MAX_GAP_SHARE = 2**18, 0.05
_PADDING = 2**16  # bytes that may follow the last packet in any file
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")
_HEAD = 1024  # bytes of a packet that are searched for parameter sets
_HEVC_PARAMETERS = re.compile(rb"\x42\x01(.)", re.DOTALL)  # a sequence parameter set; then its number of sub-layers


class PacketInfo(NamedTuple):
    """The facts about one packet.

    Attributes:
        pts: presentation time in ticks of the stream's time base, or the frame's rank if ``VideoPackets.is_ranked``;
            None if unknown.
        dts: decoding time in ticks; None if unknown.
        duration: in ticks; 0 if unknown.
        keyframe: True if decoding can start here, according to the file.
        hidden: True if it shows no frame: the container discards it, or its headers say so.
    """

    pts: int | None
    dts: int | None
    duration: int
    keyframe: bool
    hidden: bool


class PacketRun(NamedTuple):
    """The packets ``start`` to ``stop`` - 1, which decode to the frames shown at ``times`` (ascending)."""

    start: int
    stop: int
    times: tuple[int, ...]


class VideoPackets:
    """The packets of a file's video stream, in file order. Close it after use.

    Attributes:
        codec: the codec's name ("av1"), not that of the library that decodes it ("libdav1d").
        start_time: start of the container in microseconds; None if it has none.
        n_streams: the number of video streams in the file, cover art included.
        table: the facts about each packet that is not empty.
        lacks_times: True if FFmpeg makes up presentation times, which are wrong.
        is_ranked: True if ``pts`` in ``table`` are ranks in the shown order, computed from headers because the
            container states no presentation times.
        parameters_change: True if the container gives the decoder new parameters in the middle of the stream.
        stated_s: the end of the video as the container states it; None if it does not, and for containers other
            than Matroska, AVI, FLV and ASF.
        fault: the last error that a packet or the demuxer gave; None without one.
        note: what of the film was not read; empty if nothing is known to be missing.
        n_corrupt: the number of packets that the demuxer marks as damaged, plus 1 if an error ended reading.
    """

    def __init__(
        self, path: str, demuxer: str, empty: Collection[int] = (), continuation: Continuation | None = None
    ) -> None:
        """Open the file and read all its packets.

        Packets stay in memory if all together take at most 256 MiB; otherwise none does, and requested packets are read
        again. An error in the middle of the file becomes ``fault``.

        Args:
            empty: indexes of streams without packets, which are only picked if there is no other.
            continuation: the PIDs to replace in a transport stream.

        Raises:
            VideoFault: "unsupported" if no stream can be decoded (``pick_stream``).
            FFmpegError: PyAV cannot open the file.
        """
        self.demuxer = demuxer
        self._path = path
        self._empty = empty
        self._continuation = continuation
        self.note = continuation.note if continuation is not None else ""
        self._container = self._open()
        # The file opened a second time, and the number of the packet that comes next there.
        self._second_file: InputContainer | None = None
        self._next = 0
        self._kept_packets: list[av.Packet] | None = []
        self._fields = False  # True if the first frame consists of two fields
        # The file opened for a new decoder, and the end of the packets whose parameters the decoder may know.
        self._decoder_file: InputContainer | None = None
        self._decoded = 0
        try:
            self.stream = pick_stream(self._container, empty)
            self._codec: av.CodecContext = self.stream.codec_context
            self.codec = str(self.stream.codec_context.codec.canonical_name)
            self.start_time: int | None = self._container.start_time
            self.n_streams = len(self._container.streams.video)
            self.table: list[PacketInfo] = []
            self.parameters_change = False
            self.stated_s = _read_stated_seconds(self._container, self.stream, demuxer)
            self.fault: FFmpegError | None = None
            self.n_corrupt = self._end_byte = self._largest_gap = 0
            extradata = self.stream.codec_context.extradata or b""
            self._sub_layers: set[int] = _find_sub_layers(extradata)
            self._is_packed = demuxer == "avi" and self.codec == "mpeg4" and is_packed(extradata)
            self.is_ranked, self.lacks_times = False, self._has_no_times()
            self._read()
        except BaseException:
            self.close()
            raise

    def _open(self) -> InputContainer:
        """Open the file again."""
        return open_container(self._path, self.demuxer, self._continuation)

    def close(self) -> None:
        """Close the file and drop the packets."""
        self._kept_packets = []
        for file in (self._container, self._second_file, self._decoder_file):
            if file is not None:
                file.close()

    def find_end(self, duration_s: float) -> float:
        """Return the end of the video in seconds, as the container states it, or an estimate from the file's size.

        The result is ``duration_s``, the end of the last frame, if there is neither, and for MP4.
        """
        if self.stated_s is not None or self.demuxer == "mov":
            return self.stated_s or duration_s
        return duration_s / self._share if self.has_unread else duration_s

    @property
    def has_large_gap(self) -> bool:
        """True if a gap between or after the stream's packets exceeds 256 KiB or 5 % of the file."""
        gap = max(self._largest_gap, self._container.size - self._end_byte)
        return gap > min(_MAX_GAP, _MAX_GAP_SHARE * self._container.size)

    @property
    def has_unread(self) -> bool:
        """True if more than a tenth of the file, and more than 64 KiB, lie behind the stream's last packet."""
        return 0 < self._share < _WHOLE and self._container.size - self._end_byte > _PADDING

    def note_unread(self) -> None:
        """Set ``note`` if it is empty and more of the film follows the stream's last packet (``has_more_film``)."""
        where = (self._end_byte, self.stream.id, self._continuation)
        if self.has_unread and not self.note and has_more_film(self._path, self.demuxer, *where):
            self.note = f"{READ_IN_PART}: video goes on in the last {1 - self._share:.0%} of the file"

    @property
    def _share(self) -> float:
        """The share of the file that ends with the stream's last packet."""
        return self._end_byte / max(self._container.size, 1)

    def decode_first_frame(self) -> av.VideoFrame | None:
        """Decode and return the first frame that comes out of the decoder, or None if no packet can be decoded.

        Also records whether frames are interlaced: call it before ``decode_frames`` with ``shown_times``.
        """
        tries = (next(self.decode_frames(0, stop), None) for stop in (1, len(self.table)))
        first = next((frame for frame in tries if frame is not None), None)
        self._fields = first is not None and bool(first.interlaced_frame)
        return first

    def decode_frames(
        self, start: int, stop: int, shown_times: Sequence[int] | None = None, codec: av.CodecContext | None = None
    ) -> Iterator[av.VideoFrame]:
        """Yield the frames of packets ``start`` to ``stop`` - 1 in the order in which they are shown.

        A damaged packet gives no frame: FFmpeg logs it, ``fault`` becomes its error, and decoding continues. Exhaust or
        close the generator before the next call: both use one decoder.

        Args:
            shown_times: the presentation times of the needed frames; the decoder may skip others to which no frame
                refers. None decodes all frames.
            codec: the decoder; by default the stream's own.

        Raises:
            MemoryError: the decoder ran out of memory.
        """
        codec = codec or self._get_decoder(start, stop)
        codec.flush_buffers()
        gets_stuck = codec.codec.name in _STUCK_AFTER_ERRORS
        has_failed = False
        # True if the codec marks frames to which no other refers, and each packet is a whole frame. In HEVC with
        # sub-layers, a higher layer may refer to marked frames.
        marks = self.codec in _SKIPPING and not self._fields and (self.codec != "hevc" or self._sub_layers == {1})
        skips = marks and shown_times is not None
        times = frozenset(shown_times or ())
        try:
            for packet in self.iter_range(start, stop):
                if skips:
                    codec.skip_frame = "DEFAULT" if packet.pts in times else "NONREF"
                fault_before = self.fault
                failed_before = has_failed
                frames = self._decode_packet(codec, packet)
                has_failed = self.fault is not fault_before
                if has_failed and failed_before and gets_stuck and packet.is_keyframe:
                    codec.flush_buffers()
                    frames = self._decode_packet(codec, packet)
                yield from frames
        finally:
            codec.skip_frame = "DEFAULT"  # otherwise frames that the decoder still holds would be lost
        yield from self._decode_packet(codec, None)

    def _get_decoder(self, start: int, stop: int) -> av.CodecContext:
        """Return the stream's decoder; for H.264 and HEVC, a new one if it has already decoded packets after ``start``.

        A used one would keep the parameters of later packets. A new decoder opens the file again. Records that packets
        up to ``stop`` are decoded.
        """
        if start < self._decoded and self._decoded > 1 and self.codec in _KEEPING:
            if self._decoder_file is not None:
                self._decoder_file.close()
            self._decoder_file, self._decoded = self._open(), 0
            self._codec = pick_stream(self._decoder_file, self._empty).codec_context
        self._decoded = max(self._decoded, stop)
        return self._codec

    def runs(self, times: Sequence[int]) -> Iterator[PacketRun]:
        """Yield the runs of packets to decode for the frames shown at ``times`` (ascending, not empty).

        Each run starts at the last keyframe that is stored and shown no later than its first frame, or at the first
        packet without one; runs do not overlap. There is one run from the first packet if parameters change, or if
        neither the demuxer (_SEEKABLE) nor the codec (_PARSED_CODECS) makes keyframes reliable.

        Raises:
            KeyError: no shown packet has one of the times.
        """
        number_at = {packet.pts: number for number, packet in enumerate(self.table) if not packet.hidden}
        can_jump = not self.parameters_change and (self.demuxer in _SEEKABLE or self.codec in _PARSED_CODECS)
        keys = [n for n, p in enumerate(self.table) if can_jump and p.keyframe and p.pts is not None]
        run = PacketRun(0, 0, ())
        for time in times:
            last = number_at[time]
            before = reversed(keys[: bisect_right(keys, last)])
            start = next((n for n in before if (self.table[n].pts or 0) <= time), 0)
            if run.times and start > run.stop:
                yield run
                run = PacketRun(start, start, ())
            run = PacketRun(run.start if run.times else start, max(run.stop, last + 1), (*run.times, time))
        yield run

    def iter_range(self, start: int, stop: int) -> Iterator[av.Packet]:
        """Yield packets ``start`` to ``stop`` - 1, from memory, or from the file if they are not kept.

        If ``is_ranked``, their ``pts`` are set to the ranks.
        """
        kept = self._kept_packets
        packets = kept[start:stop] if kept is not None else islice(self._read_again(start), stop - start)
        for number, packet in enumerate(packets, start):
            if self.is_ranked:
                packet.pts = self.table[number].pts
            yield packet

    def _has_no_times(self) -> bool:
        """Return True if the container states no presentation times and FFmpeg's are wrong for reordered frames."""
        if self.demuxer in ("avi", "asf"):
            codec = self.stream.codec_context
            is_guessed = self.codec not in _GUESSED_RIGHT if self.demuxer == "avi" else self.codec in _KEEPING
            return self._is_packed or (bool(codec.has_b_frames) and is_guessed)
        return self.demuxer in _KEEPING or (self.demuxer, self.codec) == ("mpegvideo", "mpeg1video")

    def _decode_packet(self, codec: av.CodecContext, packet: av.Packet | None) -> list[av.VideoFrame]:
        """Decode a packet to the frames that it completes; None flushes the decoder.

        A packet that does not decode gives no frame, and its error becomes ``fault``, except for MemoryError, which is
        raised.
        """
        try:
            return list(codec.decode(packet))
        except FFmpegError as error:  # some decoders report broken data as EPERM or as their library's own error
            if isinstance(error, MemoryError):
                raise
            self.fault = error
            return []

    def _read(self) -> None:
        """Read all packets but empty ones into ``table``, and record damage, gaps and changes of parameters.

        Packets are kept in memory unless all together exceed MAX_KEPT_BYTES. If times are missing and headers tell the
        order, ``pts`` become ranks and ``is_ranked`` is set. ``lacks_times`` becomes True for MPEG-4 with B-frames and
        frames without content. Raises MemoryError; other errors of the demuxer end reading (``_iter_readable``).
        """
        size = 0
        has_gaps = False
        extradata = self.stream.codec_context.extradata or b""
        shown = ShownPackets(self.codec, extradata) if self.codec in HIDING_CODECS else None
        order = ShownOrder(self.codec, extradata) if self.lacks_times and self.codec in ORDERED_CODECS else None
        for packet in self._iter_readable():
            if not packet.size:
                continue
            self.n_corrupt += packet.is_corrupt
            self._largest_gap = max(self._largest_gap, (packet.pos or 0) - self._end_byte)
            self._end_byte = max(self._end_byte, (packet.pos or 0) + packet.size)
            is_shown = shown is None or shown.is_packet_shown(packet)
            is_hidden = packet.is_discard or not is_shown
            if order is not None and not is_hidden:
                order.add(packet)
            has_gaps = has_gaps or (not is_shown and self.codec == "mpeg4")
            self.table.append(PacketInfo(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe, is_hidden))
            self.parameters_change = self.parameters_change or packet.has_sidedata("new_extradata")
            if self.codec == "hevc" and packet.is_keyframe:
                self._sub_layers |= _find_sub_layers(memoryview(packet)[:_HEAD])
            size += packet.size + _OVERHEAD
            if size > MAX_KEPT_BYTES:
                self._kept_packets = None
            elif self._kept_packets is not None:
                self._kept_packets.append(packet)
        # Around a frame without content, the decoder shows frames in a different order.
        self.lacks_times |= has_gaps and bool(self.stream.codec_context.has_b_frames)
        if order is not None and not has_gaps and (ranks := order.find_ranks()) is not None:
            self.is_ranked = True
            numbers = iter(ranks)
            self.table = [packet._replace(pts=None if packet.hidden else next(numbers)) for packet in self.table]

    def _iter_readable(self) -> Iterator[av.Packet]:
        """Yield the packets of the stream up to the end of the file or the first error of the demuxer.

        That error is not raised, except for MemoryError: it becomes ``fault`` and counts as a corrupt packet.
        """
        try:
            yield from self._iter_packets(self._container, self.stream)
        except FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
            self.fault, self.n_corrupt = error, self.n_corrupt + 1

    def _read_again(self, start: int, may_seek: bool = True) -> Iterator[av.Packet]:
        """Yield the packets from number ``start`` on, from a second opening of the file that stays open.

        If ``may_seek``, it seeks to the packet's presentation time, if known, in containers in _SEEKABLE; otherwise it
        reads up to the packet. If a seek goes past the packet, it reads from the beginning.
        """
        if self._second_file is None or start < self._next:
            self._second_file, self._next = self._open(), 0
        stream = self._second_file.streams[self.stream.index]
        time = self.table[start].pts
        seeks = may_seek and start > 0 and self.demuxer in _SEEKABLE
        if seeks and time is not None:
            # In MP4 FFmpeg seeks by presentation time: a decoding time would lead to an earlier keyframe.
            self._second_file.seek(time, stream=stream)
        packets = (packet for packet in self._iter_packets(self._second_file, stream) if packet.size)
        rest_of_packets = islice(packets, start - self._next, None)
        self._next = start
        for packet in dropwhile(lambda packet: packet.pts != time, packets) if seeks else rest_of_packets:
            self._next += 1
            yield packet
        if seeks and self._next == start:  # the seek went past the packet, as in fragmented files
            self._second_file = None
            yield from self._read_again(start, may_seek=False)

    def _iter_packets(self, container: InputContainer, stream: av.VideoStream) -> Iterator[av.Packet]:
        """Yield the packets of a stream to the end of the file, each with one frame at most.

        After damage, the demuxer of transport streams raises BlockingIOError, and reading continues.
        """
        unpacker = BitStreamFilterContext("mpeg4_unpack_bframes", stream) if self._is_packed else None
        while True:
            try:
                for packet in container.demux(stream):
                    frames = unpacker.filter(packet) if unpacker and packet.size else [packet]
                    for frame in frames if unpacker else ():  # its mark may be that of the next packet
                        frame.is_keyframe = frame.size > 0 and is_keyframe(frame)
                    yield from frames
            except BlockingIOError:
                continue
            except IndexError:  # PyAV fails at the end of a file if a stream appeared in the middle of it
                return
            return


def open_container(path: str, demuxer: str, continuation: Continuation | None = None) -> InputContainer:
    """Open a file with PyAV and the given demuxer, which may open local files only.

    Raises:
        FFmpegError: PyAV cannot open it.
        VideoFault: with a ``continuation``, the file cannot be opened.
    """
    options = {"protocol_whitelist": "file"}
    file = ContinuedFile(path, continuation) if continuation is not None else path
    container: InputContainer = av.open(file, format=demuxer, options=options, metadata_errors="replace")
    return container


def read_packets(path: str, demuxer: str) -> VideoPackets:
    """Read the packets of the best video stream that has any, or of an empty stream if none has; close the result.

    A transport stream with large gaps (``has_large_gap``) is read again with the film's other PIDs, if it has any.
    ``note`` of the result says what is not read.

    Raises:
        VideoFault: "unsupported" if no stream can be decoded (``pick_stream``).
        FFmpegError: PyAV cannot open the file.
    """
    empty: set[int] = set()
    while True:
        packets = VideoPackets(path, demuxer, empty)
        number = packets.stream.index
        if demuxer == "mpegts" and packets.has_large_gap:
            continuation = find_continuation(path, packets.stream.id)
            if continuation is not None:
                packets.close()
                packets = VideoPackets(path, demuxer, empty, continuation)
        if packets.table or number in empty:
            packets.note_unread()
            return packets
        packets.close()
        empty.add(number)


def pick_stream(container: InputContainer, empty: Collection[int] = ()) -> av.VideoStream:
    """Return the video stream that the ffmpeg command line would use, and configure its decoder.

    This is the largest one, where a default stream counts 5 megapixels more. Streams with an index in ``empty`` come
    last. The decoder gets one thread, and the flag ``unaligned``, without which FFmpeg may keep columns that the file
    crops on the left.

    Raises:
        VideoFault: "unsupported" if the file has no video stream (cover art does not count), the codec is unknown, or
            frames are larger than MAX_PIXELS.
    """
    streams = [s for s in container.streams.video if not s.disposition & _STILL_IMAGES]
    if not streams:
        kinds = (("audio", container.streams.audio), ("pictures", container.streams.video))
        others = " and ".join(name for name, streams in kinds if streams)
        only = f", only {others}" if others else ""
        raise VideoFault("unsupported", f"the file holds no video stream{only}; leave it out")
    streams = [s for s in streams if s.codec_context is not None]
    if not streams:
        raise VideoFault("unsupported", "no decoder knows the codec of the video stream")
    streams = [s for s in streams if s.index not in empty] or streams
    stream = max(streams, key=lambda s: s.width * s.height + 5_000_000 * bool(s.disposition & Disposition.default))
    if stream.width * stream.height > MAX_PIXELS:
        raise VideoFault("unsupported", f"frames of {stream.width}x{stream.height} are larger than {MAX_PIXELS} pixels")
    stream.codec_context.thread_count = 1  # the pipeline runs one decoder per core
    # Without this flag, FFmpeg keeps columns that the file crops on the left if cropping would leave rows unaligned.
    stream.codec_context.flags |= Flags.unaligned
    return stream


def _find_sub_layers(data: bytes | memoryview) -> set[int]:
    """Return the numbers of temporal sub-layers that parameter sets in HEVC data declare; an empty set without any."""
    return {1 + (match[1][0] >> 1 & 7) for match in _HEVC_PARAMETERS.finditer(data)}


def _read_stated_seconds(container: InputContainer, stream: av.VideoStream, demuxer: str) -> float | None:
    """Return the end of a video in seconds as its container states it, or None.

    The stream's duration counts first, then its DURATION tag, then the file's duration if it has no sound; the last two
    less the container's start. Containers other than Matroska, AVI, FLV and ASF give None.
    """
    if demuxer not in _STATING:
        return None
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    start_s = (container.start_time or 0) / 1_000_000  # the durations below are end times
    for name, text in stream.metadata.items():  # Matroska: "00:00:08.000000000", perhaps with the language's name
        if name.upper().startswith("DURATION") and (match := _CLOCK.match(text)):
            return int(match[1]) * 3600 + int(match[2]) * 60 + float(match[3]) - start_s
    return container.duration / 1_000_000 - start_s if container.duration and not container.streams.audio else None
