"""The header, sealed and compared leaf by leaf, and the files of the table, whose names say what was written.

Files that are none of the cache's, and the card by which the cache loads as a dataset.
"""

import json
import os
import random
import shutil
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gstep import PRUNERS, make_pruner
from gstep.pruners.base import Pruner, Selection
from jobs import inspect
from pipeline import CorruptShard, TokenCache
from pipeline.cache import header as headers
from pipeline.cache import table as table_files
from pipeline.cache.header import (
    CHECKSUM,
    MethodDeclarations,
    compute_fingerprint,
    list_differences,
    read_fingerprint,
    serialize_header,
)
from pipeline.cache.live import Ledger, LiveVideos
from pipeline.cache.merging import merge_table_files, merge_table_fully
from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.cache.table import SortedFile, build_table, list_table_files, parse_file_name, read_file, serialize_sorted
from pipeline.errors import NotACache, RemovedVideo, RunFailed
from pipeline.own_code import hash_code
from pipeline.storage.stores import LocalStore
from tests.builders.caches import read_live, write_header, write_shard
from tests.interpreter import run_python
from tests.pipeline.damage import flip, shards
from tests.pipeline.verifying import copy_to_s3, kinds, remove, six_videos, tokens_of, verified, video_of

N = 300


def rows_of(count: int) -> pa.Table:
    """As many rows as a long run leaves, none of them with tokens."""
    records = [
        {"video_id": f"folder/v{i}", "run_id": "r", "uri": f"/x/{i}", "status": "failed", "attempts": 1 + i % 3}
        for i in range(count)
    ]
    return table_files.sort_by_key(build_table(records))


@pytest.fixture
def empty(tmp_path) -> LocalStore:
    return write_header(tmp_path)


def put_sorted(store: LocalStore, rows: pa.Table, group_rows: int = 64) -> str:
    """Put a file of several row groups."""
    name, data = serialize_sorted(2, rows, {}, None, group_rows)
    store.put(name, data)
    return name


def test_the_name_of_a_sorted_file_tells_what_it_holds_and_what_is_read_is_what_was_written(empty, monkeypatch):
    rows = rows_of(N)
    name = put_sorted(empty, rows)
    named, high = parse_file_name(name), rows["id_high"].to_numpy()
    assert (named.level, named.rows, named.first, named.last) == (2, N, int(high[0]), int(high[-1]))
    assert named.holds(named.first) and named.holds(named.last) and not named.holds(named.last + 1)
    assert parse_file_name("videos/r-000001-aa.parquet").level == 0 and list_table_files(empty) == [named]
    file = SortedFile(empty, named)
    assert len(file.firsts) == -(-N // 64)
    expected = pa.concat_tables([rows.slice(0, 64), rows.slice(128, 64)]).select(["attempts", "id_high"])
    assert file.read([0, 2], ["attempts", "id_high"]).equals(expected)
    monkeypatch.setattr("pipeline.cache.table._GROUPS_AT_ONCE", 2)
    assert pa.concat_tables(file.parts()).equals(rows)
    for at in (0, 63, 64, 65, 200, N - 1):
        groups = file.find_row_groups(int(high[at]), int(high[at]))
        assert at // 64 in groups and len(groups) <= 2


def test_each_video_is_found_and_no_other(empty):
    rows = rows_of(N)
    put_sorted(empty, rows)
    cache, found, live = TokenCache(empty.root), LiveVideos.open(empty), read_live(empty, ("video_id",)).to_pylist()
    places = {row["video_id"]: row["row"] for row in live}
    for row in random.Random(0).sample(rows.to_pylist(), 40):
        assert cache.metadata(row["video_id"])["attempts"] == row["attempts"]
        assert found.find(row["video_id"]).row == places[row["video_id"]]
        assert row["video_id"] not in cache
    assert len(cache.failed) == N and cache.video_ids == []
    with pytest.raises(KeyError, match=f"\\(it has {N} rows\\)"):
        cache.metadata("folder/v")


@pytest.mark.parametrize("read", ["all", "one", "find"])
def test_a_flipped_bit_anywhere_raises_or_changes_nothing(empty, read):
    """A bit of every few bytes of the rows and of the tail; and a file that was cut off."""
    rows = rows_of(70)  # two row groups
    name = put_sorted(empty, rows)
    path, file, draw = empty.root / name, parse_file_name(name), random.Random(0)
    whole, known = path.read_bytes(), {row["video_id"]: row for row in rows.to_pylist()}

    def seen() -> pa.Table | bool:
        if read == "find":
            video_id = draw.choice(list(known))
            return TokenCache(empty.root).metadata(video_id)["attempts"] == known[video_id]["attempts"]
        if read == "one":
            return SortedFile(empty, file).read([1])
        return read_file(empty, file, VIDEO_SCHEMA.names)

    good, n_rows, n_raised = seen(), len(whole) - file.n_tail, 0
    places = [*range(0, n_rows, 97), *range(n_rows, len(whole), 997)]
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :])
        try:
            assert seen() == good, at
        except CorruptShard:
            n_raised += 1
    assert n_raised > (0.9 * len(places) if read == "all" else file.n_tail // 997)
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptShard):
            seen()


