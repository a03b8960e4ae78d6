"""Pruning inside a live model: ``generate`` encodes a video, prunes its tokens, and answers from the kept ones."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from gstep.backbones import family_class
from gstep.errors import ModelError
from gstep.families import FAMILIES, GENERIC, choose_family
from gstep.generic.gate import can_encode_in_pieces
from gstep.generic.halves import (
    find_encoder,
    keep_positions,
    make_features,
    move_inputs,
    replace_method,
    select_token_inputs,
)
from gstep.generic.layout import (
    Layout,
    compute_prompt_positions,
    count_steps,
    count_units,
    encode_pieces,
    find_placeholders,
    flatten_features,
    list_kept_rows,
    list_separators,
    mark_kept_columns,
    probe_units,
    split_inputs,
)
from gstep.generic.model import wrap_features
from gstep.lazy import load_object
from gstep.pruners import find_method, make_pruner
from gstep.pruners.base import Pruner
from gstep.pruners.checks import check_integer
from gstep.types import VisualTokens

#: Options of ``generate`` that are refused with a video, unless they are turned off, and why.
_REFUSED: Mapping[str, str] = {
    "assistant_model": "an assistant reads the whole prompt",
    "assistant_early_exit": "an assistant reads the whole prompt",
    "prompt_lookup_num_tokens": "an assistant reads the whole prompt",
    "custom_generate": "another loop of generation may read what is no longer there",
    "cache": "keys and values of an earlier prompt do not fit the pruned prompt",
    "past_key_values": "keys and values of an earlier prompt do not fit the pruned prompt",
    "inputs_embeds": "the tokens of the prompt are needed: pass input_ids",
    "position_ids": "the positions of the kept tokens are the model's own",
    "mm_encoder_outputs": "the video is encoded here: pass its pixels",
    "negative_prompt_ids": "a second prompt has no video",
    "guidance_scale": "the prompt for guidance has no video",
    "prefill_chunk_size": "the kept tokens enter the model at once",
    "token_healing": "it changes the prompt",
}
_PER_VIDEO = ("num_frames_per_video", "video_grids", "video_merge_sizes")  # inputs with one entry per video
_FRAMES_PER_PASS = 32  # frames that a GPU encodes at once
_SEVERAL = "gstep.pruning takes one video a prompt, and this prompt has several"


@contextmanager
def pruning(
    model: Any, method: str | Pruner = "gstep", retention_ratio: float = 0.25, *, seed: int = 0, **params: Any
) -> Iterator[None]:
    """Prune the video of every prompt that ``model.generate`` answers inside this context.

    >>> with gstep.pruning(model, method="gstep", retention_ratio=0.25):
    ...     inputs = processor(text=[prompt], videos=[frames], return_tensors="pt")
    ...     ids = model.generate(**inputs.to(model.device), max_new_tokens=64)

    The tokens of the model's own encoder are rounded to bfloat16 and pruned. The returned ids begin with the whole
    prompt. Inputs without a video are answered by the stock ``generate``. For a model that is not in the table of
    families, the first video (of each length, if all frames are encoded together) is encoded up to six times, to find
    out which tokens belong to which frames.

    Args:
        model: a loaded transformers model with a vision encoder. Its ``generate`` is replaced inside the context.
        method: a method that needs only tokens: a name of PRUNERS, ``module:Class``, or a Pruner object.
        retention_ratio: the share of the tokens to keep, in (0, 1].

    Raises:
        ValueError: the method needs more than tokens, an argument is not valid, or the model is in such a context
            already. ``generate`` raises it for several prompts or videos, images or sounds beside a video, and options
            that cannot be combined with a pruned prompt; the message names what is refused.
        ModelError: ``model`` is not a transformers model, makes no features of videos, or does not accept them as
            input. ``generate`` raises it if the model's tokens do not belong to single frames.
    """
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"{type(model).__name__} is no model of transformers: pass the model that from_pretrained returned, not a "
            "name and not a wrapper around it"
        )
    if isinstance(model.generate, _PrunedGenerate):
        raise ValueError("this model is within a pruning context already: leave it before entering another")
    try:
        generate = _PrunedGenerate(model, _make_method(model, method, params), retention_ratio, seed)
    except ModelError as error:
        raise ModelError(
            f"{error}: gstep.pruning needs a model that reads videos, of a class that takes them encoded "
            "(transformers 5.18 or later)"
        ) from None
    with replace_method(model, "generate", generate):
        yield


def _make_method(model: Any, method: str | Pruner, params: Mapping[str, Any]) -> Pruner:
    """Make the method, with the default parameters of the model's family.

    Raises:
        ValueError: the method or a parameter is not valid, or the method needs more than tokens.
    """
    if isinstance(method, str) and (name := find_method(method).family_parameter) is not None:
        params = {name: family_class(choose_family(model.config.model_type)).variant, **params}
    pruner = make_pruner(method, **params)
    if pruner.layer is not None:
        raise ValueError(f"method {pruner.name!r} prunes inside the language model, which gstep.pruning does not do")
    if needs := sorted({*pruner.needs, *pruner.sources}):
        raise ValueError(f"method {pruner.name!r} needs {', '.join(needs)}, and gstep.pruning gives it tokens alone")
    return pruner


class _PrunedGenerate:
    """A replacement for a model's ``generate`` that prunes the tokens of the prompt's video."""

    def __init__(self, model: Any, pruner: Pruner, retention_ratio: float, seed: int) -> None:
        """Check the arguments and inspect the model.

        Raises:
            ValueError: the ratio or the seed is not valid.
            ModelError: the model makes no features of videos, or does not accept them as input.
        """
        pruner.nominal_ratio(retention_ratio)
        self._model = model
        self._stock = model.generate
        self._pruner = pruner
        self._ratio = retention_ratio
        self._seed = check_integer("seed", seed, 0)
        self._modality, self._method = find_encoder(model)
        self._forward_names = inspect.signature(model.forward).parameters.keys()
        self._encoder_names = inspect.signature(self._method).parameters.keys()
        self._pixels = next(name for name in self._encoder_names if name.startswith("pixel_values"))
        name = choose_family(model.config.model_type)
        self._in_table = name != GENERIC
        prompts = load_object(FAMILIES[name].prompts or str(FAMILIES[GENERIC].prompts))
        self._tail = int(prompts.needs_newline)
        self._layouts: dict[int | None, Layout] = {}  # key: a video's units of time; None for any video

    @torch.no_grad()
    def __call__(self, *args: Any, **options: Any) -> Any:
        """Generate from the kept tokens of the video, if there is one; otherwise call the stock ``generate``.

        Scores, hidden states and the cache in the result are those of the pruned prompt. The model's ``rope_deltas``
        are restored at the end.

        Raises:
            ValueError: there are several prompts or videos, images or sounds, or an option that is refused.
            ModelError: the model's tokens do not belong to single frames, or do not fit the prompt.
        """
        bound = inspect.signature(type(self._model).generate).bind_partial(self._model, *args, **options).arguments
        given = {**bound.pop("kwargs", {}), **bound}
        del given["self"]
        prompts = [prompt for name in ("inputs", "input_ids") if (prompt := given.pop(name, None)) is not None]
        ids = prompts[0] if len(prompts) == 1 else None
        if not self._has_video(ids, given):
            return self._stock(*args, **options)
        metadata = given.pop("video_metadata", None)  # the model's own generate refuses it
        ids = self._check(given, ids)
        names = self._encoder_names | self._forward_names
        given = {name: value for name, value in given.items() if value is not None or name not in names}
        made = {name: given.pop(name) for name in list(given) if name in names and isinstance(given[name], Tensor)}
        if metadata is not None:
            made["video_metadata"] = metadata
        self._check_frames(made, ids)
        deltas = [(module, module.rope_deltas) for module in self._model.modules() if hasattr(module, "rope_deltas")]
        try:
            pruned = self._prune({"input_ids": ids, "attention_mask": torch.ones_like(ids), **made})
            whole = _WholePrompt(ids, pruned["input_ids"].shape[1])
            with keep_positions(self._model):
                output = self._stock(**pruned, **self._adapt_options(given, whole))
        finally:
            for module, value in deltas:
                module.rope_deltas = value
        if isinstance(output, Tensor):
            return whole.restore(output)
        output.sequences = whole.restore(output.sequences)
        return output

    def _has_video(self, ids: Any, options: Mapping[str, Any]) -> bool:
        """Return True if the options have pixels that look like a video.

        On a model that takes frames as images, a single prompt must have several images, with text between all of them.
        """
        if not isinstance(options.get(self._pixels), Tensor):
            return False
        if self._modality == "video" or not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) > 1:
            return True
        units = count_units({self._pixels: options[self._pixels]})
        # The tiles of an image are one run of placeholders; the frames of a video are runs with text between them.
        return units > 1 and len(list_separators(self._model.config, ids)) == units - 1

    def _check(self, options: Mapping[str, Any], ids: Any) -> Tensor:
        """Return the ids of the prompt, after checking that it can be pruned.

        Raises:
            ValueError: ``ids`` is not one prompt [1, L]; the call or a generation config sets an option of _REFUSED,
                several beams or sequences, no cache or a paged one; or the prompt has images, sounds or several videos.
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2 or len(ids) != 1:
            raise ValueError("gstep.pruning takes one prompt at a time, input_ids [1,L]: call generate for each prompt")
        for name, reason in _REFUSED.items():
            value = self._get_setting(options, name)
            if value is not None and value is not False and not (name == "guidance_scale" and value == 1):
                raise ValueError(f"{name} does not go with gstep.pruning: {reason}")
        for name in ("num_beams", "num_return_sequences"):
            if (value := self._get_setting(options, name)) is not None and value > 1:
                raise ValueError(f"{name}={value} does not go with gstep.pruning: call generate several times")
        if (
            self._get_setting(options, "use_cache") is False
            or self._get_setting(options, "cache_implementation") == "paged"
        ):
            raise ValueError("use_cache=False and a paged cache do not go with gstep.pruning: leave them out")
        for kind, noun in (("image", "images"), ("audio", "sounds")):
            encoders = [getattr(owner, f"get_{kind}_features", None) for owner in (self._model.base_model, self._model)]
            names = {name for encoder in encoders if encoder for name in inspect.signature(encoder).parameters}
            others = [options.get(name) for name in names - self._encoder_names]
            if any(isinstance(value, Tensor) and value.shape != ids.shape for value in others):
                raise ValueError(f"gstep.pruning takes a video alone, and this prompt has {noun} beside it")
        self._refuse_several_videos(options, ids)
        return ids

    def _check_frames(self, inputs: Mapping[str, Any], ids: Tensor) -> None:
        """Raise ValueError if ``video_metadata`` is needed to count the frames, but missing.

        It is needed if all patches are in one row (MiniCPM) and text stands between the prompt's placeholders.
        """
        pixels = inputs[self._pixels]
        in_one_row = pixels.ndim == 4 and len(pixels) == 1 and "video_grid_thw" not in inputs
        if in_one_row and "video_metadata" not in inputs and list_separators(self._model.config, ids):
            raise ValueError(
                f"the pixels of {type(self._model).__name__} do not say where a frame ends: give return_metadata=True "
                "to the processor, and its video_metadata to generate"
            )

    def _refuse_several_videos(self, options: Mapping[str, Any], ids: Tensor) -> None:
        """Raise ValueError for several videos, and for several images on a model that takes frames as images.

        On such a model, a text that stands between all images (at least twice) means several images, and a text that
        recurs after another text means several videos. Elsewhere, inputs with an entry per video count them.
        """
        counts = [len(options[name]) for name in _PER_VIDEO if isinstance(options.get(name), Tensor)]
        if self._in_table and (grid := options.get("video_grid_thw")) is not None:
            counts.append(len(grid))
        if self._modality == "video":
            pixels = options[self._pixels]
            counts.append(len(pixels) if pixels.ndim == 5 else 1)
        else:
            separators = list_separators(self._model.config, ids)
            if len(separators) > 1 and len(set(separators)) == 1:
                raise ValueError(
                    f"{type(self._model).__name__} takes the frames of a video as images, and these look like several "
                    "images, since the same text stands between all of them: leave images out of gstep.pruning"
                )
            texts = [text for text, _ in itertools.groupby(separators)]  # between frames: their numbers or times ascend
            counts.append(1 + len(texts) - len(set(texts)))
        if max(counts) > 1:
            raise ValueError(_SEVERAL)

    def _get_setting(self, options: Mapping[str, Any], name: str) -> Any:
        """Return an option of ``generate`` from the call, its generation_config, or the model's, in this order."""
        configs = (options.get("generation_config"), self._model.generation_config)
        values = (options.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        """Run the encoder on a processor's output, moved to the model's device and dtype."""
        return make_features(self._method, move_inputs(dict(inputs), self._model.device, self._model.dtype))

    def _find_layout(self, inputs: Mapping[str, Any]) -> Layout:
        """Return the layout of a video, from the table of families or found by changing pixels, and store it.

        Runs the encoder, unless a stored layout applies. A layout found with T = 1 applies only to videos with as many
        units of time.

        Raises:
            ModelError: the rows of features mix frames, or do not depend on them.
            ValueError: the input has several videos, which only shows here for models outside the table.
        """
        units = count_units(inputs)
        if (layout := self._layouts.get(None) or self._layouts.get(units)) is not None:
            return layout
        output = self._run(split_inputs(inputs, 1)[0] if self._in_table else inputs)
        levels = flatten_features(output)
        steps = units
        tail = self._tail
        if not self._in_table:
            steps, tail = probe_units(lambda made: flatten_features(self._run(made)), inputs, levels[0])
            grid = inputs.get("video_grid_thw")
            if grid is not None and 1 < len(grid) != steps:  # the rows of a grid may be steps of one video (Kimi)
                raise ValueError(_SEVERAL)
        layout = Layout(
            hidden_size=levels[0].shape[1],
            deepstack_levels=len(levels) - 1,
            modality=self._modality,
            stacked=isinstance(output.pooler_output, Tensor),
            frames_per_step=math.ceil(units / steps),
            tail=tail,
            units_per_step=math.ceil(units / steps),
        )
        in_pieces = self._in_table or can_encode_in_pieces(self._method, dict(inputs), levels, layout)
        layout = replace(layout, in_pieces=in_pieces)
        self._layouts[None if self._in_table or steps > 1 else units] = layout
        return layout

    def _prune(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Encode and prune the video of a processor's output; return the model's inputs for the pruned prompt.

        They are the kept columns, their ``position_ids``, and ``mm_encoder_outputs``.
        """
        model = self._model
        layout = self._find_layout(inputs)
        ids = inputs["input_ids"]
        # As in GenericBackbone.encode, so that a CPU makes the tokens of a cache and a GPU does not run out of memory.
        steps = 1 if model.device.type == "cpu" else max(1, _FRAMES_PER_PASS // layout.frames_per_step)
        rows = encode_pieces(self._method, inputs, layout, steps, model.device, model.dtype)
        levels = [level.to(torch.bfloat16) for level in rows]
        n_rows = len(levels[0])
        n_tokens = n_rows - layout.tail
        T = count_steps(model.config, inputs, layout.units_per_step, n_rows, layout.tail)
        visual = VisualTokens(levels[0][:n_tokens].reshape(T, -1, layout.hidden_size))
        pruned = self._pruner.prune(visual, self._ratio, seed=self._seed)
        kept = list_kept_rows(pruned.index, n_tokens, layout.tail)
        features = [torch.cat([pruned.tokens, levels[0][n_tokens:]]), *(level[kept] for level in levels[1:])]
        mask = find_placeholders(model.config, ids, n_rows)[0]
        keep = mark_kept_columns(mask, kept.to(ids.device))
        positions = compute_prompt_positions(model, inputs, keep, None)
        columns = {name: value[:, keep] for name, value in select_token_inputs(model, inputs).items()}
        columns["position_ids"] = positions if len(positions) == 1 else positions[:, None]
        outputs = wrap_features([[level.to(model.dtype)] for level in features], layout)
        return {**columns, "mm_encoder_outputs": outputs}

    def _adapt_options(self, options: dict[str, Any], whole: _WholePrompt) -> dict[str, Any]:
        """Adapt the options of ``generate`` in place, so that they refer to the whole prompt, and return them.

        Length limits are reduced by the dropped tokens; processors, criteria, streamers and
        ``prefix_allowed_tokens_fn`` are wrapped.
        """
        defaults = GenerationConfig()
        for name in ("max_length", "min_length"):
            value = self._get_setting(options, name)
            if value is not None and (options.get(name) is not None or value != getattr(defaults, name)):
                options[name] = max(0, value - whole.n_dropped)
        if processors := options.get("logits_processor"):
            all_processors = LogitsProcessorList(processors)
            options["logits_processor"] = LogitsProcessorList(
                [lambda ids, scores: all_processors(whole.restore(ids), scores)]
            )
        if criteria := options.get("stopping_criteria"):
            all_criteria = StoppingCriteriaList(criteria)
            options["stopping_criteria"] = StoppingCriteriaList(
                [lambda ids, scores, **more: all_criteria(whole.restore(ids), scores, **more)]
            )
        if allow := options.get("prefix_allowed_tokens_fn"):
            options["prefix_allowed_tokens_fn"] = lambda row, ids: allow(row, whole.restore(ids))
        if (streamer := options.get("streamer")) is not None:
            options["streamer"] = _WholeStreamer(streamer, whole)
        return options


class _WholePrompt:
    """The whole prompt, [1, L], which replaces the pruned prompt at the start of generated ids."""

    def __init__(self, prompt: Tensor, n_kept: int) -> None:
        self._prompt = prompt
        self._n_kept = n_kept
        self.n_dropped = prompt.shape[1] - n_kept

    def restore(self, ids: Tensor) -> Tensor:
        """Return ``ids``, [B, L] or [L], with the whole prompt in place of the pruned prompt at their start."""
        prompt = self._prompt.to(ids.device)
        prompt = prompt[0] if ids.ndim == 1 else prompt.expand(len(ids), -1)
        return torch.cat([prompt, ids[..., self._n_kept :]], dim=-1)


class _WholeStreamer:
    """A wrapper of a streamer that replaces the pruned prompt, which comes first, by the whole prompt."""

    def __init__(self, stock: Any, whole: _WholePrompt) -> None:
        self._stock = stock
        self._whole = whole
        self._is_first = True

    def put(self, value: Tensor) -> None:
        """Stream the whole prompt in the first call, and then new tokens."""
        self._stock.put(self._whole.restore(value) if self._is_first else value)
        self._is_first = False

    def end(self) -> None:
        """End the stream."""
        self._stock.end()
