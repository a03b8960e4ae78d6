"""The decode stage: decodes and resizes the frames of videos, in a child process that can be killed."""

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
from pipeline.prune.batches import pack, unpack_task
from pipeline.rows import VIDEO_COLUMNS, TodoRow, VideoRecord, drop_nulls, make_failed_video, may_succeed_elsewhere
from pipeline.runner.worker_heartbeat import Heartbeat, ItemsInHand
from pipeline.storage.hub import is_remote
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.video.decode import DecodedVideo, DecodeRequest
from pipeline.video.decoders import find_installed_version
from pipeline.video.frame_folders import count_source_bytes
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.source import Source, prepare_source

if TYPE_CHECKING:
    from gstep.backbones import Preprocessor

_FULL_HD = 1920, 1080
_USUAL_SIZES = _FULL_HD, (1280, 720), (854, 480), (426, 240)  # standard sizes of videos, (width, height)
_USUAL_FRAMES = 32  # of a typical video that is sampled with fps


@dataclass(frozen=True)
class DecodeSetup:
    """The settings of a decoder, which are sent to every decode actor."""

    sampling: Sampling
    preprocessor: Preprocessor
    decoder: str = "auto"
    timeout_s: float = 120.0
    memory_mb: int = 4096
    objects: Objects = field(default_factory=Objects)
    fetch_mb: int = 2048

    def plan_largest_frames(self) -> tuple[int, int, int]:
        """Return (frames, height, width) of a video of maximum length, in full HD or the largest size the model takes.

        Raises UnsupportedVideo if the model takes no standard size.
        """
        return plan_video(self.preprocessor, self.sampling.num_frames or self.sampling.max_frames or 0).shape

    def plan_typical_frames(self) -> tuple[int, int, int]:
        """Return the shape that ``plan_largest_frames`` gives for a typical video: with ``fps``, at most 32 frames."""
        frames = self.sampling.num_frames or min(self.sampling.max_frames or 0, _USUAL_FRAMES)
        return plan_video(self.preprocessor, frames).shape


class PlannedVideo(NamedTuple):
    """A hypothetical video whose shape a plan uses.

    Attributes:
        shape: (frames, height, width) after resizing.
        size: (width, height) in the file.
        refusal: the model's error for the requested size, if a smaller size was chosen; otherwise None.
    """

    shape: tuple[int, int, int]
    size: tuple[int, int]
    refusal: str | None

    @property
    def size_text(self) -> str:
        """The size for messages: "full HD", or "WIDTHxHEIGHT"."""
        return "full HD" if self.size == _FULL_HD else "{}x{}".format(*self.size)


