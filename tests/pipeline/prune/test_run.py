"""A prune run: what it asks of the cluster, what it does not get, what it commits, what it took, and its hours."""

import json
import math
import random
from unittest.mock import Mock, create_autospec

import pyarrow as pa
import pytest

from pipeline import TokenCache
from pipeline.cache.table import list_table_files
from pipeline.cache.token_shard import parse_shard_id
from pipeline.cache.writer import write_token_shard
from pipeline.errors import LimitReached, RunFailed
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.prune import table as table_module
from pipeline.prune.batches import pack_written
from pipeline.prune.committed import CommittedVideos, PruneWatch
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.prune.facts import Facts, measure_seconds, sum_column
from pipeline.prune.recipe import PruneStages, resolve_recipe
from pipeline.prune.resources import MAX_MEASURED_FILES, count_file_bytes, list_shortfalls, plan_workers
from pipeline.prune.run import MIN_ALIKE_FAILURES
from pipeline.prune.table import CacheTable
from pipeline.prune.todo import Todo
from pipeline.runner.monitor import Monitor
from pipeline.runner.progress import Progress
from pipeline.runner.run_record import RunFile
from pipeline.runner.worker_reports import WorkerReport
from pipeline.storage.stores import LocalStore, Store
from tests.builders.archives import write_tars
from tests.builders.caches import encoded, random_tokens, write_header
from tests.pipeline.prune.test_todo import search

NOTHING = Todo.of(TODO_SCHEMA.empty_table())


def failed(*names: str, attempts: int = 1) -> pa.Table:
    """Rows of videos that could not be read, as a worker gives them."""
    io = {"error_class": "io", "error_message": "gone", "retryable": True}
    return pack_written(
        [{"video_id": name, "uri": "u", "status": "failed", "attempts": attempts, **io} for name in names]
    )


def setups(device: str, token_bytes: int, frame_bytes: int = 10**6) -> PruneStages:
    """Setups that tell the sizes of videos of 32 frames, and no more."""
    decode = create_autospec(DecodeSetup, instance=True)
    decode.plan_largest_frames.return_value = decode.plan_typical_frames.return_value = 32, 1, frame_bytes // 32 // 3
    encode = create_autospec(EncodeSetup, instance=True, device=device)
    encode.estimate_video_bytes.return_value = encode.estimate_stored_bytes.return_value = token_bytes
    return PruneStages(decode, encode)


def test_a_number_of_videos_a_shard_wins_over_its_size():
    def planned(**options):
        cluster = {"CPU": 64.0, "GPU": 8.0, "object_store_memory": 1e12}
        wanted, _ = plan_workers(PruneConfig(**options), setups("cuda", 11_239_424), cluster, 10**5)
        return wanted.videos_per_shard

    assert (planned(), planned(target_shard_mb=1000), planned(target_shard_mb=1)) == (22, 88, 1)
    assert planned(videos_per_shard=3) == planned(videos_per_shard=3, target_shard_mb=1000) == 3


@pytest.mark.parametrize(
    ("frame_bytes", "store_bytes", "memory", "decoders", "queue"),
    [
        (32 * 384 * 384 * 3, 5e9, 64e9, 59, 4),  # of one size
        (32 * 1080 * 1920 * 3, 77e9, 256e9, 64, 2),  # of full HD, as they come
        (32 * 1080 * 1920 * 3, 5e9, 256e9, 6, 2),  # as many as the object store holds
        (32 * 1080 * 1920 * 3, 77e9, 32e9, 19, 2),  # as many as the memory holds
        (2**30, 1e9, 256e9, 1, 2),
    ],
)
def test_large_frames_fill_neither_the_object_stores_nor_the_memory(frame_bytes, store_bytes, memory, decoders, queue):
    cluster = {"CPU": 64.0, "GPU": 8.0, "object_store_memory": store_bytes, "memory": memory}
    _, plan = plan_workers(PruneConfig(), setups("cuda", 11_239_424, frame_bytes), cluster, 10**5)
    assert (plan.decode.workers, plan.decode.in_flight) == (decoders, queue)
    assert plan.videos_per_bundle == 1 or queue == 4
    if queue == 2:
        first_results = plan.decode.workers * plan.decode.in_flight * frame_bytes
        assert plan.encode.in_flight >= 2 and (first_results <= store_bytes / 2 or decoders == 1)


