"""The videos that a run processes: found while others are processed, up to the limit, and who ends the search."""

import threading
from datetime import timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.cache.live import Ledger
from pipeline.errors import RunFailed, VideoFault
from pipeline.inputs.forms import FORMS
from pipeline.inputs.tar_and_zip import Tar
from pipeline.prune.config import PruneConfig
from pipeline.prune.resume import ManifestCounts, select_slice
from pipeline.prune.todo import Todo, TodoSelection
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.stores import LocalStore
from tests.builders.archives import write_doubled_tars, write_tar, write_tars
from tests.builders.caches import encoded_failure, write_header, write_shard
from tests.builders.manifests import CountingTar, ids, list_for_run


@pytest.fixture
def tars(tmp_path):
    return write_tars(tmp_path / "tars")


def search(place, tmp_path, limit=None, kind=TodoSelection, column=None, **options):
    """What a run has to do."""
    videos = list_for_run(place, tmp_path, column, is_limited=limit is not None)
    selection = kind(PruneConfig(limit=limit, **options), videos, Ledger(videos.indexes.store).refresh())
    return Todo(*selection.select(videos.known), selection)


@pytest.fixture
def gate(monkeypatch):
    """The sign that the index of the second tar waits for before its first member."""
    gate = threading.Event()

    class Gated(Tar):
        def members(self, options):
            if self._file.uri.endswith("1.tar"):
                assert gate.wait(60)
            yield from super().members(options)

    monkeypatch.setitem(FORMS, ".tar", Gated)
    yield gate
    gate.set()


def test_a_part_is_there_before_the_next_archive_is_indexed(tars, tmp_path, gate):
    with search(tars, tmp_path) as todo:
        parts = todo.parts()
        assert ids(next(parts).todo) == []
        first = next(parts)
        assert ids(first.todo) == [f"0.tar/{number}.mp4" for number in range(3)]
        sizes = [(tars / f"{number}.tar").stat().st_size for number in range(3)]
        assert first.later_bytes == sum(sizes[1:])
        assert (len(todo), todo.n_left, todo.estimate_count()) == (3, 2, round(3 * sum(sizes) / sizes[0]))
        assert not todo.is_complete
        gate.set()
        assert [ids(part.todo) for part in parts] == [["1.tar/0.mp4", "1.tar/1.mp4"], ["2.tar/0.mp4"]]
        assert ids(todo.wait_for_all()) == ids(todo.list_videos()) and len(todo) == 6 and todo.n_left == 0
        assert todo.is_complete and todo.estimate_count() == 6 != round(3 * sum(sizes) / sizes[0])


def test_known_videos_come_first_and_count(tars, tmp_path):
    with search(tars, tmp_path) as todo:
        todo.wait_for_all()
    write_tar(tars / "3.tar", {"new.mp4": bytes(9)})
    with search(tars, tmp_path) as todo:
        assert todo.tally == ManifestCounts(new=6) and todo.estimate_count() == 7
        assert ids(todo.wait_for_all())[5:] == ["2.tar/0.mp4", "3.tar/new.mp4"] == ids(todo.list_videos())[5:]


def test_the_end_of_the_run_ends_the_search_in_mid_archive(tars, tmp_path, gate):
    with search(tars, tmp_path) as todo:
        next(parts := todo.parts())
        next(parts)
        close = todo._list.close
        todo._list.close = lambda: (close(), gate.set())
    assert len(todo.list_todo()) == 3 and todo.n_left == 2 and list(parts) == [] and len(todo) == 3
    assert not todo._thread.is_alive()
    assert not todo.is_complete and "1.tar" in [place.name for place in list_for_run(tars, tmp_path).unindexed]


class Changed(TodoSelection):
    """Meets a video that has changed."""

    def select(self, videos):
        if "1.tar/0.mp4" in ids(videos):
            raise ValueError("videos have changed")
        return super().select(videos)


