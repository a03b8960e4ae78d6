"""What is asked of S3, request by request; what is retried; outages; and errors that keep secrets."""

import errno
import os
import pickle
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from pipeline.storage import outages, s3
from pipeline.storage.outages import OUTAGES, Outage, Outages, announce_outages
from pipeline.storage.s3 import Objects
from tests.builders.stores import ALWAYS, KEY, REGION, SECRET, Answer, FlakyProxy, S3Server, answering

MARK = ("ETag", '"mark"')


URI = "s3://bucket/a"


@pytest.fixture(scope="module")
def module_server():
    with S3Server() as server:
        yield server


@pytest.fixture(autouse=True)
def requests_are_soon_repeated(monkeypatch):
    monkeypatch.setattr(s3, "_MAX_DELAY_S", 0.02)


@pytest.fixture
def objects(server) -> Objects:
    """After a trip through pickle, as a worker gets it."""
    return pickle.loads(pickle.dumps(server.objects()))  # noqa: S301 - our own bytes


def test_what_goes_in_comes_out_for_one_request_each(server, objects):
    uri = server.uri("one/a")

    def asked(method, *arguments, **options):
        server.requests.clear()
        found = getattr(objects, method)(*arguments, **options)
        return found, "".join(request.method for request in server.requests)

    assert asked("put", uri, memoryview(b"0123456789"))[1] == "PUT"
    assert asked("read", uri) == (b"0123456789", "GET")
    for span, data in (((2, 5), b"234"), ((-4,), b"6789"), ((-400,), b"0123456789")):
        assert asked("read_slice", uri, *span) == ((data, 10), "GET")
    info, method = asked("info", uri)
    assert (info.size, method, objects.exists(uri)) == (10, "HEAD", True)
    objects.put(server.uri("one/deep/a"), b"")
    for folder in ("one/", "nothing/"):  # what lies in a folder of it is not listed
        server.requests.clear()
        assert len(list(objects.list(server.uri(folder)))) == (folder == "one/") and server.counts() == {"LIST": 1}
    with pytest.raises(OSError, match="10 bytes, more than the 9") as error:
        objects.fetch(uri, pytest.fail, limit=9)
    assert error.value.errno == errno.EFBIG
    assert objects.fetch(uri, len, limit=10) == 10
    assert asked("delete", uri)[1] == asked("delete", uri)[1] == "DELETE"
    assert not objects.exists(uri)
    with pytest.raises(FileNotFoundError, match=uri):
        objects.read(uri)


@pytest.fixture(scope="module")
def script():
    """A server that gives the answers that this is called with, the last one for ever, and what it was asked."""
    answers: list[Answer] = []
    requests: list[dict[str, str]] = []

    def answer(handler):
        requests.append({name.lower(): value for name, value in handler.headers.items()})
        return answers[min(len(requests), len(answers)) - 1]

    with answering(answer) as url:
        keys = {"aws_access_key_id": "AKIATESTTEST", "aws_secret_access_key": "very-secret-value"}
        objects = Objects(endpoint_url=url, region_name="us-east-1", **keys)

        def play(*new: Answer) -> tuple[Objects, list[dict[str, str]]]:
            answers[:] = new
            requests.clear()
            return objects, requests

        yield play


