"""The stock models of transformers, whole and with pixels, beside what this project makes of the same video."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from gstep.backbones import ModelSource, choose_runtime
from gstep.language import Decoding, LanguageModel, Prompt, Visual, load_language_model, prompt_builder
from gstep.language.weights import list_end_ids
from gstep.types import VisualTokens
from tests.builders.clips import sample

QUESTION = "What is happening in this video?"
GREEDY = Decoding(max_new_tokens=12)

FAMILIES = (
    "tiny",
    "tiny-qwen2-5-vl",
    "tiny-qwen3-vl",
    "tiny-qwen3-vl-moe",
    "tiny-qwen3-5",
    "tiny-qwen3-5-moe",
    "tiny-internvl",
)
DENSE = tuple(name for name in FAMILIES if not name.endswith("-moe"))
KINDS = ("tiny", "tiny-qwen3-vl", "tiny-qwen3-5")  # a newline; levels and three axes; a state
RECURRENT = ("tiny-qwen3-5", "tiny-qwen3-5-moe")  # a token leaves its trace in a state that no mask takes back
SECONDS = 1.3  # of a temporal patch: no whole number, so that cutting it shows
FLOAT32 = choose_runtime("cpu", "float32", "sdpa")


@cache
def stock(name: str) -> Any:
    """Load the whole model by from_pretrained, in fp32."""
    folder, _ = ModelSource.resolve(name).pretrained()
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def llm(name: str) -> LanguageModel:
    return load_language_model(ModelSource.resolve(name), FLOAT32)


@cache
def real_frames(clip: str, count: int, height: int, width: int) -> Tensor:
    """Decode [count,3,height,width] fp32 in [-1, 1], spread over a real clip."""
    with av.open(sample(clip)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    sampled = np.stack([frames[i] for i in np.linspace(0, len(frames) - 1, count).astype(int)])
    pixels = torch.from_numpy(sampled).permute(0, 3, 1, 2).float() / 127.5 - 1
    return nn.functional.interpolate(pixels, size=(height, width), mode="bilinear", antialias=True)


@dataclass(frozen=True)
class Encoded:
    """One video: its visual tokens by the stock vision tower, and the pixels that the stock model takes instead."""

    visual: Visual
    pixels: dict[str, Tensor]

    def keep(self, index: Tensor) -> Visual:
        return dataclasses.replace(
            self.visual,
            tokens=self.visual.tokens[index],
            index=index,
            deepstack=tuple(level[index] for level in self.visual.deepstack),
        )


@torch.no_grad()
def encode(name: str, clip: str = "bikes.mp4", n_frames: int = 3, grid: tuple[int, int] = (8, 12)) -> Encoded:
    """Encode a video of ``n_frames`` frames or temporal patches of ``grid`` patches (always 27 x 27 on LLaVA)."""
    if name == "tiny":
        return _encode_llava(clip, n_frames)
    if name == "tiny-internvl":
        return _encode_internvl(clip, n_frames)
    vision = stock(name).config.vision_config
    patch, merge = vision.patch_size, vision.spatial_merge_size
    frames = real_frames(clip, 2 * n_frames, grid[0] * patch, grid[1] * patch)
    pixels, grid_thw = _patches(frames, patch, merge), torch.tensor([[n_frames, *grid]])
    features = stock(name).model.get_video_features(pixels, grid_thw, return_dict=True)
    extra = {
        "video_grid_thw": [n_frames, *grid],
        "spatial_merge_size": merge,
        "second_per_grid_ts": SECONDS,
        "patch_timestamps": [0.25 + SECONDS * t for t in range(n_frames)],
    }
    per_frame = grid[0] * grid[1] // merge**2
    deepstack = tuple(level[0] for level in getattr(features, "deepstack_features", ()))
    tokens = features.pooler_output[0]
    visual = Visual(tokens, torch.arange(len(tokens)), n_frames, per_frame, extra, deepstack)
    inputs = {"pixel_values_videos": pixels, "video_grid_thw": grid_thw}
    if name == "tiny-qwen2-5-vl":
        inputs["second_per_grid_ts"] = torch.tensor([SECONDS])
    return Encoded(visual, inputs)


def _encode_llava(clip: str, n_frames: int) -> Encoded:
    model = stock("tiny").model
    pixels = real_frames(clip, n_frames, 384, 384)[None]
    tokens = model.get_video_features(pixels, return_dict=True).pooler_output[0][: n_frames * 196]
    visual = Visual(tokens, torch.arange(len(tokens)), n_frames, 196, newline=model.image_newline.detach())
    return Encoded(visual, {"pixel_values_videos": pixels})


def _encode_internvl(clip: str, n_frames: int) -> Encoded:
    pixels = real_frames(clip, n_frames, 224, 224)
    tokens = stock("tiny-internvl").model.get_image_features(pixels, return_dict=True).pooler_output.flatten(0, 1)
    return Encoded(Visual(tokens, torch.arange(len(tokens)), n_frames, 64), {"pixel_values": pixels})


def _patches(frames_TCHW: Tensor, patch: int, merge: int) -> Tensor:
    """Return [n_patches, 3*2*patch*patch] in the stock processors' order: 2 x 2 blocks of patches are neighbours."""
    t, c, h, w = frames_TCHW.shape
    blocks = frames_TCHW.reshape(
        t // 2, 2, c, h // patch // merge, merge, patch, w // patch // merge, merge, patch
    ).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return blocks.reshape(-1, c * 2 * patch * patch)


