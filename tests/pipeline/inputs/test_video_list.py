"""The list of a run's videos: what is known before a start, and archives that are indexed later, until it is closed.

What to process on S3, at a known number of requests, and nothing outside of it; patterns of braces.
"""

import json
import shutil
import subprocess
import threading
import time
from hashlib import md5
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import ManifestError, UsageError
from pipeline.inputs import listings
from pipeline.inputs.forms import FORMS
from pipeline.inputs.indexes import Indexes
from pipeline.inputs.listings import expand_braces
from pipeline.inputs.tar_and_zip import Tar
from pipeline.inputs.video_list import VideoList, get_archive_size
from pipeline.keys import hash_mark
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.builders.archives import write_doubled_tars, write_tar, write_tars
from tests.builders.manifests import NOWHERE, CountingTar, ids, list_for_run, read_manifest, touch
from tests.builders.stores import SECRET
from tests.waiting import wait_until


@pytest.fixture
def tars(tmp_path):
    return write_tars(tmp_path / "tars")


def left(videos):
    return [place.name for place in videos.unindexed]


def test_tars_wait_and_come_one_after_the_other_and_their_indexes_are_kept(tars, tmp_path):
    lines = []
    videos = list_for_run(tars, tmp_path, say=lines.append)
    assert len(videos.known) == 0 and left(videos) == ["0.tar", "1.tar", "2.tar"]
    sizes = [path.stat().st_size for path in sorted(tars.iterdir())]
    assert [*map(get_archive_size, videos.unindexed)] == sizes
    items, expected = [*videos.read_unindexed()], [[f"{tar}.tar/{n}.mp4" for n in range(3 - tar)] for tar in range(3)]
    assert [ids(item.videos) for item in items] == expected and all(item.is_whole for item in items)
    again = list_for_run(tars, tmp_path, say=lines.append)
    assert ids(again.known) == [*chain(*expected)] and left(again) == []
    assert again.indexes.n_made == 0 and lines == ["indexed 3 of 3 archives: 6 videos so far"]


def test_an_archive_that_has_changed_is_indexed_before_the_start_and_a_new_one_waits(tars, tmp_path):
    [*list_for_run(tars, tmp_path).read_unindexed()]
    write_tar(tars / "00.tar", {"new.mp4": bytes(9)})
    write_tar(tars / "1.tar", {"changed.mp4": bytes(9)})
    videos = list_for_run(tars, tmp_path)
    known = [*(f"0.tar/{number}.mp4" for number in range(3)), "1.tar/changed.mp4", "2.tar/0.mp4"]
    assert left(videos) == ["00.tar"] and ids(videos.known) == known
    assert [ids(item.videos) for item in videos.read_unindexed()] == [["00.tar/new.mp4"]]


@pytest.mark.parametrize(
    ("first", "is_limited", "beside", "waiting"),
    [
        ("all", False, False, []),
        ("all", True, False, []),
        ("needed", False, True, []),
        ("needed", False, False, ["2.tar"]),
        ("needed", True, True, ["2.tar"]),
        ("needed", True, False, ["2.tar"]),
        ("kept", False, True, ["1.tar", "2.tar"]),
        ("kept", True, False, ["1.tar", "2.tar"]),
    ],
)
def test_the_archives_that_wait_are_those_of_the_table_on_the_page(tars, tmp_path, first, is_limited, beside, waiting):
    """The first tar has a kept index, the second has changed since, and the third is new. A file may have any id."""
    (tars / "2.tar").rename(tmp_path / "2.tar")
    [*list_for_run(tars, tmp_path).read_unindexed()]
    (tmp_path / "2.tar").rename(tars / "2.tar")
    write_tar(tars / "1.tar", {"changed.mp4": bytes(9)})
    touch(tmp_path / "y" / "y.mp4")
    lines = []
    indexes = Indexes(store=LocalStore(tmp_path / "cache"), keeps=True, say=lines.append)
    names = [str(tars), str(tmp_path / "y")] if beside else [str(tars)]
    videos = VideoList.read(names, (), NOWHERE, indexes, first=first, is_limited=is_limited)
    assert left(videos) == waiting
    count = {"0.tar": 3, "1.tar": 1, "2.tar": 1}
    assert len(videos.known) == beside + sum(count[name] for name in count if name not in waiting)
    if (first, is_limited, beside) == ("needed", False, False):  # the line on progress counts none that waits
        assert lines == ["indexed 2 of 3 archives: 4 videos so far"]
        [*videos.read_unindexed()]
        assert lines[1:] == ["indexed 1 of 1 archives: 1 videos so far"]


