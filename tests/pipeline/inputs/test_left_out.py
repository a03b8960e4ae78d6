"""What a list of videos does not take is counted by kind, with names; what belongs to a video goes with it."""

import errno
import json
import os
import struct
import zipfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError
from pipeline.inputs.archive import ArchiveOptions
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.left_out import MAX_NAMES, LeftOut, format_left_out
from pipeline.inputs.video_list import VideoList
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.builders.archives import write_tar


def listed(*named, objects=None, **options):
    """The rows of some VIDEOS, by the end of their ids, and the Indexes that have counted the rest."""
    first = options.pop("first", "all")
    indexes = Indexes(**options)
    videos = VideoList.read([str(name) for name in named], (), objects or Objects(), indexes, first=first)
    return {row["video_id"].rpartition("/")[2]: row for row in videos.known.to_pylist()}, indexes


def carried(rows):
    return {name: row["manifest"] and json.loads(row["manifest"]) for name, row in rows.items()}


def of(*names):
    return {name: json.dumps({"of": name}).encode() if name.lower().endswith("json") else b"v" for name in names}


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_carried_is_found_wherever_in_the_tar_it_lies(tmp_path, apart):
    files = of(*(f"{n}.{suffix}" for n in range(30) for suffix in ("mp4", "json")))
    order = sorted(files, key=lambda name: name.endswith("json")) if apart else files
    path = write_tar(tmp_path / "t.tar", {name: files[name] for name in order})
    rows, indexes = listed(path)
    assert carried(rows) == {f"{n}.mp4": {"json": {"of": f"{n}.json"}} for n in range(30)}
    assert indexes.left_out.counts() == {}
    clips = {f"{n}.json": b'{"start": 1, "end": 2}' for n in range(300)}
    path = write_tar(tmp_path / "clips.tar", {**of(*(f"{n}.mp4" for n in range(300))), **clips})
    indexes = Indexes(ArchiveOptions(clips_from=("start", "end")))
    (whole,) = VideoList.read(str(path), indexes=indexes, first="needed", is_limited=True).read_unindexed()
    assert {(row["start_s"], row["end_s"], row["fault"]) for row in whole.videos.to_pylist()} == {(1.0, 2.0, None)}


def test_a_name_with_dots_has_its_own_stems_members_before_those_of_its_key(tmp_path):
    names = ["a b 2.0 (x).mp4", "a b 2.0 (x).json", "S01.E01.mp4", "S01.E01.json", "S01.json", "u.mp4", "u.JSON"]
    names += ["y.mp4", "y.info.json", "z.mp4", "z.json", "z.info.json", "k.left.mp4", "k.right.mp4", "k.json", "k.txt"]
    names += ["m.mp4", "m.json", "m.2.mp4", "d/a.mp4", "e/a.json"]
    rows, indexes = listed(write_tar(tmp_path / "t.tar", of(*names)))
    found = {name: manifest and manifest["json"]["of"] for name, manifest in carried(rows).items()}
    assert found == {
        "a b 2.0 (x).mp4": "a b 2.0 (x).json",
        "S01.E01.mp4": "S01.E01.json",
        "u.mp4": "u.JSON",
        "y.mp4": "y.info.json",
        "z.mp4": "z.json",
        "k.left.mp4": "k.json",
        "k.right.mp4": "k.json",
        "m.mp4": "m.json",
        "m.2.mp4": None,  # m.json is the other video's
        "a.mp4": None,
    }
    assert carried(rows)["k.left.mp4"]["txt"] == "v"
    left = indexes.left_out.as_record()["json without a video"]
    assert left == {"count": 3, "names": ["t.tar/S01.json", "t.tar/z.info.json", "t.tar/e/a.json"]}


