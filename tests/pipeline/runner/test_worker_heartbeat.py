"""What every worker is doing: a statement replaces the one before, and a broken GPU ends its process."""

import atexit
import os
import signal
import socket
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import ray
import torch

from gstep.errors import is_out_of_memory
from pipeline.prune.resources import PRUNING
from pipeline.runner import worker_heartbeat as heartbeat
from pipeline.runner.worker_heartbeat import Heartbeat, exit_after_gpu_fault
from pipeline.runner.worker_reports import (
    CRASHES_S,
    MAX_CRASHES,
    RECENT,
    REST_S,
    Crash,
    Heartbeats,
    NodeTally,
    ProgressDelta,
    Worker,
    describe_crashes,
    run_heartbeats,
)
from pipeline.storage.outages import Outage
from tests.builders.clusters import PLAIN, handle_of, heartbeats_here, ray_here
from tests.builders.runs import assert_all_gone
from tests.gstep.synthetic import needs_cuda
from tests.interpreter import run_python
from tests.waiting import wait_until

STAGES, HERE = tuple(PRUNING.stages), socket.gethostname()


def worker(name: str, host: str = "h1", node: str = "n1") -> Worker:
    return Worker(name, host, node)


def test_a_statement_replaces_the_one_before():
    heartbeats = Heartbeats(STAGES)
    heartbeats.state("decode", worker("a", "h1"), ["v1"], ProgressDelta(0, 1))
    heartbeats.state("decode", worker("a", "h2"), ["v2"], ProgressDelta(0, 1))  # the end of v1 was lost: its actor died
    heartbeats.state("decode", worker("b", "h1"), ["v3"], ProgressDelta(0, 1))
    heartbeats.state("decode", worker("b", "h1"), [], ProgressDelta(1, 1))
    reading = heartbeats.read()
    assert reading.inside == {"decode": ["v2 on h2"], "encode": [], "write": []}
    assert (reading.n_passed_on["decode"], reading.n_moves) == (1, 4)


def test_crashes_count_by_the_hour_and_not_over_the_run():
    heartbeats = Heartbeats(STAGES, clock := Mock(return_value=0.0))
    for _ in range(5 * MAX_CRASHES):
        assert heartbeats.start("encode", worker("a")) is not None
        clock.return_value += 1.01 * CRASHES_S / MAX_CRASHES
    for _ in range(MAX_CRASHES):
        clock.return_value += 1.0
        heartbeats.state("encode", worker("a", "h1"), ["v9"], ProgressDelta(0, 1))
        heartbeats.end(worker("a", "h1"), "the GPU is broken")
        given_up = heartbeats.start("encode", worker("a")) is None
    assert given_up
    assert heartbeats.start("encode", worker("b")) == 0  # another worker
    said = heartbeats.read().failure
    assert said is not None
    assert said.startswith(f"{MAX_CRASHES + 1} processes of one encode worker crashed in ")
    assert said.endswith(" s, the last process on h1 with v9 in hand: the GPU is broken")
    assert set(heartbeats.find_crashes("encode", "v9")) == {Crash("h1", "the GPU is broken")}


@pytest.fixture
def actor(monkeypatch) -> Heartbeats:
    """The actor's own class."""
    return heartbeats_here(monkeypatch, STAGES, worker("w1", HERE))[0]


def heartbeat_of(actor: Heartbeats, stage: str) -> Heartbeat:
    return Heartbeat(stage, handle_of(actor.state, actor.fail, actor.start, actor.find_crashes))


@pytest.mark.parametrize(("n_workers", "every_s"), [(5, 1.0), (2000, 1.0), (8000, 4.0)])
def test_all_workers_together_send_no_more_reports_than_the_actor_can_take(n_workers, every_s):
    heartbeats = Heartbeats(STAGES)
    for number in range(n_workers):
        heartbeats.state("decode", worker(str(number)), [], ProgressDelta())
    assert heartbeats.every_s() == every_s


def test_work_waits_for_its_report_once_a_process_of_the_worker_crashed(actor):
    """Reports travel while the process works. A process that ends at once may take them with it."""
    sent: list[tuple[object, ...]] = []

    def answer() -> float:
        while sent:
            actor.state(*sent.pop(0))
        return 1.0

    handle = handle_of(actor.start)
    handle.state = SimpleNamespace(remote=lambda *report: sent.append(report))
    handle.every_s = SimpleNamespace(remote=answer)
    for crashes in range(2):
        mine = Heartbeat("encode", handle)
        mine.start()
        with mine.hold_items("q1"):
            assert actor.read().inside["encode"] == [f"q1 on {HERE}"] * crashes


