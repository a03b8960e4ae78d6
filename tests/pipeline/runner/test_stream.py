"""Written shards and their commits, over graphs of words: each shard on disk as it comes, and every way to end."""

import gc
import io
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import ray
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.options import RunOptions
from pipeline.runner import execution, run_record, shards, stream, watchdog
from pipeline.runner.cluster.head import HeadLost
from pipeline.runner.job import Job, Watch
from pipeline.runner.progress import Progress
from pipeline.runner.shards import GraphBatch, RunGraph, ShardBundler, WrittenShard
from pipeline.runner.stages import Plan, Stage, StageWords, Wording
from pipeline.runner.stream import Stream, commit_all
from pipeline.runner.watchdog import ClusterChanged, is_still_running
from pipeline.runner.worker_reports import Heartbeats, WorkerReport
from pipeline.storage.outages import OUTAGES, Outage
from tests.builders.clusters import handle_of
from tests.waiting import wait_until

WRITING = Wording("writing", "word", {"write": StageWords("written", "look at it")}, "--words")


@dataclass(frozen=True)
class WordPlan(Plan):
    """One writer of words."""

    wording: ClassVar[Wording] = WRITING
    write: Stage
    workers = "1 to write"


class WordGraph(RunGraph):
    """A graph of words, two a shard: each is its own batch. A word "?" makes the graph fail, as Ray would."""

    def batches(self) -> Iterator[GraphBatch]:
        for word in self.dataset:
            if word == "?":
                raise ray.exceptions.RaySystemError("the node is gone")
            yield GraphBatch([pa.table({"word": [word], "status": ["failed" if word == "bad" else "ok"]})], 1)


class Words(list[str]):
    """Words to write."""

    KEY = ("word",)
    is_complete = True

    def without(self, rows: pa.Table) -> "Words":
        return Words(word for word in self if word not in rows["word"].to_pylist())


class WordJob(Job[Words]):
    """Plans one writer, whatever the cluster; notes what each graph is built for."""

    wording = WRITING

    def __init__(self, **options: Any) -> None:
        options = {"device": "cpu", "log_interval": 60, "stall_timeout": 60, **options}
        super().__init__(RunOptions(**options), Console(file=io.StringIO(), width=200))
        self.built: list[Words] = []

    @property
    def said(self) -> str:
        return self.console.file.getvalue()

    def plan(self, items: Words) -> WordPlan:
        return WordPlan(Stage(0, 0, 1, ""))

    def replan(self, n_items: int) -> None:
        return None

    def graph(self, items: Words, plan: Plan, heartbeats: object) -> RunGraph:
        self.built.append(items)
        return WordGraph(items, 2)

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


class Disk(dict[str, str]):
    """What is committed: the number of its shard and the status of each word. It is full once it is to hold a word."""

    def __init__(self, is_full_at: str | None = None) -> None:
        self.is_full_at = is_full_at

    def commit(self, number: int, rows: pa.Table) -> None:
        words, states = (rows[name].to_pylist() for name in ("word", "status"))
        if self.is_full_at in words:
            raise OSError(28, "No space left on device", self.is_full_at)
        self.update((word, f"{number} {status}") for word, status in zip(words, states, strict=True))


class Endless:
    """Words, and then a wait without end that an exception can end, as Ray's own."""

    def __init__(self, words: list[str]) -> None:
        self._words, self.at_end = words, threading.Event()

    def __iter__(self) -> Iterator[str]:
        yield from self._words
        self.at_end.set()  # the last word has left the graph
        while True:
            time.sleep(0.01)


class WaitingJob(WordJob):
    """Its first graph gives some words and then nothing more."""

    def __init__(
        self, items_per_shard: int = 2, kind: type[WordGraph] = WordGraph, n_words: int = 3, **options: Any
    ) -> None:
        super().__init__(**options)
        self._first = partial(kind, items_per_shard=items_per_shard)
        self._n_words = n_words
        self.start_writers: Callable[[], list[Writer]] | None = None

    def graph(self, items: Words, plan: Plan, heartbeats: object) -> RunGraph:
        self.built.append(items)
        if len(self.built) > 1:
            return WordGraph(items, 2)
        self.first = Endless(items[: self._n_words])
        return self._first(self.first, start_writers=self.start_writers)


