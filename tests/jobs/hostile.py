"""Workers that count, crash or hang, for tests of what that may cost. Ray imports this module: it stays light."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.video.decoders import PyavDecoder
from pipeline.video.probe import VideoIndex
from tests.waiting import wait_until


class CountedDecoder(PyavDecoder):
    """Notes every call in a file beside the video: its name and the process that holds the decode child."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        path = Path(self._index.path)
        with (path.parent / "calls").open("a") as log:
            log.write(f"{path.name} {os.getppid()}\n")
        time.sleep(0.03)  # so that there is a middle to be killed in
        yield from super().read(indices)


class HostileReader(CountedDecoder):
    """Dies, hangs or reserves memory on the files whose name says so.

    The memory is not written to, which takes long on a busy machine: the limit of time is for what hangs.
    """

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
            hoard.append(np.empty(2**26, np.uint8))


class MountedElsewhere(CountedDecoder):
    """Finds no file: on nodes with BAD_NODE in their environment, in one worker if there is a folder roles.

    Each side waits for the other, by files beside the videos, whichever starts first: it fails once there is a file
    named held, and the other workers keep the videos in hand that they have read until there is one named failed.
    """

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        path = Path(self._index.path)
        roles = path.with_name("roles")
        if "BAD_NODE" in os.environ or (roles.exists() and self._is_bad(roles)):
            wait_until(path.with_name("held").exists, "a video in the hand of a worker that reads")
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        yield from super().read(indices)
        wait_until(path.with_name("failed").exists, "failures of the others")

    @staticmethod
    def _is_bad(roles: Path) -> bool:
        """Return whether this is the bad worker: the second to ask, so that there is one which does better.

        A worker is known by its fork server, the parent of this process. A link has its content from the start.
        """
        me = f"{os.getppid()}"
        for role in ("good", "bad"):
            with suppress(FileExistsError):
                (roles / role).symlink_to(me)
            if (roles / role).readlink() == Path(me):
                return role == "bad"
        return False


class SlowDecoder(PyavDecoder):
    """Has videos in hand most of the time."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        time.sleep(0.3)
        yield from super().read(indices)


class PatientDecoder(PyavDecoder):
    """Takes three seconds for each video, or a hundred beside a file named slow, until one named quick is there."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        path = Path(self._index.path)
        deadline = time.monotonic() + (100 if path.with_name("slow").exists() else 3)
        while time.monotonic() < deadline and not path.with_name("quick").exists():
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


def let_through(videos: Path, number: int) -> None:
    """Tell the StuckDecoders of a folder of videos how many they may let through; no worker reads half of it."""
    (videos / "stuck.next").write_text(str(number))
    (videos / "stuck.next").replace(videos / "stuck")


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
