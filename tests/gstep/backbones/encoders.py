"""What tests of the encoders share: the tiny models, their evidence, frames and settings, and the stock features."""

from functools import cache

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from gstep.backbones import Runtime, family_of
from gstep.backbones.preprocess import FixedSizePreprocessor
from gstep.evidence import LAST_LAYER, MERGED_QUERIES

FLOAT32 = Runtime("cpu", torch.float32, "sdpa")
BFLOAT16 = Runtime("cpu", torch.bfloat16, "sdpa")
STOCK = ("tiny", "tiny-qwen2-5-vl", "tiny-qwen3-vl", "tiny-qwen3-5", "tiny-internvl")
QWEN = [name for name in STOCK if "qwen" in name]
EVERY = (*STOCK, "tiny-qwen3-vl-moe", "tiny-qwen3-5-moe")  # mixtures of experts have the towers of the dense models
AT_LAST = {"token_attention": LAST_LAYER, "token_key": LAST_LAYER}
MERGED = {"token_attention": MERGED_QUERIES}


def asked_of(model):
    return AT_LAST if model == "tiny" else MERGED if model in QWEN else {}


def frames_for(source, n_frames=5, shape=(10, 14), seed=0):
    """Make [T,h,w,3] uint8: noise that is coarse enough for patches to differ in brightness; 5 x 7 tokens on Qwen."""
    blocks = np.random.default_rng(seed).integers(0, 256, (n_frames, *shape, 3), dtype=np.uint8)
    frames = blocks.repeat(16, axis=1).repeat(16, axis=2)
    preprocessor = family_of(source).preprocessor()
    return preprocessor.resize(frames, preprocessor.target_size(*frames.shape[:3]))


@cache
def load_stock(folder, dtype, attn="sdpa"):
    """Load a tiny model by from_pretrained, once; nothing may change it."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation=attn)


def stock_features(source, frames, dtype, at_once=None):
    """Return [T*N,D] tokens and levels of the whole model by from_pretrained, given ``at_once`` frames at a time."""
    stock, preprocessor = load_stock(source.pretrained()[0], dtype), family_of(source).preprocessor()
    with torch.no_grad():
        parts = [features_of(stock, preprocessor, part, dtype) for part in frames.split(at_once or len(frames))]
    return [torch.cat(levels) for levels in zip(*parts, strict=True)]


def features_of(stock, preprocessor, frames, dtype):
    if isinstance(preprocessor, FixedSizePreprocessor):
        pixels = preprocessor.normalise(frames, "cpu", dtype)
        if not hasattr(stock.model, "get_video_features"):  # InternVL
            return [stock.model.get_image_features(pixels, return_dict=True).pooler_output.flatten(0, 1)]
        rows = stock.model.get_video_features(pixels[None], return_dict=True).pooler_output[0]
        return [rows[: 196 * len(frames)]]  # some versions put the newline behind them
    patches = preprocessor.patches(frames, "cpu", dtype)
    grid = torch.tensor([preprocessor.grid_thw(*frames.shape[:3])])
    output = stock.model.get_video_features(patches, grid, return_dict=True)
    levels = getattr(output, "deepstack_features", None) or []
    return [output.pooler_output[0], *(level[0] for level in levels)]


def parts(visual):
    return [visual.tokens, *visual.deepstack, *(visual.evidence[name] for name in sorted(visual.evidence))]
