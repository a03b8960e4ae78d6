"""Datasets of the hub: listed, indexed and read as what lies on a disk, by huggingface_hub's own client."""

import json
import os
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UsageError
from pipeline.storage.hub import HubFiles
from tests.builders.archives import FILES, write_parquet, write_tar
from tests.builders.manifests import read_manifest
from tests.builders.stores import REPO, HubServer
from tests.interpreter import run_python
from tests.paths import ROOT

_READ = """
import hashlib, json, sys
from pipeline.storage.hub import choose_client
from pipeline.storage.s3 import Objects
from pipeline.video.source import SourceStates
from tests.builders.manifests import contents, rows

def read(place, column):
    objects = Objects()
    found = rows(place, column or None, objects)
    data = {row["video_id"]: row for row in found if row["source_offset"] is not None}
    data = dict(zip(data, contents([*data.values()], objects)))
    alone = {row["video_id"]: row["uri"] for row in found if row["source_offset"] is None}
    data |= {name: choose_client(uri, objects).read(uri) for name, uri in alone.items()}
    digests = {name: hashlib.sha256(one).hexdigest() for name, one in data.items()}
    uris = [*alone.values()]
    sizes = SourceStates(objects).of([*uris, *(uri + "x" for uri in uris[:1])])
    return {"digests": digests, "uri": found[0]["uri"], "sizes": sizes}

print(json.dumps([read(place, column) for place, column in json.loads(sys.argv[1])]))
"""
DIGESTS = [sha256(data).hexdigest() for data in FILES.values()]


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
    with HubServer(root) as server:
        yield server


def read(hub, places):
    """What _READ says of each place of the dataset."""
    asked = [(f"hf://datasets/{REPO}{place}", "video" * place.endswith("parquet")) for place in places]
    here = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**here, "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = run_python("-c", _READ, json.dumps(asked), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_dataset_is_listed_and_read_in_few_requests(hub):
    """Tars by several patterns and at a revision, a column of a Parquet file, and a folder of videos."""
    places = ["/data/a-{0,1}.tar", "/data/*.tar", "@main/data/a-1.tar", "/data/train.parquet", "/videos"]
    braces, star, revision, column, folder = read(hub, places)
    assert list(braces["digests"]) == [f"a-{number}.tar/{name}" for number in (0, 1) for name in FILES]
    assert list(braces["digests"].values()) == list(star["digests"].values()) == 2 * DIGESTS
    assert braces["uri"] == f"hf://datasets/{REPO}/data/a-0.tar#00.mp4"
    assert list(revision["digests"].values()) == list(column["digests"].values()) == DIGESTS
    assert list(column["digests"]) == list(FILES)
    assert sorted(folder["digests"].values()) == sorted(DIGESTS) and "deep/01.mp4" in folder["digests"]
    assert folder["sizes"][-1] == -1 and sorted(folder["sizes"][:-1]) == sorted(map(len, FILES.values()))
    assert hub.count("resolve") <= 40


def test_a_manifest_and_a_glob_of_the_hub_name_its_files(hub):
    listed, paths, glob = read(hub, ["/list.csv", "/paths.parquet", "/data/a-?.tar"])
    assert listed["digests"] == dict(zip(FILES, DIGESTS, strict=True))
    assert sorted(paths["digests"].values()) == sorted(DIGESTS) and "videos/deep/01.mp4" in paths["digests"]
    assert list(glob["digests"]) == [f"a-{number}.tar/{name}" for number in (0, 1) for name in FILES]


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