def error_text(code: str, message: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def whole(data: bytes, size: int | None = None) -> Answer:
    """The reply of an object, or its beginning where the connection breaks before ``size`` bytes."""
    return 200, [("Content-Length", str(len(data) if size is None else size)), MARK], data


def part(first: int, data: bytes, size: int, length: int | None = None) -> Answer:
    """The reply of a range of an object of ``size`` bytes, or its beginning where ``length`` bytes are announced."""
    length = len(data) if length is None else length
    content_range = f"bytes {first}-{first + length - 1}/{size}"
    return 206, [("Content-Length", str(length)), ("Content-Range", content_range), MARK], data


def test_a_broken_download_goes_on_where_it_broke(script):
    data = bytes(range(256)) * 10
    objects, requests = script(whole(data[:1000], 2560), part(1000, data[1000:], 2560))
    assert objects.read(URI) == data
    assert (requests[1]["range"], requests[1]["if-match"]) == ("bytes=1000-", '"mark"')
    objects, requests = script(part(100, data[100:200], 2560, 156), part(200, data[200:256], 2560))
    download = objects.download(URI, 100, 256)
    assert (b"".join(download), download.size) == (data[100:256], 2560)
    assert [request["range"] for request in requests] == ["bytes=100-255", "bytes=200-255"]


DENIED = 403, [], error_text("AccessDenied", "AKIATESTTEST may not, says http://127.0.0.1/x")
#: What a store answers, what it is asked, what the error says, and how many requests are made.
REFUSALS = [
    ((200, [MARK], b"ok"), ("read",), "does not state the size", None),
    # What it goes on with might be of another content.
    ((200, [("Content-Length", "4")], b"ok"), ("read",), "cannot be used", 1),
    (part(0, b"", 9, 9), ("download", 0, 9), "cannot be used", 5),  # it breaks again and again without progress
    (whole(b"01", 9), ("read",), "cannot resume a broken download", 2),  # each time from the beginning
    (whole(b"012345"), ("download", 2, 4), "another range", None),
    (part(0, b"0123", 9), ("read_slice", 2, 6), "another range", None),
    (part(0, b"0123", 9), ("read_slice", -4), "another range", None),
    ((416, [], error_text("InvalidRange", "not satisfiable")), ("read_slice", 4), "InvalidRange", None),
    (DENIED, ("read",), "AccessDenied.*s3://bucket/a", 1),
]


@pytest.mark.parametrize(("answer", "ask", "message", "n_requests"), REFUSALS)
def test_an_answer_that_cannot_be_used_is_an_error_that_names_its_reason_alone(
    script, answer, ask, message, n_requests
):
    objects, requests = script(answer)
    with pytest.raises(OSError, match=message) as error:
        list(getattr(objects, ask[0])(URI, *ask[1:]))  # a download is read piece by piece
    assert isinstance(error.value, PermissionError) == (answer is DENIED)
    assert n_requests in (None, len(requests))
    assert "AKIATESTTEST" not in str(error.value) and "127.0.0.1" not in str(error.value)


def test_a_slice_is_asked_for_again_where_it_broke_and_may_come_whole_or_empty(script):
    objects, requests = script(part(2, b"23", 9, 4), part(2, b"2345", 9))
    assert objects.read_slice(URI, 2, 6) == (b"2345", 9) and len(requests) == 2
    objects, _ = script(whole(b"012345"))  # a store without ranges
    assert (objects.read_slice(URI, -2), objects.read_slice(URI, 1, 3)) == ((b"45", 6), (b"12", 6))
    objects, _ = script((416, [], error_text("InvalidRange", "not satisfiable")))  # an empty object has no tail
    assert objects.read_slice(URI, -4) == (b"", 0)


def test_a_trickle_is_given_up(script, monkeypatch):
    monkeypatch.setattr("pipeline.storage.downloads._GRACE_S", -1)  # the object's size allows it less than a second
    objects, _ = script(whole(bytes(60000)))
    with pytest.raises(OSError, match="of 60000 bytes came in time") as error:
        objects.read(URI)
    assert error.value.errno == errno.ETIMEDOUT


def test_a_forked_child_has_connections_of_its_own(server, objects):
    objects.put(server.uri("fork"), b"x")
    of_parent = objects._get_client()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if objects._get_client() is not of_parent and objects.read(server.uri("fork")) == b"x" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert objects._get_client() is of_parent


def test_a_reply_that_is_lost_and_an_upload_that_breaks_off_end_in_the_whole_object(server):
    data = bytes(range(256)) * 1000
    with FlakyProxy(server) as proxy:
        objects = proxy.objects()
        for kind, times in (("lost", 1), ("cut", 1), (503, 3)):
            fault = proxy.fail("PUT", f"/flaky/{kind}", kind, times)
            objects.put(server.uri(f"flaky/{kind}"), data)
            assert (len(fault.paths), objects.read(server.uri(f"flaky/{kind}"))) == (times, data)


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
        assert objects.info(uri).size == 3  # whose refusal has no text
        objects.put(uri, b"three")
        assert objects.read(uri) == b"three"
        proxy.expired = "of this noon"
        with pytest.raises(OSError, match="ExpiredToken"):
            objects.read(uri)


def test_errors_of_a_store_out_of_reach_hide_how_it_is_reached():
    keys = {"aws_access_key_id": "KEYKEY", "aws_secret_access_key": "HUSHHUSH"}
    objects = Objects(patience=0.2, endpoint_url="http://127.0.0.1:9", region_name=REGION, **keys)
    with pytest.raises(OSError, match=r"cannot be used: EndpointConnectionError.*check --s3-endpoint") as error:
        objects.read("s3://bucket/a")
    shown = f"{error.value!r} {error.value.__cause__!r} {objects!r} {vars(error.value)}"
    assert not any(secret in shown for secret in ("127.0.0.1", "KEYKEY", "HUSHHUSH"))


OLD = Outage("s3://b", time.time() - 60, "503 SlowDown")


@pytest.fixture
def lines() -> tuple[Outages, list[str]]:
    said: list[str] = []
    noted = Outages()
    noted.speakers.append(said.append)
    return noted, said


def test_an_outage_is_said_once_whoever_notices_and_its_end_too(lines):
    noted, said = lines
    recorded = list[tuple[str, float]]()
    noted.recorders.append(lambda *outage: recorded.append(outage))
    for _ in range(5):
        noted.note_failure(OLD)
    assert noted.report() == (OLD,) and len(said) == 1
    assert noted.list_failing_stores() == ["s3://b"] and recorded == [("s3://b", OLD.since)]
    assert said[0].startswith("note: the store s3://b has failed since 2") and "(503 SlowDown)" in said[0]
    noted.take_reports([OLD, OLD._replace(why="ReadTimeoutError")])  # of workers
    noted.take_reports([])
    assert len(said) == 1
    for _ in range(2):
        noted.note_answer("s3://b")
    assert noted.report() == () and len(said) == 2 and "s3://b answers again, after " in said[1]
    assert noted.list_failing_stores() == [] and recorded[1:] == [("s3://b", 0.0)]
    noted.note_failure(OLD._replace(since=time.time()))  # a busy moment
    noted.note_answer("s3://b")
    assert (len(said), noted.report()) == (2, ())


def test_an_outage_before_a_run_is_not_the_runs():
    OUTAGES.note_failure(OLD)
    said: list[str] = []
    with announce_outages(said.append):
        OUTAGES.take_reports([])
    assert said == []


def test_runs_in_two_threads_each_say_what_both_notice_until_they_end(caplog):
    """The first to begin is the first to end; afterwards nothing is left of either."""
    said: dict[str, list[str]] = {"first": [], "second": []}
    with ExitStack() as first, ExitStack() as second, ThreadPoolExecutor(1) as other_thread:
        first.enter_context(announce_outages(said["first"].append))
        OUTAGES.take_reports([OLD])
        other_thread.submit(second.enter_context, announce_outages(said["second"].append)).result()
        other_thread.submit(OUTAGES.take_reports, []).result()  # the first run still reports it
        assert OUTAGES.list_failing_stores() == ["s3://b"]
        first.close()
        assert OUTAGES.list_failing_stores() == [] and OUTAGES.speakers == [said["second"].append]
        other_thread.submit(OUTAGES.take_reports, [OLD]).result()
        other_thread.submit(second.close).result()
    OUTAGES.say("nobody listens")
    assert [len(lines) for lines in said.values()] == [1, 1] and OUTAGES.list_failing_stores() == []
    assert [record.message for record in caplog.records] == ["nobody listens"]


def test_a_request_waits_for_a_store_that_comes_back_and_says_so(server, monkeypatch):
    monkeypatch.setattr(outages, "MIN_OUTAGE_S", 0.0)
    said: list[str] = []
    with FlakyProxy(server) as proxy, announce_outages(said.append):
        uri, objects = server.upload("a", b"there"), proxy.objects()
        for kind in (503, "cut"):
            fault = proxy.fail("GET", f"/{kind}", kind, 15)  # more often than botocore would ask
            server.upload(str(kind), b"there")
            assert objects.read(server.uri(str(kind))) == b"there" and len(fault.paths) == 15
        assert objects.read(uri) == b"there"
        place = f"s3://{server.bucket}"
        assert [line.partition(place)[2][:8] for line in said] == [" has fai", " answers"] * 2
        assert proxy.url not in "".join(said) and OUTAGES.report() == ()


def test_a_500_of_a_store_that_answered_before_is_given_up_soon(server, monkeypatch):
    monkeypatch.setattr(s3, "_DOUBTFUL_S", 0.2)
    with FlakyProxy(server) as proxy:
        objects = proxy.objects()
        objects.list(server.uri())
        proxy.away[""] = 500
        with pytest.raises(OSError, match="Told500"):
            objects.read(server.uri("a"))


def test_workers_know_that_the_store_has_answered_the_driver(server):
    objects = server.objects()
    assert not pickle.loads(pickle.dumps(objects))._answered  # noqa: S301 - our own bytes
    assert not objects.exists(server.uri("a"))
    for client in (pickle.loads(pickle.dumps(objects)), objects.with_short_timeouts()):  # noqa: S301 - our own bytes
        assert client._answered
