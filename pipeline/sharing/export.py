"""``jobs.export``: a copy of a cache for other people, with a page that says what it is, or its tokens as WebDataset.

The copy is a cache like any other, without the records of its runs, which name hosts and folders; its table is merged,
so that a reader of plain Parquet needs no rule for live rows. The page is a dataset card of the Hugging Face Hub.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gstep.lazy import did_you_mean
from pipeline.cache.header import fingerprint, header_bytes
from pipeline.cache.live_rows import TOKENS, VideoRows, in_shard_order, ok_rows
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.merging import merge_at_once
from pipeline.cache.reader import HEADER, TokenCache, check_version, read_header
from pipeline.cache.token_shard import read_videos
from pipeline.cache.writer import bundled, commit, put_token_shard
from pipeline.errors import UsageError
from pipeline.execution.claim import Claim
from pipeline.execution.request import new_run_id
from pipeline.execution.run_record import RUNS
from pipeline.rewrite.rewrite import check_place, newer_rows
from pipeline.rows import VideoRow
from pipeline.sharing.card import card_of, is_as_written
from pipeline.sharing.merge import merge_caches
from pipeline.storage.stores import Store
from pipeline.verify.removal import remove_videos

CARD: Final = "README.md"
_SHOWN: Final = 5
_LOOKED_AT: Final = 100_000  # ids that are looked through for likely ones
_TAR: Final = re.compile(r"tokens-(\d{6,})\.tar")


@dataclass
class Exported:
    """The result of an export.

    Attributes:
        videos: with tokens.
        failed: that were tried and have none; of a WebDataset none are written.
        bytes: of the tokens.
        files: token shards, or tars.
    """

    videos: int = 0
    failed: int = 0
    bytes: int = 0
    files: int = 0


def export(
    source: Store, out: Store, say: Callable[[str], object], ids: Sequence[str] | None = None, licence: str = ""
) -> Exported:
    """Copy a cache, or the videos ``ids`` of it, to a new place, with a card. The same call goes on after a stop.

    Token shards that no row of the copy names any more, such as those of videos removed since, are deleted there. A
    card that somebody has filled in stays.

    Raises NotACache, UsageError for unknown ids, a cache of an earlier version or the cache's own place before anything
    is written, CorruptShard where a file is damaged, and OSError.
    """
    _refuse_itself(source, out)
    if ids is None:
        merge_caches([source], out, say, records=False)
    else:
        _take_part(source, out, ids, say)
    _delete_unnamed(out)
    cache = TokenCache(str(out), store=out)
    found = _counted(out, cache)
    if out.exists(CARD) and not is_as_written(out.read(CARD).decode("utf-8", "replace")):
        say(f"note: the {CARD} of {out} stays as somebody has changed it, counts included")
    else:
        out.put(CARD, card_of(cache, found.videos, found.failed, found.bytes, licence).encode())
    return found


def _refuse_itself(source: Store, out: Store) -> None:
    """Raise UsageError where a cache would be its own copy: readers of it would lose files at once."""
    if source.root == out.root:
        raise UsageError(f"{out} is the cache itself: name another place with --to")


def _delete_unnamed(out: Store) -> None:
    """Delete the token shards of a copy that no live row names."""
    with Claim(out, new_run_id(), lambda line: None):
        rows = LiveVideos.open(out, fingerprint(read_header(out)["identity"])).live(("status", "token_shard"))
        named = set(ok_rows(rows)["token_shard"].to_pylist())
        for name in out.names(TOKENS, ".parquet"):
            if name not in named:
                out.delete(name)


def _counted(out: Store, cache: TokenCache) -> Exported:
    """Count the videos and the token shards of a copy."""
    shards = out.listed("tokens")
    return Exported(len(cache.video_ids), len(cache.failed), sum(file.size for file in shards), len(shards))


def _rows_of(source: Store, ids: Sequence[str] | None) -> pa.Table:
    """Return the place and token shard of the live rows of videos, or of all; removed ones too. Raises UsageError."""
    made_with = fingerprint(read_header(source)["identity"])
    names = ("video_id", "status", "attempts", "token_shard", "first_row_group")
    rows = LiveVideos.open(source, made_with).live(names)
    if ids is not None:
        wanted = pa.array(sorted(set(ids)), pa.string())
        found = rows.filter(pc.is_in(rows["video_id"], value_set=wanted))
        if unknown := sorted(set(ids) - set(found["video_id"].to_pylist())):
            held = rows["video_id"].slice(0, _LOOKED_AT).to_pylist()
            some = ", ".join(name + did_you_mean(name, held) for name in unknown[:_SHOWN])
            raise UsageError(f"{source} has no row of {len(unknown)} of the videos: {some}")
        rows = found
    return in_shard_order(rows)


def _take_part(source: Store, out: Store, ids: Sequence[str], say: Callable[[str], object]) -> None:
    """Write the rows and tokens of some videos to ``out``, in shards of their own."""
    check_version(source)
    header = read_header(source)
    check_place(out, header)
    rows = _rows_of(source, ids)
    made_with, run_id = fingerprint(header["identity"]), new_run_id()
    out.make()
    if out.exists(HEADER):
        _remove_gone(source, out, made_with, say)
    with Claim(out, run_id, say):
        if not out.exists(HEADER):
            out.put(HEADER, header_bytes(header))
        left, done = newer_rows(rows, out, made_with), 0
        for number, bundle in enumerate(bundled(VideoRows(source).each(left), _token_bytes)):
            _write(source, out, run_id, number, bundle, made_with)
            done += len(bundle)
            say(f"{done:,} of {len(left):,} videos")
        merge_at_once(out, made_with)


def _remove_gone(source: Store, out: Store, made_with: str, say: Callable[[str], object]) -> None:
    """Remove from a copy the videos that were removed from its source since, with their tokens."""
    rows, held = (LiveVideos.open(store, made_with).live(("video_id", "status")) for store in (source, out))
    removed = rows.filter(pc.equal(rows["status"], "removed"))["video_id"].cast(pa.string())
    held = held.filter(pc.not_equal(held["status"], "removed"))["video_id"].cast(pa.string())
    if gone := held.filter(pc.is_in(held, value_set=removed)).to_pylist():
        done = remove_videos(out, gone, "removed from the cache that this is a copy of", say, timedelta(0))
        out.delete(f"{RUNS}/{done.run_id}.json")  # a copy has no records of runs


def _token_bytes(row: VideoRow) -> int:
    """Return the bytes of a video's tokens as bfloat16 numbers, 0 for one without."""
    return 2 * (row["n_tokens"] or 0) * (row["hidden_size"] or 0)


