"""What a child process is to run over so many videos, and what it answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SIDE = 384  # pixels: of the clips, and of what LLaVA-OneVision's preprocessing makes of them
FRAME_BYTES = 3 * SIDE**2
TOKENS_PER_FRAME, HIDDEN, RATIO = 196, 64, 0.25  # of the model "tiny"
KEPT_BYTES_PER_FRAME = int(RATIO * TOKENS_PER_FRAME) * HIDDEN * 2


@dataclass(frozen=True)
class Work:
    """What a child process is to do.

    Attributes:
        kind: "job", "loop" (a DataLoader with workers), "single" (a loop without) or "decode" (that stage alone).
        videos: how many.
        frames: of each.
        work_s: what the encoder sleeps for each.
        workers: that decode.
        encoders: of the job; the loops have one.
        nodes: logical ones, of two CPUs each; 0 is a Ray as the job starts it by itself.
        folder: has the clips, and gets the results.
    """

    kind: str
    videos: int
    frames: int
    work_s: float
    workers: int
    encoders: int = 1
    nodes: int = 0
    folder: str = ""

    @property
    def manifest(self) -> Path:
        return Path(self.folder) / f"{self.videos}-of-{self.frames}.jsonl"

    @property
    def out(self) -> Path:
        return Path(self.folder) / "out"


@dataclass(frozen=True)
class Answer:
    """What a child process measured.

    Attributes:
        seconds: from where everything is loaded, and Ray runs, to the last file.
        store_bytes: that were made in Ray's object stores.
        store_objects: how many objects these were.
    """

    seconds: float
    store_bytes: int = 0
    store_objects: int = 0


def answer(run: Callable[[Work], Answer], argv: Sequence[str] | None = None) -> None:
    """Run the work that the command line describes, and print the answer as the last line."""
    (described,) = sys.argv[1:] if argv is None else argv
    print(json.dumps(asdict(run(Work(**json.loads(described))))))
