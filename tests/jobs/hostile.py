"""Workers that count, crash or hang, for tests of what that may cost. Ray imports this module: it stays light."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.runner.heartbeat import Heartbeat
from pipeline.video.decoders import PyavDecoder
from pipeline.video.probe import VideoIndex


class CountedDecoder(PyavDecoder):
    """Notes every call in a file beside the video: its name and the process that holds the decode child."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        path = Path(self._index.path)
        with (path.parent / "calls").open("a") as log:
            log.write(f"{path.name} {os.getppid()}\n")
        time.sleep(0.03)  # so that there is a middle to be killed in
        yield from super().read(indices)


class HostileReader(CountedDecoder):
    """Dies, hangs or eats memory on the files whose name says so."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        yield from super().read(indices)
        name = Path(self._index.path).name
        if name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("abort"):
            os.abort()
        if name.startswith("hang"):
            time.sleep(3600)
        hoard = []
        while name.startswith("bomb"):
            hoard.append(np.ones(2**26, np.uint8))


class MountedElsewhere(CountedDecoder):
    """Finds no file, at once: on nodes with BAD_NODE in their environment, in one worker if there is a folder bad."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        path = Path(self._index.path)
        bad = path.parent / "bad"
        if "BAD_NODE" in os.environ or (bad.exists() and self._is_mine(bad)):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        yield from super().read(indices)

    @staticmethod
    def _is_mine(bad: Path) -> bool:
        """Return whether this is the bad worker: the first to ask once another has read a video.

        Earlier there would be nobody who does better, however many of its videos failed. A worker is known by its fork
        server, the parent of this process.
        """
        me, calls = f"{os.getppid()}", bad.parent / "calls"
        if not calls.exists() or {line.split()[-1] for line in calls.read_text().splitlines()} <= {me}:
            return False
        with suppress(FileExistsError), (bad / "worker").open("x") as file:
            file.write(me)
        return (bad / "worker").read_text() in ("", me)


class SlowDecoder(PyavDecoder):
    """Has videos in hand most of the time."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        time.sleep(0.3)
        yield from super().read(indices)


class PatientDecoder(PyavDecoder):
    """Takes three seconds for each video until a file named quick is beside them."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not Path(self._index.path).with_name("quick").exists():
            time.sleep(0.05)
        yield from super().read(indices)


class StuckDecoder(PyavDecoder):
    """Lets as many videos through, in whatever order they come, as a file named stuck beside them says.

    Once that says something else, a worker that a killed driver left goes on, and ends.
    """

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        path = Path(self._index.path)
        stuck = path.with_name("stuck")
        number = stuck.read_text()
        through = path.with_name(f"through-{number}")
        through.mkdir(exist_ok=True)
        while len(list(through.iterdir())) >= int(number) and stuck.read_text() == number:
            time.sleep(0.1)
        (through / path.stem).touch()
        yield from super().read(indices)


class CountedStuckDecoder(CountedDecoder, StuckDecoder):
    """Notes every call, and lets no more videos through than the file says."""


class AwayDecoder(PyavDecoder):
    """Finds no file, after a while."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        time.sleep(0.5)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", self._index.path)


class MarkingDecoder(PyavDecoder):
    """Leaves a mark beside every file that is opened."""

    def __init__(self, index: VideoIndex) -> None:
        Path(f"{index.path}.opened").touch()
        super().__init__(index)


class HangingAnswerer:
    """In place of the real one: it takes a question and never answers it."""

    def __init__(self, setup: object, heartbeats: object) -> None:
        self._heartbeat = Heartbeat("answer", heartbeats)

    def __call__(self, batch: pa.Table) -> pa.Table:
        with self._heartbeat.holding("q00"):
            time.sleep(3600)
        return batch
