"""A real clip and a cache of it, for every file of this folder."""

from pathlib import Path

import pytest

from pipeline import TokenCache
from pipeline.video.decode import DecodedVideo
from tests.pipeline.pages import build, decoded_clip


@pytest.fixture(scope="package")
def decoded(tmp_path_factory) -> tuple[Path, DecodedVideo]:
    """Return a real clip and its sampled frames."""
    return decoded_clip(tmp_path_factory.mktemp("videos"))


@pytest.fixture(scope="package")
def cache(decoded, tmp_path_factory) -> TokenCache:
    return build(tmp_path_factory.mktemp("out") / "cache", decoded)
