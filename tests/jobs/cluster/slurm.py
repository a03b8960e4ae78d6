"""A Slurm of one node on this machine, by Debian's slurm-wlm and munge: its daemons, its folder, its ports."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.jobs.jobs import environment
from tests.jobs.ray_cluster import RAY, _free_ports
from tests.waiting import wait_until

DAEMONS = ("munged", "slurmctld", "slurmd")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_interval=1
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """List the daemons that are not installed."""
    return [name for name in DAEMONS if found(name) is None]


def found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


class Slurm:
    """Use it in a ``with`` block: leaving it ends the daemons, and the jobs with them."""

    def __enter__(self) -> Slurm:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        controller, node = _free_ports(2)
        facts = {"host": socket.gethostname(), "cpus": os.cpu_count(), "folder": self.folder}
        conf = self.folder / "slurm.conf"
        conf.write_text(_CONF.format(**facts, controller=controller, node=node))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.environment = environment(SLURM_CONF=str(conf), RAY_ADDRESS=None)
        self.environment["PATH"] = f"{RAY.parent}:{self.environment['PATH']}"
        here = f"--key-file={key}", f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid"
        logs = f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed"
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start("munged", "--foreground", "--force", *here, *logs)
            wait_until((self.folder / "munge.socket").exists, self.said)
            self._start("slurmctld", "-D", "-i")
            self._start("slurmd", "-D")
            wait_until(lambda: self.run("sinfo", "-h", "-o", "%t").stdout.strip() == "idle", self.said)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.environment["RAY_TMPDIR"], ignore_errors=True)

    def run(self, *argv: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm, or one that uses some; stdout and stderr together."""
        return subprocess.run(
            argv, env={**self.environment, **more}, cwd=cwd or self.folder, text=True, check=False, timeout=240,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def said(self) -> str:
        """Return what the daemons wrote."""
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.out"))

    def _start(self, name: str, *argv: str) -> None:
        program = found(name)
        assert program is not None
        with (self.folder / f"{name}.out").open("wb") as log:
            self._daemons.append(subprocess.Popen([program, *argv], env=self.environment, stdout=log, stderr=log))
