"""The same videos in every form, here and on a server that counts."""

from pathlib import Path

import pytest

from jobs.benchmark.pipeline.forms import corpus
from jobs.benchmark.pipeline.measure import make_videos, run_child
from jobs.benchmark.pipeline.work import COLUMN, FOLDER, JOB, TAR, TARS, Work
from pipeline.inputs.container import Asked
from pipeline.inputs.forms import Containers, spot_of
from pipeline.inputs.indexes import Indexing
from pipeline.inputs.manifest import read_manifest
from pipeline.storage.s3 import Objects


def work_of(tmp_path, form, on_s3=False):
    work = Work(JOB, 2, 0.0, 1, folder=str(tmp_path), videos=32, form=form, on_s3=on_s3)
    make_videos(work)
    return work


def contents(work, objects):
    """Name of a video -> its bytes, as the job reads them."""
    listed, found = read_manifest(work.named["videos"], (), objects, Indexing(Asked(work.named.get("column")))), {}
    with Containers(objects) as opened:
        for row in listed.to_pylist():
            parts: list[bytes] = []
            spot = spot_of(row["uri"], row["source_offset"], row["size"])
            if spot is None:
                parts = [Path(row["uri"]).read_bytes()]
            else:
                opened.fetch(spot, parts.append, 2**30)
            found[row["video_id"].rpartition("/")[2]] = b"".join(parts)
    return found


@pytest.fixture
def files(tmp_path):
    (tmp_path / "files").mkdir()
    work = work_of(tmp_path / "files", FOLDER)
    with corpus(work) as (variables, sent):
        assert variables == sent == {}
        return contents(work, Objects())


@pytest.mark.parametrize("form", [TAR, TARS, COLUMN])
def test_every_form_holds_the_same_videos(tmp_path, files, form):
    assert len(files) == 32 and {len(data) > 2**20 for data in files.values()} == {True}
    with corpus(work := work_of(tmp_path, form)):
        assert contents(work, Objects()) == files


def test_the_server_counts_requests_and_bytes(tmp_path, files):
    with corpus(work := work_of(tmp_path, TARS, on_s3=True)) as (variables, sent):
        assert sent == {}
        keys = {name: variables[name.upper()] for name in ("aws_access_key_id", "aws_secret_access_key")}
        objects = Objects(endpoint_url=variables["AWS_ENDPOINT_URL"], region_name="us-east-1", **keys)
        assert contents(work, objects) == files
        assert sent["LISTs"] == 1 and sent["GETs"] >= 4 and sent["sent MB"] > sum(map(len, files.values())) / 1e6
    assert not (tmp_path / TARS).exists()


@pytest.mark.slow
def test_the_job_runs_over_tars_on_a_server(tmp_path):
    work = Work(JOB, 2, 0.0, 1, nodes=1, folder=str(tmp_path), videos=40, form=TARS, on_s3=True)
    done = run_child(work)
    n_mb = 40 * (2**20) / 1e6
    assert done["GETs"] < 40 and 1.9 * n_mb < done["fetched MB"] < 2.1 * n_mb  # for the index, and the videos
    assert done["sent MB"] == pytest.approx(done["fetched MB"], rel=0.05)
