"""What tests of the language models share: a model of each kind, a video in its tokens, and prompts."""

import pytest

from gstep.backbones import ModelSource
from tests.gstep.llms import KINDS, encode, ragged


def pytest_generate_tests(metafunc):
    """Give a test of ``name`` that names no models itself those of its file, NAMES, or one of each kind."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "name" in metafunc.fixturenames and "name" not in given:
        metafunc.parametrize("name", getattr(metafunc.module, "NAMES", KINDS), scope="module")


@pytest.fixture(scope="module")
def video(name):
    return encode(name)


@pytest.fixture(scope="module")
def source(name):
    return ModelSource.resolve(name)


@pytest.fixture(scope="module")
def prompts(name, source, video):
    return ragged(source, video, encode(name, "carphone_pristine.mp4", n_frames=2, grid=(4, 10)))
