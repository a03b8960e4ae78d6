"""What all tests of gstep share: a cache of their own for tiny checkpoints, a model, and copies of files to change."""

import shutil
from pathlib import Path

import pytest

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    """The folder in which tiny checkpoints are built."""
    root = tmp_path_factory.getbasetemp() / "user-cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root


@pytest.fixture
def name():
    """The model that ``source`` and ``folder`` are of, unless a test or a file names others."""
    return "tiny"


@pytest.fixture
def source(name):
    return ModelSource.resolve(name)


@pytest.fixture
def folder(name, tmp_path):
    return Path(shutil.copytree(tiny.build(name), tmp_path / "model"))


@pytest.fixture
def siglip(tmp_path):
    """A folder with the SigLIP checkpoint that goes with ``tiny``."""
    return Path(shutil.copytree(tiny.build("tiny-siglip"), tmp_path / "siglip"))
