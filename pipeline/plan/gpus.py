"""Types of GPUs: what each can do, and how many vCPUs usually stand beside it.

Peaks are those of dense bfloat16; peaks and bandwidth are those of NVIDIA's data sheets: A100 (SXM4), H100 and
H200 (SXM5), B200 (an eighth of a DGX), L4, L40S, and A10G as in AWS's G5. Where a data sheet gives the peak with
sparsity alone, half of it is taken. The vCPUs are an AWS instance's, divided by its GPUs: p4de, p4d, p5, p5en,
p6-b200, and of g6, g6e and g5 the size with four GPUs. Prices of a GPU-hour are the range of published ones
(mercatus-ai.com, May 2026). They differ by a factor of three, so a plan counts money by ``--gpu-hour`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipeline.plan.intervals import Interval


class GpuType(NamedTuple):
    """A type of GPU.

    Attributes:
        peak: operations a second in dense bfloat16.
        bandwidth: bytes a second of its memory.
        vcpus: that usually stand beside it.
        price: published range of dollars an hour; None where none was found.
    """

    peak: float
    bandwidth: float
    vcpus: int
    price: Interval | None = None


GPU_TYPES: Mapping[str, GpuType] = {
    "A100": GpuType(312e12, 2.039e12, 12, Interval(0.80, 1.50, 3.00)),
    "A100-40GB": GpuType(312e12, 1.555e12, 12),
    "H100": GpuType(989e12, 3.35e12, 24, Interval(1.99, 3.00, 5.00)),
    "H200": GpuType(989e12, 4.8e12, 24, Interval(2.50, 4.00, 7.00)),
    "B200": GpuType(2250e12, 8.0e12, 24),
    "L4": GpuType(121e12, 0.3e12, 12),
    "L40S": GpuType(362e12, 0.864e12, 12),
    "A10G": GpuType(70e12, 0.6e12, 12),
}

#: Share of the peak that a model is assumed to reach on a GPU, from an unfavourable to a favourable case.
UTILISATION = Interval(0.25, 0.40, 0.60)
#: The same of the vision tower of a family. The middle is what one H200 reached: torch 2.11, November 2026, random
#: weights, 32 frames of 1280 x 720 (jobs/benchmark/README.md). Other GPUs are assumed to lie in the range.
TOWER_UTILISATION: Mapping[str, Interval] = {
    "llava_onevision": Interval(0.30, 0.48, 0.60),
    "qwen2_5_vl": Interval(0.30, 0.50, 0.60),
    "qwen3_vl": Interval(0.28, 0.43, 0.60),
}


def named_type(name: str) -> str | None:
    """Find the type in the table that a device or a Ray resource names, e.g. "NVIDIA A100-SXM4-80GB"; None if none."""
    words = name.upper().replace("_", "-").replace(" ", "-").split("-")
    found = [kind for kind in GPU_TYPES if kind.split("-")[0] in words]
    if "A100" in found and any(word.startswith("40G") for word in words):
        return "A100-40GB"
    return found[0] if found else None