def test_a_number_of_frames_that_few_videos_reach_holds_no_decoder_back():
    stages = setups("cuda", 11_239_424, 768 * 600_000 * 3)
    stages.decode.plan_typical_frames.return_value = 32, 600, 1000
    cluster = {"CPU": 64.0, "GPU": 8.0, "object_store_memory": 5e9, "memory": 256e9}
    _, plan = plan_workers(PruneConfig(), stages, cluster, 10**5)
    assert (plan.decode.workers, plan.decode.in_flight) == (64, 4)


def test_what_was_asked_for_and_is_not_to_be_had_is_said():
    def said(cluster_cpus: float, n_videos: int, store_bytes: float = 1e12, **options) -> list[str]:
        config = PruneConfig(**options)
        cluster = {"CPU": cluster_cpus, "object_store_memory": store_bytes}
        return list(list_shortfalls(config, *plan_workers(config, setups("cpu", 10**6), cluster, n_videos), n_videos))

    assert said(64, 10**4) == said(64, 10**4, decode_workers=4, encode_workers=2) == []
    assert said(4, 10**4, decode_workers=9) == ["the cluster fits only 4 of --decode-workers 9"]
    assert said(64, 2, decode_workers=9) == []  # no more than videos are needed
    (note,) = said(64, 10**4, store_bytes=10**8)
    assert note == "shards get 5 videos: more would not fit Ray's object stores"


def test_sizes_of_a_few_files_are_added_up_and_one_unknown_makes_all_unknown(tmp_path):
    def known(*rows: tuple[str, str | None, int | None]) -> float:
        return count_file_bytes(
            pa.Table.from_pylist([dict(zip(("uri", "policy", "size"), row, strict=True)) for row in rows])
        )

    (tmp_path / "a.mp4").write_bytes(bytes(700))
    local = (str(tmp_path / "a.mp4"), None, None)
    listed, unlisted, forbidden = ("s3://b/v.mp4", None, 30), ("s3://b/w.mp4", None, None), ("/etc/passwd", "no", None)
    assert known(local, listed, forbidden) == 730
    assert known(local, unlisted) == math.inf
    assert known(local, (str(tmp_path / "of_other_nodes.mp4"), None, None)) == math.inf
    assert known(local, (str(tmp_path), None, None)) == math.inf  # a folder of frames
    assert known(*[listed] * MAX_MEASURED_FILES) == 30 * MAX_MEASURED_FILES
    assert known(*[listed] * (MAX_MEASURED_FILES + 1)) == math.inf


@pytest.fixture
def done(tmp_path) -> CommittedVideos:
    """The commits of a run that has begun to process videos, into an empty cache ``c``."""
    store, recipe = LocalStore(tmp_path / "c"), resolve_recipe(PruneConfig(out=str(tmp_path / "c")))
    store.make()
    table = CacheTable(store, recipe, "run", print)
    table.begin(recipe, "float32")
    return CommittedVideos(table, RunFile(store, {"run_id": "run"}), Monitor(store, "run", print), Facts(0.0))


def written(store: Store, *names: str) -> pa.Table:
    videos = [encoded(name, random_tokens(0), 0.25, "gstep") for name in names]
    return pack_written(write_token_shard(videos, store=store, run_id="run"))


def test_a_run_ends_where_its_cache_was_moved_away_and_another_one_begun(done, tmp_path):
    rows = written(done._table.store, "a")
    done.commit(0, rows)
    (tmp_path / "c").rename(tmp_path / "old")
    with pytest.raises(RunFailed, match=r"cache\.json was deleted during this run"):
        done.commit(1, rows)
    assert not (tmp_path / "c").exists()
    write_header(tmp_path / "c", ratio=0.5)
    with pytest.raises(RunFailed, match="another cache was started here"):
        done.commit(1, rows)
    assert not (tmp_path / "c" / "videos").exists() and TokenCache(tmp_path / "old").video_ids == ["a"]


