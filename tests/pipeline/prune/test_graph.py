"""The graph: how a cluster and the videos are shared out, and that Ray runs the stages apart."""

import math
import random
from dataclasses import replace
from itertools import product

import pyarrow as pa
import pytest
from ray.data._internal.logical.optimizers import get_execution_plan

from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.prune.resources import MAX_BATCH_BYTES, MAX_TASK_BYTES, PRUNING, Resources, cut_tasks, plan_resources
from pipeline.runner.stages import MAX_BLOCKS, RESTARTS, TASK_RETRIES
from tests.builders.clusters import PLAIN, graph_of, ray_here


@pytest.mark.parametrize("asked", [{}, {"encode_workers": 4}, {"decode_workers": 99}])
def test_all_workers_and_a_writer_fit_at_once(asked):
    for cpus, gpus, n_videos in product([1, 2, 3, 4, 8, 64, 256], [0, 1, 2, 8], [1, 5, 1000, 100_000]):
        plan = plan_resources(cpus, gpus, n_videos, **asked)
        used = plan.decode.num_cpus * plan.decode.workers + plan.encode.num_cpus * plan.encode.workers
        assert used + plan.write.num_cpus <= cpus
        assert plan.decode.workers >= 1 and plan.encode.workers >= 1 and plan.encode.num_gpus == min(gpus, 1)
        assert plan.encode.workers * plan.encode.num_gpus <= gpus and plan.videos_per_block >= 1


@pytest.mark.parametrize("asked", [{}, {"decode_workers": 7}, {"encode_workers": 1}])
@pytest.mark.parametrize(("cpus", "gpus"), [(1, 1), (4, 3), (96, 8)])
def test_decoders_on_gpus_share_each_with_its_encoder(cpus, gpus, asked):
    plan = plan_resources(cpus, gpus, 1000, decode_on_gpus=True, **asked)
    a_gpu = math.ceil(plan.decode.workers / gpus)
    assert plan.decode.num_gpus > 0 and a_gpu * plan.decode.num_gpus + plan.encode.num_gpus <= 1.00001
    assert plan.gpus <= gpus and plan.decode.workers == min(cpus, asked.get("decode_workers", 4 * gpus))
    assert plan_resources(cpus, 0, 1000, decode_on_gpus=True) == plan_resources(cpus, 0, 1000)


def test_memory_bounds_how_many_decode():
    assert plan_resources(96, 8, 1000, memory=16 * 2**30).decode.workers == 16
    assert plan_resources(96, 8, 1000, memory=2**20).decode.workers == 1


def test_small_files_get_no_more_decoders_than_are_worth_their_start():
    def decoders(total_file_bytes: float, **asked: int) -> int:
        return plan_resources(8, 0, 100, total_file_bytes=total_file_bytes, **asked).decode.workers

    assert [decoders(n * 2**20) for n in (0, 1, 4, 5, 17, 10**6)] == [1, 1, 1, 2, 5, 8]
    assert decoders(math.inf) == 8
    assert decoders(0, decode_workers=6) == 6


def test_shards_shrink_to_what_the_object_stores_hold():
    plan = plan_resources(4, 1, 1000)
    assert plan.fit_to_stores(10**12, 10**7, 10**7, 1000).videos_per_shard == 16
    small = plan.fit_to_stores(10**9, 10**7, 26 * 10**6, 1000).videos_per_shard
    assert 1 <= small < 16 and small * plan.shards_at_once * 26 * 10**6 <= 10**9 / 2
    assert plan.fit_to_stores(1, 10**7, 10**9, 1000).videos_per_shard == 1


FRAME = 384 * 384 * 3


def fitted(n_videos: int, frames: int, store_bytes: float = 10**12, cpus: float = 64, gpus: float = 8) -> Resources:
    plan = plan_resources(cpus, gpus, n_videos)
    return plan.fit_to_stores(store_bytes, frames * FRAME, frames * 350_000, n_videos)


def test_videos_share_a_bundle_and_a_very_large_one_is_alone():
    sizes = {frames: fitted(10**5, frames).videos_per_bundle for frames in (1, 8, 16, 32, 64, 768)}
    assert sizes == {1: 16, 8: 16, 16: 8, 32: 4, 64: 2, 768: 1}  # 16 make a shard, and shards hold whole bundles
    assert all(size * frames * FRAME <= MAX_BATCH_BYTES for frames, size in sizes.items() if size > 1)
    assert fitted(100, 1).videos_per_bundle == 1  # all workers have some
    of_three = replace(plan_resources(64, 8, 10**5), videos_per_shard=3)
    assert of_three.fit_to_stores(1e12, FRAME, 1, 10**5).videos_per_bundle == 3


def files(n_videos: int) -> pa.Table:
    """Rows of so many files, of which only the number matters."""
    return pa.table({"source_offset": pa.nulls(n_videos, pa.int64())})


@pytest.mark.parametrize(("n_videos", "frames"), [(1, 8), (1001, 8), (5 * 10**6, 1), (5 * 10**6, 32)])
def test_blocks_of_the_manifest_are_whole_bundles_and_the_last_ones_a_bundle_each(n_videos, frames):
    plan = fitted(n_videos, frames, cpus=8, gpus=2)
    blocks = list(plan.blocks(files(n_videos)))
    assert [start for start, _ in blocks] == [0, *(end for _, end in blocks[:-1])] and blocks[-1][1] == n_videos
    sizes = [end - start for start, end in blocks]
    assert all(size % plan.videos_per_bundle == 0 for size in sizes[:-1])
    waiting = plan.decode.workers * plan.decode.in_flight
    assert all(size <= plan.videos_per_bundle for size in sizes[-waiting:])
    assert len(blocks) <= MAX_BLOCKS + waiting * plan.videos_per_block


