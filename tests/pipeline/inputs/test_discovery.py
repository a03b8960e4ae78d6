"""Videos found while others are processed: whole, in order, once; what ends it early, and who may not."""

import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError, RunFailed
from pipeline.inputs.archive import ArchiveOptions
from pipeline.inputs.discovery import Discovery
from pipeline.inputs.forms import FORMS
from pipeline.inputs.indexes import Indexing
from pipeline.inputs.manifest import read_manifest
from pipeline.inputs.named_videos import MANIFEST_SCHEMA
from pipeline.inputs.tar_and_zip import Tar
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.pipeline.tars import write_tar

NOWHERE = Objects()
NONE = MANIFEST_SCHEMA.empty_table()


@pytest.fixture
def tars(tmp_path):
    """Three tars of 3, 2 and 1 videos."""
    (tmp_path / "tars").mkdir()
    for number in range(3):
        write_tar(tmp_path / f"tars/{number}.tar", {f"{part}.mp4": bytes(100) for part in range(3 - number)})
    return tmp_path / "tars"


def listed(place, tmp_path, column=None, **more):
    indexing = Indexing(ArchiveOptions(column), LocalStore(tmp_path / "cache"), keeps=True, later=True, **more)
    names = place if isinstance(place, list) else [str(place)]
    return read_manifest(names, (), NOWHERE, indexing), indexing


def discovery(indexing, select=lambda videos: (videos, videos), known=NONE, limit=None):
    return Discovery(indexing, NOWHERE, select, known, limit)


def ids(table):
    return table["video_id"].to_pylist()


@pytest.fixture
def gate(monkeypatch):
    """The sign that the index of the second tar waits for before its first member."""
    gate = threading.Event()

    class Gated(Tar):
        def members(self, asked):
            if self._file.uri.endswith("1.tar"):
                assert gate.wait(60)
            yield from super().members(asked)

    monkeypatch.setitem(FORMS, ".tar", Gated)
    yield gate
    gate.set()


def test_nothing_is_listed_first_and_a_part_is_there_before_the_next_one_is_indexed(tars, tmp_path, gate):
    before, indexing = listed(tars, tmp_path)
    assert len(before) == 0 and [place.name for place in indexing.unindexed] == ["0.tar", "1.tar", "2.tar"]
    with discovery(indexing) as found:
        parts = found.parts()
        assert ids(next(parts).todo) == []
        first = next(parts)
        assert ids(first.todo) == [f"0.tar/{number}.mp4" for number in range(3)]
        assert first.later_bytes == sum((tars / f"{number}.tar").stat().st_size for number in (1, 2))
        sizes = [(tars / f"{number}.tar").stat().st_size for number in range(3)]
        assert (len(found), found.n_left, found.estimate_count()) == (3, 2, round(3 * sum(sizes) / sizes[0]))
        assert not found.is_complete
        gate.set()
        assert [ids(part.todo) for part in parts] == [["1.tar/0.mp4", "1.tar/1.mp4"], ["2.tar/0.mp4"]]
        assert (
            ids(found.wait_for_all().videos) == ids(found.list_found().todo) and len(found) == 6 and found.n_left == 0
        )
        assert found.is_complete and found.estimate_count() == 6 != round(3 * sum(sizes) / sizes[0])
    whole, indexing = listed(tars, tmp_path)
    assert ids(whole) == ids(found.list_found().videos) and indexing.unindexed == []  # all indexes were kept


def test_what_has_a_kept_index_is_known_from_the_start(tars, tmp_path):
    _, indexing = listed(tars, tmp_path)
    with discovery(indexing) as found:
        found.wait_for_all()
    write_tar(tars / "3.tar", {"new.mp4": bytes(9)})
    write_tar(tars / "1.tar", {"changed.mp4": bytes(9)})
    known, indexing = listed(tars, tmp_path)
    assert [place.name for place in indexing.unindexed] == ["3.tar"] and "1.tar/changed.mp4" in ids(known)
    with discovery(indexing, known=known) as found:
        assert found.estimate_count() == len(known) + 1
        assert ids(found.wait_for_all().todo) == [*ids(known), "3.tar/new.mp4"]
        assert ids(found.list_found().videos) == ["3.tar/new.mp4"]


