"""What a run says of its nodes, which of their disks it takes for full, and which nodes a second pass leaves out."""

from functools import partial

import pytest
import ray
from ray._private import utils

from pipeline.errors import UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.resources import plan_resources
from pipeline.runner.cluster import connection, disks
from pipeline.runner.cluster.connection import choose_device, find_failing_nodes
from pipeline.runner.cluster.disks import DiskSearch, RayDisk, find_full_disks
from pipeline.runner.cluster.nodes import NodeLog, count_cores, iter_alive_nodes, read_fraction_of_cpu
from pipeline.runner.worker_reports import NodeTally, WorkerReport
from tests.builders.clusters import PLAIN, ray_here

GIB = 2**30

#: Files of a container's limit, by the version of the kernel's control groups, and the CPUs that they allow.
LIMITS = [
    ({"cpu_quota_file_name": "50000", "cpu_period_file_name": "100000"}, 0.5),
    ({"cpu_max_file_name": "50000 100000"}, 0.5),
    ({"cpu_max_file_name": "99999 100000"}, 0.99999),
    ({"cpu_max_file_name": "100000 100000"}, None),
    ({"cpu_max_file_name": "150000 100000"}, None),
    ({"cpu_max_file_name": "max 100000"}, None),
]


@pytest.mark.parametrize(("files", "fraction"), LIMITS)
def test_a_container_with_less_than_one_cpu_counts_as_one_cpu(tmp_path, monkeypatch, caplog, files, fraction):
    monkeypatch.setattr(connection, "make_ray_folder", lambda: tmp_path)  # whose path is too long for sockets
    names = "cpu_quota_file_name", "cpu_period_file_name", "cpu_max_file_name", "cpuset_file_name"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: str(tmp_path / name) for name in names}
    monkeypatch.setattr(utils, "_get_docker_cpus", partial(utils._get_docker_cpus, **places))
    said = list[str]()
    options = connection._make_start_options(said.append)
    assert (options.get("num_cpus"), read_fraction_of_cpu()) == (1 if fraction else None, fraction)
    assert count_cores() >= 1 and caplog.messages == []
    about = f"note: this container may use {fraction:g} CPUs, " if fraction else ""
    assert [line for line in said if not line.startswith(about)] == [] and len(said) == bool(fraction)


def test_a_cluster_without_cpus_is_named_with_what_may_have_caused_it(monkeypatch):
    monkeypatch.setattr(connection, "connect", lambda say: {})
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(UsageError, match=r"container may use less than one CPU: give it one, or .* --num-cpus=1"):
        choose_device(PruneConfig(), "auto", print)


def test_the_only_gpu_of_a_cluster_is_used_without_a_note(monkeypatch):
    monkeypatch.setattr(connection, "connect", lambda say: {})
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    said: list[str] = []
    assert choose_device(PruneConfig(), "auto", said.append) == ("cuda", "bfloat16") and said == []


def node(name: str, cpus: float = 4.0) -> dict[str, object]:
    return {"NodeID": name * 8, "NodeManagerHostname": "host", "Alive": True, "Resources": {"CPU": cpus}}


