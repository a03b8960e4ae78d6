"""Prompts without a model: videos of zeros, the builder of a tiny model, and a prompt as text."""

import torch

from gstep.backbones import ModelSource
from gstep.language import Visual, prompt_builder

QWEN = ("tiny-qwen2-5-vl", "tiny-qwen3-vl")
GRID = (8, 12)  # patches: 4 x 6 = 24 tokens a frame
PER_FRAME = 24


def video(name, n_frames=5, index=None, seconds=1.3, grid=GRID):
    """Make a video of zeros for tokens: prompts depend on how many there are and where they stood."""
    per_frame = {"tiny": 196, "tiny-internvl": 64}.get(name) or grid[0] * grid[1] // 4
    index = torch.arange(n_frames * per_frame) if index is None else torch.tensor(index)
    tokens = torch.zeros(len(index), 64)
    if name == "tiny":
        return Visual(tokens, index, n_frames, per_frame, newline=torch.zeros(64))
    if name == "tiny-internvl":
        return Visual(tokens, index, n_frames, per_frame)
    extra = {
        "video_grid_thw": [n_frames, *grid],
        "spatial_merge_size": 2,
        "second_per_grid_ts": seconds,
        "patch_timestamps": [0.25 + seconds * t for t in range(n_frames)],
    }
    levels = 3 if name.startswith("tiny-qwen3-vl") else 0
    return Visual(tokens, index, n_frames, per_frame, extra, (tokens,) * levels)


def builder(name, positions=None, rule="transformers-5", frame_times="true"):
    return prompt_builder(ModelSource.resolve(name), positions, rule, frame_times)


def text_of(name, prompt):
    """Return the prompt as text, with a star for each placeholder."""
    token = {"tiny": "<video>", "tiny-internvl": "<IMG_CONTEXT>"}.get(name, "<|video_pad|>")
    return builder(name).tokenizer.decode(prompt.input_ids).replace(token, "*")
