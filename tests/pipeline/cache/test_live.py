"""The live rows, the ledger of a run, and merges; writers and mergers whose requests come in any order.

Requests come late and twice, and who sends them is killed: the order is drawn from a seed, and the live rows are held
against a model, the rule of the live row in plain Python, after each of them.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.live import Ledger
from pipeline.cache.merging import KEEP, merge_table_files, merge_table_fully, merge_unless_damaged
from pipeline.cache.schema import LATER
from pipeline.cache.table import build_table, list_table_files, read_file, serialize_small
from pipeline.inspect.report import list_failed_videos
from pipeline.prune.summary import summarize_videos
from pipeline.storage.stores import LocalStore, Store
from tests.builders.caches import limit_merges, make_cache, random_tokens, read_live, write_header, write_shard
from tests.pipeline.damage import Dying, merge_before_each_read
from tests.pipeline.verifying import NOW, kinds, verified, video_of

ORDER = ("removed", "ok", "failed")
Row = dict[str, Any]


def serialise_rows(run: str, rows: list[Row], made_with: str | None = None) -> tuple[str, pa.Buffer]:
    """Return the name and the content of the small file that commits the rows."""
    table = build_table([{"uri": f"/x/{row['video_id']}", "run_id": run, **row} for row in rows])
    return serialize_small(run, 0, table, made_with)


def commit_rows(store: Store, run: str, rows: list[Row], made_with: str | None = None) -> str:
    """Put rows as a small file, and return its name."""
    name, data = serialise_rows(run, rows, made_with)
    store.put(name, data)
    return name


def commit_failures(store: Store, run: str, ids: Iterable[str], attempts: int = 1, made_with: str | None = None) -> str:
    """Put a failed row of each video as a small file, and return its name."""
    rows = [{"video_id": video_id, "status": "failed", "attempts": attempts} for video_id in ids]
    return commit_rows(store, run, rows, made_with)


def draw_rows(draw: random.Random, run: str) -> list[Row]:
    """Draw rows of some of twelve videos."""
    return [
        {
            "video_id": f"v{number}",
            "run_id": run,
            "status": draw.choices(ORDER, (1, 8, 8))[0],
            "attempts": draw.randint(1, 3),
            "rewritten": draw.randint(0, 1),
            "source_size": draw.randint(1, 2),
        }
        for number in draw.sample(range(12), draw.randint(1, 5))
    ]


class Model:
    """The rule in plain Python: of each video the best row that was ever committed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def live(self) -> dict[str, tuple[Any, ...]]:
        """Return the status, the attempts and the run of each video's live row."""
        best: dict[str, tuple[Any, ...]] = {}
        for row in build_table([{"uri": f"/x/{row['video_id']}", **row} for row in self.rows]).to_pylist():
            rank = (ORDER.index(row["status"]), -row["attempts"], -row["rewritten"], row["tie_break"])
            if row["video_id"] not in best or rank < best[row["video_id"]][0]:
                best[row["video_id"]] = rank, facts_of(row)
        return {name: facts for name, (_, facts) in best.items()}


def facts_of(row: Row) -> tuple[Any, ...]:
    return row["status"], row["attempts"], row["run_id"]


def live_in(store: Store) -> dict[str, tuple[Any, ...]]:
    """Return what ``Model.live`` returns, as a reader of the store has it."""
    rows = read_live(store, ("video_id", "status", "attempts", "run_id")).to_pylist()
    return {row["video_id"]: facts_of(row) for row in rows}


def assert_all_agree(store: Store, model: Model) -> None:
    """Check that whoever asks for live rows gets the model's: all at once, one by one, or in the ledger of a run."""
    live = model.live()
    assert live_in(store) == live
    cache, ledger = TokenCache(str(store), store=store), Ledger(store).refresh()
    assert cache.video_ids == sorted(name for name, (status, *_) in live.items() if status == "ok")
    assert set(cache.failed) == {name for name, (status, *_) in live.items() if status == "failed"}
    assert len(ledger) == len(live)
    for name, place in zip(live, ledger.find(pa.array(live, pa.string())).tolist(), strict=True):
        row = cache.metadata(name)
        assert facts_of(row) == facts_of(ledger.read(place)) == live[name]
        assert ledger.failed(np.array([place])).item() == (live[name][0] == "failed")
        # A merge may forget attempts on another file with their row; none are made up.
        others = [other for other in model.rows if other["video_id"] == name]
        on_others = [other["attempts"] for other in others if other["source_size"] != row["source_size"]]
        assert ledger.columns["earlier"][place] <= max(on_others, default=0)


