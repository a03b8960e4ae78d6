"""The weights of the tiny models: tables of the tensors' names and shapes, and one rule that draws any tensor.

A line of a table is "names dimensions... [@mean]". Names have choices, {q,k,v}, and counts, {layers}, in braces. A
dimension is a number, a key of ``_read_chunk_sizes``, or a term of them, 2*keys+values. Biases take only the first
dimension.
"""

from __future__ import annotations

import itertools
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Weights = dict[str, Array]

#: The tensors that are drawn with a standard deviation of _LOUDNESS, like that of the visual tokens.
_EMBEDDINGS = re.compile(r"embed_tokens|token_embedding|pos(ition)?_embed|cls_token|probe|image_newline|A_log")
_LOUDNESS = 0.7
#: Patterns of names -> how much larger the outputs of such matrices are than their inputs; 1 for all others.
_GAINS = {
    # Texture is amplified: neighboring pixels agree, so patches would otherwise differ only in brightness.
    r"patch_embed": 5,
    # Sharp attention: if it averaged, a frame's mean would be added to all its tokens and make them alike.
    r"[qk]_proj|\.qkv|in_proj_weight|mlp\.gate\.|lm_head": 2,
    r"attn\.proj": 0.5,  # after the values of .qkv, which are as large as its queries and keys
}
_BEHIND_GELU = re.compile(r"(fc2|linear_2|mlp\.2)\.weight")
_SPECIAL_TOKENS = 8  # no family has more


def draw_weights(tables: Mapping[str, str], config: Mapping[str, Any]) -> Weights:
    """Draw the tensors of tables (name prefix -> table), with sizes from a config; return name -> float32 array."""
    sizes, weights = _read_sizes(config), Weights()
    for prefix, table in tables.items():
        for line in table.splitlines():
            names, *words = line.split()
            mean = float(words.pop()[1:]) if words[-1].startswith("@") else None
            shape = tuple(_evaluate_term(word, sizes) for word in words)
            for name in _iter_tensor_names(prefix + names, sizes):
                weights[name] = _draw_tensor(name, shape[:1] if name.endswith("bias") else shape, mean)
    return weights


def _read_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes in a config.json by the names that the tables use."""
    vision, text = config["vision_config"], config.get("text_config", config)
    side, patch = (int(np.ravel(vision.get(key, 0))[0]) for key in ("image_size", "patch_size"))
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return {
        "width": vision["hidden_size"],
        "inner": vision["intermediate_size"],
        "blocks": vision.get("depth") or vision["num_hidden_layers"],
        "patch": patch,
        "positions": vision.get("num_position_embeddings") or (side // patch) ** 2,
        "levels": len(vision.get("deepstack_visual_indexes", ())),
        "text": text["hidden_size"],
        "text_inner": text["intermediate_size"],
        "layers": text["num_hidden_layers"],
        "head": head,
        "queries": head * text["num_attention_heads"],
        "keys": head * text.get("num_key_value_heads", 0),
        "vocab": text["vocab_size"],
    }


def _draw_tensor(name: str, shape: tuple[int, ...], mean: float | None = None) -> Array:
    """Draw a tensor, seeded by its name and scaled so that the tokens of a video differ clearly.

    The values are uniform, each from 16 bits of PCG64's stream, by exact operations: the same bits on every machine.
    Half of a patch embedding, and of a matrix behind a GELU, is the negated other half; in ``lm_head``, special tokens
    are halved.

    Args:
        mean: None uses 1 for the weight of a norm and 0 for other tensors.
    """
    size = math.prod(shape)
    stream = np.random.PCG64(zlib.crc32(name.encode())).random_raw(size // 4 + 1)
    values: Array = stream.astype("<u8").view("<u2")[:size].reshape(shape).astype(np.float32)
    values -= np.float32(32767.5)
    values *= np.float32(math.sqrt(3) / 32768 * _compute_deviation(name, shape))
    if "patch_embed" in name and len(shape) > 1:
        # The lower half is the negated upper half, plus a small value that responds to brightness.
        upper = values[..., : shape[-2] // 2, :]
        values = np.concatenate([upper, -upper], axis=-2) + upper[..., :1, :1] / np.float32(5 * shape[-1])
    elif _BEHIND_GELU.search(name):
        # GELU gives every hidden unit the same positive mean; rows that sum to zero keep it out of the tokens.
        left = values[:, : shape[1] // 2]
        values = np.concatenate([left, -left], axis=1)
    elif "lm_head" in name:  # otherwise some answers would end with their first token
        values[:_SPECIAL_TOKENS] *= np.float32(0.5)
    if mean is None:
        mean = 1 if len(shape) == 1 and re.search(r"weight|lambda", name) else 0
    return values + np.float32(mean) if mean else values


def _compute_deviation(name: str, shape: tuple[int, ...]) -> float:
    """Return a tensor's standard deviation: 0.7 for embeddings, 0.05 for vectors, otherwise gain / sqrt(inputs)."""
    if _EMBEDDINGS.search(name):
        return _LOUDNESS
    if len(shape) == 1:
        return 0.05
    gain = next((gain for part, gain in _GAINS.items() if re.search(part, name)), 1)
    inputs = shape[1] if ".experts" in name else math.prod(shape[1:])  # all experts in one: [E, in, out]
    return gain / math.sqrt(inputs)


def _evaluate_term(term: str, sizes: Mapping[str, int]) -> int:
    """Compute a sum of products of numbers and sizes, such as "2*keys+width"."""
    products = [[int(word) if word.isdigit() else sizes[word] for word in part.split("*")] for part in term.split("+")]
    return sum(map(math.prod, products))


def _iter_tensor_names(names: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Return an iterator over all combinations of choices and counts in a table's names."""
    choices: list[list[str]] = []
    for i, part in enumerate(re.split(r"[{}]", names)):
        is_count = i % 2 and "," not in part
        choices.append([str(k) for k in range(sizes[part])] if is_count else part.split(","))
    return map("".join, itertools.product(*choices))
