"""TokenCache: read pruned visual tokens back, without the video or the vision encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import pyarrow as pa

from gstep.evidence import name_of
from pipeline.cache.cached_video import CachedVideo, index_order, newline_of, to_video
from pipeline.cache.codecs import TokenCodec, codec_of
from pipeline.cache.header import CacheHeader, CacheIdentity, deepstack_levels, fingerprint, read_header_file
from pipeline.cache.live_videos import LiveShards, LiveVideos, Place
from pipeline.cache.loaded_once import LoadedOnce
from pipeline.cache.reading import Reading, TokenOrder, read_json, read_runs, rows_wanted, token_columns
from pipeline.cache.schema import CODED_VERSIONS, SCHEMA_VERSION, VERSIONS
from pipeline.cache.token_shard import Rows, TokenShard
from pipeline.errors import CorruptShard, EvidenceNotCached, FailedVideo, NotACache, RemovedVideo, UnknownVideo
from pipeline.rows import VideoRow
from pipeline.storage.random_access import Fetched
from pipeline.storage.stores import Store, store_at

if TYPE_CHECKING:
    from torch import Tensor

HEADER = "cache.json"
_SHARDS = 16  # token shards that are kept open
_AHEAD = 4  # requests of get_many that are under way at once
V = TypeVar("V")


def read_header(store: Store) -> CacheHeader:
    """Read the cache's header (schema version, identity, newline, shape of a token). Raises NotACache."""
    absent = f"not a pruned-token cache (no {HEADER}); make one with python -m jobs.prune"
    header = cast(CacheHeader, read_header_file(store, HEADER, VERSIONS, NotACache, absent))
    codec_of(header["identity"], store)
    return header


def coded_header(header: CacheHeader, codec: str) -> CacheHeader:
    """Return the header of a cache that holds the same tokens in another codec."""
    identity = {**header["identity"], "dtype": {**header["identity"]["dtype"], "stored": codec}}
    version = CODED_VERSIONS.get(codec, SCHEMA_VERSION)
    return cast(CacheHeader, {**header, "schema_version": version, "identity": identity})


def made_with(store: Store, *, required: bool = False) -> str | None:
    """Return the fingerprint of the cache's identity; None where there is no cache, unless that is ``required``.

    Raises NotACache.
    """
    return fingerprint(read_header(store)["identity"]) if required or store.exists(HEADER) else None


def check_list(names: Sequence[str], what: str) -> None:
    """Raise ValueError where a text stands in the place of a list of names: its letters would be taken for them."""
    if isinstance(names, str):
        raise ValueError(f"{what} must be a list of names, got {names!r}: write [{names!r}]")