class EndingWatch(Watch):
    """Ends the first graph of a WaitingJob by ``ending``, at the second look behind its last word.

    The words before are on disk by then, and the last word is taken.
    """

    def __init__(self, job: WordJob, ending: BaseException) -> None:
        super().__init__(Mock())
        self._job, self._endings = job, [copy(ending), None]  # what is raised gets notes

    def look(self, report: WorkerReport, progress: Progress) -> None:
        super().look(report, progress)
        is_over = len(self._job.built) == 1 and self._job.first.at_end.is_set() and self._endings
        if is_over and (ending := self._endings.pop()) is not None:
            raise ending


@pytest.fixture(autouse=True)
def everything_here_and_quick(monkeypatch):
    """The heartbeats' own class, which answers here instead of in an actor; looks and waits are 50 ms apart."""
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    heartbeats_that_read(monkeypatch, Heartbeats(("write",)).read)
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(execution, "TICK_S", 0.05)


def heartbeats_that_read(patch: pytest.MonkeyPatch, read: Callable[[], WorkerReport]) -> None:
    patch.setattr(
        execution, "run_heartbeats", lambda stages: nullcontext(SimpleNamespace(read=SimpleNamespace(remote=read)))
    )


class Answer:
    """What a writer answers: rows, an error, or None while it has not come."""

    def __init__(self, rows: pa.Table | Exception | None) -> None:
        self.rows = rows


class Writer:
    """The handle of a writer that answers at once.

    It never answers for the word "w", fails for "x", and does not take "y".
    """

    def __init__(self) -> None:
        self.write = SimpleNamespace(remote=self._write)

    def _write(self, *tables: pa.Table) -> Answer:
        rows = pa.concat_tables(tables)
        words = rows["word"].to_pylist()
        if "y" in words:
            raise ray.exceptions.RaySystemError("no writer takes it")
        return Answer(None if "w" in words else ray.exceptions.RaySystemError("no disk") if "x" in words else rows)


def start_writers() -> list[Writer]:
    return [Writer(), Writer()]