@pytest.fixture
def store(tmp_path):
    return write_header(tmp_path)


def test_a_cache_without_a_commit_has_columns_and_no_rows(store):
    table, ledger = read_live(store, ("video_id", "status")), Ledger(store).refresh()
    assert (table.schema.names, len(table)) == (["video_id", "status", "file", "row"], 0)
    assert len(ledger) == 0 and ledger.find(pa.array(["a"])).tolist() == [-1]


def test_more_text_than_offsets_of_32_bits_reach(tmp_path, monkeypatch):
    """Taking rows of it raised "offset overflow", at about 27 million videos."""
    store = make_cache(tmp_path, {"v": random_tokens(0), "w": random_tokens(1)})
    monkeypatch.setattr("pipeline.cache.live._MAX_TEXT_BYTES", 1)
    live = read_live(store)
    assert live.schema.field("video_id").type == pa.large_string()
    assert live["video_id"].to_pylist() == ["v", "w"] == TokenCache(tmp_path).video_ids
    assert TokenCache(tmp_path).metadata("w")["status"] == "ok"


def row(video_id, error_class=None, attempts=1):
    status = "failed" if error_class else "ok"
    return {"video_id": video_id, "status": status, "attempts": attempts, "error_class": error_class}


def test_a_ledger_reads_what_was_committed_since_and_nothing_twice(store):
    commit_rows(store, "r2", [row("a"), row("b", "crash")])
    ledger = Ledger(store).refresh()
    assert sum(column.nbytes for column in ledger.columns.values()) == 2 * 100
    reads = []
    store.read_all, read_all = lambda names: [reads.extend(names), read_all(names)][1], store.read_all
    newer = commit_rows(store, "r1", [row("b", attempts=2), row("c", "timeout"), row("a")])
    assert len(ledger.refresh().refresh()) == 3 and reads == [newer]
    rows = ledger.find(pa.array(["a", "b", "c", "d"]))
    assert rows[3] == -1
    assert [ledger.classes[fault] for fault in ledger.columns["fault"][rows[:3]]] == ["ok", "ok", "timeout"]
    assert [ledger.count_run_rows(run) for run in ("r1", "r2", "r")] == [(3, 1), (0, 0), (0, 0)]
    assert ledger.read(rows[0].item())["run_id"] == TokenCache(store.root).metadata("a")["run_id"]  # of two alike


def test_the_ledger_and_the_failures_are_read_whatever_is_merged_away_meanwhile(store):
    """They raised FileNotFoundError, which ended jobs.inspect, and a run beside another one."""
    commit_failures(store, "r", "abcd")
    merge_table_fully(store, None)
    cache = TokenCache(store.root)

    def read_ledger(merging):
        ledger = Ledger(merging).refresh()
        return [ledger.read(place) for place in range(len(ledger))]

    def read_failures(merging):
        cache.store = merging
        return list_failed_videos(cache)

    for read in (read_ledger, read_failures):  # jobs.recode and jobs.merge read the table as the second does
        for merging in merge_before_each_read(
            store.root, lambda reads: [commit_failures(store, f"{reads}{name}", name) for name in "efgh"]
        ):
            assert sorted(row["video_id"] for row in read(merging)) == [*"abcdefgh"]


def test_a_summary_reads_rows_that_the_run_has_merged_since_it_began(store):
    """A run that merged the row of an earlier failure away failed at its end, with all videos committed."""
    commit_rows(store, "r1", [row("a"), row("b", "crash")])
    ledger = Ledger(store).refresh()
    commit_rows(store, "r2", [row("c")])
    merge_table_fully(store, None)
    summary = summarize_videos(ledger.refresh())
    assert (summary.n_ok, summary.examples) == (2, {"crash": ("b", "")})
    for name in store.names("videos", ".parquet"):
        store.delete(name)
    with pytest.raises(FileNotFoundError):  # nobody has merged these rows
        summarize_videos(ledger.refresh())


def test_rows_behind_an_error_are_read_by_the_next_refresh(store, monkeypatch):
    """The files that were read before the error counted as read, and their rows were lost."""
    ledger = Ledger(store).refresh()
    commit_rows(store, "r1", [row("a")])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="away"):
        patch.setattr(ledger, "_to_columns", Mock(side_effect=OSError("the store is away")))
        ledger.refresh()
    assert len(ledger) == 0 and len(ledger.refresh()) == 1