def test_many_commits_are_merged_while_the_run_goes_on_and_its_record_says_what_it_committed(done, monkeypatch):
    monkeypatch.setattr(table_module, "MAX_WAITING_FILES", 4)
    names, store = [f"v{number}" for number in range(6)], done._table.store
    for number, name in enumerate(names):
        done.commit(number, written(store, name))
    done.record.save()
    shards = json.loads(store.read("runs/run.json"))["token_shards"]
    assert sorted(shards) == sorted(map(parse_shard_id, store.names("tokens", ".parquet")))
    levels = [file.level for file in list_table_files(store)]
    assert max(levels) > 0 and TokenCache(store.root).video_ids == names


def test_the_record_gets_the_number_of_videos_once_it_is_known(done, tmp_path):
    write_tars(tmp_path / "tars")
    todo = search(tmp_path / "tars", tmp_path)
    watch = PruneWatch(done, todo, Mock(), done.record, MIN_ALIKE_FAILURES)
    done.record.save(videos=65, estimated=True)
    with todo:
        list(todo.parts())
        watch.look(WorkerReport(), Progress())
    record = json.loads(done._table.store.read("runs/run.json"))
    assert (record["videos"], record["estimated"]) == (6, False)


def test_a_reason_that_all_failures_share_ends_the_run_but_not_its_second_pass(done):
    """It needs more failures than may be, and workers of which none does better."""
    done.commit(0, failed("v0", "v1", "v2"))
    watch = PruneWatch(done, NOTHING, Mock(), done.record, 2)
    watch.look(WorkerReport(), Progress())
    failing = WorkerReport(failing=["decode"])
    with pytest.raises(RunFailed, match=r"3 videos failed alike and all decode workers fail \(io, v2: gone\): "):
        watch.look(failing, Progress())
    PruneWatch(done, NOTHING, Mock(), done.record, 3).look(failing, Progress())
    watch.is_second_pass = True
    watch.look(failing, Progress())


def test_a_limit_of_hours_ends_a_run(done):
    watch = PruneWatch(done, NOTHING, Mock(), done.record, 2)
    done.facts = Facts(0.0, max_hours=0.0)
    with pytest.raises(LimitReached, match="--max-hours 0 is reached"):
        watch.look(WorkerReport(), Progress())


def test_rows_that_are_committed_again_after_an_interrupt_count_once(done):
    """Together with rows of another shard, which was written meanwhile."""
    store = done._table.store
    first, later = pa.concat_tables([written(store, "a"), failed("b")]), written(store, "c")
    done.commit(0, first)
    done.commit(0, first)
    assert (done.facts.videos, done.infrastructure_errors) == (2, {"io": 1})
    done.commit(1, pa.concat_tables([first, later]))
    assert (done.facts.videos, done.infrastructure_errors) == (3, {"io": 1})
    assert TokenCache(store.root).video_ids == ["a", "c"]
    done.commit(2, failed("b", attempts=2))  # a second pass
    assert (done.facts.videos, done.infrastructure_errors) == (4, {"io": 2})


def test_a_video_that_failed_and_is_ok_later_counts_once(done):
    done.commit(0, failed("a", "b"))
    assert done.failed == done.retryable == done.unread == {"a": 1, "b": 1}
    done.commit(1, written(done._table.store, "a"))
    assert done.failed == {"b": 1}


GOOD = {
    "status": "ok", "decode_s": 2.0, "encode_s": 0.5, "prune_s": 0.25, "n_tokens": 100, "duration_s": 60.0,
}  # fmt: skip


