"""The checks of jobs.doctor, each with the fault that it is for."""

import time
import zipfile
from copy import copy
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from pipeline.doctor import nodes as node_checks
from pipeline.doctor.doctor import check_store, find_existing_store
from pipeline.doctor.finding import Finding, run_guarded
from pipeline.doctor.nodes import judge_nodes, measure_node, measure_nodes, run_on_each_node
from pipeline.doctor.speed import check_balance, check_decoding, read_first_videos
from pipeline.errors import UsageError
from pipeline.inputs.forms import FORMS
from pipeline.inputs.tar_and_zip import Tar
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import resolve_recipe
from pipeline.rows import VideoRecord, make_todo_row
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore
from tests.builders.archives import write_tar
from tests.builders.clips import sample
from tests.builders.clusters import ray_here

HERE = measure_node()


def wrong(findings):
    return {finding.name: finding for finding in findings if finding.state == "wrong"}


def test_nodes_that_agree_are_ok_and_others_are_named():
    """One with another version, a wrong clock, no answer, little shared memory, or little memory."""
    alike = next(judge_nodes({"a": HERE, "b": HERE}, HERE))
    assert alike.state == "ok" and f"numpy {HERE.versions['numpy']}: the same on 2 nodes" in alike.says
    assert f"boto3 {HERE.versions['boto3']}" in alike.says.partition("not compared: ")[2]
    assert next(judge_nodes({}, HERE)) == Finding("versions", "unknown", "not compared: no node answered")
    assert not wrong(judge_nodes({"a": HERE, "b": HERE}, HERE))
    nodes = {
        "a": HERE._replace(skew_s=-3600.0, shm_free=2**28),
        "b": HERE._replace(versions={**HERE.versions, "av": "99.0"}),
        "c": Finding("node", "wrong", "it does not answer: gone", "look at it"),
        "d": HERE._replace(memory=2**32, shm_free=2**32),
    }
    findings = {finding.name: finding for finding in judge_nodes(nodes, HERE)}
    assert wrong(findings.values()).keys() == {"versions", "clock (a)", "node (c)"}
    assert f"av 99.0 on b, {HERE.versions['av']} here" in findings["versions"].says and findings["versions"].remedy
    assert "-3600.0 s" in findings["clock (a)"].says and "gone" in findings["node (c)"].says
    assert findings["memory (a)"].state == "slow" and "free /dev/shm 0.2 GiB" in findings["memory (a)"].says
    assert findings["memory (d)"].state == "slow" and "memory 4.0 GiB" in findings["memory (d)"].says


def test_a_node_that_is_lost_after_it_answered_costs_no_other_nodes_findings(monkeypatch):
    hosts = [("a", "id-a", {}), ("b", "id-b", {})]
    monkeypatch.setattr(node_checks, "run_on_each_node", lambda work: {"a": HERE, "b": HERE})
    monkeypatch.setattr(node_checks, "iter_alive_nodes", lambda: iter(hosts))
    monkeypatch.setattr(node_checks, "make_node_task", lambda node: SimpleNamespace(remote=lambda work: node))

    def answer(node: str, timeout: float) -> float:
        if node == "id-a":
            raise ray.exceptions.GetTimeoutError("a is silent")
        return time.time()

    monkeypatch.setattr(ray, "get", answer)
    nodes = measure_nodes()
    assert nodes["b"] == HERE and "it does not answer: a is silent" in nodes["a"].says


def test_a_container_has_the_cores_and_the_memory_of_its_limit(monkeypatch):
    """As Ray counts them."""
    monkeypatch.setattr("ray._private.utils._get_docker_cpus", lambda: 1.0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**20))
    node = measure_node()
    assert (node.cores, node.memory) == (1, 2**20)


