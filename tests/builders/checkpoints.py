"""Tiny random checkpoints of many video LLMs, in the layout of the hub and made by the classes of transformers.

The architecture of each is the real one; only widths, depths and vocabularies are small. All share one tokenizer.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

D = 64  # width of the language model

_WORDS = (
    "<pad> <s> </s> <|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> "
    "<|image|> <|video|> <|audio|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> <image> "
    "<video> <im_patch> <im_col> <im_start> <low_res_im_start> <frame_start> <im_end> <frame_end> <im_low> <image_id> "
    "</image_id> </image> <slice> </slice> <fake_token_around_image> <global-img> <end_of_utterance> <row_1_col_1> "
    "<|audio_pad|> <|audio_start|> <|audio_end|> <|vision_bos|> <|vision_eos|> <|VIDEO|> <|IMAGE|> <|AUDIO|> <img> "
    "</img> <IMG_CONTEXT> <|media_begin|> <|media_content|> <|media_end|> <|media_pad|> <|video_start|> <|video_end|> "
    "<|image_start|> <|image_end|> <boi> <eoi> <boa> <eoa> <|IMAGE_PLACEHOLDER|> <|IMAGE_START|> <|IMAGE_END|> "
    "<|VIDEO_START|> <|VIDEO_END|> <|audio_bos|> <|audio_eos|> <so_embedding> <|video_sep|> <so_start> <so_end> "
    "<|patch|> <|vid_frame_separator|> <|vid_start|> <|vid_end|> <|IMAGE_PAD|> <|VIDEO_PAD|> <|imgpad|> "
    "<|audio_comp_pad|> ]<]image[>[ ]<]video[>["
)
#: The special tokens of every family.
TOKENS = [*_WORDS.split(), "]<]start of image[>[", "]<]end of image[>["]
#: A chat template, in which VIDEO stands for the marker of a video.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'video' %}VIDEO{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
#: Sizes that replace those of a config's defaults, by their keys.
SMALL = {
    "hidden_size": D, "intermediate_size": 96, "num_hidden_layers": 2, "depth": 2, "num_attention_heads": 4,
    "num_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": D, "text_hidden_size": D,
    "max_position_embeddings": 8192, "num_position_embeddings": 64, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4,
    "num_local_experts": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "hidden_size_per_layer_input": 8, "num_query_tokens": 4, "encoder_layers": 1,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": D, "max_source_positions": 1500,
    "projection_dim": D, "decoder_layers": 1, "projector_hidden_size": D, "downsample_hidden_size": 16,
}  # fmt: skip


class Family(NamedTuple):
    """How the tiny checkpoint of a family is made.

    Attributes:
        processor: class of the processor.
        model: class of the model.
        tokens: special tokens that the processor reads from the tokenizer, by attribute.
        wrap: the marker of a video in the chat template; ``{}`` stands for the video token.
        config: keys of config.json that differ from the shrunken defaults; ``...`` removes one.
        processor_options: arguments of the processor.
        video_options: arguments of the video processor.
    """

    processor: str
    model: str
    tokens: Mapping[str, str] = {}
    wrap: str = "{}"
    config: Mapping[str, Any] = {}
    processor_options: Mapping[str, Any] = {}
    video_options: Mapping[str, Any] = {}


def merge(base: Mapping[str, Any], *patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of patches in place of its own, also in its sub-configs; ``...`` removes a key."""
    merged = dict(base)
    for patch in patches:
        for key, value in patch.items():
            if key.endswith("_config") and isinstance(value, dict):
                merged[key] = merge(merged.get(key) or {}, value)
            elif value is ...:
                merged.pop(key, None)
            else:
                merged[key] = value
    return merged


# fmt: off
_QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>", "audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
_LLAVA = {"image_token": "<image>", "video_token": "<video>"}
_GEMMA = {
    "image_token": "<|image|>", "video_token": "<|video|>", "audio_token": "<|audio|>", "boi_token": "<boi>",
    "eoi_token": "<eoi>", "boa_token": "<boa>", "eoa_token": "<eoa>",
}
_MINICPM = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "image_start_token": "<image>",
    "image_end_token": "</image>", "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}
_ERNIE = {
    "image_token": "<|IMAGE_PLACEHOLDER|>", "image_end_token": "<|IMAGE_END|>", "image_start_token": "<|IMAGE_START|>",
    "video_token": "<|VIDEO|>", "video_end_token": "<|VIDEO_END|>", "video_start_token": "<|VIDEO_START|>",
}
_INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SMOL = {
    "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>", "video_token": "<video>",
}
_QWEN_WRAP, _GLM_WRAP = "<|vision_start|>{}<|vision_end|>", "<|begin_of_video|>{}<|end_of_video|>"

