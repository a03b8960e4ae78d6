"""Measure this clone on a GPU, or rehearse every measurement on a CPU: python .ci/gpu FOLDER [--rehearse].

Measurements run in order of value until the deadline, each in its own process with a time limit. FOLDER gets a line per
figure in report.txt, and other output of each measurement in NAME.log.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
if "--rehearse" in sys.argv:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

from bench import Bench  # noqa: E402 - libraries read the environment when they load
from measurements import CHECKS, INPUTS, MEASUREMENTS, Measurement  # noqa: E402

DEADLINE_S = 480.0
MIN_LEFT_S = 5.0  # with less time left, no measurement begins
MAX_PARALLEL = 3
FORK = get_context("fork")  # a forked process can use a GPU, since this process never does


class Run:
    """A measurement that runs in its own process group; ``started`` is the time of its start, by time.monotonic()."""

    def __init__(self, bench: Bench, name: str, measurement: Measurement, limit_s: float) -> None:
        """Start the measurement in a forked process; ``limit_s`` only decides ``is_over``."""
        self.started = time.monotonic()
        self._limit_s = limit_s
        self._process = FORK.Process(target=run_measurement, args=(bench, name, measurement))
        self._process.start()

    @property
    def is_over(self) -> bool:
        """True if the measurement has ended or its time limit has passed."""
        return self._process.exitcode is not None or time.monotonic() > self.started + self._limit_s

    def end(self) -> int | None:
        """Kill the measurement's process group, and return its exit code; None if it was still running."""
        code = self._process.exitcode
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        return code


def run_measurement(bench: Bench, name: str, measurement: Measurement) -> None:
    """Run a measurement in this process, which becomes the leader of a new process group."""
    os.setsid()
    bench.begin(name)
    measurement.measure(bench)


def main() -> int:
    """Parse the command line, delete an old report and run the measurements; return 0 if all succeeded, otherwise 1."""
    parser = argparse.ArgumentParser("python .ci/gpu", description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets report.txt and the logs")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, with tiny models and at toy sizes")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MEASUREMENTS,
        default=[*MEASUREMENTS],
        metavar="NAME",
        help=f"measurements to run, of {', '.join(MEASUREMENTS)} [all]",
    )
    parser.add_argument(
        "--deadline", type=float, default=DEADLINE_S, metavar="S", help=f"seconds of all [{DEADLINE_S:g}]"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    (arguments.folder / "report.txt").unlink(missing_ok=True)
    deadline = time.monotonic() + arguments.deadline
    waiting = [INPUTS, *(name for name in MEASUREMENTS if name in arguments.only and name != INPUTS)]
    with TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as work:
        bench = Bench(arguments.folder, Path(work), arguments.rehearse)
        if arguments.rehearse:
            import transformers.models.llava_onevision.modeling_llava_onevision  # noqa: F401, PLC0415 - once for all
        return 0 if run_all(bench, waiting, deadline) else 1


def run_all(bench: Bench, waiting: list[str], deadline: float) -> bool:
    """Run the measurements in the order of ``waiting``, which is emptied, and report the state of each.

    If one fails or exceeds its time limit, the others still run, unless it was the inputs. Running measurements are
    killed on return.

    Args:
        deadline: with less than MIN_LEFT_S left until this time (time.monotonic()), none starts.

    Returns:
        True if all measurements were started and succeeded.
    """
    running: dict[str, Run] = {}
    all_ok = True
    try:
        while waiting or running:
            while waiting and may_start(waiting[0], running.keys() - {INPUTS}, bench.rehearse):
                name = waiting.pop(0)
                left_s = deadline - time.monotonic()
                if left_s > MIN_LEFT_S:
                    limit_s = left_s if bench.rehearse else min(left_s, MEASUREMENTS[name].limit_s)
                    running[name] = Run(bench, name, MEASUREMENTS[name], limit_s)
                else:
                    bench.say(name, "not begun: the deadline is near")
                    all_ok = False
            for name, run in [*running.items()]:
                if run.is_over:
                    code = running.pop(name).end()
                    state = {0: "ok", None: "failed: the time limit"}.get(code, f"failed: {bench.read_last_line(name)}")
                    bench.say(name, state, f"after {time.monotonic() - run.started:.1f} s")
                    all_ok = all_ok and code == 0
                    if name == INPUTS and code != 0:
                        return False
            time.sleep(0.05)
    finally:
        for run in running.values():
            run.end()
    return all_ok


def may_start(name: str, running: set[str], rehearse: bool) -> bool:
    """Return True if a measurement may start: timed ones run alone, checks and rehearsals up to three at a time."""
    return len(running) < (MAX_PARALLEL if rehearse or {name, *running} <= CHECKS else 1)


if __name__ == "__main__":
    sys.exit(main())
