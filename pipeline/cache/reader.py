"""Read pruned visual tokens from a cache, without the videos or the vision encoder: TokenCache."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gstep.evidence import get_evidence_name
from gstep.types import budget_for
from pipeline.cache.bounds import iter_row_count_faults
from pipeline.cache.cached_video import CachedVideo, build_video, decode_newline
from pipeline.cache.codecs import TokenCodec
from pipeline.cache.header import CacheIdentity, compute_fingerprint, get_codec, get_deepstack_levels, read_header
from pipeline.cache.live import ID_COLUMNS, LiveShards, LiveVideos, select_ok
from pipeline.cache.schema import build_token_schema
from pipeline.cache.table import VideosTable
from pipeline.cache.token_shard import TokenRequest, TokenShard, sort_by_index
from pipeline.errors import CorruptShard, EvidenceNotCached, FailedVideo, RatioNotCached, RemovedVideo, UnknownVideo
from pipeline.rows import JSON_COLUMNS, Json, VideoRow
from pipeline.storage.random_access import FetchedFile, LoadCache
from pipeline.storage.stores import Store, request_threads, store_at

if TYPE_CHECKING:
    from torch import Tensor

_MAX_OPEN_SHARDS = 16  # token shards that stay open
_MAX_REQUESTS = 4  # parallel requests of get_many
_MAX_RUN_BYTES = 2**26  # bytes of tokens that one request fetches, unless a single video has more
MAX_HINTS = 5  # unknown ids for which similar ids are suggested
R = TypeVar("R")
T = TypeVar("T")
TokenOrder = Literal["index", "selection"]


class TokenReadOptions(NamedTuple):
    """The checked options by which the tokens of videos are read, from ``TokenCache.check_options``.

    Attributes:
        retention_ratio: the ratio of the nested selection; None for all stored tokens.
        evidence: name in the result -> column.
        columns: the columns to read.
    """

    retention_ratio: float | None
    order: TokenOrder
    evidence: Mapping[str, str]
    columns: tuple[str, ...]
    verify: bool


class TokenCache:
    """A pruned-token cache, opened for reading. It shows the videos committed when it was opened, or at ``refresh``.

    The tokens replace the vision encoder's output in the LLM of the same model (``pipeline/examples/own_llm.py``).

    Opening reads each small file of the videos table, of which a run leaves few (``python -m jobs.compact`` leaves
    none). A video then costs a GET, and more if its row or its shard's footer is not in memory. If another run deletes
    files by a merge, the cache refreshes itself.

    Args:
        path: a folder, or an address such as ``s3://bucket/prefix`` with credentials from the environment.
        store: the opened store of the cache, in place of ``path``.
        live: the live rows to serve, LIVE_COLUMNS with ``file`` and ``row``; nothing is then listed. None lists the
            table.

    Raises:
        NotACache: ``path`` is not a cache, its header is damaged, or its version or codec is unknown.
        CorruptShard: a file of the videos table is damaged.
        UsageError: ``path`` is not a valid address.
    """

    def __init__(self, path: str | Path, *, store: Store | None = None, live: pa.Table | None = None) -> None:
        """Read the header of the cache, and its live rows unless ``live`` has them."""
        self.store = store or store_at(path)
        self.header = read_header(self.store)
        if live is None:
            self.refresh()
        else:
            self._live = LiveVideos(VideosTable(self.store, compute_fingerprint(self.identity)), live)
        self._n_hints = 0
        self._open_shard = LoadCache(partial(TokenShard, self.store), _MAX_OPEN_SHARDS)
        self._columns = tuple(build_token_schema(1, self.deepstack_levels, codec=self.codec).names)

    def refresh(self) -> None:
        """List and read the videos table again, to see later commits and merges."""
        self._live = LiveVideos.open(self.store, compute_fingerprint(self.identity))

    @property
    def foreign_files(self) -> list[str]:
        """The files of the videos table with another identity that were met so far; their rows are ignored."""
        return list(self._live.table.foreign)

    @property
    def stray_files(self) -> list[str]:
        """The files in ``videos/`` that are not files of the table, such as copies; they change no live row."""
        return list(self._live.strays)

    @property
    def identity(self) -> CacheIdentity:
        """The identity that all rows of this cache share."""
        return self.header["identity"]

    @property
    def codec(self) -> TokenCodec:
        """The codec of the stored tokens."""
        return get_codec(self.identity)

    @property
    def retention_ratio(self) -> float:
        """The stored share of tokens, the largest that ``get`` can serve."""
        return float(self.identity["retention_ratio"])

    @property
    def newline(self) -> Tensor | None:
        """The row that LLaVA-OneVision appends to a video's tokens, [D] bfloat16; None for families without one."""
        return decode_newline(self.header)

    @property
    def deepstack_levels(self) -> int:
        """The number of vectors stored with every token for the first layers of Qwen3-VL; 0 for other models."""
        return get_deepstack_levels(self.header)

    @property
    def video_ids(self) -> list[str]:
        """The videos that have tokens, sorted. This reads the ids of the whole table."""
        return list(select_ok(self._read_live(("video_id", "status")))["video_id"].to_pylist())

    @property
    def failed(self) -> dict[str, str]:
        """The failed videos: video_id -> class of the error. This reads the whole table."""
        rows = self._read_live(("video_id", "status", "error_class"))
        failed_rows = rows.filter(pc.equal(rows["status"], "failed"))
        classes = pc.fill_null(failed_rows["error_class"], "internal").to_pylist()
        return dict(zip(failed_rows["video_id"].to_pylist(), classes, strict=True))

    @property
    def max_tokens(self) -> int:
        """The largest number of stored tokens of a video; 0 if there are none. This reads the whole table."""
        return int(pc.max(self._read_live(("n_tokens",))["n_tokens"]).as_py() or 0)

    @property
    def hidden_sizes(self) -> set[int]:
        """The hidden sizes D of the tokens: one number, none without tokens; old caches could mix several."""
        return self._with_refresh(LiveVideos.widths)

    def __len__(self) -> int:
        return len(self.video_ids)

    def __contains__(self, video_id: object) -> bool:
        if not isinstance(video_id, str):
            return False
        place = self._with_refresh(lambda live: live.find(video_id))
        return place is not None and place.ok

    def __iter__(self) -> Iterator[str]:
        return iter(self.video_ids)

    def metadata(self, video_id: str) -> VideoRow:
        """Return the video's live row, whether it is ok, failed or removed, with JSON columns parsed.

        Raises:
            UnknownVideo: the video has no row, or the id is not a str; the first MAX_HINTS messages suggest similar
                ids.
            CorruptShard: a file of the videos table is damaged or missing, or a JSON column is not an object.
        """
        row = self._with_refresh(lambda live: live.row(video_id)) if isinstance(video_id, str) else None
        if row is None:
            raise self._unknown(video_id)
        return parse_json_columns(row)

    def _read_live(self, columns: Sequence[str]) -> pa.Table:
        """Read ``columns`` of every live row, sorted by video_id; refreshes once if files were merged."""
        return self._with_refresh(lambda live: live.live(columns))

    def _with_refresh(self, look: Callable[[LiveVideos], R]) -> R:
        """Return ``look(live rows)``; if that raises FileNotFoundError, refresh and call ``look`` once more.

        Raises:
            CorruptShard: a file is still missing.
        """
        try:
            return look(self._live)
        except FileNotFoundError:
            self.refresh()
        try:
            return look(self._live)
        except FileNotFoundError as error:
            raise CorruptShard(f"{self.store}: {error.filename} is missing; restore it", "missing") from error

    def _unknown(self, video_id: str) -> UnknownVideo:
        """Build the error for a video that is not in the cache.

        The first MAX_HINTS errors of this object suggest similar ids, unless the ids of the table cannot be read.
        """
        suggestion = ""
        if self._n_hints < MAX_HINTS and isinstance(video_id, str):
            self._n_hints += 1
            with suppress(OSError, CorruptShard):
                suggestion = self._live.near(video_id)
        return UnknownVideo(
            f"{video_id!r} is not in the cache {self.store} (it has {len(self._live)} rows){suggestion}"
        )

    def shards(self, video_ids: Sequence[str] | None = None) -> LiveShards:
        """Return the token shards of these videos, or of all videos that have tokens, for use with ``rows_of``.

        The result takes about 46 bytes per video. Named videos without tokens are under the shard "".

        Raises:
            UnknownVideo: an id has no row.
            CorruptShard: a file of the videos table is damaged or missing.
        """
        columns = (*ID_COLUMNS, "token_shard", "first_row_group")
        if video_ids is None:
            return LiveShards.of(select_ok(self._read_live(("status", *columns))))
        rows = self._with_refresh(lambda live: live.rows_of(video_ids, ("video_id", *columns)))
        known_ids = set(rows["video_id"].to_pylist())
        for video_id in video_ids:
            if video_id not in known_ids:
                raise self._unknown(video_id)
        return LiveShards.of(rows)

    def rows_of(self, shards: LiveShards, number: int) -> list[VideoRow]:
        """Return the current rows of the videos in token shard ``number`` of ``shards``, with JSON columns parsed.

        These are the videos that the shard had when ``shards`` was called: some may have been moved to another shard or
        removed since. If files were merged, the cache refreshes itself and updates the row locations in ``shards``.

        Raises:
            CorruptShard: a file is damaged or missing, or a video has no row any more.
        """
        try:
            return _read_rows(self._live, shards, number)
        except FileNotFoundError:  # another run merged the file since the cache was opened
            self.refresh()

        def find_rows(live: LiveVideos) -> list[VideoRow]:
            if not shards.update_locations(live.live(ID_COLUMNS)):
                raise CorruptShard(f"{self.store}: videos have no row any more; open the cache again", "missing")
            return _read_rows(live, shards, number)

        return self._with_refresh(find_rows)

    @property
    def evidence(self) -> dict[str, str]:
        """The evidence in the cache: label -> source in the encoder (gstep.evidence)."""
        return dict(self.identity.get("evidence", {}))

    def _find_evidence(self, names: Sequence[str]) -> dict[str, str]:
        """Map each name of evidence to its column; a name is a label, or a name that has one source in this cache.

        Raises:
            EvidenceNotCached: the cache lacks the evidence, or has it from several sources.
        """
        stored_evidence = self.evidence
        columns: dict[str, str] = {}
        for name in names:
            matches = [
                column
                for column, source in stored_evidence.items()
                if name in (column, get_evidence_name(column, source))
            ]
            if not matches:
                raise EvidenceNotCached(
                    f"{self.store} has no evidence {name} (it has {', '.join(stored_evidence) or 'none'}): "
                    f"prune into another --out with --evidence {name}"
                )
            if len(matches) > 1 and name not in matches:
                raise EvidenceNotCached(f"{self.store} holds {name} as {' and as '.join(matches)}: name one of them")
            columns[name] = name if name in matches else matches[0]
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
        """Read the tokens of one video: all that are stored, or the nested selection of a smaller retention ratio.

        The tensors belong to the caller: writing to them changes no file and no other video.

        Args:
            retention_ratio: the share of all T*N tokens; None for all stored tokens.
            order: "index" for ascending flat index, as an LLM needs it. "selection" for the stored order, which is the
                order of selection or of the method's own prompt, and needs no copy.
            evidence: the evidence to read with the tokens; each is a label, or a name with one source in the cache.
            verify: compare the checksum in the video's row, which reads all of the video. Otherwise only the pages that
                are read are checked, each against its own checksum, and the shard's footer against the row.

        Raises:
            UnknownVideo: the video has no row (RemovedVideo if it was removed; FailedVideo, with the class of the
                error, if it failed).
            RatioNotCached: the ratio is above the stored one, or the method has no nested selections.
            EvidenceNotCached: the cache lacks the evidence, or has it from several sources.
            CorruptShard: a file is damaged or missing.
            ValueError: ``order`` or ``retention_ratio`` is invalid, or ``evidence`` is a string.
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
        """Read several videos with the options of ``get``, and return them in the order of ``video_ids``.

        One request to an object store reads adjacent videos of a shard, up to 64 MiB (a larger video alone), and up to
        four requests run in parallel. All videos are in memory at the end, so read a batch at a time. Ids and options
        are checked before any tokens are read; of several errors, the first is raised.

        Raises:
            UnknownVideo: a video has no row, was removed or failed.
            RatioNotCached: the ratio is above a video's stored one, or the method has no nested selections.
            EvidenceNotCached: the cache lacks the evidence, or has it from several sources.
            CorruptShard: a file is damaged or missing.
            ValueError: an option is invalid, or ``video_ids`` is a string.
        """
        check_not_string(video_ids, "video_ids")
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
        """Read videos with the options of ``get``, given their rows from ``metadata`` or ``rows_of``, in their order.

        If a token shard is missing, the cache refreshes itself and reads the rows again, once, since their videos may
        have moved to another shard.

        Raises:
            UnknownVideo: a video was removed or failed.
            RatioNotCached: the ratio is above a video's stored one, or the method has no nested selections.
            EvidenceNotCached: the cache lacks the evidence, or has it from several sources.
            CorruptShard: a file is damaged or missing.
            ValueError: an option is invalid.
        """
        reading = self.check_options(retention_ratio, order, evidence, verify)
        videos = [self.make_token_request(row, reading) for row in rows]
        try:
            return self._read_videos(videos, reading)
        except CorruptShard as error:
            if error.kind != "missing":
                raise
        self.refresh()
        videos = [self.make_token_request(self.metadata(video.row["video_id"]), reading) for video in videos]
        return self._read_videos(videos, reading)

    def check_options(
        self, retention_ratio: float | None, order: TokenOrder, evidence: Sequence[str], verify: bool
    ) -> TokenReadOptions:
        """Check the options of ``get``, and return them as a Reading; the ratio is checked per video.

        Raises:
            EvidenceNotCached: the cache lacks the evidence, or has it from several sources.
            ValueError: ``order`` is unknown, or ``evidence`` is a string.
        """
        check_not_string(evidence, "evidence")
        if order not in ("index", "selection"):
            raise ValueError(f'order must be "index" or "selection", got {order!r}')
        sources = self._find_evidence(evidence)
        columns = (*(name for name in self._columns if name != "video_id"), *dict.fromkeys(sources.values()))
        return TokenReadOptions(retention_ratio, order, sources, columns, verify)

    def make_token_request(self, row: VideoRow, reading: TokenReadOptions) -> TokenRequest:
        """Return the request for the token rows of a video, given its live row.

        Raises:
            RemovedVideo, FailedVideo: the video has no tokens.
            RatioNotCached: the ratio is above the stored one, or the method has no nested selections.
            ValueError: the ratio is not in (0, 1].
            CorruptShard: the counts in the row contradict each other.
        """
        if row["status"] == "removed":
            raise RemovedVideo(f"{row['video_id']!r} was removed from {self.store}: {row['error_message']}")
        if row["status"] != "ok":
            raise FailedVideo(
                f"{row['video_id']!r} failed: {row['error_class']}: {row['error_message']}", row["error_class"] or ""
            )
        if fault := next(iter_row_count_faults(row), None):
            raise CorruptShard(f"{self.store}: the row of {row['video_id']!r} contradicts itself: {fault}", "rows")
        return TokenRequest(row, count_tokens(row, reading.retention_ratio), reading.columns, self._columns)

    def _read_videos(self, videos: Sequence[TokenRequest], reading: TokenReadOptions) -> list[CachedVideo]:
        """Read videos run by run, and return them in the order of ``videos``.

        From an object store, threads fetch up to four further runs meanwhile. A CorruptShard names the video and the
        remedy.
        """
        runs = group_runs(videos)
        neighbours = [[videos[index] for index in run] for run in runs]
        fetch = partial(self._fetch, reading)
        ahead = self.store.folder is None and len(runs) > 1
        fetched = map_in_order(fetch, neighbours, _MAX_REQUESTS, _MAX_REQUESTS) if ahead else map(fetch, neighbours)
        result: dict[int, CachedVideo] = {}
        for run, (shard, data) in zip(runs, fetched, strict=True):
            for index in run:
                with self._video_in_errors(videos[index].row["video_id"]):
                    result[index] = self._read_video(videos[index], reading, shard, data)
        return [result[index] for index in range(len(videos))]

    def _fetch(self, reading: TokenReadOptions, run: Sequence[TokenRequest]) -> tuple[TokenShard, FetchedFile | None]:
        """Open the token shard of a run, and fetch the run's bytes; return (the shard, the bytes).

        The bytes are None for a local folder, and for videos that are verified: these are read later.
        """
        first = run[0].row
        with self._video_in_errors(first["video_id"]):
            shard = self._open_shard(first["token_shard"], first["footer_hash"])
            # A verified video is read whole, by its own request.
            return shard, None if reading.verify or self.store.folder is not None else shard.fetch_all(run)

    def _read_video(
        self, rows: TokenRequest, reading: TokenReadOptions, shard: TokenShard, fetched: FetchedFile | None
    ) -> CachedVideo:
        """Read a video's first token rows, and only their row groups; a verified video is read completely.

        Raises:
            CorruptShard: the shard is damaged or contradicts the video's row, or a position is out of range.
        """
        row = rows.row
        order = None
        vectors = dict[str, NDArray[np.int16]]()
        shard.check_width(row["hidden_size"], self.deepstack_levels, self.codec)
        if reading.verify:
            shard.require(rows.columns)
            table = shard.read_checked(row).select(list(rows.columns)).slice(0, rows.keep)
            order = None if reading.order == "selection" else sort_by_index(table)
        elif reading.order == "selection":
            table = shard.read(rows, fetched)
        else:
            table, order, vectors = shard.read_by_index(rows, fetched)
        check_positions(row, table)
        return build_video(row, table, self.header, reading.evidence, order, vectors)

    @contextmanager
    def _video_in_errors(self, video_id: str) -> Iterator[None]:
        """Add the video's id and the remedy to the message of a CorruptShard raised in the context."""
        try:
            yield
        except CorruptShard as error:
            remedy = (
                f"python -m jobs.verify {self.store} finds all such videos; without a copy of the file add --repair, "
                "which marks them for another attempt"
            )
            raise CorruptShard(f"{error} (reading {video_id!r}); {remedy}", error.kind) from error


