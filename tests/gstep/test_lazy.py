"""Tables whose classes are imported when they are asked for."""

import gc
import sys
import threading

import pytest

from gstep.lazy import LazyTable, load_object, pause_garbage_collector, repeat_line
from tests.waiting import wait_until

TABLE = LazyTable("colour", {"red": "gstep.errors:ModelError", "blue": "no.such.module:Blue"})


def test_names_are_listed_without_an_import_and_an_unknown_one_lists_the_known(monkeypatch):
    monkeypatch.delitem(sys.modules, "json.tool", raising=False)
    table = LazyTable("name", {"a": "json.tool:main"})
    assert "json.tool" not in sys.modules
    assert callable(table["a"]) and "json.tool" in sys.modules
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
    lines: list[str] = []
    with repeat_line(lines.append, "still loading", 0.001):
        wait_until(lambda: len(lines) > 2, "three lines")
    with repeat_line(lines.append, "never", 3600.0):
        pass
    assert set(lines) == {"still loading"} and all(thread.name != "repeat_line" for thread in threading.enumerate())


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_imported_is_not_looked_through_for_garbage(monkeypatch, enabled):
    gc.unfreeze()  # what a command that another test ran in this process has imported
    (gc.enable if enabled else gc.disable)()
    try:
        with pause_garbage_collector():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled and gc.get_freeze_count() == 0  # nothing was imported
        with pytest.raises(ZeroDivisionError), pause_garbage_collector():
            monkeypatch.setitem(sys.modules, "just_imported", sys)
            1 // 0  # noqa: B018
        assert gc.isenabled() is enabled and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
