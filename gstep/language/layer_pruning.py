"""Pruning inside the language model, before one of its layers, by removable hooks.

Before layer K, the visual tokens that the method does not select are removed from the hidden states, so that layer K
and all later layers are shorter. The remaining tokens keep their positions.
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

#: The evidence that is available inside a model.
INSIDE_EVIDENCE = frozenset({"llm_attention"})
#: The name of the argument and output that hold keys and values; transformers 5.24 renamed them.
CACHE = "cache" if Version(version("transformers")) >= Version("5.24") else "past_key_values"


@dataclass
class KeptRows:
    """The indices of a batch's tokens that are kept from layer K on.

    Attributes:
        index: [B, S] int64 indices into the full rows, padded on the left with 0.
        valid: [B, S] bool, False for padding.
    """

    index: Tensor
    valid: Tensor

    def repeat_rows(self, rows: Sequence[int]) -> KeptRows:
        """Return the kept indices for a batch of these rows, which may repeat."""
        return KeptRows(self.index[list(rows)], self.valid[list(rows)])

    def rows(self, tensor_BLX: Tensor) -> Tensor:
        """Gather the kept tokens from a tensor [B or 1, L, ...]; the result is [B, S, ...]."""
        index = self.index.reshape(*self.index.shape, *[1] * (tensor_BLX.ndim - 2))
        return tensor_BLX.expand(len(self.index), *tensor_BLX.shape[1:]).gather(
            1, index.expand(-1, -1, *tensor_BLX.shape[2:])
        )


@dataclass
class InsidePruning:
    """The pruning of one batch before layer K: ``with inside.apply_hooks(model): model.generate(...)``.

    Attributes:
        method: a method with a ``layer``, which is K.
        prunable: [B, L] bool, True for the visual tokens of each row.
        mask: [B, L] bool, False for padding.
        short: the kept indices; None before the prefill reaches layer K.
    """

    method: Pruner
    retention_ratio: float
    prunable: Tensor
    mask: Tensor
    short: KeptRows | None = None
    _last: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)

    @contextmanager
    def apply_hooks(self, model: Any) -> Iterator[InsidePruning]:
        """Prune the calls of ``model`` inside this context, by hooks: first a prefill, then calls with further tokens.

        The hooks are removed at the end; ``short`` stays, so that an object serves a single prefill.

        Raises:
            ValueError: the method cannot prune inside this model (:func:`check_prune_layer`).
        """
        layers = model.model.language_model.layers
        first_short = check_prune_layer(self.method, model.config)
        # The layer before K has the attention of the last token; from K on every layer gets shortened rows.
        with ExitStack() as hooks:
            before = layers[first_short - 1].self_attn
            hooks.enter_context(before.register_forward_pre_hook(self._record_query, with_kwargs=True))
            hooks.enter_context(before.register_forward_hook(self._choose_tokens, with_kwargs=True))
            for i, layer in enumerate(layers[first_short:]):
                hook = self._drop_pruned_tokens if i == 0 else self._adapt_layer_inputs
                hooks.enter_context(layer.register_forward_pre_hook(hook, with_kwargs=True))
            yield self

    @contextmanager
    def apply_to_rows(self, rows: Sequence[int]) -> Iterator[None]:
        """Apply the pruning to a batch of these prefilled rows, which may repeat; ``short`` is replaced meanwhile."""
        batch_rows = self.short
        self.short = None if batch_rows is None else batch_rows.repeat_rows(rows)
        try:
            yield
        finally:
            self.short = batch_rows

    def _record_query(self, attention: Any, args: Any, keywords: dict[str, Any]) -> None:
        """In the prefill, store the attention inputs of layer K-1, as a hook before its attention."""
        hidden_BLD = keywords["hidden_states"] if "hidden_states" in keywords else args[0]
        if self.short is None:
            cos, sin = keywords["position_embeddings"]
            self._last = hidden_BLD, cos[:, -1:], sin[:, -1:]

    def _choose_tokens(self, attention: Any, args: Any, keywords: dict[str, Any], output: Any) -> None:
        """In the prefill, set ``short`` from the stored inputs and the keys that layer K-1 has just cached.

        This is a hook after attention. The stored inputs are dropped.
        """
        if self._last is None:
            return
        keys = keywords[CACHE].layers[attention.layer_idx].keys
        hidden_BLD, cos, sin = self._last
        row_BL = compute_last_token_attention(attention, hidden_BLD[:, -1:], cos, sin, keys, self.mask.to(keys.device))
        self._last = None
        self.short = self._select(hidden_BLD, row_BL)

    def _select(self, hidden_BLD: Tensor, row_BL: Tensor) -> KeptRows:
        """Return the indices of all text and of the visual tokens that the method selects in each row, with seed 0.

        Raises:
            WrongSelection: the method returned an invalid selection.
        """
        indices = []
        for hidden_LD, row, prunable, mask in zip(hidden_BLD, row_BL, self.prunable, self.mask, strict=True):
            visual = prunable.nonzero()[:, 0].to(row.device)
            is_kept = mask.to(row.device).clone()
            is_kept[visual] = False
            is_kept[visual[select_visual(self.method, hidden_LD[visual], row[visual], self.retention_ratio)]] = True
            indices.append(is_kept.nonzero()[:, 0])
        longest = max(map(len, indices))  # rows keep different numbers: shorter rows are padded on the left again
        index = torch.zeros(len(indices), longest, dtype=torch.int64, device=row_BL.device)
        valid = torch.zeros_like(index, dtype=torch.bool)
        for i, row_index in enumerate(indices):
            index[i, longest - len(row_index) :] = row_index
            valid[i, longest - len(row_index) :] = True
        return KeptRows(index, valid)

    def _drop_pruned_tokens(self, layer: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Drop the pruned tokens before layer K, as a hook; return the layer's arguments and keywords.

        The hidden states are cut in the prefill only.
        """
        assert self.short is not None
        hidden_BLD, *options = args
        # Tokens after the prefill are text, which is not pruned.
        if not _get_cached_length(layer, keywords):
            args = (self.short.rows(hidden_BLD), *options)
        return self._adapt_layer_inputs(layer, args, keywords)

    def _adapt_layer_inputs(self, layer: Any, args: Any, keywords: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Adapt the arguments of layer K or a later layer to the shortened rows, as a hook before it; return them.

        The rotary values are cut in the prefill. In every call the mask is replaced, and ``position_ids`` are None.
        """
        short = self.short
        assert short is not None
        hidden_BLD = args[0]
        past = _get_cached_length(layer, keywords)
        inputs = dict(keywords)
        if not past:
            inputs["position_embeddings"] = tuple(short.rows(part) for part in keywords["position_embeddings"])
        # Only flash attention reads position_ids, to detect packed sequences, which this batch does not have.
        inputs["position_ids"] = None
        implementation = layer.self_attn.config._attn_implementation
        inputs["attention_mask"] = make_short_mask(short.valid, past, hidden_BLD, implementation)
        return args, inputs


def check_prune_layer(method: Pruner, config: Any) -> int:
    """Check that the method can prune inside a model of this configuration; return its layer K.

    Raises:
        ValueError: the method has no layer or one below 1, merges tokens, or needs evidence other than INSIDE_EVIDENCE;
            or the model has linear attention, K or fewer layers, or more than K deepstack levels.
    """
    text = config.get_text_config()
    n_layers = text.num_hidden_layers
    deepstack_levels = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    layer = method.layer
    if layer is None or layer < 1:
        raise ValueError(f"method {method.name} prunes before layer {layer}: inside a model it must be at least 1")
    if method.merges:
        raise ValueError(f"method {method.name} merges tokens: inside a model tokens can only be dropped")
    if missing := sorted(method.needs - INSIDE_EVIDENCE):
        raise ValueError(
            f"method {method.name} prunes before layer {layer} and needs {' and '.join(missing)}: inside a model there "
            f"is only {' and '.join(sorted(INSIDE_EVIDENCE))}"
        )
    params = ", ".join(f"{name}={value}" for name, value in method.params().items())
    label = f"{method.name} with {params}" if params else method.name
    if has_linear_attention(config):
        raise ValueError(
            f"{label} prunes inside a model, and {config.model_type} has layers of linear attention, whose state "
            "already includes all tokens: choose a method that prunes before the model"
        )
    if n_layers <= layer:
        raise ValueError(f"{label} prunes before layer {layer}; this model has {n_layers} layers: choose a lower layer")
    if deepstack_levels > layer:
        raise ValueError(
            f"{label} prunes before layer {layer}: this model adds deepstack levels to all visual tokens after each of "
            f"its first {deepstack_levels} layers, so the layer must be at least {deepstack_levels}"
        )
    return layer


def _get_cached_length(layer: Any, keywords: dict[str, Any]) -> int:
    """Return the number of tokens in the layer's key-value cache; 0 in the prefill."""
    return int(keywords[CACHE].get_seq_length(layer.self_attn.layer_idx))


def select_visual(method: Pruner, hidden_MD: Tensor, attention_M: Tensor, retention_ratio: float) -> Tensor:
    """Select visual tokens by their hidden states [M, D] and attention [M], with seed 0; return ascending indices."""
    visual = VisualTokens(hidden_MD[None], {"llm_attention": attention_M})
    budget, ratio = method.resolve_budget(len(attention_M), retention_ratio)
    return method.pack_selection(visual.tokens, method.select(visual, budget, ratio, 0), budget, ratio).index


def compute_last_token_attention(
    attention: Any, hidden_B1D: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, mask_BL: Tensor
) -> Tensor:
    """Compute the last token's attention, averaged over heads, [B, L] float32: a row of softmax(q . K / sqrt d).

    Args:
        hidden_B1D: the last token's input to the attention.
        cos, sin: [B, 1, d], the rotary values of its position.
        keys: [B, key heads, L, d] of all tokens, rotated, from the cache.
        mask_BL: False for padding.
    """
    query = attention.q_proj(hidden_B1D).unflatten(-1, (-1, attention.head_dim))  # [B,1,heads,d]
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    half = query.shape[-1] // 2
    rotated_half = torch.cat([-query[..., half:], query[..., :half]], dim=-1)
    query = query * cos[:, :, None] + rotated_half * sin[:, :, None]
    groups = query.shape[2] // keys.shape[1]
    query_groups = query[:, 0].unflatten(1, (keys.shape[1], groups))  # neighboring heads share their keys
    scores = torch.einsum("bkgd,bkld->bkgl", query_groups.float(), keys.float()) * attention.scaling
    scores = scores.masked_fill(~mask_BL[:, None, None], float("-inf"))
    row_BL: Tensor = scores.softmax(dim=-1).mean(dim=(1, 2))
    return row_BL


def make_short_mask(valid_BS: Tensor, past: int, hidden_BLD: Tensor, implementation: str) -> Tensor | None:
    """Make the attention mask of a layer with shortened rows, in the form that the implementation takes.

    Args:
        valid_BS: ``KeptRows.valid``.
        past: the number of tokens in the layer's cache; 0 in the prefill.
        hidden_BLD: the layer's input; only its shape, dtype and device matter.

    Returns:
        [B, keys] bool for flash attention; otherwise [B, 1, queries, keys], added to the scores for "eager" and bool
        for the rest. None if nothing is padded and the implementation masks by itself: flash, or "sdpa" in the prefill
        or with one query.
    """
    batch, length = hidden_BLD.shape[:2]
    n_new = past + length - valid_BS.shape[1]  # tokens after the prefill
    keys_BK = torch.cat([valid_BS, valid_BS.new_ones(batch, n_new)], dim=1)
    if implementation.startswith("flash"):
        return None if keys_BK.all() else keys_BK
    if keys_BK.all() and implementation == "sdpa" and (past == 0 or length == 1):
        return None
    square = torch.ones(length, keys_BK.shape[1], dtype=torch.bool, device=keys_BK.device)
    causal = square.tril(diagonal=past)
    # A padding token attends to itself: without any key its result would be NaN, and NaN would spread.
    diagonal = square.tril(diagonal=past) & square.triu(diagonal=past)
    mask = (causal & keys_BK[:, None, None]) | diagonal
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=hidden_BLD.dtype).masked_fill(~mask, torch.finfo(hidden_BLD.dtype).min)
    return mask


def mark_prunable(input_ids: Tensor, video_token: int, counts: Sequence[int], newline: bool) -> Tensor:
    """Mark the visual tokens of a prompt, [L] bool, excluding the newline after each video.

    Args:
        video_token: the id of the placeholder token.
        counts: the number of visual tokens of each video, newline excluded.
        newline: True if a newline placeholder follows each video.
    """
    indices = (input_ids == video_token).nonzero()[:, 0]
    prunable = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    start = 0
    for count in counts:
        prunable[indices[start : start + count]] = True
        start += count + newline
    return prunable
