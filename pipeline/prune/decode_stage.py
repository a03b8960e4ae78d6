"""The decode actor: one killable child process, a row in and a row out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pipeline.errors import VideoFault
from pipeline.execution.heartbeat import Beat
from pipeline.prune.config import PruneConfig
from pipeline.rows import DECODED, Record, failed, one_row
from pipeline.storage.s3 import Objects, is_object
from pipeline.video.decode import DecodedVideo, DecodeRequest
from pipeline.video.readers import reader_version
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.source import Source, one_ahead, open_source

if TYPE_CHECKING:
    from gstep.backbones import Preprocessor


@dataclass(frozen=True)
class DecodeSetup:
    """What a decoder needs to know; it travels to every actor."""

    sampling: Sampling
    preprocessor: Preprocessor
    reader: str = "auto"
    timeout_s: float = 120.0
    memory_mb: int = 4096
    objects: Objects = field(default_factory=Objects)
    fetch_mb: int = 2048

    @classmethod
    def of(cls, config: PruneConfig, sampling: Sampling, preprocessor: Preprocessor, objects: Objects) -> DecodeSetup:
        return cls(
            sampling,
            preprocessor,
            reader=config.decoder,
            timeout_s=config.decode_timeout,
            memory_mb=config.decode_memory,
            objects=objects,
            fetch_mb=config.fetch_memory,
        )

    def largest_frames(self) -> tuple[int, int, int]:
        """(frames, height, width) of a full HD video that is long enough; of any, where all are resized alike."""
        frames = self.sampling.num_frames or self.sampling.max_frames or 0
        return frames, *self.preprocessor.target_size(frames, 1080, 1920)


class Decoder:
    """Decodes in a child process, so that a crash, a hang or a memory bomb costs one video and no actor."""

    def __init__(self, setup: DecodeSetup, pulse: Any = None) -> None:
        self._setup = setup
        self._beat = Beat("decode", pulse)
        self._sandbox = DecodeSandbox(timeout_s=setup.timeout_s, memory_mb=setup.memory_mb)

    def close(self) -> None:
        """End the child; the actors of a run end with their processes."""
        self._sandbox.close()

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        rows = batch.to_pylist()
        with closing(one_ahead(self._open, rows)) as sources:
            for row in rows:
                with self._beat.holding(row["video_id"]), next(sources) as source:
                    decoded = self.decode_row(row, source)
                yield decoded

    def _open(self, row: dict[str, Any]) -> Source:
        if row["policy"]:
            return Source(row["uri"], fault=VideoFault("policy", row["policy"]))
        return open_source(row["path"], self._setup.objects, self._setup.fetch_mb * 2**20)

    def decode_row(self, row: dict[str, Any], source: Source) -> pa.Table:
        """One video, whose row is one of TODO_SCHEMA, as DECODED; what is wrong with it becomes its error row."""
        started = time.perf_counter()
        carried = ("video_id", "uri", "start_s", "end_s", "manifest", "attempts")
        record: Record = {"status": "ok", **{name: row[name] for name in carried}}
        try:
            video = source.decode(self._sandbox, self._request(row))
        except VideoFault as fault:
            record |= {
                "source_size": None if row["policy"] else _size(row, source),
                "backend_version": reader_version(fault.backend),
            }
            return one_row(DECODED, {**failed(record, fault), "decode_s": time.perf_counter() - started})
        record |= decoded_columns(video, row["attempts"])
        record["decode_s"] = video.seconds  # without the start of the child, which serves many videos
        return one_row(DECODED, record, {"frames": video.frames})

    def _request(self, row: dict[str, Any]) -> DecodeRequest:
        return DecodeRequest(
            path=row["path"],
            start_s=row["start_s"],
            end_s=row["end_s"],
            sampling=self._setup.sampling,
            preprocessor=self._setup.preprocessor,
            reader=self._setup.reader,
        )


def _size(row: dict[str, Any], source: Source) -> int | None:
    """Bytes of a video that failed; what the listing said where it could not be fetched."""
    if is_object(row["path"]):
        return source.size if source.size is not None else row["size"]
    try:
        return Path(row["path"]).stat().st_size
    except (OSError, ValueError):
        return None


def decoded_columns(video: DecodedVideo, attempts: int) -> Record:
    """The columns of the videos table that decoding decides."""
    same_name = ("fps", "duration_s", "source_frames", "clip_frames", "n_repeated", "source_width", "source_height")
    more = ("codec", "backend", "backend_version", "backend_note", "decode_warnings", "source_size", "source_hash")
    return {
        "attempts": attempts + video.attempts - 1,
        **{name: getattr(video, name) for name in (*same_name, *more)},
        "frame_indices": video.frame_indices.tolist(),
        "timestamps": video.timestamps.tolist(),
        "height": video.frames.shape[1],
        "width": video.frames.shape[2],
    }
