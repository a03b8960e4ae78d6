"""The write stage: an actor writes the kept tokens of encoded videos as a token shard, without torch."""

from __future__ import annotations

import pyarrow as pa
from ray.actor import ActorHandle

from pipeline.cache.codecs import BFLOAT16, CODECS
from pipeline.cache.writer import write_token_shard
from pipeline.prune.batches import pack_written, unpack_batch
from pipeline.runner.worker_heartbeat import Heartbeat
from pipeline.storage.stores import Store


class Writer:
    """The write actor. A Ray task would cost more for its process, which ends when idle, than for writing a shard."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        heartbeats: ActorHandle | None = None,
        codec: str = BFLOAT16.name,
    ) -> None:
        """Start the heartbeat.

        Args:
            heartbeats: the actor that collects the workers' reports; None for no reports.

        Raises:
            WorkerGivenUp: too many processes of this worker have crashed.
        """
        self._store = store
        self._run_id = run_id
        self._codec = CODECS[codec]
        self._heartbeat = Heartbeat("write", heartbeats)
        self._heartbeat.start()

    def write(self, *bundles: pa.Table) -> pa.Table:
        """Write the videos in rows of BATCH_SCHEMA as one token shard; return a row of WRITTEN_SCHEMA for every video.

        Failed videos have rows too. If no video is ok, no shard is written.

        Raises:
            OSError: the store fails; it is reported to the heartbeats first, and ends the run.
        """
        videos = [video for batch in bundles if len(batch) for video in unpack_batch(batch)]
        with self._heartbeat.hold_items(*(video.record["video_id"] for video in videos)) as items:
            try:
                rows = write_token_shard(videos, store=self._store, run_id=self._run_id, codec=self._codec)
            except OSError as error:  # the store is at fault, not a video, so the run ends
                self._heartbeat.fail(f"{type(error).__name__}: {error}")
                raise
            items.release(n=len(videos))
        return pack_written(rows)
