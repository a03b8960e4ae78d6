"""Tables whose classes are imported when they are asked for."""

import subprocess
import sys

import pytest

from gstep.lazy import LazyTable, load_object
from tests.paths import ROOT

TABLE = LazyTable("colour", {"red": "gstep.errors:ModelError", "blue": "no.such.module:Blue"})


def test_a_name_gives_the_object():
    assert TABLE["red"] is load_object("gstep.errors:ModelError")


def test_names_are_listed_without_an_import():
    assert list(TABLE) == ["red", "blue"] and len(TABLE) == 2
    assert "blue" in TABLE and "green" not in TABLE
    with pytest.raises(ModuleNotFoundError):
        TABLE["blue"]


def test_an_unknown_name_lists_the_known():
    with pytest.raises(KeyError, match="unknown colour 'green'; known: red, blue"):
        TABLE["green"]


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys; from gstep.lazy import LazyTable; table = LazyTable('name', {'a': 'json.tool:main'});"
        "before = 'json.tool' in sys.modules; table['a']; print(before, 'json.tool' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True"]
