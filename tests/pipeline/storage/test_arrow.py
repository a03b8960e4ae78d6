"""Caches by Arrow's file systems: here that of a folder, so that no cloud is needed."""

import pickle
from datetime import timedelta
from functools import partial

import pytest
from pyarrow import fs

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_files
from pipeline.errors import UsageError
from pipeline.storage.arrow import ArrowObjects
from pipeline.storage.stores import FileInfo, ObjectStore, store_at
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.verifying import SHAPE, kinds, verified

NOW = timedelta(0)


@pytest.fixture
def store(tmp_path) -> ObjectStore:
    """Its folders are there: stores of objects have none to make."""
    for folder in ("tokens", "videos", "runs"):
        (tmp_path / "bucket" / "c" / folder).mkdir(parents=True)
    local = partial(fs.SubTreeFileSystem, str(tmp_path), fs.LocalFileSystem())
    return ObjectStore("gs://bucket/c", ArrowObjects("gs://", local))


def test_what_is_put_is_read_listed_and_deleted(store):
    assert not store.has_other_files()
    store.put("videos/b", b"hello")
    store.put("videos/a", b"")
    assert store.list_files("videos") == [FileInfo("videos/a", 0), FileInfo("videos/b", 5)] and store.has_other_files()
    assert (store.read("videos/a"), store.read("videos/b")) == (b"", b"hello")
    assert store.read_slice("videos/b", -3) == (b"llo", 5) and store.read_slice("videos/b", 1, 3) == (b"el", 5)
    assert store.read_slice("videos/a", -3) == (b"", 0)
    assert timedelta(seconds=-5) < store.compute_age("videos/b") < timedelta(minutes=1)
    store.delete("videos/b")
    store.delete("videos/b")
    assert not store.exists("videos/b") and list(store.uploads()) == []
    for ask in (store.read, store.compute_age, store.open):
        with pytest.raises(FileNotFoundError, match="gs://bucket/c/videos/b"):
            ask("videos/b")


def test_a_file_behind_ten_thousand_indexes_is_seen(store, tmp_path):
    (folder := tmp_path / "bucket/c/sources").mkdir()
    for number in range(10_000):
        (folder / f"{number}.zlib").touch()
    assert not store.has_other_files()
    store.put("videos/mine", b"")
    assert store.has_other_files()


def test_a_cache_is_written_merged_verified_and_read(store):
    write_header(store, hidden_size=8)
    for name in "abc":
        write_shard(store, f"r{name}", encoded(name, random_tokens(ord(name), SHAPE), 0.25, "gstep"))
    before = TokenCache(str(store), store=store)
    for _ in range(2):
        merge_table_files(store, read_fingerprint(store), everything=True, keep=NOW)
    after = TokenCache(str(store), store=pickle.loads(pickle.dumps(store)))  # noqa: S301
    assert after.video_ids == ["a", "b", "c"] and len(store.names("videos", ".parquet")) == 1
    assert all(after.get(name).tokens.equal(before.get(name).tokens) for name in "abc")
    assert kinds(verified(store)) == []


def test_how_azure_is_reached_is_taken_from_the_environment(monkeypatch):
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="set AZURE_STORAGE_CONNECTION_STRING"):
        store_at("az://box/c")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "me")
    monkeypatch.setenv("AZURE_STORAGE_KEY", "c2VjcmV0")
    told = ArrowObjects.at("az://box/c")._connect.keywords
    assert told == {"account_name": "me", "account_key": "c2VjcmV0"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=aw==;BlobEndpoint=http://host:1/a")
    told = ArrowObjects.at("az://box/c")._connect.keywords
    assert (told["account_name"], told["account_key"]) == ("a", "aw==")
    assert (told["blob_storage_scheme"], told["blob_storage_authority"]) == ("http", "host:1")
    for uri in ("gs://", "gs://user@bucket/c", "az://box/c?sig=x"):
        with pytest.raises(UsageError, match=r"expected .*BUCKET/PREFIX"):
            store_at(uri)
