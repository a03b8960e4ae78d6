"""vLLM settings for cached tokens and live pruning: engine arguments, sampling parameters, environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from gstep.backbones import ModelSource, Runtime
from gstep.checkpoints.tensors import iter_quantizations
from gstep.errors import ModelError
from gstep.language.types import Decoding
from gstep.language.weights import list_end_ids
from gstep.serving import ARCHITECTURES, LIVE_ARCHITECTURES, register
from gstep.serving.live import LIVE, LivePruning

PLUGINS = "vllm.general_plugins"
#: An extension of vLLM's worker with which vLLM's own methods prune on CPUs too.
PRUNING_WORKER = "gstep.serving.live_models.PruningWorker"
# Videos of up to _SMALL_VIDEO tokens fit into a step with vLLM's default limits, on any device and in its server.
_SMALL_VIDEO = 2048
_BATCHED_TOKENS = 8192  # the limit of tokens per step for larger videos, unless a video needs more
_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1"}
_ON_CPU = {
    # Otherwise vLLM binds threads to cores that other processes use, or fails to.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}

# Settings of generation_config.json that change answers and that vLLM does not support -> values that disable them.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
}

# vLLM's connectors that look up a video's keys and values by the hash of its rows, according to the source of vLLM
# 0.32: all but the last by the prefix cache's block hashes. ``kv_offloading_backend=native`` uses the first or second.
_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "ExampleConnector")

_LINEAR_ATTENTION = ("qwen3_5", "qwen3_5_moe")  # model types whose kernels on a CPU take only bfloat16

#: Variables that ``prepare_process`` sets.
ENVIRONMENT = (*_ENVIRONMENT, *_ON_CPU)


def make_engine_options(
    source: ModelSource, runtime: Runtime, largest_video: int, tensor_parallel: int = 1
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs for serving this model's cached tokens.

    The engine builds no vision tower and runs no video processor.

    Args:
        largest_video: the maximum number of visual tokens of one video in a prompt; above 2048,
            ``max_num_batched_tokens`` is set to it or to 8192, whichever is larger.
        tensor_parallel: the number of GPUs per model.
    """
    architecture = ARCHITECTURES.get(source.model_type)
    return {
        **_make_model_options(source, runtime, tensor_parallel),
        "hf_overrides": {"architectures": [architecture]} if architecture else {},
        # vLLM builds no vision tower, and runs no processor on videos.
        "enable_mm_embeds": True,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        "mm_processor_cache_gb": 0,
        "generation_config": "vllm",  # each request has the checkpoint's settings in its sampling parameters
        "disable_log_stats": False,  # report the times of each request
        # The kept tokens of a video must fit into a step, because the encoder cache has the size of a step.
        **({"max_num_batched_tokens": max(_BATCHED_TOKENS, largest_video)} if largest_video > _SMALL_VIDEO else {}),
    }


