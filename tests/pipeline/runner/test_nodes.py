"""What a run says of its nodes, which of their disks it takes for full, and which nodes a second pass leaves out."""

import pytest
import ray

from pipeline.prune.resources import plan_resources
from pipeline.runner.cluster import find_failing_nodes
from pipeline.runner.heartbeats import NodeTally, WorkerReport
from pipeline.runner.nodes import NodeLog, RayDisk, find_full_disks
from tests.pipeline.rays import PLAIN, ray_here

GIB = 2**30


def node(name: str, cpus: float = 4.0) -> dict[str, object]:
    return {"NodeID": name * 8, "NodeManagerHostname": "host", "Alive": True, "Resources": {"CPU": cpus}}


def test_nodes_that_are_lost_replaced_or_new_are_told_once_with_their_workers(monkeypatch):
    said, nodes, plan = list[str](), [node("a"), node("b")], plan_resources(8, 0, 4000)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    log = NodeLog(said.append)
    log.look(WorkerReport(workers={"a" * 8: {"decode": 4}}), plan)  # others are still starting
    assert said == []
    report = WorkerReport(workers={"a" * 8: {"decode": 4}, "b" * 8: {"decode": 4, "encode": 2, "write": 1}})
    log.look(report, plan)
    log.look(report, plan)
    assert said == ["workers of each node: host aaaaaa: 4 to decode; host bbbbbb: 4 to decode, 2 to encode"]
    nodes = [node("a")]
    log.look(report, plan)
    assert said[1:] == [
        "note: node host bbbbbb was lost (4 to decode, 2 to encode, 1 to write). The videos that it had in hand run "
        "again on the other nodes"
    ]
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
        assert find_full_disks(spilling_failed=spilling_failed) == {}


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
    tallies = {
        "decode": {"a": NodeTally("h1", 50, 0), "b": NodeTally("h2", 50, 0)},
        "encode": {"a": NodeTally("h1", 60, 0), "b": NodeTally("h2", 10, 30)},
    }
    assert find_failing_nodes(tallies) == {"b": "h2"}
