"""Whatever a decoder does to its process, it costs one video; what the process sends, and who forks it."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from pipeline.rows import VIDEO_COLUMNS
from pipeline.video import sandbox as sandbox_module
from pipeline.video.child_messages import VideoMessage, WrongMessage, receive_message, send_video
from pipeline.video.decode import DecodedVideo, DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from pipeline.video.sandbox import DecodeSandbox
from pipeline.video.shared_frames import Handover, ReceivedFrames, SharedFrames
from tests.builders.clips import KeepSize, decord_killer, numbers, open_files, write_clip, write_jpegs
from tests.builders.decoding import fault_of, request
from tests.builders.runs import assert_all_gone, family
from tests.interpreter import run_python
from tests.paths import ROOT
from tests.pipeline.forging import ATTACKS, LATE
from tests.waiting import wait_until


def seen_by(sandbox, clip):
    """What a decoder sees of its process."""
    return json.loads(fault_of(sandbox.decode, request(clip, decoder="Revealing")).message)


@pytest.fixture(scope="module")
def sandbox():
    with DecodeSandbox(memory_mb=512) as opened:
        yield opened


def test_the_child_returns_what_decoding_here_does(sandbox, clip):
    wanted = request(clip)
    there, here = sandbox.decode(wanted), decode_video(wanted)
    assert np.array_equal(there.frames, here.frames) and there.frames.flags.writeable
    assert there.record == {**here.record, "decode_s": there.record["decode_s"]} and there.attempts == 1
    assert set(there.record) == {name for name, column in VIDEO_COLUMNS.items() if column.decoded}


@pytest.mark.parametrize(
    ("decoder", "fault_class", "exit_signal", "message"),
    [
        ("Aborting", "crash", signal.SIGABRT, "SIGABRT"),
        ("Segfaulting", "crash", signal.SIGSEGV, "SIGSEGV"),
        ("Exiting", "crash", None, "exit code 7"),
        ("Hungry", "out-of-memory", None, "MemoryError"),
        ("Spacious", "out-of-memory", None, ""),
        ("Sprawling", "out-of-memory", None, "File too large"),  # no file grows beyond the child's memory
        ("Raising", "own-code", None, "ValueError"),
    ],
)
def test_a_bad_decoder_costs_one_video(sandbox, clip, decoder, fault_class, exit_signal, message):
    fault = fault_of(sandbox.decode, request(clip, decoder=decoder))
    assert (fault.fault_class, fault.exit_signal, fault.attempts) == (fault_class, exit_signal, 1)
    assert message in fault.message and fault.backend == f"tests.builders.clips:{decoder}"
    assert numbers(sandbox.decode(request(clip)).frames) == np.linspace(0, 29, 8, dtype=int).tolist()


@pytest.mark.parametrize("name", ATTACKS)
def test_a_child_that_was_taken_over_costs_its_video_and_runs_nothing_here(sandbox, clip, name, tmp_path):
    video = tmp_path / "v.mp4"
    video.write_bytes(clip.read_bytes())
    stops = ATTACKS[name].reason == LATE
    sandbox.decode(request(clip))  # the child is up: only the limit counts below
    sandbox._timeout_s, usual = 1.0 if stops else 60.0, sandbox._timeout_s
    wanted = request(video, 2, decoder=f"tests.pipeline.forging:{name}")
    fault = fault_of(sandbox.decode, wanted)
    sandbox._timeout_s = usual
    assert (fault.fault_class, fault.exit_signal) == ("timeout" if stops else "crash", None)
    beginning = "" if stops else "the decode process sent a wrong message: .*"
    assert re.match(beginning + ATTACKS[name].reason, fault.message)
    assert [path.name for path in tmp_path.iterdir()] == ["v.mp4"] and "antigravity" not in sys.modules
    assert numbers(sandbox.decode(request(clip)).frames) == np.linspace(0, 29, 8, dtype=int).tolist()


def test_a_child_whose_next_message_is_always_there_is_ended_at_the_limit(sandbox, clip, monkeypatch):
    """Even a flood of messages may pause for a moment after the limit, which would end the wait for the next one."""

    def receive_name(pipe, deadline, max_frame_bytes):
        assert time.monotonic() < deadline + 5, "the limit has passed"
        return "tests.builders.clips:Hanging"

    sandbox.decode(request(clip))  # the child is up
    with monkeypatch.context() as patch:
        patch.setattr(sandbox_module, "receive_message", receive_name)
        sandbox._timeout_s, usual = 0.5, sandbox._timeout_s
        assert fault_of(sandbox.decode, request(clip, decoder="Hanging")).fault_class == "timeout"
    sandbox._timeout_s = usual
    assert sandbox.decode(request(clip)).record["source_frames"] == 30


def test_what_forgers_change_is_an_honest_answer(sandbox, clip):
    wanted = request(clip, 2, decoder="tests.pipeline.forging:Honest")
    video = sandbox.decode(wanted)
    assert video.frames.shape == (2, 64, 96, 3) and video.frame_indices.tolist() == [0, 29]
    assert video.record["codec"] == "h264"
    sandbox.close()  # its child sleeps


def test_beside_a_gpu_memory_that_is_written_is_limited_and_addresses_are_not(clip):
    """A CUDA context reserves more addresses than any machine has memory."""
    with DecodeSandbox(memory_mb=512, on_gpu=True) as beside:
        assert seen_by(beside, clip)["limits"][0] == -1
        assert fault_of(beside.decode, request(clip, decoder="Spacious")).message == "1099511627776 bytes reserved"
        assert fault_of(beside.decode, request(clip, decoder="Hungry")).fault_class == "out-of-memory"
        assert beside.decode(request(clip)).record["source_frames"] == 30


def test_a_hang_ends_at_the_limit_and_is_not_tried_again(clip):
    with DecodeSandbox() as sandbox:
        sandbox.decode(request(clip))  # the child is up: only the limit counts below
        sandbox._timeout_s, usual = 0.5, sandbox._timeout_s
        fault = fault_of(sandbox.decode, request(clip, decoder="Hanging"))
        sandbox._timeout_s = usual  # a busy machine may need longer for a good video
        assert (fault.fault_class, fault.attempts) == ("timeout", 1) and "0.5 s" in fault.message
        assert sandbox.decode(request(clip)).record["source_frames"] == 30


def test_a_file_that_takes_decord_down_is_read_by_pyav(sandbox, clip, tmp_path):
    video = sandbox.decode(request(decord_killer(tmp_path / "a.mp4"), decoder="decord"))
    assert numbers(video.frames) == np.linspace(0, 29, 8, dtype=int).tolist()
    assert (video.record["backend"], video.attempts) == ("pyav", 2) and "SIGABRT" in video.record["backend_note"]
    assert sandbox.decode(request(clip)).record["backend"] == "pyav"


def test_a_table_that_states_more_samples_than_it_holds_is_damage_and_no_lack_of_memory(sandbox, tmp_path):
    path = write_clip(tmp_path / "v.mp4")
    data = bytearray(path.read_bytes())
    table = data.index(b"ctts")
    data[table + 8 : table + 12] = (2**28).to_bytes(4, "big")  # 3 GiB, which FFmpeg reserves
    path.write_bytes(data)
    fault = fault_of(sandbox.decode, request(path))
    assert (fault.fault_class, fault.message) == ("corrupt", "a table of samples states more entries than it holds")


def test_the_child_is_confined(clip, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("HF_TOKEN", "x")
    with DecodeSandbox(memory_mb=1024) as sandbox:
        seen = seen_by(sandbox, clip)
        niceness = os.getpriority(os.PRIO_PROCESS, seen["pid"])
    assert seen["env"] == [] and seen["threads"] == 1
    assert os.nice(0) < niceness or niceness == 19  # whoever launches a GPU's kernels goes first
    address_space, core, file_size = seen["limits"]
    assert core == 0 and 2**30 == file_size < address_space < 2**34


def test_a_child_sees_the_gpus_that_its_worker_was_given_after_the_fork_server_began(clip, monkeypatch):
    def seen(on_gpu):
        with DecodeSandbox(on_gpu=on_gpu) as sandbox:
            return seen_by(sandbox, clip)["gpus"]

    before = seen(on_gpu=False)  # the server runs from now on
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert (seen(on_gpu=True), seen(on_gpu=False)) == ("7", before)


def test_a_child_killed_while_idle_is_replaced(sandbox, clip):
    pid = seen_by(sandbox, clip)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the fork server reaps it")
    assert sandbox.decode(request(clip)).record["source_frames"] == 30


def test_closing_leaves_no_process_and_can_be_undone(clip):
    sandbox = DecodeSandbox(timeout_s=1e300, memory_mb=2**62)  # beyond what the system takes, which is no error
    pid = seen_by(sandbox, clip)["pid"]
    sandbox.close()
    sandbox.close()
    assert not Path(f"/proc/{pid}").exists()
    assert sandbox.decode(request(clip)).record["source_frames"] == 30
    sandbox.close()


PARENT = """
import sys
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.decoding import fault_of, request

