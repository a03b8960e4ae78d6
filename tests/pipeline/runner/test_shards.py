"""What a graph gives, bundled by number, age and what writers get done; and a cache as a source of Ray Data."""

import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch

from pipeline import TokenCache
from pipeline.runner.shards import GraphBatch, RunGraph, ShardBundler, WrittenShard
from pipeline.runner.stages import Stage, start_actors
from pipeline.storage.stores import ObjectStore
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.clusters import PLAIN, ray_here
from tests.builders.stores import S3Server
from tests.waiting import wait_until


def batch(*ids: str) -> GraphBatch:
    return GraphBatch([pa.table({"id": list(ids)})], len(ids))


def of_three(clock: Mock) -> ShardBundler:
    """Shards of three items, or of what is a minute old, without writers."""
    return ShardBundler(RunGraph(dataset=None, items_per_shard=3), age_s=60, clock=clock)


def given(shards: ShardBundler) -> list[list[str]]:
    """Return the ids of each shard that is written, and acknowledge it."""
    return [shard.rows["id"].to_pylist() for shard in committed(shards)]


def committed(shards: ShardBundler, until_the_end: bool = False) -> list[WrittenShard]:
    """Return the shards that are written now, or until no shard is left, and acknowledge each."""
    written = []
    while (shard := shards.next_written()) is not None or (until_the_end and shards.finish()):
        if shard is not None:
            written.append(shard)
            shards.acknowledge()
    return written


def test_a_shard_is_full_by_its_number_of_items_and_a_part_that_is_too_large_begins_the_next():
    shards = of_three(Mock(return_value=0.0))
    for name in ("a", "b", "c", "de", "fg", "hijk", "l"):
        shards.take(batch(*name))
    assert given(shards) == [["a", "b", "c"], ["d", "e"], ["f", "g"], ["h", "i", "j", "k"]]  # a part is never cut
    assert shards.finish() and given(shards) == [["l"]]


def test_what_has_waited_long_enough_is_a_shard_although_nothing_follows():
    shards = of_three(clock := Mock(return_value=0.0))
    shards.take(batch("a"))
    for second, more, expected in (
        *((59.0, "b", []), (60.0, "", [["a", "b"]])),
        *((119.0, "c", []), (178.0, "", []), (179.0, "", [["c"]])),  # its own time
    ):
        clock.return_value = second
        if more:
            shards.take(batch(more))
        assert given(shards) == expected
    assert not shards.has_unwritten


def test_a_shard_whose_commit_was_interrupted_is_given_again_under_its_number():
    shards = of_three(Mock(return_value=0.0))
    shards.take(batch("a", "b", "c"))
    first = shards.next_written()
    assert (first.number, first.rows["id"].to_pylist()) == (0, ["a", "b", "c"])
    assert shards.has_unwritten and (shards.n_taken, shards.n_committed) == (3, 0)  # the commit was interrupted
    shards.take(batch("d"))
    assert shards.finish()
    again, other = committed(shards)
    assert again.number == 0 and again.rows.equals(first.rows)
    assert (other.number, other.rows["id"].to_pylist()) == (1, ["d"])
    assert not shards.has_unwritten and (shards.n_taken, shards.n_committed) == (4, 4)


def test_items_that_turn_out_not_to_exist_are_taken_no_more_once_the_shard_is_committed():
    shards = of_three(Mock(return_value=0.0))
    shards.take(GraphBatch(batch("a", "b").tables, 3))  # three at most
    assert (shards.n_taken, given(shards), shards.n_taken, shards.n_committed) == (3, [["a", "b"]], 2, 2)


