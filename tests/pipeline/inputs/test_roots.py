"""What a cache names is read again only below the places that its reader named."""

import tarfile

import pytest

from pipeline.errors import ManifestError, VideoFault
from pipeline.inputs.forms import make_member_fetcher
from pipeline.inputs.manifest import sort_roots
from pipeline.inspect.page import render_video_page
from pipeline.storage.s3 import Objects
from tests.builders.stores import S3Server
from tests.pipeline.pages import FRAMES, VIDEO, build, decoded_clip, pictures_of


@pytest.fixture
def places(tmp_path):
    """Files inside of the folder ``in`` and outside, links between them, and tars."""
    for name in ("in/sub/a.mp4", "in/a#1.mp4", "in2/a.mp4", "out/a.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "in" / "link.mp4").symlink_to(tmp_path / "out" / "a.mp4")
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for name in ("in/a.tar", "out/a.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            tar.add(tmp_path / "out" / "a.mp4", "a.mp4")
    return tmp_path


ROOTS = ("in", "s3://bucket/videos", "hf://datasets/me/clips")
INSIDE = ["in/sub/a.mp4", "in/a#1.mp4", "link/sub/a.mp4", "in/a.tar#a.mp4", "s3://bucket/videos/a.mp4"]
INSIDE += ["s3://bucket/videos/a.tar#b.mp4", "hf://datasets/me/clips/a.mp4"]
OUTSIDE = ["out/a.mp4", "in2/a.mp4", "in/link.mp4", "in/folder/a.mp4", "in/../out/a.mp4", "out/a.tar#in/a.mp4"]
OUTSIDE += ["in/folder/a.tar#a.mp4", "in/a\0.mp4", "s3://bucket/videos2/a.mp4", "s3://bucket/videos/../a.mp4"]
OUTSIDE += ["s3://other/videos/a.mp4", "s3://bucket/a.tar#s3://bucket/videos/a", "hf://datasets/me/clips2/a.mp4"]
ELSEWHERE = ["a.mp4", "", "http://169.254.169.254/latest", "file:///in/a.mp4", "s3://k:SECRET@bucket/videos/a.mp4"]


def ask(places, uri, roots):
    offset = 512 if ".tar#" in uri else None
    row = {"uri": uri, "source_offset": offset, "source_size": 1, "source_mark": None}
    return make_member_fetcher(row, Objects(), sort_roots([r if "://" in r else str(places / r) for r in roots]))


def place_of(places, name):
    return name if "://" in name else str(places / name)


@pytest.mark.parametrize("name", INSIDE)
def test_a_source_below_a_root_is_read(places, name):
    fetch = ask(places, place_of(places, name), ROOTS)
    assert (fetch is not None) == (".tar#" in name)
    with pytest.raises(VideoFault, match=r"^policy: "):
        ask(places, place_of(places, name), ())


@pytest.mark.parametrize("name", [*OUTSIDE, *ELSEWHERE])
def test_a_source_elsewhere_is_not_read_whatever_it_is_called(places, monkeypatch, name):
    monkeypatch.chdir(places / "in")  # which is no place that was named
    uri = name if name in ELSEWHERE else place_of(places, name)
    with pytest.raises(
        VideoFault, match="read only below folders and prefixes that you name: for this one --vi"
    ) as error:
        ask(places, uri, ROOTS)
    assert "SECRET" not in str(error.value)


def test_roots_that_are_none_are_refused(tmp_path, monkeypatch):
    for root in (str(tmp_path / "gone"), "s3://bucket/../a", "hf://datasets/../a"):
        with pytest.raises(ManifestError, match="--video-root"):
            sort_roots([root])
    monkeypatch.chdir(tmp_path)
    assert sort_roots(["sample"]).folders[0].name == "data"
    (tmp_path / "sample").mkdir()
    assert sort_roots(["sample"]).folders[0].samefile(tmp_path / "sample")


def test_a_page_sends_no_request_that_its_reader_did_not_allow(tmp_path, monkeypatch):
    path, video = decoded_clip(tmp_path)
    with S3Server("roots") as server:
        server.reach(monkeypatch)
        uri = server.upload("all/bikes.mp4", path.read_bytes())
        cache = build(tmp_path / "c", (path, video), uri=uri)
        for roots in ([], ["/"], [server.uri("al")], [server.uri("all/bikes")]):
            page = render_video_page(cache, VIDEO, video_roots=roots)
            assert page.missing.endswith(f"for this one --video-root {server.uri('all')}") and not server.requests
        for root in (server.uri("all"), server.uri()):
            assert len(pictures_of(render_video_page(cache, VIDEO, video_roots=[root]).html)) == FRAMES
        assert server.counts() == {"GET": 2}
