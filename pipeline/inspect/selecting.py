"""The selections that several methods make from all tokens of one video, which is encoded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gstep import VisualTokens
from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from gstep.evidence import HEAD_SOURCES, get_evidence_name, make_label
from gstep.pruners import get_method_name, make_pruner
from gstep.pruners.base import Pruner
from pipeline.cache.codecs import BFLOAT16
from pipeline.cache.header import identify_model
from pipeline.errors import UsageError, VideoFault, convert_usage_errors
from pipeline.generate.late_pruning import parse_pruning_grid
from pipeline.inspect.comparison import Comparison, MethodSelection
from pipeline.inspect.thumbnails import Pictures, encode_jpegs, shrink_frames
from pipeline.own_method import prune_or_raise_fault
from pipeline.prune.config import PruneConfig
from pipeline.prune.encode_stage import VideoEncoder, to_sampled_video
from pipeline.prune.recipe import Recipe, list_method_evidence, make_sampling_identity, resolve_recipe
from pipeline.rows import Json, VideoRow
from pipeline.storage.s3 import Objects


class RequestedSelection(NamedTuple):
    """A requested selection: a method, its label in the result, its nominal ratio, and its seed."""

    label: str
    pruner: Pruner
    retention_ratio: float
    seed: int

    @property
    def settings(self) -> dict[str, Json]:
        """The parameters of the method, and its seed if it draws."""
        return {**self.pruner.params(), **({"seed": self.seed} if self.pruner.seeded else {})}


def list_requested_selections(
    methods: Sequence[str | Pruner], ratios: Sequence[float], seed: int, family: str
) -> list[RequestedSelection]:
    """List the requested selections: the largest ratio first, then in the order of the methods; repeats are dropped.

    Args:
        seed: the seed of methods that draw and name none.
        family: the model family's variant of methods that differ by family (``ModelFamily.variant``).

    Raises:
        UsageError: a method or parameter is unknown, or a method selects anew for every question.
    """
    wanted: dict[tuple[str, float], RequestedSelection] = {}
    for method in methods:
        for row in _read_method(method, ratios, seed, family):
            if not row.pruner.cacheable:
                where = "inside the language model, " if row.pruner.layer is not None else ""
                raise UsageError(
                    f"--method {row.label}: it selects {where}anew for every question, so there is nothing to show for "
                    "a video alone; leave it out"
                )
            wanted.setdefault((row.label, row.retention_ratio), row)
    return sorted(wanted.values(), key=lambda row: -row.retention_ratio)


def _read_method(method: str | Pruner, ratios: Sequence[float], seed: int, family: str) -> Iterator[RequestedSelection]:
    """Yield the selections of one method: for each of its seeds, for each ratio from the largest.

    The ratio of a selection is the method's ``nominal_ratio``. A Pruner object gives a selection per ratio in the given
    order, with the given seed; its label has only the parameters that differ from their defaults. The label of a text
    has the parameters in it, and a seed other than 0 that comes from ``seed``.

    Args:
        method: METHOD or METHOD,NAME=VALUE,..., or a Pruner object.
        seed: the seed of a method that draws and names none.
        family: the variant of methods that differ by model family.

    Raises:
        UsageError: the method or a parameter is invalid, or it names positions of prompts.
    """
    with convert_usage_errors():
        if isinstance(method, Pruner):
            pruner = make_pruner(method)
            defaults = {item.name: item.default for item in fields(method)}
            params = [f"{name}={value}" for name, value in pruner.params().items() if value != defaults[name]]
            label = ",".join([get_method_name(type(pruner)), *params])
            yield from (RequestedSelection(label, pruner, pruner.nominal_ratio(ratio), seed) for ratio in ratios)
            return
        for spec in parse_pruning_grid([method], ratios, seed=seed):
            if spec.positions is not None:
                raise UsageError(f"--method {method}: positions are of prompts, not of selections; leave them out")
            label, (own, pruner) = replace(spec, seed=0).method_label, spec.read(family)
            if own.seed and "seed" not in spec.params:
                label = f"{label},seed={own.seed}"
            yield RequestedSelection(label, pruner, pruner.nominal_ratio(spec.retention_ratio), own.seed)


def select_with_methods(
    wanted: Sequence[RequestedSelection], visual: VisualTokens
) -> dict[tuple[str, float], MethodSelection]:
    """Select with each method from all tokens of a video; return the selections by (method, retention ratio).

    A nested method selects once, at its first ratio in ``wanted``, and its other ratios are prefixes of that; so larger
    ratios must come first.

    Args:
        visual: all tokens, with evidence under the labels ``make_label(name, source)``.

    Raises:
        VideoFault: a method cannot prune the video; the message names the method.
        MethodFails: a user method would fail for every video.
        KeyError: ``visual`` lacks evidence that a method needs.
    """
    largest = {}
    selections = {}
    for row in wanted:
        if row.label not in largest:
            evidence = {
                label: visual.evidence[make_label(get_evidence_name(label, source), source)]
                for label, source in row.pruner.sources.items()
            }
            own = replace(visual, evidence=evidence)
            try:
                pruned = prune_or_raise_fault(row.pruner, own, row.retention_ratio, row.seed)
            except VideoFault as fault:
                raise VideoFault(fault.fault_class, f"{row.label}: {fault.message}", stage="prune") from fault
            if row.pruner.nested:
                largest[row.label] = pruned
        else:
            pruned = largest[row.label].at(row.retention_ratio)
        merged = None if pruned.merged is None else pruned.merged.cpu()
        selections[row.label, row.retention_ratio] = MethodSelection(
            method=row.label,
            retention_ratio=row.retention_ratio,
            index=pruned.index.cpu(),
            merged=merged,
            n_total=pruned.n_total,
            tokens_per_frame=visual.tokens.shape[1],
            settings=row.settings,
        )
    return selections


def plan_encoding(
    config: PruneConfig, source: ModelSource, wanted: Sequence[RequestedSelection], objects: Objects
) -> Recipe:
    """Make the recipe for one encoding of all tokens, with all evidence that the methods need.

    Args:
        config: the options of the encoding; its pruner, ratio, evidence and codec are replaced.
        objects: the client for S3.

    Raises:
        UsageError: the model does not give the evidence of a method, ``--siglip`` is set and no method needs it, or an
            option is invalid.
    """
    pairs: set[tuple[str, str]] = set()
    for row in wanted:
        flag = f"--method {row.label}"
        pruner = row.pruner
        if unknown := sorted(pruner.needs - pruner.sources.keys()):
            raise UsageError(
                f"{flag} needs {' and '.join(unknown)} besides the tokens, and does not say where in an encoder to get "
                "it (Pruner.sources)"
            )
        needed = list_method_evidence(pruner, flag, source.family, source.model_type)
        if config.siglip is None:
            try:
                family_of(source).check_evidence(pruner.sources)
            except ModelError as error:
                raise UsageError(f"{flag}: {error}") from error
        pairs |= needed
    if config.siglip is not None and not HEAD_SOURCES & {where for _, where in pairs}:
        raise UsageError("--siglip: none of the methods takes anything from a SigLIP checkpoint")
    whole = replace(
        config,
        pruner="none",
        pruner_param=[],
        retention_ratio=1.0,
        token_codec=BFLOAT16.name,
        evidence=[f"{name}={where}" for name, where in sorted(pairs)],
    )
    return resolve_recipe(whole, objects, source)


def compare_frames(
    recipe: Recipe,
    device: str,
    dtype: str,
    row: VideoRow,
    frames: NDArray[np.uint8],
    wanted: Sequence[RequestedSelection],
) -> Comparison:
    """Load the vision tower, encode decoded frames once, and compare the methods on all of their tokens.

    Args:
        row: the columns that decoding filled, and further columns for display.
        frames: [t,h,w,3] uint8, as the recipe's decoder gives them.

    Raises:
        UsageError: the model cannot be loaded.
        VideoFault: the video cannot be encoded, or a method cannot prune it.
    """
    with convert_usage_errors():
        encoder = VideoEncoder(recipe.make_encode_setup(device, dtype))
    visual = encoder.encode_frames(frames, to_sampled_video(row))
    n_frames, per_frame, _ = visual.tokens.shape
    size = row["source_height"] or frames.shape[1], row["source_width"] or frames.shape[2]
    return Comparison(
        video_id=row["video_id"],
        selections=select_with_methods(wanted, visual),
        metadata={**row, "n_frames": n_frames, "tokens_per_frame": per_frame},
        grid=visual.grid,
        model=identify_model(recipe.source),
        sampling=make_sampling_identity(recipe.sampling),
        origin="",
        pictures=Pictures(encode_jpegs(shrink_frames(frames, size))),
    )