def test_what_ends_the_run_is_told_to_whoever_waits(tars, tmp_path):
    with search(tars, tmp_path, kind=Changed) as todo:
        assert len(list(todo.parts())) == 2
        for ask in (todo.check, todo.wait_for_all):
            with pytest.raises(RunFailed, match="videos have changed"):
                ask()
    (tars / "0.tar").unlink()
    with search(tars, tmp_path / "another run", kind=Changed) as todo:
        list(todo.parts())
        with pytest.raises(RunFailed, match="have changed"):  # also where none that was found is left to do
            todo.estimate_count()


@pytest.mark.parametrize(("limit", "opened", "waiting"), [(1, 1, 2), (3, 1, 0), (4, 2, 1), (6, 3, 0), (9, 3, 0)])
def test_a_limit_opens_no_archive_behind_its_last_video(tars, tmp_path, limit, opened, waiting):
    with search(tars, tmp_path, limit) as todo:
        parts = list(todo.parts())
        assert len(parts) == 4 and todo.estimate_count() <= limit
        assert parts[opened].later_bytes == 0 and all(part.later_bytes for part in parts[:opened])
        assert (len(todo), todo.n_waiting, todo.n_left) == (min(6, limit), waiting, 3 - opened)
    assert len(list_for_run(tars, tmp_path).known) == [3, 5, 6][opened - 1]  # no other index was made


def test_an_estimate_stays_within_the_limit(tars, tmp_path, gate):
    with search(tars, tmp_path, 4) as todo:
        assert todo.estimate_count() == 4 and len(todo) == 3 and not todo.is_complete
        gate.set()


def test_failed_videos_to_retry_count_to_the_limit_and_do_not_wait_behind_it(tars, tmp_path):
    store, source = write_header(tmp_path / "cache"), {"source_size": 100, "start_s": None, "end_s": None}
    uris = {f"0.tar/{number}.mp4": f"{tars}/0.tar#{number}.mp4" for number in range(3)}
    fault = VideoFault("io", "x")
    write_shard(store, "run", *(encoded_failure(name, fault, uri=uri, **source) for name, uri in uris.items()))
    for limit, waiting in ((2, 0), (4, 1)):
        names, todo = take(tars, tmp_path, limit, retry_failed=True)
        assert names == [*uris, "1.tar/0.mp4"][:limit]
        assert todo.list_todo()["attempts"].to_pylist() == [2, 2, 2, 1][:limit] and todo.n_waiting == waiting
    assert take(tars, tmp_path, 4)[0] == ["1.tar/0.mp4", "1.tar/1.mp4", "2.tar/0.mp4"]
    videos = list_for_run(tars, tmp_path)
    selection = TodoSelection(PruneConfig(), videos, Ledger(store).refresh(), redo=pa.array(["0.tar/1.mp4"]))
    assert ids(selection.select(videos.known)[1].todo) == ["0.tar/1.mp4", "1.tar/0.mp4", "1.tar/1.mp4", "2.tar/0.mp4"]


def test_a_limit_that_known_videos_reach_opens_no_archive(tars, tmp_path):
    take(tars, tmp_path, 4)
    for limit in (2, 5):
        with search(tars, tmp_path, limit) as todo:
            first, *others = todo.parts()
            assert len(first.todo) == len(todo) == todo.estimate_count() == limit and first.later_bytes == 0
            assert (len(others), todo.n_left, todo.n_waiting) == (1, 1, 5 - limit) and not len(others[0].todo)
        assert todo._list.indexes.n_made == 0


