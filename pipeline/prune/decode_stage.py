"""The decode actor: a row in, a decoded video out; a killable child process decodes."""

from __future__ import annotations

import atexit
import math
import shutil
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from ray.actor import ActorHandle

from gstep.errors import TooFewFrames, UnsupportedVideo
from pipeline.cache.writer import VideoItem
from pipeline.errors import FaultClass, UsageError, VideoFault
from pipeline.inputs.forms import OpenArchives
from pipeline.prune.batches import pack, unpack_unit
from pipeline.rows import VIDEO_COLUMNS, TodoRow, VideoRecord, failed_video, may_succeed_elsewhere, without_nulls
from pipeline.runner.worker_heartbeat import Heartbeat, ItemsInHand
from pipeline.storage.hub import is_remote
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.video.decode import DecodedVideo, DecodeRequest
from pipeline.video.decoders import decoder_version
from pipeline.video.frame_folders import source_bytes
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.source import Source, prepare_source

if TYPE_CHECKING:
    from gstep.backbones import Preprocessor

_FULL_HD = 1920, 1080
_USUAL_SIZES = _FULL_HD, (1280, 720), (854, 480), (426, 240)  # of videos, (width, height)
_USUAL_FRAMES = 32  # of a video that is sampled by time


@dataclass(frozen=True)
class DecodeSetup:
    """The settings of a decoder. They travel to every actor."""

    sampling: Sampling
    preprocessor: Preprocessor
    decoder: str = "auto"
    timeout_s: float = 120.0
    memory_mb: int = 4096
    objects: Objects = field(default_factory=Objects)
    fetch_mb: int = 2048

    def largest_frames(self) -> tuple[int, int, int]:
        """Return the (frames, height, width) of a long full HD video, as ``plan_video``: the largest shape to plan for.

        Raises UnsupportedVideo as ``plan_video``.
        """
        return plan_video(self.preprocessor, self.sampling.num_frames or self.sampling.max_frames or 0).shape

    def usual_frames(self) -> tuple[int, int, int]:
        """Return the (frames, height, width) of a usual full HD video: few reach the limit of frames sampled by time.

        Raises UnsupportedVideo as ``plan_video``.
        """
        frames = self.sampling.num_frames or min(self.sampling.max_frames or 0, _USUAL_FRAMES)
        return plan_video(self.preprocessor, frames).shape


class PlannedVideo(NamedTuple):
    """A video to plan for.

    Attributes:
        shape: (frames, height, width) as an encoder gets them.
        size: (width, height) in the file.
        refusal: the error of a larger video, for which this one stands in; None if the model takes the size asked for.
    """

    shape: tuple[int, int, int]
    size: tuple[int, int]
    refusal: str | None

    @property
    def size_text(self) -> str:
        """The size in words."""
        return "full HD" if self.size == _FULL_HD else "{}x{}".format(*self.size)


def plan_video(preprocessor: Preprocessor, n_frames: int, size: tuple[int, int] = _FULL_HD) -> PlannedVideo:
    """Return a video to plan for: of this (width, height), else of the largest usual size below that the model takes.

    A model that takes frames in their source size takes fewer bytes than a long full HD video has. Raises
    UnsupportedVideo if the model takes ``n_frames`` frames of none of these sizes.
    """
    first_error: UnsupportedVideo | None = None
    for width, height in (size, *(usual for usual in _USUAL_SIZES if math.prod(usual) < math.prod(size))):
        try:
            shape = n_frames, *preprocessor.target_size(n_frames, height, width)
        except TooFewFrames:
            raise
        except UnsupportedVideo as error:
            first_error = first_error or error
        else:
            return PlannedVideo(shape, (width, height), None if first_error is None else str(first_error))
    assert first_error is not None
    raise first_error


def check_decoder_device(decoder: str, device: str) -> None:
    """Raise UsageError if the decoder needs a GPU and the run's ``device`` is none."""
    if decoder == "nvdec" and device != "cuda":
        raise UsageError("--decoder nvdec needs a GPU, and this run has none; leave it out, or give the run one")