@pytest.mark.slow
def test_ray_does_not_fuse_the_stages_and_tries_every_task_again_finitely(tmp_path):
    plan = plan_resources(64, 8, 8)
    with ray_here(*PLAIN):
        dataset = graph_of(8, plan, tmp_path).dataset
        operator = get_execution_plan(dataset._logical_plan)[0].dag
    least, limit = plan.estimate_store_bytes(2 * FRAME, 0), dataset.context.execution_options.resource_limits
    assert least <= limit.object_store_memory < 2 * least
    names = []
    for _ in range(2):
        options = operator._ray_remote_args
        assert (options["max_restarts"], options["max_task_retries"]) == (RESTARTS, TASK_RETRIES)
        assert "max_retries" not in options and RESTARTS > 0 < TASK_RETRIES  # for Ray -1 is without end
        names.append(operator.name)
        (operator,) = operator.input_dependencies
    assert names == ["MapBatches(Encoder)", "MapBatches(Decoder)"]  # a fused one would have an arrow
    assert not operator.input_dependencies


def test_what_a_worker_has_not_handed_over_is_not_waiting():
    """An encoder that stops before it hands over what it made holds that back: the writers are not to blame."""
    plan = plan_resources(2, 0, 64, videos_per_shard=2)
    assert (plan.decode.workers, plan.encode.workers, plan.videos_per_block, plan.videos_per_shard) == (2, 1, 4, 2)
    expected = [plan.min_items_to_start(stage, more_expected=True) for stage in PRUNING.stages]
    assert expected == [1, 5, 4]  # of two calls at a time
    assert [plan.min_items_to_start(stage, more_expected=False) for stage in PRUNING.stages] == [1, 1, 1]


def members(sizes, shard="a.tar"):
    rows, offset = [], 512
    for number, size in enumerate(sizes):
        name = f"{shard}/{number}.mp4"
        rows.append({"video_id": name, "uri": f"/{shard}#{number}.mp4", "size": size, "source_offset": offset})
        offset += size + 512
    return pa.Table.from_pylist(rows, MANIFEST_SCHEMA)


def rows_of_a_table(first, stop):
    rows = [{"video_id": f"{place}", "uri": f"/t#{place}", "source_offset": place} for place in range(first, stop)]
    return pa.Table.from_pylist(rows, MANIFEST_SCHEMA)


def cut(videos, workers, most=256, **more):
    """The units, which are checked to be all of the videos, in order."""
    found = list(cut_tasks(videos, workers, most, **more))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == len(videos)
    assert all(stop - start > 0 for start, stop in found)
    return found


@pytest.mark.parametrize(("workers", "bundle", "largest"), [(64, 1, 10**5), (1, 8, 10**7), (64, 8, 10**9)])
def test_units_are_bounded_and_shrink_towards_the_end(workers, bundle, largest):
    draw = random.Random(largest)
    sizes = [draw.randint(1, largest) for _ in range(1000)]
    videos = members(sizes)
    found = cut(videos, workers, bundle=bundle)
    assert found == cut(pa.concat_tables([videos.slice(0, 7), videos.slice(7)]), workers, bundle=bundle)
    for start, stop in found:
        assert stop - start <= 256
        assert (stop - start) % bundle == 0 or stop == len(sizes)
        assert sum(sizes[start : stop - bundle]) <= min(MAX_TASK_BYTES, sum(sizes[start:]) / (4 * workers))
    assert all(stop - start <= bundle for start, stop in found[-workers:])


def test_workers_outnumber_tars():
    """64 workers on 11 tars of a gigabyte, whose members have a MiB each."""
    videos = pa.concat_tables([members([2**20] * 1000, f"{tar}.tar") for tar in range(11)])
    found = cut(videos, 64)
    assert len(found) >= 4 * 64 and max(stop - start for start, stop in found) <= len(videos) / (4 * 64) + 1


def test_rows_of_a_row_group_stay_together_also_where_some_are_done():
    assert cut(rows_of_a_table(0, 100), 2, row_group=40) == [(0, 40), (40, 80), (80, 100)]
    assert cut(rows_of_a_table(30, 100), 2, row_group=40) == [(0, 10), (10, 50), (50, 70)]
    two = pa.concat_tables([rows_of_a_table(0, 50), rows_of_a_table(20, 50)])
    assert cut(two, 2, row_group=50) == [(0, 50), (50, 80)]
    assert [stop - start for start, stop in cut(rows_of_a_table(0, 600), 1, row_group=600)] == [256, 256, 88]


def test_units_stay_large_while_other_archives_are_to_come():
    videos = members([2**20] * 1000)
    lengths = [stop - start for start, stop in cut(videos, 4, later_bytes=2**40)]
    assert lengths == [256, 256, 256, 232] or set(lengths[:-1]) == {255, 256}
    alone = cut(videos, 4)
    assert len(alone) > 3 * len(lengths) and alone == cut(videos, 4, later_bytes=0)
