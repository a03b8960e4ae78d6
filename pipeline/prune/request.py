"""A checked request to prune videos, which runs, dry runs and plans begin with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa
from rich.console import Console

from pipeline.cache.header import refuse_occupied_location
from pipeline.console import Say, make_speaker
from pipeline.errors import UsageError, convert_store_usage_errors
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.manifest import convert_given_videos
from pipeline.inputs.video_list import First, VideoList
from pipeline.options import read_ids
from pipeline.prune.config import PruneConfig
from pipeline.prune.manifest_checks import refuse_forbidden, refuse_other_files
from pipeline.prune.recipe import Recipe, resolve_recipe
from pipeline.prune.resume import check_redo, format_skipped, restore_old_ids, select_slice
from pipeline.prune.table import CacheTable, restart_with_new_code
from pipeline.prune.todo import Todo, TodoSelection
from pipeline.runner.run_record import check_out_folder
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import Store, store_at


@dataclass(frozen=True)
class Request:
    """A request whose options, videos and model fit together and fit the cache.

    Attributes:
        store: the cache.
        videos: all listed videos, of all values of ``--shard``.
        redo: the ids in the file of ``--redo``; None without it.
    """

    config: PruneConfig
    console: Console
    store: Store
    objects: Objects
    videos: VideoList
    redo: pa.Array | None
    recipe: Recipe

    def match_cache(self) -> Request:
        """Return the request adapted to the current state of the cache, which another run may have written to.

        Raises:
            IdentityMismatch: the cache has another identity.
            NotACache, CorruptShard: the cache cannot be read.
        """
        return replace(self, recipe=self.recipe.match_cache(self.store, self.console))

    def select_todo(self, run_id: str) -> tuple[CacheTable, Todo]:
        """Read the rows of the cache, and select the videos to process; print notes on skipped videos.

        A run also deletes removed videos from the kept indexes of archives, and restarts the cache with a new header if
        ``recipe.is_restarted``. Plans and dry runs write nothing.

        Raises:
            UsageError: ids of ``--redo`` are wrong, cached videos have changed (SourceChanged), a restart would lose
                videos, or a store does not answer.
            CorruptShard: a file of the videos table is damaged.
            OSError: the store of the cache fails.
        """
        say = make_speaker(self.console)
        if self.recipe.is_restarted:
            restart_with_new_code(self.store, self.recipe, self.videos, self.redo, self.config, run_id, say)
        table = CacheTable(self.store, self.recipe, run_id, say)
        if self.redo is not None and not self.recipe.is_restarted:
            known = None if self.videos.unindexed else restore_old_ids(self.videos.known, table.ledger)
            check_redo(self.redo, known, table.ledger, self.config)
        selection = TodoSelection(self.config, self.videos, table.ledger, self.redo)
        todo = Todo(*selection.select(self.videos.known), selection)
        for line in format_skipped(todo.tally, self.config):
            say(line)
        return table, todo


def check_request(config: PruneConfig, console: Console, given: object = None) -> Request:
    """Check the options, list the videos, and resolve model and method; print notes for the user.

    Imports user code, downloads missing small files of a Hugging Face model, and in a run stores indexes of archives.

    Args:
        given: paths, or rows with video_id and uri; None if ``config.videos`` names the videos.

    Raises:
        UsageError: the request cannot be carried out, or a store fails.
        RunFailed: an index of an archive cannot be kept.
        CorruptShard: a file of the videos table is damaged.
    """
    say = make_speaker(console)
    objects = Objects.from_environment(config.s3_endpoint, config.s3_requester_pays)
    store = store_at(config.out, objects)
    check_out_folder(store)
    redo = None if config.redo is None else pa.array(read_ids("redo", config.redo), pa.string())
    with convert_store_usage_errors():
        refuse_occupied_location(store)
        videos = _list_videos(config, store, objects, given, say)
    recipe = resolve_recipe(config, objects)
    if config.retention_ratio not in (recipe.retention_ratio, PruneConfig.retention_ratio):
        kept = f"{recipe.retention_ratio:g} of the tokens, not {config.retention_ratio:g}"
        say(f"note: --pruner {config.pruner} keeps {kept}")
    with convert_store_usage_errors():
        return Request(config, console, store, objects, videos, redo, recipe).match_cache()


def _list_videos(config: PruneConfig, store: Store, objects: Objects, given: object, say: Say) -> VideoList:
    """List the videos that the options or the caller name, and print notes on files that are left out.

    A run indexes the archives that cannot wait until it works, a plan all of them (unless ``--limit``), and a dry run
    those without a kept index only with ``--index``. Only a run stores new indexes in the cache.

    Raises:
        UsageError: the list cannot be made, has no video of ``--shard``, or has videos that may not be read (unless
            ``--on-forbidden record``).
        RunFailed: an index of an archive cannot be kept.
    """
    is_limited = config.limit is not None
    writes = not (config.dry_run or config.plan)
    indexes = Indexes(config.make_archive_options(), store, keeps=writes, say=say)
    if given is not None:
        videos = VideoList(convert_given_videos(given, config.video_root, objects), indexes, objects)
    else:
        first: First = "needed"
        if config.dry_run or (config.plan and not is_limited):
            first = "kept" if config.dry_run and not config.index else "all"
        videos = VideoList.read(config.videos, config.video_root, objects, indexes, first=first, is_limited=is_limited)
        for name in config.videos if len(config.videos) == 1 else ():
            refuse_other_files(videos.known, name, objects)
    for kind, remedy in indexes.left_out.remedies.items():
        say(f"note: left out: {indexes.left_out.describe(kind)}. {remedy}")
    own_videos = select_slice(videos.known, config.part())
    if len(videos.known) and not len(own_videos) and not videos.unindexed:
        raise UsageError(f"--shard {config.shard}: none of the {len(videos.known)} videos are in it")
    if config.on_forbidden == "refuse":
        refuse_forbidden(own_videos, config.named)
    return videos
