"""The model's configuration, and a vision half that begins as a small convolution (after ConViT, arXiv:2103.10697)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, LlavaOnevisionModel

from jobs.testbed.training.decoder import HEADS, INNER, LAYERS, THETA
from jobs.testbed.training.space import CELLS, ID, TOKENS, WIDTH
from pipeline.evaluate.shapes.world import SIDE

PATCH = 8  # pixels; the pooling of LLaVA-OneVision makes one token of 2 x 2 patches
PATCHES = SIDE // PATCH
MAX_POSITIONS = 4096
_VISION_WIDTH, _VISION_INNER, _VISION_LAYERS, _VISION_HEADS = 96, 192, 3, 4
_PLACE = 24  # dimensions of the tower that begin as a patch's place and nothing else
_FREQUENCIES = (0.25, 0.5, 0.9, 1.3, 1.8, 2.4)
_NEIGHBOURS = ((0, 1), (0, -1), (1, 0), (-1, 0))  # what each head begins looking at
_SHARPNESS = (1.8, 2.6, 3.4)  # of that look, a layer each


def config() -> Any:
    """Of the whole model."""
    return LlavaOnevisionConfig(
        architectures=["LlavaOnevisionForConditionalGeneration"],
        dtype="bfloat16",
        image_grid_pinpoints=[[SIDE, SIDE]],
        image_token_index=ID["<image>"],
        image_token_id=ID["<image>"],
        video_token_index=ID["<video>"],
        video_token_id=ID["<video>"],
        projector_hidden_act="gelu",
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        tie_word_embeddings=False,
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": _VISION_WIDTH,
            "image_size": SIDE,
            "patch_size": PATCH,
            "intermediate_size": _VISION_INNER,
            "num_attention_heads": _VISION_HEADS,
            "num_hidden_layers": _VISION_LAYERS,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_theta": THETA,
            "vocab_size": len(TOKENS),
            "bos_token_id": ID["<|endoftext|>"],
            "eos_token_id": ID["<|im_end|>"],
            "pad_token_id": ID["<|endoftext|>"],
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    )


class Eyes(nn.Module):
    """The vision tower and the projector, by the path that transformers takes through them."""

    def __init__(self) -> None:
        super().__init__()
        model = LlavaOnevisionModel(config())
        del model.language_model
        self.model = model.float()
        with torch.no_grad():
            _as_convolution(self.model)

    def forward(self, frames: NDArray[np.uint8]) -> Tensor:
        """[T,SIDE,SIDE,3] RGB -> [T,CELLS,WIDTH]."""
        pixels = torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)  # mean and std of a half
        tokens = self.model.get_video_features(pixels[None], return_dict=True).pooler_output[0]
        made: Tensor = tokens[: len(frames) * CELLS].view(len(frames), CELLS, WIDTH)
        return made


def assembled(eyes: Eyes, decoder: dict[str, Tensor]) -> Any:
    """The real class with the weights of both halves. ``decoder``: a Decoder's state."""
    model = LlavaOnevisionForConditionalGeneration(config()).float()
    own = {"newline": "model.image_newline", "lm_head.weight": "lm_head.weight"}
    state = {own.get(name, f"model.language_model.{name}"): tensor for name, tensor in decoder.items()}
    state |= {f"model.{name}": tensor for name, tensor in eyes.model.state_dict().items() if name != "image_newline"}
    model.load_state_dict(state)
    return model.eval()


def _as_convolution(model: Any) -> None:
    """Places are sines and cosines in dimensions of their own, which an offset turns: each head begins looking at one
    neighbour, and copies what is there.
    """
    tower = getattr(model.vision_tower, "vision_model", model.vision_tower)
    normal, width = nn.init.normal_, _VISION_WIDTH
    frequencies = torch.tensor(_FREQUENCIES)
    tower.embeddings.position_embedding.weight.zero_()[:, :_PLACE] = 1.2 * _places(frequencies)
    tower.embeddings.patch_embedding.bias.zero_()
    normal(tower.embeddings.patch_embedding.weight, std=1.5 / math.sqrt(3 * PATCH**2))[:_PLACE] = 0
    for layer, sharpness in zip(tower.encoder.layers, _SHARPNESS, strict=True):
        at = layer.self_attn
        for linear in (at.q_proj, at.k_proj, at.v_proj, at.out_proj):
            nn.init.zeros_(linear.bias)
        normal(at.q_proj.weight, std=0.02)
        normal(at.k_proj.weight, std=0.02)
        for head, offset in enumerate(_NEIGHBOURS):
            rows = slice(head * _PLACE, (head + 1) * _PLACE)
            at.q_proj.weight[rows, :_PLACE] += sharpness * _turned(offset, frequencies)
            at.k_proj.weight[rows, :_PLACE] += sharpness * torch.eye(_PLACE)
        normal(at.v_proj.weight, std=1 / math.sqrt(width - _PLACE))[:, :_PLACE] = 0
        normal(at.out_proj.weight, std=0.7 / math.sqrt(_PLACE))[:_PLACE] = 0
        normal(layer.mlp.fc1.weight, std=1 / math.sqrt(width))
        normal(layer.mlp.fc2.weight, std=0.5 / math.sqrt(_VISION_INNER))[:_PLACE] = 0
    normal(model.multi_modal_projector.linear_1.weight, std=1 / math.sqrt(width))
    normal(model.multi_modal_projector.linear_2.weight, std=0.5 / math.sqrt(WIDTH))


def _places(frequencies: Tensor) -> Tensor:
    """[PATCHES**2,_PLACE] down and across."""
    angle = torch.arange(PATCHES).float()[:, None] * frequencies
    wave = torch.stack([angle.cos(), angle.sin()], -1).flatten(1)
    down, across = wave[:, None].expand(-1, PATCHES, -1), wave[None].expand(PATCHES, -1, -1)
    return torch.cat([down, across], -1).flatten(0, 1)


def _turned(offset: tuple[int, int], frequencies: Tensor) -> Tensor:
    """[_PLACE,_PLACE] what makes of a place the one that lies so far down and across."""
    angles = torch.cat([offset[0] * frequencies, offset[1] * frequencies])
    blocks = [torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])]) for a in angles]
    turned: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return turned