def test_few_requests_find_a_video(empty):
    """One listing opens the table; then its end and one row group of the file are read."""
    put_sorted(empty, rows_of(N))
    with patch.object(LocalStore, "read_slice", autospec=True, side_effect=LocalStore.read_slice) as read_slice:
        cache = TokenCache(empty.root)
        for _ in range(2):
            cache.metadata("folder/v7")
            assert read_slice.call_count == 2


def test_keys_that_share_a_half_are_told_apart(empty, monkeypatch):
    """Ids whose keys begin alike, at the end of a row group and the beginning of the next."""
    monkeypatch.setattr("pipeline.cache.live.hash_texts", lambda texts: np.array([[7, 0]], np.uint64))
    rows = rows_of(5)
    for name, values in (("id_high", [7] * 5), ("id_low", range(5))):
        rows = rows.set_column(rows.schema.get_field_index(name), rows.field(name), pa.array(values, pa.uint64()))
    put_sorted(empty, rows, group_rows=2)
    cache = TokenCache(empty.root)
    assert [cache.metadata(f"folder/v{i}")["attempts"] for i in range(5)] == [1, 2, 3, 1, 2]
    assert len(cache.failed) == 5


def test_rows_of_several_workers_become_the_same_file_as_one_table():
    numbers = random.Random(0)
    more = {"run_id": "r", "uri": "u", "status": "ok", "attempts": 1}
    times = [[numbers.random() for _ in range(768)] for _ in range(600)]
    whole = build_table([{"video_id": f"v{i}", "timestamps": row, **more} for i, row in enumerate(times)])
    parts = pa.concat_tables([whole.slice(start, 37) for start in range(0, len(whole), 37)])
    one, other = (table_files.serialize_small("r", 0, rows, None) for rows in (whole, table_files.add_keys(parts)))
    assert one == other


SECRET = "a caption of the takedown"


def as_sorted(store):
    merge_table_fully(store, read_fingerprint(store))


NAMES = ["copy.parquet", "{} (1).parquet", "a\nb.parquet"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        (NAMES[0], False, False),
        (NAMES[1], False, True),
        (NAMES[2], True, False),
        ("Copy of {}.parquet", True, False),  # as a sorted file's ends
    ],
)
def test_a_copy_of_a_table_s_file_is_left_out_with_a_note(store, capsys, name, before, after):
    """Even a byte-identical copy made the whole cache unreadable; before or after the table was merged."""
    tokens = tokens_of(store.root)
    if before:
        as_sorted(store)
    file = shards(store, "videos")[0]
    copy = shutil.copy(file, file.with_name(name.format(file.stem)))
    if after:
        as_sorted(store)
    assert TokenCache(store.root).stray_files == [f"videos/{copy.name}"] == Ledger(store).refresh().strays
    assert tokens_of(store.root).keys() == tokens.keys() and TokenCache(store.root).failed == {"bad": "corrupt"}
    report = verified(store, clean=True)
    assert kinds(report) == []
    assert any(f"{copy.name} is not a file of the videos table" in note for note in report.notes)
    assert inspect.main([str(store.root)]) == 0
    assert "1 file in videos/, with no name of the table's: videos/" in capsys.readouterr().out
    as_sorted(store)
    assert copy.exists()  # nothing deletes it


