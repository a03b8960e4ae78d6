"""For tests that need vLLM: small engines on the CPU. Importing this skips a module where vLLM is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:  # before anything is set that tests beside this one would inherit
    pytest.skip("vLLM is not installed here: see tests/test_vllm.py", allow_module_level=True)


class _Cpu:
    """Triton's driver of a CPU, as far as vLLM asks it."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_current_target() -> SimpleNamespace:
        return SimpleNamespace(backend="cpu", arch="", warp_size=1)


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # Its kernels are Triton's, whose interpreter runs them on a CPU; vLLM looks for a compiler that no wheel has.
    os.environ["TRITON_INTERPRET"] = "1"
    backends = pytest.importorskip("triton.backends").backends
    backends["cpu"] = SimpleNamespace(driver=_Cpu, compiler=None)
if os.environ.get("TRITON_INTERPRET") == "1":
    # The interpreter counts loops in Python's int, which vLLM's kernel of top-p takes for a tensor: PyTorch's form.
    sampler = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    sampler.HAS_TRITON = False

# Blocks and steps that are shorter than the prompts of these tests: the prefix cache and chunked prefill have work.
PARAMS = {"block_size": 32, "max_num_batched_tokens": 640, "max_num_seqs": 16}
