"""The inputs of the measurements: models of published sizes with seeded random weights, and seeded clips."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from safetensors.torch import save_file

from gstep.checkpoints.tiny import TINY, tokenizer
from gstep.checkpoints.tiny.weights import draw_weights

CLIP_FPS = 30
TINY_HEAD = 32


@dataclass(frozen=True)
class RealSizes:
    """The settings that give the tiny model ``tiny`` its published size.

    Attributes:
        hidden: the language model's hidden size; its layers stay tiny otherwise.
        pixels: settings of the video processor.
    """

    tiny: str
    vision: Mapping[str, Any]
    hidden: int
    pixels: Mapping[str, Any] = field(default_factory=dict)


_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 26}
_QWEN2_5 = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
_QWEN3 = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
_INTERNVIT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
MODELS = {
    "llava": RealSizes("tiny", _SIGLIP, 3584),
    "qwen2.5": RealSizes(
        "tiny-qwen2-5-vl",
        {**_QWEN2_5, "fullatt_block_indexes": [7, 15, 23, 31]},
        3584,
        {"max_pixels": 768 * 28 * 28},
    ),
    "qwen3": RealSizes(
        "tiny-qwen3-vl",
        {**_QWEN3, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
        4096,
        {"size": {"longest_edge": 25165824, "shortest_edge": 4096}},
    ),
    "internvl": RealSizes(
        "tiny-internvl", {**_INTERNVIT, "image_size": [448, 448]}, 4096, {"size": {"height": 448, "width": 448}}
    ),
}
#: The language model of LLaVA-OneVision-7B.
LANGUAGE = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
LANGUAGE |= {"num_key_value_heads": 4, "vocab_size": 152000}


def write_model(path: Path, name: str, *, is_tiny: bool, language: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint of a model in MODELS to the folder ``path``, which appears only when it is complete.

    Args:
        is_tiny: True to keep the tiny model's sizes.
        language: settings of a language model of published size; no weights are written then.
    """
    model = MODELS[name]
    folder = path.with_name(f"{path.name}.part")
    files = TINY[model.tiny]
    config = copy.deepcopy(dict(files.config))
    pixels = {} if is_tiny else model.pixels
    if not is_tiny:
        config["vision_config"] |= model.vision
        heads = {"hidden_size": model.hidden, "num_attention_heads": model.hidden // TINY_HEAD}
        config.get("text_config", config).update(language or heads)
    folder.mkdir()
    for filename, content in {"config.json": config, **files.processor_files}.items():
        settings = {key: pixels[key] for key in pixels.keys() & content if "preprocessor" in filename}
        (folder / filename).write_text(json.dumps({**content, **settings}), encoding="utf-8")
    tokenizer.write_trained_tokenizer(folder, files.tokenizer)
    if language is None:
        weights = {
            key: torch.from_numpy(array).bfloat16() for key, array in draw_weights(files.tensors, config).items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    folder.rename(path)


def write_clip(path: Path, seconds: float, seed: int, size: tuple[int, int]) -> None:
    """Encode a seeded clip of moving blocks with noise, in H.264 with a keyframe every two seconds.

    Args:
        size: (width, height) in pixels.
    """
    width, height = size
    rng = np.random.default_rng(seed)
    blocks = np.kron(rng.integers(0, 160, (height // 20 + 16, width // 20 + 16, 3)), np.ones((20, 20, 1)))
    scene = (blocks + rng.integers(0, 10, blocks.shape)).astype(np.uint8)
    with av.open(str(path), "w") as container:
        options = {"preset": "veryfast", "threads": "1", "b": "3000000"}
        stream = container.add_stream("libx264", rate=CLIP_FPS, options=options)
        stream.width, stream.height, stream.pix_fmt, stream.gop_size = width, height, "yuv420p", 2 * CLIP_FPS
        for number in range(round(CLIP_FPS * seconds)):
            x, y = 3 * number * (1 + seed % 3) % 80, 2 * number % 80
            picture = np.ascontiguousarray(scene[y : y + height, x : x + width])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def write_manifest(path: Path, clips: list[str], copies: int = 1) -> None:
    """Write a JSON Lines manifest with ``copies`` videos for each clip, in the folder of the clips."""
    rows = [{"video_id": f"{copy}-{clip}", "uri": clip} for copy in range(copies) for clip in clips]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
