"""Run the job's decode stage by itself, with all of its workers and nobody who waits."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from gstep.backbones import ModelSource, family_of
from jobs.benchmark.pipeline.work import Work
from pipeline.inputs.manifest import read_manifest
from pipeline.prune.decode_stage import DecodeSetup, VideoDecoder
from pipeline.rows import TodoRow
from pipeline.video.sampling import Sampling


def run(work: Work) -> dict[str, float]:
    """Decode all videos with the job's decode workers alone, dropping the frames; return the seconds."""
    rows = [{**row, "attempts": 1} for row in read_manifest(str(work.manifest)).to_pylist()]
    setup = DecodeSetup(Sampling(num_frames=work.frames), family_of(ModelSource.resolve("tiny")).preprocessor())

    def decode(share: list[TodoRow]) -> None:
        with closing(VideoDecoder(setup)) as decoder:
            for row in share:
                with decoder.open(row) as source:
                    assert decoder.decode_one(row, source)[0]["status"] == "ok"

    started = time.perf_counter()
    with ThreadPoolExecutor(work.workers) as threads:
        list(threads.map(decode, [rows[first :: work.workers] for first in range(work.workers)]))
    return {"seconds": time.perf_counter() - started}
