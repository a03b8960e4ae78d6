"""Clusters of two nodes: the GPU on one of them and most CPUs on the other, or one CPU each."""

import pytest
import ray
from ray._private import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.execution.stages import run_graph
from pipeline.prune.graph import plan_resources
from tests.pipeline.rays import graph_of, ray_here

pytestmark = pytest.mark.slow


@pytest.fixture
def two_nodes():
    """(GPU node, CPU node), by their ids."""
    with ray_here({"num_cpus": 1, "num_gpus": 1}, {"num_cpus": 4, "num_gpus": 0}) as nodes:
        yield nodes


@ray.remote(num_cpus=1)
class Squatter:
    def ready(self) -> None:
        pass


def nodes_of(title: str) -> set[str]:
    """The nodes on which actors of this class ran."""
    return {actor["Address"]["NodeID"] for actor in state.actors().values() if title in actor["ActorClassName"]}


def test_an_encoder_starts_where_decoders_hold_every_cpu_of_the_gpu_node(two_nodes, tmp_path):
    gpu_node, cpu_node = two_nodes
    squatter = Squatter.options(scheduling_strategy=NodeAffinitySchedulingStrategy(gpu_node, soft=False)).remote()
    ray.get(squatter.ready.remote())
    plan = plan_resources(4, 1, 40)
    assert (plan.decode.workers, plan.encode.workers, plan.encode.num_gpus) == (3, 1, 1)
    rows = [row for shard in run_graph(graph_of(40, plan, tmp_path)) for row in shard.to_pylist()]
    assert len(rows) == 40
    assert nodes_of("Encoder") == {gpu_node}
    assert nodes_of("Decoder") == {cpu_node}


def test_two_nodes_of_one_cpu_each_leave_room_for_the_writers(tmp_path):
    plan = plan_resources(2, 0, 16)
    with ray_here({"num_cpus": 1}, {"num_cpus": 1}) as nodes:
        rows = [row for shard in run_graph(graph_of(16, plan, tmp_path)) for row in shard.to_pylist()]
        assert len(rows) == 16
        assert nodes_of("Encoder") | nodes_of("Decoder") == set(nodes)