_ROPE = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 3, 3]}
_MROPE = {"text_config": {"rope_parameters": _ROPE}}
_GLM_ROPE = {"text_config": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}}
_FULL_ATTENTION = {"vision_config": {"fullatt_block_indexes": [1]}}
_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": [0, 1], "depth": 3}}
_OMNI = {"vision_start_token_id": 0, "vision_end_token_id": 0}
_PATCHES = {"vision_config": {"image_size": 56, "patch_size": 14}}
_INSERT = {
    "vision_config": {"num_hidden_layers": 4, "insert_layer_id": 1, "patch_size": 14}, "insert_layer_id": 1,
    "patch_size": 14,
}
_LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16, "qk_nope_head_dim": 16, "num_key_value_heads": 4,
}
_GEMMA_TEXT = {
    "text_config": {"use_bidirectional_attention": "vision", "num_kv_shared_layers": 0, "sliding_window": 4096},
    "audio_config": None,
}
_MUSE = {
    "text_config": {"layer_rope_theta": [10000.0, 0], "sliding_window": 4096}, "out_hidden_size": 256,
    "vision_config": {"out_hidden_size": 256},
}
_SIZE = {"size": {"shortest_edge": 4096, "longest_edge": 2**24}}
_SLICE = {"scale_resolution": 168}  # above which a frame is cut into slices
_SQUARE = {"size": {"height": 56, "width": 56}}
_CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}

