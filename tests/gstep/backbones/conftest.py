"""Tiny checkpoints are built in a cache of the test run."""

import pytest


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))
