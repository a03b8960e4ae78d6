"""Describe what a child process runs over so many videos; as a command, be that child process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

SIDE = 384  # pixels: of the clips, and of what LLaVA-OneVision's preprocessing makes of them
FRAME_BYTES = 3 * SIDE**2
TOKENS_PER_FRAME, HIDDEN, RATIO = 196, 64, 0.25  # as of the model "tiny"
KEPT_BYTES_PER_FRAME = int(RATIO * TOKENS_PER_FRAME) * HIDDEN * 2
LOOP, JOB, SINGLE, DECODE, DRIVER = "plain loop", "job", "single process", "decode alone", "driver"
SIMULATION = "simulation"
FOLDER, TAR, TARS, COLUMN = "folder", "one tar", "tars", "column"  # forms of a corpus
BUCKET = "forms"
_ROOMS = {JOB: "job", DECODE: "decode_alone", DRIVER: "driver", SIMULATION: "simulation"}


@dataclass(frozen=True)
class Work:
    """The description of one child process's work: which loop or job, on how many videos.

    Attributes:
        kind: LOOP is a DataLoader with workers, SINGLE one without, DECODE that stage of the JOB, DRIVER the JOB with
            stages that do nothing, SIMULATION the driver of the JOB without the stages.
        frames: of each video.
        work_s: what an encoder sleeps for each video.
        workers: that decode.
        encoders: of the job; the plain loop has a process for each.
        nodes: logical ones; 0 is a Ray as the job starts it by itself.
        folder: has the videos, and gets the results.
        request_s: seconds before each request to the store of a SIMULATION, as a distant store would take.
        form: of videos of the JOB of 1 MiB each; "" for a manifest whose rows all name one clip.
        on_s3: whether these lie on a server of the S3 protocol.
    """

    kind: str
    frames: int
    work_s: float
    workers: int
    encoders: int = 1
    nodes: int = 0
    folder: str = ""
    videos: int = 0
    request_s: float = 0.0
    form: str = ""
    on_s3: bool = False

    @property
    def name(self) -> str:
        """Name what is measured, among other works."""
        return f"{self.form}{' on S3' if self.on_s3 else ''}" or self.kind

    @property
    def named(self) -> dict[str, str]:
        """Return the job's options that name the videos."""
        if not self.form:
            return {"videos": str(self.manifest)}
        place = f"s3://{BUCKET}" if self.on_s3 else self.folder
        return {"videos": f"{place}/{self.form}/", **({"column": "video"} if self.form == COLUMN else {})}

    @property
    def manifest(self) -> Path:
        """The manifest of the work's videos."""
        return Path(self.folder) / "manifest.jsonl"

    @property
    def out(self) -> Path:
        """The folder for results."""
        return Path(self.folder) / "out"


def main() -> None:
    """Run the work of the command line; print what was measured as the last line."""
    work = Work(**json.loads(sys.argv[1]))
    room = _ROOMS.get(work.kind, "loop")
    print(json.dumps(import_module(f"jobs.benchmark.pipeline.{room}").run(work)))


if __name__ == "__main__":
    main()
