"""What tests of the Qwen towers share: the stock models' own features, frames, and changed settings files."""

from __future__ import annotations

import json

import numpy as np
import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from gstep.backbones import Runtime, family_of

FLOAT32 = Runtime("cpu", torch.float32, "sdpa")
BFLOAT16 = Runtime("cpu", torch.bfloat16, "sdpa")
STOCK = {
    "tiny-qwen2-5-vl": Qwen2_5_VLForConditionalGeneration,
    "tiny-qwen3-vl": Qwen3VLForConditionalGeneration,
}


def frames_for(source, n_frames=7):
    """Make [7,h,w,3] uint8 as the decoder resizes them: noise so coarse that patches differ in brightness."""
    blocks = np.random.default_rng(0).integers(0, 256, (n_frames, 12, 17, 3), dtype=np.uint8)
    preprocessor = family_of(source).preprocessor()
    frames = blocks.repeat(12, axis=1).repeat(12, axis=2)
    return preprocessor.resize(frames, preprocessor.target_size(*frames.shape[:3]))


def stock_features(source, frames, dtype):
    """Return [T*N,D] tokens and levels and [.,D] last_hidden_state of the whole model by from_pretrained, in one go."""
    folder, _ = source.pretrained()
    stock = STOCK[source.name].from_pretrained(folder, dtype=dtype)
    return features_of(stock, family_of(source).preprocessor(), frames, dtype)


def features_of(stock, preprocessor, frames, dtype):
    patches = preprocessor.patches(frames, "cpu", dtype)
    grid = torch.tensor([preprocessor.grid_thw(*frames.shape[:3])])
    with torch.no_grad():
        output = stock.model.get_video_features(patches, grid, return_dict=True)
    levels = getattr(output, "deepstack_features", None) or []
    return [output.pooler_output[0], *(level[0] for level in levels)], output.last_hidden_state


def stock_features_by_patch(source, frames, dtype):
    """Return [T*N,D] tokens and levels of the whole model that is given one temporal patch after the other."""
    folder, _ = source.pretrained()
    stock = STOCK[source.name].from_pretrained(folder, dtype=dtype)
    preprocessor = family_of(source).preprocessor()
    parts = [features_of(stock, preprocessor, pair, dtype)[0] for pair in frames.split(2)]
    return [torch.cat(levels) for levels in zip(*parts, strict=True)]


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def settings_file(folder):
    own = folder / "video_preprocessor_config.json"
    return own if own.exists() else folder / "preprocessor_config.json"
