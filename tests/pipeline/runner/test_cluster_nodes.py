"""Which nodes a second pass leaves out."""

import pytest

from pipeline.runner.cluster import find_failing_nodes
from pipeline.runner.heartbeats import NodeTally


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
