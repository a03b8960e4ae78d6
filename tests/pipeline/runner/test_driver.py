"""A run from its claim to its summary: the steps in their order, each shard on disk as it comes, every way to end."""

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pyarrow as pa
import pytest
import ray
from rich.console import Console

from pipeline.errors import CacheLocked, IdentityMismatch, RunFailed, UsageError
from pipeline.options import RunOptions
from pipeline.runner import driver, watchdog
from pipeline.runner.claim import Claim, find_holder
from pipeline.runner.driver import Driver
from pipeline.runner.heartbeats import Heartbeats, WorkerReport
from pipeline.runner.run_record import Outcome, RunFile
from pipeline.runner.shards import GraphOutput, RunGraph
from pipeline.runner.stages import Plan, Stage, StageWords, Wording
from pipeline.runner.watchdog import ClusterChanged
from pipeline.storage.stores import LocalStore
from tests.pipeline.rays import handle_of


@dataclass(frozen=True)
class WordPlan(Plan):
    """One writer of words."""

    wording: ClassVar[Wording] = Wording("writing", "word", {"write": StageWords("written", "look at it")}, "--words")
    write: Stage
    workers = "1 to write"


class Words(RunGraph):
    """A graph of words, two a shard: each is its own batch. A word "?" makes the graph fail, as Ray would."""

    def batches(self) -> Iterator[GraphOutput]:
        for word in self.dataset:
            if word == "?":
                raise ray.exceptions.RaySystemError("the node is gone")
            yield GraphOutput([pa.table({"word": [word], "status": ["failed" if word == "bad" else "ok"]})], 1)


class WordRun(Driver[RunOptions, list[str], Outcome]):
    """Writes the words that are not there yet, each as a file; it notes each step and who has a claim meanwhile."""

    def __init__(self, root: Path, *words: str, store: LocalStore | None = None) -> None:
        options = RunOptions(device="cpu", s3_endpoint="http://secret.example", log_interval=60)
        super().__init__(options, Console(file=io.StringIO(), width=200))
        self.place, self.words = store or LocalStore(root), words
        self.steps: list[tuple[str, str | None]] = []
        self.n_failed = 0

    def step(self, name: str) -> None:
        found = find_holder(self.place) if self.place.root.is_dir() else None
        self.steps.append((name, found["run_id"] if found else None))

    @property
    def said(self) -> str:
        return self.console.file.getvalue()

    def prepare(self) -> None:
        self.step("prepare")
        self.store, self.run_id = self.place, "r1"

    def match(self) -> None:
        self.step("match")
        self.words = tuple(word.lower() for word in self.words)

    def list_remaining(self) -> list[str]:
        self.step("remaining")
        return self.select_unfinished(list(self.words))

    def process(self, todo: list[str]) -> None:
        self.step("process")
        self.run_file = RunFile(self.store, {"run_id": self.run_id})
        with self.run_file:
            self.stream(todo)

    def plan(self, items: list[str]) -> WordPlan:
        return WordPlan(Stage(0, 0, 1, ""))

    def replan(self, n_items: int) -> None:
        return None

    def build(self, items: list[str], plan: Plan, heartbeats: object) -> RunGraph:
        return Words(items, 2)

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}

    def commit(self, number: int, rows: pa.Table) -> None:
        for word, status in zip(*(rows[name].to_pylist() for name in ("word", "status")), strict=True):
            self.store.put(f"words/{word}", f"{number} {status}".encode())
            self.n_failed += status != "ok"

    def select_unfinished(self, items: list[str]) -> list[str]:
        return [word for word in items if not self.store.exists(f"words/{word}")]

    def summarise(self, todo: list[str], wall_s: float) -> Outcome:
        self.step("summarise")
        n_ok = len(self.store.names("words", "")) - self.n_failed
        new = {"n_new": len(todo), "n_new_failed": self.n_failed, "wall_s": wall_s}
        return Outcome(n_ok=n_ok, failures={}, examples={}, n_missing=len(self.words) - n_ok - self.n_failed, **new)

    def tidy(self) -> None:
        self.step("tidy")

    def on_disk(self) -> dict[str, str]:
        return {name.removeprefix("words/"): self.store.read(name).decode() for name in self.store.names("words", "")}


