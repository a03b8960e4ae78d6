"""Ray clusters that live in the test's own process, graphs to run on them, and heartbeats that need none."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster

from gstep.backbones import ModelSource, family_of
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.prune.decode_stage import DecodeSetup
from pipeline.prune.encode_stage import EncodeSetup
from pipeline.prune.graph import build_graph
from pipeline.prune.resources import Resources
from pipeline.prune.todo import Todo
from pipeline.runner.cluster.connection import keep_ray_private
from pipeline.runner.cluster.prefork.server import SOCKET, fork_workers_from_server
from pipeline.runner.shards import TICK_S, RunGraph, ShardBundler
from pipeline.runner.stages import configure_ray_data
from pipeline.runner.watchdog import Fetcher
from pipeline.runner.worker_heartbeat import Heartbeat
from pipeline.runner.worker_reports import Heartbeats, Worker
from pipeline.storage.stores import LocalStore, Store
from pipeline.video.sampling import Sampling
from tests.builders.runs import environment, fork_server
from tests.paths import python_path
from tests.ports import free_ports
from tests.waiting import wait_until

#: The nodes of most tests. Their cluster stays until this process ends or another test has one of its own. Its workers
#: and those of all other clusters are forked from one server.
PLAIN = ({"num_cpus": 2},)
#: What Ray says of a node that is not up after 30 s, which no setting makes longer; a busy machine may need longer.
STARTS_SLOWLY = "timed out during startup"
_plain: list[tuple[ExitStack, list[str]]] = []


@contextmanager
def ray_here(*nodes: dict[str, Any]) -> Iterator[list[str]]:
    """Start a cluster of ``nodes`` (options of a node), connect this process to the first, and yield the nodes' ids."""
    if nodes == PLAIN:
        yield _plain_ids()
    else:
        with growing_ray(*nodes) as (_, ids):
            yield ids


def _plain_ids() -> list[str]:
    if not _plain:
        stack = ExitStack()
        with _environment_of_nodes():
            _plain.append((stack, stack.enter_context(_connected(*PLAIN))[1]))
        atexit.register(end_plain)
    return _plain[0][1]


def end_plain() -> None:
    """End the cluster that most tests share, where there is one."""
    while _plain:
        _plain.pop()[0].close()


@contextmanager
def growing_ray(*nodes: dict[str, Any]) -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """Start such a cluster, and yield a function that adds a node too."""
    end_plain()
    with _environment_of_nodes(), _connected(*nodes) as started:
        yield started


@contextmanager
def more_nodes(add_node: Callable[..., Any], *nodes: dict[str, Any]) -> Iterator[list[str]]:
    """Add nodes to a cluster for a while, and yield their ids. They may be lost meanwhile."""
    added = [add_node(**node) for node in nodes]
    ids = [node.node_id for node in added]
    try:
        yield ids
    finally:
        for node in added:
            node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        wait_until(
            lambda: not any(node["Alive"] for node in ray.nodes() if node["NodeID"] in ids),
            "the end of the added nodes",
        )


