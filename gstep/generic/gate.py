"""The gate of the generic family: before any work, it checks that cached tokens give the result of the stock model.

The tensors of both halves of the model must be in the checkpoint. Then a reduced model with random weights reads a
short clip, once from pixels and once from cached tokens. The results must agree, and a wrong token, weight or position
must change them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from gstep.backbones import ModelSource, Runtime, SampledVideo
from gstep.checkpoints.tensors import IRRELEVANT_KEYS
from gstep.errors import ModelError
from gstep.generic.family import VideoReader
from gstep.generic.halves import (
    LLM,
    TOWER,
    WHOLE,
    find_encoder,
    load_model,
    make_features,
    move_inputs,
    select_forward_inputs,
    select_token_inputs,
)
from gstep.generic.layout import (
    Layout,
    compute_prompt_positions,
    count_steps,
    count_units,
    encode_pieces,
    find_dependence,
    find_placeholders,
    flatten_features,
    split_inputs,
)
from gstep.generic.model import wrap_features
from gstep.generic.processor import encode_record
from gstep.generic.reduced import MEMORY_SHARE, build_reduced, get_free_memory_bytes, remove_head
from gstep.lazy import repeat_line

_VERSION = 1  # the version of this check: stored results of another version are not used
#: The largest difference of results that counts as equal, as a share of their standard deviation.
TOLERANCE = 0.02
_FRAMES, _HEIGHT, _WIDTH, _FPS = 8, 112, 168, 1.3
_ZEROED = 4  # the number of weights that are set to zero, one at a time, until one shows
#: TOLERANCE for a prompt in a batch: padding changes the order of sums, and therefore their rounding in bfloat16.
BATCH_TOLERANCE = 0.1


def check_model(source: ModelSource) -> dict[str, Any]:
    """Check a model of the generic family; return the fields of a Layout as JSON values.

    A result for the same config, processor, prompt files, code and versions is read from the user's cache folder, and
    only the names of other weights are checked then. Otherwise the check may take a minute or two, with messages on
    stderr, and its result is stored, unless it fails. ``parity["names"]`` is False if the weights are not on this
    machine.

    Raises:
        ModelError: the model cannot be used, or its own code fails in the check.
    """
    path = _get_cache_folder() / f"{_compute_key(source)}.json"
    kept = _read_result(path)
    if kept is None or source.identity not in kept["identities"]:
        with _convert_model_errors(source):
            kept = _complete_result(source, kept)
        _write_result(path, kept)
    layout: dict[str, Any] = kept["layout"]
    layout["parity"]["names"] = source.identity in kept["identities"]
    return layout


def _complete_result(source: ModelSource, kept: dict[str, Any] | None) -> dict[str, Any]:
    """Check a model's names, and its numbers unless a stored result is given; return the result to store.

    Progress is printed to stderr.

    Args:
        kept: the stored result, to which the model's identity is added if its names could be checked; or None.
    """
    line = f"checking that transformers answers from cached tokens of {source.name} as from its videos"
    start = time.monotonic()
    if kept is None:
        print(f"{line}; once for this kind of model", file=sys.stderr, flush=True)
    with repeat_line(lambda text: print(text, file=sys.stderr, flush=True), f"still {line}", every_s=15.0):
        names = _check_names(source)
        if kept is None:
            kept = {"layout": _check_numbers(source), "identities": []}
            kept["layout"]["parity"]["seconds"] = round(time.monotonic() - start, 1)
    kept["identities"] += [source.identity] * names
    return kept


@contextmanager
def _convert_model_errors(source: ModelSource) -> Iterator[None]:
    """Convert an Exception in this context to a ModelError; a ModelError passes unchanged."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{source.name!r}: the check of the generic family fails in the model's own code ({type(error).__name__}: "
            f"{error}): python -m jobs.doctor --model {source.name} compares the whole model"
        ) from error