def test_a_stop_ends_it_in_mid_archive_and_drops_what_is_no_whole_index(tars, tmp_path, gate, monkeypatch):
    _, indexing = listed(tars, tmp_path)
    stop = indexing.stop
    monkeypatch.setattr(indexing, "stop", lambda: (stop(), gate.set()))
    with discovery(indexing) as found:
        next(parts := found.parts())
        next(parts)
    assert len(found.list_found().todo) == 3 and found.n_left == 2 and list(parts) == [] and len(found) == 3
    _, indexing = listed(tars, tmp_path)
    assert "1.tar" in [place.name for place in indexing.unindexed]


def test_what_ends_the_run_is_told_to_whoever_waits(tars, tmp_path):
    def refuse(videos):
        if "1.tar/0.mp4" in ids(videos):
            raise ValueError("videos have changed")
        return videos, videos

    _, indexing = listed(tars, tmp_path)
    with discovery(indexing, refuse) as found:
        assert len(list(found.parts())) == 2
        for ask in (found.check, found.wait_for_all):
            with pytest.raises(RunFailed, match="videos have changed"):
                ask()


def test_archives_whose_ids_may_meet_and_a_single_one_are_indexed_first(tars, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "y.mp4").write_bytes(b"y")
    again = str(write_tar(tmp_path / "x" / "0.tar", {"z.mp4": b"z"}))
    for place, count in ((tars / "0.tar", 3), ([str(tars), again], 7), ([str(tars), str(tmp_path / "y")], 7)):
        found, indexing = listed(place, tmp_path)
        assert indexing.unindexed == [] and len(found) == count


@pytest.mark.parametrize(("limit", "opened", "beyond"), [(1, 1, 2), (3, 1, 0), (4, 2, 1), (6, 3, 0), (9, 3, 0)])
def test_a_limit_opens_no_archive_behind_its_last_video(tars, tmp_path, limit, opened, beyond):
    _, indexing = listed(tars, tmp_path)
    with discovery(indexing, limit=limit) as found:
        assert len(list(found.parts())) == 4 and found.estimate_count() <= limit
        assert (len(found), len(found.beyond), found.n_left) == (min(6, limit), beyond, 3 - opened)
    assert len(listed(tars, tmp_path)[0]) == [3, 5, 6][opened - 1]  # no other index was made


def has_limit(place, tmp_path, limit, select=lambda videos: (videos, videos), column=None):
    known, indexing = listed(place, tmp_path, column, has_limit=True)
    assert len(known) == 0
    with discovery(indexing, select, known, limit) as found:
        return found.wait_for_all().todo, found, indexing


def test_a_limit_reads_of_a_single_tar_no_more_than_it_needs(tmp_path, monkeypatch):
    read = []

    class Noting(Tar):
        def members(self, asked):
            for member in super().members(asked):
                read.append(member)
                yield member

    monkeypatch.setitem(FORMS, ".tar", Noting)
    path = write_tar(tmp_path / "a.tar", {f"{number:04}.mp4": bytes(number % 7) for number in range(3000)})
    todo, found, _ = has_limit(path, tmp_path, 3)
    assert ids(todo) == [f"a.tar/{number:04}.mp4" for number in range(3)]
    assert len(read) <= 257 and found.n_left == 1 and found.estimate_count() == 3
    assert not (tmp_path / "cache").exists()  # half an index is not kept

    def undone(videos):
        return videos, videos.slice(1500)

    todo, found, _ = has_limit(path, tmp_path, 3, undone)
    assert ids(todo) == [f"a.tar/{number}.mp4" for number in range(1500, 1503)] and found.n_left == 1
    assert len(read) < 3000
    todo, found, _ = has_limit(path, tmp_path, 3000)
    assert len(todo) == 3000 and found.n_left == 0
    assert len(listed(path, tmp_path, has_limit=True)[0]) == 3000  # the index is whole, and was kept


