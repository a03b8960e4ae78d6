"""The device that encodes: whether its arithmetic is what the code assumes, and how fast it is.

It runs where the encoder would, on each node with a GPU, else on a CPU here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from gstep.selection.precision import full_precision
from pipeline.doctor.finding import Finding, guarded
from pipeline.prune.encode_stage import EncodeSetup

# Share of matrix products' speed. An idle H200 reached 0.55 with LLaVA-OneVision-7B, 0.37 with Qwen3-VL-8B and 0.32
# with Qwen2.5-VL-7B, by torch's own choice of attention (random weights, 32 frames).
_SLOW_SHARE = 0.25
_SLOW_COPY = 6e9  # bytes/s from pinned memory: less than a quarter of PCIe 4
_COPIED = 256 * 2**20
_KERNEL_WIDTH = 3584  # D of a 7B model's tokens
_ROUNDS = 3


@dataclass(frozen=True)
class DeviceReport:
    """The findings about one device.

    Attributes:
        findings: a line each.
        encode_s: seconds that encoding and pruning one video takes; None where that failed.
    """

    findings: list[Finding]
    encode_s: float | None


def check_device(setup: EncodeSetup, shape: tuple[int, int, int]) -> DeviceReport:
    """Check the device that ``setup`` chooses, with made-up frames of [frames, height, width]."""
    found: list[Finding] = []
    seconds: list[float] = []
    cuda = torch.cuda.is_available() and setup.device != "cpu"
    device = torch.device("cuda" if cuda else "cpu")
    found += guarded("arithmetic", lambda: _arithmetic(device))
    if cuda:
        found += guarded("gpu", lambda: _gpu(device))
        found += guarded("kernels", lambda: _kernels(device))
        found += guarded("copies", lambda: _copies(device))
    else:
        found.append(Finding("gpu", "unknown", "no GPU here: its kernels, copies and speed were not looked at"))
    found += guarded("encode", lambda: _encode(setup, shape, device, seconds))
    return DeviceReport(found, median(seconds) if seconds else None)


def _arithmetic(device: torch.device) -> Iterator[Finding]:
    """Yield findings on two assumptions: bfloat16 sums accumulate in float32, and pruning multiplies without TF32."""
    ones = torch.ones(4096, device=device, dtype=torch.bfloat16)
    total = float(ones[None] @ ones[:, None])
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with full_precision():
            product = (left.float().to(device) @ right.float().to(device)).double().cpu()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    error = float((product - left.float().double() @ right.float().double()).abs().max())
    if total != 4096 or error > 1e-3:  # TensorFloat-32 errs by 1e-1 here, float32 by 1e-4
        says = f"4096 ones in bfloat16 sum to {total:g}, products in float32 err by {error:.1e}"
        yield Finding("arithmetic", "wrong", says, "other tokens would be selected here: update torch or the driver")
    else:
        says = f"bfloat16 sums in float32; float32 products while pruning err by {error:.0e}"
        yield Finding("arithmetic", "ok", says)


def _gpu(device: torch.device) -> Iterator[Finding]:
    """Yield a finding with the GPU's name, memory and compute capability; "slow" without native bfloat16."""
    properties = torch.cuda.get_device_properties(device)
    says = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability {properties.major}."
        f"{properties.minor}, CUDA {torch.version.cuda}"
    )
    remedy = "bfloat16 is emulated before capability 8.0: use --dtype float16"
    yield Finding.slow_if(properties.major < 8, "gpu", says, remedy)


def _kernels(device: torch.device) -> Iterator[Finding]:
    """Compile the selection's GPU kernels, compare their picks with the reference's, and time both; yield findings."""
    from gstep import prune  # noqa: PLC0415 - only a GPU asks for it
    from gstep.selection.gpu.check import check_kernels  # noqa: PLC0415 - needs Triton
    from gstep.selection.reference import density_guided_fps  # noqa: PLC0415

    started = time.perf_counter()
    check_kernels(device, torch.bfloat16, _KERNEL_WIDTH)
    compiled_s = time.perf_counter() - started
    tokens = torch.randn(32, 196, _KERNEL_WIDTH, device=device, dtype=torch.bfloat16)
    plain = tokens.flatten(0, 1)
    density = torch.rand(len(plain), device=device, dtype=torch.float64)
    fast_s = _seconds(lambda: prune(tokens, 0.25), device)
    plain_s = _seconds(lambda: density_guided_fps(plain, density, len(plain) // 4), device, rounds=1)
    says = f"agree with the plain form; {fast_s * 1e3:.1f} ms for 6,272 tokens (plain {plain_s * 1e3:.0f} ms)"
    yield Finding("kernels", "ok" if fast_s < plain_s else "slow", f"{says}; compiled in {compiled_s:.0f} s")


def _copies(device: torch.device) -> Iterator[Finding]:
    """Yield a finding with the speed of copies from pinned memory to the GPU."""
    pinned = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    rate = _COPIED / _seconds(lambda: there.copy_(pinned, non_blocking=True), device)
    back = _COPIED / _seconds(lambda: pinned.copy_(there, non_blocking=True), device)
    remedy = "the GPU may sit on fewer PCIe lanes than it has (nvidia-smi -q -d PCIE)"
    says = f"{rate / 1e9:.1f} GB/s to the GPU, {back / 1e9:.1f} from it"
    yield Finding.slow_if(min(rate, back) < _SLOW_COPY, "copies", says, remedy)


def check_links() -> Finding:
    """Return a finding with the speed of copies between two GPUs: over PCIe, NVLink would be several times as fast."""
    here, other = (torch.empty(_COPIED, dtype=torch.uint8, device=f"cuda:{place}") for place in range(2))
    rate = _COPIED / _seconds(lambda: other.copy_(here, non_blocking=True), torch.device("cuda", 1))
    says = f"{rate / 1e9:.1f} GB/s from one GPU to another"
    remedy = "copies pass through the host: a vLLM over several GPUs is slow; look at nvidia-smi topo -m"
    return Finding.slow_if(not torch.cuda.can_device_access_peer(0, 1), "links", says, remedy)


def _encode(
    setup: EncodeSetup, shape: tuple[int, int, int], device: torch.device, seconds: list[float]
) -> Iterator[Finding]:
    """Encode and prune made-up frames; yield how the time compares with matrix products on the same device."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - imports Triton, which a driver does not need

    started = time.perf_counter()
    encoder = setup.encoder()
    loaded_s = time.perf_counter() - started
    frames = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    with FlopCounterMode(display=False) as counter:
        visual = encoder.encoded(frames)
    seconds += [_seconds(lambda: encoder.pruned(encoder.encoded(frames)), device, rounds=1) for _ in range(_ROUNDS)]
    share = counter.get_total_flops() / median(seconds) / _product_speed(device, visual.tokens.dtype)
    says = (
        f"{median(seconds):.3f} s a video of {shape[0]} frames, {share:.0%} of the speed of matrix products; "
        f"loaded in {loaded_s:.1f} s"
    )
    remedy = "look at nvidia-smi for other work, clocks and power; leave --attn on auto"
    yield Finding.slow_if(device.type == "cuda" and share < _SLOW_SHARE, "encode", says, remedy)


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product."""
    n, dtype = (8192, dtype) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return float(2 * n**3 / _seconds(lambda: left @ right, device))


def _seconds(work: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Return the median seconds of ``rounds`` calls, GPU kernels included.

    With several rounds a first one is not counted.
    """
    found = []
    for turn in range(rounds + (rounds > 1)):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn or rounds == 1:
            found.append(time.perf_counter() - started)
    return median(found)