def test_a_close_by_another_thread_ends_it_within_an_archive_whose_index_is_dropped(tars, tmp_path, monkeypatch):
    reading, closed = threading.Event(), threading.Event()

    class Gated(Tar):
        def members(self, options):
            for member in super().members(options):
                if self._file.uri.endswith("1.tar"):
                    reading.set()
                    assert closed.wait(60)
                yield member

    monkeypatch.setitem(FORMS, ".tar", Gated)
    for is_limited in (False, True):
        reading.clear()
        closed.clear()
        folder = tmp_path / f"{is_limited}"
        videos, items = list_for_run(tars, folder, is_limited=is_limited), []

        def collect(videos=videos, items=items):
            items.extend(videos.read_unindexed())

        thread = threading.Thread(target=collect)
        thread.start()
        assert reading.wait(60)
        wait_until(lambda items=items: items, "the videos of the first tar")
        videos.close()
        closed.set()
        thread.join(60)
        assert not thread.is_alive() and [ids(item.videos)[0] for item in items] == ["0.tar/0.mp4"]
        assert "1.tar" in left(list_for_run(tars, folder))
        assert not is_limited or videos.indexes.n_made == 2


def test_after_a_close_nothing_comes_that_was_read_before(tars, tmp_path):
    videos = list_for_run(tars, tmp_path)
    archives = videos.read_unindexed()
    assert ids(next(archives).videos)[0] == "0.tar/0.mp4"
    wait_until(lambda: len(left(list_for_run(tars, tmp_path))) == 0, "the indexes of all tars")
    videos.close()
    assert [*archives] == []


def test_an_archive_that_is_a_mistake_ends_the_reading_of_the_others(tars, tmp_path, monkeypatch):
    n_read = 0

    class Long(Tar):
        def members(self, options):
            nonlocal n_read
            (member, *_) = super().members(options)
            for _ in range(400):
                n_read += 1
                yield member
                time.sleep(0.05)

    monkeypatch.setitem(FORMS, ".tar", Long)
    write_tar(tars / "#.tar", {"a.mp4": b"a"})
    for read in (lambda: list_for_run(tars, tmp_path), lambda: VideoList.read(str(tars), (), NOWHERE)):
        with pytest.raises(ManifestError, match=r"#\.tar: rename it"):
            read()
    assert n_read < 400 and not (tmp_path / "cache").exists()


def test_what_an_archive_leaves_out_is_counted_once_its_videos_are_listed(tmp_path):
    named = []
    for name in "pq":
        (tmp_path / name).mkdir()
        named.append(str(write_tar(tmp_path / name / "0.tar", {f"{name}.mp4": b"x", f"{name}.jpg": b"x"})))
    list_for_run(named, tmp_path)
    forget_index(named[0], tmp_path)
    videos = list_for_run(named, tmp_path, is_limited=True)  # the second waits for the first, though its index is kept
    assert left(videos) == ["0.tar", "0.tar"] and videos.indexes.left_out.counts() == {}
    assert [ids(item.videos) for item in videos.read_unindexed()] == [["0.tar/p.mp4"], ["0.tar/q.mp4"]]
    assert videos.indexes.left_out.as_record() == {"other files": {"count": 2, "names": ["0.tar/p.jpg", "0.tar/q.jpg"]}}