@pytest.fixture(autouse=True)
def heartbeats_in_this_process(monkeypatch):
    """The heartbeats' own class, which answers here instead of in an actor of Ray."""
    heartbeats = Heartbeats(("write",))
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(driver, "heartbeats_of", lambda stages: nullcontext(handle_of(heartbeats.read)))


def record_of(root: Path) -> dict[str, object]:
    return json.loads((root / "runs" / "r1.json").read_text())


def test_the_steps_come_in_order_and_all_but_the_first_under_the_claim(tmp_path):
    run = WordRun(tmp_path, "A", "b", "bad")
    outcome = run.run()
    steps = ("match", "remaining", "process", "summarise", "tidy")
    assert run.steps == [("prepare", None), *((name, "r1") for name in steps)]
    assert (outcome.n_ok, outcome.n_new, outcome.n_new_failed, outcome.n_missing) == (2, 3, 1, 0)
    assert run.on_disk() == {"a": "0 ok", "b": "0 ok", "bad": "1 failed"}  # what match gave
    assert find_holder(run.store) is None and "3/3 words, 1 failed" in run.said
    # The configuration is shown without its secrets and defaults of nothing.
    assert run.said.startswith("configuration: ") and "device=cpu" in run.said and "s3_endpoint=(set)" in run.said
    assert "secret.example" not in run.said and "revision=" not in run.said and "max_attempts=" not in run.said
    record = record_of(tmp_path)
    assert (record["status"], record["error"], record["summary"]["n_ok"]) == ("finished", None, 2)
    # Where nothing is left nothing is streamed or recorded.
    (tmp_path / "runs" / "r1.json").unlink()
    again = WordRun(tmp_path, "A", "b", "bad")
    assert again.run().n_new == 0 and not (tmp_path / "runs" / "r1.json").exists()
    assert [name for name, _ in again.steps] == ["prepare", "match", "remaining", "summarise"]


@pytest.mark.parametrize("step", ["prepare", "match", "remaining", "process", "summarise"])
def test_a_store_that_fails_ends_the_run_and_frees_the_place(tmp_path, step):
    class Failing(WordRun):
        def step(self, name: str) -> None:
            super().step(name)
            if name == step:
                raise OSError(28, "No space left on device")

    run = Failing(tmp_path, "a")
    with pytest.raises(RunFailed, match=r"OSError: .*No space left") as caught:
        run.run()
    assert isinstance(caught.value.__cause__, OSError)
    assert run.steps[-1][0] == step and find_holder(run.place) is None


@pytest.mark.parametrize("refusal", [UsageError("no"), IdentityMismatch("other settings")])
def test_a_refusal_stays_one(tmp_path, refusal):
    run = WordRun(tmp_path, "a")
    run.match = Mock(side_effect=refusal)
    with pytest.raises(type(refusal), match=str(refusal)):
        run.run()
    assert not (tmp_path / "words").exists()


def test_a_place_that_another_run_holds_is_not_touched(tmp_path):
    run = WordRun(tmp_path, "a")
    with Claim(LocalStore(tmp_path), "other", print), pytest.raises(CacheLocked, match="other"):
        run.run()
    assert [name for name, _ in run.steps] == ["prepare"] and not (tmp_path / "words").exists()


def test_a_shard_is_on_disk_before_the_graph_has_ended(tmp_path):
    class Watched(Words):
        def batches(self) -> Iterator[GraphOutput]:
            for number, batch in enumerate(super().batches()):
                # One batch waits to be fetched and one to be taken, so that five behind a shard it must be written.
                assert number < 7 or (tmp_path / "words" / "w0").exists()
                yield batch

    run = WordRun(tmp_path, *(f"w{number}" for number in range(9)))
    run.build = lambda items, plan, heartbeats: Watched(items, 2)
    run.run()
    assert run.on_disk()["w8"] == "4 ok" and len(run.on_disk()) == 9


class Full(LocalStore):
    """A store that is full once it is to hold "c"."""

    def put(self, name: str, data: bytes) -> None:
        if name == "words/c":
            raise OSError(28, "No space left on device", name)
        super().put(name, data)