def test_each_shard_has_a_limit_of_its_own(tmp_path):
    path = write_tar(tmp_path / "a.tar", {f"{number:04}.mp4": b"x" for number in range(600)})
    (tmp_path / "b").mkdir()
    write_tar(tmp_path / "b" / "b.tar", {"b.mp4": b"x"})
    places = [str(path), str(tmp_path / "b" / "b.tar")]
    everything = ids(take(places, tmp_path / "whole", None)[1].list_todo())
    taken = [take(places, tmp_path, 200, shard=f"{number}/2")[1] for number in range(2)]
    for todo in taken:
        names = ids(todo.list_todo())
        assert len(names) == 200 and names == ids(todo.list_videos())[:200]
        assert (todo.n_cut, todo.n_left) == (1, 2) and todo.n_waiting == len(todo.list_videos()) - 200
        assert names == [name for name in everything if name in set(names)]
    assert not set(ids(taken[0].list_videos())) & set(ids(taken[1].list_videos()))
    counts = [len(take(places, tmp_path / "all", None, shard=f"{number}/2")[0]) for number in range(2)]
    assert sum(counts) == 601 and min(counts) > 200


def remove_one(store, video_id):
    """Make a cache whose only video is removed."""
    write_shard(write_header(store), "run", encoded_failure(video_id, VideoFault("corrupt", "no video")))
    remove_videos(store, [video_id], "why", lambda line: None, timedelta(0))


def test_a_run_deletes_removed_videos_from_new_indexes_of_all_shards_and_a_plan_changes_none(tmp_path):
    path = write_tar(tmp_path / "a.tar", {f"{number}.mp4": b"x" for number in range(4)})
    remove_one(LocalStore(tmp_path / "cache"), "a.tar/2.mp4")
    videos = list_for_run(path, tmp_path)
    (kept,) = (tmp_path / "cache" / "sources").iterdir()
    before, ledger = kept.read_bytes(), Ledger(videos.indexes.store).refresh()
    (number,) = (number for number in range(2) if "a.tar/2.mp4" not in ids(select_slice(videos.known, (number, 2))))
    for keeps in (False, True):
        videos.indexes.keeps = keeps
        TodoSelection(PruneConfig(shard=f"{number}/2"), videos, ledger).select(videos.known)
        assert (kept.read_bytes() == before) is not keeps
    assert ids(list_for_run(path, tmp_path).known) == [f"a.tar/{number}.mp4" for number in (0, 1, 3)]


def test_what_a_cut_archive_leaves_out_is_counted_once_and_names_no_removed_video(tmp_path):
    videos = {f"{number:04}.mp4": b"x" for number in range(600)}
    files = {"gone.jpg": b"", "kept.jpg": b"", "gone.mp4": b"x", **videos, "behind.jpg": b""}
    path = write_tar(tmp_path / "a.tar", files)
    gone = "a.tar/gone.mp4"
    remove_one(LocalStore(tmp_path / "cache"), gone)
    for limit, n_cut, names in ((300, 1, ["kept"]), (600, 0, ["kept", "behind"])):
        names_taken, todo = take(path, tmp_path, limit)
        assert names_taken == [f"a.tar/{name}" for name in videos][:limit] and todo.n_cut == n_cut
        left_out = todo._list.indexes.left_out.as_record()
        assert left_out == {"other files": {"count": len(names) + 1, "names": [f"a.tar/{name}.jpg" for name in names]}}
    assert gone not in ids(list_for_run(path, tmp_path).known)


def take(place, tmp_path, limit, kind=TodoSelection, column=None, **options):
    with search(place, tmp_path, limit, kind, column, **options) as todo:
        return ids(todo.wait_for_all()), todo


class Undone(TodoSelection):
    """Takes the first 1000 videos for done."""

    def select(self, videos):
        own_videos, remaining = super().select(videos)
        return own_videos, remaining._replace(todo=remaining.todo.slice(1000))


