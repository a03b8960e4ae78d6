"""The last lines of processes that died, on nodes that stay and on nodes that are lost with their files."""

import os
import signal
import sys

import pytest
import ray

from pipeline.runner.monitor import WorkerLogs
from pipeline.runner.worker_reports import CrashedProcess, Worker
from tests.builders.clusters import ray_here
from tests.builders.runs import family
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@ray.remote(num_cpus=1, max_restarts=0)
class Talker:
    """An actor that says who it is."""

    def talk(self) -> tuple[str, int]:
        print(f"{os.getpid()} is here", file=sys.stderr, flush=True)
        print(f"{os.getpid()} leaves", flush=True)
        return ray.get_runtime_context().get_node_id(), os.getpid()


def test_the_last_lines_of_the_dead_and_of_nobody_else():
    node = {"num_cpus": 1, "include_log_monitor": True}
    saved: list[bytes] = []
    with ray_here(node, node) as (_, second):
        logs = WorkerLogs(saved.append)
        logs.start()
        talkers = [Talker.remote(), Talker.remote()]
        (lost, kept) = sorted(ray.get([one.talk.remote() for one in talkers]), key=lambda one: one[0] != second)
        all_said = {f"{pid} {does}" for _, pid in (lost, kept) for does in ("is here", "leaves")}
        # What goes to stderr and to stdout is in two files, and comes one after the other.
        wait_until(lambda: all_said <= set().union(*logs._lines.values()), lambda: f"lines of both: {logs._lines}")
        (raylet,) = [pid for pid, title in family(os.getpid()).items() if f"--node_id={second}" in title]
        os.kill(raylet, signal.SIGKILL)
        wait_until(lambda: not all(node["Alive"] for node in ray.nodes()), "Ray notices the loss", 60)
        crashed = [CrashedProcess("encode", Worker("w", "h", *lost), ("v1", "v2"))]
        logs.add(crashed)
        logs.add(crashed)  # every report names them
        logs.close()
        assert logs.n_crashed == 1 and len(saved) == 1
        late = CrashedProcess("encode", Worker("w", "h", *kept), ())
        logs.add([late])  # as where the driver stood still until the listener had ended
        logs.close()
        assert len(saved) == 2 and f"(process {kept[1]}, node" in saved.pop().decode()
    text = saved[0].decode()
    assert f"a worker of encode on h (process {lost[1]}, node {second}) crashed with v1, v2 in hand" in text
    assert "its node was lost: " in text
    assert f"    {lost[1]} is here" in text and f"    {lost[1]} leaves" in text
    assert f"{kept[1]} is here" not in text
