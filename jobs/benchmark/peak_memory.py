"""How much memory a piece of work takes at its peak, measured in a child process of its own."""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch


def peak_memory(work: Callable[[], object]) -> float | None:
    """Measure the MB (10^6 bytes) by which ``work`` raises the resident memory at its peak, or None if unmeasurable.

    It runs once more, in a forked child with one thread, whose highest mark starts at what it shares with this process.
    Run ``work`` here before, so that what libraries take on their first use does not count. On Linux only: elsewhere
    there is no fork, or it is not safe.
    """
    if sys.platform != "linux":
        return None
    _return_freed_memory()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_measure, args=(work, theirs), daemon=True)
    with warnings.catch_warnings():
        # As torch's data loaders do: a child that stays with one thread never waits for the threads it did not inherit.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        child.start()
    theirs.close()
    try:
        grown: float = ours.recv()
        return grown
    except EOFError:  # the child died, of too little memory most likely
        return None
    finally:
        child.kill()
        child.join()
        ours.close()


def _measure(work: Callable[[], object], pipe: Connection) -> None:
    """Run ``work`` in the forked child, and send the MB by which its peak memory grew."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends without a message; the parent has one
    torch.set_num_threads(1)
    before = _highest()
    work()
    pipe.send((_highest() - before) / 1e6)


def _highest() -> int:
    """Return the peak of this process's resident memory in bytes."""

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _return_freed_memory() -> None:
    """Return freed heap memory to the system; otherwise the child would reuse it, and its growth would not be seen."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