def test_files_that_are_merged_between_the_listing_and_the_look_at_a_stray_are_listed_again(store, monkeypatch):
    file = shards(store, "videos")[0]
    pq.write_table(pq.read_table(file), file.with_name("x.parquet"))
    list_names, n_merged = LocalStore.names, []

    def list_and_merge(self, folder, suffix):
        names = list_names(self, folder, suffix)
        if folder == "videos" and not n_merged:
            n_merged.append(len(names))  # before the merge, which lists the table too
            as_sorted(store)
        return names

    monkeypatch.setattr(LocalStore, "names", list_and_merge)
    listed = [file.name for file in list_table_files(store)]
    assert n_merged and listed == [name for name in list_names(store, "videos", ".parquet") if "/x." not in name]


@pytest.mark.parametrize("name", NAMES)
def test_a_renamed_file_with_rows_that_count_is_an_error_that_names_both(store, name):
    file = shards(store, "videos")[0]
    stray = file.rename(file.with_name(name.format(file.stem)))
    with pytest.raises(CorruptShard, match=r"rename it to videos/renamed-000000-[0-9a-f]{32}\.parquet") as caught:
        TokenCache(store.root)
    assert stray.name in str(caught.value)
    for read in (Ledger(store).refresh, lambda: merge_table_files(store, None)):
        with pytest.raises(CorruptShard, match="does not have the name"):
            read()
    report = verified(store, clean=True)
    assert "stray" in kinds(report) and report.exit_code == 1 and report.removed == []
    assert verified(store, repair=True).exit_code == 1 and stray.exists()
    flip(shards(store)[0], 100)
    with pytest.raises(RunFailed, match="is not part of this cache"):  # its rows would be lost
        verified(store, repair=True)
    flip(shards(store)[0], 100)
    new_name = str(caught.value).partition("rename it to ")[2].partition(" ")[0]
    stray.rename(store.root / new_name)  # the remedy
    assert kinds(verified(store)) == [] and len(TokenCache(store.root)) == 6


def test_a_renamed_removal_does_not_bring_a_video_back(store):
    whole = shutil.copytree(store.root, store.root.with_name("whole"))
    remove(store, "b")
    (removed,) = shards(store, "videos")
    shutil.copy(removed, whole / "videos" / "renamed.parquet")
    with pytest.raises(CorruptShard, match=r"renamed\.parquet"):
        TokenCache(whole)
    shutil.copy(shards(LocalStore(whole), "videos")[0], store.root / "videos" / "old.parquet")  # rows of b
    with pytest.raises(RemovedVideo):
        TokenCache(store.root).get("b")


