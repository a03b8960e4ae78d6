"""Stores on a disk, by Arrow's file systems and of the hub: files appear whole at their name; addresses of members."""

import errno
import json
import os
import pickle
import re
import resource
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import fs

from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_files
from pipeline.errors import UsageError
from pipeline.storage import stores
from pipeline.storage.arrow import ArrowObjects
from pipeline.storage.hub import HubFiles, choose_client
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import FileInfo, LocalStore, ObjectStore, store_at
from pipeline.video.source import SourceStates
from tests.builders.archives import FILES, write_parquet, write_tar
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.builders.manifests import contents, ids, read_manifest, rows
from tests.builders.stores import REPO, HubServer
from tests.pipeline.verifying import SHAPE, kinds, verified
from tests.waiting import wait_until


@pytest.mark.parametrize("name", ["../outside", "tokens/../../outside", "/outside", ".."])
def test_a_name_that_leads_out_of_the_root_is_no_file_of_the_store(tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_bytes(b"not the cache's")
    name = str(outside) if name == "/outside" else name
    store = LocalStore(tmp_path / "c")
    (store.root / "tokens").mkdir(parents=True)
    for attempt in ("read", "open", "exists", "compute_age", "delete", "put"):
        with pytest.raises(FileNotFoundError, match="leads out of the cache"):
            getattr(store, attempt)(name, *[b""] * (attempt == "put"))
    assert outside.read_bytes() == b"not the cache's"


@pytest.mark.parametrize(
    "place", ["https://k:SEC@host/cache", "s3://k:SEC@bucket/cache", "gs://b?key=SEC", "file://SEC"]
)
def test_an_address_that_is_no_place_for_a_cache_is_refused_without_its_secrets(place):
    with pytest.raises(UsageError, match=re.escape(place.partition("//")[0])) as caught:
        store_at(place)
    assert "SEC" not in str(caught.value)


def test_names_leave_out_what_is_not_finished(tmp_path):
    store = LocalStore(tmp_path)
    for name in ("d/b.parquet", "d/a.parquet", "d/note.txt"):
        store.put(name, b"x")
    (tmp_path / "d" / ".tmp-c.parquet").write_bytes(b"x")
    assert store.names("d", ".parquet") == ["d/a.parquet", "d/b.parquet"]
    assert (store.exists("d/a.parquet"), store.exists("d")) == (True, False)
    assert store.names("none", ".parquet") == []


def test_a_folder_is_listed_while_another_process_writes_to_it(tmp_path):
    """Files are renamed between the look at the folder and the look at the file."""
    store = LocalStore(tmp_path)
    store.put("d/0", b"x")
    pid = os.fork()
    if pid == 0:
        while True:
            store.put("d/1", b"x")
    listings: list[list[FileInfo]] = []

    def both_seen() -> bool:
        listings.extend(store.list_files("d") for _ in range(1000))
        return any(len(found) > 1 for found in listings)

    try:
        wait_until(both_seen, "a listing while the other process writes")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert all(FileInfo("d/0", 1) in found for found in listings)


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_who_may_read_and_write_follows_the_folder_and_not_the_umask_of_a_machine(tmp_path, umask):
    tmp_path.chmod(0o750)
    before = os.umask(umask)
    try:
        LocalStore(tmp_path).put("d/a", b"x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("d", "d/a")] == [0o750, 0o640]


def test_a_writer_killed_in_mid_file_leaves_nothing_at_the_name(tmp_path):
    store = LocalStore(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends a process that writes too large a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        store.put("d/a.parquet", bytes(2**20))
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGXFSZ
    assert [path.stat().st_size for path in tmp_path.glob("d/.tmp-*")] == [2**16]
    assert not store.exists("d/a.parquet") and store.names("d", ".parquet") == []


def test_a_write_that_the_system_refuses_in_mid_file_changes_nothing_and_names_the_file(tmp_path):
    store = LocalStore(tmp_path)
    store.put("d/kept", b"old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        for name in ("d/kept", "d/new"):
            with pytest.raises(OSError, match=f"File too large.*{name}") as failed:
                store.put(name, bytes(2**20))
            assert failed.value.errno == errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == {"kept": b"old"}


def test_a_pipe_is_no_file(tmp_path):
    """Reading one would wait for a writer, and what a cache from elsewhere holds is not known."""
    os.mkfifo(tmp_path / "cache.json")
    store = LocalStore(tmp_path)
    reads = (store.read, store.open, lambda name: store.read_slice(name, 0), lambda name: next(store.read_all([name])))
    for read in reads:
        with pytest.raises(FileNotFoundError, match=r"(?i)no such file"):
            read("cache.json")


def test_a_mount_that_cannot_sync_a_folder_takes_files(tmp_path, monkeypatch):
    """SMB, 9p and some FUSE mounts. A fault of the file itself, or another of the folder, is one."""
    sync, faults = os.fsync, {}

    def refuse(descriptor):
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        if kind in faults:
            raise OSError(faults[kind], os.strerror(faults[kind]))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    store = LocalStore(tmp_path / "c")
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
        faults["folder"] = number
        for name in ("a", "d/e/a"):
            store.put(name, b"x")
            assert store.read(name) == b"x"
    for faults in ({"folder": errno.EIO}, {"file": errno.EINVAL}, {"file": errno.ENOTSUP}):
        with pytest.raises(OSError, match=os.strerror(*faults.values())):
            store.put("b", b"x")


def test_a_folder_whose_inode_number_changes_is_the_same_folder(tmp_path, monkeypatch):
    """As some file systems in user space have it; one that took its place has other times too."""
    store = LocalStore(tmp_path / "c")
    store.make()
    store.put("a", b"x")
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    store.put("b", b"x")
    (tmp_path / "c").rename(tmp_path / "old")
    os.utime(tmp_path / "old", (1, 1))
    store.make()
    with pytest.raises(FileNotFoundError, match="replaced by another folder"):
        store.put("c", b"x")
    assert [path.name for path in tmp_path.glob("*/*")] in (["a", "b"], ["b", "a"])


def test_threads_that_write_at_once_hold_one_descriptor(tmp_path, monkeypatch):
    """Two that opened the root at once closed each other's descriptor, whose number another file may have by then."""
    opened, real = [], stores._OpenFolder

    def slow(folder):
        opened.append(folder)
        time.sleep(0.05)
        return real(folder)

    monkeypatch.setattr(stores, "_OpenFolder", slow)
    store = LocalStore(tmp_path / "c")
    store.make()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"folder/{number}", b"x"), range(32)))
    assert len(opened) == 1 and len(list((tmp_path / "c/folder").iterdir())) == 32


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


def test_a_file_behind_a_thousand_indexes_is_seen(store, tmp_path):
    (folder := tmp_path / "bucket/c/sources").mkdir()
    for number in range(1001):
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


NAMES = st.text(st.sampled_from("#?%&= /\\@:.aé日😀\n\0"), max_size=8)
ARCHIVES = NAMES.map(lambda name: name.replace("#", ""))  # the indexing of archives refuses others


@example("s3://bucket/a.tar?versionId=x", "#", 512)
@example("/a.tar", "", 0)
@given(file=ARCHIVES, member=NAMES, offset=st.integers(0, 2**53))
def test_a_member_is_read_from_its_uri(file, member, offset):
    location = Location(file, member, offset, size=7, mark=2**64 - 1)
    assert location.uri == f"{file}#{member}"
    assert Location.parse(location.uri, location.offset, 7, 2**64 - 1) == location


@example("/videos/a.tar#b.mp4")
@given(file=NAMES)
def test_the_uri_of_a_file_of_its_own_is_its_path(file):
    assert Location(file, size=7).uri == file and Location.parse(file, None, 7) == Location(file, size=7)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    (root / "data").mkdir()
    (root / "videos" / "deep").mkdir(parents=True)
    for number, (name, data) in enumerate(FILES.items()):
        (root / "videos" / ("deep" if number % 2 else "") / name).write_bytes(data)
    write_tar(root / "data" / "a-0.tar", FILES)
    write_tar(root / "data" / "a-1.tar", FILES)
    write_parquet(root / "data" / "train.parquet")
    (root / "README.md").write_text("clips")
    names = sorted(path.relative_to(root).as_posix() for path in (root / "videos").rglob("*.mp4"))
    lines = ["video_id,uri", *(f"{name.rpartition('/')[2]},{name}" for name in names)]
    (root / "list.csv").write_text("\n".join(lines))
    pq.write_table(pa.table({"video": names}), root / "paths.parquet")
    with HubServer(root) as server, pytest.MonkeyPatch.context() as patch:
        server.reach(patch)
        yield server


def read(place):
    """The bytes of each video of a place of the dataset, and the rows."""
    objects = Objects()
    found = rows(f"hf://datasets/{REPO}{place}", "video" if place.endswith("parquet") else None, objects)
    members = [row for row in found if row["source_offset"] is not None]
    data = dict(zip(ids(members), contents(members, objects), strict=True))
    alone = [row for row in found if row["source_offset"] is None]
    return data | {row["video_id"]: choose_client(row["uri"], objects).read(row["uri"]) for row in alone}, found


@pytest.mark.parametrize("pattern", ["a-{0,1}", "*", "a-?"])
def test_tars_of_a_dataset_are_listed_and_read(hub, pattern):
    data, found = read(f"/data/{pattern}.tar")
    assert [*data.items()] == [(f"a-{number}.tar/{name}", FILES[name]) for number in (0, 1) for name in FILES]
    assert found[0]["uri"] == f"hf://datasets/{REPO}/data/a-0.tar#00.mp4"


def test_a_revision_a_table_a_manifest_and_a_folder_are_read_in_few_requests(hub):
    hub.requests.clear()
    assert [*read("@main/data/a-1.tar")[0].values()] == [*FILES.values()]
    for table in ("/data/train.parquet", "/list.csv"):
        assert read(table)[0] == FILES
    for place, deep in (("/paths.parquet", "videos/deep/01.mp4"), ("/videos", "deep/01.mp4")):
        data, found = read(place)
        assert data[deep] == FILES["01.mp4"] and sorted(data.values()) == sorted(FILES.values())
    uris = [row["uri"] for row in found]
    assert SourceStates(Objects()).of([*uris, uris[0] + "x"]) == [*map(len, data.values()), -1]
    assert hub.count("resolve") <= 50


@pytest.mark.parametrize("uri", ["../b.mp4", "a//b.mp4", "a/./b.mp4", "a\nb.mp4", "hf://datasets/other/clips/b.mp4"])
def test_a_manifest_on_the_hub_names_what_lies_below_its_folder_alone(uri, monkeypatch):
    line = json.dumps({"video_id": "x", "uri": uri}).encode()
    monkeypatch.setattr(HubFiles, "read", lambda files, place: line)
    (row,) = read_manifest("hf://datasets/someone/clips/lists/m.jsonl").to_pylist()
    assert row["policy"]


def test_other_addresses_of_the_hub_are_refused(hub):
    for uri in ("hf://spaces/a/b", "gs://bucket/videos"):
        with pytest.raises(UsageError, match="only local paths, s3:// and hf://datasets/ are read"):
            read_manifest(uri)


def test_a_folder_of_the_hub_without_a_video_is_refused_as_one_of_the_hub(monkeypatch):
    monkeypatch.setattr(HubFiles, "list", lambda files, prefix, *, deep: iter(()))
    with pytest.raises(UsageError, match="no video on the hub at or below it"):
        read_manifest("hf://datasets/someone/clips/videos/")