class TokenCache:
    """A pruned-token cache, opened for reading. It shows what was committed when it was opened, or at ``refresh``.

    Its tokens take the place of the vision encoder's output in the LLM that they were made for:
    ``pipeline/examples/own_llm.py`` does that with transformers in twenty lines.

    ``path`` is a folder or ``s3://bucket/prefix``; how the store is reached is taken from the environment, unless a
    ``store`` is given. On S3 opening is two GETs, one LIST, and a GET for each small file of the videos table, of which
    a run leaves few (``python -m jobs.compact`` leaves none). A video then costs one GET, and one more each for its
    token shard's footer, and the end and a row group of a sorted file, where those are not in memory. Nothing is listed
    where ``live`` holds the live rows to serve: LIVE_COLUMNS with ``shard`` and ``row``.

    Files that another run merges are deleted after a while: the cache is then looked at again, by itself.

    Raises NotACache where ``path`` is none, CorruptShard where a videos shard was damaged, and OSError.
    """

    def __init__(self, path: str | Path, *, store: Store | None = None, live: pa.Table | None = None) -> None:
        self.store = store or store_at(path)
        self.header = read_header(self.store)
        made_with = fingerprint(self.identity)
        self._live = (
            LiveVideos.open(self.store, made_with) if live is None else LiveVideos(self.store, made_with, live, ())
        )
        self._shard = LoadedOnce(partial(TokenShard, self.store), _SHARDS)

    def refresh(self) -> None:
        """Take in what was committed and merged since. Raises CorruptShard, OSError."""
        self._live = LiveVideos.open(self.store, fingerprint(self.identity))

    @property
    def foreign_files(self) -> list[str]:
        """Files of the videos table that were made with another identity; their rows are left out."""
        return list(self._live.foreign)

    @property
    def identity(self) -> CacheIdentity:
        """The identity that every row of this cache was made with."""
        return self.header["identity"]

    @property
    def codec(self) -> TokenCodec:
        """The codec that tokens are stored by."""
        return codec_of(self.identity)

    @property
    def retention_ratio(self) -> float:
        """The stored share of tokens, the largest that ``get`` can serve."""
        return float(self.identity["retention_ratio"])

    @property
    def newline(self) -> Tensor | None:
        """LLaVA-OneVision's row after all tokens of a video, [D] bfloat16; None for families without one."""
        return newline_of(self.header)

    @property
    def deepstack_levels(self) -> int:
        """The number of vectors stored with every token for the first layers of Qwen3-VL."""
        return deepstack_levels(self.header)

    @property
    def video_ids(self) -> list[str]:
        """The videos that have tokens, sorted. This reads the ids of the whole table."""
        return self._with_refresh(LiveVideos.ok)

    @property
    def failed(self) -> dict[str, str]:
        """The videos that were tried and failed, with the class of the error. This reads the whole table."""
        return self._with_refresh(LiveVideos.failed)

    @property
    def most_tokens(self) -> int:
        """The largest number of stored tokens of a video."""
        return self._with_refresh(LiveVideos.most_tokens)

    @property
    def hidden_sizes(self) -> set[int]:
        """The widths D of the tokens: one number, or none for a cache without tokens."""
        return self._with_refresh(LiveVideos.widths)

    def __len__(self) -> int:
        return len(self.video_ids)

    def __contains__(self, video_id: object) -> bool:
        if not isinstance(video_id, str):
            return False
        place = self._with_refresh(lambda live: live.find(video_id))
        return place is not None and place.fault is None

    def __iter__(self) -> Iterator[str]:
        return iter(self.video_ids)

    def metadata(self, video_id: str) -> VideoRow:
        """Return the video's live row, failed or not. Raises UnknownVideo, CorruptShard, OSError."""
        return read_json(self._of_video(LiveVideos.row, video_id))

    def place_of(self, video_id: str) -> Place:
        """Return where the video's live row is. Raises UnknownVideo, CorruptShard, OSError."""
        return self._of_video(LiveVideos.find, video_id)

    def _of_video(self, look: Callable[[LiveVideos, str], V | None], video_id: str) -> V:
        """Return what ``look`` finds of a video's live row. Raises UnknownVideo."""
        found = self._with_refresh(lambda live: look(live, video_id)) if isinstance(video_id, str) else None
        if found is None:
            raise self._unknown(video_id)
        return found

    def _with_refresh(self, look: Callable[[LiveVideos], V]) -> V:
        """Return ``look`` of the live rows, after a refresh where files were merged since the cache was opened."""
        try:
            return look(self._live)
        except FileNotFoundError:
            self.refresh()
        try:
            return look(self._live)
        except FileNotFoundError as error:
            raise CorruptShard(f"{self.store}: {error.filename} is missing; restore it", "missing") from error

    def _unknown(self, video_id: str) -> UnknownVideo:
        """Return the error about a video that the cache does not have."""
        return UnknownVideo(f"{video_id!r} is not in the cache {self.store} (it has {len(self._live)} rows)")

    def shards(self, video_ids: Sequence[str] | None = None) -> LiveShards:
        """Return the token shards of these videos, or of all videos that have tokens; for ``rows_of``.

        All of them take some 46 bytes a video. Raises UnknownVideo, CorruptShard, OSError.
        """
        if video_ids is None:
            return self._with_refresh(LiveVideos.shards)
        try:
            return self._with_refresh(lambda live: live.shards_of(video_ids))
        except KeyError as error:
            raise self._unknown(error.args[0]) from None

    def rows_of(self, shards: LiveShards, number: int) -> list[VideoRow]:
        """Return the rows of the videos of one of ``shards``, as ``metadata`` gives them.

        Where files were merged or tokens moved since, these are the videos that the token shard had, as they are now:
        some may be removed. Raises CorruptShard, OSError.
        """
        try:
            return [read_json(self._live.rows(*place)) for place in shards.rows(number)]
        except FileNotFoundError:  # another run has merged the file since the cache was opened
            self.refresh()

        def find_rows(live: LiveVideos) -> list[VideoRow]:
            places = live.find_places(shards)
            if len(places) < len(shards.places):
                raise CorruptShard(f"{self.store}: videos have no row any more; open the cache anew", "missing")
            shards.places = places
            return [read_json(live.rows(*place)) for place in shards.rows(number)]

        return self._with_refresh(find_rows)

    @property
    def evidence(self) -> dict[str, str]:
        """The evidence that is stored besides the tokens: label -> where in the encoder it is from (gstep.evidence)."""
        return dict(self.identity.get("evidence", {}))

    def _sources(self, asked: Sequence[str]) -> dict[str, str]:
        """Map each name of evidence that was asked for to its column: a label, or a name that has one source here."""
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
        """Read the tokens of one video, all that are stored or the nested ``retention_ratio`` of all T*N.

        ``order="index"`` gives ascending flat index, as an LLM wants them; ``order="selection"`` the order of
        selection (of a method without one: of its own prompt), as they are stored: the tokens then are the memory that
        Arrow read them into, without a copy. Either way they are the caller's own: what is written to them changes no
        file and no other video.

        ``evidence`` names what is read of the same rows besides, of what the cache has (a label, or a name that has one
        source there); nothing of it otherwise.

        ``verify`` compares the checksum of the video's row, for which all of the video is read whatever is asked for.
        Without it every page is held against its own checksum, and the shard's footer against the row's.

        Raises UnknownVideo, FailedVideo (with the class of the error), RatioNotCached, EvidenceNotCached, CorruptShard,
        OSError where the store fails, and ValueError for an order or ratio that makes no sense, and for a text in the
        place of a list of names.
        """
        return self.get_many([video_id], retention_ratio, order, evidence, verify=verify)[0]

    def get_many(
        self,
        video_ids: Sequence[str],
        retention_ratio: float | None = None,
        order: TokenOrder = "index",
        evidence: Sequence[str] = (),
        *,
        verify: bool = False,
    ) -> list[CachedVideo]:
        """Read several videos as ``get`` does, shard by shard; return them in the order of the ids.

        From an object store neighbours in a shard come with one request, of at most 64 MB where a video is smaller,
        and up to four requests are under way at once. All videos are in memory in the end: ask for a batch at a time.

        Raises as ``get``, for the first id whose row says that it cannot be served, before any tokens are read; then
        for the first that is met damaged.
        """
        check_list(video_ids, "video_ids")
        return self.get_rows(map(self.metadata, video_ids), retention_ratio, order, evidence, verify=verify)

    def get_rows(
        self,
        rows: Iterable[VideoRow],
        retention_ratio: float | None = None,
        order: TokenOrder = "index",
        evidence: Sequence[str] = (),
        *,
        verify: bool = False,
    ) -> list[CachedVideo]:
        """Read videos as ``get_many`` does, by their rows from ``metadata`` or ``rows_of``.

        Where a token shard is gone, the rows are looked up again: their videos may have moved to another one.
        """
        reading = self.reading(retention_ratio, order, evidence, verify)
        wanted = [self.wanted(row, reading) for row in rows]
        try:
            return self._read_videos(wanted, reading)
        except CorruptShard as error:
            if error.kind != "missing":
                raise
        self.refresh()
        return self._read_videos([self.wanted(self.metadata(one.row["video_id"]), reading) for one in wanted], reading)

    def _read_videos(self, videos: Sequence[Rows], reading: Reading) -> list[CachedVideo]:
        """Read the wanted rows of videos."""
        verify, in_place = reading.verify, self.store.folder is not None

        def fetch(run: Sequence[Rows]) -> tuple[TokenShard, Fetched | None]:
            with self._video_in_errors(run[0].row["video_id"]):
                shard = self._open(run[0])
                # A verified video is read whole, by its own request.
                return shard, None if verify or in_place else shard.fetch_all(run)

        def read(wanted: Rows, source: tuple[TokenShard, Fetched | None]) -> CachedVideo:
            with self._video_in_errors(wanted.row["video_id"]):
                return self._read(wanted, reading, *source)

        return read_runs(videos, fetch, read, ahead=0 if in_place else _AHEAD)

    def reading(
        self, retention_ratio: float | None, order: TokenOrder, evidence: Sequence[str], verify: bool
    ) -> Reading:
        """Check the options of ``get``, and bundle them.

        Raises EvidenceNotCached, and ValueError for an unknown order and for evidence that is no list.
        """
        check_list(evidence, "evidence")
        if order not in ("index", "selection"):
            raise ValueError(f'order must be "index" or "selection", got {order!r}')
        sources = self._sources(evidence)
        plain = token_columns(self.deepstack_levels, self.codec)
        columns = (*(name for name in plain if name != "video_id"), *dict.fromkeys(sources.values()))
        return Reading(retention_ratio, order, sources, columns, plain, verify)

    def wanted(self, row: VideoRow, reading: Reading) -> Rows:
        """Return which token rows of a video are to be read.

        Raises RemovedVideo, FailedVideo, RatioNotCached and ValueError.
        """
        if row["status"] == "removed":
            raise RemovedVideo(f"{row['video_id']!r} was removed from {self.store}: {row['error_message']}")
        if row["status"] != "ok":
            raise FailedVideo(
                f"{row['video_id']!r} failed: {row['error_class']}: {row['error_message']}", row["error_class"] or ""
            )
        return Rows(row, rows_wanted(row, reading.retention_ratio), reading.columns, reading.near)

    def _open(self, wanted: Rows) -> TokenShard:
        """Open the token shard of a video, or return the one that is open already."""
        return self._shard(wanted.row["token_shard"], wanted.row["footer_hash"])

    def _read(self, wanted: Rows, reading: Reading, shard: TokenShard, fetched: Fetched | None) -> CachedVideo:
        """Read the video's first token rows, from no more row groups than hold them unless all is verified."""
        as_stored, row = reading.order == "selection", wanted.row
        if reading.verify:
            shard.require(wanted.columns)
            table = shard.read_checked(row).select(list(wanted.columns)).slice(0, wanted.keep)
            return to_video(row, table, self.header, reading.evidence, None if as_stored else index_order(table))
        if as_stored:
            return to_video(row, shard.read(wanted, fetched), self.header, reading.evidence)
        found = shard.read_by_index(wanted, fetched)
        return to_video(row, found.table, self.header, reading.evidence, found.order, found.vectors)

    @contextmanager
    def _video_in_errors(self, video_id: str) -> Iterator[None]:
        """Add the video and the command that finds such damage to the message of a CorruptShard."""
        try:
            yield
        except CorruptShard as error:
            raise CorruptShard(f"{error} (reading {video_id!r}); {self._remedy(video_id)}", error.kind) from error

    def _remedy(self, video_id: str) -> str:
        """Say which command finds videos whose tokens are not what their rows say."""
        return (
            f"python -m jobs.verify {self.store} finds all such videos; without a copy of the file add --repair to it, "
            "which marks them for another attempt"
        )
