"""Tars: every member is found where it lies, and what cannot be trusted is a row of its class."""

import io
import json
import os
import random
import tarfile

import pytest

from pipeline.errors import FAULTS, ManifestError
from pipeline.inputs.archive import ArchiveOptions
from pipeline.storage.stores import LocalStore
from tests.builders.archives import BLOCK, ended, member, pax, renumbered, write_tar
from tests.builders.manifests import contents, ids, read_manifest, rows

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
