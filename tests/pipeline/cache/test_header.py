"""The header of a cache, sealed and compared leaf by leaf, and the card by which the cache loads as a dataset."""

import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from gstep import PRUNERS, make_pruner
from gstep.pruners.base import Pruner, Selection
from pipeline.cache import header as headers
from pipeline.cache.header import CHECKSUM, MethodDeclarations, compute_fingerprint, list_differences, serialize_header
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import NotACache
from pipeline.own_code import hash_code
from pipeline.storage.stores import LocalStore
from tests.builders.caches import write_shard
from tests.interpreter import run_python
from tests.pipeline.verifying import six_videos, video_of

HEADER = {"schema_version": 1, "identity": {"model": {"type": "m", "weights": "w"}}, "newline": None}


def read(store: LocalStore) -> dict[str, object]:
    return headers.read_header_file(store, "h.json", (1,), NotACache, "no cache here: name one")


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
    assert list_differences(old, old) == []
    assert list_differences({"a": {"b": None}}, {}) == ["a: the cache has {'b': None}, this run None"]
    assert list_differences({"a": {"b": None}}, {"a": {}}) == []  # a missing key counts as None


def test_a_fingerprint_is_of_what_is_said_and_not_how():
    assert compute_fingerprint({"a": 1, "b": [1.0]}) == compute_fingerprint({"b": [1.0], "a": 1})
    assert len({compute_fingerprint(x) for x in ({"a": 1}, {"a": "1"}, {"a": 1.5}, {"b": 1}, {"a": None}, {})}) == 6


def test_of_other_families_no_preprocessing_is_compared():
    old = {"model": {"type": "t"}, "preprocessing": {"pixels": 1}, "ratio": 1}
    new = {"model": {"type": "t", "family": "generic"}, "preprocessing": {"processor": {"a.json": {}}}, "ratio": 2}
    family = "model.family: the cache has None, this run 'generic'"
    assert list_differences(old, new) == [family, "ratio: the cache has 1, this run 2"]
    assert list_differences({"cache": old}, {"cache": {**new, "ratio": 1}}) == [f"cache.{family}"]


def test_a_header_comes_back_as_it_was_with_its_checksum_or_without(store):
    header = read(store)
    assert header.pop(CHECKSUM) == compute_fingerprint(HEADER) and header == HEADER
    assert serialize_header(read(store)) == serialize_header(HEADER)  # the old checksum is no part of the new one
    store.put("h.json", json.dumps(HEADER).encode())
    assert read(store) == HEADER


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "schema version None; this program reads version 1"),
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
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(NotACache, match=f"{place}: no cache here: name one"):
            read(LocalStore(place))


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
    for name, method in PRUNERS.items():
        pruner = make_pruner(name)
        assert headers.describe_method(pruner) == {"method": name, "params": pruner.params()}
        identity = {"pruner": {"method": name, "params": {}}}
        assert headers.get_method_declarations(identity) == MethodDeclarations.by(method)


def test_one_from_outside_brings_what_it_declares(monkeypatch):
    declared = {"nested": False, "merges": True, "exact": True, "reorders": True}
    described = headers.describe_method(Own())
    own = {"method": f"{__name__}:Own", "params": {"weights": 1.5}, "code": hash_code(Own)}
    assert described == {**own, "declares": declared}
    monkeypatch.setitem(sys.modules, __name__, None)  # an import would fail
    assert headers.get_method_declarations({"pruner": described}) == MethodDeclarations(**declared)
    for unknown in ({"method": "os:path"}, {}, {"method": "m:C", "declares": {"nested": True}}):
        assert headers.get_method_declarations({"pruner": unknown}) is None
    assert headers.get_method_declarations({}) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1, 2), {1: 2}, object(), torch.ones(1)])
def test_a_parameter_that_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match=r"Own': parameters are recorded as JSON, which cannot hold"):
        headers.describe_method(Own(weights=value))


LOAD = """
import json, os, sys
from datasets import load_dataset

def count(place, *name):
    try:
        return load_dataset(place, *name, split="train", cache_dir=sys.argv[1]).num_rows
    except Exception as error:
        return type(error).__name__

print(json.dumps([[count(place), count(place, "videos"), count(place, "tokens")] for place in sys.argv[2:]]))
"""


def test_a_cache_loads_as_a_dataset_by_the_names_of_its_tables(tmp_path):
    """datasets took the files of both tables for one, and failed on the columns."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    store = six_videos(tmp_path / "c")
    headers.write_new_header(store, headers.read_header(store))
    merge_table_fully(store, None)
    write_shard(store, "run9", video_of("x", 9))
    failed = shutil.copytree(store.root, tmp_path / "failed")
    shutil.rmtree(failed / "tokens")  # of a cache in which every video failed
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run_python("-c", LOAD, tmp_path / "d", store.root, failed, check=True, env=environment)
    of_both, (*of_failed, _) = json.loads(done.stdout.splitlines()[-1])
    assert (of_both, of_failed) == ([8, 8, 72], [8, 8])  # f has two rows


@pytest.mark.parametrize("own", [None, b"# My cache\n"])
def test_it_is_written_once_and_a_user_s_own_stays(tmp_path, own):
    header, out = headers.read_header(six_videos(tmp_path / "source")), LocalStore(tmp_path / "out")
    out.make()
    if own is not None:
        out.put("README.md", own)
    assert not out.has_other_files()
    headers.write_new_header(out, header)
    written = out.read("README.md")
    assert written == own or (own is None and b"Superseded rows are included" in written)
    assert headers.has_generated_card(out) == (own is None)
    out.put("README.md", written + b"more")
    headers.write_new_header(out, header)
    assert out.read("README.md") == written + b"more" and not headers.has_generated_card(out) and out.has_other_files()