@pytest.fixture
def writers_in_this_process(monkeypatch):
    """Writers of graphs that answer here."""

    def get(answer: Any, timeout: float | None = None) -> Any:
        result = getattr(answer, "rows", answer)
        if isinstance(result, Exception):
            raise result
        return result

    def wait(answers: list[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        ready = [answer for answer in answers if answer.rows is not None]
        if len(ready) < num_returns:
            time.sleep(timeout)
        return ready, []

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", lambda writer: None)


def write(disk: Disk, job: WordJob, words: str | list[str], watch: Watch | None = None) -> None:
    """Commit the words to the disk, as a run does."""
    words = words if isinstance(words, Words) else Words(words)
    commit_all(Stream(job, words, watch or Watch(Mock())), disk.commit)


def write_until(ending: BaseException, disk: Disk, job: WaitingJob, words: str | list[str]) -> str:
    """Commit words until the first graph ends by ``ending``; return what the run that ends says, with its notes."""
    with pytest.raises((RunFailed, KeyboardInterrupt)) as caught:
        write(disk, job, words, EndingWatch(job, ending))
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


CHANGED = ClusterChanged("nodes were lost")
BAD = RunFailed("all words are bad")
THREE_OF_FIVE = "this run has written rows for 3 of 5 words"


def test_every_word_has_a_row_and_failures_are_counted():
    disk, job = Disk(), WordJob()
    watch = Watch(Mock())
    write(disk, job, ["a", "b", "bad"], watch)
    assert disk == {"a": "0 ok", "b": "0 ok", "bad": "1 failed"}
    assert "starting workers: 1 to write" in job.said and "3/3 words, 1 failed" in job.said
    assert len(watch.reports) == 1 and job.n_shards == 2
    write(disk, job, "c")  # another stream of the job
    assert disk["c"] == "2 ok"


def test_no_words_start_nothing():
    job, watch = WordJob(), Watch(Mock())
    write(Disk(), job, [], watch)
    assert (job.built, job.said, watch.reports) == ([], "", [])


def test_a_stream_that_has_ended_gives_nothing_more_and_counts_the_last_shard_once():
    with Stream(WordJob(), Words("abc"), Watch(Mock())) as words:
        assert [(shard.number, shard.rows["word"].to_pylist()) for shard in words] == [(0, ["a", "b"]), (1, ["c"])]
        assert list(words) == []
        words.check_complete()


def test_a_shard_is_on_disk_before_the_graph_has_ended():
    class Watched(WordGraph):
        def batches(self) -> Iterator[GraphBatch]:
            for number, batch in enumerate(super().batches()):
                # One batch waits to be fetched and one to be taken, so that five behind a shard it must be written.
                assert number < 7 or "w0" in disk
                yield batch

    disk, job = Disk(), WordJob()
    job.graph = lambda items, plan, heartbeats: Watched(items, 2)
    write(disk, job, [f"w{number}" for number in range(9)])
    assert disk["w8"] == "4 ok" and len(disk) == 9


def test_a_committed_shard_does_not_stay_in_memory():
    """Its bytes are Ray's: they would fill the object store of this node."""
    bytes_of_shards: list[weakref.ref] = []

    class Large(WordGraph):
        def batches(self) -> Iterator[GraphBatch]:
            for word in self.dataset:
                letters = np.frombuffer(bytearray(word * 2, "ascii"), np.uint8)
                bytes_of_shards.append(weakref.ref(letters))
                ends = pa.py_buffer(np.array([0, 1, 2], np.int32))
                words = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(letters)])
                del letters
                yield GraphBatch([pa.table({"word": words, "status": ["ok", "ok"]})], 2)

    job = WordJob()
    job.graph = lambda items, plan, heartbeats: Large(items[::2], 2)
    with Stream(job, Words("aabbcc"), Watch(Mock())) as words:
        for shard in words:
            if shard.number == 1:
                gc.collect()
                assert bytes_of_shards[0]() is None
        words.check_complete()
        assert len(bytes_of_shards) == 3


def test_what_was_committed_before_the_store_failed_stays_and_the_error_says_how_much():
    disk, job = Disk(is_full_at="c"), WordJob()
    with pytest.raises(RunFailed, match=r"the run stopped after 2 of 4 words: OSError: .*No space left") as caught:
        write(disk, job, "abcd")
    assert isinstance(caught.value.__cause__, OSError)
    assert "flushing" not in job.said  # a store that failed would fail again
    assert sorted(disk) == ["a", "b"]


def test_rows_that_are_missing_fail_the_run():
    job = WordJob()
    job.graph = lambda items, plan, heartbeats: WordGraph(items[:3], 2)
    with pytest.raises(RunFailed, match=r"^2 of 5 words have no row\. Rerun the command") as caught:
        write(Disk(), job, "abcde")
    # Nothing is left to write: the time for last writes begins with the record of the run.
    assert "flushing" not in job.said and "last_writes_until" not in vars(caught.value)


@pytest.mark.parametrize(
    ("told", "said"), [(None, "the node is gone"), ("OSError: No space left on device", "OSError: No space left")]
)
def test_what_ray_raises_is_told_in_the_words_of_the_worker_and_what_came_out_is_written_first(monkeypatch, told, said):
    heartbeats_that_read(monkeypatch, lambda: WorkerReport(failure=told))
    disk, job = Disk(), WordJob()
    with pytest.raises(RunFailed, match=rf"^the run stopped after 3 of 5 words: .*{said}"):
        write(disk, job, [*"abc", "?", "d"])
    assert "stopping: flushing finished work (up to 15 s)" in job.said and sorted(disk) == list("abc")


