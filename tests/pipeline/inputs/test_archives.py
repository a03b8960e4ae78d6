"""Archives of every form, here and on S3: the same rows, the right bytes, few requests; a form is added in a file."""

import io
import json
import math
import random
import stat
import struct
import zipfile
import zlib
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError, VideoFault
from pipeline.inputs import archive
from pipeline.inputs.archive import Archive, ArchiveOptions, Member
from pipeline.inputs.forms import FORMS, OpenArchives
from pipeline.inputs.indexes import Indexes, remove_members
from pipeline.storage import downloads
from pipeline.storage.stores import LocalStore
from tests.builders.archives import FILES, member, write_parquet, write_tar, write_zip
from tests.builders.manifests import NOWHERE, contents, ids, member_of, read_manifest, read_member, rows
from tests.pipeline.inputs.test_tar import HOSTILE


def test_a_zip_with_damage_costs_what_is_damaged(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a.mp4": b"a" * 9000, "b.mp4": b"b" * 9000, "../c.mp4": b"c", "d.mp4": b"d"})
    found = {row["video_id"]: row for row in rows(path)}
    faults = {name.partition("@")[0]: row["fault"].partition(":")[0] for name, row in found.items() if row["fault"]}
    assert faults == {"a.zip/../c.mp4": "policy"}
    data = bytearray(path.read_bytes())
    row, stored = found["a.zip/b.mp4"], found["a.zip/a.mp4"]
    for broken in (row, stored):
        data[broken["source_offset"] + 40] ^= 255
    path.write_bytes(data)
    for broken, why in ((row, r"damaged|too early|more bytes"), (stored, "corrupt: .*damaged: it has another CRC-32")):
        with pytest.raises(VideoFault, match=why):
            contents([broken])
    assert contents([found["a.zip/d.mp4"]]) == [b"d"]
    path.write_bytes(data[:-30])
    with pytest.raises(ManifestError, match="corrupt: the directory of the zip cannot be read"):
        rows(path)


def test_a_name_that_is_not_the_utf8_that_its_zip_promises_costs_no_other_video(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"ä.mp4": b"1", "ü.mp4": b"2", "c.mp4": b"3"})
    path.write_bytes(path.read_bytes().replace("ü.mp4".encode(), b"\xfc..mp4"[:2] + b".mp4"))
    told = []
    found = rows(path, say=told.append)
    assert ids(found) == ["a.zip/ä.mp4", "a.zip/ⁿ..mp4", "a.zip/c.mp4"]
    assert contents(found) == [b"1", b"2", b"3"] and any("--zip-encoding" in line for line in told)


def test_a_zip_that_was_replaced_after_its_indexing_is_not_read(tmp_path):
    path = write_zip(tmp_path / "a.zip", {"a.mp4": b"a" * 9000, "b.mp4": b"b" * 9000})
    found = rows(path)
    write_zip(path, {"c.mp4": b"c" * 30_000})  # whose first member is where the first one was
    for row in found:
        with pytest.raises(VideoFault, match=r"io: .*has changed since it was indexed"):
            contents([row])


ODD = {"a#b.mp4": b"1", "#.mp4": b"2", "d?#e#/c.mp4": b"3", "ü#日😀.mp4": b"4"}


@pytest.mark.parametrize(("name", "write"), [("a?.zip", write_zip), ("a?.tar", write_tar)])
def test_members_with_any_name_are_read_and_forgotten_and_an_archive_with_a_hash_is_refused(tmp_path, name, write):
    path, store = write(tmp_path / name, ODD), LocalStore(tmp_path / "cache")
    found = rows(path, store=store, keeps=True)
    assert [row["uri"] for row in found] == [f"{path}#{member_name}" for member_name in ODD]
    assert contents(found) == [*ODD.values()]
    remove_members(store, {row["uri"] for row in found[:2]})
    assert rows(path, store=store, first="kept") == found[2:]
    with pytest.raises(ManifestError, match=r"a#\..*rename it: uris put a # between"):
        rows(str(path.rename(tmp_path / name.replace("?", "#"))))


DOS, UNIX = 0, 3


