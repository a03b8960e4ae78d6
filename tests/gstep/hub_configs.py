"""What decides in the config.json and the preprocessor file of published models, in the form of the hub's files."""

_IDS = {"vision_start_token_id": 151652, "vision_end_token_id": 151653, "image_token_id": 151655}
_IDS |= {"video_token_id": 151656, "tie_word_embeddings": False}
_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
_7B |= {"num_key_value_heads": 4, "rope_theta": 1000000.0}
_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
_8B |= {"num_key_value_heads": 8, "rope_theta": 5000000, "head_dim": 128, "vocab_size": 151936}
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 26, "image_size": 384}
_QWEN2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3}
_QWEN2_5 |= {"out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
_QWEN2_5 |= {"fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2}
_QWEN3 = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "in_channels": 3}
_QWEN3 |= {"out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 2304}
_QWEN3 |= {"deepstack_visual_indexes": [8, 16, 24], "model_type": "qwen3_vl", "temporal_patch_size": 2}
LLMS = {
    "LLaVA-OneVision-7B": {
        "model_type": "llava_onevision",
        "text_config": {"model_type": "qwen2", **_7B, "max_position_embeddings": 32768, "vocab_size": 152128},
        "vision_config": _SIGLIP,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-VL-7B": {  # flat
        **{"model_type": "qwen2_5_vl", **_IDS, **_7B, "max_position_embeddings": 128000, "vocab_size": 151936},
        "vision_config": _QWEN2_5,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    },
    "Qwen3-VL-8B": {
        **{"model_type": "qwen3_vl", **_IDS, "vision_config": _QWEN3},
        "text_config": {"model_type": "qwen3_vl_text", **_8B, "max_position_embeddings": 262144},
    },
}

# The preprocessor file that decides, as on the hub.
PREPROCESSOR = {
    "qwen2_5_vl": {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
    },
    "qwen3_vl": {
        "size": {"longest_edge": 25165824, "shortest_edge": 4096},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "video_processor_type": "Qwen3VLVideoProcessor",
    },
}
