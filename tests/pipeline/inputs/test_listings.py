"""What to process on S3, at a known number of requests, and nothing outside of it; patterns of braces."""

import json
import shutil
import subprocess
from hashlib import md5

import pytest

from pipeline.errors import ManifestError, UsageError
from pipeline.inputs import listings
from pipeline.inputs.listings import expand_braces
from pipeline.keys import hash_mark
from pipeline.storage.s3 import Objects
from tests.builders.manifests import ids, read_manifest
from tests.builders.stores import SECRET

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
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    named = [f"{tmp_path}/b", f"{tmp_path}/a/*.mp4", f"{tmp_path}/c{{2,1}}.mp4"]
    assert read_manifest(named)["video_id"].to_pylist() == ["z.mp4", "x.mp4", "y.mp4", "c2.mp4", "c1.mp4"]
    with pytest.raises(ManifestError, match=r"no such folder.*"):
        read_manifest([f"{tmp_path}/a", f"{tmp_path}/missing"])
    with pytest.raises(ManifestError, match=r"several VIDEOS.*1 rows repeat a video_id.*'x.mp4'"):
        read_manifest([f"{tmp_path}/a", f"{tmp_path}/d"])