@pytest.mark.parametrize(
    ("name", "system", "video_id"),
    [
        ("clips\\a.mp4", DOS, "a.zip/clips/a.mp4"),
        ("C:\\clips\\a.mp4", DOS, "a.zip/C:/clips/a.mp4"),
        ("clips\\a.mp4", UNIX, "a.zip/clips\\a.mp4"),
        ("x/clips\\a.mp4", DOS, "a.zip/x/clips\\a.mp4"),
        ("..\\..\\a.mp4", DOS, "policy"),
        ("\\clips\\a.mp4", DOS, "policy"),
        ("__MACOSX\\clips\\._a.mp4", DOS, None),
        ("clips.mp4\\", DOS, None),
    ],
)
def test_a_name_with_backslashes_is_what_unzip_makes_of_it(tmp_path, name, system, video_id):
    """Info-ZIP's rule: of an old DOS or Windows tool, and without a slash. Its uri stays as older versions wrote it."""
    found = rows(write_zip(tmp_path / "a.zip", {name: name, "z.mp4": "z.mp4"}, create_system=system))
    assert contents(found[-1:]) == [b"z.mp4"] and len(found) == (1 if video_id is None else 2)
    if video_id == "policy":
        assert found[0]["fault"].startswith("policy: the member's name leads out of its archive")
    elif video_id is not None:
        assert (found[0]["video_id"], found[0]["uri"]) == (video_id, f"{tmp_path}/a.zip#{name}")
        assert contents(found[:1]) == [name.encode()]


def test_a_kept_index_of_names_with_backslashes_is_made_again_and_forgets_members_by_any_of_their_names(tmp_path):
    names = ("clips\\a.mp4", "clips\\b.mp4", "__MACOSX\\._a.mp4")
    write_zip(tmp_path / "a.zip", dict.fromkeys(names, b"x"), create_system=DOS)
    store = LocalStore(tmp_path / "cache")
    first = rows(tmp_path / "a.zip", store=store, keeps=True)
    assert rows(tmp_path / "a.zip", store=store, first="kept") == first
    [kept] = (tmp_path / "cache/sources").iterdir()
    facts, *members = json.loads(zlib.decompress(kept.read_bytes()))
    kept.write_bytes(zlib.compress(json.dumps([facts, *(member[:9] for member in members)]).encode()))  # as before
    assert rows(tmp_path / "a.zip", store=store, keeps=True) == first
    remove_members(store, {first[0]["uri"]})
    found = rows(tmp_path / "a.zip", store=store, first="kept")
    assert ids(found) == ["a.zip/clips/b.mp4"]
    for video_id in ("a.zip/clips/b.mp4", "a.zip/clips\\b.mp4"):
        rows(tmp_path / "a.zip", store=store, keeps=True)
        assert remove_members(store, (), {video_id}) == [f"sources/{kept.name}"]


def test_a_link_in_a_zip_is_refused_and_a_member_of_any_system_is_read(tmp_path):
    modes = {"link.mp4": stat.S_IFLNK | 0o777, "pipe.mp4": stat.S_IFIFO, "file.mp4": stat.S_IFREG | 0o644, "dos.mp4": 0}
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        for name, mode in modes.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            file.writestr(info, "/etc/passwd")
    found = rows(tmp_path / "a.zip")
    assert [row["fault"] and row["fault"].partition(":")[0] for row in found] == ["policy", "policy", None, None]
    assert contents(found[2:]) == 2 * [b"/etc/passwd"]


def test_a_zip_that_was_written_to_a_pipe_is_read(tmp_path):
    """Its members have their sizes behind the data."""
    sink = io.BytesIO()
    sink.seekable = lambda: False
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in FILES.items():
            file.writestr(name, data)
    (tmp_path / "a.zip").write_bytes(sink.getvalue())
    assert contents(rows(tmp_path / "a.zip")) == list(FILES.values())


def test_ids_and_what_is_carried_may_be_of_any_type_of_text_numbers_and_times(tmp_path):
    """Databases export infinity as a time beyond all dates."""
    columns = {"v": [b"1", b"2"], "video_id": pa.array([b"x", b"y"]), "end_s": [Decimal("1.5"), None]}
    columns |= {"kind": pa.array(["x", "y"]).dictionary_encode(), "at": pa.array([2**62, 0], pa.timestamp("us"))}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet", "v")
    assert [(row["video_id"], row["end_s"], row["fault"]) for row in found] == [("x", 1.5, None), ("y", None, None)]
    infinite, zero = (json.loads(row["manifest"]) for row in found)
    assert str(2**62) in infinite.pop("at") and zero.pop("at").startswith("1970-01-01")
    assert (infinite, zero) == ({"end_s": 1.5, "kind": "x"}, {"kind": "y"}) and contents(found) == [b"1", b"2"]


