"""A sound cache, and a copy of it that a test may damage."""

import shutil
from pathlib import Path

import pytest

from pipeline.storage.stores import LocalStore
from tests.pipeline.verifying import two_shards


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return two_shards(tmp_path_factory.mktemp("sound") / "c").root


@pytest.fixture
def store(sound, tmp_path) -> LocalStore:
    return LocalStore(shutil.copytree(sound, tmp_path / "c"))
