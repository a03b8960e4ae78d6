"""A cache of several token shards for every file of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.pipeline.datasets.caches import make_shards


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    return make_shards(tmp_path_factory.mktemp("cache")).root


@pytest.fixture(autouse=True, scope="package")
def abandoned_workers_end_soon() -> Iterator[None]:
    """Workers of a loader that raised are waited for as long where it is collected: 5 s each, by default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        yield
