"""Files in videos/ and tokens/ that are none of the cache's: copies, renamed files, backups, and somebody's own."""

import io
import json
import shutil
from datetime import timedelta

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
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.caches import write_shard
from tests.pipeline.damage import flip, shards
from tests.pipeline.verifying import kinds, six_videos, tokens_of, verified, video_of

NOW = timedelta(0)
SECRET = "a caption of the takedown"


@pytest.fixture
def store(tmp_path):
    return six_videos(tmp_path / "c")


def as_sorted(store):
    merge_table_fully(store, read_fingerprint(store))


NAMES = ["copy.parquet", "part-0.parquet", "{} (1).parquet", "{}.bak.parquet", "Copy of {}.old.parquet", "a\nb.parquet"]


@pytest.mark.parametrize("before", [lambda store: None, as_sorted], ids=["small", "sorted"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [lambda store: None, as_sorted], ids=["", "merged later"])
def test_a_copy_of_a_table_s_file_is_left_out_with_a_note(store, capsys, before, name, after):
    """Even a byte-identical copy made the whole cache unreadable."""
    tokens = tokens_of(store.root)
    before(store)
    file = shards(store, "videos")[0]
    copy = file.with_name(name.format(file.stem))
    shutil.copy(file, copy)
    after(store)
    assert TokenCache(store.root).stray_files == [f"videos/{copy.name}"] == Ledger(store).refresh().strays
    assert tokens_of(store.root).keys() == tokens.keys() and TokenCache(store.root).failed == {"bad": "corrupt"}
    report = verified(store, clean=True, keep=NOW)
    assert kinds(report) == [] and any(
        f"{copy.name} is not a file of the videos table" in note for note in report.notes
    )
    assert (
        inspect.main([str(store.root)]) == 0
        and "1 file in videos/, with no name of the table's: videos/" in capsys.readouterr().out
    )
    merge_table_files(store, read_fingerprint(store), everything=True, keep=NOW)
    assert copy.exists()  # nothing deletes it


@pytest.mark.parametrize("name", ["Copy of {}.parquet", "backup-{}.parquet"])
def test_a_copy_of_a_sorted_file_whose_name_ends_as_the_file_s_is_left_out(store, name):
    as_sorted(store)
    (file,) = shards(store, "videos")
    copy = file.with_name(name.format(file.stem))
    shutil.copy(file, copy)
    assert TokenCache(store.root).stray_files == [f"videos/{copy.name}"]


def test_files_that_are_merged_between_the_listing_and_the_look_at_a_stray_are_listed_again(store, monkeypatch):
    file = shards(store, "videos")[0]
    pq.write_table(pq.read_table(file), file.with_name("x.parquet"))
    list_names, n_merged = LocalStore.names, []

    def list_and_merge(self, folder, suffix):
        names = list_names(self, folder, suffix)
        if folder == "videos" and not n_merged:
            n_merged.append(len(names))  # before the merge, which lists the table too
            for _ in range(2):  # the second deletes what the first has merged
                merge_table_files(store, read_fingerprint(store), everything=True, keep=timedelta(0))
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
    report = verified(store, clean=True, keep=NOW)
    assert "stray" in kinds(report) and report.exit_code == 1 and report.removed == []
    assert verified(store, repair=True, keep=NOW).exit_code == 1 and stray.exists()
    flip(shards(store)[0], 100)
    with pytest.raises(RunFailed, match="is not part of this cache"):  # its rows would be lost
        verified(store, repair=True, keep=NOW)
    flip(shards(store)[0], 100)
    new_name = str(caught.value).partition("rename it to ")[2].partition(" ")[0]
    stray.rename(store.root / new_name)  # the remedy
    assert kinds(verified(store)) == [] and len(TokenCache(store.root)) == 6


def test_a_table_s_name_with_other_bytes_stays_damage(store):
    file = shards(store, "videos")[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptShard, match="hash in its name"):
        TokenCache(store.root)
    assert kinds(verified(store)) == ["commit"]


def test_a_renamed_removal_does_not_bring_a_video_back(store):
    whole = LocalStore(shutil.copytree(store.root, store.root.with_name("whole")))
    remove_videos(store, ["b"], "licence", print, NOW)
    (removed,) = shards(store, "videos")
    (whole.root / "videos" / "renamed.parquet").write_bytes(removed.read_bytes())
    with pytest.raises(CorruptShard, match=r"renamed\.parquet"):
        TokenCache(whole.root)
    assert "stray" in kinds(verified(whole))
    (store.root / "videos" / "old.parquet").write_bytes(shards(whole, "videos")[0].read_bytes())  # rows of b
    with pytest.raises(RemovedVideo, match="licence"):
        TokenCache(store.root).get("b")


def test_a_removal_names_the_copies_that_hold_the_video(store):
    write_shard(store, "run9", video_of("gone", 7, manifest=json.dumps({"caption": SECRET})), video_of("stays", 8))
    table = next(file for file in shards(store, "videos") if SECRET in str(pq.read_table(file).to_pylist()))
    token_shard = store.root / TokenCache(store.root).metadata("gone")["token_shard"]
    other = shards(store, "videos")[0]
    for folder, file in (("videos", table), ("tokens", token_shard)):
        for name in ("copy.parquet", "backup.parquet~", ".x.parquet.swp", f"{file.name}.bak"):
            shutil.copy(file, store.root / folder / name)
    for name in ("other copy.parquet", "_SUCCESS", "._x.parquet", ".DS_Store"):
        (store.root / "videos" / name).write_bytes(other.read_bytes() if name == "other copy.parquet" else b"")
    (store.root / "tokens" / "mine.parquet").write_bytes(b"PAR1 of somebody, PAR1")
    done = remove_videos(store, ["gone"], "licence", print, NOW)
    names = ("copy.parquet", "backup.parquet~", ".x.parquet.swp")
    expected = {f"videos/{name}" for name in (*names, f"{table.name}.bak")}
    expected |= {f"tokens/{name}" for name in (*names[1:], f"{token_shard.name}.bak", "mine.parquet")}
    assert set(done.strays) == expected  # a copy among the token shards that could be read is deleted
    assert sum("is not a file of this cache" in line for line in done.lines()) == len(expected)
    for name in done.strays:
        (store.root / name).unlink()
    assert not any(
        SECRET in str(pq.read_table(file).to_pylist()) for file in store.root.rglob("*.parquet") if file.stat().st_size
    )
    assert remove_videos(store, ["gone"], "licence", print, NOW).strays == []


@pytest.mark.parametrize("content", ["garbage", "another table", "torn page", "no rows"])
def test_somebody_s_own_file(store, content):
    tables = {"another table": pa.table({"x": [1]}), "no rows": pq.read_table(shards(store, "videos")[0]).slice(0, 0)}
    file = io.BytesIO(shards(store, "videos")[0].read_bytes() if content == "torn page" else b"garbage")
    if content in tables:
        pq.write_table(tables[content], file)
    store.put("videos/mine.parquet", file.getvalue())
    if content == "torn page":
        flip(store.root / "videos/mine.parquet", 111)
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
    far = ObjectStore(server.uri("c"), server.objects())
    for folder in ("", "tokens", "videos"):
        for file in store.list_files(folder):
            far.put(file.name, store.read(file.name))
    (name, *_) = far.names("videos", ".parquet")
    far.put("videos/copy.parquet", far.read(name))
    far.put("videos/._copy.parquet", b"Mac")
    assert TokenCache(far.root, store=far).stray_files == ["videos/copy.parquet"] and kinds(verified(far)) == []
    far.delete(name)
    with pytest.raises(CorruptShard, match="does not have the name"):
        TokenCache(far.root, store=far)
    far.delete("videos/copy.parquet")