def test_members_that_are_not_taken_are_counted_and_a_kept_index_remembers_them(tmp_path):
    files = {**of("a.mp4", "a.json", "._a.mp4", "._a.json", "b.json", "c.json", "poster.jpg"), "a.txt": b"t" * 2**17}
    path = write_tar(tmp_path / "t.tar", files)
    expected = {"AppleDouble files": 2, "json without a video": 2, "other files": 1, "txt of more than 64 KiB": 1}
    store = LocalStore(tmp_path / "cache")
    for first in ("all", "kept"):
        rows, indexes = listed(path, store=store, keeps=True, first=first)
        assert [*rows] == ["a.mp4"] and json.loads(rows["a.mp4"]["manifest"]) == {"json": {"of": "a.json"}, "txt": None}
        assert dict(sorted(indexes.left_out.counts().items())) == expected
        assert indexes.left_out.as_record()["other files"]["names"] == ["t.tar/poster.jpg"]
    with zipfile.ZipFile(tmp_path / "m.zip", "w") as file:
        for name in ("clips/a.mp4", "__MACOSX/clips/._a.mp4", "clips/a.json", "empty/"):
            file.writestr(name, b"v")
    rows, indexes = listed(tmp_path / "m.zip")
    assert [*rows] == ["a.mp4"] and indexes.left_out.counts() == {"AppleDouble files": 1, "other files": 1}


LEFT = {"AppleDouble files": 1, "archives beside videos": 3, "other files": 2}


def fill(folder):
    (folder / "data").mkdir(parents=True)
    for name in ("a.mp4", "._a.mp4", "a.json", "README.md"):
        (folder / name).write_bytes(b"v")
    for number in range(3):
        write_tar(folder / "data" / f"{number}.tar", of(f"{number}.mp4"))
    return folder


def test_archives_beside_videos_and_other_files_are_counted_and_a_pattern_takes_the_archives(tmp_path):
    folder = fill(tmp_path / "d")
    rows, indexes = listed(folder)
    assert [*rows] == ["a.mp4"] and indexes.left_out.counts() == LEFT
    pattern = f"{folder}/**/*.tar"
    remedy = f"To take them too, name {pattern!r} as well"
    assert remedy in indexes.left_out.remedies["archives beside videos"]
    rows, _ = listed(folder, pattern)
    assert sorted(rows) == ["0.mp4", "1.mp4", "2.mp4", "a.mp4"]
    rows, indexes = listed(f"{folder}/*")
    assert [*rows] == ["a.mp4"] and indexes.left_out.counts()["other files"] == 2
    for name in ("a.mp4", "._a.mp4"):
        (folder / name).unlink()
    rows, indexes = listed(folder)
    assert len(rows) == 3 and indexes.left_out.counts() == {"other files": 2}
    (folder / "notes").mkdir()
    (folder / "README.md").rename(folder / "notes" / "README.md")
    with pytest.raises(ManifestError, match=r"no video in this folder .*left out: 1 other file"):
        listed(folder / "notes")