def check_weights(source: ModelSource) -> tuple[str, str, str]:
    """Compare the stock model with cached tokens on the checkpoint's real weights, on the CPU, for ``jobs.doctor``.

    If they agree and :func:`check_model` has no result, this result is stored for it. No weights are downloaded.

    Returns:
        (state, what was measured, the remedy). The state is "ok", "wrong" (the model cannot be used, with the reason),
        or "unknown" if a weight file is not on this machine, or they need more than MEMORY_SHARE of the free memory.
    """
    sizes = list(_iter_file_sizes(source))
    is_here = bool(sizes) and all(sizes)
    if not is_here or sum(sizes) > MEMORY_SHARE * get_free_memory_bytes():
        here = f"{sum(map(bool, sizes))} of {len(sizes)} weight files are on this machine"
        size = f"the weights have {sum(sizes) / 2**30:.1f} GiB" if is_here else here
        free = f"{get_free_memory_bytes() / 2**30:.1f} GiB of memory"
        says = f"{size}, and {free} are free: nothing was compared"
        return "unknown", says, "run this where the weights and enough memory are; jobs.prune checks a reduced model"
    try:
        with _convert_model_errors(source):
            _check_names(source)
            model = load_model(source, Runtime("cpu", torch.bfloat16, "sdpa"), WHOLE)
            remove_head(model)
            layout = compare(source, model).to_json()
    except ModelError as error:
        return "wrong", str(error), ""
    path = _get_cache_folder() / f"{_compute_key(source)}.json"
    parity = layout["parity"]
    if _read_result(path) is None:
        parity |= {"weights": source.identity, "names": True}
        _write_result(path, {"layout": layout, "identities": [source.identity]})
    measured = f"difference {parity['difference']:.2g}, spread {parity['scale']:.2g}"
    return "ok", f"cached tokens give the stock model's result ({measured})", ""


# ---- by names


def _check_names(source: ModelSource) -> bool:
    """Check that the checkpoint has the tensors of both halves; return False if a weight file is not on this machine.

    Raises:
        ModelError: tensors are missing or have another shape.
    """
    if not source.weight_files or not all(_iter_file_sizes(source)):
        return False
    for part in (TOWER, LLM):
        load_model(source, Runtime("meta", torch.bfloat16, "sdpa"), part)
    return True


def _iter_file_sizes(source: ModelSource) -> Iterator[int]:
    """Yield the size of each weight file in bytes; 0 if it is not on this machine."""
    for filename in source.weight_files:
        path = source.files.find_local(filename)
        yield 0 if path is None else path.stat().st_size


# ---- by numbers


def _check_numbers(source: ModelSource) -> dict[str, Any]:
    """Compare a reduced model's results from pixels and from cached tokens; return the layout as JSON values."""
    return compare(source, build_reduced(source)).to_json()