def test_a_limit_reads_of_a_single_tar_no_more_than_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(CountingTar, "n_read", 0)
    monkeypatch.setitem(FORMS, ".tar", CountingTar)
    path = write_tar(tmp_path / "a.tar", {f"{number:04}.mp4": bytes(number % 7) for number in range(2000)})
    everything = [f"a.tar/{number:04}.mp4" for number in range(2000)]
    names, todo = take(path, tmp_path, 3)
    assert names == everything[:3]
    assert CountingTar.n_read <= 257 and (todo.n_left, todo.n_cut, todo.estimate_count()) == (1, 1, 3)
    assert todo.n_waiting == 253 and not (tmp_path / "cache").exists()  # half an index is not kept
    names, todo = take(path, tmp_path, 256)  # as many as are read before the first look
    assert len(names) == 256 and (todo.n_cut, todo.n_waiting) == (1, 0)
    CountingTar.n_read = 0
    names, todo = take(path, tmp_path, 3, Undone)
    assert names == everything[1000:1003] and todo.n_left == 1
    assert CountingTar.n_read < 2000
    names, todo = take(path, tmp_path, 2000)
    assert names == everything and (todo.n_left, todo.n_cut) == (0, 0)


def write_table(path, names):
    pq.write_table(pa.table({"video_id": names, "video": [b"x"] * len(names)}), path, row_group_size=2)


def test_a_limit_opens_no_table_that_it_does_not_need(tmp_path):
    (tmp_path / "tables").mkdir()
    for number in range(4):
        write_table(tmp_path / f"tables/{number}.parquet", [f"{number}-{part}" for part in range(3)])
    (tmp_path / "tables/3.parquet").write_bytes(b"is never read")
    for limit, left in ((1, 3), (3, 3), (4, 2), (9, 1)):
        names, todo = take(tmp_path / "tables", tmp_path, limit, column="video")
        assert names == [f"{number}-{part}" for number in range(3) for part in range(3)][:limit]
        assert (todo.n_left, todo._list.indexes.n_made) == (left, 4 - left) and todo._list.indexes.rows_per_group == 2
    write_table(tmp_path / "tables/1.parquet", ["1-0", "0-2"])
    assert len(take(tmp_path / "tables", tmp_path, 4, column="video")[0]) == 4
    doubled = take(tmp_path / "tables", tmp_path, 5, column="video")[1].list_todo().to_pylist()[-1]
    assert doubled["video_id"] == f"0-2@{doubled['uri']}" and "earlier video has the id 0-2" in doubled["fault"]


def test_an_id_that_two_tars_give_is_an_error_row_with_and_without_a_limit(tmp_path):
    places = write_doubled_tars(tmp_path)
    own = f"0.tar/a.mp4@{places[1]}#a.mp4"
    expected = ["0.tar/a.mp4", "0.tar/b.mp4", "0.tar/c.mp4", own, "1.tar/a.mp4"]
    for limit in (2, 3, 4, 5, 9):  # those before it make and keep indexes
        names, todo = take(places, tmp_path, limit)
        assert names == expected[:limit]
        assert [row["video_id"] for row in todo.list_todo().to_pylist() if row["fault"]] == [own][: limit > 3]
    assert ids(list_for_run(places, tmp_path).known) == expected


def test_videos_that_are_all_known_are_one_part(tars, tmp_path):
    rows = take(tars, tmp_path, 4)[1].list_todo()
    todo = Todo.of(rows)
    assert len(todo) == todo.estimate_count() == 4 and todo.is_complete and todo.n_parts == 1
    assert [part.todo for part in todo.parts()] == [rows] and isinstance(todo.list_todo(), pa.Table)


def test_what_is_left_after_a_change_of_nodes_is_what_has_no_row_yet(tars, tmp_path):
    with search(tars, tmp_path) as todo:
        left = todo.without(pa.table({"video_id": ["0.tar/1.mp4", "2.tar/0.mp4", "other"]}))
    assert ids(left.list_todo()) == ["0.tar/0.mp4", "0.tar/2.mp4", "1.tar/0.mp4", "1.tar/1.mp4"]
    assert left.is_complete and len(left) == left.estimate_count() == 4
