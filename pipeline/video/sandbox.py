"""A child process that decodes videos, and may crash, hang or exhaust its memory without harm to its parent.

Only the child holds the other end of the pipe: however it ends, the parent reads end-of-file. The parent unpickles
nothing that the child sends, since a hostile video may run code there.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import connection, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import VideoFault
from pipeline.video import decode
from pipeline.video.child_messages import (
    VideoMessage,
    WrongMessage,
    receive_message,
    send_fault,
    send_text,
    send_video,
    wait_until_readable,
)
from pipeline.video.decode import DecodedVideo, DecodeRequest, convert_error, decode_video
from pipeline.video.decoders import choose_decoders
from pipeline.video.fork_server import use_standby_server
from pipeline.video.frame_folders import JPEGS
from pipeline.video.shared_frames import ReceivedFrames, SharedFrames

_LOG = logging.getLogger(__name__)
# Added to the worker's niceness, so that the thread that launches GPU kernels does not wait for decoders.
_NICER = 5
_START_S = 120.0  # seconds for a child to start; the first waits for the fork server's imports
_PRELOAD = ["numpy", "torch", "av", decode.__name__]
_SECRET_NAMES = ("AWS_", "AZURE_", "GOOGLE_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_SECRET_PARTS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "ACCESS_KEY", "PRIVATE_KEY")


class DecodeSandbox(AbstractContextManager["DecodeSandbox"]):
    """The owner of a child process that decodes videos. Close it after use; only one thread may use it.

    Args:
        timeout_s: seconds that a video may take, all attempts together. Starting a child before the first attempt does
            not count.
        memory_mb: MiB by which the child may grow beyond its size after its imports. A platform without such a limit
            logs a warning.
        on_gpu: True if a decoder may use a GPU. The limit then covers the memory that the child can write to, instead
            of its address space.

    Attributes:
        starting_s: seconds that starting all its children took.
    """

    def __init__(self, timeout_s: float = 120.0, memory_mb: int = 4096, on_gpu: bool = False) -> None:
        self._timeout_s = timeout_s
        self._limits = memory_mb, on_gpu
        self._child: _Child | None = None
        self.starting_s = 0.0

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the child. The next ``decode`` starts another one."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def decode(self, request: DecodeRequest, descriptor: int | None = None) -> DecodedVideo:
        """Decode one video in the child, which is started if there is none.

        If a built-in decoder other than PyAV ends the child or sends an invalid message, PyAV tries once more in the
        remaining time; the result then has 2 ``attempts`` and a note.

        Args:
            descriptor: an open file to read instead of ``request.path``. It stays the caller's.

        Raises:
            VideoFault: a fault of the video from ``decode_video``; "timeout" (the child is killed); "crash" if it
                ended, with ``exit_signal`` for a signal, or sent an invalid message; or "internal" if no child starts.
                ``attempts`` is 2 after a second attempt.
        """
        # Absolute, because the child's working folder is the one this process started in.
        request = replace(request, path=os.path.abspath(request.path))  # noqa: PTH100
        self._get_child()
        deadline = time.monotonic() + self._timeout_s
        try:
            return self._decode_once(request, descriptor, deadline)
        except VideoFault as fault:
            if fault.fault_class != "crash" or len(choose_decoders(fault.backend or "auto")) == 1:
                raise
            first_fault = fault
        try:
            video = self._decode_once(replace(request, decoder="pyav"), descriptor, deadline)
        except VideoFault as fault:
            fault.attempts = 2
            raise
        return replace(video, attempts=2).add_note(f"{first_fault.backend}: {first_fault.message}")

    def _decode_once(self, request: DecodeRequest, descriptor: int | None, deadline: float) -> DecodedVideo:
        """Send one request to the child and wait for its answer until ``deadline`` (``time.monotonic()``).

        After a timeout, an invalid message or an interrupt the child is killed, so that a late answer cannot reach the
        next request.

        Raises:
            VideoFault: a fault of the video, "timeout", "crash", or "internal" if no child starts.
        """
        child = self._get_child()
        backend: str | None = None
        try:
            child.pipe.send((descriptor is not None, child.received.list_freed()))
            if descriptor is not None:
                reduction.send_handle(child.pipe, descriptor, child.process.pid)
            child.pipe.send(request)
            while time.monotonic() < deadline:  # a child might send names of decoders without end
                message = receive_message(child.pipe, deadline, child.max_frame_bytes)
                _check_backend(message, request)
                if isinstance(message, VideoMessage):
                    return child.take_frames(message, deadline)
                if isinstance(message, VideoFault):
                    raise message
                backend = message
            raise TimeoutError
        except VideoFault:
            raise
        except TimeoutError as error:
            self.close()
            raise VideoFault("timeout", f"not decoded within {self._timeout_s:g} s", backend=backend) from error
        except WrongMessage as error:
            self.close()
            raise VideoFault("crash", f"the decode process sent a wrong message: {error}", backend=backend) from error
        except (EOFError, OSError) as error:
            self._child = None
            raise _make_crash_fault(child.wait_for_exit_code(), backend) from error
        except BaseException:
            self.close()  # after Ctrl-C, for example, a late answer must not be taken for the next request's
            raise

    def _get_child(self) -> _Child:
        """Return the running child, or start one if there is none or the last one has ended.

        Raises:
            VideoFault: "internal" if the child does not start.
        """
        if self._child is None or self._child.pipe.poll():  # idle children send nothing: the pipe ended
            self.close()
            start = time.monotonic()
            try:
                self._child = _Child(*self._limits)
            finally:
                self.starting_s += time.monotonic() - start
        return self._child


class InThisProcess(DecodeSandbox):
    """A sandbox without a child or limits, for trusted videos in a notebook: a decoder's crash ends this process."""

    def decode(self, request: DecodeRequest, descriptor: int | None = None) -> DecodedVideo:
        """Decode one video in this process, from the open file ``descriptor`` if it is given."""
        return decode_video(request if descriptor is None else replace(request, path=f"/proc/self/fd/{descriptor}"))


