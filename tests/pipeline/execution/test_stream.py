"""From a graph to the disk: every shard is committed as it comes; what stops a run is said with how far it came."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from rich.console import Console

from pipeline.errors import RunFailed
from pipeline.execution.monitoring.heartbeats import Heartbeats
from pipeline.execution.progress import LineReporter
from pipeline.execution.stream import PlannedGraph, commit_all
from pipeline.execution.watchdog import Watchdog
from pipeline.prune.graph import PRUNING, plan_resources
from pipeline.storage.stores import LocalStore


def shard(*statuses: str) -> pa.Table:
    return pa.table({"status": list(statuses)})


def nothing(*args: object) -> None:
    pass


class Told(Watchdog):
    """A watchdog that a worker has told why it gave up."""

    why: str | None = None

    def failure(self) -> str | None:
        return self.why


class Committing:
    """Commits the shards of ``commit_all`` as files of a folder."""

    def __init__(self, root: Path, total: int) -> None:
        self.store = LocalStore(root)
        self.said = io.StringIO()
        plan = plan_resources(4, 0, total)
        self.graph = PlannedGraph(build=nothing, commit=self.commit, plan=plan, total=lambda: total)
        self.watchdog = Told(Heartbeats(tuple(PRUNING.stages)), 60, plan, total, nothing)

    def commit(self, number: int, rows: pa.Table) -> None:
        self.store.put(f"shards/{number}", "\n".join(rows["status"].to_pylist()).encode())

    def run(self, shards: Iterable[pa.Table]) -> int:
        self.store.make()
        with LineReporter(Console(file=self.said, width=200), self.graph.total, 60, PRUNING) as progress:
            commit_all(enumerate(shards), self.graph, self.watchdog, progress)
            return progress.at.failed


def test_every_shard_is_committed_and_failures_are_counted(tmp_path):
    committing = Committing(tmp_path, 5)
    assert committing.run([shard("ok", "failed"), shard("ok"), shard("failed", "ok")]) == 2
    assert [committing.store.read(f"shards/{number}") for number in range(3)] == [b"ok\nfailed", b"ok", b"failed\nok"]
    assert committing.said.getvalue().splitlines()[-1].startswith("5/5 videos, 2 failed")


def test_a_shard_is_on_disk_before_the_next_is_taken(tmp_path):
    committing = Committing(tmp_path, 2)

    def shards() -> Iterator[pa.Table]:
        for number in range(2):
            assert committing.store.names("shards", "") == [f"shards/{i}" for i in range(number)]
            yield shard("ok")

    assert committing.run(shards()) == 0


def test_rows_that_are_missing_fail_the_run(tmp_path):
    with pytest.raises(RunFailed, match="2 of 5 videos have no row; run the same command again"):
        Committing(tmp_path, 5).run([shard("ok"), shard("ok", "failed")])


def test_a_store_that_fails_is_named_with_how_far_the_run_came(tmp_path):
    committing = Committing(tmp_path, 3)

    def shards() -> Iterator[pa.Table]:
        yield shard("ok", "ok")
        (tmp_path / "shards" / "1").mkdir()  # in the place of the next one
        yield shard("ok")

    with pytest.raises(RunFailed, match=r"stopped after 2 of 3 videos: IsADirectoryError"):
        committing.run(shards())


@pytest.mark.parametrize(
    ("told", "said"), [(None, "the node is gone"), ("OSError: No space left on device", "OSError: No space left")]
)
def test_what_ray_raises_is_told_in_the_words_of_the_worker_where_it_said_any(tmp_path, told, said):
    committing = Committing(tmp_path, 3)
    committing.watchdog.why = told

    def shards() -> Iterator[pa.Table]:
        yield shard("ok")
        raise ray.exceptions.RaySystemError("the node is gone")

    with pytest.raises(RunFailed, match=rf"stopped after 1 of 3 videos: .*{said}"):
        committing.run(shards())
