"""A cache of several token shards for every file of this folder."""

from pathlib import Path

import pytest

from tests.pipeline.datasets.caches import make_shards


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("cache")).root