@pytest.mark.slow
def test_work_that_fails_on_a_node_is_a_finding():
    with ray_here({"num_cpus": 2}):
        (finding,) = run_on_each_node(lambda: 1 // 0).values()
    assert finding.state == "wrong" and "ZeroDivisionError: integer division" in finding.says and finding.remedy


def test_a_store_that_works_is_left_as_it_was_and_a_failure_is_told_with_its_reason(tmp_path):
    (finding,) = check_store(find_existing_store(LocalStore(tmp_path / "not" / "yet")))
    assert finding.state in {"ok", "slow"} and "read in part and deleted" in finding.says  # slow: a busy disk
    assert not list(tmp_path.iterdir())
    (finding,) = wrong(check_store(copy(LocalStore(tmp_path / "gone")))).values()  # as a node has it
    assert "No such file or directory" in finding.says and finding.remedy


LIES = {  # a method of the store, what it does, and what is said
    "compute_age": (lambda real, *name: real(*name) + timedelta(hours=1), "its clock is wrong: a file just put is 36"),
    "list_files": (lambda real, *name: [], "is not in the listing"),
    "read": (lambda real, *name: bytes([real(*name)[0] ^ 1]) + real(*name)[1:], "what is read is not what was put"),
    "delete": (lambda real, *name: None, "a file that was deleted is still there"),
}


@pytest.mark.parametrize("method", LIES)
def test_a_store_that_lies_is_wrong(method, monkeypatch, tmp_path):
    (lie, says), store = LIES[method], LocalStore(tmp_path)
    monkeypatch.setattr(store, method, partial(lie, getattr(store, method)))
    assert says in wrong(check_store(store))["store"].says


def test_decoding_costs_what_the_run_would_record_and_names_what_fails():
    setup = resolve_recipe(PruneConfig(num_frames=4)).make_decode_setup()
    files = {"good": "bikes.mp4", "bad": "none.mp4", "worse": "nothing.mp4"}
    rows = [make_todo_row(name, str(sample("bikes.mp4").with_name(file))) for name, file in files.items()]
    findings, seconds = check_decoding(setup, rows)
    says = {finding.state: finding.says for finding in findings}
    assert seconds > 0 and f"{seconds:.3f} core-seconds" in says["ok"] and len(findings) == 2
    assert "1 h264" in says["ok"] and "2 of 3 videos: io, e.g. bad" in says["wrong"]


def test_the_videos_are_those_of_the_run_and_no_more_containers_are_opened_than_hold_them(tmp_path, monkeypatch):
    opened = []

    class Noting(Tar):
        def __init__(self, file):
            opened.append(file.uri)
            super().__init__(file)

    monkeypatch.setitem(FORMS, ".tar", Noting)
    for name in "abcd":
        write_tar(tmp_path / f"{name}.tar", {f"{number}.mp4": b"x" for number in range(2)})
    (tmp_path / "d.tar").write_bytes(b"never opened")
    pq.write_table(pa.table({"film": [b"x", b"y"]}), tmp_path / "e.parquet")

    def read(name: str, **options) -> list[VideoRecord]:
        return read_first_videos(PruneConfig(videos=[f"{tmp_path}/{name}"], **options), Objects(), 3)

    assert [row["video_id"] for row in read("*.tar")] == ["a.tar/0.mp4", "a.tar/1.mp4", "b.tar/0.mp4"]
    assert opened == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    found = [(row["video_id"], row["attempts"]) for row in read("e.parquet", column="film")]
    assert found == [("e.parquet/0", 1), ("e.parquet/1", 1)]
    with zipfile.ZipFile(tmp_path / "f.zip", "w") as file:
        file.writestr("xx.mp4", b"x")
    (tmp_path / "f.zip").write_bytes((tmp_path / "f.zip").read_bytes().replace(b"xx.mp4", "视.mp4".encode("gbk")))
    (row,) = read("f.zip", zip_encoding="gbk")
    assert row["video_id"] == "f.zip/视.mp4"
    write_tar(tmp_path / "empty.tar", {"a.txt": b"x"})
    for name, why in ("e.parquet", "needs a video_id and a uri"), ("empty.tar", "holds a video"):
        with pytest.raises(UsageError, match=why):
            read(name)


@pytest.mark.parametrize(
    ("decode_s", "encode_s", "cores", "gpus", "state", "says"),
    [
        (2.0, 0.1, 96, 8, "slow", "needs 20.0 decode cores a GPU; the cluster has 12.0"),
        (1.0, 0.1, 96, 8, "ok", "needs 10.0"),
        (1.0, 0.1, 2, 0, "unknown", "without a GPU"),
        (None, 0.1, 2, 1, "unknown", "needs a video"),
    ],
)
def test_cores_are_held_against_what_the_encoders_want(decode_s, encode_s, cores, gpus, state, says):
    found = check_balance(decode_s, encode_s, cores, gpus)
    assert found.state == state and says in found.says


def test_a_check_that_fails_itself_is_a_finding_behind_what_it_found_before():
    def broken():
        yield Finding("first", "ok", "")
        raise OSError("no such device")

    first, failed = run_guarded("gpu", broken)
    assert first.name == "first" and failed.state == "wrong" and failed.says == "OSError: no such device"
