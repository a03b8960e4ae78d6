"""Datasets of the hub: listed, indexed and read as what lies on a disk, by huggingface_hub's own client."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UsageError
from pipeline.storage.hub import HubFiles, choose_client
from pipeline.storage.s3 import Objects
from pipeline.video.source import SourceStates
from tests.builders.archives import FILES, write_parquet, write_tar
from tests.builders.manifests import contents, ids, read_manifest, rows
from tests.builders.stores import REPO, HubServer


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
