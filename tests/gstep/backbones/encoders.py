"""What tests of the encoders share: the tiny models, the evidence of each, and frames for them."""

from __future__ import annotations

import numpy as np
import torch
from transformers import (
    LlavaOnevisionForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

from gstep.backbones import Runtime, family_of
from gstep.evidence import LAST_LAYER, MERGED_QUERIES

FLOAT32 = Runtime("cpu", torch.float32, "sdpa")
BFLOAT16 = Runtime("cpu", torch.bfloat16, "sdpa")
STOCK = {
    "tiny": LlavaOnevisionForConditionalGeneration,
    "tiny-qwen2-5-vl": Qwen2_5_VLForConditionalGeneration,
    "tiny-qwen3-vl": Qwen3VLForConditionalGeneration,
}
QWEN = ["tiny-qwen2-5-vl", "tiny-qwen3-vl"]
AT_LAST = {"token_attention": LAST_LAYER, "token_key": LAST_LAYER}
MERGED = {"token_attention": MERGED_QUERIES}


def asked_of(model):
    return AT_LAST if model == "tiny" else MERGED


def frames_for(source, n_frames=5, shape=(18, 26), seed=0):
    """Make [T,h,w,3] uint8: noise that is coarse enough for patches to differ in brightness; 9 x 13 tokens on Qwen."""
    blocks = np.random.default_rng(seed).integers(0, 256, (n_frames, *shape, 3), dtype=np.uint8)
    frames = blocks.repeat(16, axis=1).repeat(16, axis=2)
    preprocessor = family_of(source).preprocessor()
    return preprocessor.resize(frames, preprocessor.target_size(*frames.shape[:3]))
