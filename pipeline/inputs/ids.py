"""The ids of a run's videos: a later video of the same id costs an error row, and never the run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pipeline.inputs.container import fault
from pipeline.keys import column_keys, find, repeated

OWN_IDS = "name the folder that holds both containers, or give rows a column video_id of other values"
_BEFORE, _BEHIND = fault("corrupt", "an earlier video has the id "), f" already; {OWN_IDS}"


class Ids:
    """The ids of all videos so far, as hashes of 16 bytes."""

    def __init__(self) -> None:
        self._high, self._low = np.empty(0, np.uint64), np.empty(0, np.uint64)  # sorted by the first

    def repeated(self, videos: pa.Table) -> NDArray[np.bool_]:
        """Return which videos (MANIFEST_SCHEMA) have the id of an earlier one; files come before all members."""
        keys, member = column_keys(videos["video_id"]), pc.is_valid(videos["source_offset"]).to_numpy()
        return repeated(keys, member) | (find(keys, self._high, self._low) >= 0)

    def told_apart(self, videos: pa.Table, again: NDArray[np.bool_] | None = None) -> pa.Table:
        """Return the videos, with an error and an id of its own (ID@URI) for each that is ``repeated``."""
        again = self.repeated(videos) if again is None else again
        if not again.any():
            return videos
        ids, mask = videos["video_id"], pa.array(again)
        why = pc.coalesce(videos["fault"], pc.binary_join_element_wise(_BEFORE, ids, _BEHIND, ""))
        own = {
            "video_id": pc.if_else(mask, pc.binary_join_element_wise(ids, videos["uri"], "@"), ids),
            "fault": pc.if_else(mask, why, videos["fault"]),
        }
        return pa.table([own.get(name, videos[name]) for name in videos.column_names], schema=videos.schema)

    def add(self, videos: pa.Table) -> None:
        """Add the ids of videos that were told apart."""
        keys = column_keys(videos["video_id"])
        keys = keys[np.argsort(keys[:, 0])]
        places = np.searchsorted(self._high, keys[:, 0])
        self._high, self._low = np.insert(self._high, places, keys[:, 0]), np.insert(self._low, places, keys[:, 1])