@torch.no_grad()
def compare(source: ModelSource, model: Any) -> Layout:
    """Compare a model's result from the pixels of a short clip with its result from cached tokens, all kept.

    Args:
        model: the whole model, or a reduced one, on the CPU. Some weights are set to zero in between and restored.

    Returns:
        The layout of the model, with the measurements in ``parity``.

    Raises:
        ModelError: the results differ by more than TOLERANCE (2 % of the standard deviation), or a wrong token,
            position or weight does not show (except positions without any effect); or the model's tokens, steps or
            prompts have a form that is not supported.
    """
    modality, method = find_encoder(model)
    reader = VideoReader(source, None)
    frames, video = _make_clip()

    def encode(clip: Tensor) -> tuple[list[Tensor], float]:
        inputs = move_inputs(reader.read(clip, video)[0], "cpu", torch.bfloat16)
        return flatten_features(make_features(method, inputs)), count_units(inputs)

    together, tail, units = find_dependence(encode, frames)
    processed, recorded = reader.read(frames, video)
    inputs = move_inputs(processed, "cpu", torch.bfloat16)
    output = make_features(method, inputs)
    levels = flatten_features(output)
    layout = Layout(
        hidden_size=levels[0].shape[1],
        deepstack_levels=len(levels) - 1,
        modality=modality,
        stacked=isinstance(output.pooler_output, Tensor),
        frames_per_step=together,
        tail=tail,
        units_per_step=units,
    )
    if tail and layout.deepstack_levels:
        raise ModelError(f"{source.name!r} has rows behind a video and deepstack levels, which is not implemented")
    _check_steps(source, reader, model.config, layout, frames, len(levels[0]))
    stock = model(**select_forward_inputs(model, inputs)).logits
    replayed = reader.replay_video_record(encode_record(recorded))
    _check_replay(source, processed, replayed)
    prompt = _make_prompt(model, replayed, len(levels[0]))
    layout = replace(layout, axes=3 if prompt["position_ids"].ndim == 3 else 1)

    def run(features: Sequence[Tensor], **changes: Any) -> Tensor:
        outputs = wrap_features([[level] for level in features], layout)
        return cast("Tensor", model(**(prompt | changes), mm_encoder_outputs=outputs).logits)

    scale = float(stock.float().std())
    same = _compute_difference(run(levels), stock)
    if not same <= TOLERANCE * scale:
        raise ModelError(
            f"{source.name!r}: from cached tokens, all kept, {type(model).__name__} of transformers "
            f"{version('transformers')} gives another result than from the video (difference {same:.3g}, spread "
            f"{scale:.3g}): it cannot be used"
        )
    noticed = _measure_sensitivity(model, run, levels, prompt, stock)
    for what, difference in noticed.items():
        uses_none = what == "shifted position" and difference == 0  # such as layers of Mamba
        if not uses_none and not difference > TOLERANCE * scale:
            raise ModelError(
                f"{source.name!r}: its check is blind, since a {what} changes the result by only {difference:.3g} "
                f"(spread {scale:.3g}): python -m jobs.doctor --model {source.name} compares the whole model"
            )
    return replace(
        layout,
        in_pieces=together < _FRAMES and can_encode_in_pieces(method, inputs, levels, layout),
        in_batches=_can_answer_in_batches(model, levels, prompt, layout, stock, scale),
        parity={
            "class": type(model).__name__,
            "transformers": version("transformers"),
            "torch": torch.__version__,
            "difference": same,
            "scale": scale,
            "notices": noticed,
        },
    )


def _check_steps(
    source: ModelSource, reader: VideoReader, config: Any, layout: Layout, frames: Tensor, n_rows: int
) -> None:
    """Raise ModelError unless prompts of 8 and 5 frames have the steps that the frames encoded together make.

    Nothing is checked if all frames of the clip are encoded together. ``n_rows`` is the number of rows of features of
    the whole clip.
    """
    if layout.frames_per_step == _FRAMES:  # frames attend to each other: only the processor defines a step
        return
    for n_frames in (_FRAMES, _FRAMES - 3):
        _, video = _make_clip(n_frames)
        inputs, _ = reader.read(frames[:n_frames], video)
        rows = n_rows if n_frames == _FRAMES else reader.count_placeholders(inputs)
        steps = count_steps(config, inputs, layout.units_per_step, rows, layout.tail)
        if steps != (expected := math.ceil(n_frames / layout.frames_per_step)):
            raise ModelError(
                f"{source.name!r}: of {n_frames} frames {layout.frames_per_step} are encoded together, which makes "
                f"{expected} steps of time, and its prompt has {steps}: which tokens belong to a frame is not known"
            )


def _check_replay(source: ModelSource, made: Mapping[str, Any], replayed: Mapping[str, Any]) -> None:
    """Raise ModelError unless the processor makes the same inputs per token from its record as from the video."""
    shape = made["input_ids"].shape
    for name, value in made.items():
        if not isinstance(value, Tensor) or value.shape != shape:
            continue
        other = replayed.get(name)
        if not isinstance(other, Tensor) or not torch.equal(other, value):
            raise ModelError(f"{source.name!r}: its processor makes other {name} of its record than of the video")