def test_a_graph_that_failed_has_ended_when_the_cause_is_searched(monkeypatch):
    """The search starts a process on each node."""
    job = WaitingJob()
    ended: list[bool] = []

    def search(*_: object, **__: object) -> execution.DiskSearch:
        ended.append(not any(thread.name.startswith("graph of ") for thread in threading.enumerate()))
        return execution.DiskSearch({}, {"n": "host n"})

    monkeypatch.setattr(execution, "find_full_disks", search)
    monkeypatch.setattr(
        ShardBundler, "next_written", Mock(side_effect=ray.exceptions.RaySystemError("a writer is gone"))
    )
    with pytest.raises(RunFailed, match="a writer is gone; no process started on host n, as on a full disk: look at"):
        write(Disk(), job, "abcde")
    assert ended == [True]


def test_what_is_left_is_planned_anew_where_the_cluster_changed():
    disk, job = Disk(), WaitingJob()
    watch = EndingWatch(job, CHANGED)
    write(disk, job, "abcde", watch)
    assert "note: nodes were lost. Rescheduling 2 words on the current nodes" in job.said
    # What had come out of the first graph was written first; no number of a shard is used again.
    assert disk == {"a": "0 ok", "b": "0 ok", "c": "1 ok", "d": "2 ok", "e": "2 ok"}
    assert job.built == [[*"abcde"], [*"de"]] and len(watch.reports) == 2 and job.n_shards == 3


class Growing(Words):
    """Words that are still being found."""

    is_complete = False


class Found(Words):
    """Words to which two come that were not known when the graph began."""

    def without(self, rows: pa.Table) -> Words:
        return Words([*super().without(rows), "f", "?"])


class Bundles(WordGraph):
    """A graph whose batches may hold two words each, and hold one."""

    def batches(self) -> Iterator[GraphBatch]:
        return (GraphBatch(batch.tables, 2) for batch in super().batches())


@pytest.mark.parametrize(
    ("ending", "words", "full_at", "said", "written"),
    [
        (BAD, "abcde", None, "all words are bad", "abc"),
        (BAD, Growing("abcde"), None, "all words are bad", "abc"),
        (KeyboardInterrupt(), "abcde", None, f"\n{THREE_OF_FIVE}", "abc"),
        (CHANGED, "abcd?", None, "the run stopped after 4 of 5 words: .*the node is gone.*", "abcd"),
        (CHANGED, Found("abcde"), None, "the run stopped after 6 of 7 words: .*the node is gone.*", "abcdef"),
        (CHANGED, "abcde", "c", "the run stopped after 2 of 5 words: OSError: .*No space left.*", "ab"),
    ],
)
def test_a_run_that_stops_says_how_many_words_have_a_row_behind_the_last_writes(ending, words, full_at, said, written):
    """Those of an earlier graph count."""
    disk, job = Disk(full_at), WaitingJob()
    assert re.fullmatch(said, write_until(ending, disk, job, words), re.DOTALL)
    assert "".join(sorted(disk)) == written
    assert ("words/s, more words are being listed" in job.said) == isinstance(words, Growing)
    assert " s left" not in job.said or not isinstance(words, Growing)


@pytest.mark.parametrize(("lost", "said"), [(None, ""), ("c", "\n2 finished words were not written: .* No space left")])
def test_bundles_that_are_not_full_do_not_pass_for_words_that_were_not_written(lost, said):
    disk = Disk(lost)
    assert re.match(f"all words are bad{said}", write_until(BAD, disk, job := WaitingJob(3, Bundles), "abcde"))
    assert sorted(disk) == sorted({*"abc"} - {lost}) and len(job.built) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), f"\n{THREE_OF_FIVE}"),
        (OSError(5, "no record"), "the run stopped after 3 of 5 words: OSError: [Errno 5] no record"),
        (RunFailed("no node is left"), "no node is left"),
    ],
)
def test_an_error_between_two_graphs_says_how_many_items_have_a_row(error, said):
    disk, job = Disk(), WaitingJob()
    job.plan = Mock(side_effect=[job.plan(Words()), error])
    assert write_until(CHANGED, disk, job, "abcde") == said and sorted(disk) == list("abc")