def test_how_it_went_is_known_by_node_and_failures_by_host_and_class(actor):
    mine = heartbeat_of(actor, "encode")
    for failed, fault in ((False, "corrupt"), (True, "io"), (None, None), (True, "io")):  # None: it came as a failure
        with mine.hold_items("v") as held:
            held.release(failed, is_result=fault is None, fault=fault)
    actor.state("encode", worker("w2", "h2", "n2"), [], ProgressDelta(n_ok=5, faults=("io",)))
    with pytest.raises(OSError, match="away"), mine.hold_items("v"):
        raise OSError("away")  # it is tried again here
    report = actor.read()
    assert report.tallies["encode"] == {"n1": NodeTally(HERE, 1, 2), "n2": NodeTally("h2", 5, 0)}
    assert report.tallies["decode"] == {}
    assert report.faults == {("encode", HERE, "io"): 2, ("encode", HERE, "corrupt"): 1, ("encode", "h2", "io"): 1}


def test_what_was_held_before_is_held_meanwhile_and_after(actor):
    """Reading the tokens of a video is a part of what a question needs. A process that dies then or later had the
    question: its very last statement may be lost with it."""
    mine = heartbeat_of(actor, "encode")
    with mine.busy("q1"):
        with mine.busy("the tokens of v1, being read"):
            assert actor.read().inside["encode"] == [f"the tokens of v1, being read on {HERE}", f"q1 on {HERE}"]
        assert actor.read().inside["encode"] == [f"q1 on {HERE}"]
    assert actor.read().inside["encode"] == []


def test_of_several_items_those_that_are_done_are_let_go_and_told_with_the_last(actor):
    """Except where something went wrong, which may put this worker out of service."""
    mine = heartbeat_of(actor, "decode")
    with mine.hold_items("v1", "v2", "v3", "v4") as held:
        held.release(is_failure=False)
        assert (actor.read().n_passed_on["decode"], len(actor.read().inside["decode"])) == (0, 4)
        held.release(is_failure=True, is_result=False)
        reading = actor.read()
        assert reading.inside["decode"] == [f"v3 on {HERE}", f"v4 on {HERE}"]
        assert (reading.n_passed_on["decode"], reading.n_results["decode"], reading.n_moves) == (2, 1, 6)
        assert reading.tallies["decode"]["n1"] == NodeTally(HERE, 1, 1)
        held.release(is_failure=False, n=2)
    reading = actor.read()
    assert (reading.inside["decode"], reading.n_passed_on["decode"], reading.n_moves) == ([], 4, 8)
    assert reading.tallies["decode"]["n1"] == NodeTally(HERE, 3, 1)


def test_a_worker_without_an_actor_or_with_a_dead_one_is_not_disturbed(actor):
    dead = handle_of(Mock(side_effect=ray.exceptions.RayActorError, __name__="state"))
    for heartbeats in (None, dead):
        mine = Heartbeat("decode", heartbeats)
        with mine.hold_items("v1") as held, mine.busy("work"):
            mine.fail("why")
            mine.start()
            assert mine.find_crashes("v1") == []
            held.release(is_failure=True)
        mine.wait_while_excluded()


def test_a_worker_that_fails_at_what_others_do_rests_longer_and_longer():
    clock = Mock(return_value=0.0)
    heartbeats, bad, good = Heartbeats(STAGES, clock), worker("bad"), worker("good", "h2", "n2")

    def tallies(who: Worker, done: int, failed: int) -> None:
        heartbeats.state("decode", who, [], ProgressDelta(n_ok=done, n_failed=failed))

    tallies(bad, 0, RECENT)
    assert not heartbeats.is_excluded("decode", bad)  # nobody does better
    heartbeats.state("decode", good, ["its first"], ProgressDelta(n_moves=1))
    assert heartbeats.is_excluded("decode", bad)
    tallies(good, RECENT, 0)
    assert heartbeats.is_excluded("decode", bad) and not heartbeats.is_excluded("decode", good)
    assert not heartbeats.is_excluded("encode", bad)
    for rest_s in (REST_S, 2 * REST_S, 4 * REST_S):
        tallies(good, 1, 0)
        assert heartbeats.is_excluded("decode", bad)
        clock.return_value += rest_s - 1
        tallies(good, 1, 0)
        assert heartbeats.is_excluded("decode", bad)
        clock.return_value += 1
        assert not heartbeats.is_excluded("decode", bad)  # one more try
        tallies(bad, 0, 1)
    (named,) = heartbeats.read().excluded_workers
    assert named.startswith("a decode worker on h1: 8 of its last 8 failed")
    tallies(good, 1, 0)
    assert heartbeats.is_excluded("decode", bad)
    clock.return_value += 11
    assert not heartbeats.is_excluded("decode", bad)  # the others have nothing left to do
    tallies(good, 1, 0)
    tallies(bad, 2, 0)
    assert not heartbeats.is_excluded("decode", bad)