def stock_inputs(name: str, prompt: Prompt, *videos: Encoded) -> dict[str, Tensor]:
    """Return what the stock model takes for an unpruned prompt: ids, a mask of ones, and the pixels of its videos."""
    ids = prompt.input_ids[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for key in videos[0].pixels:
        inputs[key] = torch.cat([video.pixels[key] for video in videos])
    if "qwen" in name:
        inputs["mm_token_type_ids"] = (ids == stock(name).config.video_token_id).int() * 2
    return inputs


def stock_greedy(name, inputs, n=GREEDY.max_new_tokens, **more):
    """The ids the stock model generates, without the token that ends them."""
    with torch.no_grad():
        output = stock(name).generate(**inputs, do_sample=False, max_new_tokens=n, **more)
    ends, ids = list_end_ids(stock(name).generation_config), output[0, inputs["input_ids"].shape[1] :].tolist()
    return tuple(takewhile(lambda token: token not in ends, ids))


def visual_of(encoded: VisualTokens, index: Tensor | None = None, dtype=torch.float32, newline=None, **extra) -> Visual:
    """Return what a cache has of a video: its tokens at flat ``index``, or all of them."""
    T, N, _ = encoded.tokens.shape
    index = torch.arange(T * N) if index is None else index
    tokens, *deepstack = (level.flatten(0, 1)[index].to(dtype) for level in (encoded.tokens, *encoded.deepstack))
    return Visual(tokens, index, T, N, {**extra, **encoded.extra}, tuple(deepstack), newline)


def kept_index(encoded: Encoded, ratio: float, seed: int = 0) -> Tensor:
    """Draw [K] random positions, ascending."""
    total = len(encoded.visual.index)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return order[: max(1, int(ratio * total))].sort().values


def continue_prompt(prompt: Prompt, ids: Tensor) -> Prompt:
    """Return the prompt with these tokens of text behind it."""
    positions = prompt.positions[:, -1:] + 1 + torch.arange(len(ids))
    return dataclasses.replace(
        prompt,
        input_ids=torch.cat([prompt.input_ids, ids]),
        positions=torch.cat([prompt.positions, positions.expand(len(prompt.positions), -1)], dim=1),
    )


def ids_of(answers):
    return [answer.token_ids for answer in answers]


def ragged(source, video, other):
    """Make prompts of different kept counts, lengths and numbers of videos; the first two share theirs."""
    few, fewer = video.keep(kept_index(video, 0.25)), other.keep(kept_index(other, 0.03))
    build = prompt_builder(source).build
    return [
        build(QUESTION, [few]),
        build("How many people are there, and what colour is the car?", [few]),
        build("Why?", [fewer]),
        build("Which of the two is longer?", [fewer, few]),
    ]