def test_workers_of_a_graph_that_does_not_end_are_not_joined_by_others(monkeypatch):
    monkeypatch.setattr(stream, "is_still_running", lambda within_s: True)
    said = write_until(CHANGED, Disk(), job := WaitingJob(), "abcde")
    assert said.startswith("nodes were lost, but the previous workers do not end") and len(job.built) == 1


@pytest.mark.parametrize("has_others", [False, True])
def test_a_run_that_stands_still_beside_a_full_disk_names_it(monkeypatch, has_others):
    """With other nodes the rest is rescheduled there."""
    monkeypatch.setattr(execution, "SHRUNK_S", 0.1)
    monkeypatch.setattr(execution, "_FULL_S", 0.3)
    monkeypatch.setattr(execution, "sum_resources", lambda nodes, most=None: {})
    monkeypatch.setattr(execution, "find_known_full_disks", lambda without, known: {"n": "host n (/ray, 100% full)"})
    disk, job = Disk(), WaitingJob()
    job.can_run_on = lambda cluster: has_others
    full = "the disk is full on host n (/ray, 100% full)"
    moved = rf"no word moved for \d+ s; {re.escape(full)}"
    with nullcontext() if has_others else pytest.raises(RunFailed, match=moved):
        write(disk, job, "abcde")
    if has_others:
        assert sorted(disk) == list("abcde") and job.excluded_nodes == {"n": "host n (/ray, 100% full)"}
        assert f"note: {full}. Rescheduling 2 words on the other nodes" in job.said
    assert job.said.count(f"note: {full}, and nothing moves. ") == 1 and "--temp-dir" in job.said


def test_a_disk_that_rays_error_finds_full_is_left_out(monkeypatch):
    monkeypatch.setattr(execution, "sum_resources", lambda nodes, most=None: {"CPU": 1.0})
    found = execution.DiskSearch({"n": "host n"}, {})
    monkeypatch.setattr(execution, "find_full_disks", lambda *_, **__: found)
    disk, job = Disk(), WordJob()
    job.graph = lambda items, plan, heartbeats: WordGraph(items if job.excluded_nodes else [*items[:3], "?"], 2)
    write(disk, job, "abcde")
    assert sorted(disk) == list("abcde") and job.excluded_nodes == {"n": "host n"}


@pytest.mark.parametrize(("ending", "last"), [(KeyboardInterrupt(), [5.0]), (RunFailed("bad"), [0.05, "nodes"])])
def test_a_stop_waits_little_for_workers_and_not_for_nodes(monkeypatch, ending, last):
    """A cluster that ends at the same time answers neither."""
    looks: list[object] = []

    def get(answer: WorkerReport, timeout: float) -> WorkerReport:
        looks.append(timeout)
        return answer

    def nodes() -> list[object]:
        looks.append("nodes")
        return []

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "nodes", nodes)
    write_until(ending, disk := Disk(), WaitingJob(), "abcde")
    assert looks[-len(last) :] == last and sorted(disk) == list("abc")


@pytest.mark.parametrize(
    ("ending", "ends_workers"),
    [
        (None, False),
        (RunFailed("bad"), True),
        (KeyboardInterrupt(), False),
        (HeadLost("the head is away"), False),
        (ClusterChanged("nodes were lost"), True),  # before another graph needs their resources
    ],
)
def test_a_stream_ends_its_graph_then_reads_the_last_report_and_ends_the_workers_last(
    monkeypatch, ending, ends_workers
):
    steps: list[str] = []

    def note(step: str, owner: type, name: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: [steps.append(step), method(*arguments)][1])

    @contextmanager
    def heartbeats_of(stages: object) -> Iterator[object]:
        try:
            yield handle_of(Heartbeats(("write",)).read)
        finally:
            steps.append("heartbeats")

    monkeypatch.setattr(execution, "run_heartbeats", heartbeats_of)
    monkeypatch.setattr(stream, "end_workers", lambda: steps.append("workers"))
    note("graph", watchdog.Fetcher, "close")
    note("writers", ShardBundler, "__exit__")
    note("report", Watch, "take_last")
    job = WordJob() if ending is None else WaitingJob()
    watch = Watch(Mock()) if ending is None else EndingWatch(job, ending)
    is_quiet = ending is None or isinstance(ending, ClusterChanged)
    with nullcontext() if is_quiet else pytest.raises(type(ending)):
        write(Disk(), job, "abcd" if is_quiet else "abc", watch)
    steps = list(dict.fromkeys(steps))
    assert steps == ["graph", "report", "writers", "heartbeats", *["workers"] * ends_workers]


