"""Decoding and encoding with pruning as callables for ``map_batches`` in a user's own Ray Data pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from gstep.backbones import family_of
from pipeline.cache.reader import parse_json_columns
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.writer import VideoItem
from pipeline.errors import ManifestError
from pipeline.inputs.named_videos import MANIFEST_SCHEMA, ManifestConverter, Roots
from pipeline.inputs.tables import convert_row_errors, iter_given_batches
from pipeline.options import make_config
from pipeline.prune.batches import BYTES, read_cell, unpack_batch
from pipeline.prune.config import VIDEO_OPTIONS, PruneConfig
from pipeline.prune.decode_stage import Decoder
from pipeline.prune.encode_stage import Encoder
from pipeline.prune.recipe import PruneStages, resolve_recipe
from pipeline.rows import VideoRecord, VideoRow, drop_nulls

# Columns of every row: the columns of ``pipeline.ray_dataset``, status, error_class and error_message.
_TOKENS = pa.schema(
    [
        *((name, pa.string()) for name in ("video_id", "status", "error_class", "error_message", "metadata")),
        ("hidden_size", pa.int32()),
        *((name, pa.list_(pa.int32())) for name in ("index", "rank", "frame")),
        ("merged", pa.list_(pa.bool_())),
        ("density", pa.list_(pa.float32())),
    ]
)
_RECORD = pa.struct([field.with_nullable(True) for field in VIDEO_SCHEMA])
_DECODED_SCHEMA = pa.schema([("record", _RECORD), ("frames", BYTES)])
_ANYWHERE = Roots([Path("/")], ["s3://"])  # whoever makes the rows decides which files are read


def prune_stages(**options: Any) -> PruneStages:
    """Check model, sampling and method, and return the settings for ``DecodeVideos`` and ``EncodeVideos``.

    If there are GPUs, reserve ``num_gpus=1`` instead of CPUs for encoders. With ``max_concurrency=2``, a worker of
    either stage fetches or passes on one video while it works on another. Nothing is cached or resumed;
    ``prune_videos`` does that. ``pipeline/examples/own_stages.py`` is an example.

    Args:
        options: the options of ``python -m jobs.prune --help-all`` that concern one video, ``decode_timeout`` and
            ``decode_memory``.

    Raises:
        UsageError: an option is unknown or invalid, or the model or method cannot be used.
    """
    config = make_config(PruneConfig, "prune_stages", options, VIDEO_OPTIONS | {"decode_timeout", "decode_memory"})
    return resolve_recipe(config).stages(config.device, config.dtype)


class DecodeVideos:
    """A callable for ``map_batches`` that decodes videos: Arrow batches with video_id, uri, start_s, end_s -> frames.

    The output, for ``EncodeVideos``, has a row per video with two columns. ``record`` is the row of the videos table so
    far; its ``manifest`` is the JSON of the other input columns. ``frames`` has the bytes of [F,height,width,3] uint8
    for the model; it is null if the video failed (``record["status"]`` is "failed"). Any local file and S3 object may
    be read. Decoding runs in a child process.
    """

    def __init__(self, stages: PruneStages) -> None:
        self._decoder = Decoder(stages.decode)
        self._named_videos = ManifestConverter("videos", Path.cwd(), _ANYWHERE)

    def close(self) -> None:
        """End the child process, which otherwise ends with its worker."""
        self._decoder.close()

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Decode the videos of a batch, and yield a table of one row for each.

        Raises:
            ManifestError: a row is not a valid video, or the batch cannot be read.
        """
        with convert_row_errors("videos", "a manifest", ManifestError):
            parts = iter_given_batches("videos", batch, "video_id and uri")
            rows = [self._named_videos.convert(part) for part in parts]
        videos = pa.Table.from_batches(rows, MANIFEST_SCHEMA)
        todo = videos.append_column("attempts", pa.array([1] * len(videos), pa.int32()))
        for bundle in self._decoder.decode(todo):
            records = pa.array([video.record for video in unpack_batch(bundle)], _RECORD)
            yield pa.table([records, bundle["frames"].chunk(0).flatten()], schema=_DECODED_SCHEMA)


class EncodeVideos:
    """A callable for ``map_batches`` that encodes and prunes the output of ``DecodeVideos``; it yields a row per video.

    The columns are those of ``pipeline.ray_dataset``, with tokens in ascending position, and ``status``,
    ``error_class`` and ``error_message``. A failed video has nulls instead of tokens. Each worker loads one vision
    tower.
    """

    def __init__(self, stages: PruneStages) -> None:
        """Load the vision tower, and build the schema of the output, which depends on the model."""
        self._encoder = Encoder(stages.encode)
        levels = family_of(stages.encode.source).static().deepstack_levels
        self._schema = _TOKENS.append(pa.field("tokens", pa.large_binary()))
        for level in range(levels):
            self._schema = self._schema.append(pa.field(f"deepstack_{level}", pa.large_binary()))

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Encode each row of the batch, and yield a table of one row for it."""
        for part in batch.to_batches():
            for number, row in enumerate(part["record"].to_pylist()):
                frames = read_cell(part["frames"], number, np.uint8)
                item = VideoItem(drop_nulls(row, VideoRecord), frames=frames)
                yield from map(self._make_row, self._encoder.encode([item]))

    def _make_row(self, video: VideoItem) -> pa.Table:
        """Convert an encoded or failed video to a table of one row, with tokens in ascending position."""
        row = parse_json_columns(cast(VideoRow, {name: video.record.get(name) for name in VIDEO_SCHEMA.names}))
        row_columns: dict[str, Any] = {
            name: row[name] for name in ("video_id", "status", "error_class", "error_message")
        }
        row_columns["metadata"] = json.dumps(row)
        if (kept_tokens := video.kept) is None:
            return pa.Table.from_pylist([row_columns], schema=self._schema)
        order = np.argsort(kept_tokens.index, kind="stable")
        numbers = {name: getattr(kept_tokens, name) for name in ("index", "rank", "merged", "density")}
        numbers["frame"] = kept_tokens.index // row["tokens_per_frame"]
        vectors = {
            "tokens": kept_tokens.tokens,
            **{f"deepstack_{n}": level for n, level in enumerate(kept_tokens.deepstack)},
        }
        row_columns = {
            **row_columns,
            "hidden_size": kept_tokens.tokens.shape[1],
            **{name: None if values is None else values[order] for name, values in numbers.items()},
            **{name: values[order].tobytes() for name, values in vectors.items()},
        }
        return pa.Table.from_pylist([row_columns], schema=self._schema)
