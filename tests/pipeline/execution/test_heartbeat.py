"""What every worker is doing: a statement replaces the one before, and nobody depends on the actor."""

from pipeline.execution.heartbeat import Heartbeats
from pipeline.prune.graph import PRUNING

STAGES = tuple(PRUNING.stages)


def test_a_statement_replaces_the_one_before():
    heartbeats = Heartbeats(STAGES)
    heartbeats.state("decode", "a", ["v1"], 0, 1)
    heartbeats.state("decode", "a", ["v2"], 0, 1)  # the end of v1 was lost: its actor died
    heartbeats.state("decode", "b", ["v3"], 0, 1)
    heartbeats.state("decode", "b", [], 1, 1)
    reading = heartbeats.read()
    assert reading.inside == {"decode": ["v2"], "encode": [], "write": []}
    assert (reading.left["decode"], reading.moves) == (1, 4)
