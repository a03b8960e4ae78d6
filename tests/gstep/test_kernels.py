"""The kernels of all rooms: the checks.py of each in one process of its own, and what compiles for GPUs not here."""

import os
import re

import pytest

from tests.gstep.synthetic import needs_cuda, needs_triton
from tests.interpreter import run_python

CHECKS = ("tests/gstep/selection/gpu/checks.py", "tests/gstep/backbones/checks.py")


@needs_triton
@pytest.mark.parametrize(
    ("interpret", "left_out"),
    [("1", "too large for the interpreter"), pytest.param("0", "for the interpreter alone", marks=needs_cuda)],
    ids=["cpu", "cuda"],
)
def test_kernels_equal_the_plain_form(interpret: str, left_out: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": interpret}
    done = run_python("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *CHECKS, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert {*re.findall(r"^SKIPPED \[\d+\] [^:]+:\d+: (.+)$", done.stdout, re.MULTILINE)} == {left_out}, done.stdout


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gstep.backbones import gpu_kernels
from gstep.selection.gpu import kernels

TILE = {"HIDDEN": 3584, "BLOCK": 128, "BLOCK_D": 64}
SELECTION = {"num_warps": 8, "enable_fp_fusion": False}
CASES = {
    kernels.squares_kernel: (["*bf16", "*fp64", "i32"], TILE),
    kernels.gram_kernel: (["*bf16", "*i64", "*fp32", "i32", "i32"], {**TILE, "GROUP": 8}),
    kernels.fold_kernel: (["*i64", "*fp64", "*fp64", "*fp32", "*fp64", "i32", "i32"], {"ROWS": 8, "BLOCK": 256}),
    kernels.refresh_kernel: (["*bf16", "*i64", "*i64", "*fp64", "*i32", "*i64", "*i32", "*fp64", "i32"], TILE),
    kernels.greedy_kernel: (
        ["*fp64", "*i64", "*fp64", "*fp64", "*fp64", "*i32", "*i64", "*i32", "*fp64", "i32", "i32"],
        {"SLOTS": 8192},
    ),
    gpu_kernels.norm_kernel: (
        ["*bf16"] * 6 + ["i32", "fp32"],
        {"WIDTH": 1152, "BLOCK": 2048, "ROWS": 2, "ADDED": True, "CENTRED": True},
    ),
    gpu_kernels.rotate_kernel: (
        ["*bf16", "*fp32", "*fp32"], {"HEADS": 16, "HALF": 40, "BLOCK_HEADS": 32, "BLOCK_HALF": 64}
    ),
    gpu_kernels.gate_kernel: (["*bf16", "*bf16"], {"WIDTH": 3456, "BLOCK": 1024}),
}
for kernel, (types, constants) in CASES.items():
    options = SELECTION if kernel.fn.__module__ == kernels.__name__ else {"num_warps": 4}
    signature = dict(zip(kernel.arg_names, types + ["constexpr"] * len(constants), strict=True))
    for capability in (80, 90) if kernel is kernels.gram_kernel else (80,):  # the one whose products go by the GPU
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"]
        print(kernel, capability)
"""


@needs_triton
def test_every_kernel_compiles_for_gpus_that_are_not_here(tmp_path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_python("-c", COMPILED, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8 + 1
