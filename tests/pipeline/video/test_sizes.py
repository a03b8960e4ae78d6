"""What videos take now: one look at each file, one HEAD for each object, and no guess where nobody answers."""

import pytest

from pipeline.errors import UsageError
from pipeline.video.source import SourceStates
from tests.builders.clips import write_jpegs


def test_an_outage_amid_many_questions_ends_them(server):
    uris = [server.uri(f"{number}.mp4") for number in range(300)]
    for number in range(40, 300):
        server.fail("HEAD", f"{number}.mp4", 403)
    with pytest.raises(UsageError, match=r"/71\.mp4: .*403"):
        SourceStates(server.objects()).of(uris)
    assert len(server.requests) < 300


def test_files_are_measured_and_what_is_gone_has_no_size(tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    sizes = SourceStates()
    assert sizes.of([str(tmp_path / name) for name in ("a", "gone", "link", "nul\0")]) == [5, -1, 5, -1]
    assert sizes.of([]) == []
    sizes.finish()  # nobody was asked, so nobody refused


def test_files_and_objects_come_in_the_order_asked_for(server, tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    objects = [server.upload(f"{n}.mp4", b"x" * n) for n in (3, 4)]
    sizes = SourceStates(server.objects())
    assert sizes.of([objects[1], str(tmp_path / "a"), server.uri("gone.mp4"), objects[0]]) == [4, 1, -1, 3]
    assert server.counts() == {"HEAD": 3}
    sizes.finish()  # one that is gone is an answer


def test_few_refusals_are_no_outage_unless_they_are_all(server):
    server.upload("a.mp4", b"12345")
    for n in range(3):
        server.fail("HEAD", f"no{n}.mp4", 403)
    refused = [server.uri(f"no{n}.mp4") for n in range(3)]
    some = SourceStates(server.objects())
    assert some.of([*refused, server.uri("a.mp4")]) == [-1, -1, -1, 5]
    some.finish()
    none = SourceStates(server.objects())
    assert none.of(refused[:1]) == [-1] and none.of(refused[1:]) == [-1, -1]
    with pytest.raises(UsageError, match=r"no2\.mp4: .*cannot check whether .*: 403.*--on-changed skip"):
        none.finish()


def test_a_folder_of_frames_has_the_bytes_of_its_frames(tmp_path):
    """As decoding it says: else every resumed run would take it for changed."""
    folder = write_jpegs(tmp_path / "frames_fps3" / "x", 3)
    (folder / "notes.txt").write_text("x")
    assert SourceStates().of([str(folder)]) == [sum(path.stat().st_size for path in folder.glob("*.jpg"))]
