"""Units of work of archives: whole, in order, bounded by bytes and videos, and the same whoever asks."""

import random

import pyarrow as pa
import pytest

from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.prune.resources import MAX_TASK_BYTES, cut_tasks


def members(sizes, shard="a.tar"):
    rows, offset = [], 512
    for number, size in enumerate(sizes):
        name = f"{shard}/{number}.mp4"
        rows.append({"video_id": name, "uri": f"/{shard}#{number}.mp4", "size": size, "source_offset": offset})
        offset += size + 512
    return pa.Table.from_pylist(rows, MANIFEST_SCHEMA)


def rows_of_a_table(*places):
    rows = [{"video_id": f"{place}", "uri": f"/t#{place}", "source_offset": place} for place in places]
    return pa.Table.from_pylist(rows, MANIFEST_SCHEMA)


def cut(videos, workers, most=256, **more):
    """The units, which are checked to be all of the videos, in order."""
    found = list(cut_tasks(videos, workers, most, **more))
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == len(videos)
    assert all(stop - start > 0 for start, stop in found)
    return found


@pytest.mark.parametrize("workers", [1, 2, 64])
@pytest.mark.parametrize("bundle", [1, 8])
@pytest.mark.parametrize("largest", [10**5, 10**7, 10**9])
def test_units_are_bounded_and_shrink_towards_the_end(workers, bundle, largest):
    draw = random.Random(largest)
    sizes = [draw.randint(1, largest) for _ in range(3000)]
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
    assert cut(rows_of_a_table(*range(100)), 2, row_group=40) == [(0, 40), (40, 80), (80, 100)]
    assert cut(rows_of_a_table(*range(30, 100)), 2, row_group=40) == [(0, 10), (10, 50), (50, 70)]
    two = pa.concat_tables([rows_of_a_table(*range(50)), rows_of_a_table(*range(20, 50))])
    assert cut(two, 2, row_group=50) == [(0, 50), (50, 80)]
    assert [stop - start for start, stop in cut(rows_of_a_table(*range(600)), 1, row_group=600)] == [256, 256, 88]


def test_units_stay_large_while_other_archives_are_to_come():
    videos = members([2**20] * 1000)
    lengths = [stop - start for start, stop in cut(videos, 4, later_bytes=2**40)]
    assert lengths == [256, 256, 256, 232] or set(lengths[:-1]) == {255, 256}
    alone = cut(videos, 4)
    assert len(alone) > 3 * len(lengths) and alone == cut(videos, 4, later_bytes=0)
