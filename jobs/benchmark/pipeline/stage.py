"""Run the decode stage by itself, with all of its workers and nobody who waits: a child process of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pyarrow as pa

from gstep.backbones import ModelSource, family_of
from jobs.benchmark.pipeline.work import Answer, Work, answer
from pipeline.inputs.manifest import read_manifest
from pipeline.prune.decode_stage import DecodeSetup, VideoDecoder
from pipeline.prune.resume import TODO_SCHEMA
from pipeline.rows import TodoRow
from pipeline.video.sampling import Sampling


def run(work: Work) -> Answer:
    """Decode the videos of a work, each worker its share, and drop the frames."""
    manifest = read_manifest(str(work.manifest))
    rows: list[TodoRow] = manifest.append_column(
        TODO_SCHEMA.field("attempts"), pa.repeat(1, len(manifest)).cast(pa.int32())
    ).to_pylist()
    setup = DecodeSetup(Sampling(num_frames=work.frames), family_of(ModelSource.resolve("tiny")).preprocessor())
    with ExitStack() as stack:
        decoders = [stack.enter_context(closing(VideoDecoder(setup))) for _ in range(work.workers)]
        threads = stack.enter_context(ThreadPoolExecutor(work.workers))
        for decoder in decoders:  # the first video starts the child
            _decode(decoder, rows[:1])
        started = time.perf_counter()
        shares = [rows[first :: work.workers] for first in range(work.workers)]
        list(threads.map(_decode, decoders, shares))
        return Answer(time.perf_counter() - started)


def _decode(decoder: VideoDecoder, rows: Sequence[TodoRow]) -> None:
    for row in rows:
        with decoder.open(row) as source:
            record, _ = decoder.decode_one(row, source)
        assert record["status"] == "ok", record


if __name__ == "__main__":
    answer(run)
