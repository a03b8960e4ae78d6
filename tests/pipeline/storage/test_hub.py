"""Datasets of the hub: listed, indexed and read as what lies on a disk, by huggingface_hub's own client."""

import json
import os
from hashlib import sha256

import pytest

from pipeline.errors import UsageError
from pipeline.inputs.manifest import read_manifest
from tests.interpreter import run_python
from tests.paths import ROOT
from tests.pipeline.hub import REPO, HubServer
from tests.pipeline.inputs.test_containers import FILES, write_parquet
from tests.pipeline.tars import write_tar

_READ = """
import hashlib, json, sys
from pipeline.errors import UsageError
from pipeline.inputs.container import ContainerOptions
from pipeline.inputs.forms import Containers, find_member
from pipeline.inputs.indexes import Indexing
from pipeline.inputs.manifest import read_manifest
from pipeline.storage.hub import reach
from pipeline.storage.s3 import Objects
from pipeline.video.source import Sizes

place, column = sys.argv[1:]
objects = Objects()
try:
    rows = read_manifest(place, (), objects, Indexing(ContainerOptions(column or None))).to_pylist()
except UsageError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
digests = {}
spots = [find_member(row["uri"], row["source_offset"], row["size"]) for row in rows]
with Containers(objects, spots) as opened:
    for row, spot in zip(rows, spots):
        parts = []
        if spot is None:
            parts.append(reach(row["uri"], objects).read(row["uri"]))
        else:
            opened.fetch(spot, parts.append, 2**30)
        digests[row["video_id"]] = hashlib.sha256(b"".join(parts)).hexdigest()
alone = [row["uri"] for row in rows if row["source_offset"] is None]
sizes = Sizes(objects).of([*alone, *(uri + "x" for uri in alone[:1])])
print(json.dumps({"digests": digests, "uri": rows[0]["uri"], "sizes": sizes}))
"""


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
    with HubServer(root) as server:
        yield server


def read(hub, place, column=""):
    hub.requests.clear()
    here = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**here, "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = run_python("-c", _READ, f"hf://datasets/{REPO}{place}", column, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def digests():
    return [sha256(data).hexdigest() for data in FILES.values()]


def test_tars_of_a_dataset_are_listed_once_and_read_in_few_requests(hub):
    told = read(hub, "/data/a-{0,1}.tar")
    assert list(told["digests"]) == [f"a-{number}.tar/{name}" for number in (0, 1) for name in FILES]
    assert list(told["digests"].values()) == 2 * digests()
    assert told["uri"] == f"hf://datasets/{REPO}/data/a-0.tar#00.mp4"
    assert hub.count("resolve") <= 2 * 6
    assert list(read(hub, "/data/*.tar")["digests"].values()) == 2 * digests()
    assert list(read(hub, "@main/data/a-1.tar")["digests"].values()) == digests()


def test_a_column_of_a_dataset_gives_its_rows(hub):
    told = read(hub, "/data/train.parquet", "video")
    assert list(told["digests"]) == list(FILES) and list(told["digests"].values()) == digests()
    assert hub.count("resolve") <= 10


def test_videos_of_a_dataset_are_files_like_others(hub):
    told = read(hub, "/videos")
    assert sorted(told["digests"].values()) == sorted(digests())
    assert "deep/01.mp4" in told["digests"] and told["sizes"][-1] == -1
    assert sorted(told["sizes"][:-1]) == sorted(map(len, FILES.values()))


def test_other_addresses_of_the_hub_are_refused(hub):
    with pytest.raises(UsageError, match="only local paths, s3:// and hf://datasets/ are read"):
        read_manifest("hf://spaces/a/b")
