"""What a list of videos already says: who may not be read, which file is no video, and what a run could do about it."""

from pathlib import Path

import pytest

from pipeline.errors import ManifestError
from pipeline.prune.manifest_checks import refuse_forbidden, refuse_other_files
from pipeline.storage.s3 import Objects
from tests.builders.clips import sample
from tests.builders.manifests import read_manifest, write_jsonl

NOWHERE = Objects(endpoint_url="http://127.0.0.1:1")


def write_list(folder: Path, uris: dict[str, str]) -> Path:
    return write_jsonl(folder / "m.jsonl", [{"video_id": name, "uri": uri} for name, uri in uris.items()])


def refused(manifest: Path, *roots: str) -> str:
    """What is said of a list that is refused."""
    with pytest.raises(ManifestError) as caught:
        refuse_forbidden(read_manifest(str(manifest), roots, NOWHERE), str(manifest))
    return str(caught.value)


def test_videos_outside_are_refused_with_a_root_that_allows_them(tmp_path):
    for name in ("data/a b/one.mp4", "data/a b/c/two.mp4"):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    folder = tmp_path / "lists"
    folder.mkdir()
    (folder / "link.mp4").symlink_to(tmp_path / "data/a b/one.mp4")
    uris = {"one": f"{tmp_path}/data/a b/one.mp4", "two": "../data/a b/c/two.mp4", "link": "link.mp4", "own": "x.mp4"}
    manifest = write_list(folder, uris)
    said = refused(manifest)
    assert f"{manifest}: 3 of 4 videos may not be read, so nothing was started" in said
    assert "3: the path resolves outside the folder that was named" in said and f"e.g. one: {tmp_path}/data" in said
    assert f"Allow that with --video-root '{tmp_path}/data/a b', or correct the list" in said
    refuse_forbidden(read_manifest(str(manifest), [f"{tmp_path}/data/a b"]), "m")


def test_no_root_is_suggested_that_allows_everything_or_nothing(tmp_path):
    uris = {"a": "/etc/hostname", "b": "/usr/bin/env", "c": "http://u:pw@host/c.mp4", "d": "s3://k:s@bucket/d.mp4"}
    said = refused(write_list(tmp_path, uris | {f"scheme {i}": f"x{i}://host/v.mp4" for i in range(4)}))
    assert "8 of 8" in said and "http:// is not read from a manifest" in said and "and 2 other reasons" in said
    assert "Correct the list; or record them as failed and prune the others with --on-forbidden record." in said
    assert "--video-root " not in said.partition("Correct")[2] and "pw" not in said


OTHER_FILES = {
    ".txt": "a",
    ".7z": "a",
    ".mp4": "a",
}


@pytest.mark.parametrize("suffix", OTHER_FILES)
def test_a_single_file_is_judged_by_its_content(tmp_path, suffix):
    file = tmp_path / f"list{suffix}"
    file.write_text(OTHER_FILES[suffix])
    said = rf"{suffix} is not a video.*; name a video, .*manifest .*unpack an archive"
    for named in (str(file), f"{tmp_path}/../{tmp_path.name}/{file.name}", f"file://{file}"):
        with pytest.raises(ManifestError, match=said):
            refuse_other_files(read_manifest(named), named, NOWHERE)
    file.write_bytes(sample("bikes.mp4").read_bytes())
    refuse_other_files(read_manifest(str(file)), str(file), NOWHERE)


def test_a_single_object_of_another_suffix_is_one_request(server):
    objects = server.objects()

    def check(uri: str) -> None:
        manifest = read_manifest(uri, (), objects)
        server.requests.clear()
        refuse_other_files(manifest, uri, objects)

    for key, data in (("v/list.txt", b"a.mp4"), ("v/empty.7z", b"")):
        with pytest.raises(ManifestError, match=r"s3://.*is not a video container; it looks like .*; name a video"):
            check(server.upload(key, data))
    check(server.upload("v/clip", sample("bikes.mp4").read_bytes()))
    assert server.counts() == {"GET": 1}
    check(server.upload("v/named.mp4", b"text"))
    assert server.counts() == {}
