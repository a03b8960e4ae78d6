"""What tests of the language models share: each family, a video in its tokens, and prompts of several lengths."""

import shutil
from pathlib import Path

import pytest

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny
from tests.gstep.llms import FAMILIES, encode, ragged


@pytest.fixture(scope="module", params=FAMILIES)
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


@pytest.fixture
def folder(name, tmp_path):
    return Path(shutil.copytree(tiny.build(name), tmp_path / "model"))