def make_live_engine_options(
    source: ModelSource, runtime: Runtime, live: LivePruning, num_frames: int, tensor_parallel: int = 1
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs for pruning this model's videos as they are encoded.

    Args:
        num_frames: the number of evenly spaced frames that the loader takes of a video; all frames if it has fewer.

    Raises:
        KeyError: the model type has no live class.
    """
    return {
        **_make_model_options(source, runtime, tensor_parallel),
        "hf_overrides": make_live_overrides(source, live),
        "video_pruning_rate": live.rate,
        # This loader takes a number of frames; the Qwen families' own loaders take two frames per second.
        "media_io_kwargs": {"video": {"num_frames": num_frames, "video_backend": "opencv"}},
    }


def make_live_overrides(source: ModelSource, live: LivePruning) -> dict[str, Any]:
    """Return the config.json overrides (``hf_overrides``) with which vLLM prunes this model's videos.

    Raises:
        KeyError: the model type has no live class.
    """
    return {"architectures": [LIVE_ARCHITECTURES[source.model_type]], LIVE: live.as_options()}


def _make_model_options(source: ModelSource, runtime: Runtime, tensor_parallel: int) -> dict[str, Any]:
    """Return the keyword arguments of EngineArgs that cached and live engines share.

    Besides the model, its revision, dtype and parallelism, they include: weights from safetensors only, no remote code,
    prefix caching on, ``max_model_len`` as large as the model and memory allow, and no compilation on a CPU.
    """
    name, revision = source.pretrained()
    return {
        "model": name,
        "revision": revision,
        "tokenizer_revision": revision,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "dtype": runtime.dtype_name,
        "tensor_parallel_size": tensor_parallel,
        "distributed_executor_backend": "mp" if tensor_parallel > 1 else None,
        "enable_prefix_caching": True,
        "max_model_len": -1,  # as long as the model and memory allow
        "enforce_eager": runtime.device == "cpu",  # compiling would take minutes on a CPU
    }


def check_cpu_support(source: ModelSource, runtime: Runtime) -> None:
    """Raise ModelError if vLLM cannot run this model on this node's CPU, or would give wrong answers; a GPU passes.

    On a CPU, linear attention (Qwen3.5) needs bfloat16, and some quantized weights need VNNI or AVX-512.
    """
    if runtime.device != "cpu":
        return
    if source.model_type in _LINEAR_ATTENTION and runtime.dtype != torch.bfloat16:
        raise ModelError(
            f"{source.name!r}: vLLM runs {source.model_type} on a CPU only in bfloat16, not in {runtime.dtype_name}: "
            "pass --dtype bfloat16, or use --engine transformers"
        )
    _check_quantized_products(source)


def _check_quantized_products(source: ModelSource) -> None:
    """Raise ModelError if this CPU lacks instructions that vLLM needs for quantized weights; only x86-64 is checked.

    INT8 inputs need VNNI, without which sums overflow; 4-bit weights need AVX-512.
    """
    cpu = torch.cpu.get_capabilities()
    if cpu["architecture"] != "x86_64":
        return
    for _, quantization in iter_quantizations(source.config):
        groups = (quantization.get("config_groups") or {}).values()
        inputs = [group.get("input_activations") or {} for group in groups]
        has_int8_inputs = any(of_group.get("type") == "int" and of_group.get("num_bits") == 8 for of_group in inputs)
        has_4_bits = any((group.get("weights") or {}).get("num_bits") == 4 for group in groups)
        if has_int8_inputs and not (cpu["avx512_vnni"] or cpu["avx_vnni"]):
            lacks, why = "VNNI", "vLLM adds up products of INT8 by INT8 in 16 bits there, which overflow: wrong answers"
        elif (has_4_bits or quantization.get("quant_method") in ("awq", "gptq")) and not cpu["avx512_bw"]:
            lacks, why = "AVX-512", "vLLM has no kernels of 4-bit weights for it"
        else:
            continue
        raise ModelError(
            f"{source.name!r} is quantized, and this node's CPU has no {lacks}: {why}. Use a GPU, a CPU with {lacks}, "
            "or the unquantized checkpoint"
        )


#: Engine arguments that this project sets and users may not.
RESERVED_OPTIONS = frozenset(
    (
        *("model", "revision", "tokenizer", "tokenizer_revision", "trust_remote_code", "load_format", "dtype"),
        *("hf_overrides", "tensor_parallel_size", "enable_mm_embeds", "limit_mm_per_prompt", "mm_processor_cache_gb"),
        *("generation_config", "disable_log_stats", "hf_config_path", "skip_tokenizer_init"),
        "hf_token",  # a secret, which belongs in the environment (HF_TOKEN)
    )
)
#: Further engine arguments that live pruning sets and users may not.
LIVE_RESERVED_OPTIONS = frozenset(("video_pruning_rate", "video_pruning_method", "media_io_kwargs", "model_impl"))


def prepare_process(device: str, tensor_parallel: int, *, multiprocessing: bool = False) -> None:
    """Set vLLM's environment variables in this process, and register this package's model classes in vLLM.

    Call it before vLLM is imported elsewhere. Variables that are set already keep their values.

    Args:
        device: "cpu" sets the variables of ``_ON_CPU`` too.
        tensor_parallel: the number of GPUs per model; above 1, vLLM starts processes.
        multiprocessing: True if the engine runs in a separate process.

    Raises:
        ModelError: vLLM would start processes without these classes, because this package is not installed.
    """
    single_process = {} if multiprocessing else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for name, value in {**_ENVIRONMENT, **single_process, **(_ON_CPU if device == "cpu" else {})}.items():
        os.environ.setdefault(name, value)
    if (tensor_parallel > 1 or multiprocessing) and not any(
        point.name == "gstep" for point in entry_points(group=PLUGINS)
    ):
        raise ModelError(
            "this package is only on the path, not installed here. The processes of vLLM need its entry point "
            f"{PLUGINS}: pip install -e '.[vllm]' on every node"
        )
    register()


def read_max_video_rows(vllm_config: Any) -> int:
    """Return the maximum number of rows per video, the encoder cache size."""
    from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: PLC0415 - this module is imported without vLLM, too
    from vllm.multimodal.encoder_budget import MultiModalBudget  # noqa: PLC0415

    return int(MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False).encoder_cache_size)


def check_video_fits(engine_args: Any, largest_video: int) -> None:
    """Raise ModelError if the largest video of a prompt does not fit into an engine with these EngineArgs.

    If ``max_num_batched_tokens`` is set and below ``largest_video``, this creates vLLM's configuration, without
    weights.
    """
    step = engine_args.max_num_batched_tokens
    if step is None or step >= largest_video:
        return
    max_rows = read_max_video_rows(engine_args.create_engine_config())  # loads no weights
    if max_rows < largest_video:
        raise ModelError(
            f"max_num_batched_tokens={step} limits a video to {max_rows:,} tokens in a prompt, and the largest has "
            f"{largest_video:,}: set max_num_batched_tokens={largest_video} or more, or leave it out"
        )


def check_connectors(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError if a connector could answer about a video from another video's keys and values.

    A connector that looks up keys by token ids cannot tell videos apart. Only the vLLM connectors in ``_CONNECTORS``
    pass, also inside a MultiConnector, and the backend "native". A connector from another module never does, nor a
    ``kv_transfer_config`` that is not an object.

    Args:
        arguments: arguments of EngineArgs, of which ``kv_offloading_backend`` and ``kv_transfer_config`` are read.
    """
    if (backend := arguments.get("kv_offloading_backend") or "native") != "native":
        _refuse_connector(f"kv_offloading_backend={backend}")
    configs = [arguments.get("kv_transfer_config")]
    while configs:
        config = configs.pop()
        if config is None:
            continue
        settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
        if settings is None:
            raise ModelError(f"kv_transfer_config={config!r} is not a JSON object")
        name, module = settings.get("kv_connector"), settings.get("kv_connector_module_path")
        if module is not None:
            _refuse_connector(f"kv_transfer_config: {name} of {module}")
        if name == "MultiConnector":
            configs += (settings.get("kv_connector_extra_config") or {}).get("connectors", [])
        elif name is not None and name not in _CONNECTORS:
            _refuse_connector(f"kv_transfer_config: {name}")


def check_live_engine(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError if an engine argument could make live pruning give wrong answers; missing arguments pass.

    Refused are connectors, ``kv_offloading_size``, a pipeline of several stages and a LoRA of the vision tower.

    Args:
        arguments: arguments of EngineArgs, plus ``enable_tower_connector_lora``.
    """
    for name, key in (("kv_transfer_config", "kv_connector"), ("ec_transfer_config", "ec_connector")):
        config = arguments.get(name)
        settings = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
        if config is not None and (settings is None or settings.get(key) is not None):
            _refuse_live_engine(name, "a connector may bring a video that another server has pruned by another method")
    if arguments.get("kv_offloading_size") is not None:
        _refuse_live_engine("kv_offloading_size", "it is not tested with live pruning")
    if (arguments.get("pipeline_parallel_size") or 1) != 1:
        _refuse_live_engine("pipeline_parallel_size", "the later stages of a pipeline do not see the kept tokens")
    if arguments.get("enable_tower_connector_lora"):
        _refuse_live_engine("enable_tower_connector_lora", "vLLM computes the tower's tokens from the kept ones")


def _refuse_live_engine(name: str, reason: str) -> None:
    """Raise ModelError for an engine argument that is not supported with live pruning."""
    raise ModelError(f"{name}: {reason}; leave it out, or serve a cache (python -m jobs.serve CACHE)")


def _refuse_connector(setting: str) -> None:
    """Raise ModelError for a connector setting that might mix up videos."""
    raise ModelError(
        f"{setting}: it is not known to tell two videos apart. The placeholders of all videos have equal token ids: a "
        "connector that looks up keys by token ids answers about a video from another video's keys. Use a connector "
        f"that identifies videos by hash ({', '.join(_CONNECTORS)}; kv_offloading_backend=native), or leave it out"
    )


def make_sampling_params(decoding: Decoding, generation: Any) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's SamplingParams for one answer.

    They include the end tokens and the repetition penalty of the checkpoint's GenerationConfig. Greedy decoding
    (temperature 0) gets no ``top_p``, ``top_k`` and ``seed``.
    """
    sampling = {"top_p": decoding.top_p, "top_k": decoding.top_k, "seed": decoding.seed} if decoding.temperature else {}
    return {
        "max_tokens": decoding.max_new_tokens,
        "temperature": decoding.temperature,
        "repetition_penalty": generation.repetition_penalty or 1.0,
        "stop_token_ids": list_end_ids(generation),
        "ignore_eos": True,  # only stop_token_ids end an answer, not the tokenizer's end token
        "detokenize": False,
        **sampling,
    }


def check_generation_settings(name: str, generation: Any) -> None:
    """Raise ModelError if a checkpoint's GenerationConfig has a setting that changes answers and vLLM lacks.

    These are the keys of ``_UNSUPPORTED``, such as bad_words_ids; absent settings, and values without effect, pass.
    ``name`` is the model's, for the error.
    """
    for setting, neutral in _UNSUPPORTED.items():
        value = getattr(generation, setting, None)
        if value not in neutral:
            raise ModelError(
                f"{name!r}: generation_config.json sets {setting} to {value!r}, which vLLM does not support: "
                "its answers would differ. Use --engine transformers"
            )