class Gated:
    """A writer that takes its time: until there is a file."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def write(self, *blocks: pa.Table) -> pa.Table:
        wait_until(self._gate.exists, "the gate")
        return pa.concat_tables(blocks)


def has_ended(writer) -> bool:
    try:
        ray.get(writer.write.remote(pa.table({"id": ["nobody's"]})))
    except ray.exceptions.RayActorError:
        return True
    return False


@pytest.fixture(scope="module")
def two_cpus():
    with ray_here(*PLAIN):
        yield


def put(shards: ShardBundler, n_items: int) -> None:
    """Take items, each a batch in the object store."""
    for number in range(n_items):
        assert shards.has_room()
        shards.take(GraphBatch([ray.put(batch(f"v{number}").tables[0])], 1))


@pytest.mark.slow
def test_no_more_is_taken_than_writers_have_to_do_and_one_that_is_killed_loses_nothing(two_cpus, tmp_path):
    gate = tmp_path / "open"
    flow = RunGraph(None, 2, partial(start_actors, Gated, Stage(0, 0, 1, "one"), (gate,)))
    with ShardBundler(flow, age_s=3600) as shards:
        put(shards, 6)  # a shard that is written, one that is next, and one that waits for its place
        assert not shards.has_room() and shards.next_written(wait_s=0) is None
        (writer,) = shards._writers
        ray.kill(writer, no_restart=False)
        gate.touch()
        done = sorted(committed(shards, until_the_end=True), key=lambda shard: shard.number)
    assert sorted(name for shard in done for name in shard.rows["id"].to_pylist()) == [f"v{n}" for n in range(6)]
    assert done[-1].number == 2
    wait_until(lambda: has_ended(writer), "the writer's end")  # which the end of the block asked for


@pytest.mark.slow
def test_shards_that_are_written_meanwhile_are_committed_together_and_again_after_an_interrupt(two_cpus, tmp_path):
    gates = [tmp_path / name for name in "ab"]
    flow = RunGraph(None, 1, lambda *have: [*map(gated, gates)])
    with ShardBundler(flow, age_s=3600) as shards:
        put(shards, 4)
        for gate in gates:
            gate.touch()
        ray.wait([writing.answer for writing in shards._writing.values()], num_returns=4, timeout=60)
        first = shards.next_written()
        assert (first.number, sorted(first.rows["id"].to_pylist())) == (3, ["v0", "v1", "v2", "v3"])
        assert shards.finish()  # the driver was interrupted in its commit
        (again,) = committed(shards)
        assert again.rows.equals(first.rows) and not shards.has_unwritten and shards.n_committed == 4


def gated(gate: Path):
    (writer,) = start_actors(Gated, Stage(0, 0, 1, "one"), (gate,))
    return writer


IDS = [f"v{i}" for i in range(6)]


def make(store, **more) -> None:
    store = write_header(store, hidden_size=16, **more)
    for start in (0, 2, 3):
        shard = [(name, random_tokens(int(name[1:]), (4, 25, 16))) for name in IDS[start : {0: 2, 2: 3, 3: 6}[start]]]
        levels = [[tokens] * more.get("deepstack_levels", 0) for _, tokens in shard]
        videos = [encoded(n, t, 0.25, "gstep", deep) for (n, t), deep in zip(shard, levels, strict=True)]
        write_shard(store, f"run{start}", *videos)


def tokens_of(row) -> torch.Tensor:
    return torch.frombuffer(bytearray(row["tokens"]), dtype=torch.bfloat16).view(-1, int(row["hidden_size"]))


def check(rows, cache: TokenCache, ratio: float | None) -> None:
    assert [row["video_id"] for row in rows] == IDS
    for row in rows:
        video = cache.get(row["video_id"], ratio)
        assert torch.equal(tokens_of(row).view(torch.int16), video.tokens.view(torch.int16))
        assert np.array_equal(row["index"], video.index) and np.array_equal(row["rank"], video.rank)
        assert np.array_equal(row["frame"], video.frame) and row["merged"] is None
        assert np.array_equal(row["density"], video.density) and json.loads(row["metadata"]) == video.metadata


@pytest.mark.slow
def test_ray_reads_what_the_cache_holds(tmp_path):
    from pipeline import ray_dataset  # noqa: PLC0415

    make(tmp_path)
    with S3Server() as server, ray_here(*PLAIN):
        store = ObjectStore(server.uri("c"), server.objects())
        make(store)
        here, there = TokenCache(tmp_path), TokenCache(store.root, store=store)
        data = ray_dataset(tmp_path, retention_ratio=0.1, blocks=2)
        check(sorted(data.take_all(), key=lambda row: row["video_id"]), here, 0.1)
        check(sorted(ray_dataset(there).take_all(), key=lambda row: row["video_id"]), there, None)
        assert ray_dataset(here, IDS[:3]).count() == 3