def _make_clip(n_frames: int = _FRAMES) -> tuple[Tensor, SampledVideo]:
    """Make the clip of the check: seeded noise, [F, 3, H, W] uint8, and its times."""
    noise = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (n_frames, 3, _HEIGHT, _WIDTH), generator=noise, dtype=torch.uint8, device="cpu")
    # An uneven rate, since the positions in some models are fractions of times.
    return frames, SampledVideo(_HEIGHT, _WIDTH, [i / _FPS for i in range(n_frames)], None, _FPS, n_frames)


def _make_prompt(model: Any, inputs: Mapping[str, Any], n_rows: int) -> dict[str, Any]:
    """Make the inputs of ``forward`` for a cached video with all tokens kept, except the rows of the video.

    Only inputs with a value per token, [1,L], are taken. A missing ``attention_mask`` becomes ones. ``position_ids``
    are the original ones, [1,L] or [3,1,L].

    Args:
        inputs: the processor's output for the whole prompt.
        n_rows: the number of the video's rows, one per placeholder.

    Raises:
        ModelError: no placeholder occurs ``n_rows`` times.
    """
    ids = inputs["input_ids"]
    find_placeholders(model.config, ids, n_rows)
    prompt = select_token_inputs(model, dict(inputs))
    prompt.setdefault("attention_mask", torch.ones_like(ids))
    positions = compute_prompt_positions(model, inputs, torch.ones_like(ids[0], dtype=torch.bool), "original")
    return prompt | {"position_ids": positions if len(positions) == 1 else positions[:, None]}


