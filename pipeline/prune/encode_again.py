"""Decode a cached video again from its source, with the settings of the run that made the cache."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.reader import TokenCache
from pipeline.errors import ReplacedSource, VideoFault
from pipeline.inputs.forms import make_member_fetcher
from pipeline.inputs.named_videos import Roots
from pipeline.options import check_options
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import VideoDecoder
from pipeline.rows import VideoRecord, VideoRow, make_todo_row
from pipeline.runner.run_record import RUNS, RunRecord
from pipeline.storage.s3 import Objects
from pipeline.video.source import prepare_unchanged_source


def read_run_config(cache: TokenCache, run: RunRecord, model: str | None) -> PruneConfig:
    """Build the options to encode videos of a cache again, from the record of a run.

    Secrets and options that this version does not have are dropped. ``out`` is the cache; ``decoder``, ``device``,
    ``dtype`` and ``attn`` are "auto".

    Args:
        model: the current location of the model; None takes it from the record.

    Raises:
        UsageError: an option in the record is invalid.
    """
    names = {item.name for item in fields(PruneConfig) if not item.metadata.get("secret")}
    options = {name: value for name, value in run.get("config", {}).items() if name in names}
    own_options = {"out": str(cache.store), **dict.fromkeys(("decoder", "device", "dtype", "attn"), "auto")}
    options_here = {**options, **own_options, **({"model": model} if model else {})}
    return PruneConfig(**check_options(PruneConfig, options_here, f"{cache.store}/{RUNS}/{run.get('run_id')}.json: "))


def decode_again(
    row: VideoRow, decoder: VideoDecoder, objects: Objects, roots: Roots
) -> tuple[VideoRecord, NDArray[np.uint8]]:
    """Decode a cached video again from its source, and return its record and frames [t,h,w,3].

    Args:
        roots: the folders and prefixes from which sources may be read.

    Raises:
        VideoFault: class "policy" if the source is not below ``roots``; "io" if it is missing or cannot be read, or the
            row does not state its size and hash; another class if decoding fails.
        ReplacedSource: the source has another size or hash, or fetching it failed with a fault other than "io".
    """
    where = row["uri"], row["start_s"], row["end_s"], row["source_size"]
    todo = make_todo_row(row["video_id"], *where, row["attempts"], row["source_offset"])
    with prepare_unchanged_source(row, objects, make_member_fetcher(row, objects, roots)) as source:
        record, frames = decoder.decode_row(todo, source)
    if frames is None:
        raise VideoFault(record["error_class"], record["error_message"])
    if record["source_hash"] != row["source_hash"]:
        raise ReplacedSource("the source has changed since: its hash is another one")
    return record, frames