@contextmanager
def _environment_of_nodes() -> Iterator[None]:
    """Name the folders and the server that forks workers to the nodes that are started in this context."""
    private = {name: value for name, value in environment().items() if name.startswith(("RAY_", "HOME", "PYTHONPATH"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in private.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        (Path(private["RAY_TMPDIR"]) / "ray").mkdir()
        patch.setenv(SOCKET, fork_server())
        with fork_workers_from_server():
            yield


@contextmanager
def _connected(*nodes: dict[str, Any]) -> Iterator[tuple[Callable[..., Any], list[str]]]:
    """Start and join a cluster; yield a function that adds a node, and the nodes' ids.

    Its agents report metrics where the head has a ``_system_config``. One that starts slowly is started once more.
    """
    try:
        cluster, ids = _started(nodes)
    except Exception as error:
        if STARTS_SLOWLY not in str(error):
            raise
        cluster, ids = _started(nodes)
    add = partial(cluster.add_node, **_QUIET)
    try:
        ray.init(cluster.address, logging_level="error", log_to_driver=False)
        configure_ray_data()
        yield add, ids
    finally:
        ray.shutdown()
        cluster.shutdown()


_QUIET = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}


def _started(nodes: tuple[dict[str, Any], ...]) -> tuple[RayCluster, list[str]]:
    cluster = RayCluster()
    try:
        with nullcontext() if "_system_config" in nodes[0] else keep_ray_private():
            return cluster, [cluster.add_node(**{**_QUIET, **node}).node_id for node in nodes]
    except BaseException:
        cluster.shutdown()
        raise


@contextmanager
def hold_cpu(**options: Any) -> Iterator[None]:
    """Hold a CPU of the cluster, by an actor with these options."""
    holder = ray.remote(num_cpus=1)(_Holder).options(**options).remote()
    ray.get(holder.__ray_ready__.remote())
    try:
        yield
    finally:
        ray.kill(holder)


class _Holder:
    pass


def rows_of(
    flow: RunGraph,
    look: Callable[[], object] = lambda: None,
    every_s: float = 60,
    moved: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Run a graph to its end; returns the rows of its shards. ``moved`` is called for each of these."""
    rows, looked_at = list[dict[str, Any]](), time.monotonic()
    with ShardBundler(flow, age_s=60) as shards, Fetcher(flow.batches()) as batches:
        while not batches.is_at_end or shards.finish():
            if time.monotonic() - looked_at >= every_s:
                look()
                looked_at = time.monotonic()
            if (
                not batches.is_at_end
                and shards.has_room()
                and (batch := batches.next(min(every_s, TICK_S))) is not None
            ):
                shards.take(batch)
            if (shard := shards.next_written()) is not None:
                moved()
                rows += shard.rows.to_pylist()
                shards.acknowledge()
    return rows


def graph_of(
    n_videos: int,
    plan: Resources,
    out: Path | Store,
    path: str = "/v.mp4",
    frames: int = 2,
    decoder: str = "auto",
    encode_setup: Callable[..., EncodeSetup] = EncodeSetup,
    **more: Any,
) -> RunGraph:
    """Build the real graph over one file under ``n_videos`` names, with the tiny model on the CPU."""
    store = LocalStore(out) if isinstance(out, Path) else out
    source = ModelSource.resolve("tiny")
    rows = [{"video_id": f"v{i}", "uri": path, "attempts": 1} for i in range(n_videos)]
    todo = pa.Table.from_pylist(rows, schema=TODO_SCHEMA)
    decode = DecodeSetup(Sampling(num_frames=frames), family_of(source).preprocessor(), decoder)
    encode = encode_setup(source, "gstep", 0.25, device="cpu")
    return build_graph(Todo.of(todo), decode, encode, plan, store=store, run_id="r", **more)


def heartbeats_here(
    patch: pytest.MonkeyPatch, stages: tuple[str, ...], me: Worker
) -> tuple[Heartbeats, SimpleNamespace]:
    """Make the heartbeats' own class, and what their workers take for the handle of its actor.

    All workers of the test are ``me``. They would start Ray to ask for that, and for an answer.
    """
    patch.setattr(Heartbeat, "_me", me)
    patch.setattr(ray, "get", lambda answer, timeout: answer)
    actor = Heartbeats(stages)
    return actor, handle_of(
        *(getattr(actor, name) for name in ("state", "fail", "start", "find_crashes", "is_excluded"))
    )


def handle_of(*methods: Callable[..., object]) -> SimpleNamespace:
    """Make a handle of an actor whose methods, these, work here and now."""
    return SimpleNamespace(**{method.__name__: SimpleNamespace(remote=method) for method in methods})


RAY = Path(sys.executable).with_name("ray")
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class Cluster:
    """A head and, with ``add_node``, more nodes. Use it in a ``with`` block: leaving it ends every process.

    Attributes:
        address: of the job server, what ``ray job submit --address`` takes.
        gcs_address: of the cluster, what RAY_ADDRESS takes.
        folder: private and short-lived: the nodes' home and, below it, Ray's own files.
        environment: what the nodes, and with them every job, are started in.
    """

    def __init__(self, **environ: str) -> None:
        self.environment = environment(**environ)
        self.environment["PYTHONPATH"] = (
            python_path()
        )  # jobs must run the code they are submitted with, not this checkout
        self.environment["PATH"] = f"{RAY.parent}{os.pathsep}{self.environment['PATH']}"
        self.folder = Path(self.environment.pop("RAY_TMPDIR"))
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._commands: list[list[str]] = []  # those of the nodes that were started once
        self._gcs, dashboard, agent, client = free_ports(4)
        self.address = f"http://127.0.0.1:{dashboard}"
        self.gcs_address = f"127.0.0.1:{self._gcs}"
        self._start(
            "--head", f"--port={self._gcs}", f"--temp-dir={self.folder}", "--include-dashboard=true",
            f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
            agent=agent,
        )  # fmt: skip

    def __enter__(self) -> Cluster:
        try:
            self._wait_for_server()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(self) -> None:
        """Join one more node and wait until the cluster counts it."""
        (agent,) = free_ports(1)
        self._start(f"--address=127.0.0.1:{self._gcs}", agent=agent)
        self._wait_until(lambda: len(self._alive_nodes()) == len(self._nodes), "the node joins")

    def ray(self, *argv: str, cwd: Path) -> Ended:
        """Run ``ray <argv>`` as a user of the cluster does; stdout and stderr together."""
        return subprocess.run(
            [RAY, *argv], env=self.environment, cwd=cwd, timeout=240,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip

    def logs(self, job: str) -> str:
        """Return what a job has printed so far."""
        logs: str = self.get(f"/api/jobs/{job}/logs")["logs"]
        return logs

    def info(self, job: str) -> dict[str, Any]:
        """Return what the job server says of a job: status, message, driver_exit_code, driver_info and more."""
        found: dict[str, Any] = self.get(f"/api/jobs/{job}")
        return found

    def wait_for(self, job: str) -> dict[str, Any]:
        """Wait until the job has ended; returns its info."""
        self._wait_until(lambda: self.info(job)["status"] in ENDED, f"{job} ends")
        return self.info(job)

    def get(self, path: str, document: object = None, token: str | None = None) -> Any:
        """Fetch the JSON behind a path of the job server, or post a document there; by the cluster's token or another.

        It asks for what ``ray job`` asks for, which takes seconds to start.
        """
        token = self.environment["RAY_AUTH_TOKEN"] if token is None else token
        body = None if document is None else json.dumps(document).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, body, headers if token else {})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def close(self) -> None:
        """Send TERM to every node and KILL to what is left of their process groups, and remove their files."""
        for node in reversed(self._nodes):
            node.terminate()  # ``ray start --block`` ends its own children then
        for node in reversed(self._nodes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(timeout=30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *argv: str, agent: int) -> None:
        command = [
            str(RAY), "start", "--block", "--disable-usage-stats", *argv,
            # The defaults are fixed numbers that another cluster on this machine may hold.
            f"--dashboard-agent-listen-port={agent}", "--min-worker-port=0", "--max-worker-port=0",
            "--no-monitor", "--include-log-monitor=false",  # processes that no test looks at
            "--num-cpus=2",
            f"--object-store-memory={256 * 2**20}",
        ]  # fmt: skip
        self._commands.append(command)
        self._nodes.append(self._run(len(self._nodes), command))

    def _run(self, number: int, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"node-{number}.log").open("wb") as log:
            return subprocess.Popen(
                command, env=self.environment, cwd=self.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _wait_for_server(self) -> None:
        """Wait until the server takes jobs: it answers earlier, as the head's agent that starts jobs comes last."""

        def ready() -> bool:
            try:
                self.get("/api/version")
                return bool(self._alive_nodes())
            except (OSError, ValueError):
                return False

        self._wait_until(ready, "the job server answers")

    def _alive_nodes(self) -> list[Any]:
        nodes = self.get("/nodes?view=summary")["data"]["summary"]
        return [node for node in nodes if node["raylet"]["state"] == "ALIVE"]

    def _wait_until(self, condition: Any, what: str) -> None:
        def running() -> None:
            for number, node in enumerate(self._nodes):
                if node.poll() is None:
                    continue
                said = (self.folder / f"node-{number}.log").read_text(errors="replace")
                command, self._commands[number] = self._commands[number], []
                assert command and STARTS_SLOWLY in said, f"node {number} ended: {said}"
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGKILL)  # what it left might still join
                self._nodes[number] = self._run(number, command)
            time.sleep(0.1)  # a look is a request

        wait_until(condition, what, 240, meanwhile=running)


Ended = subprocess.CompletedProcess[str]
