"""Where Ray's workers import this package from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path


@contextmanager
def workers_import_this() -> Iterator[None]:
    """Joining Ray puts the current folder first on the path of its workers, where a user's ``pipeline.py`` would hide
    this package. A driver that does not import from there itself (a console script) joins from the folder of this
    package instead.
    """
    if {"", str(Path.cwd())} & set(sys.path):
        yield
        return
    with chdir(Path(__file__).parents[2]):
        yield