def test_a_folder_that_cannot_be_read_is_counted_or_refused_and_never_passed_over(tmp_path, monkeypatch):
    for name in ("a/a.mp4", "b/b.mp4", "b/c/c.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    scandir, number = os.scandir, errno.EACCES

    def failing(path):
        if str(path) == f"{tmp_path}/b":
            raise OSError(number, os.strerror(number), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    rows, indexes = listed(tmp_path)
    assert [*rows] == ["a.mp4"] and indexes.left_out.counts() == {"folders without permission": 1}
    assert indexes.left_out.as_record()["folders without permission"]["names"] == [f"{tmp_path}/b"]
    assert "let this user read" in indexes.left_out.remedies["folders without permission"]
    with pytest.raises(ManifestError, match=r"no video in this folder .*left out: 1 folder without permission"):
        listed(tmp_path / "b")
    number = errno.EIO  # of a mount
    with pytest.raises(ManifestError, match="/b: cannot be read: Input/output error"):
        listed(tmp_path)


def test_objects_of_a_store_are_counted_likewise(server, tmp_path):
    folder = fill(tmp_path / "d")
    for path in folder.rglob("*.*"):
        server.upload(f"d/{path.relative_to(folder)}", path.read_bytes())
    rows, indexes = listed(server.uri("d/"), objects=server.objects())
    assert [*rows] == ["a.mp4"] and indexes.left_out.counts() == LEFT
    rows, _ = listed(server.uri("d/"), server.uri("d/**/*.tar"), objects=server.objects())
    assert sorted(rows) == ["0.mp4", "1.mp4", "2.mp4", "a.mp4"]


def test_names_beyond_a_thousand_are_counted_alone():
    left_out = LeftOut()
    for number in range(MAX_NAMES + 5):
        left_out.add("other files", str(number))
    assert len(left_out.as_record()["other files"]["names"]) == MAX_NAMES
    assert str(left_out) == "1,005 other files (0, 1, 2 and 1,002 more)"
    assert left_out.list_first_names_by_kind() == {"other files": ["0", "1", "2"]}
    kinds = ("AppleDouble files", "archives beside videos", "json without a video", "other files")
    one = "1 AppleDouble file, 1 archive beside videos, 1 json without a video, 1 other file"
    assert format_left_out(dict.fromkeys(kinds, 1), {}) == one
    assert format_left_out({"other files": 1}, {"other files": ["a\x1b[31m.txt"]}) == "1 other file (a [31m.txt)"


class Raw(zipfile.ZipInfo):
    """A member whose name is written as it is, without the flag of UTF-8."""

    raw = b""

    def _encodeFilenameFlags(self):  # noqa: N802 - zipfile calls it
        return self.raw, self.flag_bits & ~0x800


def zip_of(path, *names, field=None):
    with zipfile.ZipFile(path, "w") as file:
        for raw in names:
            info = Raw("x.mp4")
            info.raw, info.filename, info.create_system = raw, raw.decode("cp437"), 3
            if field is not None:
                info.extra = struct.pack("<HHBL", 0x7075, 5 + len(field[1]), 1, field[0]) + field[1]
            file.writestr(info, b"v")
    return path


NAME = "视频一.mp4"
GBK = NAME.encode("gbk")


def test_names_in_zips_are_what_their_maker_wrote(tmp_path):
    lines = []
    plain, encoded = {"say": lines.append}, {"options": ArchiveOptions(zip_encoding="gbk"), "say": lines.append}
    for path, options in (
        (zip_of(tmp_path / "utf8.zip", NAME.encode()), plain),
        (zip_of(tmp_path / "field.zip", GBK, field=(zlib.crc32(GBK), NAME.encode())), plain),
        (zip_of(tmp_path / "gbk.zip", GBK), encoded),
        (zip_of(tmp_path / "other.zip", GBK, field=(1, b"renamed.mp4")), encoded),  # of another name
    ):
        rows, _ = listed(path, **options)
        assert [*rows] == [NAME], path
    assert not any("note" in line for line in lines)
    rows, _ = listed(zip_of(tmp_path / "two.zip", GBK, b"a.mp4"), zip_of(tmp_path / "b.zip", GBK), **plain)
    assert GBK.decode("cp437") in rows and "a.mp4" in rows
    (note,) = [line for line in lines if line.startswith("note: ")]
    assert "are read as cp437, e.g. " in note and "--zip-encoding gbk" in note
    rows, _ = listed(tmp_path / "two.zip", options=ArchiveOptions(zip_encoding="ascii"))
    (fault,) = [row["fault"] for row in rows.values() if row["fault"]]
    assert rows["a.mp4"]["fault"] is None and "the member's name is not valid ascii" in fault


def test_another_encoding_makes_the_kept_index_of_a_zip_anew(tmp_path):
    path, kept = zip_of(tmp_path / "a.zip", GBK), {"store": LocalStore(tmp_path / "cache"), "keeps": True}
    assert NAME not in listed(path, **kept)[0]
    for n_made in (1, 0):
        rows, indexes = listed(path, **kept, options=ArchiveOptions(zip_encoding="gbk"))
        assert [*rows] == [NAME] and indexes.n_made == n_made


def test_a_damaged_table_of_paths_is_named_and_costs_no_other(tmp_path):
    for number in range(4):
        pq.write_table(pa.table({"path": [f"{number}.mp4"]}), tmp_path / f"{number}.parquet")
    for damaged in (tmp_path / "0.parquet", tmp_path / "2.parquet"):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-10])
        rows, _ = listed(tmp_path, options=ArchiveOptions("path"))
        faults = {row["uri"].partition("#")[0]: row["fault"] for row in rows.values() if row["fault"]}
        assert [*faults] == [str(damaged)] and "the table cannot be read" in faults[str(damaged)]
        assert len(rows) == 4
        damaged.write_bytes(whole)
    damaged.write_bytes(whole[:-10])
    with pytest.raises(ManifestError, match=r"2\.parquet.*cannot be read"):
        listed(damaged, options=ArchiveOptions("path"))
    pq.write_table(pa.table({"path": [1]}), damaged)
    with pytest.raises(ManifestError, match=r"2\.parquet: no column path of paths, which .*0\.parquet has"):
        listed(tmp_path, options=ArchiveOptions("path"))
