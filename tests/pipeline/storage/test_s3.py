"""What is asked of S3, request by request; what is retried; and errors that keep secrets."""

import errno
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pipeline.errors import UsageError
from pipeline.storage.s3 import Objects, check_uri
from tests.pipeline.flaky import ALWAYS, FlakyProxy
from tests.pipeline.s3 import KEY, REGION, SECRET, S3Server

ODD_KEYS = ["x/b c.mp4", "x/a#b%20c.mp4", "x/é/ü?.mp4", "x//d.mp4"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def objects(server) -> Objects:
    """After a trip through pickle, as a worker gets it."""
    return pickle.loads(pickle.dumps(server.objects()))  # noqa: S301 - our own bytes


def made(server: S3Server, call) -> list[str]:
    """The methods of the requests that ``call`` makes."""
    before = len(server.requests)
    call()
    return [method for method, *_ in server.requests[before:]]


def test_one_request_each(server, objects):
    uri = f"s3://{server.bucket}/one/a"
    assert made(server, lambda: objects.put(uri, b"0123456789")) == ["PUT"]
    assert made(server, lambda: objects.read(uri)) == ["GET"]
    assert made(server, lambda: objects.read_slice(uri, -3)) == ["GET"]
    assert made(server, lambda: objects.size(uri)) == ["HEAD"]
    assert made(server, lambda: list(objects.list(f"s3://{server.bucket}/one/"))) == ["GET"]
    assert made(server, lambda: list(objects.list(f"s3://{server.bucket}/nothing/"))) == ["GET"]
    assert made(server, lambda: objects.delete(uri)) == ["DELETE"]


def test_what_goes_in_comes_out(server, objects):
    uri = f"s3://{server.bucket}/two/a"
    objects.put(uri, memoryview(b"0123456789"))
    assert (objects.read(uri), objects.size(uri), objects.exists(uri)) == (b"0123456789", 10, True)
    assert objects.read_slice(uri, 2, 5) == (b"234", 10)
    assert objects.read_slice(uri, -4) == (b"6789", 10)
    assert objects.read_slice(uri, -400) == (b"0123456789", 10)
    objects.delete(uri)
    objects.delete(uri)
    assert not objects.exists(uri)
    with pytest.raises(FileNotFoundError, match=uri):
        objects.read(uri)


def test_keys_are_taken_literally(server, objects):
    for key in ODD_KEYS:
        objects.put(f"s3://{server.bucket}/{key}", key.encode())
    found = {info.uri for info in objects.list(f"s3://{server.bucket}/x/", deep=True)}
    assert found == {f"s3://{server.bucket}/{key}" for key in ODD_KEYS}
    assert {objects.read(uri).decode() for uri in found} == set(ODD_KEYS)
    flat = {info.uri for info in objects.list(f"s3://{server.bucket}/x/")}
    assert flat == {f"s3://{server.bucket}/{key}" for key in ODD_KEYS[:2]}


def test_too_large_an_object_is_not_read(server, objects):
    uri = f"s3://{server.bucket}/large"
    objects.put(uri, bytes(1000))
    with pytest.raises(OSError, match="1000 bytes, more than the 999") as error:
        objects.fetch(uri, pytest.fail, limit=999)
    assert error.value.errno == errno.EFBIG
    assert objects.fetch(uri, len, limit=1000) == 1000


@contextmanager
def scripted(*answers: tuple[int, Sequence[tuple[str, str]], bytes]) -> Iterator[tuple[Objects, list[dict[str, str]]]]:
    """A server that gives these answers (status, headers, body), the last one for ever; and what it was asked."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            status, headers, body = answers[min(len(asked), len(answers) - 1)]
            asked.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        keys = {"aws_access_key_id": "AKIATESTTEST", "aws_secret_access_key": "very-secret-value"}
        url = f"http://127.0.0.1:{server.server_port}"
        yield Objects(endpoint_url=url, region_name="us-east-1", **keys), asked
    finally:
        server.shutdown()
        server.server_close()


def test_a_busy_store_is_asked_again():
    busy = (503, [], b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>")
    with scripted(busy, busy, busy, (200, [("Content-Length", "2"), ("ETag", '"x"')], b"ok")) as (objects, asked):
        assert objects.read("s3://bucket/a") == b"ok"
        assert len(asked) == 4


def test_a_broken_download_goes_on_where_it_broke():
    whole = bytes(range(256)) * 10
    half = [("Content-Length", str(len(whole))), ("ETag", '"mark"')]
    rest = [("Content-Length", "1560"), ("Content-Range", "bytes 1000-2559/2560"), ("ETag", '"mark"')]
    with scripted((200, half, whole[:1000]), (206, rest, whole[1000:])) as (objects, asked):
        assert objects.read("s3://bucket/a") == whole
        assert (asked[1]["range"], asked[1]["if-match"]) == ("bytes=1000-", '"mark"')


def test_a_store_that_names_no_size_or_no_content_is_no_crash():
    with scripted((200, [("ETag", '"mark"')], b"ok")) as (objects, _), pytest.raises(OSError, match="how large"):
        objects.read("s3://bucket/a")
    with scripted((200, [("Content-Length", "4")], b"ok")) as (objects, asked):
        with pytest.raises(OSError, match="cannot be used"):
            objects.read("s3://bucket/a")
        assert len(asked) == 1  # what it goes on with might be of another content


def test_a_download_of_a_range_comes_in_pieces(server, objects):
    uri, data = server.uri("range"), bytes(range(256)) * 1000
    objects.put(uri, data)
    server.requests.clear()
    with objects.download(uri, 1000, 200_000) as download:
        pieces = list(download)
    assert b"".join(pieces) == data[1000:200_000] and len(pieces) > 2 and download.size == len(data)
    assert server.counts() == {"GET": 1}


def test_a_broken_download_of_a_range_goes_on_where_it_broke():
    whole, told = bytes(range(256)), ("ETag", '"mark"')
    first = [("Content-Length", "156"), ("Content-Range", "bytes 100-255/256"), told]
    rest = [("Content-Length", "56"), ("Content-Range", "bytes 200-255/256"), told]
    with scripted((206, first, whole[100:200]), (206, rest, whole[200:])) as (objects, asked):
        assert b"".join(objects.download("s3://bucket/a", 100, 256)) == whole[100:]
        assert [request["range"] for request in asked] == ["bytes=100-255", "bytes=200-255"]


def test_a_download_that_breaks_again_and_again_without_progress_ends():
    first = [("Content-Length", "9"), ("Content-Range", "bytes 0-8/9"), ("ETag", '"mark"')]
    with scripted((206, first, b"")) as (objects, asked):
        with pytest.raises(OSError, match="cannot be used"):
            list(objects.download("s3://bucket/a", 0, 9))
        assert len(asked) == 5


def test_a_range_that_a_store_does_not_give_is_no_download():
    whole = (200, [("Content-Length", "6"), ("ETag", '"mark"')], b"012345")
    with scripted(whole) as (objects, _), pytest.raises(OSError, match="another range"):
        objects.download("s3://bucket/a", 2, 4)


def test_a_broken_slice_is_asked_for_again():
    headers = [("Content-Length", "4"), ("Content-Range", "bytes 2-5/9"), ("ETag", '"mark"')]
    with scripted((206, headers, b"23"), (206, headers, b"2345")) as (objects, asked):
        assert objects.read_slice("s3://bucket/a", 2, 6) == (b"2345", 9)
        assert len(asked) == 2


def test_another_range_than_was_asked_for_is_no_answer():
    headers = [("Content-Length", "4"), ("Content-Range", "bytes 0-3/9"), ("ETag", '"mark"')]
    with scripted((206, headers, b"0123")) as (objects, _):
        with pytest.raises(OSError, match="another range"):
            objects.read_slice("s3://bucket/a", 2, 6)
        with pytest.raises(OSError, match="another range"):
            objects.read_slice("s3://bucket/a", -4)


def test_a_store_without_ranges_gives_the_whole():
    with scripted((200, [("Content-Length", "6"), ("ETag", '"mark"')], b"012345")) as (objects, _):
        assert objects.read_slice("s3://bucket/a", -2) == (b"45", 6)
        assert objects.read_slice("s3://bucket/a", 1, 3) == (b"12", 6)


def test_an_empty_object_has_an_empty_tail():
    body = b"<Error><Code>InvalidRange</Code><Message>not satisfiable</Message></Error>"
    with scripted((416, [], body)) as (objects, _):
        assert objects.read_slice("s3://bucket/a", -4) == (b"", 0)
        with pytest.raises(OSError, match="InvalidRange"):
            objects.read_slice("s3://bucket/a", 4)


def test_a_trickle_is_given_up(monkeypatch):
    monkeypatch.setattr("pipeline.storage.downloads._GRACE_S", -1)  # the object's size allows it less than a second
    with scripted((200, [("Content-Length", "60000"), ("ETag", '"mark"')], bytes(60000))) as (objects, _):
        with pytest.raises(OSError, match="of 60000 bytes came in time") as error:
            objects.read("s3://bucket/a")
        assert error.value.errno == errno.ETIMEDOUT


def test_a_forked_child_has_connections_of_its_own(server, objects):
    objects.put(server.uri("fork"), b"x")
    mine = objects._client()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if objects._client() is not mine and objects.read(server.uri("fork")) == b"x" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert objects._client() is mine


def test_a_reply_that_is_lost_and_an_upload_that_breaks_off_end_in_the_whole_object(server):
    data = bytes(range(256)) * 1000
    with FlakyProxy(server) as proxy:
        for kind, times in (("lost", 1), ("cut", 1), (503, 3)):
            fault = proxy.fail("PUT", f"/flaky/{kind}", kind, times)
            proxy.objects().put(server.uri(f"flaky/{kind}"), data)
            assert (len(fault.paths), server.objects().read(server.uri(f"flaky/{kind}"))) == (times, data)


def test_an_upload_that_never_ends_well_leaves_nothing_and_names_the_object(server):
    with FlakyProxy(server) as proxy:
        proxy.fail("PUT", "/torn/", "cut", ALWAYS)
        with pytest.raises(OSError, match=rf"cannot be used.*{server.uri('torn/a')}"):
            proxy.objects(patience=0.2).put(server.uri("torn/a"), bytes(10**6))
    assert not server.objects().exists(server.uri("torn/a"))


def test_a_writer_killed_in_mid_upload_leaves_nothing(server):
    with FlakyProxy(server) as proxy:
        proxy.fail("PUT", "/killed/", "stall")
        pid = os.fork()
        if pid == 0:
            proxy.objects().put(server.uri("killed/a"), bytes(2**24))
            os._exit(0)
        try:
            assert proxy.stalled.wait(60)
        finally:
            os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert list(server.objects().list(server.uri("killed/"))) == []
    assert "Uploads" not in server.client.list_multipart_uploads(Bucket=server.bucket)


def test_a_refusal_is_final_and_says_why():
    body = b"<Error><Code>AccessDenied</Code><Message>AKIATESTTEST may not, says http://127.0.0.1/x</Message></Error>"
    with scripted((403, [], body)) as (objects, asked):
        with pytest.raises(PermissionError, match=r"AccessDenied.*s3://bucket/a") as error:
            objects.read("s3://bucket/a")
        assert len(asked) == 1
        assert "AKIATESTTEST" not in str(error.value) and "127.0.0.1" not in str(error.value)


def test_credentials_that_expire_are_asked_for_again(server, monkeypatch):
    """Those that a worker was given by the driver; its own machine's are looked for when they are good no more."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_session_token": "of this morning"}
    with FlakyProxy(server) as proxy:
        objects, uri = Objects(endpoint_url=proxy.url, region_name=REGION, **keys), server.uri("expires")
        objects.put(uri, b"one")
        proxy.expired = "of this morning"
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for ask in (objects.read, lambda uri: objects.put(uri, b"two")):
            with pytest.raises(OSError, match=r"ExpiredToken.*rerun the command with new credentials"):
                ask(uri)
        for name, value in {**server.environment(), "AWS_SESSION_TOKEN": "of this noon"}.items():
            monkeypatch.setenv(name, value)
        assert objects.size(uri) == 3  # whose refusal has no text
        objects.put(uri, b"three")
        assert objects.read(uri) == b"three"
        proxy.expired = "of this noon"
        with pytest.raises(OSError, match="ExpiredToken"):
            objects.read(uri)


def test_errors_hide_how_the_store_is_reached():
    settings = {
        "endpoint_url": "http://127.0.0.1:9",
        "aws_access_key_id": "KEYKEY",
        "aws_secret_access_key": "HUSHHUSH",
    }
    objects = Objects(patience=0.2, **settings)
    with pytest.raises(OSError, match="cannot be used: EndpointConnectionError") as error:
        objects.read("s3://bucket/a")
    shown = f"{error.value!r} {error.value.__cause__!r} {objects!r} {vars(error.value)}"
    assert not any(secret in shown for secret in ("127.0.0.1", "KEYKEY", "HUSHHUSH"))


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///a", "s3://user:secret@host/a", "s3://key:sec/ret@host/a", "s3://bucket/a?versionId=1"]
)
def test_what_is_no_address_is_refused(uri):
    with pytest.raises(UsageError, match="expected s3://BUCKET/KEY"):
        check_uri(uri)
