"""Tars: every member is found where it lies, and what cannot be trusted is a row of its class.

What a list of videos does not take is counted by kind, with names; what belongs to a video goes with it.
"""

import errno
import io
import json
import os
import random
import struct
import tarfile
import zipfile
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import FAULTS, ManifestError
from pipeline.inputs.archive import ArchiveOptions
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.left_out import MAX_NAMES, LeftOut, format_left_out
from pipeline.inputs.video_list import VideoList
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.builders.archives import BLOCK, ended, member, pax, renumbered, write_tar
from tests.builders.manifests import contents, ids, read_manifest, rows, touch

CLIPS = ArchiveOptions(clips_from=("start", "end"))


def faults(path):
    """Id behind the tar's -> class of what is wrong, None where nothing is."""
    found = rows(path)
    assert len({row["video_id"] for row in found}) == len(found)
    return {row["video_id"].partition("/")[2]: row["fault"] and row["fault"].partition(": ")[0] for row in found}


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_found_where_they_lie_in_every_format(tmp_path, kind):
    draw = random.Random(7)
    files = {
        f"{'d/' * (n % 3)}{'ü' * (n % 2)}{n:03}.mp4": draw.randbytes(draw.choice([0, 1, 511, 512, 513, 9999]))
        for n in range(60)
    }
    if kind != tarfile.USTAR_FORMAT:
        files["e/" * 60 + "long" * 30 + ".mp4"] = b"long"
    with tarfile.open(tmp_path / "a.tar", "w", format=kind) as tar:
        tar.addfile(tarfile.TarInfo("notes.md"), io.BytesIO())
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5
            tar.addfile(info, io.BytesIO(data))
    found = rows(tmp_path / "a.tar")
    assert ids(found) == [f"a.tar/{name}" for name in files]
    assert contents(found) == list(files.values())
    assert [row["size"] for row in found] == [len(data) for data in files.values()]


def test_what_stands_beside_a_video_is_carried(tmp_path):
    files = {
        "k/a.json": b'{"caption": "a cat", "n": 1}', "k/a.0.mp4": b"1", "k/a.1.mp4": b"22", "k/a.txt": "ü".encode(),
        "k/b.mp4": b"3", "k/b.cls": b"7", "k/b.jpg": b"x", "c.mp4": b"4", "d.json": b"{", "d.mp4": b"5",
        "e.txt": b"x" * 70_000, "e.mp4": b"6",
    }  # fmt: skip
    found = rows(write_tar(tmp_path / "s.tar", files))
    carried = {row["video_id"]: row["manifest"] and json.loads(row["manifest"]) for row in found}
    both = {"json": {"caption": "a cat", "n": 1}, "txt": "ü"}
    assert carried == {
        "s.tar/k/a.0.mp4": both, "s.tar/k/a.1.mp4": both, "s.tar/k/b.mp4": {"cls": 7}, "s.tar/c.mp4": None,
        "s.tar/d.mp4": {"json": "{"}, "s.tar/e.mp4": {"txt": None},
    }  # fmt: skip


def test_json_that_is_nested_without_end_is_carried_as_text_and_costs_no_other(tmp_path):
    """Between the depths that Python can write and that it can read there are some that it can only read."""
    depths = [90, 300, *range(900, 1000), 9999]
    deep = {depth: b"[" * depth + b"]" * depth for depth in depths}
    files = {f"{depth}.{kind}": deep[depth] if kind == "json" else b"7" for depth in depths for kind in ("mp4", "json")}
    found = rows(write_tar(tmp_path / "s.tar", files | {"90.cls": b"7"}))
    first, *others = [json.loads(row["manifest"]) for row in found]
    assert first == {"json": json.loads(deep[90]), "cls": 7}
    assert others == [{"json": deep[depth].decode()} for depth in depths[1:]]


