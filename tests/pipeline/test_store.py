"""Files appear whole at their name, or not at all."""

import errno
import os

import pytest

from pipeline.store import LocalStore


def test_a_failed_write_leaves_nothing_and_names_the_file(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put("a/kept", b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for name in ("a/kept", "a/new"):
        with pytest.raises(OSError, match=f"No space left.*{name}"):
            store.put(name, b"new")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]
    assert store.read("a/kept") == b"old"


def test_names_leave_out_what_is_not_finished(tmp_path):
    store = LocalStore(tmp_path)
    for name in ("d/b.parquet", "d/a.parquet", "d/note.txt"):
        store.put(name, b"x")
    (tmp_path / "d" / ".tmp-c.parquet").write_bytes(b"x")
    assert store.names("d", ".parquet") == ["d/a.parquet", "d/b.parquet"]
    assert (store.exists("d/a.parquet"), store.exists("d")) == (True, False)
    assert store.names("none", ".parquet") == []
