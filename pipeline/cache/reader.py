"""TokenCache: read pruned visual tokens back, without the video or the vision encoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa
from torch import Tensor

from gstep.evidence import name_of
from gstep.types import budget_for
from pipeline.cache.cached_video import CachedVideo, by_index, newline_of, to_video
from pipeline.cache.header import CacheHeader, CacheIdentity, deepstack_levels, read_header_file
from pipeline.cache.index import REMEDY
from pipeline.cache.live_rows import VideoRows
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.schema import READABLE_VERSIONS, token_schema
from pipeline.cache.token_shard import TokenShard
from pipeline.errors import CorruptShard, EvidenceNotCached, FailedVideo, NotACache, RatioNotCached, UnknownVideo
from pipeline.rows import VideoRow
from pipeline.storage.stores import Store, store_at

HEADER = "cache.json"
TokenOrder = Literal["index", "selection"]


def read_header(store: Store) -> CacheHeader:
    """The cache's header (schema version, identity, newline, shape of a token). Raises NotACache."""
    absent = f"not a pruned-token cache (no {HEADER}); make one with python -m jobs.prune"
    return cast(CacheHeader, read_header_file(store, HEADER, READABLE_VERSIONS, NotACache, absent))


class TokenCache:
    """A pruned-token cache, opened for reading. It shows what was committed when it was opened.

    ``path`` is a folder or ``s3://bucket/prefix``; how the store is reached is taken from the environment, unless a
    ``store`` is given. Where the cache has a compacted index (``python -m jobs.compact``), opening loads no ids: on S3
    two GETs and one LIST, and one GET for each videos shard that came after the index. Without one it is one LIST a
    thousand videos shards and one GET each. A video then costs one GET, and one more each for its videos shard, its
    token shard's footer, and two files of the index, where those are not in memory. Opening costs one GET alone where
    ``live`` holds the live rows to serve, as ``read_live`` gives them.

    Raises NotACache where ``path`` is none, CorruptShard where a videos shard was damaged, and OSError.
    """

    def __init__(self, path: str | Path, *, store: Store | None = None, live: pa.Table | None = None) -> None:
        self.store = store or store_at(path)
        self.header = read_header(self.store)
        self._live = LiveVideos.open(self.store) if live is None else LiveVideos(None, live)
        self._rows = VideoRows(self.store)
        self._shard = lru_cache(maxsize=16)(self._open_shard)

    @property
    def identity(self) -> CacheIdentity:
        """What every row of this cache was made with."""
        return self.header["identity"]

    @property
    def retention_ratio(self) -> float:
        """The stored share of tokens, the largest that ``get`` can serve."""
        return float(self.identity["retention_ratio"])

    @property
    def newline(self) -> Tensor | None:
        """[D] bfloat16, LLaVA-OneVision's row after all tokens of a video; None for families without one."""
        return newline_of(self.header)

    @property
    def deepstack_levels(self) -> int:
        """Vectors of the token's width that are stored with every token, for the first layers of Qwen3-VL."""
        return deepstack_levels(self.header)

    @property
    def video_ids(self) -> list[str]:
        """The videos that have tokens, sorted. Of a compacted cache this reads the whole index."""
        return self._live.ok()

    @property
    def failed(self) -> dict[str, str]:
        """The videos that were tried and failed, with the class of the error. Of a compacted cache this reads the whole
        index."""
        return self._live.failed()

    @property
    def most_tokens(self) -> int:
        """No fewer tokens than are stored of any video."""
        return self._live.most_tokens()

    @property
    def hidden_sizes(self) -> set[int]:
        """D of the tokens: one number, and none of a cache without tokens."""
        return self._live.widths()

    def __len__(self) -> int:
        return len(self.video_ids)

    def __contains__(self, video_id: object) -> bool:
        place = self._live.find(video_id) if isinstance(video_id, str) else None
        return place is not None and place.fault is None

    def __iter__(self) -> Iterator[str]:
        return iter(self.video_ids)

    def metadata(self, video_id: str) -> VideoRow:
        """The video's live row, failed or not. Raises UnknownVideo, CorruptShard, OSError."""
        place = self._live.find(video_id)
        if place is None:
            raise UnknownVideo(f"{video_id!r} is not in the cache {self.store} ({len(self._live)} videos are)")
        try:
            row = self._rows(place.shard, place.row)
        except FileNotFoundError:
            raise CorruptShard(f"{self.store}/{place.shard} is gone; {REMEDY}", "missing") from None
        for name in ("manifest", "model_extra", "runtime"):
            row[name] = None if row[name] is None else json.loads(row[name])
        return row

    @property
    def evidence(self) -> dict[str, str]:
        """What is stored besides the tokens, label -> where in the encoder it is from (gstep.evidence)."""
        return dict(self.identity.get("evidence", {}))

    def _columns(self, asked: Sequence[str]) -> dict[str, str]:
        """The columns of evidence by what they were asked for as: a label, or a name that has one source here."""
        held = self.evidence
        columns: dict[str, str] = {}
        for key in asked:
            found = [column for column, source in held.items() if key in (column, name_of(column, source))]
            if not found:
                raise EvidenceNotCached(
                    f"{self.store} holds no {key} of its tokens (of evidence it has {', '.join(held) or 'none'}): "
                    f"prune into another --out with --evidence {key}"
                )
            if len(found) > 1 and key not in found:
                raise EvidenceNotCached(f"{self.store} holds {key} as {' and as '.join(found)}: name one of them")
            columns[key] = key if key in found else found[0]
        return columns

    def get(
        self,
        video_id: str,
        retention_ratio: float | None = None,
        order: TokenOrder = "index",
        evidence: Sequence[str] = (),
        *,
        verify: bool = False,
    ) -> CachedVideo:
        """The tokens of one video, all that are stored or the nested ``retention_ratio`` of all T*N.

        ``order="index"`` gives ascending flat index, as an LLM wants them; ``order="selection"`` the order of
        selection (of a method without one: of its own prompt), as they are stored: the tokens then are a read-only
        view into what Arrow read, without a copy.

        ``evidence`` names what is read of the same rows besides, of what the cache has (a label, or a name that has one
        source there); nothing of it otherwise.

        ``verify`` compares the checksum of the video's row, for which all of the video is read whatever is asked for.
        Without it every page is held against its own checksum, and the shard's footer against the row's.

        Raises UnknownVideo, FailedVideo (with the class of the error), RatioNotCached, EvidenceNotCached, CorruptShard,
        OSError where the store fails, and ValueError for an order or ratio that makes no sense.
        """
        if order not in ("index", "selection"):
            raise ValueError(f'order must be "index" or "selection", got {order!r}')
        columns = self._columns(evidence)
        row = self.metadata(video_id)
        if row["status"] != "ok":
            raise FailedVideo(f"{video_id!r} failed: {row['error_class']}: {row['error_message']}", row["error_class"])
        keep = rows_wanted(row, retention_ratio)
        try:
            table = self._read(row, keep, tuple(dict.fromkeys(columns.values())), verify)
        except CorruptShard as error:
            raise CorruptShard(f"{error}; {self._remedy(video_id)}", error.kind) from error
        video = to_video(row, table, self.header, columns)
        return video if order == "selection" else by_index(video)

    def _read(self, row: VideoRow, keep: int, evidence: Sequence[str], verify: bool) -> pa.Table:
        """The video's first ``keep`` token rows, from no more row groups than hold them unless all is verified."""
        plain = token_schema(row["hidden_size"], self.deepstack_levels).names
        columns = [*(name for name in plain if name != "video_id"), *evidence]
        shard: TokenShard = self._shard(row["token_shard"], row["footer_hash"])
        if not verify:
            return shard.read(row, keep, columns, near=plain)
        shard.require(columns)
        return shard.read_checked(row).select(columns).slice(0, keep)

    def _remedy(self, video_id: str) -> str:
        """What to run about a video whose tokens are not what its row says."""
        place = self._live.find(video_id)
        commit = "videos" if place is None else place.shard
        return (
            f"python -m jobs.verify {self.store} finds all such videos; without a copy of the file remove "
            f"{self.store}/{commit} and run the same python -m jobs.prune again, which redoes its videos"
        )

    def _open_shard(self, name: str, footer_hash: str) -> TokenShard:
        return TokenShard(self.store, name, footer_hash, sparse=bool(self.evidence))


def rows_wanted(row: Mapping[str, Any], retention_ratio: float | None) -> int:
    """How many of a video's stored tokens make up ``retention_ratio``; ``row`` is its row of the videos table.

    Raises RatioNotCached, and ValueError for no ratio at all.
    """
    stored = row["retention_ratio"]
    if retention_ratio is None:
        return int(row["n_tokens"])
    budget = budget_for(retention_ratio, row["n_total"])
    if retention_ratio > stored + 1e-9:
        raise RatioNotCached(f"{row['video_id']!r} is stored at retention ratio {stored}; {retention_ratio} is larger")
    if abs(retention_ratio - stored) <= 1e-9:
        return int(row["n_tokens"])
    if not row["nested"]:
        raise RatioNotCached(
            f"{row['video_id']!r} was pruned by a method without an order of selection, so only its own retention "
            f"ratio {stored} can be served, not {retention_ratio}"
        )
    return min(budget, int(row["n_tokens"]))
