"""Which rows of a damaged cache cannot be trusted any more, and which videos beside them can."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import CacheHeader
from pipeline.cache.live_rows import VideoRows
from pipeline.storage.stores import Store
from pipeline.verify.tokens import check_token_shard

Place = tuple[str, int]  # a videos shard and a row in it
WHOLE = frozenset({"missing", "footer"})  # what no video of a token shard survives
OF_TOKENS = frozenset({*WHOLE, "damaged", "rows", "checksum", "tokens"})
_CONTRADICTS = "its row contradicts itself"
_SUPERSEDED = "a later attempt replaced it"


@dataclass(frozen=True)
class Verdict:
    """What is to be done with rows of the videos table.

    Attributes:
        marked: rows that must not count as ok, and why.
        counted: those of them that count now.
        left: videos whose ok row goes on to count.
        moving: rows that go on, by the damaged token shard that they lie in.
        spared: token shards that were damaged when they were read first, and sound the second time.
    """

    marked: dict[Place, str]
    counted: set[Place]
    left: int
    moving: dict[str, list[Place]]
    spared: list[str]


class Judge:
    """Knows every ok row of a cache.

    Args:
        rows: ``pipeline.verify.rows.KEPT`` of every row that can be read, with shard and row.
        live: those of them that count.
        bad: rows that contradict themselves.
    """

    def __init__(
        self, store: Store, header: CacheHeader, rows: pa.Table, live: pa.Table, bad: Collection[Place]
    ) -> None:
        self._store, self._header, self._bad = store, header, bad
        self._live = set(zip(live["shard"].to_pylist(), live["row"].to_pylist(), strict=True))
        self._full = VideoRows(store)
        self._of_shard: dict[str, list[Place]] = defaultdict(list)
        self._of_video: dict[str, list[tuple[str | None, Place]]] = defaultdict(list)
        self._video: dict[Place, str] = {}
        ok = rows.filter(pc.equal(rows["status"], "ok"))
        for row in ok.select(["token_shard", "video_id", "shard", "row"]).to_pylist():
            place = (row["shard"], row["row"])
            self._of_video[row["video_id"]].append((row["token_shard"], place))
            self._video[place] = row["video_id"]
            if row["token_shard"] is not None:
                self._of_shard[row["token_shard"]].append(place)

    def verdict(self, damaged: Iterable[str]) -> Verdict:
        """``damaged`` are token shards with problems; each is read again. Raises OSError where the store fails."""
        marked = dict.fromkeys(self._bad, _CONTRADICTS)
        todo = set(damaged) | self._earlier(self._bad, marked)
        todo |= {shard for video in self._of_video.values() for shard, place in video if place in self._bad and shard}
        todo &= self._of_shard.keys()
        touched, spared = set[str](), list[str]()
        while todo:
            name = todo.pop()
            wrong, places = self._wrong(name), self._of_shard[name]
            if wrong is None and not any(place in marked for place in places):
                spared.append(name)
                continue
            touched.add(name)
            for place in places:
                if place not in self._live:
                    marked.setdefault(place, _SUPERSEDED)
                elif wrong and place in wrong:
                    marked.setdefault(place, wrong[place])
            todo |= self._earlier(places, marked) - touched
        moving = {name: [place for place in self._of_shard[name] if place not in marked] for name in sorted(touched)}
        left = sum(place not in marked for place in self._video if place in self._live)
        return Verdict(marked, marked.keys() & self._live, left, moving, sorted(spared))

    def _earlier(self, places: Iterable[Place], marked: dict[Place, str]) -> set[str]:
        """Mark the earlier ok rows of those videos among ``places`` whose live row goes.

        They may be of another file, and must not come back. Returns the token shards that these name.
        """
        shards = set[str]()
        for place in places:
            if place in marked and place in self._live:
                for shard, other in self._of_video[self._video[place]] if place in self._video else ():
                    if other not in marked:
                        marked[other] = _SUPERSEDED
                        shards |= set() if shard is None else {shard}
        return shards

    def _wrong(self, name: str) -> dict[Place, str] | None:
        """What is wrong with videos in a token shard; None where nothing is, or nothing that can be repaired."""
        places = [place for place in self._of_shard[name] if place not in self._bad]
        one_each = {self._video[place]: place for place in places}  # a row may be in several files
        rows = [(place[0], self._full(*place)) for place in one_each.values()]
        if not rows:
            return {}
        problems = check_token_shard(self._store, name, rows, self._header).problems
        problems = [problem for problem in problems if problem.kind in OF_TOKENS]
        if fatal := next((problem for problem in problems if problem.kind in WHOLE), None):
            return dict.fromkeys(places, fatal.what)
        wrong = {problem.video_id: problem.what for problem in reversed(problems)}
        known = {place: wrong[self._video[place]] for place in places if self._video[place] in wrong}
        return known if problems else None
