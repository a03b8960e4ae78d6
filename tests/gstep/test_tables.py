"""The tables of methods, of sources of evidence and of families, which are imported when they are asked for; errors."""

import gc
import pickle
import sys
import threading

import pytest

import gstep
from gstep import PRUNERS, make_pruner
from gstep.backbones import BACKBONES
from gstep.backbones.base import ModelFamily
from gstep.errors import MissingEvidence, ModelError, UnsupportedVideo
from gstep.evidence import SOURCES
from gstep.families import FAMILIES, GENERIC
from gstep.language import BUILDERS, PromptBuilder
from gstep.lazy import LazyTable, load_object, pause_garbage_collector, repeat_line
from tests.waiting import wait_until


@pytest.mark.parametrize("method", [method for method in PRUNERS if PRUNERS[method].cacheable])
def test_every_method_that_can_be_cached_says_where_its_evidence_is_and_some_family_has_it(method):
    variants = [{"variant": v} for v in ("llava", "qwen")] if "variant" in make_pruner(method).params() else [{}]
    for params in variants:
        pruner = make_pruner(method, **params)
        assert pruner.needs == pruner.sources.keys() and set(pruner.sources.values()) <= SOURCES.keys()
        able = [family for family in BACKBONES.values() if family.gives >= set(pruner.sources.items())]
        assert [family for family in able if params.get("variant", family.variant) == family.variant]


@pytest.mark.parametrize("kind", [ModelError, MissingEvidence, UnsupportedVideo])
def test_an_error_is_a_value_error_and_keeps_its_message_between_processes(kind):
    again = pickle.loads(pickle.dumps(kind("name the remedy")))  # noqa: S301 - our own bytes
    assert type(again) is kind and isinstance(again, ValueError) and str(again) == "name the remedy"
    assert gstep.MissingEvidence is MissingEvidence


def test_both_halves_know_the_same_families():
    assert [*BACKBONES, GENERIC] == list(FAMILIES)
    assert [name for name in BACKBONES if name not in BUILDERS] == ["qwen4_exp"]  # which is encoded and not asked
    for name in BUILDERS:
        assert issubclass(BACKBONES[name], ModelFamily) and issubclass(BUILDERS[name], PromptBuilder)
        assert BACKBONES[name].model_type == name


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