def test_archives_whose_ids_may_meet_and_a_single_one_are_indexed_first(tars, tmp_path):
    (tmp_path / "x").mkdir()
    touch(tmp_path / "y" / "y.mp4")
    again = str(write_tar(tmp_path / "x" / "0.tar", {"z.mp4": b"z"}))
    for place, count in ((tars / "0.tar", 3), ([str(tars), again], 7), ([str(tars), str(tmp_path / "y")], 7)):
        videos = list_for_run(place, tmp_path)
        assert videos.unindexed == [] and len(videos.known) == count


def test_with_a_limit_a_large_tar_comes_in_growing_items_and_can_be_left(tmp_path, monkeypatch):
    monkeypatch.setattr(CountingTar, "n_read", 0)
    monkeypatch.setitem(FORMS, ".tar", CountingTar)
    path = write_tar(tmp_path / "a.tar", {f"{number:04}.mp4": bytes(number % 7) for number in range(1200)})
    videos = list_for_run(path, tmp_path, is_limited=True)
    assert len(videos.known) == 0 and CountingTar.n_read == 0
    first, *_, last = items = [*videos.read_unindexed()]
    assert [len(item.videos) for item in items] == [256, 512, 1024, 1200]
    assert [item.is_whole for item in items] == [False, False, False, True]
    assert last.videos.slice(0, 256).equals(first.videos)
    assert len(list_for_run(path, tmp_path, is_limited=True).known) == 1200  # the index is whole, and was kept
    CountingTar.n_read = 0
    archives = list_for_run(path, tmp_path / "other", is_limited=True).read_unindexed()
    assert ids(next(archives).videos)[0] == "a.tar/0000.mp4"
    archives.close()
    assert CountingTar.n_read == 257 and not (tmp_path / "other").exists()  # a part of an index is not kept


def test_with_a_limit_tables_wait_too_and_only_those_that_are_asked_for_are_opened(tmp_path):
    (tmp_path / "tables").mkdir()
    for number in range(3):
        table = pa.table({"video_id": [f"{number}-{part}" for part in range(3)], "video": [b"x"] * 3})
        pq.write_table(table, tmp_path / f"tables/{number}.parquet", row_group_size=2)
    (tmp_path / "tables/3.parquet").write_bytes(b"is never read")
    videos = list_for_run(tmp_path / "tables", tmp_path, "video", is_limited=True)
    assert len(videos.unindexed) == 4
    archives = videos.read_unindexed()
    assert [ids(next(archives).videos) for _ in range(2)] == [["0-0", "0-1", "0-2"], ["1-0", "1-1", "1-2"]]
    archives.close()
    assert videos.indexes.n_made == 2 and videos.indexes.rows_per_group == 2


def test_an_id_that_two_tars_give_is_an_error_row_known_first_or_later(tmp_path):
    places = write_doubled_tars(tmp_path)
    own = f"0.tar/a.mp4@{places[1]}#a.mp4"
    later = list_for_run(places, tmp_path, is_limited=True)
    tables = [later.known, *(item.videos for item in later.read_unindexed())]
    for table in (pa.concat_tables(tables), list_for_run(places, tmp_path / "other").known):
        assert ids(table) == ["0.tar/a.mp4", "0.tar/b.mp4", "0.tar/c.mp4", own, "1.tar/a.mp4"]
        assert [row["video_id"] for row in table.to_pylist() if row["fault"]] == [own]
    # An archive behind one that waits does so too, as it is not known yet which of its ids repeat others.
    forget_index(places[0], tmp_path)
    assert left(list_for_run(places, tmp_path, is_limited=True)) == ["0.tar", "0.tar", "1.tar"]


def forget_index(uri, tmp_path):
    """Delete the kept index of an archive."""
    [*list_for_run(uri, tmp_path / "alone").read_unindexed()]
    (index,) = (tmp_path / "alone" / "cache" / "sources").iterdir()
    (tmp_path / "cache" / "sources" / index.name).unlink()


