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
from pipeline.inputs.container import ContainerOptions
from pipeline.inputs.forms import Containers, find_member
from pipeline.inputs.indexes import Indexing
from pipeline.inputs.manifest import read_manifest
from pipeline.storage.hub import reach
from pipeline.storage.s3 import Objects
from pipeline.video.source import Sizes

def read(place, column):
    objects = Objects()
    rows = read_manifest(place, (), objects, Indexing(ContainerOptions(column or None))).to_pylist()
    digests = {}
    members = [find_member(row["uri"], row["source_offset"], row["size"]) for row in rows]
    with Containers(objects, members) as opened:
        for row, member in zip(rows, members):
            parts = []
            if member is None:
                parts.append(reach(row["uri"], objects).read(row["uri"]))
            else:
                opened.fetch(member, parts.append, 2**30)
            digests[row["video_id"]] = hashlib.sha256(b"".join(parts)).hexdigest()
    alone = [row["uri"] for row in rows if row["source_offset"] is None]
    sizes = Sizes(objects).of([*alone, *(uri + "x" for uri in alone[:1])])
    return {"digests": digests, "uri": rows[0]["uri"], "sizes": sizes}

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
    with HubServer(root) as server:
        yield server


def test_a_dataset_is_listed_and_read_in_few_requests(hub):
    """Tars by several patterns and at a revision, a column of a Parquet file, and a folder of videos."""
    places = ["/data/a-{0,1}.tar", "/data/*.tar", "@main/data/a-1.tar", "/data/train.parquet", "/videos"]
    asked = [(f"hf://datasets/{REPO}{place}", "video" * place.endswith("parquet")) for place in places]
    here = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**here, "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = run_python("-c", _READ, json.dumps(asked), env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    braces, star, revision, column, folder = json.loads(done.stdout.splitlines()[-1])
    assert list(braces["digests"]) == [f"a-{number}.tar/{name}" for number in (0, 1) for name in FILES]
    assert list(braces["digests"].values()) == list(star["digests"].values()) == 2 * DIGESTS
    assert braces["uri"] == f"hf://datasets/{REPO}/data/a-0.tar#00.mp4"
    assert list(revision["digests"].values()) == list(column["digests"].values()) == DIGESTS
    assert list(column["digests"]) == list(FILES)
    assert sorted(folder["digests"].values()) == sorted(DIGESTS) and "deep/01.mp4" in folder["digests"]
    assert folder["sizes"][-1] == -1 and sorted(folder["sizes"][:-1]) == sorted(map(len, FILES.values()))
    assert hub.count("resolve") <= 40


def test_other_addresses_of_the_hub_are_refused(hub):
    with pytest.raises(UsageError, match="only local paths, s3:// and hf://datasets/ are read"):
        read_manifest("hf://spaces/a/b")