def test_the_time_of_the_last_writes_begins_once_the_graph_has_ended(monkeypatch):
    """A graph that blocks outside Python code would take all of it."""
    blocked = threading.Event()

    class Stuck(WordGraph):
        def batches(self) -> Iterator[GraphBatch]:
            yield from WordGraph([*"abc"], 2).batches()
            job.first.at_end.set()
            blocked.wait()

    monkeypatch.setattr(watchdog, "_END_S", 1.0)
    monkeypatch.setattr(run_record, "LAST_WRITES_S", 0.8)
    monkeypatch.setattr(stream, "_RECORD_S", 0.1)
    disk, job = Disk(), WaitingJob(2, Stuck)
    start = time.monotonic()
    try:
        assert write_until(KeyboardInterrupt(), disk, job, "abcde") == f"\n{THREE_OF_FIVE}"
        assert time.monotonic() - start < 4  # all that wait for the graph share its second
    finally:
        blocked.set()
    assert sorted(disk) == list("abc")


@pytest.mark.parametrize(
    ("ending", "words", "n_words", "a_shard", "said", "written"),
    [
        (
            KeyboardInterrupt(), "awcde", 3, 1,
            "\n1 finished words were not written: no answer within 15 s. Rerun the command to process them again\n"
            "this run has written rows for 2 of 5 words",
            "ac",
        ),
        (CHANGED, "awcde", 3, 1, None, "acdew"),  # the cluster may have lost its node; then the words run again
        (KeyboardInterrupt(), "bcdxe", 4, 1, "\n1 finished words were not written: ", "bcd"),
        (BAD, "abyde", 3, 2, "all words are bad\n1 finished words were not written: ", "ab"),  # Ray has ended, say
    ],
)  # fmt: skip
def test_the_last_writes_leave_out_a_shard_whose_writer_fails_or_has_not_answered_within_their_time(
    monkeypatch, writers_in_this_process, ending, words, n_words, a_shard, said, written
):
    monkeypatch.setattr(run_record, "LAST_WRITES_S", 0.5)
    monkeypatch.setattr(stream, "_RECORD_S", 0.1)
    if "x" in words:
        monkeypatch.setattr(shards, "LOOK_S", 3600.0)  # behind the first shard none is looked for before the end
    disk, job = Disk(), WaitingJob(a_shard, n_words=n_words)
    job.start_writers = start_writers
    start = time.monotonic()
    if said is None:
        write(disk, job, words, EndingWatch(job, ending))
        assert job.built == [[*words], [*"wde"]]
    else:
        assert write_until(ending, disk, job, words).startswith(said)
    assert "".join(sorted(disk)) == written
    assert job.said.count("stopping: flushing finished work") == 1
    assert "w" not in words or 0.3 < time.monotonic() - start < 10


def test_a_last_write_that_fails_is_the_last_one():
    """A store that does not answer would not answer for the others, and takes all the time."""
    calls: list[int] = []

    def commit(number: int, rows: pa.Table) -> None:
        calls.append(number)
        raise RunFailed("the cache was deleted")

    job = WordJob()
    job.graph = lambda items, plan, heartbeats: WordGraph(items, 1)
    with pytest.raises(RunFailed, match=r"^the cache was deleted\n") as caught:
        commit_all(Stream(job, Words("abc"), Watch(Mock())), commit)
    assert calls == [0, 0]
    assert caught.value.__notes__[0].startswith("1 finished words were not written: the cache was deleted. Rerun")