def test_a_limit_opens_no_table_that_it_does_not_need(tmp_path):
    (tmp_path / "tables").mkdir()
    for number in range(4):
        write_table(tmp_path / f"tables/{number}.parquet", [f"{number}-{part}" for part in range(3)])
    (tmp_path / "tables/3.parquet").write_bytes(b"is never read")
    for limit, left in ((1, 3), (3, 3), (4, 2), (9, 1)):
        todo, found, indexing = has_limit(tmp_path / "tables", tmp_path, limit, column="video")
        assert ids(todo) == [f"{number}-{part}" for number in range(3) for part in range(3)][:limit]
        assert (found.n_left, indexing._n_read) == (left, 4 - left) and indexing.unit == 2
    write_table(tmp_path / "tables/1.parquet", ["1-0", "0-2"])
    assert len(has_limit(tmp_path / "tables", tmp_path, 4, column="video")[0]) == 4
    doubled = has_limit(tmp_path / "tables", tmp_path, 5, column="video")[0].to_pylist()[-1]
    assert doubled["video_id"] == f"0-2@{doubled['uri']}" and "earlier video has the id 0-2" in doubled["fault"]


def write_table(path, names):
    pq.write_table(pa.table({"video_id": names, "video": [b"x"] * len(names)}), path, row_group_size=2)


def doubled_tars(tmp_path):
    """Two tars of one name, with an id in common that is neither's only one, and one more."""
    places = [tmp_path / name / "0.tar" for name in "pq"]
    for place, names in zip(places, ("ab", "ca"), strict=True):
        place.parent.mkdir()
        write_tar(place, {f"{name}.mp4": name.encode() for name in names})
    return [*map(str, places), str(write_tar(tmp_path / "1.tar", {"a.mp4": b"a"}))]


def test_an_id_that_two_tars_give_is_an_error_row_with_and_without_a_limit(tmp_path):
    places = doubled_tars(tmp_path)
    own = f"0.tar/a.mp4@{places[1]}#a.mp4"
    expected = ["0.tar/a.mp4", "0.tar/b.mp4", "0.tar/c.mp4", own, "1.tar/a.mp4"]
    for limit in (2, 3, 4, 5, 9):  # those before it make and keep indexes
        known, indexing = listed(places, tmp_path, has_limit=True)
        with discovery(indexing, known=known, limit=limit) as found:
            rows = found.wait_for_all().todo.to_pylist()
        assert [row["video_id"] for row in rows] == expected[: max(limit, len(known))]
        assert [row["video_id"] for row in rows if row["fault"]] == ([own] if len(rows) > 3 else [])
    whole, _ = listed(places, tmp_path)
    assert whole.to_pylist() == rows and ids(whole) == expected


def test_what_is_known_to_be_a_mistake_is_refused_at_once(tmp_path):
    p, q, _ = doubled_tars(tmp_path)
    with pytest.raises(ManifestError, match=r"p/0\.tar: it is named 2 times; name it once"):
        listed([p, q, p], tmp_path, has_limit=True)
    write_tar(tmp_path / "q" / "0.tar", {"b.mp4": b"b", "a.mp4": b"a"})
    with pytest.raises(ManifestError, match=r"q/0\.tar: all of its 2 videos have ids of earlier ones, e\.g\. 0\.tar/b"):
        listed([p, q], tmp_path)
    for place in (p, q):
        (tmp_path / place).write_bytes(b"no tar")  # a row of its own each, and no mistake of who named them
    found, _ = listed([p, q], tmp_path)
    assert ids(found) == ["0.tar/@0", f"0.tar/@0@{q}#@0"] and not found["fault"].null_count
