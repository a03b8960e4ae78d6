"""Clusters of two nodes: the GPU on one of them and most CPUs on the other, or one CPU each."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import create_autospec

import pyarrow as pa
import pytest
import ray
from ray._private import state
from ray._private.node import Node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gstep.backbones import ModelSource, family_of
from jobs.benchmark.pipeline_job import SleepingSetup
from pipeline.errors import UsageError
from pipeline.inputs.discovery import Discovery
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.prune.config import PruneConfig
from pipeline.prune.decode_stage import DecodeSetup
from pipeline.prune.graph import build_graph
from pipeline.prune.resources import plan_resources
from pipeline.runner.cluster import cap_gpus, choose_device, is_worth_showing, sum_resources
from pipeline.storage.stores import LocalStore
from pipeline.video.sampling import Sampling
from tests.jobs.faults import tiny_videos
from tests.pipeline.rays import graph_of, growing_ray, ray_here, rows_of
from tests.waiting import wait_until

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
    assert (plan.decode.workers, plan.encode.workers, plan.encode.num_gpus) == (4, 1, 1)
    rows = rows_of(graph_of(40, plan, tmp_path))
    assert len(rows) == 40
    assert nodes_of("Encoder") == {gpu_node}
    assert nodes_of("Decoder") == {cpu_node}


def test_gpus_that_join_late_are_waited_for_and_at_most_so_many_are_counted():
    """--min-gpus; without it auto would take the CPUs, and says so."""
    said: list[str] = []
    with growing_ray({"num_cpus": 1, "num_gpus": 0}) as (add_node, _):
        settled = choose_device(PruneConfig(), "auto", said.append)
        assert settled == ("cpu", "float32") and "no GPU now" in said[0] and "--min-gpus" in said[0]
        assert choose_device(PruneConfig(), "bfloat16", said.append) == (
            "cpu",
            "bfloat16",
        )  # as the cache has it already
        assert "on CPUs in float32, " in said[0] and "on CPUs in bfloat16, " in said[1]
        choose_device(PruneConfig(device="cpu"), "auto", said.append)
        assert len(said) == 2
        with pytest.raises(UsageError, match="--min-gpus 2: the cluster has 0 GPUs after 1 s"):
            choose_device(PruneConfig(min_gpus=2, stall_timeout=1, decode_timeout=0.5), "auto", said.append)
        with ThreadPoolExecutor(1) as pool:  # nodes are added by the main thread alone
            settling = pool.submit(choose_device, PruneConfig(min_gpus=2, stall_timeout=300), "auto", said.append)
            wait_until(lambda: said[-1].endswith("waiting 300 s for 2"), "that it waits")
            add_node(num_cpus=1, num_gpus=2)
            assert settling.result() == ("cuda", "bfloat16")
        assert [sum_resources((), most)["GPU"] for most in (None, 1, 8)] == [2, 1, 2]
    assert "GPU" not in cap_gpus({"CPU": 4.0}, 2)
    for wrong in ({"max_gpus": 0}, {"min_gpus": 4, "max_gpus": 3}):
        with pytest.raises(UsageError, match="--max-gpus must be at least"):
            PruneConfig(**wrong)


def test_decoders_that_are_through_give_their_gpu_back_while_the_encoder_works(tmp_path):
    tiny_videos(tmp_path, 1)
    (path,) = tmp_path.glob("*.mp4")
    rows = [{"video_id": f"v{number}", "uri": str(path), "attempts": 1} for number in range(16)]
    source, free = ModelSource.resolve("tiny"), []
    decode = DecodeSetup(Sampling(num_frames=2), family_of(source).preprocessor())
    encode = SleepingSetup(source, "gstep", 0.25, device="cpu", work_s=0.5)
    plan = plan_resources(1, 1, len(rows), decode_on_gpus=True)
    plan = replace(plan, encode=replace(plan.encode, num_gpus=0.0))  # nvdec's decoders, and an encoder on the CPU
    with ray_here({"num_cpus": 1, "num_gpus": 1}):
        todo = pa.Table.from_pylist(rows, TODO_SCHEMA)
        graph = build_graph(Discovery.of(todo), decode, encode, plan, store=LocalStore(tmp_path), run_id="r")
        made = rows_of(graph, lambda: free.append(ray.available_resources().get("GPU", 0.0)), 0.2)
    assert len(made) == len(rows)
    assert min(free) < 1 == free[-1], free


def test_known_lines_of_rays_own_are_kept_in_its_folder_and_others_are_shown(tmp_path, monkeypatch, caplog):
    node = create_autospec(Node, instance=True)
    node.get_logs_dir_path.return_value = str(tmp_path)
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    logger = logging.getLogger("test_known_lines")
    logger.addFilter(is_worth_showing)
    for line in ("Unhandled error: ray::_StatsActor.update(): KeyError", "Unhandled error: something of a task's"):
        logger.error(line)
    assert caplog.messages == ["Unhandled error: something of a task's"]
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == "ERROR Unhandled error: ray::_StatsActor.update(): KeyError\n"
