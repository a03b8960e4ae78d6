"""Units of work: consecutive videos of containers that one worker reads, in one request where they lie together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

RANGE_BYTES = 2**28  # most bytes of a unit of several videos
UNITS_AHEAD = 4  # units of what is left that each worker could get


def units(
    videos: pa.Table, workers: int, most_videos: int, bundle: int = 1, row_group: int = 1, later_bytes: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each unit of ``videos`` (MANIFEST_SCHEMA), which follow from their order and sizes alone.

    A unit has at most RANGE_BYTES and ``most_videos``. Units become smaller towards the end, so that few videos wait
    for a slow worker when the others have none left. Each has whole bundles of ``bundle`` videos, and whole row groups
    of ``row_group`` rows where tables have such, as far as that is possible. Behind ``videos`` come others of
    ``later_bytes``, presumably of like size.
    """
    n_videos = len(videos)
    ends = np.concatenate([[0], np.cumsum(pc.fill_null(videos["size"], 0).to_numpy())])
    heads = _heads(videos, row_group) if row_group > 1 else None
    start, share = 0, UNITS_AHEAD * workers
    later_videos = later_bytes * n_videos // int(ends[-1]) if ends[-1] else 0  # tables do not tell sizes
    while start < n_videos:
        room = min(RANGE_BYTES, (ends[-1] - ends[start] + later_bytes) // share)
        by_bytes = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1 - start
        length = max(1, min(by_bytes, most_videos, -(-(n_videos + later_videos - start) // share)))
        stop = start + -(-length // bundle) * bundle
        if heads is not None:  # the last row group that begins in the unit, or the next one, is the next unit's
            later = heads[np.searchsorted(heads, start, side="right") :]
            place = int(np.searchsorted(later, stop, side="right"))
            stop = int(later[max(0, place - 1)]) if len(later) else n_videos
            stop = min(stop, start + most_videos)
        yield start, min(stop, n_videos)
        start = min(stop, n_videos)


def _heads(videos: pa.Table, row_group: int) -> NDArray[np.int64]:
    """Return the places of the videos with which a row group begins; each member of a tar or zip is its own."""
    offsets = pc.fill_null(videos["source_offset"], 0).to_numpy()
    groups = offsets // row_group
    new = (groups[1:] != groups[:-1]) | (offsets[1:] < offsets[:-1])
    return np.flatnonzero(np.concatenate([[True], new]))
