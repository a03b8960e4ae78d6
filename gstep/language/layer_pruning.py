"""Pruning inside the language model, after its first layers: hooks that come off again, no copied forward.

Up to layer K every token goes through. Before layer K the visual tokens that the method does not choose leave the
hidden states, so that this layer and all after it are shorter, and their keys and values with them; positions stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from gstep.language.types import has_linear_attention
from gstep.pruners.base import Pruner
from gstep.types import VisualTokens

#: The evidence that there is inside of a model.
INSIDE = frozenset({"llm_attention"})
#: The argument and the output that hold keys and values; transformers 5.24 gave them their new name.
CACHE = "cache" if Version(version("transformers")) >= Version("5.24") else "past_key_values"


@dataclass
class Shortened:
    """The places of a batch's tokens that stay from layer K on; known once the prefill reaches that layer.

    Attributes:
        index: [B,S] int64 places in the full rows, padded on the left.
        valid: [B,S] bool, False where a row is padded.
    """

    index: Tensor
    valid: Tensor

    def repeated(self, rows: Sequence[int]) -> Shortened:
        """Return the kept places for a batch made of these rows, which may repeat."""
        return Shortened(self.index[list(rows)], self.valid[list(rows)])

    def rows(self, tensor_BLX: Tensor) -> Tensor:
        """Gather the kept places of [B,L,...]."""
        place = self.index.reshape(*self.index.shape, *[1] * (tensor_BLX.ndim - 2))
        return tensor_BLX.expand(len(self.index), *tensor_BLX.shape[1:]).gather(
            1, place.expand(-1, -1, *tensor_BLX.shape[2:])
        )


@dataclass
class PruneInside:
    """The pruning of one batch before layer K: ``with inside.hooked(model): model.generate(...)``.

    Attributes:
        method: one with a ``layer``, which is K.
        retention_ratio: share of a prompt's visual tokens that is kept.
        prunable: [B,L] bool, the visual tokens of each row.
        mask: [B,L] bool, False where a row is padded.
    """

    method: Pruner
    retention_ratio: float
    prunable: Tensor
    mask: Tensor
    kept: Shortened | None = None
    _last: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    @contextmanager
    def hooked(self, model: Any) -> Iterator[PruneInside]:
        """Prune calls of ``model`` inside the context, by hooks: one prefill, then single tokens.

        Raises ValueError where the model has no layer K, or needs all visual tokens there.
        """
        layers = model.model.language_model.layers
        first_short = check_layer(self.method, model.config)
        # The layer before K shows what the last token attends to; from K on every layer gets shortened rows.
        with ExitStack() as hooks:
            before = layers[first_short - 1].self_attn
            hooks.enter_context(before.register_forward_pre_hook(self._note_query, with_kwargs=True))
            hooks.enter_context(before.register_forward_hook(self._choose, with_kwargs=True))
            for place, layer in enumerate(layers[first_short:]):
                hook = self._shorten if place == 0 else self._keep_short
                hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
            yield self

    @contextmanager
    def of(self, rows: Sequence[int]) -> Iterator[None]:
        """Apply the pruning to a batch made of these prefilled rows, which may repeat, while the context is open."""
        whole = self.kept
        self.kept = None if whole is None else whole.repeated(rows)
        try:
            yield
        finally:
            self.kept = whole

    def _note_query(self, attention: Any, args: Any, keywords: dict[str, Any]) -> None:
        """Keep the attention inputs of the last token in layer K-1; fast kernels never return its attention row."""
        hidden_BLD = keywords["hidden_states"] if "hidden_states" in keywords else args[0]
        if self.kept is None:
            cos, sin = keywords["position_embeddings"]
            self._last = hidden_BLD, cos[:, -1:], sin[:, -1:]

    def _choose(self, attention: Any, args: Any, keywords: dict[str, Any], output: Any) -> None:
        """Choose the tokens to keep, once layer K-1 has filled its cache and the last token's query was noted."""
        if self._last is None:
            return
        keys = keywords[CACHE].layers[attention.layer_idx].keys
        hidden_BLD, cos, sin = self._last
        row_BL = last_row(attention, hidden_BLD[:, -1:], cos, sin, keys, self.mask.to(keys.device))
        self._last = None
        self.kept = self._select(hidden_BLD, row_BL)

    def _select(self, hidden_BLD: Tensor, row_BL: Tensor) -> Shortened:
        """Return the places of all text, and of the visual tokens that the method chooses from the row of attention."""
        places = []
        for hidden_LD, row, prunable, mask in zip(hidden_BLD, row_BL, self.prunable, self.mask, strict=True):
            visual = prunable.nonzero()[:, 0].to(row.device)
            stays = mask.to(row.device).clone()
            stays[visual] = False
            stays[visual[choose(self.method, hidden_LD[visual], row[visual], self.retention_ratio)]] = True
            places.append(stays.nonzero()[:, 0])
        longest = max(map(len, places))  # rows keep different numbers: shorter ones are padded on the left again
        index = torch.zeros(len(places), longest, dtype=torch.int64, device=row_BL.device)
        valid = torch.zeros_like(index, dtype=torch.bool)
        for i, place in enumerate(places):
            index[i, longest - len(place) :] = place
            valid[i, longest - len(place) :] = True
        return Shortened(index, valid)

    def _shorten(self, layer: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Cut the hidden states before layer K; they are still whole in the prefill."""
        assert self.kept is not None
        hidden_BLD, *rest = args
        # What follows the prefill is text, of which nothing is pruned.
        if not _held(layer, keywords):
            args = (self.kept.rows(hidden_BLD), *rest)
        return self._keep_short(layer, args, keywords)

    def _keep_short(self, layer: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Cut the positions and the mask that layer K and all after it get, which still have the full length."""
        kept = self.kept
        assert kept is not None
        hidden_BLD, past = args[0], _held(layer, keywords)
        changed = dict(keywords)
        if not past:
            changed["position_embeddings"] = tuple(kept.rows(part) for part in keywords["position_embeddings"])
        # Only flash attention reads them, to look for packed sequences; these are none.
        changed["position_ids"] = None
        implementation = layer.self_attn.config._attn_implementation
        changed["attention_mask"] = short_mask(kept.valid, past, hidden_BLD, implementation)
        return args, changed


def check_layer(method: Pruner, config: Any) -> int:
    """Return the layer before which the method prunes a model of this configuration.

    Raises ValueError where it has none or needs what is not there inside of a model, and where the model cannot be
    pruned there.
    """
    text = config.get_text_config()
    n_layers, deepstack_levels = (
        text.num_hidden_layers,
        len(getattr(config.vision_config, "deepstack_visual_indexes", ())),
    )
    layer = method.layer
    if layer is None or layer < 1:
        raise ValueError(f"method {method.name} prunes before layer {layer}: inside of a model that is 1 at least")
    if method.merges:
        raise ValueError(f"method {method.name} merges tokens: inside of a model they can only be dropped")
    if more := sorted(method.needs - INSIDE):
        raise ValueError(
            f"method {method.name} prunes before layer {layer}, where {' and '.join(sorted(INSIDE))} is all there is; "
            f"it needs {' and '.join(more)}"
        )
    params = ", ".join(f"{name}={value}" for name, value in method.params().items())
    who = f"{method.name} with {params}" if params else method.name
    if has_linear_attention(config):
        raise ValueError(
            f"{who} prunes inside of a model, and {config.model_type} has layers of linear attention, whose state has "
            "taken in all tokens by then: choose a method that prunes before the model"
        )
    if n_layers <= layer:
        raise ValueError(f"{who} prunes before layer {layer}; this model has {n_layers} layers")
    if deepstack_levels > layer:
        raise ValueError(
            f"{who} prunes before layer {layer}: this model adds deepstack levels to all visual tokens after each of "
            f"its first {deepstack_levels} layers, so the layer must be at least {deepstack_levels}"
        )
    return layer


def _held(layer: Any, keywords: dict[str, Any]) -> int:
    """Return the number of tokens in the layer's key-value cache: 0 in the prefill."""
    return int(keywords[CACHE].get_seq_length(layer.self_attn.layer_idx))


def choose(method: Pruner, hidden_MD: Tensor, attention_M: Tensor, retention_ratio: float) -> Tensor:
    """Return the places of the visual tokens that the method keeps, by their states [M,D] and attention [M] there."""
    visual = VisualTokens(hidden_MD[None], {"llm_attention": attention_M})
    budget, ratio = method.resolve_budget(len(attention_M), retention_ratio)
    return method.select(visual, budget, ratio, 0).index


def last_row(attention: Any, hidden_B1D: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, mask_BL: Tensor) -> Tensor:
    """Compute the last token's attention [B,L] float32, the mean over heads: one row of softmax(q . K / sqrt d).

    Args:
        hidden_B1D: the last token as it enters the attention.
        cos, sin: [B,1,d] of its position.
        keys: [B,heads of keys,L,d] of all tokens, as the cache holds them: rotated.
    """
    query = attention.q_proj(hidden_B1D).unflatten(-1, (-1, attention.head_dim))  # [B,1,heads,d]
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    half = query.shape[-1] // 2
    turned = torch.cat([-query[..., half:], query[..., :half]], dim=-1)
    query = query * cos[:, :, None] + turned * sin[:, :, None]
    groups = query.shape[2] // keys.shape[1]
    grouped = query[:, 0].unflatten(1, (keys.shape[1], groups))  # neighbouring heads share their keys
    scores = torch.einsum("bkgd,bkld->bkgl", grouped.float(), keys.float()) * attention.scaling
    scores = scores.masked_fill(~mask_BL[:, None, None], float("-inf"))
    row_BL: Tensor = scores.softmax(dim=-1).mean(dim=(1, 2))
    return row_BL


def short_mask(valid_BS: Tensor, past: int, hidden_BLD: Tensor, implementation: str) -> Tensor | None:
    """Return the attention mask of a layer whose rows were shortened, in the form that the implementation takes.

    Args:
        valid_BS: what the prefill kept.
        past: tokens that the layer's cache holds; 0 in the prefill.
    """
    batch, length = hidden_BLD.shape[:2]
    new = past + length - valid_BS.shape[1]  # tokens generated since
    keys_BK = torch.cat([valid_BS, valid_BS.new_ones(batch, new)], dim=1)
    if implementation.startswith("flash"):
        return None if keys_BK.all() else keys_BK
    if keys_BK.all() and implementation == "sdpa" and (past == 0 or length == 1):
        return None
    full = torch.ones(length, keys_BK.shape[1], dtype=torch.bool, device=keys_BK.device)
    causal = full.tril(diagonal=past)
    # A padded row sees itself: without anything to see it would be NaN, and so would what it is multiplied with.
    itself = full.tril(diagonal=past) & full.triu(diagonal=past)
    mask = (causal & keys_BK[:, None, None]) | itself
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=hidden_BLD.dtype).masked_fill(~mask, torch.finfo(hidden_BLD.dtype).min)
    return mask


def visual_places(input_ids: Tensor, video_token: int, kept: Sequence[int], newline: bool) -> Tensor:
    """Mark [L] bool the visual tokens of a prompt, without the newline that follows those of each video."""
    places = (input_ids == video_token).nonzero()[:, 0]
    prunable = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    start = 0
    for count in kept:
        prunable[places[start : start + count]] = True
        start += count + newline
    return prunable
