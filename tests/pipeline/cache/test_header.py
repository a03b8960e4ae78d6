"""The header of a cache: sealed, compared leaf by leaf, and read without importing the method that it names."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from gstep import PRUNERS, make_pruner
from gstep.pruners.base import Pruner, Selection
from pipeline.cache.header import (
    CHECKSUM,
    MethodDeclarations,
    compute_fingerprint,
    describe_method,
    get_method_declarations,
    list_differences,
    read_header_file,
    serialize_header,
)
from pipeline.errors import NotACache
from pipeline.own_code import hash_code
from pipeline.storage.stores import LocalStore

HEADER = {"schema_version": 1, "identity": {"model": {"type": "m", "weights": "w"}}, "newline": None}


def read(store: LocalStore) -> dict[str, object]:
    return read_header_file(store, "h.json", (1,), NotACache, "no cache here: name one")


@pytest.fixture
def store(tmp_path) -> LocalStore:
    store = LocalStore(tmp_path)
    store.put("h.json", serialize_header(HEADER))
    return store


def test_differences_name_the_leaf_also_where_only_one_has_it():
    lines = list_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}})
    assert lines == ["a.c: the cache has 2, this run 3"]
    old, new = {"x": 1, "p": {"alpha": 0.5}}, {"p": {"alpha": 0.5, "seed": 0}, "e": {"k": "l"}}
    assert list_differences(old, new, old_subject="the answers have") == [
        "e.k: the answers have None, this run 'l'",
        "p.seed: the answers have None, this run 0",
        "x: the answers have 1, this run None",
    ]
    assert list_differences(old, old) == [] and list_differences({"a": {}}, {}) == [
        "a: the cache has {}, this run None"
    ]
    assert list_differences({"a": {"b": None}}, {}) == ["a: the cache has {'b': None}, this run None"]
    assert list_differences({"a": {"b": None}}, {"a": {}}) == []  # a missing key counts as None


def test_of_other_families_no_preprocessing_is_compared():
    old, new = (
        {"model": {"type": "t"}, "preprocessing": {"pixels": 1}, "ratio": 1},
        {"model": {"type": "t", "family": "generic"}, "preprocessing": {"processor": {"a.json": {}}}, "ratio": 2},
    )
    family = "model.family: the cache has None, this run 'generic'"
    assert list_differences(old, new) == [family, "ratio: the cache has 1, this run 2"]
    assert list_differences({"cache": old}, {"cache": {**new, "ratio": 1}}) == [f"cache.{family}"]


def test_a_header_comes_back_as_it_was_with_its_checksum_or_without(store):
    header = read(store)
    assert header.pop(CHECKSUM) == compute_fingerprint(HEADER) and header == HEADER
    assert serialize_header(read(store)) == serialize_header(HEADER)  # the old checksum is no part of the new one
    store.put("h.json", json.dumps(HEADER).encode())
    assert read(store) == HEADER


def test_a_fingerprint_is_of_what_is_said_and_not_how():
    assert compute_fingerprint({"a": 1, "b": [1.0]}) == compute_fingerprint({"b": [1.0], "a": 1})
    assert len({compute_fingerprint(x) for x in ({"a": 1}, {"a": "1"}, {"a": 1.5}, {"b": 1}, {"a": None}, {})}) == 6


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "schema version None; this program reads version 1"),
        (b"{}", "schema version None"),
        (b'{"schema_version": 2, "identity": {}}', "schema version 2; this program reads version 1"),
        (b'{"schema_version": 1, "identity": []}', "it holds no identity"),
        (b'{"schema_version": 1, "identity": {}, "checksum": "blake2b:00"}', "does not have the checksum in it"),
    ],
)
def test_what_is_no_header_of_this_version_is_refused(store, data, why):
    store.put("h.json", data)
    with pytest.raises(NotACache, match=why):
        read(store)


def test_a_place_without_one_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(NotACache, match=f"{tmp_path}: no cache here: name one"):
        read(LocalStore(tmp_path))
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotACache, match="file: no cache here: name one"):
        read(LocalStore(tmp_path / "file"))


@dataclass(frozen=True, kw_only=True)
class Own(Pruner):
    name: ClassVar[str] = "own"
    nested: ClassVar[bool] = False
    merges: ClassVar[bool] = True
    reorders: ClassVar[bool] = True

    weights: Any = field(default=1.5)

    def select(self, visual, budget, ratio, seed):
        return Selection(torch.arange(budget))


def test_methods_of_the_table_are_their_names_and_parameters():
    for name in PRUNERS:
        pruner = make_pruner(name)
        assert describe_method(pruner) == {"method": name, "params": pruner.params()}
        assert get_method_declarations({"pruner": {"method": name, "params": {}}}) == MethodDeclarations.by(
            PRUNERS[name]
        )


def test_one_from_outside_brings_what_it_declares(monkeypatch):
    described = describe_method(Own())
    assert described == {
        "method": f"{__name__}:Own",
        "params": {"weights": 1.5},
        "declares": {"nested": False, "merges": True, "exact": True, "reorders": True},
        "code": hash_code(Own),
    }
    monkeypatch.setitem(sys.modules, __name__, None)  # an import would fail
    assert get_method_declarations({"pruner": described}) == MethodDeclarations(
        nested=False, merges=True, exact=True, reorders=True
    )


@pytest.mark.parametrize("pruner", [{"method": "os:path"}, {}, {"method": "m:C", "declares": {"nested": True}}])
def test_what_is_not_said_is_unknown(pruner):
    assert get_method_declarations({"pruner": pruner}) is None
    assert get_method_declarations({}) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1, 2), {1: 2}, object(), torch.ones(1)])
def test_a_parameter_that_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match=r"Own': parameters are recorded as JSON, which cannot hold"):
        describe_method(Own(weights=value))
