"""What a benchmark was measured on."""

from __future__ import annotations

import platform
import time
from functools import partial

import torch

_STREAM_ELEMENTS = 2**27  # 512 MB of float32: beyond any cache
_STREAM_REPEATS = 5


def machine(device: str) -> dict[str, str | int]:
    """Processor, threads and torch, JSON-able."""
    on_cuda = device.startswith("cuda")
    return {
        "processor": torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def machine_line(device: str) -> str:
    """The same to read: "AMD EPYC, 1 thread, torch 2.13.0"; a GPU has no threads to name."""
    where = machine(device)
    parts = [str(where["processor"]), f"torch {torch.__version__.partition('+')[0]}"]
    if not device.startswith("cuda"):
        parts.insert(1, "1 thread" if where["threads"] == 1 else f"{where['threads']} threads")
    return ", ".join(parts)


def stream_bandwidth(elements: int = _STREAM_ELEMENTS) -> float:
    """Bytes a second at which this process's threads read float32 numbers: the best of a few sums and dot products."""
    numbers = torch.ones(elements)
    best = float("inf")
    for _ in range(_STREAM_REPEATS):
        for read in (numbers.sum, partial(torch.dot, numbers, numbers)):
            started = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - started)
    return elements * numbers.element_size() / best


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - no such file elsewhere than on Linux
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
