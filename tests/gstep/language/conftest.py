"""What tests of the language models share: each family, a video in its tokens, and prompts of several lengths."""

import pytest

from gstep.backbones import ModelSource
from tests.gstep.llms import KINDS, encode, ragged


@pytest.fixture(scope="module", params=KINDS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def video(name):
    return encode(name)


@pytest.fixture(scope="module")
def source(name):
    return ModelSource.resolve(name)


@pytest.fixture(scope="module")
def prompts(name, source, video):
    return ragged(source, video, encode(name, "carphone_pristine.mp4", n_frames=2, grid=(4, 10)))
