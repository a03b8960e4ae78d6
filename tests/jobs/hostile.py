"""A reader that crashes or hangs on the files whose name says so, for tests of what that may cost."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.readers import PyavReader


class HostileReader(PyavReader):
    def read(self, indices: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
        name = Path(self._index.path).name
        if name.startswith("crash"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if name.startswith("hang"):
            time.sleep(3600)
        return super().read(indices)