def test_a_commit_counts_as_movement(monkeypatch):
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(execution, "Watchdog", partial(watchdog.Watchdog, clock=clock))
    disk, job = Disk(), WordJob()

    class Slow(WordGraph):
        def batches(self) -> Iterator[GraphBatch]:
            for number, batch in enumerate(super().batches()):
                yield batch
                wait_until(lambda: len(disk) > number, "the commit")  # noqa: B023 - called here and now
                clock.return_value += 40.0  # of 60

    job.graph = lambda items, plan, heartbeats: Slow(items, 1)
    write(disk, job, "abcd")
    assert clock.return_value == 160.0


def test_a_graph_in_which_nothing_moves_ends(monkeypatch):
    job = WaitingJob()
    seconds = count(0, 10)
    clock = Mock(side_effect=lambda: float(next(seconds)) if job.first.at_end.is_set() else 0.0)
    job.first = Endless([])  # for a clock that is read before there is a graph
    monkeypatch.setattr(execution, "Watchdog", partial(watchdog.Watchdog, clock=clock))
    with pytest.raises(RunFailed, match=r"no word moved for 60 s: .*; or raise --stall-timeout"):
        write(Disk(), job, "abcde")


@pytest.mark.parametrize("is_lost_at_a_call", [False, True])
def test_a_head_that_is_lost_ends_the_run_and_is_named(monkeypatch, is_lost_at_a_call):
    """The head is lost once the last word has left the graph."""

    class Lost(SimpleNamespace):
        def look(self) -> None:
            if not is_lost_at_a_call and not self.answers():
                raise HeadLost(self.describe_loss())

        def answers(self) -> bool:
            return not job.first.at_end.is_set()

        def describe_loss(self) -> str:
            return "the head is away"

    monkeypatch.setattr(execution, "Head", lambda say: Lost())
    job = WaitingJob(3)
    if is_lost_at_a_call:
        failures, next_written = [ray.exceptions.RaySystemError("a call failed")], ShardBundler.next_written

        def fail_once(written: ShardBundler, *wait: float) -> WrittenShard | None:
            if failures and job.first.at_end.is_set():
                raise failures.pop()
            return next_written(written, *wait)

        monkeypatch.setattr(ShardBundler, "next_written", fail_once)
    job.first = Endless([])  # for a head that is asked before there is a graph
    monkeypatch.setattr(stream, "end_workers", Mock(side_effect=AssertionError))
    with pytest.raises(HeadLost, match=r"^the run stopped after \d of 5 words: the head is away"):
        write(Disk(), job, "abcde")


def test_the_last_report_of_a_graph_names_excluded_workers_and_stores_that_do_not_answer(monkeypatch):
    report = WorkerReport(excluded_workers=["write on host h"], outages=[Outage("s3://b", time.time(), "503")])

    heartbeats_that_read(monkeypatch, lambda: report)
    job, watch = WordJob(), Watch(Mock())
    write(Disk(), job, "a", watch)
    assert "note: excluded worker: write on host h" in job.said and watch.reports == [report]
    assert OUTAGES.list_failing_stores() == ["s3://b"]
    OUTAGES.clear()


# Interrupts


#: The event, the file, the function and the line.
Point = tuple[str, str, str, int]