def test_a_removal_names_the_copies_that_hold_the_video(store):
    write_shard(store, "run9", video_of("gone", 7, manifest=json.dumps({"caption": SECRET})), video_of("stays", 8))
    table = next(file for file in shards(store, "videos") if SECRET in str(pq.read_table(file).to_pylist()))
    token_shard = store.root / TokenCache(store.root).metadata("gone")["token_shard"]
    copies = ("copy.parquet", "backup.parquet~", ".x.parquet.swp")
    for folder, file in (("videos", table), ("tokens", token_shard)):
        for name in (*copies, f"{file.name}.bak"):
            shutil.copy(file, store.root / folder / name)
    for name in ("_SUCCESS", "._x.parquet", ".DS_Store"):
        (store.root / "videos" / name).touch()
    (store.root / "tokens" / "mine.parquet").write_bytes(b"PAR1 of somebody, PAR1")
    done = remove(store, "gone")
    expected = {f"videos/{name}" for name in (*copies, f"{table.name}.bak")}
    expected |= {f"tokens/{name}" for name in (*copies[1:], f"{token_shard.name}.bak", "mine.parquet")}
    assert set(done.strays) == expected  # a copy among the token shards that could be read is deleted
    assert sum("is not a file of this cache" in line for line in done.lines()) == len(expected)
    for name in done.strays:
        (store.root / name).unlink()
    files = (file for file in store.root.rglob("*.parquet") if file.stat().st_size)
    assert not any(SECRET in str(pq.read_table(file).to_pylist()) for file in files)
    assert remove(store, "gone").strays == []


@pytest.mark.parametrize("content", ["garbage", "another table", "torn page", "no rows"])
def test_somebody_s_own_file(store, content):
    mine, file = store.root / "videos/mine.parquet", shards(store, "videos")[0]
    if content == "garbage":
        mine.write_bytes(b"garbage")
    elif content == "torn page":
        flip(shutil.copy(file, mine), 111)
    else:
        pq.write_table(pa.table({"x": [1]}) if content == "another table" else pq.read_table(file).slice(0, 0), mine)
    if content == "no rows":
        assert kinds(verified(store)) == [] and len(TokenCache(store.root)) == 6
        return
    with pytest.raises(CorruptShard, match=r"mine\.parquet is no file of the videos table .*: move it out of videos/"):
        TokenCache(store.root)
    assert kinds(verified(store)) == ["commit"]


def test_a_file_that_is_moved_away_before_it_is_read_is_not_said_to_be_one_of_the_table_s_rows(store, monkeypatch):
    copy = shutil.copy(shards(store, "videos")[0], store.root / "videos/copy.parquet")
    read = LocalStore.read

    def move_and_read(self, name):
        if name == "videos/copy.parquet":
            copy.unlink(missing_ok=True)
        return read(self, name)

    monkeypatch.setattr(LocalStore, "read", move_and_read)
    report = verified(store)
    assert kinds(report) == [] and "copy.parquet" not in str(report.notes) and not copy.exists()


def test_files_of_a_mac_are_left_out_on_s3_as_in_a_folder(store, server):
    far = copy_to_s3(store, server)
    for name in ("videos/._copy.parquet", "tokens/._a.parquet", "runs/._a.json", "runs/._a.running"):
        far.put(name, b"\0\5\x16\7")
    assert far.names("runs", ".json") == [] and len(far.names("tokens", ".parquet")) == len(shards(store))
    assert TokenCache(far.root, store=far).stray_files == []


HEADER = {"schema_version": 1, "identity": {"model": {"type": "m", "weights": "w"}}, "newline": None}


def read(store: LocalStore) -> dict[str, object]:
    return headers.read_header_file(store, "h.json", (1,), NotACache, "no cache here: name one")


@pytest.fixture
def place(tmp_path) -> LocalStore:
    place = LocalStore(tmp_path)
    place.put("h.json", serialize_header(HEADER))
    return place


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


def test_a_header_comes_back_as_it_was_with_its_checksum_or_without(place):
    header = read(place)
    assert header.pop(CHECKSUM) == compute_fingerprint(HEADER) and header == HEADER
    assert serialize_header(read(place)) == serialize_header(HEADER)  # the old checksum is no part of the new one
    place.put("h.json", json.dumps(HEADER).encode())
    assert read(place) == HEADER


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
def test_what_is_no_header_of_this_version_is_refused(place, data, why):
    place.put("h.json", data)
    with pytest.raises(NotACache, match=why):
        read(place)


def test_a_place_without_one_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(NotACache, match=f"{path}: no cache here: name one"):
            read(LocalStore(path))


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
