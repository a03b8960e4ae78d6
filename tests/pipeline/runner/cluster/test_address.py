"""Which Ray cluster a driver gets at, its head that comes and goes, and the folder of sessions; no Ray is started."""

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray._private.utils import get_ray_address_file

from pipeline.errors import RunFailed
from pipeline.runner.cluster import session_folder
from pipeline.runner.cluster.address import (
    check_answers,
    describe_startup_failure,
    find_address,
    make_package_importable,
    set_cluster_token,
)
from pipeline.runner.cluster.connection import explain_native_exit
from pipeline.runner.cluster.head import Head, HeadLost
from pipeline.runner.cluster.session_folder import find_ray_folder, lock_session, make_ray_folder
from tests.paths import ROOT
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    """Without any cluster or token."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "tmp" / "ray").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def left(own_machine):
    """Writes the address that ``ray start`` leaves."""
    return (own_machine / "tmp" / "ray" / "ray_current_cluster").write_text


def test_a_cluster_is_joined_where_one_is_named_or_was_started(monkeypatch, left):
    assert find_address() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        left(f"{address}\n")
        assert find_address() == address
        monkeypatch.setenv("RAY_ADDRESS", "local")
        assert find_address() is None
        monkeypatch.setenv("RAY_ADDRESS", f"ray://{address}")
        assert find_address() == f"ray://{address}"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nowhere.invalid:6379", "[::1]:1"])
def test_a_cluster_that_does_not_answer_is_told_by_its_address(monkeypatch, left, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunFailed, match=r"no Ray cluster answers at .* \(RAY_ADDRESS\): .*or RAY_ADDRESS=local uses"):
        find_address()
    monkeypatch.delenv("RAY_ADDRESS")
    left(address)
    file = get_ray_address_file(None)
    dead = f"its head has ended without ray stop: delete {file}, or start a head, or RAY_ADDRESS=local"
    remedy = "start its head, or RAY_ADDRESS=local" if "invalid" in address else dead
    with pytest.raises(RunFailed, match=rf"\(which ray start wrote to {file}\): .*; {remedy}"):
        find_address()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_address_that_another_user_left_is_joined_only_by_name(monkeypatch, left):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        left(address)
        os.chown(get_ray_address_file(None), 12345, -1)
        with pytest.raises(RunFailed, match=rf"RAY_ADDRESS={address} joins it, RAY_ADDRESS=local uses this machine"):
            find_address()
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert find_address() == address
    monkeypatch.delenv("RAY_ADDRESS")
    assert find_address() is None  # its head has ended: the file must not end every other user's runs


def test_the_token_of_a_cluster_of_ones_own_is_in_the_environment_alone(own_machine):
    set_cluster_token()
    token = os.environ.pop("RAY_AUTH_TOKEN")
    assert len(token) == 64 and not (own_machine / "home").exists()


def test_a_mode_without_a_token_is_told_before_ray_ends_the_process(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(RunFailed, match=r"at 127.0.0.1:1 asks for a token that was not given: set RAY_AUTH_MODE=token"):
        check_answers("127.0.0.1:1")


def test_why_there_is_no_cluster_is_one_line_with_the_remedy():
    asks = "at h:1 asks for a token that was not given: set RAY_AUTH_MODE=token"
    for error, address, said in (
        (ray.exceptions.AuthenticationError("Missing token"), "h:1", asks),
        (ConnectionError("a\nb"), "h:1", "cannot be joined at h:1: ConnectionError: a b; check the address"),
        (RuntimeError("The current node timed out during startup."), None, "if the machine is busy, try again"),
    ):
        line = describe_startup_failure(error, address)
        assert said in line and "\n" not in line


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_ray_ends_without_a_word_is_explained(tmp_path, ends):
    stderr = tmp_path / "stderr"
    child = os.fork()
    if child == 0:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
        with explain_native_exit("h:1"):
            if ends:
                os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    if ends:  # by a shell, which is no child of this process
        wait_until(lambda: stderr.read_bytes().endswith(b"\n"), "the explanation")
    expected = "error: Ray cannot be joined at h:1: Ray's native code ended this process" if ends else ""
    assert stderr.read_text().partition(",")[0] == expected


@pytest.mark.parametrize(
    ("path", "left", "behind"),
    [(["here", ROOT], False, False), ([ROOT], True, False), ([ROOT, "here"], True, True)],
    ids=["first", "nowhere", "last"],
)
def test_the_current_folder_is_left_only_by_a_driver_that_does_not_import_from_it(
    tmp_path, monkeypatch, path, left, behind
):
    """Where it is last on the driver's path it is behind this package on the workers'."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path if place == "here" else place) for place in path])
    with make_package_importable() as job:
        assert Path.cwd() == (ROOT if left else tmp_path)
        assert (job._py_driver_sys_path if job else None) == ([str(tmp_path)] if behind else None)
    assert Path.cwd() == tmp_path
    with pytest.raises(OSError, match="no room"), make_package_importable():
        raise OSError("no room")  # Ray does not start
    assert Path.cwd() == tmp_path


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
        (False, None, 20.0, 1, "does not answer: .* Start a head, and rerun"),
        (False, "600", 200.0, 1, "does not answer: .* Start a head, and rerun"),
        (True, None, 4.0, 0, "of Ray on this machine .* has ended, .* Rerun"),
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