def test_the_outcomes_of_thousands_of_workers_are_not_counted_for_each_of_them():
    heartbeats, bad = Heartbeats(STAGES, clock := Mock(return_value=0.0)), worker("bad")
    heartbeats.state("decode", bad, ["an item"], ProgressDelta(n_failed=RECENT))
    others = [worker(f"w{number}", "h2") for number in range(2000)]
    for failed in ({"n_ok": RECENT}, {"n_failed": RECENT}):
        for who in others:
            heartbeats.state("decode", who, ["an item"], ProgressDelta(**failed))
        assert heartbeats.is_excluded("decode", bad)  # for the second time by a count that is not a second old
    clock.return_value += 1
    assert not heartbeats.is_excluded("decode", bad)  # nobody does better any more


def test_a_store_that_does_not_answer_workers_is_reported_since_the_first_noticed_until_none_does():
    heartbeats, delta = Heartbeats(STAGES, Mock(return_value=0.0)), ProgressDelta()
    first, later = (Outage("s3://b", since, "503 SlowDown") for since in (50.0, 70.0))
    heartbeats.state("decode", worker("a"), ["x"], delta, [later])
    heartbeats.state("decode", worker("b"), ["y"], delta, [first])
    assert heartbeats.read().outages == [first]
    heartbeats.state("decode", worker("b"), ["y"], delta)
    assert heartbeats.read().outages == [later]
    heartbeats.start("decode", worker("a")._replace(pid=2))  # the process that noticed has died
    assert heartbeats.read().outages == []


def test_files_that_nobody_has_put_nobody_out_of_service_nor_does_what_a_lost_node_held():
    clock, living = Mock(return_value=0.0), {"n1", "n2"}
    heartbeats, workers = Heartbeats(STAGES, clock, living=lambda: set(living)), [worker(name) for name in "abcd"]
    for who in workers:
        heartbeats.state("decode", who, [], ProgressDelta(n_ok=3, n_failed=RECENT))
    assert not any(heartbeats.is_excluded("decode", who) for who in workers)
    assert (heartbeats.read().excluded_workers, heartbeats.read().failing) == ([], ["decode"])
    heartbeats.state("decode", worker("e", "h2", "n2"), ["its first"], ProgressDelta(n_moves=1))
    assert heartbeats.read().failing == []
    clock.return_value += 11  # the others have nothing left to do
    assert heartbeats.is_excluded("decode", worker("a"))
    living.remove("n2")
    clock.return_value += 11
    heartbeats.state("decode", worker("a"), [], ProgressDelta(n_failed=1))
    assert not heartbeats.is_excluded("decode", worker("a")) and heartbeats.read().failing == ["decode"]


def test_a_worker_waits_before_it_takes_an_item_and_asks_only_after_a_failure(actor, monkeypatch):
    slept = []
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=Mock(return_value=0.0), sleep=slept.append))
    is_excluded = Mock(side_effect=[True, False], __name__="is_excluded")
    mine = Heartbeat("decode", handle_of(actor.state, is_excluded))
    mine.wait_while_excluded()
    for is_failure in (True, None):  # None: not tried here
        with mine.hold_items("v") as held:
            held.release(is_failure)
        assert not is_excluded.called
    mine.wait_while_excluded()
    assert is_excluded.call_args_list == [call("decode", worker("w1", HERE))] * 2 and len(slept) == 1
    with mine.hold_items("v") as held:
        held.release(is_failure=False)
    mine.wait_while_excluded()
    assert is_excluded.call_count == 2


