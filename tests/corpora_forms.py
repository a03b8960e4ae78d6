"""Fetch videos out of containers without decoding them, and kill a run over tars five times.

``python -m tests.corpora_forms DIR`` makes 240 videos of 1 MiB in DIR (once; most of each is a box that holds nothing,
so that files are as large as real ones), and prints what fetching them costs a core. Then it prunes them from 40 tars
with a model that costs next to nothing, and kills the run. ``--kills 0`` leaves that out.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import TokenCache
from pipeline.inputs.container import Asked
from pipeline.inputs.forms import Containers, spot_of
from pipeline.inputs.indexes import Indexing
from pipeline.inputs.manifest import read_manifest
from pipeline.storage.s3 import Objects
from tests.jobs.jobs import committed, start
from tests.paths import ROOT
from tests.pipeline.tars import write_tar

VIDEOS, TARS = 240, 40
PADDING = 2**20
OPTIONS = ["--model", "tiny", "--num-frames", "8", "--decode-workers", "2", "--encode-workers", "1"]


def main() -> None:
    """Run all of it in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    videos = made(arguments.folder)
    fetched(arguments.folder)
    if arguments.kills:
        killed(arguments.folder, videos, arguments.kills)


def fetched(root: Path) -> None:
    """Fetch the videos of each container on disk as workers do, without decoding, and print the core seconds."""
    for name, column in (("all.tar", None), ("all.parquet", "video")):
        indexing = Indexing(Asked(column))
        rows = read_manifest(str(root / name), indexing=indexing).to_pylist()
        spots = [spot_of(row["uri"], row["source_offset"], row["size"]) for row in rows]
        n_bytes, took = 0, []
        for _ in range(3):
            started, n_bytes = time.process_time(), 0
            for first in range(0, len(spots), max(indexing.unit, 30)):
                unit = [spot for spot in spots[first : first + max(indexing.unit, 30)] if spot is not None]
                with Containers(Objects(), unit) as opened:
                    for spot in unit:
                        with os.fdopen(os.memfd_create("video"), "wb", buffering=0) as file:
                            n_bytes += opened.fetch(spot, file.write, 2**40)
            took.append(time.process_time() - started)
        print(f"{name}: {n_bytes:,} bytes of {len(spots)} videos fetched in {min(took):.2f} core seconds")


def made(root: Path) -> list[Path]:
    """Make the videos and pack them; return their files."""
    data = root / "shapes" / "data"
    if not data.is_dir():
        command = ["jobs.testbed", "make", str(root / "shapes"), "--videos", str(VIDEOS), "--durations", "short"]
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True)
        for number, path in enumerate(sorted(data.glob("*.mp4"))):
            with path.open("ab") as file:
                file.write(PADDING.to_bytes(4, "big") + b"free" + random.Random(number).randbytes(PADDING - 8))
    videos = sorted(data.glob("*.mp4"))
    files = {path.name: path.read_bytes() for path in videos}
    write_tar(root / "all.tar", files)
    table = pa.table({"video": list(files.values()), "video_id": list(files)})
    pq.write_table(table, root / "all.parquet", row_group_size=40)
    (root / "tars").mkdir(exist_ok=True)
    for number in range(TARS):
        write_tar(root / "tars" / f"{number:02}.tar", dict(list(files.items())[number::TARS]))
    return videos


def killed(root: Path, videos: list[Path], kills: int) -> None:
    """Kill a run over the tars at random moments, and count what was there before and after each."""
    out, draw = root / "killed", random.Random(39)
    shutil.rmtree(out, ignore_errors=True)
    argv = ["jobs.prune", str(root / "tars"), "--out", str(out), "--flush-seconds", "1", "--videos-per-shard", "8"]
    before: set[str] = set()
    for number in range(kills):
        process = start(*argv, *OPTIONS)
        wanted, until = len(before) + draw.randint(8, 40), time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until and len(done(out)) < wanted:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=120)
        time.sleep(3)  # workers that outlive the driver by a moment may still write
        now = done(out)
        assert before <= now, "a video is gone"
        print(f"kill {number + 1}: {len(before)} -> {len(now)} videos", file=sys.stderr)
        before = now
    process = start(*argv, *OPTIONS)
    output, _ = process.communicate(timeout=600)
    skipped = re.search(r"(\d+) of \d+ videos are in the cache already", output)
    ids = committed(TokenCache(out).store)
    assert process.returncode == 0 and len(ids) == len(set(ids)) == len(videos), output[-2000:]
    assert skipped is not None and int(skipped[1]) == len(before)
    print(f"\nkilled {kills} times: {len(ids)} rows of {len(set(ids))} videos; the last run skipped {skipped[1]}")


def done(cache: Path) -> set[str]:
    """Return the ids that are visible."""
    with suppress(Exception):  # no header yet
        return set(TokenCache(cache).video_ids)
    return set()


if __name__ == "__main__":
    main()
