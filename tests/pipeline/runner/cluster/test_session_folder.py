"""The folder of Ray's sessions: who may enter it, and what stays of ended sessions."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.runner.cluster import session_folder
from pipeline.runner.cluster.session_folder import find_ray_folder, lock_session, make_ray_folder

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