def test_time_with_something_in_hand_is_busy_and_loading_is_neither_busy_nor_idle(actor, monkeypatch):
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=(clock := Mock(return_value=0.0))))
    mine = heartbeat_of(actor, "encode")
    mine.start()
    clock.return_value += 1
    with mine.report_loading():
        clock.return_value += 30
    clock.return_value += 2
    with mine.hold_items("v1", "v2") as held:
        clock.return_value += 3
        held.release()
        with mine.hold_items("v3"):  # of another call
            clock.return_value += 4
        held.release()
    reading = actor.read()
    assert (reading.up_s["encode"], reading.busy_s["encode"]) == (9, 7)
    assert (reading.up_s["decode"], reading.busy_s["decode"]) == (0, 0)


def test_processes_that_died_are_named_once_with_what_they_held():
    living = {"n1", "n2"}
    heartbeats = Heartbeats(STAGES, Mock(return_value=0.0), living=lambda: set(living))
    for name, node in (("w1", "n1"), ("w2", "n2"), ("w3", "n2")):
        heartbeats.start("encode", worker(name, node=node))
    heartbeats.state("encode", worker("w1"), ["v1", "v2"], ProgressDelta(n_moves=2))
    heartbeats.start("encode", worker("w1"))
    assert heartbeats.read().crashed_processes == [("encode", worker("w1"), ("v1", "v2"))]
    heartbeats.state("encode", worker("w2", node="n2"), ["v3"], ProgressDelta(n_moves=1))
    living.remove("n2")
    heartbeats._clock.return_value += 11
    report = heartbeats.read()
    lost = report.crashed_processes[1:]
    assert report.workers == {"n1": {"encode": 1}, "n2": {"encode": 2}}
    assert lost == [("encode", worker("w2", node="n2"), ("v3",)), ("encode", worker("w3", node="n2"), ())]
    heartbeats.start("encode", worker("w2", node="n1"))  # Ray has started it again elsewhere
    assert len(heartbeats.read().crashed_processes) == 3
    assert heartbeats.read().workers == {"n1": {"encode": 2}, "n2": {"encode": 1}}
    living.add("n3")
    heartbeats.start("encode", worker("w4", node="n3"))  # of a node that has joined since Ray was asked
    assert len(heartbeats.read().crashed_processes) == 3


def test_what_a_dead_process_held_is_known_to_the_next_one_and_lost_nodes_are_not_blamed_on_it():
    living = {"n1", "n2", "n3", "n4"}
    heartbeats = Heartbeats(STAGES, Mock(return_value=0.0), living=lambda: set(living))
    for node in sorted(living):
        heartbeats.start("encode", worker("a", node, node))
        heartbeats.state("encode", worker("a", node, node), ["v"], ProgressDelta(n_moves=1))
        if node in ("n1", "n2"):
            living.discard(node)
    assert heartbeats.find_crashes("encode", "v") == [Crash("n3")]  # where a process died on a node that lives
    heartbeats.start("encode", worker("a", "n4", "n4"))
    heartbeats.state("encode", worker("b", "n4", "n4"), ["good"], ProgressDelta(0, 1))
    assert heartbeats.find_crashes("encode", "v") == [Crash("n3"), Crash("n4")]
    assert heartbeats.read().inside["encode"] == ["good on n4"]
    assert heartbeats.find_crashes("encode", "good") == heartbeats.find_crashes("decode", "v") == []


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (("", ""), "on a, b; Ray's logs say how"),
        (("CUDA error", "CUDA error"), "on a, b; CUDA error"),
        (("CUDA error", ""), "on a, b; CUDA error; Ray's logs say how 1 of them ended"),
    ],
)
def test_a_crash_without_a_reason_is_not_given_that_of_another(reasons, said):
    assert describe_crashes("encode process", "video", [*map(Crash, "ab", reasons)]).endswith(said)


@pytest.fixture(scope="module")
def heartbeats():
    with ray_here(*PLAIN), run_heartbeats(STAGES) as heartbeats:
        yield heartbeats


class Slow:
    """A worker that is done with one of its two items."""

    def __init__(self, heartbeats):
        self.heartbeat = Heartbeat("decode", heartbeats)
        self.heartbeat.start()
        self.held = ExitStack()

    def take(self):
        self.held.enter_context(self.heartbeat.hold_items("first", "second")).release(is_failure=False)


@pytest.mark.slow
def test_what_a_slow_worker_is_at_is_known_a_second_later(heartbeats):
    worker = ray.remote(Slow).options(num_cpus=0).remote(heartbeats)
    ray.get(worker.take.remote())
    at_the_second = [f"second on {HERE}"]
    wait_until(lambda: ray.get(heartbeats.read.remote()).inside["decode"] == at_the_second, "the next statement")
    assert ray.get(heartbeats.read.remote()).n_passed_on["decode"] == 1