class VideoDecoder:
    """The decoder of one video after another in a child process, for a run's actors and for ``jobs.verify --live``.

    A crash, a hang or a memory bomb costs one video and no actor. Close it after use.

    Attributes:
        cpu_s: CPU seconds of the child for the last video that it decoded.
    """

    def __init__(self, setup: DecodeSetup, sandbox: DecodeSandbox | None = None) -> None:
        self._setup, self.cpu_s = setup, 0.0
        self._sandbox = sandbox or DecodeSandbox(setup.timeout_s, setup.memory_mb, on_gpu=setup.decoder == "nvdec")

    def close(self) -> None:
        """End the child."""
        self._sandbox.close()

    def open(self, row: TodoRow, archives: OpenArchives) -> Source:
        """Open the video of a row. An error becomes the ``fault`` of the source: nothing is raised.

        ``archives`` fetches the videos that are in archives; see ``open_archives``.
        """
        location = _locate(row)
        if row["policy"]:
            return Source(location, VideoFault("policy", row["policy"]))
        if row["fault"]:
            fault_class, _, message = row["fault"].partition(": ")
            return Source(location, VideoFault(cast(FaultClass, fault_class), message))
        fetch = None if location.member is None else partial(archives.fetch, location)
        return prepare_source(location, self._setup.objects, self._setup.fetch_mb * 2**20, fetch)

    def open_archives(self, rows: Iterable[TodoRow]) -> OpenArchives:
        """Return a reader of the archives that contain videos of these rows. Close it after use.

        Rows with a policy or a known fault are left out, because nothing opens their files.
        """
        locations = [_locate(row) for row in rows if not (row["policy"] or row["fault"])]
        return OpenArchives(self._setup.objects, locations)

    def decode_one(self, row: TodoRow, source: Source) -> tuple[VideoRecord, NDArray[np.uint8] | None]:
        """Decode a video: return its record and frames [t,h,w,3]; a fault makes an error record, and frames None.

        The seconds in the record leave out the start of a child. ``source`` stays open.
        """
        start, setup = time.perf_counter() - self._sandbox.starting_s, self._setup
        record, clip = _first_record(row, source), (row["start_s"], row["end_s"])
        kind = setup.sampling, setup.preprocessor
        request = DecodeRequest(row["uri"], *kind, *clip, setup.decoder)
        try:
            video = source.decode(self._sandbox, request)
        except VideoFault as fault:
            failed_record = failed_video(record, fault)
            if (version := decoder_version(fault.backend)) is not None:
                failed_record["backend_version"] = version
            if not row["policy"] and (size := _find_size(source.location)) is not None:
                failed_record["source_size"] = size
            failed_record["decode_s"] = (
                time.perf_counter() - self._sandbox.starting_s - start
            )  # measured as for ok videos
            return failed_record, None
        self.cpu_s = video.cpu_s
        return {**record, **make_decoding_columns(video, row["attempts"])}, video.frames


def decode_sample(
    setup: DecodeSetup, rows: Sequence[TodoRow]
) -> Generator[tuple[VideoRecord, NDArray[np.uint8] | None, float]]:
    """Decode videos as a run does, but one after another; yield each record, its frames and its core-seconds.

    Core-seconds are the CPU seconds of the child, without the time in which other programs had the core. For a failed
    video, and with ``nvdec``, whose work is not on a core, they are the seconds of the record.
    """
    with closing(VideoDecoder(setup)) as decoder, decoder.open_archives(rows) as archives:
        for row in rows:
            with decoder.open(row, archives) as source:
                record, frames = decoder.decode_one(row, source)
            on_core = frames is not None and setup.decoder != "nvdec"
            yield record, frames, decoder.cpu_s if on_core else record["decode_s"]


