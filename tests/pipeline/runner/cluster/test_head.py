"""The head of a cluster that goes away and comes back, by a socket that does; no Ray is started."""

import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray

from pipeline.runner.cluster.head import Head, HeadLost


@pytest.fixture
def listen(monkeypatch):
    """Open the port of a head again and again, and let this process have joined its cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def join(*, own: bool) -> socket.socket:
        node = SimpleNamespace(gcs_address=f"127.0.0.1:{port}", is_head=lambda: own)
        monkeypatch.setattr(ray._private.worker, "_global_node", node)
        return socket.create_server(("127.0.0.1", port))

    return join


@pytest.mark.parametrize(
    ("own", "setting", "patience_s", "n_notes", "says"),
    [
        (False, None, 20.0, 1, "does not answer: it has ended, or its machine .* Start a head, and rerun the same com"),
        (False, "600", 200.0, 1, "does not answer: it has ended, or its machine .* Start a head, and rerun the same c"),
        (True, None, 4.0, 0, "head process of Ray on this machine .* has ended, .* Rerun the same command to resume"),
    ],
)
def test_a_lost_head_is_an_error_before_ray_ends_the_process(
    monkeypatch, listen, own, setting, patience_s, n_notes, says
):
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    if setting is not None:
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", setting)
    said, clock = list[str](), Mock(return_value=0.0)
    server = listen(own=own)
    head = Head(said.append, clock)
    for clock.return_value in (0.0, 3.0):
        head.look()
    assert head.answers() and said == []
    server.close()
    for clock.return_value in (6.0, 6.0 + patience_s - 0.1):
        head.look()
    assert not head.answers() and len(said) == n_notes
    clock.return_value = 6.0 + patience_s
    with pytest.raises(HeadLost, match=says):
        head.look()


def test_a_head_that_restarts_in_time_is_noted_and_nothing_ends(listen):
    said, clock = list[str](), Mock(return_value=0.0)
    server = listen(own=False)
    head = Head(said.append, clock)
    server.close()
    clock.return_value = 5.0
    head.look()
    with listen(own=False):
        for clock.return_value in (9.0, 60.0):
            head.look()
    assert [line.partition(" at ")[0] for line in said] == ["note: the head of the Ray cluster"] * 2
    assert "The run ends in 20 s unless it restarts" in said[0] and said[1].endswith(" answers again")


def test_without_a_cluster_nothing_is_lost(monkeypatch):
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    clock = Mock(return_value=0.0)
    head = Head(print, clock)
    clock.return_value = 100.0
    head.look()
    assert head.answers()