def test_a_clip_without_a_number_of_seconds_is_no_whole_video(tmp_path):
    """Carried JSON has neither NaN nor infinity."""
    times = {"start_s": [1.0, math.nan, 0.0, None], "end_s": [2.0, 3.0, math.inf, None]}
    pq.write_table(pa.table({"v": [b"1"] * 4, **times}), tmp_path / "a.parquet")
    found = rows(tmp_path / "a.parquet", "v")
    assert [(row["start_s"], row["end_s"]) for row in found] == [(1.0, 2.0), *[(None, None)] * 3]
    why = "unsupported: the clip's {}, not a number of seconds"
    assert [row["fault"] for row in found] == [None, why.format("start_s is nan"), why.format("end_s is inf"), None]


NO_TABLE = r"--column names a column of .parquet, .arrow and .feather files"
#: A place, the column that is asked for there, and words of the refusal.
NO_COLUMN = [
    ("m.csv", "clip", NO_TABLE),
    ("none", "clip", NO_TABLE),
    ("t.parquet", "film", "no column film; columns of bytes: video"),
    ("t.parquet", "label", "not bytes"),
    ("paths_first", "video", r"2\.parquet: no column video of paths, which .*1\.parquet has"),
    ("bytes_first", "video", r"3\.parquet: the column video has string, not bytes; paths are read"),
]


def test_a_column_that_holds_no_videos_is_refused_and_one_of_another_place_is_not_missed(tmp_path):
    """The videos of another column, or all that are in a folder, would be taken without a word."""
    (tmp_path / "m.csv").write_text("video_id,uri,clip\na,whole.mp4,clip.mp4\n")
    for folder in ("none", "paths_first", "bytes_first"):
        (tmp_path / folder).mkdir()
    write_zip(tmp_path / "none/a.zip")
    for path in ("t.parquet", "paths_first/2.parquet", "bytes_first/2.parquet"):
        write_parquet(tmp_path / path, files={"t.mp4": b"t"})
    for path in ("paths_first/1.parquet", "bytes_first/3.parquet"):
        pq.write_table(pa.table({"video": ["a.mp4"]}), tmp_path / path)
    for name, column, message in NO_COLUMN:
        with pytest.raises(ManifestError, match=message):
            rows(tmp_path / name, column)
    assert ids(rows([f"{tmp_path}/m.csv", f"{tmp_path}/t.parquet"], "video")) == ["a", "t.mp4"]
    named = {"clip": ["a.mp4", "b.mp4"], "label": [1, 2], "video_id": ["1", "2"], "uri": ["x", "y"]}
    pq.write_table(pa.table(named), tmp_path / "named.parquet")
    found = rows(tmp_path / "named.parquet", "clip")
    assert ids(found) == named["video_id"] and found[0]["uri"] == str(tmp_path / "a.mp4")
    assert json.loads(found[0]["manifest"]) == {"label": 1}


