"""A cluster that grows by demand: Ray's autoscaler with nodes that are processes of this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.util import get_node_ip_address

from pipeline.prune.resources import plan_resources
from pipeline.runner.cluster.connection import sum_resources
from pipeline.runner.progress import Progress, Speed
from pipeline.runner.watchdog import ClusterChanged, Growth
from tests.builders.clusters import end_plain
from tests.builders.runs import environment
from tests.waiting import wait_until

# Ray's provider of such nodes knows its head by this name.
HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
NODE = {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "min_workers": 0}
PROVIDER = {"type": "fake_multinode", "head_node_id": HEAD, "use_node_id_as_ip": True}
CONFIG = {
    "cluster_name": "grows",
    "max_workers": 4,
    "upscaling_speed": 10,
    "idle_timeout_minutes": 5,
    "available_node_types": {"ray.head.default": {**NODE, "max_workers": 0}, "more": {**NODE, "max_workers": 4}},
    "head_node_type": "ray.head.default",
    "file_mounts_sync_continuously": False,
    **{key: {} for key in ("auth", "docker", "file_mounts")},
    **{key: [] for key in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
    **{f"{where}_commands": [] for where in ("setup", "initialization", "head_setup", "worker_setup")},
    **{f"{node}_start_ray_commands": [] for node in ("head", "worker")},
}
BUSY = Progress(busy={"decode": 0.2, "encode": 0.99}, waiting={"decode": 10_000, "encode": 2, "write": 1})


@contextmanager
def held_port() -> Iterator[int]:
    """Find a port that the system gives to nobody else in this context; a server may listen at it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        held.bind(("", 0))
        yield held.getsockname()[1]


@pytest.fixture
def grows(tmp_path: Path):
    """Start a head with an autoscaler, and join it. The usual ports may be those of another head on this machine."""
    end_plain()
    with held_port() as port, held_port() as client_port:
        address = f"{get_node_ip_address()}:{port}"
        config = tmp_path / "grows.json"
        config.write_text(json.dumps({**CONFIG, "provider": {**PROVIDER, "gcs_address": address}}))
        ray_command = str(Path(sys.executable).with_name("ray"))
        start = [ray_command, "start", "--head", "--block", "--num-cpus=1", "--num-gpus=1", f"--port={port}"]
        start += [f"--ray-client-server-port={client_port}", "--dashboard-agent-listen-port=0"]
        head = subprocess.Popen(
            [*start, f"--autoscaling-config={config}", "--include-dashboard=false"],
            env=environment(
                RAY_FAKE_CLUSTER="1",
                RAY_enable_autoscaler_v2="0",
                RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD,
                AUTOSCALER_UPDATE_INTERVAL_S="1",
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until(lambda: answers(head, port), "the head")
            ray.init(address, logging_level="error", log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()


def answers(head: subprocess.Popen[bytes], port: int) -> bool:
    """Return whether the head answers by now: ``ray.init`` would end this process where it does not."""
    assert head.poll() is None
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_an_autoscaling_cluster_is_asked_for_gpus_which_a_new_plan_takes_in(grows):
    assert sum_resources(())["GPU"] == 1
    encoder = ray.remote(Encoder).options(num_cpus=0, num_gpus=1).remote()  # as the worker of a run holds it
    ray.get(encoder.here.remote())
    growth = Growth(plan_resources(1, 1, 10_000), max_gpus=2)

    def look() -> None:
        now = sum_resources((), 2)
        growth.look(BUSY, Speed(2.0, 10_000, 10.0), plan_resources(now["CPU"], now["GPU"], 10_000))

    look()
    ready, _ = ray.wait(growth._demand, timeout=120)
    assert ready and sum_resources(())["GPU"] == 2
    look()  # more may be joining
    with pytest.raises(ClusterChanged, match="nodes joined"):
        look()


class Encoder:
    def here(self) -> None: ...
