"""What is said of a store that does not answer: a line when that begins and one when it ends, whoever noticed."""

import pickle
import time

import pytest

from pipeline.storage import outages, s3
from pipeline.storage.outages import OUTAGES, Outage, Outages, announce_outages
from tests.builders.stores import FlakyProxy, S3Server

OLD = Outage("s3://b", time.time() - 60, "503 SlowDown")


@pytest.fixture
def lines() -> tuple[Outages, list[str]]:
    said: list[str] = []
    noted = Outages()
    noted.say = said.append
    return noted, said


def test_an_outage_is_said_once_whoever_notices_and_its_end_too(lines):
    noted, said = lines
    recorded = list[tuple[str, float]]()
    noted.record = lambda *outage: recorded.append(outage)
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


def test_a_request_waits_for_a_store_that_comes_back_and_says_so(monkeypatch):
    monkeypatch.setattr(s3, "_MAX_DELAY_S", 0.02)
    monkeypatch.setattr(outages, "MIN_OUTAGE_S", 0.0)
    said: list[str] = []
    with S3Server() as server, FlakyProxy(server) as proxy, announce_outages(said.append):
        uri, objects = server.upload("a", b"there"), proxy.objects()
        for kind in (503, "cut"):
            fault = proxy.fail("GET", f"/{kind}", kind, 15)  # more often than botocore would ask
            server.upload(str(kind), b"there")
            assert objects.read(server.uri(str(kind))) == b"there" and len(fault.paths) == 15
        assert objects.read(uri) == b"there"
        place = f"s3://{server.bucket}"
        assert [line.partition(place)[2][:8] for line in said] == [" has fai", " answers"] * 2
        assert proxy.url not in "".join(said) and OUTAGES.report() == ()


def test_a_500_of_a_store_that_answered_before_is_given_up_soon(monkeypatch):
    monkeypatch.setattr(s3, "_MAX_DELAY_S", 0.02)
    monkeypatch.setattr(s3, "_DOUBTFUL_S", 0.2)
    with S3Server() as server, FlakyProxy(server) as proxy:
        objects = proxy.objects()
        objects.list(server.uri())
        proxy.away[""] = 500
        with pytest.raises(OSError, match="Told500"):
            objects.read(server.uri("a"))


def test_workers_know_that_the_store_has_answered_the_driver(monkeypatch):
    with S3Server() as server:
        objects = server.objects()
        assert not pickle.loads(pickle.dumps(objects))._answered  # noqa: S301 - our own bytes
        assert not objects.exists(server.uri("a"))
        for client in (pickle.loads(pickle.dumps(objects)), objects.with_short_timeouts()):  # noqa: S301 - our own bytes
            assert client._answered