def test_nodes_that_are_lost_replaced_or_new_are_told_once_with_their_workers(monkeypatch):
    said, nodes, plan = list[str](), [node("a"), node("b")], plan_resources(8, 0, 4000)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    log = NodeLog(said.append)
    for starting in ({"a" * 8: {"decode": 4}}, {"a" * 8: {"decode": 4}, "b" * 8: {"decode": 4, "encode": 1}}):
        log.look(WorkerReport(workers=starting), plan)  # others are still starting
    assert said == []
    report = WorkerReport(workers={"a" * 8: {"decode": 4}, "b" * 8: {"decode": 4, "encode": 2, "write": 1}})
    log.look(report, plan)
    log.look(report, plan)
    assert said == ["workers of each node: host aaaaaa: 4 to decode; host bbbbbb: 4 to decode, 2 to encode"]
    nodes = [node("a")]
    log.look(report, plan)
    (lost,) = said[1:]
    assert "host bbbbbb was lost (4 to decode, 2 to encode, 1 to write)" in lost and "on the other nodes" in lost
    nodes = [node("a"), node("c"), node("d", 2)]
    log.look(report, plan)
    nodes = nodes[::-1]
    log.look(report, plan)
    in_place, new = sorted(said[2:], key=lambda line: " in place of " not in line)
    assert in_place.endswith(" in place of host bbbbbb. Workers that wait for a node start there")
    assert new.endswith(" and has no workers yet. Unfinished items are rescheduled if that saves time")
    assert {line.split(" joined ")[0] for line in said[2:]} == {"note: node host cccccc", "note: node host dddddd"}


def test_a_disk_takes_no_more_than_up_to_rays_limit():
    assert RayDisk("/t", 10 * GIB, 100 * GIB, 0.95).writable_bytes == 5 * GIB
    assert RayDisk("/t", 4 * GIB, 100 * GIB, 0.95).writable_bytes == 0
    assert str(RayDisk("/t", 4 * GIB, 100 * GIB, 0.95)) == "/t, 96% full"


@pytest.mark.slow
@pytest.mark.parametrize("spilling_failed", [False, True])
def test_a_disk_that_takes_what_the_object_store_holds_is_not_full(spilling_failed):
    """Full ones end or shrink a run in the tests of jobs."""
    with ray_here(*PLAIN):
        assert find_full_disks(spilling_failed=spilling_failed) == DiskSearch({}, {})


@pytest.mark.slow
def test_a_node_that_starts_no_process_is_named_and_its_full_disk_by_what_workers_reported(monkeypatch):
    monkeypatch.setattr(disks, "_ANSWER_S", 0.0)
    with ray_here(*PLAIN) as (node,):
        (name,) = [name for name, _, _ in iter_alive_nodes()]
        assert find_full_disks() == DiskSearch({}, {node: name})
        spilled = find_full_disks(reported={node: "/spill, 97% full"})
        assert spilled == DiskSearch({node: f"{name} (/spill, 97% full)"}, {})
        monkeypatch.setattr(RayDisk, "describe_full", lambda: "/ray, 99% full")  # of the driver's own node
        assert find_full_disks() == DiskSearch({node: f"{name} (/ray, 99% full)"}, {})
        assert find_full_disks({node}) == DiskSearch({}, {})


@pytest.mark.parametrize(
    ("decoded", "left_out"),
    [
        ({}, set()),
        ({"a": (0, 30), "b": (45, 0), "c": (45, 0)}, {"a"}),
        ({"a": (0, 30), "b": (44, 1), "c": (45, 0)}, {"a"}),  # b met a file that nobody has
        ({"a": (0, 8), "b": (40, 4), "c": (0, 8)}, {"a", "c"}),
        ({"a": (10, 2), "b": (20, 4)}, set()),  # alike: none does better
        ({"a": (0, 9)}, set()),
        ({"a": (0, 9), "b": (0, 3)}, set()),
    ],
)
def test_nodes_that_fail_more_often_than_all_together_are_left_out(decoded, left_out):
    tallies = {"decode": {node: NodeTally(f"host-{node}", *counts) for node, counts in decoded.items()}, "encode": {}}
    assert find_failing_nodes(tallies) == {node: f"host-{node}" for node in left_out}


def test_a_stage_that_does_well_hides_no_other():
    def tallies(*nodes: tuple[int, int]) -> dict[str, NodeTally]:
        return {f"n{number}": NodeTally(f"h{number}", *counts) for number, counts in enumerate(nodes)}

    found = find_failing_nodes({"decode": tallies((50, 0), (50, 0)), "encode": tallies((60, 0), (10, 30))})
    assert found == {"n1": "h1"}
