"""The write actor: the kept tokens of some videos become one token shard."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipeline.cache.writer import write_token_shard
from pipeline.execution.heartbeat import Beat
from pipeline.rows import records
from pipeline.storage.stores import Store


class Writer:
    """An actor although nothing is kept between shards: Ray ends the process of an idle task after a second, and
    starting another one, with all its imports, costs more than writing."""

    def __init__(self, store: Store, run_id: str, pulse: Any = None) -> None:
        self._store = store
        self._run_id = run_id
        self._beat = Beat("write", pulse)

    def __call__(self, batch: pa.Table) -> pa.Table:
        with self._beat.holding(*(record["video_id"] for record in records(batch))):
            return write_token_shard(batch, store=self._store, run_id=self._run_id)