def _measure_sensitivity(
    model: Any, run: Any, levels: Sequence[Tensor], prompt: Mapping[str, Any], stock: Tensor
) -> dict[str, float]:
    """Measure how much a swapped token, a shifted position and a zeroed weight change the result: name -> difference.

    The first and the middle token are swapped; the positions of the prompt's second half are shifted by 7. Up to
    _ZEROED of the decoder's largest matrices, without embeddings, experts and indexers, are zeroed in turn, until one
    changes the result by more than TOLERANCE, and restored.

    Args:
        run: computes the logits from features, with changed inputs of the prompt as keywords.
        stock: the logits of the stock model.
    """
    order = torch.arange(len(levels[0]))
    order[[0, len(order) // 2]] = order[[len(order) // 2, 0]]
    shifted = prompt["position_ids"].clone()
    shifted[..., shifted.shape[-1] // 2 :] += 7
    noticed = {
        "swapped token": _compute_difference(run([level[order] for level in levels]), stock),
        "shifted position": _compute_difference(run(levels, position_ids=shifted), stock),
    }
    named = model.get_decoder().named_parameters()  # not every expert and attention index is used
    unused = ("embed", "expert", "indexer")
    weights = [w for n, w in named if w.ndim == 2 and not any(word in n for word in unused)]
    noticed["zeroed weight"] = 0.0
    for weight in sorted(weights, key=Tensor.numel, reverse=True)[:_ZEROED]:
        kept = weight.data.clone()
        weight.data.zero_()
        noticed["zeroed weight"] = _compute_difference(run(levels), stock)
        weight.data.copy_(kept)
        if noticed["zeroed weight"] > TOLERANCE * float(stock.float().std()):
            break
    return noticed


def can_encode_in_pieces(method: Any, inputs: dict[str, Any], levels: Sequence[Tensor], layout: Layout) -> bool:
    """Return True if a video's steps, encoded one by one, give the features of the whole, ``levels``, within TOLERANCE.

    False also if the inputs cannot be split, or the encoder fails on pieces.
    """
    if len(split_inputs(inputs, max(1, round(layout.units_per_step)))) == 1:
        return False
    one_by_one = replace(layout, in_pieces=True)
    whole = levels[0]
    try:
        rows = encode_pieces(method, inputs, one_by_one, 1, whole.device, whole.dtype)
    except Exception:  # noqa: BLE001 - of any type: the encoder does not accept such pieces
        return False
    return all(
        a.shape == b.shape and _compute_difference(a, b) <= TOLERANCE * float(b.float().std())
        for a, b in zip(rows, levels, strict=True)
    )


def _can_answer_in_batches(
    model: Any, levels: Sequence[Tensor], prompt: Mapping[str, Any], layout: Layout, stock: Tensor, scale: float
) -> bool:
    """Return True if two prompts of different videos and lengths give the same results in a batch as alone.

    One prompt is ``prompt``, padded by 3 tokens on the left; the other is 3 tokens longer and has the video's rows in
    reverse order. False also if the model fails, on the batch or on the longer prompt alone.

    Args:
        stock: the logits of ``prompt`` alone.
        scale: the standard deviation of ``stock``, of which BATCH_TOLERANCE (a tenth) is the tolerance.
    """
    longer = {name: torch.cat([value[..., -3:], value], dim=-1) for name, value in prompt.items()}
    padded = {name: torch.cat([torch.zeros_like(value[..., :3]), value], dim=-1) for name, value in prompt.items()}
    padded["input_ids"][:, :3] = prompt["input_ids"][:, :1]
    batch = {name: torch.cat([longer[name], padded[name]], dim=-2) for name in prompt}
    others = [level.flip(0) for level in levels]
    try:
        alone = model(**longer, mm_encoder_outputs=wrap_features([[level] for level in others], layout)).logits
        outputs = wrap_features([list(pair) for pair in zip(others, levels, strict=True)], layout)
        result = model(**batch, mm_encoder_outputs=outputs).logits
    except Exception:  # noqa: BLE001 - of any type: the model does not accept such batches
        return False
    differences = [_compute_difference(result[:1], alone), _compute_difference(result[1:, 3:], stock)]
    return max(differences) <= BATCH_TOLERANCE * scale


def _compute_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; infinity if shapes differ or a value is NaN."""
    if a.shape != b.shape:
        return float("inf")
    difference = float((a.float() - b.float()).abs().max())
    return difference if difference == difference else float("inf")  # noqa: PLR0124 - NaN


# ---- stored results


def _get_cache_folder() -> Path:
    """Return the folder of stored results in the user's cache folder (without a home, the temporary folder)."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        folder = Path(tempfile.gettempdir())
    return folder / "gstep-cache" / "checks"


def _compute_key(source: ModelSource) -> str:
    """Compute the key of a stored result: a hash of class, config, processor and prompt files, code, and versions."""
    content = {
        "check": [_VERSION, version("transformers"), version("torch")],
        "code": hashlib.sha256(
            "".join(inspect.getsource(sys.modules[f"gstep.generic.{m}"]) for m in _MODULES).encode()
        ).hexdigest(),
        "architectures": source.config.get("architectures"),
        "config": {key: value for key, value in source.config.items() if key not in IRRELEVANT_KEYS},
        "processor": source.preprocessor,
        "prompt": {name: _hash_file(source, name) for name in _PROMPT_FILES},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _hash_file(source: ModelSource, filename: str) -> str | None:
    """Return the SHA-256 of a checkpoint's file, as hex; None if it has no such file."""
    path = source.files.find(filename)
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


_PROMPT_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "tokenizer.json")
_MODULES = ("gate", "family", "halves", "layout", "model", "processor", "reduced")


def _read_result(path: Path) -> dict[str, Any] | None:
    """Read a stored result; None if there is none, or it is damaged."""
    try:
        kept = json.loads(path.read_text())
        Layout(**kept["layout"])
        return kept if isinstance(kept["identities"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_result(path: Path, kept: Mapping[str, Any]) -> None:
    """Store a result; if the disk cannot be written, only print a message to stderr."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{time.time_ns()}")
        temporary.write_text(json.dumps(kept))
        temporary.replace(path)
    except OSError as error:
        print(f"the result of the check was not kept: {error}", file=sys.stderr, flush=True)
