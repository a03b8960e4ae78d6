"""A real Ray cluster on this machine with a job server, its nodes started by ``ray start`` as an operator would."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from tests.jobs.jobs import environment
from tests.paths import python_path
from tests.pipeline.rays import STARTS_SLOWLY
from tests.ports import free_ports
from tests.waiting import wait_until

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
