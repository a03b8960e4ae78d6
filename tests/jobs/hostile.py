"""Workers that crash or hang, for tests of what that may cost. Ray imports this module: it stays light."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.probe import VideoIndex
from pipeline.pulse import Beat
from pipeline.readers import PyavReader


class HostileReader(PyavReader):
    """Crashes or hangs on the files whose name says so."""

    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        name = Path(self._index.path).name
        if name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("hang"):
            time.sleep(3600)
        return super().read(indices)


class MarkingReader(PyavReader):
    """Leaves a mark beside every file that is opened."""

    def __init__(self, index: VideoIndex) -> None:
        Path(f"{index.path}.opened").touch()
        super().__init__(index)


class HangingAnswerer:
    """In place of the real one: it takes a question and never answers it."""

    def __init__(self, setup: object, pulse: object) -> None:
        self._beat = Beat("answer", pulse)

    def __call__(self, batch: pa.Table) -> pa.Table:
        with self._beat.holding("q00"):
            time.sleep(3600)
        return batch