def plan_video(preprocessor: Preprocessor, n_frames: int, size: tuple[int, int] = _FULL_HD) -> PlannedVideo:
    """Return a hypothetical video of this size, or of the largest smaller standard size that the model takes.

    The standard sizes are those of 1080p, 720p, 480p and 240p.

    Args:
        size: (width, height) in the file.

    Raises:
        TooFewFrames: the model needs more than ``n_frames`` frames.
        UnsupportedVideo: the model takes none of these sizes; this is the error for ``size``.
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
    """Raise UsageError if ``decoder`` is "nvdec" and ``device`` is not "cuda"."""
    if decoder == "nvdec" and device != "cuda":
        raise UsageError("--decoder nvdec needs a GPU, and this run has none; leave it out, or give the run one")


class VideoDecoder:
    """Decodes videos one after the other in a child process, for the actors of a run and for ``jobs.verify --live``.

    A video that crashes the child, hangs or exhausts its memory costs only itself. Close the decoder after use.

    Attributes:
        cpu_s: CPU seconds of the child for the last video that was decoded without a fault.
    """

    def __init__(self, setup: DecodeSetup, sandbox: DecodeSandbox | None = None) -> None:
        """Prepare the decoder; a child process starts with the first video, unless ``sandbox`` decodes otherwise."""
        self._setup = setup
        self.cpu_s = 0.0
        self._sandbox = sandbox or DecodeSandbox(setup.timeout_s, setup.memory_mb, on_gpu=setup.decoder == "nvdec")

    def close(self) -> None:
        """End the child process."""
        self._sandbox.close()

    def open(self, row: TodoRow, archives: OpenArchives) -> Source:
        """Open the source of a video; a local path is only looked up.

        Remote files and members of archives, of at most ``fetch_mb``, are fetched into memory. An error is not raised,
        but becomes the ``fault`` of the source. A row with a policy or a known fault gets it without a read.
        """
        location = _parse_location(row)
        if row["policy"]:
            return Source(location, VideoFault("policy", row["policy"]))
        if row["fault"]:
            fault_class, _, message = row["fault"].partition(": ")
            return Source(location, VideoFault(cast(FaultClass, fault_class), message))
        fetch = None if location.member is None else partial(archives.fetch, location)
        return prepare_source(location, self._setup.objects, self._setup.fetch_mb * 2**20, fetch)

    def open_archives(self, rows: Iterable[TodoRow]) -> OpenArchives:
        """Return a reader of the archives that contain videos of these rows. Close it after use."""
        locations = [_parse_location(row) for row in rows if not (row["policy"] or row["fault"])]
        return OpenArchives(self._setup.objects, locations)

    def decode_row(self, row: TodoRow, source: Source) -> tuple[VideoRecord, NDArray[np.uint8] | None]:
        """Decode the video of an opened source, and set ``cpu_s`` if that succeeds. The source stays open.

        Returns:
            (record, frames [t,h,w,3] uint8, resized by the preprocessor), or (error record, None) if the video has a
            fault. ``decode_s`` of the record does not include the start of a child process.
        """
        start = time.perf_counter() - self._sandbox.starting_s
        setup = self._setup
        record = _make_first_record(row, source)
        clip = (row["start_s"], row["end_s"])
        kind = setup.sampling, setup.preprocessor
        request = DecodeRequest(row["uri"], *kind, *clip, setup.decoder)
        try:
            video = source.decode(self._sandbox, request)
        except VideoFault as fault:
            failed_record = make_failed_video(record, fault)
            if (version := find_installed_version(fault.backend)) is not None:
                failed_record["backend_version"] = version
            if not row["policy"] and (size := _find_size(source.location)) is not None:
                failed_record["source_size"] = size
            failed_record["decode_s"] = (
                time.perf_counter() - self._sandbox.starting_s - start
            )  # the same span as for ok videos
            return failed_record, None
        self.cpu_s = video.cpu_s
        return {**record, **make_decoding_columns(video, row["attempts"])}, video.frames


def decode_sample(
    setup: DecodeSetup, rows: Sequence[TodoRow]
) -> Generator[tuple[VideoRecord, NDArray[np.uint8] | None, float]]:
    """Decode videos one after the other as a run would, for a plan.

    Yields:
        (record, frames, core-seconds) of each row; frames is None for a failed video. Core-seconds are CPU seconds of
        the child; for a failed video and with ``nvdec``, they are ``decode_s`` of the record.
    """
    with closing(VideoDecoder(setup)) as decoder, decoder.open_archives(rows) as archives:
        for row in rows:
            with decoder.open(row, archives) as source:
                record, frames = decoder.decode_row(row, source)
            on_core = frames is not None and setup.decoder != "nvdec"
            yield record, frames, decoder.cpu_s if on_core else record["decode_s"]


class Decoder:
    """The decode actor: a VideoDecoder with a heartbeat. A call takes a row of TASK_SCHEMA and yields batches.

    Two calls may run at a time: while the child decodes a video of one call, the other fetches its next video or passes
    a batch on. The batches of a call depend only on its rows, since Ray counts them when it retries a call.
    """

    def __init__(self, setup: DecodeSetup, heartbeats: ActorHandle | None = None, videos_per_bundle: int = 1) -> None:
        """Start the heartbeat and prepare the decoder. The child process starts with the first video.

        Args:
            heartbeats: the actor that collects the workers' reports; None for no reports.

        Raises:
            WorkerGivenUp: too many processes of this worker have crashed.
        """
        self._heartbeat = Heartbeat("decode", heartbeats, suspects=False)  # a video kills the child, not this process
        self._heartbeat.start()
        if self._heartbeat.ends_at_once:  # before multiprocessing removes the socket of its fork server
            atexit.register(shutil.rmtree, util.get_temp_dir(), ignore_errors=True)
        self._decoder = VideoDecoder(setup)
        self._decoding = threading.Lock()  # both calls share one child
        self._videos_per_bundle = videos_per_bundle

    def close(self) -> None:
        """End the child process, which otherwise ends with its actor."""
        self._decoder.close()

    def __call__(self, unit: pa.Table) -> Iterator[pa.Table]:
        return self.decode(unpack_task(unit))

    def decode(self, todo: pa.Table | pa.RecordBatch) -> Iterator[pa.Table]:
        """Decode rows of TODO_SCHEMA, and yield a row of BATCH_SCHEMA for every ``videos_per_bundle`` of them.

        The last batch may have fewer videos. A failed video becomes an error record without frames. The videos of a
        batch are reported as in hand while they are decoded. Blocks while this worker is excluded.
        """
        rows: list[TodoRow] = todo.to_pylist()
        with self._decoder.open_archives(rows) as archives:
            for start in range(0, len(rows), self._videos_per_bundle):
                batch = rows[start : start + self._videos_per_bundle]
                with self._heartbeat.hold_items(*(row["video_id"] for row in batch)) as items:
                    packed = pack([self._decode_reported(row, items, archives) for row in batch])
                yield packed

    def _decode_reported(self, row: TodoRow, items: ItemsInHand, archives: OpenArchives) -> VideoItem:
        """Decode one video, and report its outcome to the heartbeat."""
        self._heartbeat.wait_while_excluded()
        with self._decoder.open(row, archives) as source, self._decoding:
            record, frames = self._decoder.decode_row(row, source)
        items.release(may_succeed_elsewhere(record), is_result=frames is not None, fault=record.get("error_class"))
        return VideoItem(record, frames=frames)


def _parse_location(row: TodoRow) -> Location:
    """Return the location of a row's video."""
    return Location.parse(row["uri"], row["source_offset"], row["size"], row["mark"])


def _make_first_record(row: TodoRow, source: Source) -> VideoRecord:
    """Return the record of a video before decoding: the row's non-null columns of the videos table, and status "ok"."""
    columns = {name: value for name, value in row.items() if name in VIDEO_COLUMNS}
    columns["source_mark"] = source.location.mark
    if source.location.member is not None:
        columns["source_shard"] = source.location.file
    return drop_nulls({"status": "ok", **columns}, VideoRecord)


def _find_size(location: Location) -> int | None:
    """Measure a failed video's local file in bytes, or return the size in ``location`` for a remote file or a member.

    None means that it is unknown.
    """
    if is_remote(location.file) or location.member is not None:
        return location.size
    try:
        return count_source_bytes(location.file)
    except (OSError, ValueError):
        return None


def make_decoding_columns(video: DecodedVideo, attempts: int) -> VideoRecord:
    """Return the columns of the videos table that a decoded video fills, without null values.

    Args:
        attempts: the number of this attempt over all runs. A second try by the sandbox adds one to it.
    """
    return {
        **drop_nulls(video.record, VideoRecord),
        "attempts": attempts + video.attempts - 1,
        "frame_indices": video.frame_indices.tolist(),
        "timestamps": video.timestamps.tolist(),
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
    }