class Dying:
    """A worker that can only begin."""

    def __init__(self, heartbeats):
        heartbeat._ANSWER_S = 300.0  # without an answer it would begin
        Heartbeat("write", heartbeats).start()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_whose_processes_die_again_and_again_is_given_up(heartbeats):
    """Ray starts it again; the process after the last crash that is allowed does not begin."""
    dying = ray.remote(Dying).options(max_restarts=40, num_cpus=0).remote(heartbeats)
    ray.get(dying.__ray_ready__.remote())
    for died in range(1, MAX_CRASHES):  # as if it had died so often
        assert ray.get(heartbeats.start.remote("write", worker(dying._actor_id.hex()))) == died
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(dying.die.remote())
    wait_until(lambda: begins(dying), "the next process")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(dying.die.remote())
    with pytest.raises(ray.exceptions.RayActorError, match="the processes of this write worker crash again and again"):
        wait_until(lambda: begins(dying), "the end")


def begins(worker):
    """Return whether it answers; raise what ended it for good."""
    with suppress(ray.exceptions.ActorUnavailableError):
        return ray.get(worker.__ray_ready__.remote())


class Leaving:
    """A worker that would write a file as it ends."""

    def __init__(self, heartbeats, file):
        atexit.register(file.touch)
        Heartbeat("write", heartbeats).start()

    def pid(self):
        return os.getpid()


@pytest.mark.slow
def test_a_worker_ends_at_once_and_runs_nothing_of_rays_end(heartbeats, tmp_path):
    """Left to itself it may hang there for ever, in a few of a hundred runs whose cluster is gone."""
    worker = ray.remote(Leaving).remote(heartbeats, tmp_path / "ran")
    pid = ray.get(worker.pid.remote())
    del worker
    assert_all_gone([pid])
    assert not (tmp_path / "ran").exists()


def test_a_disk_on_which_no_worker_can_start_is_reported_until_it_has_room():
    heartbeats = Heartbeats(STAGES, clock := Mock(return_value=0.0))
    for stage, full in (("decode", "/ray, 100% full"), ("encode", ""), ("encode", "/ray, 100% full")):
        heartbeats.state(stage, worker("a"), [], ProgressDelta(), (), full)
        assert heartbeats.read().full_disks == ({worker("a").node: full} if full else {})
    clock.return_value += 601  # its workers have ended, and cannot say that there is room again
    assert heartbeats.read().full_disks == {}


ON_A_GPU = """
import torch
from pipeline.runner.worker_heartbeat import exit_after_gpu_fault
numbers = torch.zeros(8, device="cuda")
exit_after_gpu_fault("fine.mp4", RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"))
print("went on", flush=True)
try:
    numbers[torch.full((4,), 10**6, device="cuda")].sum().item()
except Exception as error:
    exit_after_gpu_fault("a.mp4", ValueError("of another kind"))
print("went on with a broken context")
"""

NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
OTHERS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("CUDA error: device-side assert triggered"),
    ValueError("a video of another shape"),
    MemoryError("out of memory"),
]


def test_the_process_ends_at_once_and_says_on_what(capfd):
    """No device is there to be asked, so the words decide."""
    child = os.fork()
    if child == 0:
        try:
            exit_after_gpu_fault("a.mp4", RuntimeError("CUDA error: an illegal memory access was encountered"))
        finally:  # where it returns, or raises what could be caught
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 70
    assert capfd.readouterr().err.strip() == "a.mp4: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is asked whether it works, which says so unless it has a side effect."""
    asked = Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", asked)
    monkeypatch.setattr(heartbeat.os, "_exit", Mock(side_effect=SystemExit))
    return asked


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_the_gpu_is_asked_whatever_the_error_says(gpu, error, capsys):
    exit_after_gpu_fault("a.mp4", error)
    assert gpu.call_count == 1 and capsys.readouterr().err == ""
    gpu.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(SystemExit):
        exit_after_gpu_fault("a.mp4", error)
    assert capsys.readouterr().err.startswith(f"a.mp4: {error}")


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_too_little_memory_breaks_nothing(gpu, error):
    assert is_out_of_memory(error)
    exit_after_gpu_fault("a.mp4", error)
    assert not gpu.called


@needs_cuda
def test_a_gpu_is_asked_itself():
    done = run_python("-c", ON_A_GPU)
    assert (done.returncode, done.stdout) == (70, "went on\n"), done.stderr
    assert "a.mp4: of another kind" in done.stderr
