"""Two caches of made-up videos with token shards of random bytes: merged by links, by copies, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from rich.table import Table

from jobs.benchmark.shown import figure_table, say
from jobs.benchmark.table.times import A_COMMIT, IDENTITY, begin_cache, make_table
from jobs.benchmark.timing import seconds_of
from pipeline.cache.header import fingerprint
from pipeline.cache.live_rows import TOKENS
from pipeline.cache.schema import digest
from pipeline.sharing.diff import compare
from pipeline.sharing.merge import merge_caches
from pipeline.storage.stores import LocalStore


class _OtherDisk(LocalStore):
    """A folder that takes no links, as one on another file system."""

    def link(self, name: str, file: Path) -> bool:
        return False


def measure(videos: int, shard_bytes: int, folder: Path) -> dict[str, float]:
    """Make two caches of ``videos`` each below ``folder``, merge and compare them.

    Returns wall seconds (``_s``) and bytes: of merging where token shards become links or are copied, and of comparing
    the first cache with the second and with what was merged.
    """
    first, second = LocalStore(folder / "first"), LocalStore(folder / "second")
    for place, store in enumerate((first, second)):
        say(f"making {store.root.name}: {videos:,} videos")
        _make(store, place * (videos - videos // 10), videos, shard_bytes, place)
    say("merging by links")
    link_s, linked = seconds_of(partial(merge_caches, [first, second], LocalStore(folder / "linked"), say))
    say("merging by copies")
    copy_s, copied = seconds_of(partial(merge_caches, [first, second], _OtherDisk(folder / "copied"), say))
    assert linked.videos == copied.videos == 2 * videos - videos // 10 and not linked.copied and not copied.linked
    say("comparing")
    diff_s, found = seconds_of(partial(compare, first, second))
    assert found.only_second.count == videos - videos // 10
    shards = [file for store in (first, second) for file in store.listed(TOKENS)]
    return {
        "videos": videos,
        "shards": len(shards),
        "shard_bytes": sum(file.size for file in shards),
        "link_s": link_s,
        "copy_s": copy_s,
        "copied_bytes": copied.copied_bytes,
        "diff_s": diff_s,
        "diff_merged_s": seconds_of(partial(compare, first, LocalStore(folder / "linked")))[0],
    }


def _make(store: LocalStore, first: int, videos: int, shard_bytes: int, seed: int) -> None:
    """Make a cache of the videos from number ``first`` on, with a token shard of random bytes for each few of them."""
    begin_cache(store)
    draw, names = np.random.default_rng(seed), []
    for number in range(-(-videos // A_COMMIT)):
        data = draw.bytes(shard_bytes)
        names.append(f"{TOKENS}/20260101T000000000Z-{seed:06x}-{number:016x}-{digest(data).partition(':')[2]}.parquet")
        store.put(names[-1], data)
    make_table(store, range(first, first + videos), names, fingerprint(IDENTITY))


def as_table(found: Mapping[str, float], title: str) -> Table:
    """Render the figures as a table."""
    shards = f"{found['shards']:,} token shards, {found['shard_bytes'] / 1e6:,.0f} MB"
    rows = [
        (f"merge, {shards} linked", f"{found['link_s']:.1f}", "0"),
        ("merge, copied", f"{found['copy_s']:.1f}", f"{found['copied_bytes'] / 1e6:,.0f}"),
        ("diff of the two", f"{found['diff_s']:.1f}", ""),
        ("diff of one and the merged one", f"{found['diff_merged_s']:.1f}", ""),
    ]
    return figure_table(title, ("", "seconds", "MB copied"), rows)