def test_a_reader_goes_on_when_its_files_were_merged_and_deleted(store):
    for number in range(4):
        write_shard(store, f"r{number}", video_of(f"v{number}", number))
    cache = TokenCache(store.root)
    shards = cache.shards()
    before = [list(cache.rows_of(shards, number)) for number in range(len(shards))]
    opened = TokenCache(store.root)
    merge_table_fully(store, read_fingerprint(store))
    assert [opened.get(f"v{number}").metadata["run_id"] for number in range(4)] == ["r0", "r1", "r2", "r3"]
    late = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert [list(late.rows_of(shards, number)) for number in range(len(shards))] == before


def test_what_is_merged_waits_and_is_deleted_by_a_later_merge(store):
    for number in range(3):
        commit_failures(store, f"r{number}", [f"v{number}"])
    first = merge_table_files(store, None)
    assert (len(first.read), len(first.written), first.waiting, first.deleted) == (3, 1, 3, [])
    again = merge_table_files(store, None)
    assert (again.read, again.written, again.waiting) == ([], [], 3)
    assert sorted(merge_table_files(store, None, keep=NOW).deleted) == sorted(first.read)
    assert [file.level for file in list_table_files(store)] == [1]
    assert next(merge_table_files(store, None).lines()) == "nothing to merge"


def test_a_run_merges_once_many_small_files_wait(store):
    said = []
    for number in range(5):
        commit_failures(store, f"r{number}", [f"v{number}"])
    merge_unless_damaged(store, None, 5, said.append)
    assert len(list_table_files(store)) == 5
    merge_unless_damaged(store, None, 4, said.append)
    assert len(list_table_files(store)) == 6 and said == []
    path = store.root / commit_failures(store, "r9", ["v9"])
    path.write_bytes(b"PAR1")
    merge_unless_damaged(store, None, 0, said.append)
    assert len(said) == 1 and "were not merged" in said[0] and "jobs.compact tries again" in said[0]


@pytest.mark.parametrize("puts", [1, 3])
def test_a_merge_that_is_killed_between_its_files_loses_no_row(store, monkeypatch, puts):
    """What it read must not be deleted on the word of the files that it did write."""
    limit_merges(monkeypatch, GROUP_ROWS=2, _PART_GROUPS=1)
    dying = Dying(store.root, puts)
    for number in range(4):
        commit_failures(store, f"r{number}", [f"v{number}-{i}" for i in range(3)])
    before = live_in(store)
    with pytest.raises(KeyboardInterrupt):
        merge_table_files(dying, None, keep=NOW)
    assert sum(file.level > 0 for file in list_table_files(store)) == puts
    dying.left = 0  # it only deletes, then is killed again
    with suppress(KeyboardInterrupt):
        merge_table_files(dying, None, keep=NOW)
    assert live_in(store) == before
    merge_table_fully(store, None)
    assert live_in(store) == before


def test_sorted_files_that_share_one_video_are_merged_on_demand(store):
    """The last video of the one is the first of the other."""
    for attempts in (1, 2):
        commit_failures(store, f"r{attempts}", ["v"], attempts)
        for _ in range(2):
            merge_table_files(store, None, keep=NOW, max_rows=0)
    assert [file.level for file in list_table_files(store)] == [1, 1]
    merge_table_fully(store, None)
    assert len(list_table_files(store)) == 1 and live_in(store)["v"][1] == 2


def test_few_levels_hold_many_commits(store, monkeypatch):
    """As 2,880 commits of a day, but smaller: files stay few, and a row is written a few times."""
    limit_merges(monkeypatch, GROUP_ROWS=16, _PART_GROUPS=8)
    most, written = 0, 0
    for number in range(64):
        commit_failures(store, f"r{number:04}", [f"v{number}-0", f"v{number}-1"])
        if number % 8 == 7:
            written += merge_table_files(store, None, keep=NOW).rows
        most = max(most, len(list_table_files(store)))
    assert len(live_in(store)) == 128
    assert most <= 8 + 8 + 8 and written < 128 * 8
    assert len({file.level for file in list_table_files(store)}) <= 4