def test_what_is_known_to_be_a_mistake_is_refused_at_once(tmp_path):
    p, q, _ = write_doubled_tars(tmp_path)
    with pytest.raises(ManifestError, match=r"p/0\.tar: it is named 2 times; name it once"):
        list_for_run([p, q, p], tmp_path, is_limited=True)
    write_tar(tmp_path / "q" / "0.tar", {"b.mp4": b"b", "a.mp4": b"a"})
    with pytest.raises(ManifestError, match=r"q/0\.tar: all of its 2 videos have ids of earlier ones, e\.g\. 0\.tar/b"):
        list_for_run([p, q], tmp_path)
    known = list_for_run([p, q], tmp_path, is_limited=True).known  # the second may not be needed
    faulty = [row["video_id"] for row in known.to_pylist() if row["fault"]]
    assert faulty == [f"0.tar/{name}@{q}#{name}" for name in ("b.mp4", "a.mp4")]
    for place in (p, q):
        (tmp_path / place).write_bytes(b"no tar")  # a row of its own each, and no mistake of who named them
    known = list_for_run([p, q], tmp_path).known
    assert ids(known) == ["0.tar/@0", f"0.tar/@0@{q}#@0"] and not known["fault"].null_count


ODD = ["a b.mp4", "a#b.mp4", "a%20b.mp4", "a+b.mp4", "a?b.mp4", "watch?v=1&t=2.mp4", "d//e.mp4", "ü/日.mp4"]


def read(server, videos, *roots):
    server.requests.clear()
    return read_manifest(videos, roots, server.objects()).to_pylist()


def write(server, key, *uris):
    lines = [json.dumps({"video_id": str(number), "uri": uri}) for number, uri in enumerate(uris)]
    return server.upload(key, "\n".join(lines).encode())


def test_a_folder_lists_videos_by_their_key_below_it_whatever_its_spelling(server):
    for key in ("v/b.mp4", "v/a/c.MKV", "v/notes.txt", "v/", "v/empty.mp4/", "vv/d.mp4", "e.mp4"):
        server.upload(key, b"12345")
    for videos in ("v", "v/"):
        rows = read(server, server.uri(videos))
        assert ids(rows) == ["a/c.MKV", "b.mp4"]
        assert server.counts() == {"LIST": 1}
    assert rows[1] == {
        "video_id": "b.mp4", "uri": server.uri("v/b.mp4"), "size": 5,
        "start_s": None, "end_s": None, "manifest": None, "policy": None,
        "source_offset": None, "fault": None, "mark": hash_mark(md5(b"12345").hexdigest()),
    }  # fmt: skip
    for whole in (server.uri(), server.uri().rstrip("/")):
        assert ids(read(server, whole)) == ["e.mp4", "v/a/c.MKV", "v/b.mp4", "vv/d.mp4"]
    for key in ODD:
        server.upload(f"o/{key}", key.encode())
    rows = read(server, server.uri("o"))
    assert sorted(ids(rows)) == sorted(ODD) and not any(row["policy"] for row in rows)
    assert all(server.objects().read(row["uri"]).decode() == row["video_id"] for row in rows)
    for uris in (ODD, [server.uri(f"o/{key}") for key in ODD]):  # a manifest names the same objects
        named = read(server, write(server, "o/m.jsonl", *uris))
        assert [row["uri"] for row in named] == [server.uri(f"o/{key}") for key in ODD]
        assert not any(row["policy"] for row in named)
    for key in ODD:
        assert [row["uri"] for row in read(server, server.uri(f"o/{key}"))] == [server.uri(f"o/{key}")]


def test_globs_stay_within_a_segment(server):
    for key in ("v/one.mp4", "v/two.mp4", "v/x/one.mp4", "v/x/y/one.mp4", "v/note.txt", "b/a[1].mp4", "b/a1.mp4"):
        server.upload(key)
    expected = {
        "v/*.mp4": ["one.mp4", "two.mp4"],
        "v/*": ["one.mp4", "two.mp4"],
        "v/t*": ["two.mp4"],
        "v/*/*.mp4": ["x/one.mp4"],
        "v/**/one.mp4": ["one.mp4", "x/one.mp4", "x/y/one.mp4"],
        "v/**": ["one.mp4", "two.mp4", "x/one.mp4", "x/y/one.mp4"],
        "v/[!t]*.mp4": ["one.mp4"],
        "*/two.mp4": ["v/two.mp4"],
        "b/a[1].mp4": ["a[1].mp4"],
    }
    for glob, names in expected.items():
        assert (ids(read(server, server.uri(glob))), server.counts()) == (names, {"LIST": 1}), glob


