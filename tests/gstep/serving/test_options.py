"""What vLLM is told of a model and of decoding: no vision tower, room for the largest video, the ends of an answer."""

import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from gstep.backbones import ModelSource, Runtime, choose_runtime
from gstep.errors import ModelError
from gstep.language import Decoding
from gstep.serving import ARCHITECTURES, LIVE_ARCHITECTURES
from gstep.serving import options as serving
from gstep.serving.options import (
    RESERVED_OPTIONS,
    check_connectors,
    check_cpu_support,
    check_generation_settings,
    make_sampling_params,
)
from tests.gstep.llms import FAMILIES
from tests.gstep.quantized import quantize


@pytest.mark.parametrize("name", FAMILIES)
def test_no_tower_is_built_and_no_processor_asked(name):
    source = ModelSource.resolve(name)
    told = serving.make_engine_options(source, choose_runtime("cpu", "bfloat16"), 100)
    assert told["limit_mm_per_prompt"] == {"image": 0, "video": 0} and told["enable_mm_embeds"]
    assert (told["trust_remote_code"], told["load_format"], told["dtype"]) == (False, "safetensors", "bfloat16")
    ours = {"architectures": [ARCHITECTURES[source.model_type]]} if "qwen" in name else {}
    assert told["hf_overrides"] == ours  # others go by vLLM's own classes
    assert told.keys() >= RESERVED_OPTIONS - {"tokenizer", "hf_config_path", "skip_tokenizer_init", "hf_token"}


def test_a_step_takes_the_largest_video():
    source, runtime = ModelSource.resolve("tiny"), choose_runtime("cpu", "float32")
    for largest, tokens in ((2048, None), (2049, 8192), (75_000, 75_000)):  # vLLM's own limits are for the device
        assert serving.make_engine_options(source, runtime, largest).get("max_num_batched_tokens") == tokens


OLD_CPU = {"architecture": "x86_64", "avx512_bw": False, "avx512_vnni": False, "avx_vnni": False}


@pytest.mark.parametrize(
    ("method", "cpu", "lacks"),
    [
        ("compressed-tensors", {}, "VNNI"),
        ("compressed-tensors", {"avx512_bw": True}, "VNNI"),
        ("compressed-tensors", {"avx512_bw": True, "avx512_vnni": True}, None),
        ("compressed-tensors", {"avx_vnni": True}, None),
        ("awq", {"avx_vnni": True}, "AVX-512"),
        ("awq", {"avx512_bw": True}, None),
        ("gptq", {}, "AVX-512"),
        ("awq", {"architecture": "aarch64"}, None),
        ("fp8", {}, None),
    ],
)
def test_quantized_weights_are_refused_on_a_cpu_that_vllm_has_no_right_products_for(
    monkeypatch, tmp_path, method, cpu, lacks
):
    source = ModelSource.resolve(quantize("tiny", method, tmp_path / "q"), quantized=True)
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: OLD_CPU | cpu)
    check_cpu_support(source, Runtime("cuda", torch.bfloat16, "sdpa"))
    with pytest.raises(ModelError, match=f"CPU has no {lacks}:") if lacks else nullcontext():
        check_cpu_support(source, choose_runtime("cpu", "bfloat16"))


def test_four_bits_of_compressed_tensors_are_four_bits(monkeypatch):
    source = ModelSource.resolve("tiny")
    group = {"weights": {"num_bits": 4, "type": "int"}, "input_activations": None}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: OLD_CPU)
    check_cpu_support(source, choose_runtime("cpu", "bfloat16"))
    quantized = {"quantization_config": quantization}
    for more in (quantized, {"text_config": source.config["text_config"] | quantized}):
        four = replace(source, config=source.config | more)
        with pytest.raises(ModelError, match="CPU has no AVX-512"):
            check_cpu_support(four, choose_runtime("cpu", "bfloat16"))


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
    serving.prepare_process("cpu", 1)
    assert registered.keys() == {*ARCHITECTURES.values(), *LIVE_ARCHITECTURES.values()}
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "40"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1" and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.usefixtures("registered")
def test_processes_that_would_not_know_the_classes_are_refused(monkeypatch):
    monkeypatch.setattr(serving, "entry_points", lambda group: ())
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "1")
    serving.prepare_process("cuda", 1)
    for asked in ({"tensor_parallel": 2}, {"tensor_parallel": 1, "multiprocessing": True}):
        with pytest.raises(ModelError, match="pip install -e"):
            serving.prepare_process("cuda", **asked)


def test_a_greedy_answer_ends_where_the_checkpoint_says_and_a_drawn_one_has_its_own_seed():
    ours = {"ignore_eos": True, "detokenize": False}
    generation = GenerationConfig(eos_token_id=[9, 7], repetition_penalty=1.05)
    ends = {"stop_token_ids": [7, 9], "repetition_penalty": 1.05}
    greedy = {"max_tokens": 5, "temperature": 0.0}
    assert make_sampling_params(Decoding(max_new_tokens=5), generation) == greedy | ends | ours
    drawn = {"max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 123}
    none = {"stop_token_ids": [], "repetition_penalty": 1.0}
    assert make_sampling_params(Decoding(4, 0.7, 0.9, 20, 123), GenerationConfig(eos_token_id=None)) == (
        drawn | none | ours
    )


def test_what_vllm_does_not_have_is_refused():
    check_generation_settings("m", GenerationConfig(repetition_penalty=1.3))
    for setting in ({"no_repeat_ngram_size": 3}, {"suppress_tokens": [4]}, {"min_new_tokens": 2}):
        with pytest.raises(ModelError, match=next(iter(setting))):
            check_generation_settings("m", GenerationConfig(**setting))


def transfer(name, **more):
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", **more}}


def several(*names):
    children = [transfer(name)["kv_transfer_config"] for name in names]
    return transfer("MultiConnector", kv_connector_extra_config={"connectors": children})


@pytest.mark.parametrize(
    "arguments",
    [
        *({}, {"kv_transfer_config": {"kv_role": "kv_both"}}, transfer("OffloadingConnector")),
        {"kv_transfer_config": None, "kv_offloading_backend": "native", "kv_offloading_size": 4},
        several("MooncakeStoreConnector", "SimpleCPUOffloadConnector"),
        {"kv_transfer_config": SimpleNamespace(kv_connector="ExampleConnector")},  # as vLLM's own class has it
    ],
)
def test_connectors_that_go_by_a_videos_hash_are_taken(arguments):
    check_connectors(arguments)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"kv_offloading_backend": "lmcache", "kv_offloading_size": 4}, "kv_offloading_backend=lmcache"),
        (transfer("LMCacheConnectorV1"), "kv_transfer_config: LMCacheConnectorV1"),
        (transfer("OffloadingConnector", kv_connector_module_path="mine"), "OffloadingConnector of mine"),
        (several("OffloadingConnector", "HF3FSKVConnector"), "kv_transfer_config: HF3FSKVConnector"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="FlexKVConnectorV1")}, "FlexKVConnectorV1"),
    ],
)
def test_a_connector_that_may_answer_one_video_from_anothers_keys_is_refused(arguments, setting):
    with pytest.raises(ModelError, match=rf"{setting}: .* equal token ids.*kv_offloading_backend=native\), or leave"):
        check_connectors(arguments)
    with pytest.raises(ModelError, match=r"kv_transfer_config='LMCache' is not a JSON object"):
        check_connectors({"kv_transfer_config": "LMCache"})