def check_not_string(names: Sequence[str], name: str) -> None:
    """Raise ValueError if ``names`` is a string, since its letters would be taken for names."""
    if isinstance(names, str):
        raise ValueError(f"{name} must be a list of names, got {names!r}: write [{names!r}]")


def check_positions(row: VideoRow, table: pa.Table) -> None:
    """Raise CorruptShard if an index or a frame number of a video is null or out of range."""
    for name, end in (("index", row["n_total"]), ("frame", row["n_frames"])):
        column = table[name]
        values = column.to_numpy()
        if column.null_count or values.min() < 0 or values.max() >= end:
            raise CorruptShard(f"{row['token_shard']}: the column {name} is not from 0 to {end - 1}", "rows")


def count_tokens(row: VideoRow, retention_ratio: float | None) -> int:
    """Return the number of tokens that a video with the live row ``row`` has at ``retention_ratio``; all for None.

    Raises:
        RatioNotCached: the ratio is above the stored one, or smaller and the method has no nested selections.
        ValueError: the ratio is not in (0, 1].
    """
    stored_ratio = row["retention_ratio"]
    if retention_ratio is None:
        return int(row["n_tokens"])
    budget = budget_for(retention_ratio, row["n_total"])
    if retention_ratio > stored_ratio + 1e-9:
        raise RatioNotCached(
            f"{row['video_id']!r} is stored at retention ratio {stored_ratio}; {retention_ratio} is larger"
        )
    if abs(retention_ratio - stored_ratio) <= 1e-9:
        return int(row["n_tokens"])
    if not row["nested"]:
        raise RatioNotCached(
            f"{row['video_id']!r} was pruned by a method without an order of selection, so only its own retention "
            f"ratio {stored_ratio} can be served, not {retention_ratio}"
        )
    return min(budget, int(row["n_tokens"]))


