"""What vLLM is told of a model: no vision tower, and room for the largest video."""

import os
import sys
from types import SimpleNamespace

import pytest

from gstep.backbones import ModelSource, choose_runtime
from gstep.errors import ModelError
from gstep.serving import ARCHITECTURES
from gstep.serving import options as serving
from gstep.serving.options import OWN, engine_options, prepare_process
from tests.gstep.llms import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_no_tower_is_built_and_no_processor_asked(name):
    source = ModelSource.resolve(name)
    told = engine_options(source, choose_runtime("cpu", "float32"), 100)
    assert told["limit_mm_per_prompt"] == {"image": 0, "video": 0} and told["enable_mm_embeds"]
    assert (told["trust_remote_code"], told["load_format"], told["dtype"]) == (False, "safetensors", "float32")
    ours = {"architectures": [ARCHITECTURES[source.model_type]]} if name != "tiny" else {}
    assert told["hf_overrides"] == ours  # LLaVA-OneVision goes by vLLM's own class
    assert told.keys() >= OWN - {"tokenizer", "hf_config_path", "skip_tokenizer_init", "hf_token", "ec_transfer_config"}


def test_a_step_takes_the_largest_video():
    source, runtime = ModelSource.resolve("tiny"), choose_runtime("cpu", "float32")
    assert "max_num_batched_tokens" not in engine_options(source, runtime, 2048)  # vLLM's own limits are for the device
    assert engine_options(source, runtime, 2049)["max_num_batched_tokens"] == 8192
    assert engine_options(source, runtime, 75_000)["max_num_batched_tokens"] == 75_000


@pytest.fixture
def registered(monkeypatch):
    """The classes that are registered with vLLM, which need not be installed."""
    found = {}
    registry = SimpleNamespace(get_supported_archs=found.keys, register_model=found.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    return found


def test_what_a_user_set_in_the_environment_stays(monkeypatch, registered):
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    prepare_process("cpu", 1)
    assert registered.keys() == set(ARCHITECTURES.values())
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.usefixtures("registered")
def test_processes_that_would_not_know_the_classes_are_refused(monkeypatch):
    monkeypatch.setattr(serving, "entry_points", lambda group: ())
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    prepare_process("cuda", 1)
    for asked in ({"tensor_parallel": 2}, {"tensor_parallel": 1, "multiprocessing": True}):
        with pytest.raises(ModelError, match="pip install -e"):
            prepare_process("cuda", **asked)