def test_one_object_may_have_any_name(server):
    for key, requests in (("v/a.mp4", {"HEAD": 1}), ("v/clip", {"LIST": 1, "HEAD": 1}), ("dir.mp4/b.mp4", {"HEAD": 1})):
        (row,) = read(server, server.upload(key, b"123"))
        assert (row["video_id"], row["uri"], row["size"]) == (key.rpartition("/")[2], server.uri(key), 3)
        assert server.counts() == requests
    assert ids(read(server, server.uri("dir.mp4"))) == ["b.mp4"]  # a folder with a video's suffix
    assert server.counts() == {"HEAD": 1, "LIST": 1}


def test_a_manifest_is_one_request(server):
    line = {"video_id": "007", "uri": "x/v.mp4", "start_s": 1.5, "size": 9}
    (row,) = read(server, server.upload("lists/m.jsonl", b"\xef\xbb\xbf" + json.dumps(line).encode()))
    assert server.counts() == {"GET": 1}
    assert (row["video_id"], row["uri"], row["policy"]) == ("007", server.uri("lists/x/v.mp4"), None)
    assert (row["start_s"], row["size"]) == (1.5, None)  # a column of the manifest's own is only carried
    assert json.loads(row["manifest"]) == {"size": 9}


def test_a_manifest_names_what_lies_below_its_folder_or_a_root(server, tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"x")
    other = "s3://other/"
    uris = ["in.mp4", server.uri("m/in.mp4"), server.uri("root/a.mp4"), server.uri("rooted/a.mp4"), f"{other}m/in.mp4"]
    manifest = write(server, "m/m.jsonl", *uris, str(tmp_path / "a.mp4"), f"file://{tmp_path}/a.mp4")

    def allowed(*roots):
        return [row["policy"] is None for row in read(server, manifest, *roots)]

    assert allowed() == [True, True, False, False, False, False, False]
    assert allowed(server.uri("root")) == allowed(server.uri("root/")) == [True] * 3 + [False] * 4
    assert allowed(server.uri()) == [True] * 4 + [False] * 3
    assert allowed(str(tmp_path)) == [True] * 2 + [False] * 3 + [True] * 2
    assert allowed(other, str(tmp_path)) == [True] * 2 + [False] * 2 + [True] * 3
    assert server.counts() == {"GET": 1}
    assert all("--video-root" in row["policy"] for row in read(server, manifest)[2:])


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://KEY:S/EC@bucket/m/v.mp4", "s3://bucket/m/v.mp4"),
        ("s3://bucket/m/v.mp4?X-Sig=SEC", "s3://bucket/m/v.mp4"),
        ("v.mp4?X-Sig=SEC", "s3://bucket/m/v.mp4"),
        ("s3://bucket/m/../x.mp4", "s3://bucket/m/../x.mp4"),
        ("../x.mp4", "s3://bucket/m/../x.mp4"),
        ("s3://bucket/m/./x.mp4", "s3://bucket/m/./x.mp4"),
        ("s3://bucket/m/a\nb.mp4", "s3://bucket/m/a b.mp4"),
        ("s3:///m/v.mp4", "s3:///m/v.mp4"),
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/m/v.mp4", "S3://bucket/m/v.mp4"),
        ("https://u:SEC@host:1/v.mp4?t=SEC#f", "https://host:1/v.mp4"),
    ],
)
def test_what_is_no_plain_key_is_not_read_and_shows_no_secret(uri, shown):
    class Given(Objects):
        def read(self, uri_of_manifest):
            return json.dumps({"video_id": "x", "uri": uri}).encode()

    (row,) = read_manifest("s3://bucket/m/m.jsonl", ["s3://bucket/m"], Given()).to_pylist()
    assert row["policy"] and row["uri"] == shown
    assert "SEC" not in str(row)


