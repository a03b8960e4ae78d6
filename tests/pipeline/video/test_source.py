"""A video from S3 decodes like one on disk: in memory, called by its URI, and nothing of it stays behind."""

import json
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import UsageError, VideoFault
from pipeline.storage import s3 as objects_module
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.video.frame_folders import read_source_state
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.source import SourceStates, prepare_source
from tests.builders import decoding
from tests.builders.clips import decord_killer, memory_files
from tests.builders.decoding import facts, request
from tests.builders.stores import KEY, SECRET, answering
from tests.waiting import wait_until

LIMIT = 64 * 2**20
MEMFD = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this platform has no files in memory")


@pytest.fixture
def server(module_server, monkeypatch):
    monkeypatch.delattr(module_server, "objects")  # a client for each video, which leaves no connection open
    return module_server.renew()


@pytest.fixture(params=[pytest.param("memory", marks=MEMFD), "disk"])
def place(request, monkeypatch, tmp_path):
    """Where fetched videos lie: in memory, or in temporary files where the platform has none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "disk":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    yield request.param
    assert list(tmp_path.glob("video-*")) == []


def decode(sandbox, server, uri, decoder="auto"):
    with prepare_source(Location(uri), server.objects(), LIMIT) as source:
        return source.decode(sandbox, request("", decoder=decoder))


def fault_of(*arguments):
    return decoding.fault_of(decode, *arguments)


@pytest.mark.parametrize("decoder", ["auto", "decord"])
def test_an_object_decodes_like_its_file_in_one_request(server, place, clip, decoder):
    uri = server.upload("odd ü#%20?/a.mp4", clip.read_bytes())
    with DecodeSandbox() as sandbox:
        there = decode(sandbox, server, uri, decoder)
    here, names = decoding.decode(clip, decoder=decoder), ("backend", "source_size", "source_hash")
    assert np.array_equal(there.frames, here.frames) and facts(there, *names) == facts(here, *names)
    assert server.counts() == {"GET": 1}


def test_faults_name_the_object_and_not_where_it_lies(server, place, clip):
    texts = {"text.mp4": b"no video" * 99, "empty.mp4": b"", "cut.mp4": clip.read_bytes()[:-500]}
    with DecodeSandbox() as sandbox:
        faults = {name: fault_of(sandbox, server, server.upload(name, data)) for name, data in texts.items()}
        told = fault_of(sandbox, server, server.upload("a.mp4", clip.read_bytes()), "Leaving")
    assert {name: fault.fault_class for name, fault in faults.items()} == {
        "text.mp4": "unsupported", "empty.mp4": "unsupported", "cut.mp4": "corrupt",
    }  # fmt: skip
    assert all(server.uri(name) in faults[name].message for name in ("text.mp4", "empty.mp4"))
    assert json.loads(told.message)["path"] == server.uri("a.mp4")
    for fault in (*faults.values(), told):
        assert "/proc/self/fd" not in fault.message and tempfile.gettempdir() not in fault.message


def n_open():
    return len(list(Path("/proc/self/fd").iterdir()))


@MEMFD
def test_nothing_stays_open_in_parent_or_child_which_cannot_change_the_bytes(server, clip, tmp_path):
    good = server.upload("a.mp4", clip.read_bytes())
    killer = server.upload("killer.mp4", decord_killer(tmp_path / "a.mp4").read_bytes())
    text = server.upload("text.mp4", b"no video")
    with DecodeSandbox(timeout_s=60) as sandbox:
        decode(sandbox, server, good)
        before = n_open()
        for _ in range(2):
            decode(sandbox, server, good)
            fault_of(sandbox, server, text)
            fault_of(sandbox, server, good, "Raising")
        told = fault_of(sandbox, server, good, "Leaving")
        assert json.loads(told.message)["files"] == [good, good]  # handed over and opened, and none of an earlier video
        assert "Operation not permitted" in fault_of(sandbox, server, good, "Vandal").message
        server.requests.clear()
        assert decode(sandbox, server, killer, "decord").attempts == 2  # read again from the same bytes
        assert server.counts() == {"GET": 1}
        assert fault_of(sandbox, server, good, "Aborting").fault_class == "crash"
        decode(sandbox, server, good)
        assert sandbox._child is not None and memory_files(sandbox._child.process.pid) == []
        sandbox._timeout_s = 0.5
        assert fault_of(sandbox, server, good, "Hanging").fault_class == "timeout"
        sandbox._timeout_s = 60
        decode(sandbox, server, good)
        assert memory_files(os.getpid()) == []
        wait_until(lambda: n_open() <= before, "the end of the server's side of the last connection")


def test_what_cannot_be_fetched_is_a_fault_with_its_remedy(server, place):
    uri = server.upload("big.mp4", b"12345678")
    server.fail("GET", "secret.mp4", 403)
    objects = server.objects()
    for name, limit, fault_class, message in [
        ("big.mp4", 7, "out-of-memory", "8 bytes, more than the 7 .*--fetch-memory"),
        ("gone.mp4", 7, "io", "NoSuchKey"),
        ("secret.mp4", 7, "io", "AccessDenied"),
    ]:
        with (
            prepare_source(Location(server.uri(name)), objects, limit) as source,
            pytest.raises(VideoFault, match=message) as caught,
        ):
            source.decode(DecodeSandbox(), request(""))
        assert caught.value.fault_class == fault_class and server.uri(name) in caught.value.message
        assert caught.value.retryable and source.descriptor is None and source.path is None
    with prepare_source(Location(uri), objects, 8) as source:
        assert source.fault is None and source.location.size == 8


def test_a_store_that_stalls_in_mid_body_is_an_io_fault(monkeypatch):
    monkeypatch.setattr(objects_module, "_SILENT_S", 0.1)
    starts, size, ended = set(), 2**22, threading.Event()

    def answer(handler):
        start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        starts.add(start)

        def body():
            yield b"x" * ((size - start) // 2)
            ended.wait()

        headers = [("ETag", '"x"'), ("Content-Length", str(size - start))]
        headers += [("Content-Range", f"bytes {start}-/{size}")] * bool(start)
        return 206 if start else 200, headers, body()

    with answering(answer) as url:
        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        objects = Objects(endpoint_url=url, region_name="us-east-1", **keys)
        fault = prepare_source(Location("s3://bucket/a.mp4"), objects, LIMIT).fault
        ended.set()
    assert fault is not None and fault.fault_class == "io" and "ReadTimeoutError" in fault.message
    assert len(starts) == 5 and "s3://bucket/a.mp4" in fault.message
    assert url.partition("//")[2] not in fault.message and SECRET not in fault.message


def test_a_file_on_disk_has_its_mark_of_now_and_a_missing_one_that_of_its_listing(tmp_path):
    path = tmp_path / "a.mp4"
    for expected in (7, None):
        with prepare_source(Location(str(path), mark=7), Objects(), LIMIT) as source:
            assert source.location.mark == (expected or read_source_state(str(path)).mark)
        path.write_bytes(b"x")


def test_an_outage_amid_many_questions_ends_them(server, monkeypatch):
    monkeypatch.setattr("pipeline.video.source._MAX_REQUESTS", 4)
    uris = [server.uri(f"{number}.mp4") for number in range(40)]
    for number in range(8, 40):
        server.fail("HEAD", f"{number}.mp4", 403)
    with pytest.raises(UsageError, match=r"/11\.mp4: .*403"):
        SourceStates(server.objects()).of(uris)
    assert len(server.requests) < 40


def test_files_and_objects_are_measured_in_the_order_asked_for_and_what_is_gone_has_no_size(server, tmp_path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    objects = [server.upload(f"{n}.mp4", b"x" * n) for n in (3, 4)]
    files = [str(tmp_path / name) for name in ("a", "gone", "link", "nul\0")]
    sizes = SourceStates(server.objects())
    assert sizes.of([]) == []
    sizes.finish()  # nobody was asked, so nobody refused
    assert sizes.of([objects[1], *files, server.uri("gone.mp4"), objects[0]]) == [4, 5, -1, 5, -1, -1, 3]
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
