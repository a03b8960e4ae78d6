"""A reduced model for the gate of the generic family: few layers and random weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gstep.backbones import ModelSource
from gstep.errors import ModelError

_MIN_LAYERS = 2
_MAX_EXPERTS = 8
_PROJECTION = 256  # values per token that are compared
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_INDEX_LISTS = ("index", "layers", "layer_ids", "feature_layer")  # words in the names of lists of layer numbers
MEMORY_SHARE = 0.6  # the share of the free memory that a model of the check may take


def build_reduced(source: ModelSource) -> Any:
    """Build the model with few layers (at least two) and random weights in bfloat16, on the CPU.

    Its output layer is replaced by a small projection, and its audio part has no weights. If the vision part cannot be
    reduced, it keeps its layers.

    Raises:
        ModelError: the config cannot be reduced, or the model would take more than MEMORY_SHARE of the free memory.
    """
    cls, config = source.find_stock_class()
    for reduce_vision in (True, False):
        try:
            reduced = _reduce_config(config, reduce_vision)
            with torch.device("meta"):
                shapes = cls._from_config(copy.deepcopy(reduced), dtype=torch.bfloat16)
            needed = sum(weight.nbytes for weight in shapes.parameters())
            break
        except Exception as error:  # noqa: BLE001 - of any type that a class raises for a setting
            reason = f"{type(error).__name__}: {error}"
    else:
        raise ModelError(
            f"{source.name!r}: its config cannot be reduced to a small model ({reason}), so nothing shows that cached "
            f"tokens work: python -m jobs.doctor --model {source.name} compares the whole model"
        )
    if needed > MEMORY_SHARE * get_free_memory_bytes():
        raise ModelError(
            f"{source.name!r}: the reduced model of its check needs {needed / 2**30:.1f} GiB, and "
            f"{get_free_memory_bytes() / 2**30:.1f} GiB of memory are free: run the check on a machine with more"
        )
    from transformers.initialization import no_init_weights  # noqa: PLC0415 - imported by the class already

    with no_init_weights():
        model = cls._from_config(reduced, dtype=torch.bfloat16).eval().requires_grad_(False)
    remove_head(model)
    if (audio := model.get_encoder(modality="audio")) is not None and audio not in (model, model.base_model):
        audio.to_empty(device="meta")
    _fill_weights(model)
    return model


def remove_head(model: Any) -> None:
    """Replace the output layer, which is large, by a fixed random projection to _PROJECTION values, in place.

    An output layer that is not linear is kept.
    """
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        projection = nn.Linear(head.in_features, _PROJECTION, bias=False, dtype=head.weight.dtype, device="cpu")
        generator = torch.Generator().manual_seed(1)
        projection.weight.data.normal_(0.0, head.in_features**-0.5, generator=generator).requires_grad_(False)
        model.set_output_embeddings(projection)


def _reduce_config(config: Any, reduce_vision: bool) -> Any:
    """Copy a config with few layers and experts, and without quantization; widths and the vocabulary are kept.

    Components are entries named ``..._config``. The text component keeps at least _MIN_LAYERS layers, one more than
    there are deepstack levels, and as many as it takes to have each kind of layer; and at most _MAX_EXPERTS experts, or
    as many as a token uses. With ``reduce_vision``, the vision component keeps at least _MIN_LAYERS layers, and one
    more than its longest list of chosen layers has. Other components, such as audio, are unchanged, as are the layers
    of a config that is itself the text config.
    """
    content: dict[str, Any] = copy.deepcopy(config.to_dict())
    text = cast("Any", config.get_text_config())  # may be the config itself
    vision = content.get("vision_config") or {}
    chosen = {key: len(value) + 1 for key, value in vision.items() if _is_layer_choice(key, value)}
    n_vision = max([_MIN_LAYERS, *chosen.values()])
    n_text = max([_MIN_LAYERS, *(n for key, n in chosen.items() if "deepstack" in key)])  # each level enters a layer
    text_names = [name for name in content if text is not None and getattr(config, name, None) is text]
    for name in [key for key, value in content.items() if isinstance(value, dict) and key.endswith("_config")]:
        if name == "vision_config" and reduce_vision:
            _reduce_component(
                content, name, content[name].get("depth", content[name].get("num_hidden_layers")), n_vision
            )
        elif name in text_names:
            _reduce_component(content, name, text.num_hidden_layers, n_text)
            for key in _EXPERTS:
                top = content[name].get("num_experts_per_tok") or content[name].get("moe_k") or 1
                if isinstance(content[name].get(key), int) and isinstance(top, int):
                    content[name][key] = min(content[name][key], max(_MAX_EXPERTS, top))
    content.pop("quantization_config", None)
    return type(config).from_dict(content)


def _reduce_component(content: dict[str, Any], name: str, depth: object, n_min: int) -> None:
    """Reduce the layers of one part of a config in place, to ``n_min`` or enough for every kind of layer.

    Lists and mappings of settings per layer are cut; numbers of chosen layers are replaced by the first ones. A part
    without a ``depth``, or with at most ``n_min`` layers, is unchanged.
    """
    part = content[name]
    if not isinstance(depth, int) or depth <= n_min:
        return
    lists = [
        [json.dumps(v) for v in value] for value in part.values() if isinstance(value, list) and len(value) == depth
    ]
    # Names are kinds of layers, and so are numbers with few distinct values; many distinct values count the layers.
    kinds = [values for values in lists if values[0].startswith('"') or len({*values}) <= depth // 2]
    n = n_min
    while n < depth and any({*values[:n]} != {*values} for values in kinds):
        n += 1
    for key, value in part.items():
        part[key] = _reduce_setting(key, value, depth, n)


def _is_layer_choice(key: str, value: object) -> bool:
    """Return True if a setting is a list of the numbers of chosen layers."""
    return isinstance(value, list) and any(word in key for word in _INDEX_LISTS)


def _reduce_setting(key: str, value: Any, depth: int, n: int) -> Any:
    """Return a setting of a config part, reduced from ``depth`` layers to the first ``n``, if it depends on them."""
    match value:
        case list() if len(value) == depth:
            return value[:n]
        case list() if _is_layer_choice(key, value) and all(
            isinstance(number, int) and 0 <= number < depth for number in value
        ):
            return sorted({min(i, n - 1) for i, _ in enumerate(value)})
        case dict() if value and all(str(number).isdecimal() for number in value):
            return {number: setting for number, setting in value.items() if int(number) < n}
        case int() if key in ("depth", "num_hidden_layers", "n_layers") and value == depth:
            return n
        case int() if key in ("max_window_layers", "first_k_dense_replace"):
            return min(value, n - 1)
        case int() if key == "num_kv_shared_layers":
            return 0
    return value


def _fill_weights(model: nn.Module) -> None:
    """Fill all weights in place with fixed random values, large enough that a wrong token, position or mask shows.

    Biases are small, and other vectors 1. Weights on the meta device are skipped.
    """
    pattern = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    for number, (name, weight) in enumerate(model.named_parameters()):
        if weight.is_meta:
            continue
        flat = weight.data.view(-1)
        if weight.ndim < 2:
            flat.copy_(0.05 * pattern[: len(flat)].to(flat)) if name.endswith("bias") and len(flat) < len(
                pattern
            ) else flat.fill_(1.0)
            continue
        # The experts of a layer are one tensor [E, ...]; in other weights, all axes but the first are summed over.
        summed = weight.shape[-1] if "expert" in name and weight.ndim == 3 else weight[0].numel()
        scale = 0.7 if "embed" in name and weight.ndim == 2 else 1.5 / max(1, summed) ** 0.5
        values = (scale * pattern.roll(number * 7919)).to(flat.dtype)
        for start in range(0, len(flat), len(values)):
            part = flat[start : start + len(values)]
            part.copy_(values[: len(part)])


def get_free_memory_bytes() -> int:
    """Return the free memory of this machine in bytes; 2^60 if it is unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 2**60
