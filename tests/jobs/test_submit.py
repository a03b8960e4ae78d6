"""The job on a real cluster: two nodes, a job server, and the command line that submits, stops and goes on."""

import json
import secrets
import shlex
import shutil
import subprocess
import time
import urllib.error
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from pipeline import TokenCache
from pipeline.storage.stores import LocalStore
from tests.builders.clusters import Cluster, Ended
from tests.builders.runs import clips, committed
from tests.jobs.faults import files
from tests.jobs.hostile import let_through
from tests.paths import ROOT
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SHORT = ("--num-frames", "2", "--log-interval", "1", "--encode-workers", "1")
TOKEN = secrets.token_hex(32)
PRUNE = ("python", "-m", "jobs.prune")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """What a fresh clone holds, and files too big to upload, some under names that no file of ours knows."""
    folder = tmp_path_factory.mktemp("clone") / "checkout"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.split("\0")[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for big in ("cache/big", "my-cache/tokens/a.parquet", "videos/a.mp4", ".venv/lib/libtorch_cuda.so", "shard-0.tar"):
        (folder / big).parent.mkdir(parents=True, exist_ok=True)
        with (folder / big).open("wb") as file:
            file.truncate(600 * 2**20)
    return folder


@pytest.fixture(scope="module")
def cluster():
    # Ray kills a job that has not ended so long after its stop; by default that is 3 s, too few where cores are busy.
    waits = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
    with Cluster(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN, **waits) as cluster:
        cluster.add_node()
        yield cluster


@pytest.fixture(scope="module")
def refused(cluster, checkout) -> Ended:
    """A job as a user submits it, who named no --out: that is ./cache, and no place in a job."""
    options = ("--address", cluster.address, "--working-dir", ".", "--submission-id", "refused")
    return cluster.ray("job", "submit", *options, "--", *PRUNE, *SHORT, cwd=checkout)


@pytest.fixture
def submit(cluster, refused):
    """Begin ``python -m jobs.prune <argv>`` in the same checkout, as job ``name``."""

    def submit(name: str, *argv: str) -> None:
        job = {"entrypoint": shlex.join([*PRUNE, *argv, *SHORT]), "submission_id": name}
        cluster.get("/api/jobs/", {**job, "runtime_env": cluster.info("refused")["runtime_env"]})

    return submit


def run_records(cache: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_text()) for file in sorted((cache / "runs").iterdir())]


def test_a_refusal_is_a_failed_job_with_exit_code_2_and_who_lacks_the_token_gets_no_job_run(cluster, refused):
    assert refused.returncode == 1 and cluster.info("refused")["driver_exit_code"] == 2, refused.stdout
    assert "error: --out cache: in this Ray job a relative path" in refused.stdout
    with pytest.raises(urllib.error.HTTPError, match="Unauthorized"):  # all other requests here have it
        cluster.get("/api/jobs/", {"entrypoint": "true"}, token="")


def test_stopped_half_way_and_submitted_again_both_nodes_give_every_id_once(cluster, submit, tmp_path):
    """The decoders let three videos through, and then no other until the second job has workers on both nodes."""
    ids = [f"{name}.mp4" for name in "abcdefghijklmnopqrstuvwx"]  # more than two decoders take, which may start first
    for name in ids:
        shutil.copy(clips()[1], tmp_path / name)
    cache = tmp_path / "c"
    argv = [str(tmp_path), "--out", str(cache), "--decode-timeout", "600"]
    argv += ["--decoder", "tests.jobs.hostile:StuckDecoder"]
    let_through(tmp_path, 3)
    submit("first", *argv, "--decode-workers", "1")

    def check_running(name: str) -> None:
        assert cluster.info(name)["status"] in {"PENDING", "RUNNING"}, cluster.logs(name)
        time.sleep(0.5)  # a look is a request or two, which the head answers instead of the job

    two = "two shards of the first job: "
    first = partial(check_running, "first")
    wait_until(lambda: len(files(cache, "videos")) >= 2, lambda: two + cluster.logs("first"), meanwhile=first)

    cluster.get("/api/jobs/first/stop", {})
    assert cluster.wait_for("first")["status"] == "STOPPED"
    assert "Rerun the same command to resume" in cluster.logs("first")
    assert [record["status"] for record in run_records(cache)] == ["cancelled"]
    half = TokenCache(cache)
    assert 2 <= len(half) < len(ids)
    assert all(len(half.get(v).tokens) for v in half.video_ids)

    (tmp_path / "text.mp4").write_text("no video" * 2**20)  # 8 MiB: a decoder for each 4 MiB, so one on each node
    submit("second", *argv)

    def nodes() -> set[str]:
        job = cluster.info("second")["job_id"]
        actors = cluster.get("/api/v0/actors?detail=1")["data"]["result"]["result"]
        ours = (actor for actor in actors if job and actor["job_id"] == job and actor["state"] == "ALIVE")
        return {actor["node_id"] for actor in ours if actor["class_name"].startswith("MapWorker")}

    second = partial(check_running, "second")
    wait_until(lambda: len(nodes()) == 2, lambda: "workers on both nodes: " + cluster.logs("second"), meanwhile=second)
    let_through(tmp_path, 99)
    assert cluster.wait_for("second")["status"] == "SUCCEEDED", cluster.logs("second")
    said, n_left = cluster.logs("second"), 25 - len(half)
    assert f"{len(half)} of 25 videos are in the cache already" in said, said
    assert f"0/{n_left} videos" in said and f"{n_left}/{n_left} videos, 1 failed" in said, said
    assert "24 ok, 1 failed, 0 without a row" in said, said
    assert Counter(committed(LocalStore(cache))) == Counter([*ids, "text.mp4"])
    assert TokenCache(cache).video_ids == ids
    record = run_records(cache)[-1]
    assert (record["status"], record["resources"]["cluster"]["CPU"]) == ("finished", 4)
