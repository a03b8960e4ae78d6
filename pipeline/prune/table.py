"""The videos table of the cache that a run writes to."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from gstep.backbones import family_of
from pipeline.cache.changed_code import delete_superseded, restart_cache
from pipeline.cache.header import HEADER, compute_fingerprint, read_fingerprint, read_header, write_new_header
from pipeline.cache.live import Ledger
from pipeline.cache.merging import MAX_WAITING_AT_END, MAX_WAITING_FILES, merge_unless_damaged
from pipeline.cache.schema import VIDEOS
from pipeline.cache.writer import commit_rows
from pipeline.console import Say
from pipeline.errors import CorruptShard, RunFailed, UsageError, format_count, list_first_names
from pipeline.inputs.video_list import VideoList
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import Recipe
from pipeline.prune.resume import check_redo, restore_old_ids
from pipeline.prune.summary import format_lost
from pipeline.runner.run_record import list_committed_shards
from pipeline.storage.stores import Store


class CacheTable:
    """The rows of a cache, and the commits of a run to it.

    Attributes:
        ledger: the live rows, as of its last ``refresh``.
        committed: the token shards that earlier runs committed, by their records.
    """

    def __init__(self, store: Store, recipe: Recipe, run_id: str, say: Say) -> None:
        """Read the rows of the cache, and print warnings about lost rows and about files that are left out.

        The rows of the recipe's identity are read if the run restarts the cache, else those of the header's. Files of
        other identities, and files without a name of the table's, are left out and named; those of a superseded
        identity without a warning. The store may have no cache yet.

        Raises:
            NotACache, CorruptShard: the header, or a file of the table, cannot be read.
        """
        self.store = store
        self._run_id = run_id
        self._say = say
        self._header = b""  # the header of the cache at ``begin``
        self._made_with = ""
        self._n_unmerged = 0
        self.committed = list_committed_shards(store)
        identity = (
            compute_fingerprint(recipe.identity(recipe.dtype)) if recipe.is_restarted else read_fingerprint(store)
        )
        self.ledger = Ledger(store, identity).refresh()
        superseded = read_header(store).get("superseded", []) if store.exists(HEADER) else []
        if foreign := [name for name, made in self.ledger.foreign.items() if made not in superseded]:
            names = list_first_names(foreign, len(foreign))
            say(
                f"warning: left out: {format_count(len(foreign), 'file')} of {store}/{VIDEOS}, whose rows were made "
                f"with other settings than those of {HEADER}: {names}"
            )
        if strays := self.ledger.strays:
            names = list_first_names(strays, len(strays))
            say(
                f"note: left out: {format_count(len(strays), 'file')} in {VIDEOS}/, with no name of the table's: "
                f"{names}"
            )
        if lost_ids := self.ledger.lost(self.committed):
            say(f"warning: {format_lost(len(lost_ids), lost_ids)}")

    def begin(self, recipe: Recipe, dtype: str) -> None:
        """Write the header and empty ``ledger`` if the cache has no rows; remember the header for commits to compare.

        Raises:
            ModelError: the checkpoint lacks a tensor for the header.
        """
        if not self.store.names(VIDEOS, ".parquet"):
            write_new_header(self.store, recipe.header(dtype, family_of(recipe.source).static()))
            self.ledger = Ledger(self.store, read_fingerprint(self.store))  # the header may be new
        self._header = self.store.read(HEADER)
        self._made_with = compute_fingerprint(json.loads(self._header)["identity"])

    def commit(self, number: int, rows: pa.Table) -> None:
        """Make rows visible as commit ``number`` of the run. Call ``begin`` first.

        Raises:
            RunFailed: since ``begin``, the cache was deleted or replaced by another cache, or a token shard was
                removed.
            OSError: the store fails, or a token shard of the rows is missing.
        """
        try:
            header = self.store.read(HEADER)
        except FileNotFoundError:
            message = f"{self.store}: {HEADER} was deleted during this run, and the run's work with it"
            raise RunFailed(message) from None
        if header != self._header:
            raise RunFailed(
                f"{self.store}: another cache was started here during this run. This run writes nothing more"
            )
        commit_rows(self.store, self._run_id, number, rows, made_with=self._made_with)

    def merge_occasionally(self) -> None:
        """Merge small files of the table once in MAX_WAITING_FILES + 1 calls. A failure only warns."""
        self._n_unmerged += 1
        if self._n_unmerged > MAX_WAITING_FILES:
            merge_unless_damaged(self.store, self._made_with, MAX_WAITING_FILES, self._say)
            self._n_unmerged = 0

    def clean_up(self) -> None:
        """Delete the files of a user method's old code, and merge small files of the table; failures only warn."""
        try:
            delete_superseded(self.store, read_header(self.store))
        except (CorruptShard, OSError) as error:
            self._say(f"warning: the files of the old code were not deleted: {error}")
        merge_unless_damaged(self.store, read_fingerprint(self.store), MAX_WAITING_AT_END, self._say)


def restart_with_new_code(
    store: Store, recipe: Recipe, videos: VideoList, redo: pa.Array | None, config: PruneConfig, run_id: str, say: Say
) -> None:
    """Restart a cache whose user method has other code now: its old rows no longer count. Prints a note.

    A plan or dry run only checks and prints. No file is deleted here.

    Raises:
        UsageError: ids of ``--redo`` (``redo``) have no row or were removed; or the cache has tokens of videos that
            this run does not name, which would be lost (not checked while archives are left to index).
        CorruptShard: a file of the videos table is damaged.
    """
    ledger = Ledger(store, read_fingerprint(store)).refresh()
    if redo is not None:  # before the restart, after which no id has a row
        check_redo(redo, None, ledger, config)
    with_tokens = np.flatnonzero(ledger.columns["fault"] == 0)
    with_tokens = with_tokens[~ledger.removed(with_tokens)]
    unnamed_rows = np.setdiff1d(with_tokens, ledger.find(restore_old_ids(videos.known, ledger)["video_id"]))
    if len(unnamed_rows) and not videos.unindexed:
        example = ledger.read(int(unnamed_rows[0]))["video_id"]
        raise UsageError(
            f"--on-changed redo encodes a whole cache again, and {store} has {len(unnamed_rows)} videos that "
            f"{config.named} does not name, e.g. {example}: name them too, or another --out"
        )
    say(f"note: {recipe.method} has other code now: its videos in {store} are encoded again")
    if not (config.dry_run or config.plan):
        restart_cache(store, read_header(store), recipe.identity(recipe.dtype), run_id)