def test_a_table_that_was_changed_has_other_uris_and_its_old_ones_are_not_read(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    before = rows(path, "video")
    assert rows(path, "video") == before
    write_parquet(path, files={**FILES, "00.mp4": b"another"})
    assert all(old["uri"] != new["uri"] for old, new in zip(before, rows(path, "video"), strict=True))
    with pytest.raises(VideoFault, match="has changed since it was listed"):
        contents(before[:1])


def test_a_damaged_row_group_costs_its_own_rows_alone(tmp_path):
    """What is known of the rows is damaged in the last group, the videos in the second one."""
    path, names, draw = tmp_path / "a.parquet", [f"{number:02}.mp4" for number in range(12)], random.Random(2)
    columns = {"v": [draw.randbytes(3000) for _ in names], "video_id": [f"{draw.random()} {name}" for name in names]}
    pq.write_table(pa.table(columns), path, row_group_size=4, use_dictionary=False)
    data, groups = bytearray(path.read_bytes()), pq.read_metadata(path)
    for group, column in ((1, 0), (2, 1)):
        chunk = groups.row_group(group).column(column)
        for place in range(chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size):
            data[place] ^= 165
    path.write_bytes(data)
    found = rows(path, "v")
    assert ids(found) == [*columns["video_id"][:8], "a.parquet/8"]
    assert found[8]["fault"].startswith("corrupt: the table cannot be read")
    assert contents(found[:4]) == columns["v"][:4]
    with pytest.raises(VideoFault, match="corrupt: row 5 of the table cannot be read"):
        contents(found[5:6])


def test_several_tables_of_paths_are_manifests_in_their_order(server, tmp_path):
    def write(name, clips, **more):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"clip": clips, **more}), path)
        server.upload(f"c/{name}", path.read_bytes())
        return path

    write("t/1.parquet", ["b.mp4", "a.mp4"], label=[1, 2])
    write("t/2.parquet", ["c.mp4", "/elsewhere/d.mp4"])
    names = ["b.mp4", "a.mp4", "c.mp4", "/elsewhere/d.mp4"]
    named = [str(tmp_path / "t/2.parquet"), str(tmp_path / "t/1.parquet")]
    for place in (str(tmp_path / "t"), str(tmp_path / "t/*.parquet"), str(tmp_path / "t/{1..2}.parquet"), named):
        found = rows(place, "clip")
        assert ids(found) == (names if place != named else names[2:] + names[:2])
        assert {row["uri"] for row in found} == {*(str(tmp_path / "t" / name) for name in names)}
        assert [row["policy"] is None for row in found].count(False) == 1 and found[0]["source_offset"] is None
    assert [row["uri"] for row in rows(server.uri("c/t"), "clip", server.objects())][:3] == [
        server.uri(f"c/t/{name}") for name in names[:3]
    ]
    write("u/1.parquet", ["b.mp4"])  # another file of the same name
    with pytest.raises(ManifestError, match=r"1 rows repeat a video_id, e\.g\. 'b\.mp4'") as refused:
        rows([str(tmp_path / "t"), str(tmp_path / "u")], "clip")
    assert "its column video_id" in str(refused.value)
    write("u/1.parquet", ["b.mp4"], video_id=["another"])
    assert ids(rows([str(tmp_path / "t"), str(tmp_path / "u")], "clip")) == [*names, "another"]
    write_tar(tmp_path / "u/0.tar", {"x.mp4": b"x"})
    assert ids(rows(tmp_path / "u", "clip")) == ["0.tar/x.mp4", "another"]


def test_archives_on_s3_give_the_same_for_few_requests(server, tmp_path):
    made = {
        "a.tar": write_tar(tmp_path / "a.tar", FILES),
        "a.zip": write_zip(tmp_path / "a.zip"),
        "a.parquet": write_parquet(tmp_path / "a.parquet"),
    }
    for name, path in made.items():
        column = "video" if name == "a.parquet" else None
        here, uri = rows(path, column), server.upload(f"c/{name}", path.read_bytes())
        found = rows(uri, column, server.objects())
        assert ids(found) == [row["video_id"] for row in here]
        most = {"a.tar": 2, "a.zip": 1, "a.parquet": 5}[name]  # a table is first asked what it holds
        assert server.counts()["HEAD"] == 1 and server.counts()["GET"] <= most
        server.requests.clear()
        assert contents(found, server.objects()) == list(FILES.values())
        # A tar is one request for all of its members; of a table each row group is one.
        assert server.counts()["GET"] <= {"a.tar": 1, "a.zip": 1, "a.parquet": 4}[name], name
        before = server.counts()["GET"]
        assert contents(found[7:8], server.objects()) == [list(FILES.values())[7]]
        assert server.counts()["GET"] - before <= (2 if name == "a.parquet" else 1)


def indexed(uri, server):
    """The rows of a tar on the server, what each request was, and the bytes that came."""
    server.requests.clear()
    indexes = Indexes(ArchiveOptions())
    found = read_manifest(uri, (), server.objects(), indexes).to_pylist()
    return found, server.counts(), indexes.fetched


def alike(row):
    """A row without what its place decides: the folder of the tar, and the mark that a disk or a store gives it."""
    return {**row, "uri": row["uri"].rpartition("/")[2], "mark": row["mark"] is None}