def test_facts_are_sums_over_rows():
    facts = Facts(token_bytes=140.0, on_gpus=True, clock=Mock(return_value=100.0))
    facts.set_encoders(2)
    facts.add(pack_written([GOOD, {**GOOD, "start_s": 10.0, "end_s": 70.0}, {"status": "failed", "decode_s": 1.0}]))
    taken = facts.as_record(wall_s=10.0)
    assert (taken["wall_s"], taken["decode_core_s"], taken["output_bytes"]) == (10.0, 5.0, 200 * 140)
    assert taken["encoder_busy"] == pytest.approx(1.0 / 20) and taken["video_hours"] == pytest.approx(110 / 3600)
    on_cpus = Facts(1.0, clock=Mock(return_value=100.0))  # where an encoder prunes instead of encoding
    on_cpus.add(pack_written([GOOD]))
    assert on_cpus.as_record(wall_s=10.0)["encoder_busy"] == pytest.approx(0.75 / 10)
    assert on_cpus.as_record(wall_s=0.0)["encoder_busy"] == 0


@pytest.mark.parametrize("on_gpus", [True, False])
def test_seconds_are_added_row_by_row_so_that_shards_do_not_change_a_runs_record(on_gpus):
    """A float sum depends on its order: adding the sums of columns or of shards gives other last digits."""
    draw = random.Random(0)
    rows = [{name: draw.random() for name in ("decode_s", "encode_s", "prune_s", "duration_s")} for _ in range(300)]
    rows = [{**row, "status": draw.choice(["ok", "ok", "failed"]), "start_s": 0.1} for row in rows]
    for row in rows[::7]:
        del row["encode_s"], row["duration_s"]
    decode_s = encode_s = video_s = 0.0
    for row in rows:
        decode_s += row["decode_s"]
        encode_s += row.get("encode_s", 0.0)
        encode_s += 0.0 if on_gpus else row["prune_s"]
        video_s += max(0.0, row.get("duration_s", 0.0) - 0.1) if row["status"] == "ok" else 0.0
    for size in (1, 7, 300):
        facts = Facts(1.0, on_gpus=on_gpus, clock=Mock(return_value=100.0))
        for start in range(0, len(rows), size):
            facts.add(pack_written(rows[start : start + size]))
        record = facts.as_record(wall_s=1.0)
        assert (record["decode_core_s"], record["encode_s"]) == (decode_s, encode_s)
        assert record["video_hours"] == video_s / 3600


def test_a_sum_of_bytes_is_exact_beyond_64_bits():
    rows = pack_written([{"source_size": 2**62}, {"source_size": 2**62 + 1}, {}, {"source_size": 2**62}])
    assert sum_column(rows, "source_size") == 3 * 2**62 + 1
    assert sum_column(rows.slice(2, 1), "source_size") == 0 == sum_column(rows.slice(4), "decode_s")


def test_machines_that_join_count_from_then_on():
    facts = Facts(1.0, on_gpus=True, clock=(clock := Mock(return_value=100.0)))
    clock.return_value += 10.0
    facts.set_encoders(2)  # nothing is done yet: so it was from the start
    clock.return_value += 90.0
    facts.add(pack_written([{**GOOD, "encode_s": 400.0}]))
    facts.set_encoders(6)
    clock.return_value += 50.0
    assert facts.as_record()["encoder_busy"] == pytest.approx(400 / (2 * 100 + 6 * 50))


def test_a_clip_has_the_seconds_between_its_ends():
    assert measure_seconds({"duration_s": 60.0, "start_s": 50.0}) == 10
    assert measure_seconds({"duration_s": 60.0, "end_s": 5.0}) == 5 and measure_seconds({}) == 0


def test_the_limit_ends_a_run_at_its_time_and_not_before():
    facts = Facts(1.0, max_hours=1 / 360, clock=(clock := Mock(return_value=100.0)))
    clock.return_value += 9.9
    facts.check_limit()
    clock.return_value += 0.2
    with pytest.raises(LimitReached, match=r"--max-hours .* is reached"):
        facts.check_limit()
    assert facts.limit_reached and issubclass(LimitReached, RunFailed)