def test_many_rows_of_few_videos_are_one_file_however_many_there_were(store, monkeypatch):
    """Ranges of keys begin at rows, so that no merged file is missing for want of any."""
    limit_merges(monkeypatch, GROUP_ROWS=2, _PART_GROUPS=1, _MAX_FILES_PER_STEP=5)  # in three steps
    for number in range(12):
        commit_failures(store, f"r{number:02}", ["v0", "v1", "v2"], attempts=number)
    merge_table_files(store, None, everything=True, keep=NOW)
    assert merge_table_files(store, None, everything=True, keep=NOW).waiting == 0
    assert {row[1] for row in live_in(store).values()} == {11} and len(list_table_files(store)) <= 3


def test_a_run_leaves_large_levels_to_jobs_compact(store):
    for run in ("r0", "r1"):
        commit_failures(store, run, [f"{run}-{i}" for i in range(20)])
    merge_table_files(store, None, keep=NOW)
    commit_failures(store, "r9", [f"v{i}" for i in range(20)])
    done = merge_table_files(store, None, keep=NOW, max_rows=1)
    assert (len(done.read), done.rows) == (1, 20)
    assert len(merge_table_files(store, None, everything=True, keep=NOW).read) == 2 and len(live_in(store)) == 60


def test_rows_of_another_identity_are_left_out_and_counted(store):
    own, foreign = read_fingerprint(store), "blake2b:00"
    commit_failures(store, "mine", ["a"], 1, own)
    other = commit_failures(store, "other", ["a", "b"], 9, foreign)
    assert set(TokenCache(store.root).failed) == {"a"} and TokenCache(store.root).foreign_files == [other]
    assert [row["attempts"] for row in list_failed_videos(TokenCache(store.root))] == [1]
    assert len(Ledger(store, own).refresh()) == 1
    done = merge_table_files(store, own, everything=True, keep=NOW)
    assert done.foreign == [other] and store.exists(other)
    commit_failures(store, "x", ["c"], 1, foreign)
    merge_table_files(store, foreign, everything=True, keep=NOW)
    cache = TokenCache(store.root)
    assert set(cache.failed) == {"a"} and "c" not in cache and len(cache.foreign_files) == 3
    assert set(Ledger(store, own).refresh().columns["attempts"]) == {1}


@pytest.mark.parametrize("merged", [False, True])
def test_attempts_on_another_file_are_told_apart(store, merged):
    """Also where merges have dropped the rows of those attempts."""
    commit_rows(store, "r0", [{"video_id": "b", "status": "failed", "attempts": 4, "source_size": 5}])
    for attempts, size in ((1, 5), (2, 5), (3, 7), (4, 7)):
        row = {"video_id": "a", "status": "failed", "attempts": attempts, "source_size": size}
        commit_rows(store, f"r{attempts}", [row])
        if merged:
            merge_table_fully(store, None)
    assert len(list_table_files(store)) == (1 if merged else 5)
    ledger = Ledger(store).refresh()
    rows = ledger.find(pa.array(["a", "b"]))
    assert ledger.columns["attempts"][rows].tolist() == [4, 4]
    assert ledger.columns["earlier"][rows].tolist() == [2, 0]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_cache_without_the_columns_that_came_later_is_whole(wrong, tmp_path):
    """It is read, verified, and merged with rows that have them; the columns are not there, or of the right type."""
    store = write_header(tmp_path, hidden_size=8)
    write_shard(store, "r", video_of("v", 0))
    (file,) = list_table_files(store)
    table = read_file(store, file).drop_columns([*LATER])
    if wrong:
        table = table.append_column(next(iter(LATER)), pa.array([1], pa.int32()))
    store.delete(file.name)
    store.put(*serialize_small("r", 0, table, read_fingerprint(store)))
    problems = verified(store).problems
    assert any(next(iter(LATER)) in problem.what for problem in problems) == bool(problems) == wrong
    if wrong:
        return
    assert [TokenCache(tmp_path).metadata("v")[name] for name in LATER] == [None] * len(LATER)
    write_shard(store, "s", video_of("w", 1, color_transfer="smpte2084"))
    merge_table_files(store, read_fingerprint(store), everything=True, keep=NOW)
    cache = TokenCache(tmp_path)
    assert [cache.metadata(name)["color_transfer"] for name in ("v", "w")] == [None, "smpte2084"]
    assert kinds(verified(store)) == []


