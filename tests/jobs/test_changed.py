"""Cached videos whose files were replaced, copied or packed anew: the same bytes are kept, others are noticed."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from jobs import prune, verify
from pipeline import TokenCache
from tests.builders.archives import ended, member
from tests.builders.clips import write_clip
from tests.builders.runs import document_of, said_by
from tests.builders.stores import S3Server

pytestmark = pytest.mark.slow

OPTIONS = ("--num-frames", "2")
IDS = ("file", "object", "t.tar/a", "t.tar/b", "s.tar/a", "s.tar/b", "z.zip/a", "z.zip/b")
FORMS = ("file", "object", "t.tar/a", "s.tar/a", "z.zip/a")  # the id of a video of each form


@pytest.fixture(scope="module")
def contents(tmp_path_factory) -> list[bytes]:
    """Three clips of other lengths, with as many bytes: a box that players pass over fills them up."""
    folder = tmp_path_factory.mktemp("clips")
    clips = [write_clip(folder / f"{count}.mp4", count=count).read_bytes() for count in (40, 20, 30)]
    size = max(map(len, clips)) + 8
    return [clip + (size - len(clip)).to_bytes(4, "big") + b"free" + bytes(size - len(clip) - 8) for clip in clips]


class Corpus:
    """A video of each form: a file, an object of a manifest, and members of a tar here, of one on S3 and of a zip."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        self.folder, self.server = folder, server
        self.roots = ["--video-root", str(folder), "--video-root", server.uri()]
        self.cache = folder / "cache"
        folder.mkdir()
        rows = [{"video_id": "file", "uri": "f.mp4"}, {"video_id": "object", "uri": server.uri("o.mp4")}]
        (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(self, a: bytes, b: bytes, first: dict[str, bytes] | None = None, mtime: float = 0) -> None:
        """Write ``a`` as a video of each form, and ``b`` beside it in archives, which begin with other members."""
        (self.folder / "f.mp4").write_bytes(a)
        os.utime(self.folder / "f.mp4", (mtime, mtime))
        self.server.upload("o.mp4", a)
        members = {**(first or {}), "a": a, "b": b}
        files = {f"{name}.mp4": content for name, content in members.items()}
        tar = ended(*(member(name, content, mtime=int(mtime)) for name, content in files.items()))
        (self.folder / "t.tar").write_bytes(tar)
        self.server.upload("s.tar", tar)
        with zipfile.ZipFile(self.folder / "z.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    def upload_in_parts(self, data: bytes) -> None:
        client, place = self.server.client, {"Bucket": self.server.bucket, "Key": "o.mp4"}
        upload = client.create_multipart_upload(**place)["UploadId"]
        tag = client.upload_part(**place, UploadId=upload, PartNumber=1, Body=data)["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        assert client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)["ETag"] != tag

    def prune(self, *more: str, code: int = 0) -> str:
        places = (self.folder / "m.jsonl", self.folder / "t.tar", self.server.uri("s.tar"), self.folder / "z.zip")
        root = ("--video-root", self.server.uri())
        return said_by(prune, *places, *root, "--out", self.cache, *OPTIONS, *more, code=code)

    def values(self, column: str) -> dict[str, Any]:
        """A column of the rows of the cache, by video."""
        cache = TokenCache(self.cache)
        return {video_id.removesuffix(".mp4"): cache.metadata(video_id)[column] for video_id in cache.video_ids}


@pytest.fixture
def server(monkeypatch):
    with S3Server() as opened:
        opened.reach(monkeypatch)
        yield opened


def test_other_content_of_the_same_size_is_noticed_and_the_same_content_is_kept(one_ray, contents, server, tmp_path):
    a, b, other = contents
    corpus = Corpus(tmp_path / "corpus", server)
    corpus.write(a, b)
    corpus.prune()
    before = corpus.values("source_hash")
    assert sorted(before) == sorted(IDS)

    corpus.write(a, b, mtime=1e9)  # a copy with other times, and another mark of each tar
    corpus.upload_in_parts(a)  # with an ETag that is no hash of the content
    again = corpus.prune()
    assert "8 of 8 videos are in the cache already" in again and "nothing to do" in again

    corpus.write(a, b, {"new": other}, mtime=2e9)  # packed anew, with another member in front
    assert "8 of 11 videos are in the cache already" in corpus.prune()
    assert {name: value for name, value in corpus.values("source_hash").items() if name in IDS} == before

    corpus.write(other, b, {"new": other, "newer": b}, mtime=3e9)  # as many bytes
    text = corpus.prune(code=2)
    assert "5 videos of the cache" in text and "--on-changed skip processes" in text
    assert all(f"{name}" in text for name in FORMS)
    assert f"still has {len(a)} bytes, but other content" in text

    code, record, said = document_of(verify, [str(corpus.cache), "--live", "11", *corpus.roots])
    changed = {item["video_id"].removesuffix(".mp4") for item in record["live"] if item["state"] == "source-changed"}
    assert code == 1 and changed == {*FORMS} and "nothing is wrong" not in said
    assert {problem["class"] for problem in record["problems"]} == {"source-changed"}

    corpus.prune("--on-changed", "skip")
    assert {name: value for name, value in corpus.values("source_hash").items() if name in IDS} == before
    assert "t.tar/newer" in corpus.values("source_hash")
    corpus.prune("--on-changed", "redo")
    after = corpus.values("source_hash")
    assert {name for name in IDS if after[name] != before[name]} == {*FORMS}
    assert {after[name] for name in FORMS} == {after["t.tar/new"]}
    assert {name for name, attempts in corpus.values("attempts").items() if attempts == 2} == {*FORMS}
    assert verify.main([str(corpus.cache), "--live", "14", *corpus.roots]) == 0

    ids = tmp_path / "ids.txt"
    ids.write_text("t.tar/b.mp4\nfile\n")
    corpus.prune("--redo", str(ids))
    assert corpus.values("attempts")["t.tar/b"] == 2 and corpus.values("attempts")["file"] == 3
    assert sum(corpus.values("attempts").values()) == 14 + 5 + 2
    for named, why in (("typo.mp4\n", "1 of its ids have no row"), ("file\nx", "e.g. x")):
        ids.write_text(named)
        assert why in corpus.prune("--redo", str(ids), code=2)