class Interrupt:
    """Raises KeyboardInterrupt once in the main thread: the ``nth`` time that it is at a point.

    A point is a line that is about to run, or a function that is about to return. Without a point it notes all points.
    """

    FILES: ClassVar = {module.__file__ for module in (stream, execution, shards)}

    def __init__(self, point: Point | None = None, nth: int = 0) -> None:
        self._point, self._left, self.seen = point, nth, list[Point]()
        self.is_over = False

    def __enter__(self) -> "Interrupt":
        self._tracer = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._tracer)

    def _call(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return None if self.is_over or frame.f_code.co_filename not in self.FILES else self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event in ("line", "return") and not self.is_over:
            self.seen.append((event, Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno))
            if self.seen[-1] == self._point:
                self._left -= 1
                if self._left == 0:
                    self.is_over = True
                    raise KeyboardInterrupt
        return self._step


class RecordedShards(ShardBundler):
    """Notes the words that it was given, and those that it has."""

    given: ClassVar[list[str]] = []
    had: ClassVar[list[str]] = []

    def take(self, batch: GraphBatch) -> None:
        words = batch.tables[0]["word"].to_pylist()
        self.given.extend(words)
        super().take(batch)
        self.had.extend(words)


class ChangingWatch(Watch):
    """Says once that the cluster has changed, when three words are taken: so a second graph does the rest."""

    is_over = False

    def look(self, report: WorkerReport, progress: Progress) -> None:
        if len(RecordedShards.had) == 3 and not self.is_over:
            self.is_over = True
            raise ClusterChanged("nodes were lost")


# The end of a run raises in the iterator's thread. Inside a weak reference's callback, Python only reports it and goes
# on; the test checks below whether the thread still ended.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*WeakSet:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("has_writers", [False, True])
def test_an_interrupt_at_any_point_loses_no_shard_and_counts_none_twice(
    monkeypatch, writers_in_this_process, has_writers
):
    monkeypatch.setattr(shards, "LOOK_S", 0.0)
    monkeypatch.setattr(execution, "ShardBundler", RecordedShards)
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.0)

    class Job(WordJob):
        def graph(self, items: Words, plan: Plan, heartbeats: object) -> RunGraph:
            return WordGraph(items, 2, start_writers if has_writers else None)

    def run(interrupt: Interrupt) -> tuple[set[str], list[tuple[int, set[str]]], KeyboardInterrupt | None]:
        """Write seven words; return what is on disk, the commits (number and words), and the interrupt."""
        RecordedShards.given.clear()
        RecordedShards.had.clear()
        commits: list[tuple[int, set[str]]] = []

        def commit(number: int, rows: pa.Table) -> None:
            commits.append((number, {*rows["word"].to_pylist()}))

        words = Stream(Job(), Words("abcdefg"), ChangingWatch(Mock()))
        # The interrupt comes while shards are written. What follows is the end of the run.
        monkeypatch.setattr(words, "check_complete", lambda: sys.settrace(None))
        error = None
        try:
            with interrupt:
                commit_all(words, commit)
        except KeyboardInterrupt as raised:
            error = raised
        return set[str]().union(*(words for _, words in commits)), commits, error

    on_disk, _, error = run(uninterrupted := Interrupt())
    assert error is None and on_disk == {*"abcdefg"}
    n_interrupted, faults = 0, []
    for point, n_times in Counter(uninterrupted.seen).items():
        nth = n_times if has_writers else 1  # in the second graph, or in the first one
        on_disk, commits, error = run(Interrupt(point, nth))
        n_interrupted += error is not None
        notes = getattr(error, "__notes__", [])
        line = f"this run has written rows for {len(on_disk)} of 7 words"
        is_whole, lost = {*RecordedShards.had} <= on_disk, {*RecordedShards.given} - on_disk
        is_told = len(lost) == 1 if "not written" in "".join(notes) else len(lost) <= 1  # on its way to the shards
        is_counted = error is None or line in notes or not (on_disk or notes)  # nothing is said before the first graph
        # The same rows may come again, together with others. Other rows have another number.
        are_apart = all(
            words <= later or (not words & later and number != later_number)
            for at, (number, words) in enumerate(commits)
            for later_number, later in commits[at + 1 :]
        )
        if not (is_whole and is_told and is_counted and are_apart) or is_still_running(1):
            faults.append((point, nth, RecordedShards.had, notes, commits))
    assert not faults, "\n".join(map(str, faults))
    assert n_interrupted > 100