def merge(store: Store, draw: random.Random) -> None:
    with suppress(FileNotFoundError):  # the other merger deleted it
        merge_table_files(store, None, everything=draw.random() < 0.5, keep=draw.choice([NOW, NOW, KEEP]))


class Killed(BaseException):
    """The process ends in mid-request."""


class Steps:
    """Runs actors one request at a time, the next of them drawn from a seed; holds the rows against a model between.

    What a request changes may come twice, or late: after others, when its sender has long tried again.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder, self.model = random.Random(seed), folder, Model()
        self.rows: dict[str, list[Row]] = {}  # what a small file holds, by its name
        self._late: list[Callable[[], None]] = []
        self._changed = True  # since the rows were last compared
        self._turn: dict[threading.Thread, threading.Semaphore] = {}
        self._yielded = threading.Semaphore(0)

    def wait_for_turn(self) -> None:
        """Called by an actor before each of its requests. Raises Killed."""
        self._yielded.release()
        self._turn[threading.current_thread()].acquire()
        if self.draw.random() < 0.03:
            raise Killed

    def change(self, act: Callable[[], None]) -> None:
        """Carry out a change as a store may: at once; twice, as the reply was lost; or again at any time later."""
        kind = self.draw.choice(["once", "once", "twice", "late"])
        self._do(act)
        if kind == "twice":
            self.wait_for_turn()
            self._do(act)
        elif kind == "late":
            self._late.append(act)

    def run(self, *actors: Callable[[LocalStore], None]) -> None:
        for actor in actors:
            thread = threading.Thread(target=self._act, args=(actor,), daemon=True)
            self._turn[thread] = threading.Semaphore(0)
            thread.start()
            self._yielded.acquire()
        while self._turn:
            self._turn[self.draw.choice(list(self._turn))].release()
            self._yielded.acquire()
            if self._late and self.draw.random() < 0.2:
                self._do(self._late.pop(self.draw.randrange(len(self._late))))
            self.check()
        while self._late:
            self._do(self._late.pop())
            self.check()

    def _do(self, act: Callable[[], None]) -> None:
        self._changed = True
        act()

    def check(self) -> None:
        if self._changed:
            assert live_in(LocalStore(self.folder)) == self.model.live()
        self._changed = False

    def _act(self, actor: Callable[[LocalStore], None]) -> None:
        with suppress(Killed):
            self.wait_for_turn()
            actor(Stepped(self))
        del self._turn[threading.current_thread()]
        self._yielded.release()


class Stepped(LocalStore):
    """A folder of which one actor's requests are steps among those of others."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.folder)
        self.steps = steps

    def put(self, name, data) -> None:
        def act() -> None:
            LocalStore(self.root).put(name, data)
            self.steps.model.rows += self.steps.rows.get(name, [])

        self.steps.wait_for_turn()
        self.steps.change(act)

    def delete(self, name) -> None:
        self.steps.wait_for_turn()
        self.steps.change(lambda: LocalStore(self.root).delete(name))

    def names(self, folder, suffix):
        self.steps.wait_for_turn()
        return super().names(folder, suffix)

    def read(self, name):
        self.steps.wait_for_turn()
        return super().read(name)

    def read_slice(self, name, start, end=None):
        self.steps.wait_for_turn()
        return super().read_slice(name, start, end)


def test_every_step_of_an_interleaving_shows_the_model_s_rows(tmp_path, monkeypatch):
    """Three writers and two mergers, the requests of all in an order drawn from the seed."""
    limit_merges(monkeypatch, GROUP_ROWS=2, _PART_GROUPS=2)  # merges write several files of a few rows
    write_header(tmp_path)
    steps = Steps(tmp_path, seed=7)

    def write(number: int, store: LocalStore) -> None:
        for step in range(4):
            run = f"w{number}.{step}"
            rows = draw_rows(steps.draw, run)
            steps.rows[serialise_rows(run, rows)[0]] = rows
            commit_rows(store, run, rows)

    def merge_often(store: LocalStore) -> None:
        for _ in range(4):
            merge(store, steps.draw)

    steps.run(*(partial(write, number) for number in range(3)), merge_often, merge_often)
    store = LocalStore(tmp_path)
    assert_all_agree(store, steps.model)
    for _ in range(3):
        merge_table_files(store, None, everything=True, keep=NOW)
    assert_all_agree(store, steps.model)
    assert all(file.level for file in list_table_files(store))