def test_what_was_committed_before_the_store_failed_stays_and_the_record_says_why(tmp_path):
    with pytest.raises(RunFailed, match=r"the run stopped after 2 of 4 words: OSError: .*No space left"):
        WordRun(tmp_path, "a", "b", "c", "d", store=Full(tmp_path)).run()
    record = record_of(tmp_path)
    assert record["status"] == "failed" and "No space left" in record["error"] and "summary" not in record
    again = WordRun(tmp_path, "a", "b", "c", "d")
    assert again.run().n_new == 2 and sorted(again.on_disk()) == list("abcd")  # the rerun goes on


def test_rows_that_are_missing_fail_the_run(tmp_path):
    run = WordRun(tmp_path, *"abcde")
    run.build = lambda items, plan, heartbeats: Words(items[:3], 2)
    with pytest.raises(RunFailed, match=r"2 of 5 words have no row\. Rerun the command"):
        run.run()


@pytest.mark.parametrize(
    ("told", "said"), [(None, "the node is gone"), ("OSError: No space left on device", "OSError: No space left")]
)
def test_what_ray_raises_is_told_in_the_words_of_the_worker_and_what_came_out_is_written_first(
    tmp_path, monkeypatch, told, said
):
    def read() -> WorkerReport:
        return WorkerReport(failure=told)

    monkeypatch.setattr(driver, "heartbeats_of", lambda stages: nullcontext(handle_of(read)))
    run = WordRun(tmp_path, *"abc", "?", "d")
    with pytest.raises(RunFailed, match=rf"stopped after 3 of 5 words: .*{said}"):
        run.run()
    assert "stopping: flushing finished work" in run.said and sorted(run.on_disk()) == list("abc")


class Waiting(WordRun):
    """A run whose first graph gives three words and then nothing, until a look at its workers ends it."""

    graphs = n_looks = 0

    def __init__(self, root: Path, *words: str, ending: Mock) -> None:
        super().__init__(root, *words)
        self.options = RunOptions(device="cpu", stall_timeout=60, log_interval=60)
        self.ending, self.at_end = ending, threading.Event()

    def build(self, items: list[str], plan: Plan, heartbeats: object) -> RunGraph:
        self.graphs += 1
        return Words(self.endless(items[:3]) if self.graphs == 1 else items, 2)

    def endless(self, words: list[str]) -> Iterator[str]:
        """Words, and then a wait without end that an exception can end, as Ray's own."""
        yield from words
        self.at_end.set()  # the last word has left the graph
        while True:
            time.sleep(0.01)

    def find_stop_reason(self, report: WorkerReport) -> str | None:
        if self.graphs > 1 or not self.at_end.is_set():
            return None
        # The two words before the last are on disk by now. Before the second look the last one is taken too.
        self.n_looks += 1
        return self.ending() if self.n_looks == 2 else None


def test_what_is_left_is_planned_anew_where_the_cluster_changed_and_a_reason_to_give_up_ends_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    run = Waiting(
        tmp_path / "1", *"abcde", ending=Mock(side_effect=ClusterChanged("nodes were lost and nothing moves"))
    )
    assert run.run().n_missing == 0 and run.graphs == 2
    assert "note: nodes were lost and nothing moves. Rescheduling 2 words on the current nodes" in run.said
    # What had come out of the first graph was written first; no number of a shard is used again.
    assert run.on_disk() == {"a": "0 ok", "b": "0 ok", "c": "1 ok", "d": "2 ok", "e": "2 ok"}
    run = Waiting(tmp_path / "2", *"abcde", ending=Mock(return_value="all words are bad"))
    with pytest.raises(RunFailed, match="all words are bad"):
        run.run()
    assert sorted(run.on_disk()) == list("abc")