FAMILIES = {
    "qwen3_vl": Family("Qwen3VLProcessor", "Qwen3VLForConditionalGeneration", _QWEN, _QWEN_WRAP,
                       merge(_DEEPSTACK, _MROPE), video_options=_SIZE),
    "qwen3_5": Family("Qwen3VLProcessor", "Qwen3_5ForConditionalGeneration", _QWEN, _QWEN_WRAP, _MROPE,
                      video_options=_SIZE),
    "qwen2_5_vl": Family("Qwen2_5_VLProcessor", "Qwen2_5_VLForConditionalGeneration", _QWEN, _QWEN_WRAP,
                         merge(_FULL_ATTENTION, _MROPE)),
    "qwen2_vl": Family("Qwen2VLProcessor", "Qwen2VLForConditionalGeneration", _QWEN, _QWEN_WRAP,
                       merge({"vision_config": {"embed_dim": 64, "hidden_size": D, "mlp_ratio": 2}}, _MROPE)),
    "glm4v": Family("Glm4vProcessor", "Glm4vForConditionalGeneration", _GLM, _GLM_WRAP, _GLM_ROPE),
    "glm46v": Family("Glm46VProcessor", "Glm46VForConditionalGeneration", _GLM, _GLM_WRAP, _GLM_ROPE),
    "llava_next_video": Family("LlavaNextVideoProcessor", "LlavaNextVideoForConditionalGeneration", _LLAVA, "{}",
                               _PATCHES, {"patch_size": 14, "vision_feature_select_strategy": "default",
                                          "num_additional_image_tokens": 1}, _CROP),
    "llava_onevision": Family("LlavaOnevisionProcessor", "LlavaOnevisionForConditionalGeneration", _LLAVA, "{}",
                              _PATCHES, {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}, _SQUARE),
    "video_llava": Family("VideoLlavaProcessor", "VideoLlavaForConditionalGeneration", _LLAVA, "{}", _PATCHES,
                          {"patch_size": 14, "vision_feature_select_strategy": "full",
                           "num_additional_image_tokens": 1}, _CROP),
    "video_llama_3": Family("VideoLlama3Processor", "VideoLlama3ForConditionalGeneration", _QWEN, "{}",
                            {"vision_config": {"patch_size": 14}}, video_options=_SIZE),
    "gemma4": Family("Gemma4Processor", "Gemma4ForConditionalGeneration", _GEMMA, "{}",
                     merge(_GEMMA_TEXT, {"vision_config": {
                         "model_type": "gemma4_vision", "hidden_size": D, "intermediate_size": 96,
                         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
                         "pooling_kernel_size": 3}})),
    "molmo2": Family("Molmo2Processor", "Molmo2ForConditionalGeneration", _GLM, "{}",
                     {"vision_config": {"image_size": [56, 56], "num_position_embeddings": 16, "num_hidden_layers": 3},
                      "adapter_config": {"vision_feature_layer": [2, 1]},
                      "text_config": {"additional_vocab_size": 8, "rope_scaling_layers": None}},
                     video_options=_SQUARE),
    "minicpmv4_6": Family("MiniCPMV4_6Processor", "MiniCPMV4_6ForConditionalGeneration", _MINICPM, "{}", _INSERT,
                          video_options=_SLICE),
    "qwen3_omni_moe": Family("Qwen3OmniMoeProcessor", "Qwen3OmniMoeForConditionalGeneration", _QWEN, _QWEN_WRAP,
                             {"thinker_config": merge(_DEEPSTACK, {"vision_config": {"patch_size": 14}}, _OMNI, _MROPE),
                              "enable_audio_output": False}, video_options=_SIZE),
    "qwen2_5_omni": Family("Qwen2_5OmniProcessor", "Qwen2_5OmniForConditionalGeneration", _QWEN, _QWEN_WRAP,
                           {"thinker_config": merge(_FULL_ATTENTION, _OMNI, _MROPE), "enable_audio_output": False}),
    "ernie4_5_vl_moe": Family("Ernie4_5_VLMoeProcessor", "Ernie4_5_VLMoeForConditionalGeneration", _ERNIE,
                              "<|VIDEO_START|>{}<|VIDEO_END|>",
                              {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
                                               "moe_num_experts": 4, "moe_k": 2}},
                              video_options={"draw_on_frames": False, **_SIZE}),
    "internvl": Family("InternVLProcessor", "InternVLForConditionalGeneration", _INTERN, "{}",
                       {"vision_config": {"image_size": [56, 56], "patch_size": [14, 14]}}, {"image_seq_length": 4},
                       _SQUARE),
    "smolvlm": Family("SmolVLMProcessor", "SmolVLMForConditionalGeneration", _SMOL, "{}",
                      {"vision_config": {"image_size": 64, "patch_size": 16}}, {"image_seq_len": 4},
                      {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}),
    "exaone4_5": Family("Exaone4_5_Processor", "Exaone4_5_ForConditionalGeneration", _QWEN, _QWEN_WRAP),
    "lfm3_vl": Family("Lfm3VlProcessor", "Lfm3VlForConditionalGeneration", _QWEN, _QWEN_WRAP,
                      {"text_config": {"layer_types": ["conv", "full_attention"], "sliding_window": 4096}},
                      video_options=_SIZE),
    "nemotron_h_omni": Family("NemotronH_Omni_Reasoning_V3Processor", "NemotronH_Omni_Reasoning_V3", {}, "{}",
                              {"text_config": {"ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
                                               "n_groups": 2, "moe_shared_expert_intermediate_size": 32,
                                               "num_hidden_layers": ...},
                               "vision_hidden_size": D, "audio_config": None},
                              video_options={"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3,
                                             "video_target_num_patches": 64}),
    "muse_spark": Family("MuseSparkProcessor", "MuseSparkForConditionalGeneration", {}, "{}",
                         merge(_MUSE, {"text_config": {"moe_hidden_size": 32},
                                       "audio_config": {"out_hidden_size": D, "num_hidden_layers": 4,
                                                        "hidden_sizes": [8, 8, 16, 16]}})),
    "glm5_next": Family("Glm5NextProcessor", "Glm5NextForConditionalGeneration", _GLM, _GLM_WRAP,
                        {"text_config": {**_LATENT, "qk_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
                                         "index_head_dim": 16, "index_n_heads": 2},
                         "vision_config": {"projection_intermediate_size": 96}}),
    "qwen4_exp": Family("Qwen3VLProcessor", "Qwen4ExpForConditionalGeneration", _QWEN, _QWEN_WRAP,
                        {"text_config": {"layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1],
                                         "rope_parameters": _ROPE, "ngram_vocab_size_base": 1000, "hc_lowrank": 16,
                                         "number_of_conv_states": 3, "ple_embed_dim": 64, "split_ngram_parts": 8,
                                         "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
                                         "indexer_budget": 64, "indexer_compress_ratio": 4}}, video_options=_SIZE),
    "muse_glimmer": Family("MuseGlimmerProcessor", "MuseGlimmerForConditionalGeneration", {}, "{}", _MUSE),
    "kimi_k25": Family("Kimi_K25Processor", "Kimi_K25ForConditionalGeneration",
                       {"image_token": "<|media_pad|>", "video_token": "<|video_pad|>"}, "{}",
                       {"text_config": {**_LATENT, "qk_rope_head_dim": 8, "qk_head_dim": 24, "head_dim": 8,
                                        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
                        "projection_hidden_size": D}),
    "hy_v4_vl": Family("HYV4VLProcessor", "HYV4VLForConditionalGeneration", _QWEN, "{}",
                       {"text_config": {**_LATENT, "qk_rope_head_dim": 8, "indexer_types": ["full", "full"],
                                        "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}}),
    "minimax_m3_vl": Family("MiniMaxM3VLProcessor", "MiniMaxM3SparseForConditionalGeneration", {}, "{}",
                            {"text_config": {"dense_intermediate_size": 64, "shared_intermediate_size": 32,
                                             "rotary_dim": 8}}),
    "cohere_compass": Family("CohereCompassProcessor", "CohereCompassForConditionalGeneration", {}, _QWEN_WRAP,
                             merge(_DEEPSTACK, {"text_config": {"rope_parameters": {"full_attention": _ROPE}}}),
                             video_options=_SIZE),
    "qwen3_vl_moe": Family("Qwen3VLProcessor", "Qwen3VLMoeForConditionalGeneration", _QWEN, _QWEN_WRAP,
                           merge(_DEEPSTACK, _MROPE), video_options=_SIZE),
    "qwen3_5_moe": Family("Qwen3VLProcessor", "Qwen3_5MoeForConditionalGeneration", _QWEN, _QWEN_WRAP, _MROPE,
                          video_options=_SIZE),
    "glm4v_moe": Family("Glm4vProcessor", "Glm4vMoeForConditionalGeneration", _GLM, _GLM_WRAP,
                        merge(_GLM_ROPE, {"text_config": {"n_group": 1, "topk_group": 1}})),
    "glm_ocr": Family("Glm46VProcessor", "GlmOcrForConditionalGeneration", _GLM, _GLM_WRAP, _GLM_ROPE),
    "gemma4_unified": Family("Gemma4UnifiedProcessor", "Gemma4UnifiedForConditionalGeneration", _GEMMA, "{}",
                             merge(_GEMMA_TEXT, {"vision_config": {
                                 "model_type": "gemma4_unified_vision", "mm_embed_dim": D, "output_proj_dims": D}})),
    "minicpmv4_7": Family("MiniCPMV4_7Processor", "MiniCPMV4_7ForConditionalGeneration", _MINICPM, "{}",
                          merge(_INSERT, _MROPE), video_options=_SLICE),
    "minicpm_ocr": Family("MiniCPMOcrProcessor", "MiniCPMOcrForConditionalGeneration", _MINICPM, "{}", _INSERT,
                          video_options=_SLICE),
    "hyperclovax_vision_v2": Family("HyperCLOVAXVisionV2Processor", "HyperCLOVAXVisionV2ForConditionalGeneration",
                                    _QWEN, _QWEN_WRAP),
    "cosmos3_edge": Family("Cosmos3EdgeProcessor", "Cosmos3EdgeForConditionalGeneration", _QWEN, _QWEN_WRAP, _MROPE,
                           video_options=_SIZE),
    "cosmos3_omni": Family("Qwen3VLProcessor", "Cosmos3OmniForConditionalGeneration", _QWEN, _QWEN_WRAP,
                           merge(_DEEPSTACK, _MROPE), video_options=_SIZE),
    "dots3_note": Family("Dots3NoteProcessor", "Dots3NoteForConditionalGeneration", {}, "{}",
                         {"text_config": {**_LATENT, "qk_rope_head_dim": 8, "head_dim": 8, "index_head_dim": 16,
                                          "index_n_heads": 2, "shared_experts_intermediate_size": 32,
                                          "sliding_window": 4096, "swa_num_attention_heads": 4,
                                          "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
                                          "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
                          "vision_config": {"adapter_in_dim": D, "adapter_out_dim": D},
                          "audio_config": {"adapter_input_size": D, "adapter_out_dim": D, "conv_output_size": 256}},
                         video_options={"patch_size": 14, "temporal_patch_size": 1}),
}
# fmt: on


def make(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Write the tiny checkpoint of a family to a folder, and return the folder.

    The weights are float32, and large enough that a wrong token, position or mask changes the logits visibly.
    """
    family = FAMILIES[name]
    model_class = getattr(transformers, family.model)
    processor = make_processor(name, family)
    default = model_class.config_class()
    config = copy.deepcopy(merge(shrink(default.to_dict(), len(processor.tokenizer)), family.config))
    config.pop("transformers_version", None)
    set_token_ids(config, processor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class._from_config(type(default).from_dict(config)).eval()
        enlarge_weights(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)


def make_tokenizer(attributes: Mapping[str, str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and all special tokens, with these of them as attributes."""
    vocabulary = {token: i for i, token in enumerate([*TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        extra_special_tokens=dict(attributes),
    )
    fast.add_special_tokens({"additional_special_tokens": TOKENS}, replace_extra_special_tokens=False)
    return fast


def make_processor(name: str, family: Family) -> Any:
    """Return the processor of a family, with the parts that transformers assigns to it and a chat template."""
    processor_class = getattr(transformers, family.processor)
    parts: dict[str, Any] = {"tokenizer": make_tokenizer(family.tokens)}
    for part in processor_class.get_attributes():
        if part in {"image_processor", "video_processor", "feature_extractor"}:
            options = family.video_options if part == "video_processor" else {}
            parts[part] = getattr(transformers, find_part_class(part, name, processor_class.__module__))(**options)
    processor = processor_class(**parts, **family.processor_options)
    video_token = getattr(processor, "video_token", None) or family.tokens.get("video_token")
    processor.chat_template = TEMPLATE.replace("VIDEO", family.wrap.format(video_token))
    return processor


def find_part_class(part: str, name: str, processor_module: str) -> str:
    """Return the class of an image processor, video processor or feature extractor, by the table of transformers."""
    kind = part.replace("processor", "processing").replace("extractor", "extraction")
    table = getattr(importlib.import_module(f"transformers.models.auto.{kind}_auto"), f"{part.upper()}_MAPPING_NAMES")
    classes = table.get(name) or table.get(processor_module.split(".")[-2]) or "ParakeetFeatureExtractor"
    if isinstance(classes, dict):  # by backend
        return classes.get("torchvision") or next(iter(classes.values()))
    return classes if isinstance(classes, str) else classes[-1] or classes[0]


def shrink(config: Mapping[str, Any], n_vocabulary: int) -> dict[str, Any]:
    """Return a config with small sizes, also in its sub-configs."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        if key == "per_layer_config":
            continue
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = shrink(value, n_vocabulary)
        elif key in {"layer_types", "mlp_layer_types", "indexer_types"} and value:  # the most common and the rarest
            small[key] = [max(value, key=value.count), min(value, key=value.count)]
        elif key == "moe_intermediate_size" and isinstance(value, list):
            small[key] = [32] * len(value)
        elif key in {"vocab_size", "vocab_size_per_layer_input"} and value is not None:
            small[key] = n_vocabulary
        else:
            small[key] = value if value is None else SMALL.get(key, value)
    return small


def set_token_ids(config: dict[str, Any], processor: Any) -> None:
    """Set the ids of special tokens, in a config and its sub-configs, to those of the processor's tokenizer."""
    image, video = (getattr(processor, f"{kind}_token", None) for kind in ("image", "video"))
    starts = {
        f"{kind}_{end}_token_id": getattr(processor, f"{kind}_{end}_token", None) or f"<|{word}_of_{kind}|>"
        for kind in ("image", "video")
        for end, word in (("start", "begin"), ("end", "end"))
    }
    tokens = {
        "image_token_id": image, "image_token_index": image, "video_token_id": video, "video_token_index": video,
        "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>", **starts,
        "audio_token_id": getattr(processor, "audio_token", None), "audio_start_token_id": "<|audio_start|>",
        "audio_end_token_id": "<|audio_end|>", "boi_token_id": "<boi>", "eoi_token_id": "<eoi>",
        "boa_token_id": "<boa>", "eoa_token_index": "<eoa>", "eoa_token_id": "<eoa>", "image_patch_id": "<im_patch>",
        "pad_token_id": "<pad>", "bos_token_id": "<s>", "eos_token_id": "</s>", "frame_start_token_id": "<frame_start>",
        "frame_end_token_id": "<frame_end>", "low_res_image_start_token_id": "<low_res_im_start>",
    }  # fmt: skip
    for key, value in list(config.items()):
        if isinstance(value, dict) and key.endswith("_config"):
            set_token_ids(value, processor)
        elif isinstance(token := tokens.get(key), str):
            config[key] = processor.tokenizer.convert_tokens_to_ids(token)


def enlarge_weights(model: torch.nn.Module) -> None:
    """Draw the matrices of a model at a scale at which each input changes the outputs, and fill zeros and NaN.

    All values can be bfloat16, as in published checkpoints.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                is_embedding = "embed" in name and weight.ndim == 2
                weight.normal_(0.0, 0.7 if is_embedding else 1.5 / max(1, weight[0].numel()) ** 0.5)
            elif weight.isnan().any() or not weight.any():
                weight.normal_(0.0, 0.05) if name.endswith("bias") else weight.fill_(1.0)
            weight.copy_(weight.bfloat16())
