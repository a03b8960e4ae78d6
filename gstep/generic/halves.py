"""The model class of a checkpoint, whole or with the weights of one half: the vision tower or the language model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from gstep.backbones import ModelSource, Runtime
from gstep.checkpoints.tensors import refuse_quantized
from gstep.errors import ModelError

WHOLE, TOWER, LLM = "whole", "tower", "llm"


def load_model(source: ModelSource, runtime: Runtime, part: str = WHOLE) -> Any:
    """Load a model in eval mode, onto the runtime's device, whole or half, from safetensors files.

    The tensors of the other half are neither allocated nor read. On the device "meta", only names and shapes are read.
    Missing files are downloaded.

    Args:
        part: WHOLE; TOWER, all but the language model; or LLM, the language model.

    Raises:
        ModelError: weights are missing, quantized or of another shape, or transformers cannot load the model.
    """
    refuse_quantized(source.name, source.config)
    cls, config = _make_half_class(source, part)
    name, revision = source.pretrained()
    options: dict[str, Any] = {
        "config": config,
        "dtype": runtime.dtype,
        "use_safetensors": True,
        "trust_remote_code": False,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported below, with the missing ones
    }
    if runtime.attn_implementation != "sdpa":  # sdpa is the default of models that support it
        options["attn_implementation"] = runtime.attn_implementation
    if runtime.device == "meta":
        options["device_map"] = "meta"
    try:
        with _silence_loading():
            model, info = cls.from_pretrained(name, revision=revision, **options)
    except Exception as error:  # of any type that transformers raises for these files
        raise ModelError(
            f"{source.name!r}: transformers does not load {cls.__name__} ({type(error).__name__}: {error})"
        ) from error
    _refuse_missing(source.name, info)
    return model.to(runtime.device).eval().requires_grad_(False)


@contextmanager
def _silence_loading() -> Iterator[None]:
    """Hide transformers' progress bars and its report of tensors in this context."""
    from transformers.utils import logging  # noqa: PLC0415 - takes seconds

    was_shown = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()


def _refuse_missing(name: str, info: dict[str, Any]) -> None:
    """Raise ModelError for weights that ``from_pretrained`` did not find or could not use; they would be random."""
    keys = sorted({str(key) for key in (*info["missing_keys"], *info["mismatched_keys"])})
    if keys:
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise ModelError(
            f"{name!r} has no weights of the right shape for {', '.join(keys[:5])}{more}: download the whole checkpoint"
        )


def _make_half_class(source: ModelSource, part: str) -> tuple[Any, Any]:
    """Return the class that builds a part of a model, and its config.

    For ``WHOLE`` it is the stock class; otherwise a subclass with the stock class's name and module, whose ``__init__``
    empties the modules that ``part`` does not need.
    """
    stock: Any
    stock, config = source.find_stock_class()
    if part == WHOLE:
        return stock, config

    class Half(stock):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            _empty_unneeded_modules(self, part)

    # transformers converts names on disk only for its own classes, which it recognizes by their module.
    Half.__name__, Half.__qualname__, Half.__module__ = stock.__name__, stock.__qualname__, stock.__module__
    return Half, config


def _empty_unneeded_modules(model: Any, part: str) -> None:
    """Replace the modules that ``part`` of a model does not need by empty ones, in place.

    The TOWER has no language model, output layer and audio encoder; its tied weights are forgotten. The LLM has only
    the modules on the way to the language model and the output layer.
    """
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    if part == TOWER:
        model.all_tied_weights_keys = {}
        whole = {id(model), id(model.base_model)}
        ids = {id(module) for module in (decoder, head, model.get_encoder(modality="audio")) if module is not None}
        _empty_modules(model, ids - whole)
        return
    needed = {id(module) for module in decoder.modules()} | {id(head)}
    holders = {id(module) for module in model.modules() if any(id(child) in needed for child in module.modules())}
    for owner in (model, model.base_model):
        _empty_modules(owner, {id(child) for child in owner.children()} - holders - needed)