def _write(source: Store, out: Store, run_id: str, number: int, rows: list[VideoRow], made_with: str) -> None:
    """Write the tokens of some videos as one shard of ``out``, and commit their rows."""
    good = [row for row in rows if row["status"] == "ok"]
    if good:
        put_token_shard(out, run_id, good, read_videos(source, good))
    commit(out, run_id, number, rows, made_with=made_with)


def export_tars(source: Store, out: Store, say: Callable[[str], object], ids: Sequence[str] | None = None) -> Exported:
    """Write the tokens of a cache as WebDataset: tars with three members a video.

    ``N.json`` is the video's row, ``N.tokens.npy`` its tokens [B,D] float32, ``N.index.npy`` their flat places [B]
    int64, both by ascending place. A tar that holds its videos' rows as they are now is not written again; one beyond
    the last is deleted.

    Raises as ``export``.
    """
    _refuse_itself(source, out)
    rows = ok_rows(_rows_of(source, ids))
    cache, found = TokenCache(str(source), store=source), Exported(videos=len(rows))
    out.make()
    shards = rows["token_shard"].to_pylist()
    for number, shard in enumerate(dict.fromkeys(shards)):
        name, first = f"tokens-{number:06d}.tar", shards.index(shard)
        videos = rows.slice(first, shards.count(shard))["video_id"].to_pylist()
        wanted = {f"{key:09d}.json": _as_json(cache.metadata(video)) for key, video in enumerate(videos, first)}
        if _told(out, name) != wanted:
            out.put(name, _tar(cache, videos, first))
            say(f"{first + len(videos):,} of {len(rows):,} videos")
        found.files += 1
        found.bytes += out.open(name).size()
    for file in out.listed(""):
        if (number_of := _TAR.fullmatch(file.name)) and int(number_of[1]) >= found.files:
            out.delete(file.name)
    return found


def _told(out: Store, name: str) -> dict[str, bytes]:
    """Return the rows of the videos that a tar holds, by the names of their members; none where there is no tar."""
    if not out.exists(name):
        return {}
    file = out.open(name)
    try:
        with tarfile.open(fileobj=file.mapped or file.fetch(())) as tar:
            members = [(member.name, tar.extractfile(member)) for member in tar if member.name.endswith(".json")]
            return {name: data.read() for name, data in members if data is not None}
    except tarfile.TarError:
        return {}


def _as_json(row: VideoRow) -> bytes:
    """Serialise a video's row as a tar holds it."""
    return json.dumps({name: value for name, value in row.items() if not name.startswith("error_")}).encode()


def _tar(cache: TokenCache, video_ids: Sequence[str], first: int) -> bytes:
    """Return a tar of the videos, whose keys count from ``first``: ids hold dots, at which WebDataset ends a key."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number, video in enumerate(cache.get_many(video_ids), first):
            members = {
                "json": _as_json(video.metadata),
                "tokens.npy": _npy(video.tokens.to(torch.float32).numpy()),
                "index.npy": _npy(video.index.numpy()),
            }
            for ending, data in members.items():
                member = tarfile.TarInfo(f"{number:09d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def _npy(values: np.ndarray) -> bytes:
    """Serialise an array as a .npy file."""
    file = io.BytesIO()
    np.save(file, values, allow_pickle=False)
    return file.getvalue()
