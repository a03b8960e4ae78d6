"""What benchmarks share: processes that are watched, ways that run in turn, made-up tokens."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.benchmark import shared
from jobs.benchmark.shared import MAIN, OTHER, ProcessTree, classify_process, run_in_turn
from jobs.benchmark.tokens import INPUTS
from tests.waiting import wait_until

RAY = "/venv/lib/python3.11/site-packages/ray"


def test_ways_run_in_turn_and_their_last_results_are_kept():
    calls = []
    turns = run_in_turn({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, 3)
    assert calls == [*"ababab"] and (turns["a"].result, turns["b"].result) == (5, 6)
    assert len(turns["a"].wall_s) == len(turns["a"].cpu_s) == 3 and turns["a"].median_s > 0


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("ray::MapWorker(MapBatches(Decoder)).submit", "decode actor"),
        ("ray::worker-1248:MapWorker(MapBatches(Encoder)).__init__", "encode actor"),
        ("ray::Writer.write", "write actor"),
        ("/venv/bin/python -c from multiprocessing.forkserver import main; main(48, 50, ['numpy'])", "decode child"),
        ('/venv/bin/python -c from jobs.benchmark.pipeline_work {"kind": "plain loop"}', "DataLoader worker"),
        (f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/r/sockets/raylet", "raylet"),
        (f"/venv/bin/python {RAY}/_private/workers/default_worker.py --raylet-name=/tmp/r/sockets/raylet", OTHER),
    ],
)
def test_a_process_is_known_by_its_command_line(command, kind):
    assert classify_process(command) == kind


BUSY = "import time; end = time.process_time() + .3\nwhile time.process_time() < end: pass\ntime.sleep(60)"


def test_a_tree_counts_children_whose_parent_has_ended_and_ends_them(monkeypatch):
    monkeypatch.setitem(shared.KINDS, "process_time", "busy child")
    start = f"subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdin=subprocess.DEVNULL)"
    works = "import subprocess, sys, time\nwhile time.process_time() < .1: pass"  # a tick of the clock is 10 ms
    code = f"{works}\nprint({start}.pid, flush=True); sys.stdin.read()"
    root = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    tree = ProcessTree(root.pid)
    try:
        child = Path(f"/proc/{int(root.stdout.readline())}/cmdline")

        def used() -> float:
            tree.look(memory=True)
            return tree.cpu_s().get("busy child", 0.0)

        wait_until(lambda: used() > 0.1, "the child works")
        root.stdin.close()
        root.wait(timeout=30)
        wait_until(lambda: used() >= 0.25, "the child goes on")
        assert tree.cpu_s()[MAIN] > 0 and tree.peak_mb > 1
    finally:
        tree.end()
        root.kill()
        root.stdout.close()
    wait_until(lambda: not child.exists() or not child.read_bytes(), "the child has ended")  # a zombie's is empty


def test_made_up_tokens_are_seeded_finite_and_no_two_are_the_same():
    for make in INPUTS.values():
        tokens = make(20, 36, 48)
        assert torch.equal(tokens, make(20, 36, 48)) and tokens.isfinite().all()
        assert len(torch.unique(tokens.flatten(0, 1), dim=0)) == 20 * 36
