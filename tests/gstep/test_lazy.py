"""Tables whose classes are imported when they are asked for."""

import gc
import subprocess
import sys
import threading

import pytest

from gstep.lazy import LazyTable, importing_much, load_object, saying
from tests.paths import ROOT
from tests.waiting import wait_until

TABLE = LazyTable("colour", {"red": "gstep.errors:ModelError", "blue": "no.such.module:Blue"})


def test_names_are_listed_without_an_import_and_an_unknown_one_lists_the_known():
    assert TABLE["red"] is load_object("gstep.errors:ModelError")
    assert list(TABLE) == ["red", "blue"] and len(TABLE) == 2
    assert "blue" in TABLE and "green" not in TABLE
    with pytest.raises(ModuleNotFoundError):
        TABLE["blue"]
    with pytest.raises(KeyError, match="unknown colour 'green'; known: red, blue"):
        TABLE["green"]
    with pytest.raises(KeyError, match=r"unknown colour 'redd' \(did you mean red\?\); known: red, blue"):
        TABLE["redd"]


def test_a_line_is_said_until_the_work_ends():
    said: list[str] = []
    with saying(said.append, "still loading", 0.001):
        wait_until(lambda: len(said) > 2, "three lines")
    told = len(said)
    assert set(said) == {"still loading"}
    with saying(said.append, "never", 3600.0):
        pass
    assert len(said) == told and all(thread.name != "saying" for thread in threading.enumerate())


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys; from gstep.lazy import LazyTable; table = LazyTable('name', {'a': 'json.tool:main'});"
        "before = 'json.tool' in sys.modules; table['a']; print(before, 'json.tool' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_imported_is_not_looked_through_for_garbage(monkeypatch, enabled):
    gc.unfreeze()  # what a command that another test ran in this process has imported
    (gc.enable if enabled else gc.disable)()
    try:
        with importing_much():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled and gc.get_freeze_count() == 0  # nothing was imported
        with pytest.raises(ZeroDivisionError), importing_much():
            monkeypatch.setitem(sys.modules, "just_imported", sys)
            1 // 0  # noqa: B018
        assert gc.isenabled() is enabled and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
