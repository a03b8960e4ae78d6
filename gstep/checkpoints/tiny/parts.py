"""Random weights for the parts of tiny models, scaled so that their tokens differ clearly.

With plain small weights all tokens of a video would look alike, and a pruning method would see rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gstep.checkpoints.tiny.tokenizer import TinyTokenizer

SEED = 20240806

Array = NDArray[np.float32]
Weights = dict[str, Array]


@dataclass(frozen=True)
class TinyModel:
    """The recipe of a tiny model, from which every file of its folder is made."""

    config: Mapping[str, Any]
    weights: Callable[[Mapping[str, Any]], Weights]
    tokenizer: TinyTokenizer
    processor_files: Mapping[str, Mapping[str, Any]]


class Draw:
    """A seeded source of random weights, collected by name in ``weights``.

    ``linear`` and ``norm`` store their weights; the other methods only return an array. Draws are uniform, which takes
    only exact operations: the same bits on every machine. The numbers depend on the order of the calls.
    """

    def __init__(self) -> None:
        self.weights: Weights = {}
        self._rng = np.random.default_rng(SEED)  # PCG64

    def uniform(self, shape: tuple[int, ...], std: float) -> Array:
        """Draw an array of this shape and standard deviation."""
        unit = self._rng.random(shape, dtype=np.float32) * np.float32(2) - np.float32(1)
        return unit * np.float32(std * math.sqrt(3))

    def patch_embedding(self, *shape: int) -> Array:
        """Draw a convolution kernel [width, 3, ..., side, side] that maps a patch's pixels to a vector."""
        *front, side, _ = shape
        spread = math.sqrt(math.prod(shape[1:]))
        # Texture louder than brightness: neighbouring pixels agree, so patches would else differ in brightness alone.
        upper = self.uniform((*front, side // 2, side), 5 / spread)
        kernel: Array = np.concatenate([upper, -upper], axis=-2)
        return kernel + self.uniform((*shape[:2], *[1] * (len(shape) - 2)), 1 / spread / side)

    def balanced(self, n_out: int, n_in: int) -> Array:
        """Draw the matrix [n_out, n_in] of a layer behind GELU; its rows sum to zero.

        GELU gives every hidden unit the same positive mean; zero sums keep it out of the tokens.
        """
        half = self.uniform((n_out, n_in // 2), 1 / math.sqrt(n_in))
        matrix: Array = np.concatenate([half, -half], axis=1)
        return matrix

    def linear(self, name: str, n_out: int, n_in: int, *, gain: float = 1.0, bias: bool = True) -> None:
        """Draw and store a linear layer's weights, whose outputs have about ``gain`` times the spread of its inputs."""
        self.weights[f"{name}.weight"] = self.uniform((n_out, n_in), gain / math.sqrt(n_in))
        if bias:
            self.weights[f"{name}.bias"] = self.uniform((n_out,), 0.05)

    def norm(self, name: str, width: int, *, bias: bool) -> None:
        """Draw and store the weight of a norm, near 1, and its bias."""
        self.weights[f"{name}.weight"] = np.float32(1) + self.uniform((width,), 0.05)
        if bias:
            self.weights[f"{name}.bias"] = self.uniform((width,), 0.05)


def draw_decoder(
    draw: Draw,
    config: Mapping[str, Any],
    *,
    model: str,
    head: str,
    bias: bool = True,
    qk_norm: bool = False,
    mlp: bool = True,
) -> None:
    """Draw a language model of Qwen2 or Qwen3 and its head, and store them in ``draw.weights``.

    Args:
        model: the name prefix of the model's weights.
        head: the name of the language-model head.
        bias: True for biases of queries, keys and values (Qwen2).
        qk_norm: True for norms of queries and keys (Qwen3).
        mlp: False leaves out the MLPs, for a mixture of experts.
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = width // config["num_attention_heads"]
    keys = head_dim * config["num_key_value_heads"]
    # As loud as the visual tokens, so that neither drowns the other.
    draw.weights[f"{model}.embed_tokens.weight"] = draw.uniform((config["vocab_size"], width), 0.7)
    for layer in (f"{model}.layers.{i}" for i in range(config["num_hidden_layers"])):
        draw.norm(f"{layer}.input_layernorm", width, bias=False)
        draw.norm(f"{layer}.post_attention_layernorm", width, bias=False)
        for part, size in {"q_proj": width, "k_proj": keys, "v_proj": keys}.items():
            draw.linear(f"{layer}.self_attn.{part}", size, width, bias=bias)
        for part in ("q_norm", "k_norm") if qk_norm else ():
            draw.norm(f"{layer}.self_attn.{part}", head_dim, bias=False)
        draw.linear(f"{layer}.self_attn.o_proj", width, width, bias=False)
        for part in ("gate_proj", "up_proj") if mlp else ():
            draw.linear(f"{layer}.mlp.{part}", inner, width, bias=False)
        if mlp:
            draw.linear(f"{layer}.mlp.down_proj", width, inner, bias=False)
    draw.norm(f"{model}.norm", width, bias=False)
    draw.linear(head, config["vocab_size"], width, gain=2, bias=False)