class _Child:
    """One child process, and the parent's end of the pipe to it."""

    def __init__(self, memory_mb: int, on_gpu: bool) -> None:
        """Start the process and wait until it is ready; log its note about a missing memory limit.

        Raises:
            VideoFault: "internal" if it does not start within two minutes or sends an invalid message.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.pipe, child_pipe = context.Pipe()
        self.received = ReceivedFrames()
        self.max_frame_bytes = memory_mb * 2**20
        # Ray names a worker's GPUs when it starts; what the child is forked from may have begun before that.
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") if on_gpu else None
        self.process = context.Process(
            target=_serve_requests, args=(child_pipe, memory_mb, on_gpu, gpus), name="decode", daemon=True
        )
        with _hide_main_module(), use_standby_server():
            self.process.start()
        child_pipe.close()  # the child now holds the only other end: when it dies, reading here ends
        try:
            note = receive_message(self.pipe, time.monotonic() + _START_S, 0)
        except (EOFError, OSError, WrongMessage) as error:
            self.end()
            raise VideoFault("internal", "the decode process did not start; its stderr says why") from error
        if note:
            _LOG.warning("%s", note)

    def take_frames(self, message: VideoMessage, deadline: float) -> DecodedVideo:
        """Return the video of a message with its frames, which are read from shared memory.

        Raises:
            WrongMessage: the memory that the message names was not handed over or does not fit.
            TimeoutError: no descriptor arrives before ``deadline``.
            EOFError: the child has ended.
        """
        descriptor = None
        try:
            if message.handover.new:
                wait_until_readable(self.pipe, deadline)
                descriptor = reduction.recv_handle(self.pipe)
            frames = self.received.frames(message.handover, descriptor, message.shape)
            return replace(message.video, frames=frames)
        except (TimeoutError, EOFError):
            raise
        except (OSError, RuntimeError, AssertionError) as error:  # also where there is no descriptor
            raise WrongMessage(f"no frames came with it: {error}") from error
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def end(self) -> None:
        """Kill the process, wait for its end, and release the pipe and the shared memory."""
        self.process.kill()  # it holds nothing that needs saving, and a decoder in a loop ignores gentler signals
        self.process.join()
        self.process.close()
        self.pipe.close()
        self.received.close()

    def wait_for_exit_code(self) -> int | None:
        """Wait up to 30 s for the process to end, kill it otherwise, and release it.

        Returns:
            Its exit code (negative: the signal that ended it), or None if it had to be killed.
        """
        self.process.join(30)  # the code comes through the fork server
        code: int | None = self.process.exitcode
        self.end()
        return code


def _check_backend(message: str | VideoFault | VideoMessage, request: DecodeRequest) -> None:
    """Raise WrongMessage if a message names a decoder that the request does not allow: names may be imported later."""
    match message:
        case VideoMessage():
            name = message.video.record["backend"]
        case VideoFault():
            name = message.backend
        case _:
            name = message
    if name not in (*choose_decoders(request.decoder), JPEGS, None):
        raise WrongMessage("it names another decoder than requested")


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keep a child that starts inside this context from importing this process's main module, such as Ray's worker."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _make_crash_fault(code: int | None, backend: str | None) -> VideoFault:
    """Return the "crash" fault of a video whose decode process ended with ``code``.

    A negative code is the signal that ended it, and None means that it did not end by itself. SIGKILL adds a hint.
    """
    if code is None or code >= 0:
        return VideoFault("crash", f"the decode process ended with exit code {code}", backend=backend)
    name = {entry.value: entry.name for entry in signal.Signals}.get(-code, f"signal {-code}")
    hint = "; perhaps the machine ran out of memory" if -code == signal.SIGKILL else ""
    return VideoFault("crash", f"the decode process was ended by {name}{hint}", backend=backend, exit_signal=-code)


def _serve_requests(pipe: Connection, memory_mb: int, on_gpu: bool, gpus: str | None) -> None:
    """Answer the requests that come through the pipe, in the child, until the parent closes it or is gone.

    Confines this process first, and sends a note about that ("" if all limits are set). Frames stay in shared memory; a
    new block's descriptor follows its message. Any exception of a request is sent as a fault.

    Args:
        gpus: the value of CUDA_VISIBLE_DEVICES; None leaves it unchanged.
    """
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    send_text(pipe, _confine_process(memory_mb, on_gpu))
    shared_frames = SharedFrames()
    while True:
        try:
            video = _answer_request(pipe, shared_frames)
            handover, descriptor = shared_frames.hand_over_block()
            send_video(pipe, video, handover)
            if descriptor is not None:
                reduction.send_handle(pipe, descriptor, os.getppid())
                os.close(descriptor)
        except (EOFError, BrokenPipeError):
            return
        except VideoFault as fault:
            send_fault(pipe, fault)
        except Exception as error:  # noqa: BLE001 - a request that cannot be unpickled, an answer that does not fit
            send_fault(pipe, convert_error(error, None))


def _answer_request(pipe: Connection, shared_frames: SharedFrames) -> DecodedVideo:
    """Receive the next request and decode its video, from a path or from an open file that is closed afterwards.

    Raises:
        VideoFault: decoding failed.
        EOFError: the pipe has ended.
    """
    has_descriptor, freed = pipe.recv()
    shared_frames.reuse(freed)
    descriptor = reduction.recv_handle(pipe) if has_descriptor else None
    try:
        request: DecodeRequest = pipe.recv()
        if descriptor is not None:
            request = replace(request, path=f"/proc/self/fd/{descriptor}")  # each opening has a position of its own
        return decode_video(request, partial(send_text, pipe), shared_frames.allocate_block)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _confine_process(memory_mb: int, on_gpu: bool) -> str:
    """Limit this process's memory and priority; return a note if the platform lacks a memory limit, otherwise "".

    The process also ignores Ctrl-C, ends with its parent, runs torch on one thread, and drops credentials and core
    files.
    """
    import torch  # noqa: PLC0415 - before the limit, so that its size does not count against memory_mb

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which decides
    _end_with_parent()
    _strip_credentials()
    torch.set_num_threads(1)
    os.nice(_NICER)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return _limit_memory(memory_mb, on_gpu)


def _limit_memory(memory_mb: int, on_gpu: bool) -> str:
    """Let this process grow by ``memory_mb`` MiB from now on; return a note if that cannot be limited.

    If ``on_gpu``, only private writable memory counts, otherwise the whole address space. Files that it writes,
    including shared memory, cannot exceed ``memory_mb`` MiB each either. Lower hard limits stay.
    """
    kind, field = (resource.RLIMIT_DATA, 5) if on_gpu else (resource.RLIMIT_AS, 0)
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[field])
        own_bytes = pages * resource.getpagesize()
        for limited, n_bytes in ((resource.RLIMIT_FSIZE, 0), (kind, own_bytes)):
            limit = min(n_bytes + memory_mb * 2**20, 2**63 - 1)
            _, hard = resource.getrlimit(limited)
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(limited, (limit, limit))
    except (OSError, ValueError) as error:
        return f"decode processes run without a memory limit: {error}"
    return ""


def _end_with_parent() -> None:
    """Arrange that this process ends when its parent is gone, even if it was SIGKILLed or a decoder loops forever here.

    Returns at once, and does nothing in a process that multiprocessing did not start. The kernel sends a signal, which
    needs no Python to run here; a thread serves systems without O_ASYNC.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # not a child: called by hand
        return
    sentinel: Any = parent.sentinel
    if hasattr(os, "O_ASYNC"):
        with suppress(OSError):
            signal.signal(signal.SIGIO, signal.SIG_DFL)  # ends the process
            fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _strip_credentials() -> None:
    """Remove environment variables whose names start with one of _SECRET_NAMES or contain one of _SECRET_PARTS.

    Case counts only for the start. Their values are also overwritten in the memory that /proc/self/environ shows.
    """
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    for name in list(os.environ):
        if name.startswith(_SECRET_NAMES) or any(part in name.upper() for part in _SECRET_PARTS):
            if address := library.getenv(os.fsencode(name)):
                ctypes.memset(address, 0, len(ctypes.string_at(address)))
            del os.environ[name]
