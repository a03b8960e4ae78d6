"""Files in videos/ and tokens/ that are none of the cache's: copies, renamed files, backups, and somebody's own."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import inspect
from pipeline import CorruptShard, TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.live import Ledger
from pipeline.cache.merging import merge_table_files, merge_table_fully
from pipeline.cache.table import list_table_files
from pipeline.errors import RemovedVideo, RunFailed
from pipeline.storage.stores import LocalStore
from tests.builders.caches import write_shard
from tests.pipeline.damage import flip, shards
from tests.pipeline.verifying import copy_to_s3, kinds, remove, six_videos, tokens_of, verified, video_of

SECRET = "a caption of the takedown"


@pytest.fixture
def store(tmp_path):
    return six_videos(tmp_path / "c")


def as_sorted(store):
    merge_table_fully(store, read_fingerprint(store))


NAMES = ["copy.parquet", "{} (1).parquet", "{}.bak.parquet", "Copy of {}.old.parquet", "a\nb.parquet"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        *((name, before, after) for name in NAMES for before, after in ((False, False), (False, True), (True, False))),
        *((name, True, False) for name in ("Copy of {}.parquet", "backup-{}.parquet")),  # as a sorted file's ends
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
    whole = LocalStore(shutil.copytree(store.root, store.root.with_name("whole")))
    remove(store, "b")
    (removed,) = shards(store, "videos")
    (whole.root / "videos" / "renamed.parquet").write_bytes(removed.read_bytes())
    with pytest.raises(CorruptShard, match=r"renamed\.parquet"):
        TokenCache(whole.root)
    assert "stray" in kinds(verified(whole))
    (store.root / "videos" / "old.parquet").write_bytes(shards(whole, "videos")[0].read_bytes())  # rows of b
    with pytest.raises(RemovedVideo):
        TokenCache(store.root).get("b")


def test_a_removal_names_the_copies_that_hold_the_video(store):
    write_shard(store, "run9", video_of("gone", 7, manifest=json.dumps({"caption": SECRET})), video_of("stays", 8))
    table = next(file for file in shards(store, "videos") if SECRET in str(pq.read_table(file).to_pylist()))
    token_shard = store.root / TokenCache(store.root).metadata("gone")["token_shard"]
    other = shards(store, "videos")[0]
    copies = ("copy.parquet", "backup.parquet~", ".x.parquet.swp")
    for folder, file in (("videos", table), ("tokens", token_shard)):
        for name in (*copies, f"{file.name}.bak"):
            shutil.copy(file, store.root / folder / name)
    shutil.copy(other, store.root / "videos" / "other copy.parquet")
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


def test_the_same_on_s3(store, server):
    far = copy_to_s3(store, server)
    (name, *_) = far.names("videos", ".parquet")
    far.put("videos/copy.parquet", far.read(name))
    for name_of_mac in ("videos/._copy.parquet", "tokens/._a.parquet", "runs/._a.json", "runs/._a.running"):
        far.put(name_of_mac, b"\0\5\x16\7")  # a folder leaves them out as well
    assert far.names("runs", ".json") == [] and len(far.names("tokens", ".parquet")) == len(shards(store))
    assert TokenCache(far.root, store=far).stray_files == ["videos/copy.parquet"] and kinds(verified(far)) == []
    far.delete(name)
    with pytest.raises(CorruptShard, match="does not have the name"):
        TokenCache(far.root, store=far)
    far.delete("videos/copy.parquet")
