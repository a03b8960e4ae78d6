"""What a benchmark was measured on."""

from __future__ import annotations

import platform


def machine(device: str) -> dict[str, str | int]:
    """Return the processor, threads and torch version, JSON-able."""
    import torch  # noqa: PLC0415 - loads only after the flags are checked

    on_cuda = device.startswith("cuda")
    return {
        "processor": torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def machine_line(device: str = "cpu") -> str:
    """Describe the machine in a line: "AMD EPYC, 1 thread, torch 2.13.0"; a GPU has no threads to name."""
    where = machine(device)
    parts = [str(where["processor"]), f"torch {str(where['torch']).partition('+')[0]}"]
    if not device.startswith("cuda"):
        parts.insert(1, "1 thread" if where["threads"] == 1 else f"{where['threads']} threads")
    return ", ".join(parts)


def _cpu_name() -> str:
    """Return the processor's model name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123 - no such file elsewhere than on Linux
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