class Decoder:
    """The decode actor: a VideoDecoder and a heartbeat. A call takes a UNIT of rows and yields bundles of their videos.

    Two calls may run at a time: while the child decodes a video of one, the other fetches its next video or hands over
    a decoded one. The bundles of a call depend on its rows alone, since Ray counts them when it retries a call.
    """

    def __init__(self, setup: DecodeSetup, heartbeats: ActorHandle | None = None, videos_per_bundle: int = 1) -> None:
        """Report that this process starts, and prepare decoding; the child that decodes starts with the first video."""
        self._heartbeat = Heartbeat("decode", heartbeats, suspects=False)  # a video kills the child, not this process
        self._heartbeat.start()
        if self._heartbeat.ends_at_once:  # before multiprocessing removes the socket of its fork server
            atexit.register(shutil.rmtree, util.get_temp_dir(), ignore_errors=True)
        self._decoder = VideoDecoder(setup)
        self._decoding = threading.Lock()  # both calls share one child
        self._videos_per_bundle = videos_per_bundle

    def close(self) -> None:
        """End the child; the actors of a run end with their processes."""
        self._decoder.close()

    def __call__(self, unit: pa.Table) -> Iterator[pa.Table]:
        return self.decode(unpack_unit(unit))

    def decode(self, todo: pa.Table | pa.RecordBatch) -> Iterator[pa.Table]:
        """Decode rows of TODO_SCHEMA, and yield a row of BUNDLE for each ``videos_per_bundle`` of them.

        The last row may have fewer. The videos of a bundle are reported as in hand while they are decoded.
        """
        rows: list[TodoRow] = todo.to_pylist()
        with self._decoder.open_archives(rows) as archives:
            for start in range(0, len(rows), self._videos_per_bundle):
                bundle = rows[start : start + self._videos_per_bundle]
                with self._heartbeat.holding(*(row["video_id"] for row in bundle)) as items:
                    packed = pack([self._decode_reported(row, items, archives) for row in bundle])
                yield packed

    def _decode_reported(self, row: TodoRow, items: ItemsInHand, archives: OpenArchives) -> VideoItem:
        """Decode one video, and report its outcome to the heartbeat. Waits while this worker is excluded.

        Two calls may fetch their videos at once; one of them decodes.
        """
        self._heartbeat.wait_while_excluded()
        with self._decoder.open(row, archives) as source, self._decoding:
            record, frames = self._decoder.decode_one(row, source)
        items.release(may_succeed_elsewhere(record), is_result=frames is not None, fault=record.get("error_class"))
        return VideoItem(record, frames=frames)


def _locate(row: TodoRow) -> Location:
    """Return the location of a row's video."""
    return Location.parse(row["uri"], row["source_offset"], row["size"], row["mark"])


def _first_record(row: TodoRow, source: Source) -> VideoRecord:
    """Return the record of a video before decoding, with status "ok".

    It has the values of the row that are columns of the videos table, and the mark and archive of the opened source.
    """
    columns = {name: value for name, value in row.items() if name in VIDEO_COLUMNS}
    columns["source_mark"] = source.location.mark
    if source.location.member is not None:
        columns["source_shard"] = source.location.file
    return without_nulls({"status": "ok", **columns}, VideoRecord)


def _find_size(location: Location) -> int | None:
    """Return the size in bytes of a failed video's file, or None if it is not known.

    The size of a local file is measured. The size of a remote file or a member of an archive is that of ``location``:
    from the fetched copy, else from the listing or index.
    """
    if is_remote(location.file) or location.member is not None:
        return location.size
    try:
        return source_bytes(location.file)
    except (OSError, ValueError):
        return None


def make_decoding_columns(video: DecodedVideo, attempts: int) -> VideoRecord:
    """Return the columns of the videos table that a decoded video fills.

    ``attempts`` is the number of this attempt over all runs; a second try within this attempt adds one.
    """
    return {
        **without_nulls(video.record, VideoRecord),
        "attempts": attempts + video.attempts - 1,
        "frame_indices": video.frame_indices.tolist(),
        "timestamps": video.timestamps.tolist(),
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
    }