def _empty_modules(model: nn.Module, ids: set[int]) -> None:
    """Replace the modules with these ids (of ``id()``) by empty ones, in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in ids:
                setattr(parent, name, nn.Module())


def find_encoder(model: Any) -> tuple[str, Callable[..., Any]]:
    """Return the modality under which a model accepts features of a video, and the method that makes them.

    The modality is "video", or "image" for a model with only ``get_image_features``.

    Raises:
        ModelError: the model makes no features, or its forward has no ``mm_encoder_outputs``.
    """
    if "mm_encoder_outputs" in inspect.signature(model.forward).parameters:
        for modality in ("video", "image"):
            for owner in (model.base_model, model):
                if (method := getattr(owner, f"get_{modality}_features", None)) is not None:
                    return modality, method
        raise ModelError(f"{type(model).__name__} of transformers makes no features of videos")
    raise ModelError(f"{type(model).__name__} of transformers takes no mm_encoder_outputs, the entry of cached tokens")


def make_features(method: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Run a model's own encoder on the inputs that its signature names; return its output, a ModelOutput.

    Raises:
        ModelError: the processor did not make an input that the encoder needs, or the encoder reads the question.
    """
    names = inspect.signature(method).parameters
    pixels = {key: value for key, value in inputs.items() if key in names}
    required = [n for n, p in names.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if missing := [name for name in required if name not in pixels]:
        raise ModelError(f"the processor of this model makes no {' and no '.join(missing)} of a video")
    if any("input_ids" in name for name in pixels):
        raise ModelError("the encoder of this model reads the question, so its tokens cannot serve several questions")
    return method(**pixels, return_dict=True)


def select_forward_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that a model's ``forward`` accepts."""
    names = inspect.signature(model.forward).parameters
    return {key: value for key, value in inputs.items() if key in names}


def select_token_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the inputs of a model's ``forward`` that have a value for each token of the prompt, [1, L] each."""
    shape = inputs["input_ids"].shape
    taken = select_forward_inputs(model, inputs).items()
    return {key: value for key, value in taken if isinstance(value, Tensor) and value.shape == shape}


def move_inputs(inputs: dict[str, Any], device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Move the tensors of a processor's output to a device; cast floating-point ones of several axes to ``dtype``."""
    return {
        key: value.to(device, dtype if value.is_floating_point() and value.ndim > 1 else None)
        if isinstance(value, Tensor)
        else value
        for key, value in inputs.items()
    }


@contextmanager
def replace_method(model: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object inside this context."""
    before = vars(model).get(name)
    setattr(model, name, method)
    try:
        yield
    finally:
        delattr(model, name)
        if before is not None:
            setattr(model, name, before)


@contextmanager
def keep_positions(model: Any) -> Iterator[None]:
    """Make the model's ``generate`` pass its ``position_ids`` on to ``forward`` inside this context.

    Some classes (EXAONE 4.5, HyperCLOVA X) replace them by positions that count the tokens.
    """
    stock = model.prepare_inputs_for_generation

    @wraps(stock)
    def prepare(*args: Any, **options: Any) -> dict[str, Any]:
        """Call the stock method; restore the positions of the new tokens if it dropped them."""
        inputs: dict[str, Any] = stock(*args, **options)
        positions = options.get("position_ids")
        ids = inputs.get("input_ids")
        if inputs.get("position_ids") is None and positions is not None and ids is not None:
            inputs["position_ids"] = positions[..., -ids.shape[1] :].to(ids.device)
        return inputs

    with replace_method(model, "prepare_inputs_for_generation", prepare):
        yield


def build_shell(source: ModelSource) -> Any:
    """Build the whole model on the meta device, for its rules of positions. Raises ModelError if that fails."""
    cls, config = source.find_stock_class()
    try:
        with torch.device("meta"):
            return cls._from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # of any type that a class raises for a wrong setting
        raise ModelError(
            f"{source.name!r}: config.json makes no {cls.__name__} ({type(error).__name__}: {error})"
        ) from error