if __name__ == "__main__":
    path, decoder = sys.argv[1:]
    sandbox = DecodeSandbox(timeout_s=300)
    print(fault_of(sandbox.decode, request(path, decoder="Revealing")).message, flush=True)
    sys.stdin.read() if decoder == "idle" else sandbox.decode(request(path, decoder=decoder))
"""


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["idle", "Hanging"])
def test_nothing_outlives_a_killed_parent_and_the_kernel_shows_no_credentials_of_it(clip, tmp_path, decoder):
    """``/proc/self/environ`` is the environment that a process began with, whatever became of it."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    secrets = {"AWS_SECRET_ACCESS_KEY": "open-sesame", "HF_TOKEN": "abracadabra", "PLAIN": "as it was"}
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(clip), decoder],
        env={**kept, **secrets, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        seen = json.loads(parent.stdout.readline())
        assert seen["first"] == ["AWS_SECRET_ACCESS_KEY=", "HF_TOKEN=", "PLAIN=as it was"]
        if decoder != "idle":
            wait_until(lambda: str(clip) in open_files(seen["pid"]), "that the second request reaches its decoder")
        processes = [*family(parent.pid)]
        assert len(processes) >= 2  # fork server and child (and multiprocessing's resource tracker)
    finally:
        parent.kill()
        parent.wait()
    assert_all_gone(processes)


# As a worker that is forked from prefork/server.py does: its variables are set anew, and it has no threads yet.
WORKER = """
import json, os, signal, sys
from pathlib import Path
import torch
from pipeline.video import fork_server
from pipeline.video.sandbox import DecodeSandbox
from tests.builders.decoding import fault_of, request

variables = dict(os.environ)
os.environ.clear()
os.environ.update(variables)
fork_server.fork_standby()
waits = fork_server._standing_by.pid
if "killed" in sys.argv:
    os.kill(waits, signal.SIGKILL)
    os.waitid(os.P_PID, waits, os.WEXITED | os.WNOWAIT)
for _ in range(2):
    with DecodeSandbox(timeout_s=300) as sandbox:
        seen = json.loads(fault_of(sandbox.decode, request(sys.argv[1], decoder="Revealing")).message)
        parent = Path(f"/proc/{seen['pid']}/stat").read_text().rpartition(")")[2].split()[1]
        title = Path(f"/proc/{parent}/cmdline").read_text().strip(chr(0))
        frames = sandbox.decode(request(sys.argv[1], 2)).record["source_frames"]
        print(json.dumps({**seen, "ahead": int(parent) == waits, "title": title, "decodes": frames}), flush=True)
if "waits" in sys.argv:
    print(waits, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["waits", "killed"])
def test_children_are_forked_from_the_server_that_stands_by_and_from_another_where_it_was_killed(tmp_path, clip, word):
    """Neither shows a secret."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "HF_TOKEN": "x", "PLAIN": "y"}
    done = run_python(script, clip, word, env=variables, timeout=300)
    first, second, *waits = done.stdout.splitlines()
    for child in map(json.loads, (first, second)):
        assert child["ahead"] == (word == "waits") and child["decodes"] == 30 and child["env"] == []
        if child["ahead"]:
            assert "forkserver" in child["title"] and child["first"] == [] and child["threads"] == 1
    assert_all_gone([*map(int, waits)])  # with the worker, however that ends


UNSTATED = ("color_transfer", "sample_aspect_ratio")  # by many files, and by every folder of frames
NULL = (*UNSTATED, "frames_by_rate")  # and where frames do not go by a rate
DECODED = [name for name, column in VIDEO_COLUMNS.items() if column.decoded]
VALID = {"string": ["", "x"], "float64": [-0.5, 1e300], "int32": [0, 2**31 - 1]}
VALID |= {"int64": [0, 2**63 - 1], "uint64": [0, 2**64 - 1]}
WRONG = {"string": [7, 1.5, True, ["x"], {}], "float64": ["1.5", 1, True, [], float("nan"), float("inf")]}
WRONG |= {f"int{bits}": ["1", 1.5, True, [1], -1, 2 ** (bits - 1)] for bits in (32, 64)}
WRONG |= {"uint64": ["1", 1.5, True, [1], -1, 2**64]}


@pytest.fixture
def pipe():
    ends = Pipe()
    with closing(ends[0]), closing(ends[1]):
        yield ends


@pytest.fixture(scope="module")
def video(clip) -> DecodedVideo:
    return decode_video(DecodeRequest(clip, Sampling(2), KeepSize()))


def send(pipe: tuple[Connection, Connection], video: DecodedVideo, **values: object) -> DecodedVideo:
    """Send a video with other values in its record; return what is received, without its frames."""
    send_video(pipe[0], replace(video, record={**video.record, **values}), Handover(1, True, ()))
    message = receive_message(pipe[1], time.monotonic() + 60, 2**30)
    assert isinstance(message, VideoMessage)
    return message.video


def test_a_folder_of_frames_states_neither_transfer_nor_shape_of_pixels(pipe, tmp_path):
    path = write_jpegs(tmp_path / "frames_fps3" / "x", 3)
    video = decode_video(DecodeRequest(path, Sampling(2), KeepSize()))
    assert set(DECODED) - set(video.record) == set(UNSTATED)
    received = send(pipe, video)
    assert received.record == {**video.record, **dict.fromkeys(UNSTATED)}
    assert np.array_equal(received.timestamps, video.timestamps)


@pytest.mark.parametrize("name", DECODED)
def test_a_value_has_the_type_and_the_range_of_its_column_and_is_null_where_a_file_may_leave_it_unstated(
    pipe, video, name
):
    kind, null = VIDEO_COLUMNS[name].kind, [None]
    for value in VALID[kind] + null * (name in NULL):
        assert send(pipe, video, **{name: value}).record == {**video.record, name: value}
    for value in WRONG[kind] + null * (name not in NULL):
        with pytest.raises(WrongMessage, match=f"^{name} has a wrong value$"):
            send(pipe, video, **{name: value})


SHAPE = (3, 4, 6, 3)


def handed_over(shared, received, value, shape=SHAPE):
    """Frames full of ``value`` as the reader gets them."""
    shared.allocate_block(shape)[:] = value
    handover, descriptor = shared.hand_over_block()
    try:
        return received.frames(handover, descriptor, shape), handover
    finally:
        if descriptor is not None:
            os.close(descriptor)


def test_what_is_put_into_the_array_is_what_another_mapping_reads():
    shared = SharedFrames()
    frames = shared.allocate_block(SHAPE)
    frames[:] = np.arange(frames.size, dtype=np.uint8).reshape(SHAPE)
    handover, descriptor = shared.hand_over_block()
    there = ReceivedFrames().frames(handover, descriptor, SHAPE)
    os.close(descriptor)
    assert np.array_equal(there, frames) and there.flags.writeable and there.flags.c_contiguous
    assert not np.shares_memory(there, frames)  # two mappings of the same pages
    frames[0] = 7
    assert (there[0] == 7).all()


def test_memory_is_filled_again_once_nothing_refers_to_its_frames():
    shared, received = SharedFrames(), ReceivedFrames()
    first, told = handed_over(shared, received, 1)
    assert told == Handover(1, True, ())
    second, told = handed_over(shared, received, 2)
    assert told.new and received.list_freed() == []
    part, values = memoryview(first[1:, ::2]), first[2].tolist()
    del first
    assert received.list_freed() == []  # a view is left
    shared.reuse(received.list_freed())
    other, told = handed_over(shared, received, 3)
    assert told.new and part.tolist()[1][0] == values[0]
    del part, second, other
    list_freed = received.list_freed()
    assert sorted(list_freed) == [1, 2, 3] and received.list_freed() == []
    shared.reuse(list_freed)
    third, told = handed_over(shared, received, 4, (1, 4, 6, 3))
    assert not told.new and (third == 4).all()


def test_no_more_memory_is_kept_than_the_next_videos_need():
    shared, received, shape = SharedFrames(), ReceivedFrames(), (1, 3000, 4000, 3)  # 36 MB each
    held = [handed_over(shared, received, n, shape)[0] for n in range(3)]
    del held
    shared.reuse(received.list_freed())
    frames, told = handed_over(shared, received, 9, shape)
    assert not told.new and len(told.dropped) == 1 and (frames == 9).all()
    assert set(received._pieces) == {told.number, *shared._idle}


def test_memory_that_is_smaller_or_could_become_so_is_refused():
    """Reading beyond its end would be a bus error of the actor's."""
    shared, received = SharedFrames(), ReceivedFrames()
    shared.allocate_block(SHAPE)
    handover, descriptor = shared.hand_over_block()
    with pytest.raises(OSError, match="less than"):
        received.frames(handover, descriptor, (600, 4, 6, 3))
    with pytest.raises(OSError, match="less than"):
        received.frames(Handover(8, False, ()), None, SHAPE)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    os.close(descriptor)
    unsealed = os.memfd_create("frames", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(OSError, match="may shrink"):
        received.frames(Handover(9, True, ()), unsealed, SHAPE)
    os.close(unsealed)