def test_clips_come_from_the_json_where_that_is_asked_for(tmp_path):
    files = {
        "a.mp4": b"1", "a.json": b'{"start": 1, "end": 2.5}', "b.mp4": b"1", "b.json": b'{"start": "1", "end": 2}',
        "c.mp4": b"1", "d.mp4": b"1", "d.json": b'{"start": 1, "end": Infinity}',
    }  # fmt: skip
    found = rows(write_tar(tmp_path / "s.tar", files), options=CLIPS)
    assert [(row["start_s"], row["end_s"]) for row in found] == [(1.0, 2.5), *[(None, None)] * 3]
    assert [row["fault"] and row["fault"].partition(":")[0] for row in found] == [None, *["unsupported"] * 3]


def with_bytes(header, place, data):
    return renumbered(header, lambda block: block.__setitem__(slice(place, place + len(data)), data))


NEXT, SPARSE = member("next.mp4", b"x"), with_bytes(member("s.mp4", b"x" * 512), 156, b"S")
ELSEWHERE = ["../a.mp4", "/etc/a.mp4", "b/../../a.mp4", "b//a.mp4", "a\nb.mp4", os.fsdecode(b"a\xff.mp4")]
KINDS = [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
LINKS = [member(f"{number}.mp4", kind=kind, linkname="/etc/passwd") for number, kind in enumerate(KINDS)]
#: What follows a good member, and the classes of the rows that it gives.
HOSTILE = {
    "names that lead elsewhere": (ended(*(member(name, b"x") for name in ELSEWHERE)), ["policy"] * 6),
    "links, devices and pipes": (ended(*LINKS), ["policy"] * 5),
    # It has no data: what follows is the next header.
    "a link that claims data": (ended(with_bytes(LINKS[0], 124, b"00000007777\0"), NEXT), ["policy", None]),
    "sparse": (ended(SPARSE, NEXT), ["unsupported", None]),
    "sparse by records": (
        ended(pax(GNU__sparse__major="1", GNU__sparse__realsize=str(2**60)), member("p.mp4", b"x"), NEXT),
        ["unsupported", None],
    ),
    "a name twice": (
        ended(*(member(name, b"a" * size) for name, size in (("a.mp4", 9), ("a.mp4", 7000), ("./a.mp4", 9)))),
        [None, "corrupt", "corrupt"],
    ),
    "two sizes": (ended(pax(size="3"), member("a.mp4", b"123456"), NEXT), ["corrupt", None]),
    "no end": (member("a.mp4", b"a" * 3000), [None, "corrupt"]),
    "another tar behind the end": (ended(NEXT) + bytes(9 * BLOCK) + ended(member("b.mp4", b"b")), [None, "corrupt"]),
    "cut in a header": (member("a.mp4", b"a" * 5000) + NEXT[:100], [None, "corrupt"]),
    "cut in a member": (member("a.mp4", b"a") + member("b.mp4", b"b" * 9000)[:5000], [None, "corrupt"]),
    "no header": (member("a.mp4", b"a") + bytes(100) + b"x" * 9000 + bytes(116) + ended(NEXT), [None, "corrupt", None]),
    "a broken header": (ended(NEXT[:5] + b"T" + NEXT[6:] + member("c.mp4", b"c")), ["corrupt", None]),
    "a long name": (ended(pax(path="a" * 5000 + ".mp4"), member("a.mp4", b"a")), ["policy"]),
    "a huge header": (
        with_bytes(member("pax", kind=tarfile.XHDTYPE), 124, b"00010000000\0")
        + bytes(2**21)
        + ended(member("b.mp4", b"b"), member("c.mp4", b"c")),
        ["unsupported", None],
    ),
    "carried": (
        ended(*(member(f"{n}.json", b'{"n": 1}' + b" " * 3000) + member(f"{n}.mp4", b"x" * 700) for n in range(9))),
        [None] * 9,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_trusted_is_an_error_and_costs_no_other(tmp_path, name):
    data, kinds = HOSTILE[name]
    (tmp_path / "a.tar").write_bytes(member("good.mp4", b"good") + data)
    found = faults(tmp_path / "a.tar")
    assert [*found.values()] == [None, *kinds] and {*kinds} - {None} <= FAULTS.keys()
    assert all(name.isprintable() for name in found)


def test_a_cut_tar_costs_its_tail(tmp_path):
    whole = ended(member("a.mp4", b"a" * 1000), member("b.mp4", b"b" * 1000), member("c.mp4", b"c" * 1000))
    path = tmp_path / "a.tar"
    for cut in range(BLOCK, len(whole), 100):
        path.write_bytes(whole[:cut])
        try:
            found = faults(path)
        except ManifestError as error:  # not even the first member is whole
            assert "corrupt" in str(error) and cut <= 1536
            continue
        complete = sum(cut >= 1536 * number + 1512 for number in range(3))
        assert [name for name, kind in found.items() if kind is None] == ["a.mp4", "b.mp4", "c.mp4"][:complete]
        assert ("corrupt" in found.values()) == (cut < len(whole) - BLOCK)


def test_any_flipped_byte_of_a_header_is_noticed_or_harmless(tmp_path):
    """A name may become another name; nothing else is read as a video than what was packed."""
    whole, draw = ended(*(member(f"{name}.mp4", name.encode() * 600) for name in "abc")), random.Random(3)
    for _ in range(80):
        data = bytearray(whole)
        place = draw.choice([0, 1536, 3072]) + draw.randrange(BLOCK)
        data[place] ^= 1 << draw.randrange(8)
        (tmp_path / "a.tar").write_bytes(data)
        for row in rows(tmp_path / "a.tar"):
            if row["fault"] is None:
                assert contents([row])[0] in (b"a" * 600, b"b" * 600, b"c" * 600)


def test_an_index_takes_the_place_of_that_before_a_change_and_a_damaged_one_is_no_more_than_a_lost_one(tmp_path):
    path, store = tmp_path / "a.tar", LocalStore(tmp_path / "cache")
    for names in (["a.mp4"], ["a.mp4", "b.mp4"]):
        write_tar(path, dict.fromkeys(names, b"1"))
        for _ in range(2):
            assert ids(rows(path, store=store, keeps=True)) == [f"a.tar/{name}" for name in names]
            (kept,) = (tmp_path / "cache" / "sources").iterdir()
            kept.write_bytes(kept.read_bytes()[:-40])
    assert not store.has_other_files()


UNREADABLE_FORMS = [
    "a.tar.gz", "a.tgz", "s3://b/a-{00..09}.tar.zst", "*.tar.bz2", "t.lance", "s3://k:SEC@b/a.tgz",
    "https://k:SEC@h/t.lance", "pipe:curl -H 'Authorization: Bearer SEC' https://h/a.tar",
]  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE_FORMS)
def test_what_cannot_be_read_as_it_is_is_refused_with_the_remedy(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    remedies = r"make it plain: gunzip|no command is run; name the tars|as Parquet"
    with pytest.raises(ManifestError, match=remedies) as caught:
        read_manifest(name)
    assert "SEC" not in str(caught.value)


def test_a_folder_of_tars_is_a_corpus_and_videos_come_first(tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"shard-{number}.tar", {f"{number}.mp4": b"x"})
    whole = [f"shard-{number}.tar/{number}.mp4" for number in range(3)]
    for named in (tmp_path, f"{tmp_path}/*.tar", f"{tmp_path}/shard-{{0..2}}.tar"):
        assert ids(rows(named)) == whole
    several = [f"{tmp_path}/shard-2.tar", f"{tmp_path}/shard-0.tar"]
    assert ids(rows(several)) == [whole[2], whole[0]]
    (tmp_path / "a.mp4").touch()
    assert ids(rows(tmp_path)) == ["a.mp4"]


def test_a_tar_that_is_no_file_or_lies_outside_is_a_row(tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    write_tar(inside / "a.tar", {"a.mp4": b"x"})
    os.mkfifo(inside / "b.tar")
    (inside / "c.tar").symlink_to(write_tar(tmp_path / "out.tar", {"a.mp4": b"x"}))
    found = rows(inside)
    assert ids(found) == ["a.tar/a.mp4", "b.tar", "c.tar"]
    assert found[1]["fault"].startswith("io: the archive cannot be read: not a regular file")
    assert found[2]["policy"] is not None


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
        touch(tmp_path / name)
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
