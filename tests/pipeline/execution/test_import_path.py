"""Where workers import this package from: the folder of the driver, unless that does not import from it."""

import sys
from pathlib import Path

import pytest

from pipeline.execution.import_path import workers_import_this
from tests.paths import ROOT


@pytest.mark.parametrize("on_path", [True, False])
def test_the_current_folder_is_left_only_by_a_driver_that_does_not_import_from_it(tmp_path, monkeypatch, on_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*([str(tmp_path)] if on_path else []), str(ROOT)])
    with workers_import_this():
        assert Path.cwd() == (tmp_path if on_path else ROOT)
    assert Path.cwd() == tmp_path


def test_it_is_the_current_folder_again_where_ray_does_not_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    with pytest.raises(OSError, match="no room"), workers_import_this():
        raise OSError("no room")
    assert Path.cwd() == tmp_path