def test_the_index_of_a_tar_of_small_videos_is_a_request_a_slice(server, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_SLICE", 2**21)
    path = write_tar(tmp_path / "a.tar", {f"{number:03}.mp4": bytes(30_000) for number in range(240)})
    found, counts, fetched = indexed(server.upload("a.tar", path.read_bytes()), server)
    size = path.stat().st_size
    assert size > 2 * archive._SLICE and fetched <= size + 2**20
    assert counts["HEAD"] == 1 and counts["GET"] <= math.ceil(size / archive._SLICE) + 1
    assert [alike(row) for row in found] == [alike(row) for row in rows(path)]


def test_a_store_that_is_too_slow_for_a_slice_is_asked_for_headers_alone(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "_GRACE_S", -1)
    monkeypatch.setattr(downloads, "_SLOWEST", math.inf)  # every download is too slow
    path = write_tar(tmp_path / "a.tar", {f"{number}.mp4": bytes(2**16) for number in range(9)})
    found, counts, _ = indexed(server.upload("a.tar", path.read_bytes()), server)
    assert [alike(row) for row in found] == [alike(row) for row in rows(path)]
    assert counts["GET"] == 1 + 1 + 9  # the first header, a slice in vain, the others


def test_what_cannot_be_trusted_gives_the_same_rows_from_a_store(server, tmp_path, monkeypatch):
    """With slices of 4 KiB a header and carried member may begin in one and end in another."""
    for name in ("_SLICE", "_MIN_READ_BYTES"):
        monkeypatch.setattr(archive, name, 2**12)
    for name, (data, _) in HOSTILE.items():
        (tmp_path / "a.tar").write_bytes(member("good.mp4", b"good" * 500) + data)
        here = rows(tmp_path / "a.tar")
        found, _, _ = indexed(server.upload("a.tar", (tmp_path / "a.tar").read_bytes()), server)
        assert [alike(row) for row in found] == [alike(row) for row in here], name
        assert len(here) > 1


def test_a_range_of_any_size_is_one_request_and_never_in_memory_as_a_whole(server, tmp_path):
    files = {f"{number}.mp4": random.Random(number).randbytes(2**22) for number in range(3)}
    path = write_tar(tmp_path / "a.tar", files)
    found = rows(server.upload("a.tar", path.read_bytes()), objects=server.objects())
    server.requests.clear()
    with OpenArchives(server.objects(), map(member_of, found)) as opened:
        for row in found:
            assert read_member(opened, row) == files[row["video_id"].removeprefix("a.tar/")]
            assert len(opened._open[1]._ranges[0]._buffer) < 2**21
    assert server.counts() == {"GET": 1}


def test_a_member_that_is_left_out_or_read_again_costs_its_neighbours_nothing_and_a_replaced_object_is_a_fault(
    server, tmp_path
):
    uri = server.upload("a.tar", write_tar(tmp_path / "a.tar", FILES).read_bytes())
    found = rows(uri, objects=server.objects())
    with OpenArchives(server.objects(), map(member_of, found)) as opened:
        for place in (0, 1, 5, 5, 2, 11):
            with pytest.raises(OSError, match="more than the 3"):
                read_member(opened, found[8], 3)
            assert read_member(opened, found[place]) == list(FILES.values())[place]
    server.upload("a.tar", write_tar(tmp_path / "a.tar", {"x.mp4": b"1", **FILES}).read_bytes())
    with pytest.raises(VideoFault, match="has changed since it was indexed"):
        contents(found[5:6], server.objects())


class Lengths(Archive):
    """A form of its own: each video behind its length in four bytes."""

    def __init__(self, file):
        self._file = file

    def members(self, asked):
        place = number = 0
        while place < self._file.size:
            (size,) = struct.unpack("<I", self._file.read(place, place + 4))
            yield Member(f"{number}.mp4", place + 4, size)
            place, number = place + 4 + size, number + 1

    def span(self, member):
        return member.offset, member.offset + member.size

    def read(self, member):
        yield self._file.read(*self.span(member))


def test_a_form_is_added_by_one_class(tmp_path, monkeypatch, server):
    monkeypatch.setitem(FORMS, ".lengths", Lengths)
    data = b"".join(struct.pack("<I", len(one)) + one for one in FILES.values())
    (tmp_path / "a.lengths").write_bytes(data)
    store = LocalStore(tmp_path / "cache")
    for place, objects in ((str(tmp_path), NOWHERE), (server.upload("c/a.lengths", data), server.objects())):
        found = rows(place, objects=objects, store=store, keeps=True)
        assert ids(found) == [f"a.lengths/{number}.mp4" for number in range(12)]
        assert contents(found, objects) == list(FILES.values())
        server.requests.clear()
        assert rows(place, objects=objects, store=store, first="kept") == found
        assert server.counts() in ({}, {"LIST": 1}, {"HEAD": 1})