def test_no_time_is_told_while_items_are_still_found(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    run = Waiting(tmp_path, *"abcde", ending=Mock(return_value="all words are bad"))
    run.knows_all = lambda items: False
    with pytest.raises(RunFailed, match="all words are bad"):
        run.run()
    assert "words/s, more words are being listed" in run.said and " s left" not in run.said


class Bundles(Words):
    """A graph whose batches may hold two words each, and hold one."""

    def batches(self) -> Iterator[GraphOutput]:
        return (GraphOutput(batch.tables, 2) for batch in super().batches())


@pytest.mark.parametrize(("lost", "notes"), [("", []), ("c", ["2 finished words were not written: "])])
def test_bundles_that_are_not_full_do_not_pass_for_words_that_were_not_written(tmp_path, monkeypatch, lost, notes):
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    run = Waiting(tmp_path, *"abcde", ending=Mock(return_value="all words are bad"))
    run.build = lambda items, plan, heartbeats: Bundles(run.endless(items[:3]), 3)
    commit = run.commit

    def commit_or_fail(number: int, rows: pa.Table) -> None:
        if lost in rows["word"].to_pylist():
            raise OSError("the disk is full")
        commit(number, rows)

    run.commit = commit_or_fail
    with pytest.raises(RunFailed, match="all words are bad") as caught:
        run.run()
    assert sorted(run.on_disk()) == sorted({*"abc"} - {lost})
    assert [note[: len(notes[0])] for note in getattr(caught.value, "__notes__", ())] == notes


def test_the_items_of_earlier_graphs_count_in_the_line_of_a_run_that_stops(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    run = Waiting(tmp_path, *"abcd", "?", ending=Mock(side_effect=ClusterChanged("nodes were lost")))
    with pytest.raises(RunFailed, match=r"the run stopped after 4 of 5 words: .*the node is gone"):
        run.run()
    assert run.graphs == 2 and sorted(run.on_disk()) == list("abcd")


def test_a_stop_says_how_many_items_have_a_row_after_the_last_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    with pytest.raises(KeyboardInterrupt) as caught:
        Waiting(tmp_path, *"abcde", ending=Mock(side_effect=KeyboardInterrupt())).run()
    assert caught.value.__notes__ == ["this run has written rows for 3 of 5 words"]


class FullDisk(Waiting):
    """A run on a node whose disk is full, in which nothing moves after three words."""

    def can_run_on(self, cluster: dict[str, float]) -> bool:
        return self.has_others

    has_others = False


@pytest.mark.parametrize("has_others", [False, True])
def test_a_run_that_stands_still_beside_a_full_disk_names_it(tmp_path, monkeypatch, has_others):
    """With other nodes the rest is rescheduled there."""
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    monkeypatch.setattr(driver, "SHRUNK_S", 0.1)
    monkeypatch.setattr(driver, "_FULL_S", 0.3)
    monkeypatch.setattr(driver, "sum_resources", lambda nodes, most=None: {})
    monkeypatch.setattr(driver, "find_known_full_disks", lambda without, known: {"n": "host n (/ray, 100% full)"})
    run = FullDisk(tmp_path, *"abcde", ending=Mock(return_value=None))
    run.has_others = has_others
    if has_others:
        assert run.run().n_missing == 0 and run.excluded_nodes == {"n": "host n (/ray, 100% full)"}
    else:
        with pytest.raises(
            RunFailed, match=r"no word moved for 0 s; the disk is full on host n \(/ray, 100% full\), an"
        ):
            run.run()
    assert run.said.count("note: the disk is full on host n (/ray, 100% full), and nothing moves. ") == 1
    assert "Free space on them, or start these nodes with --temp-dir" in run.said


@pytest.mark.parametrize(("ending", "last"), [(KeyboardInterrupt(), [5.0]), (RunFailed("bad"), [0.05, "nodes"])])
def test_a_stop_waits_little_for_workers_and_not_for_nodes(tmp_path, monkeypatch, ending, last):
    """A cluster that ends at the same time answers neither."""
    looks: list[object] = []

    def get(answer: WorkerReport, timeout: float) -> WorkerReport:
        looks.append(timeout)
        return answer

    def nodes() -> list[object]:
        looks.append("nodes")
        return []

    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.05)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "nodes", nodes)
    run = Waiting(tmp_path, *"abcde", ending=Mock(side_effect=ending))
    with pytest.raises(type(ending)):
        run.run()
    assert looks[-len(last) :] == last and sorted(run.on_disk()) == list("abc")