def test_what_cannot_be_listed_is_refused_with_the_store_s_reason(server):
    server.upload("v/notes.txt")
    server.upload("torn.parquet", b"PAR1 torn")
    for key in ("secret", "secret.jsonl"):
        server.fail("GET", key, 403)
    server.fail("HEAD", "secret.mp4", 403)
    for videos, message in [
        (server.uri("v"), "no video on S3 at or below it"),
        *((server.uri(key), "no video on S3") for key in ("gone/", "gone.mp4", "*.mkv")),
        (server.uri("gone.jsonl"), "cannot be read: NoSuchKey"),
        (server.uri("torn.parquet"), "cannot be read as a manifest"),
        (server.uri("secret.jsonl"), "AccessDenied: told to fail"),
        (server.uri("secret.mp4"), "cannot be listed: 403: Forbidden"),
        *((f"s3://no-such-bucket/{key}", "NoSuchBucket") for key in ("v", "v.mp4", "v.csv")),
    ]:
        with pytest.raises(ManifestError, match=message) as caught:
            read(server, videos)
        assert server.url.partition("//")[2] not in str(caught.value) and SECRET not in str(caught.value)
    server.fail("GET", "", 403)
    with pytest.raises(ManifestError, match="AccessDenied"):
        read(server, server.uri("v/"))


@pytest.mark.parametrize("uri", ["s3:///a", "s3://k:SEC@bucket/a", "s3://k:S/EC@bucket/a", "s3://bucket/a?sig=SEC.mp4"])
def test_an_address_with_more_than_bucket_and_key_is_refused_unread(uri):
    with pytest.raises(UsageError, match="without user, host or query") as caught:
        read_manifest(uri, (), Objects(endpoint_url="http://127.0.0.1:1"))
    assert "SEC" not in str(caught.value)


PATTERNS = [
    "shard-{000..010}.tar", "{a,b}{1..3}.tar", "a{b{c,d},e}f", "{3..1}", "{-2..2..2}", "{01..3}", "x{}y",
    "x{a}y", "{a,}", "{a,b", "a}b", "{1..2}{", "{{1,2},3}", "plain.tar", "{0..10..5}", "{5..-5..3}", "{-01..2}",
]  # fmt: skip


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_they_mean_to_bash(pattern):
    said = subprocess.check_output(["bash", "-c", f'printf "%s\\n" s3://b/{pattern}'], text=True)
    assert expand_braces([f"s3://b/{pattern}"]) == said.splitlines()


def test_a_pattern_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(listings, "_MAX_NAMES", 1000)
    with pytest.raises(ManifestError, match="too many names"):
        expand_braces(["s3://b/{0..99999999999}.tar"])


def test_a_pattern_may_be_longer_than_a_file_s_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [f"{number:03}.mp4" for number in range(90)]
    for name in names:
        (tmp_path / name).touch()
    assert read_manifest(f"{{{','.join(names)}}}")["video_id"].to_pylist() == names


def test_several_names_are_listed_one_after_the_other_and_ids_are_unique_over_them(tmp_path):
    for name in ("a/x.mp4", "a/y.mp4", "b/z.mp4", "c1.mp4", "c2.mp4", "d/x.mp4"):
        touch(tmp_path / name)
    named = [f"{tmp_path}/b", f"{tmp_path}/a/*.mp4", f"{tmp_path}/c{{2,1}}.mp4"]
    assert read_manifest(named)["video_id"].to_pylist() == ["z.mp4", "x.mp4", "y.mp4", "c2.mp4", "c1.mp4"]
    with pytest.raises(ManifestError, match=r"no such folder.*"):
        read_manifest([f"{tmp_path}/a", f"{tmp_path}/missing"])
    with pytest.raises(ManifestError, match=r"several VIDEOS.*1 rows repeat a video_id.*'x.mp4'"):
        read_manifest([f"{tmp_path}/a", f"{tmp_path}/d"])
