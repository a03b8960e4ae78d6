"""For tests that need vLLM: small engines on the CPU. Importing this skips a module where vLLM is missing."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
pytest.importorskip("vllm", reason="vLLM is not installed here: see tests/test_vllm.py")

# Blocks and steps that are shorter than the prompts of these tests: the prefix cache and chunked prefill have work.
PARAMS = {"block_size": 32, "max_num_batched_tokens": 640, "max_num_seqs": 16}