def parse_json_columns(row: VideoRow) -> VideoRow:
    """Return a copy of ``row`` with its JSON columns parsed; null stays None.

    Raises:
        CorruptShard: a column holds something other than a JSON object.
    """
    values: dict[str, Json] = {}
    for name in JSON_COLUMNS:
        try:
            values[name] = None if row[name] is None else json.loads(row[name])
        except (ValueError, RecursionError):
            values[name] = ""
        if not isinstance(values[name], dict | None):
            raise CorruptShard(f"{name} of {row['video_id']!r} is no JSON object; restore the file of its row", "rows")
    return cast(VideoRow, {**row, **values})


def _read_rows(live: LiveVideos, shards: LiveShards, number: int) -> list[VideoRow]:
    """Read the rows of the videos in token shard ``number`` of ``shards``, with JSON columns parsed."""
    return [parse_json_columns(row) for row in live.table.read_rows(shards.get_locations(number))]


def group_runs(videos: Sequence[TokenRequest], limit: int = _MAX_RUN_BYTES) -> list[list[int]]:
    """Group the indices of ``videos`` into runs of adjacent videos in a token shard, sorted by shard and row group.

    The tokens of a run have at most ``limit`` bytes (as bfloat16), unless it is a single larger video. A video that is
    not read completely ends its run.
    """
    runs: list[list[int]] = []
    size = 0  # bytes of the last run
    end = None  # the position after the last run; None if its last video is not read completely
    positions = [(video.row["token_shard"], video.row["first_row_group"]) for video in videos]
    for index in sorted(range(len(videos)), key=positions.__getitem__):
        row = videos[index].row
        keep = videos[index].keep
        shard, first = positions[index]
        n_bytes = 2 * keep * int(row["hidden_size"])
        if positions[index] == end and size + n_bytes <= limit:
            runs[-1].append(index)
            size += n_bytes
        else:
            runs.append([index])
            size = n_bytes
        end = (shard, first + len(row["row_counts"])) if keep == row["n_tokens"] else None
    return runs


def map_in_order(work: Callable[[T], R], items: Iterable[T], threads: int, ahead: int) -> Iterator[R]:
    """Yield ``work(item)`` for each item, in order, computed by a pool of ``threads`` threads.

    At most ``ahead`` items beyond the current one are submitted. An exception of ``work`` is raised when its item's
    turn comes.
    """
    waiting: deque[Future[R]] = deque()
    with request_threads(threads) as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
