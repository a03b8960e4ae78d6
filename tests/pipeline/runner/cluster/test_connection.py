"""A cluster of two nodes: the GPUs on one of them, which joins later, and most CPUs on the other."""

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import create_autospec

import pytest
import ray
from ray._private import state
from ray._private.node import Node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.errors import UsageError
from pipeline.prune.config import PruneConfig
from pipeline.prune.encode_stage import EncodeSetup, VideoEncoder
from pipeline.prune.resources import plan_resources
from pipeline.runner.cluster.connection import cap_gpus, choose_device, is_worth_showing, sum_resources
from tests.builders.clips import write_clip
from tests.builders.clusters import graph_of, growing_ray, hold_cpu, rows_of
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


class GpuCluster(NamedTuple):
    """A cluster of a node with CPUs, which a node with GPUs has joined; what ``choose_device`` gave, and its notes."""

    cpu_node: str
    gpu_node: str
    without_gpus: list[tuple[str, str]]
    waited: tuple[str, str]
    notes: list[str]


@pytest.fixture(scope="module")
def gpu_cluster():
    notes: list[str] = []
    with growing_ray({"num_cpus": 2, "num_gpus": 0}) as (add_node, nodes):
        requests = (PruneConfig(), "auto"), (PruneConfig(), "bfloat16"), (PruneConfig(device="cpu"), "auto")
        without_gpus = [choose_device(*options, notes.append) for options in requests]
        with pytest.raises(UsageError, match=r"--min-gpus 2: the cluster has 0 GPUs after 0\.2 s"):
            choose_device(PruneConfig(min_gpus=2, stall_timeout=0.2, decode_timeout=0.1), "auto", notes.append)
        with ThreadPoolExecutor(1) as pool:  # nodes are added by the main thread alone
            waits = pool.submit(choose_device, PruneConfig(min_gpus=2, stall_timeout=300), "auto", notes.append)
            wait_until(lambda: notes[-1].endswith("waiting 300 s for 2"), "that it waits")
            gpu_node = add_node(num_cpus=1, num_gpus=2).node_id
            waited = waits.result()
        yield GpuCluster(nodes[0], gpu_node, without_gpus, waited, notes)


def test_gpus_that_join_late_are_waited_for_and_at_most_so_many_are_counted(gpu_cluster):
    """--min-gpus; without it auto takes the CPUs, and says so."""
    assert gpu_cluster.without_gpus == [("cpu", "float32"), ("cpu", "bfloat16"), ("cpu", "float32")]
    # --dtype bfloat16 is as the cache has it already. --device cpu asks for CPUs, which needs no note.
    in_float32, in_bfloat16, *others = gpu_cluster.notes
    assert "no GPU now" in in_float32 and "--min-gpus" in in_float32 and "on CPUs in float32, " in in_float32
    assert "on CPUs in bfloat16, " in in_bfloat16 and not any("on CPUs" in note for note in others)
    assert gpu_cluster.waited == ("cuda", "bfloat16")
    assert [sum_resources((), most)["GPU"] for most in (None, 1, 8)] == [2, 1, 2]
    assert "GPU" not in cap_gpus({"CPU": 4.0}, 2)
    for wrong in ({"max_gpus": 0}, {"min_gpus": 4, "max_gpus": 3}):
        with pytest.raises(UsageError, match="--max-gpus must be at least"):
            PruneConfig(**wrong)


def test_an_encoder_starts_where_no_cpu_of_the_gpu_node_is_free(gpu_cluster, tmp_path):
    before = state.actors().keys()
    plan = plan_resources(2, 1, 8)
    assert (plan.decode.workers, plan.encode.workers, plan.encode.num_gpus) == (2, 1, 1)
    with hold_cpu(scheduling_strategy=NodeAffinitySchedulingStrategy(gpu_cluster.gpu_node, soft=False)):
        rows = rows_of(graph_of(8, plan, tmp_path))
    assert len(rows) == 8
    actors = [actor for name, actor in state.actors().items() if name not in before]
    places = {(actor["ActorClassName"], actor["Address"]["NodeID"]) for actor in actors}
    assert {node for title, node in places if "Encoder" in title} == {gpu_cluster.gpu_node}
    assert {node for title, node in places if "Decoder" in title} == {gpu_cluster.cpu_node}


@dataclass(frozen=True)
class WaitingSetup(EncodeSetup):
    """The settings of an encoder that keeps the last of 16 videos until the file ``sign`` is there."""

    sign: str = ""

    def encoder(self) -> VideoEncoder:
        return WaitingEncoder(self)


class WaitingEncoder(VideoEncoder):
    def encode_video_alone(self, record, frames):
        if record["video_id"] == "v15":
            wait_until(Path(self._setup.sign).exists, "the decoders' GPU to be given back")
        return super().encode_video_alone(record, frames)


def test_decoders_that_are_through_give_their_gpu_back_while_the_encoder_works(gpu_cluster, tmp_path):
    clip, given_back, free = str(write_clip(tmp_path / "v.mp4", count=2)), tmp_path / "given back", list[float]()

    def look() -> None:
        free.append(ray.available_resources().get("GPU", 0.0))
        if min(free) < free[-1] == 2:
            given_back.touch()

    plan = plan_resources(1, 1, 16, decode_on_gpus=True)
    plan = replace(plan, encode=replace(plan.encode, num_gpus=0.0))  # nvdec's decoders, and an encoder on the CPU
    graph = graph_of(16, plan, tmp_path, clip, encode_setup=partial(WaitingSetup, sign=str(given_back)))
    assert len(rows_of(graph, look, 0.2)) == 16
    assert given_back.exists(), free


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