OWN = f"ray-{os.geteuid()}"  # the private folder around Ray's


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder for every user whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def base(shared, monkeypatch) -> Path:
    """A temporary folder into which every user may write, as /tmp."""
    monkeypatch.setenv("RAY_TMPDIR", str(shared))
    return shared


@pytest.mark.parametrize("mode", [0o1777, 0o711])
def test_no_other_user_can_enter_the_folder(base, mode):
    base.chmod(mode)
    assert find_ray_folder() == base / OWN / "ray" and not (base / OWN).exists()
    assert make_ray_folder() == base / OWN / "ray"
    (base / OWN).chmod(0o777)  # whoever did that
    make_ray_folder()
    assert (base / OWN).stat().st_mode & 0o777 == 0o700


def test_in_a_private_folder_ray_has_its_own_name(base):
    """Its path is not longer than before."""
    base.chmod(0o700)
    assert make_ray_folder() == base / "ray"


def test_a_full_disk_is_named_before_ray_starts(base, monkeypatch):
    monkeypatch.setattr(session_folder.shutil, "disk_usage", lambda folder: SimpleNamespace(total=2**40, free=4096))
    with pytest.raises(OSError, match=r"the disk is full: free space on it, .* RAY_TMPDIR: '.*ray'"):
        make_ray_folder()


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "TMPDIR", None])
def test_folders_that_the_user_names_are_used_also_before_they_exist(base, monkeypatch, variable):
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.delenv("TMPDIR", raising=False)
    if variable is None:
        assert find_ray_folder() == Path("/tmp") / OWN / "ray"
        return
    monkeypatch.setenv(variable, str(base / "new" / "er"))
    assert make_ray_folder() == base / "new" / "er" / OWN / "ray"


@pytest.mark.parametrize("kind", ["link", "file", "other user"])
def test_a_name_that_somebody_else_took_is_refused_with_the_remedy(base, kind):
    if kind == "link":
        (base / "elsewhere").mkdir()
        (base / OWN).symlink_to(base / "elsewhere")
    elif kind == "file":
        (base / OWN).touch()
    elif os.geteuid():
        pytest.skip("only root can give a folder away")
    else:
        (base / OWN).mkdir()
        os.chown(base / OWN, 12345, -1)
    with pytest.raises(PermissionError, match=f"{OWN} is a link or belongs to another user: remove it, or"):
        make_ray_folder()


def test_of_ended_sessions_three_stay_without_what_they_spilled(base):
    """Sessions of ``ray start``, which may lie in the same folder, are left alone."""
    folder = make_ray_folder()
    sessions = {name: folder / f"session_2026-01-0{day}_00-00-00_000000_1" for day, name in enumerate("abcdefg", 1)}
    for name, session in sessions.items():
        for part in ("logs", "ray_spilled_objects_abc"):
            (session / part).mkdir(parents=True)
        if name != "c":  # which is of ``ray start``
            (session / "gstep.lock").touch()
            if name != "g":  # which has just started
                os.utime(session / "gstep.lock", (0, 0))
    (folder / "session_latest").symlink_to(sessions["g"])
    lock_session(str(sessions["a"]))
    os.utime(sessions["a"] / "gstep.lock", (0, 0))
    make_ray_folder()
    assert {name for name, session in sessions.items() if session.exists()} == set("acefg")
    spilled = {name for name, session in sessions.items() if list(session.glob("ray_spilled*"))}
    assert spilled == set("acg") and (folder / "session_latest").exists()


def test_a_folder_too_long_for_sockets_is_replaced_or_refused(tmp_path, monkeypatch):
    """A session's sockets have 64 bytes below the folder, and a path of 107 at most."""
    long = tmp_path / ("long" * 10)
    long.mkdir(mode=0o755)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert find_ray_folder() == Path("/tmp", OWN, "ray")
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with pytest.raises(OSError, match=r"too long for Ray's sockets: name a shorter folder by RAY_TMPDIR"):
        make_ray_folder()
