"""What decides the vision part in the config.json of every dense size on the hub, in the form of its files."""

from typing import Any


def qwen2_5_vl(hidden: int, layers: int, heads: int, kv: int, inner: int, vision_inner: int = 3420) -> dict[str, Any]:
    """Return a flat configuration: the text part's fields at the top, in_chans for in_channels."""
    return {
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 128000,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": hidden == 2048,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": vision_inner,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 151936,
    }


def qwen3_vl(hidden: int, layers: int, heads: int, inner: int, *, large: bool) -> dict[str, Any]:
    """Return a configuration of text_config and vision_config; the tower of 8B and 32B is the large one."""
    return {
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": not large,
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24] if large else [5, 11, 17],
            "depth": 27 if large else 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152 if large else 1024,
            "in_channels": 3,
            "intermediate_size": 4304 if large else 4096,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


# name -> (config.json, hidden size, millions of parameters of the vision part)
SIZES = {
    "Qwen2.5-VL-3B": (qwen2_5_vl(2048, 36, 16, 2, 11008), 2048, 669),
    "Qwen2.5-VL-7B": (qwen2_5_vl(3584, 28, 28, 4, 18944), 3584, 677),
    "Qwen2.5-VL-32B": (qwen2_5_vl(5120, 64, 40, 8, 27648, 3456), 5120, 689),
    "Qwen2.5-VL-72B": (qwen2_5_vl(8192, 80, 64, 8, 29568, 3456), 8192, 705),
    "Qwen3-VL-2B": (qwen3_vl(2048, 28, 16, 6144, large=False), 2048, 407),
    "Qwen3-VL-4B": (qwen3_vl(2560, 36, 32, 9728, large=False), 2560, 415),
    "Qwen3-VL-8B": (qwen3_vl(4096, 36, 32, 12288, large=True), 4096, 576),
    "Qwen3-VL-32B": (qwen3_vl(5120, 64, 64, 25600, large=True), 5120, 595),
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
