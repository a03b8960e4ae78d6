"""Pruning after the cache, when a question is asked: any method at any ratio, on a cache that holds all tokens.

A method with a ``layer`` prunes inside the language model, others before it. The text embedding that a method ``needs``
is computed from the question; other evidence is read from the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from gstep import PrunedTokens, VisualTokens, make_pruner
from gstep.backbones import ModelFamily, ModelSource, TextTowerSource, family_of
from gstep.evidence import HEAD_SOURCES, get_evidence_name, is_frame_evidence
from gstep.families import GENERIC
from gstep.language import PromptBuilder, Visual
from gstep.language.layer_pruning import check_prune_layer
from gstep.language.types import POSITIONS
from gstep.pruners import find_method, get_method_name, read_pruner
from gstep.pruners.base import Pruner
from pipeline.cache.changed_code import check_class_code
from pipeline.cache.header import CacheIdentity, describe_method, get_method_declarations
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.generate.answers import LateIdentity
from pipeline.options import parse_named_values
from pipeline.own_method import prune_tokens
from pipeline.rows import JsonObject


@dataclass(frozen=True)
class PruningSpec:
    """A pruning of cached tokens as the user describes it: a method, its parameters and a ratio.

    Attributes:
        method: its name, or ``module:Class``.
        params: its parameters as text, and maybe ``seed``.
        siglip: the SigLIP checkpoint for methods that compare patches with the question.
        positions: of the kept tokens, "contiguous" or "original"; None uses the run's.
    """

    method: str
    retention_ratio: float
    params: Mapping[str, str] = field(default_factory=dict)
    siglip: str | None = None
    seed: int = 0
    positions: str | None = None

    @property
    def label(self) -> str:
        """The name of this pruning in a set of answers, such as ``fastv,K=3@0.25``."""
        return f"{self.method_label}@{self.retention_ratio:.12g}"

    @property
    def method_label(self) -> str:
        """The method with its given parameters, sorted by name, a seed other than 0, and the positions if given."""
        own_settings = {"seed": self.seed or None, "positions": self.positions}
        settings = [
            *sorted(self.params.items()),
            *((name, value) for name, value in own_settings.items() if value is not None),
        ]
        return ",".join([self.method, *(f"{name}={value}" for name, value in settings)])

    def read(self, family: str) -> tuple[PruningSpec, Pruner]:
        """Create the method; return (a copy of this spec with the seed that is used, the method).

        In the copy, a parameter ``seed`` is moved to the field ``seed``, unless the method itself has a parameter of
        this name. The field is 0 for a method that draws nothing. A user method is imported.

        Raises:
            ValueError: the method is unknown, or a parameter or the seed is invalid.
        """
        kind = find_method(self.method)
        params = dict(self.params)
        seed = self.seed
        if kind.seeded and "seed" not in kind.__dataclass_fields__ and "seed" in params:
            if not (text := params.pop("seed")).isdecimal():
                raise ValueError(f"method {self.method!r}: seed must be a whole number, or FIRST..LAST; got {text!r}")
            seed = int(text)
        spec = replace(self, params=params, seed=seed if kind.seeded else 0)
        return spec, read_pruner(self.method, params, family=family)


def parse_pruning_grid(
    methods: Iterable[str], ratios: Iterable[float], siglip: str | None = None, seed: int = 0
) -> list[PruningSpec]:
    """Parse each METHOD[,NAME=VALUE...], and combine it with each ratio.

    The result is ordered by method as given, then by seed, then by ratio from the largest; equal ratios count once.
    ``seed=0..4`` stands for five methods, and ``positions=...`` sets the positions of the kept tokens. Names of methods
    and parameters are not checked.

    Raises:
        UsageError: a parameter is not NAME=VALUE, the positions are unknown, or a range of seeds is empty.
    """
    specs = []
    largest_first = sorted(set(ratios), reverse=True)
    for text in methods:
        method, *settings = (part.strip() for part in text.split(","))
        params = parse_named_values(settings, f"--method {text}: a parameter")
        positions = params.pop("positions", None)
        if positions not in (None, *POSITIONS):
            raise UsageError(f"--method {text}: positions must be {' or '.join(POSITIONS)}")
        param_sets = [params]
        if ends := re.fullmatch(r"(\d+)\.\.(\d+)", params.get("seed", "")):
            param_sets = [{**params, "seed": str(number)} for number in range(int(ends[1]), int(ends[2]) + 1)]
        if not param_sets:
            raise UsageError(f"--method {text}: the first seed is larger than the last")
        specs += [
            PruningSpec(method, ratio, values, siglip, seed, positions)
            for values in param_sets
            for ratio in largest_first
        ]
    return specs


@dataclass(frozen=True)
class LatePruning:
    """A checked method with the share of a video's tokens that it keeps, from ``resolve_pruning``. Picklable.

    A method may compare the question's words with tokens only in a space that both share: that of SigLIP on
    LLaVA-OneVision, and the language model's input embeddings on Qwen.

    Attributes:
        text_tower: SigLIP's; None if the language model embeds the question, or no embedding is needed.
        evidence: the evidence read from the cache: pairs of its name for the method and its name for the cache.
        positions: of the kept tokens in a prompt; None uses the run's.
        code: the hash of a user method's code, which workers must have too; None for other methods.
    """

    pruner: Pruner
    retention_ratio: float
    text_tower: TextTowerSource | None = None
    evidence: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    positions: str | None = None
    code: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Serialize the method by its name, so that a worker that cannot import it raises a clear error."""
        method = get_method_name(type(self.pruner))
        params = self.pruner.params()
        settings = (self.retention_ratio, self.text_tower, self.evidence, self.seed, self.positions, self.code)
        return _rebuild_pruning, (method, params, *settings)

    @property
    def inside(self) -> tuple[Pruner, float] | None:
        """The method and share, if it prunes inside the language model; otherwise None."""
        return None if self.pruner.layer is None else (self.pruner, self.retention_ratio)

    def describe(self) -> LateIdentity:
        """Return the method's entry in the identity of the answers, JSON-able.

        It has the parameters and, where they apply, code, seed, text tower and positions.
        """
        identity = cast(LateIdentity, describe_method(self.pruner))
        if self.code is not None:
            identity["code"] = self.code
        if self.pruner.seeded:
            identity["seed"] = self.seed
        if self.text_tower is not None:
            identity["text_tower"] = self.text_tower.identity
        if self.positions is not None:
            identity["positions"] = self.positions
        return identity

    def max_tokens(self, n_frames: int, per_frame: int, hidden: int) -> int:
        """Return the maximum number of tokens of a video in a prompt: all if the model prunes inside."""
        if self.pruner.layer is not None:
            return n_frames * per_frame
        return self.pruner.at_most(n_frames, per_frame, hidden, self.retention_ratio)

    def count_kept_inside(self, n_total: int) -> int:
        """Return how many of a prompt's ``n_total`` visual tokens a method inside the model keeps."""
        return self.pruner.at_most(1, n_total, n_total, self.retention_ratio)

    def select(self, visual: Visual, device: str, text_embedding: Tensor | None = None) -> PrunedTokens:
        """Select the tokens to keep from a whole video, on the device.

        Args:
            text_embedding: the question's [Q,De] on the device, for a method that needs it. It is in the space of the
                cached ``image_embedding``, or of the visual tokens if the cache has none.

        Raises:
            OwnCodeError: a user method failed for this video.
            MethodFails: a user method fails for every video.
            ValueError: the method does not accept the tokens, evidence or ratio.
        """
        whole = make_visual_tokens(visual, self.evidence, device)
        if text_embedding is not None:
            evidence = {"text_embedding": text_embedding, "image_embedding": whole.tokens, **whole.evidence}
            whole = replace(whole, evidence=evidence)
        return prune_tokens(self.pruner, whole, self.retention_ratio, self.seed)

    def reduce_video(self, visual: Visual, pruned: PrunedTokens, *, own_order: bool = True) -> Visual:
        """Return a copy of a whole video with only its selected (or merged) tokens, and without evidence.

        Args:
            own_order: whether to keep the order that the method defines, if any; otherwise tokens are in ascending
                index.
        """
        uses_own_order = own_order and self.pruner.reorders
        index = (pruned.index[pruned.compute_selection_order()] if uses_own_order else pruned.index).cpu()
        tokens = visual.tokens[index]
        if self.pruner.merges:
            tokens = (pruned.tokens[pruned.compute_selection_order()] if uses_own_order else pruned.tokens).to(tokens)
        levels = tuple(level[index] for level in visual.deepstack)
        return replace(visual, tokens=tokens, index=visual.index[index], deepstack=levels, evidence={})


def make_visual_tokens(visual: Visual, columns: Iterable[tuple[str, str]], device: str) -> VisualTokens:
    """Return the cached tokens of a whole video, with grid and times, as the input of a method, [T,N,D] on the device.

    The result has no deepstack levels.

    Args:
        visual: all tokens of the video in ascending index, with the evidence.
        columns: pairs of the evidence's name in the result and in ``visual.evidence``.
    """

    def split_by_frame(values: Tensor) -> Tensor:  # [T*N,...] -> [T,N,...]
        return values.to(device).reshape(visual.n_frames, visual.tokens_per_frame, *values.shape[1:])

    evidence = {
        name: visual.evidence[column].to(device) if is_frame_evidence(name) else split_by_frame(visual.evidence[column])
        for name, column in columns
    }
    whole = VisualTokens(split_by_frame(visual.tokens), evidence)
    return whole.with_positions(visual.extra.get("grid"), visual.timestamps)


def _rebuild_pruning(method: str, params: JsonObject, *settings: Any) -> LatePruning:
    """Create a LatePruning from what ``__reduce__`` serialized; a user method is imported.

    Raises:
        ValueError: the method cannot be found on this node.
        UsageError: a user method has other code on this node than on the driver.
    """
    late = LatePruning(make_pruner(method, **params), *settings)
    check_class_code(type(late.pruner), late.code)
    return late


def resolve_pruning(
    spec: PruningSpec, cache_identity: CacheIdentity, source: ModelSource, builder: PromptBuilder
) -> LatePruning:
    """Check a requested pruning against the cache and the model, and return it resolved; a user method is imported.

    Raises:
        UsageError: the cache does not hold all tokens or the evidence; the method prunes inside the model and has a
            seed or the family is generic; a SigLIP checkpoint is missing (IdentityMismatch: differs from the cache's);
            or the code of a user method cannot be hashed.
        ValueError: the method, a parameter or the ratio is invalid, or the model cannot be pruned inside by this method
            (ModelError: the SigLIP checkpoint cannot be used).
    """
    spec, pruner = spec.read(family_of(source).variant)
    method = spec.method
    code = describe_method(pruner).get("code")  # raises if the method cannot be described in an identity
    if pruner.layer is not None and source.family == GENERIC:
        raise UsageError(
            f"--pruner {method} prunes inside the language model, which is not implemented for the family {GENERIC}: "
            "use a method that prunes before it"
        )
    if not is_whole(cache_identity):
        raise UsageError(
            f"--pruner {method} chooses among all visual tokens as the encoder made them, and this cache holds what "
            f"{cache_identity['pruner']['method']} kept at {cache_identity['retention_ratio']:g}: make one with python "
            "-m jobs.prune --pruner none"
        )
    evidence: tuple[tuple[str, str], ...] = ()
    if pruner.layer is None:
        evidence = find_evidence_columns(method, pruner, cache_identity, family_of(source))
    else:
        check_prune_layer(pruner, builder.config)
        if spec.seed:
            raise UsageError(
                f"--pruner {method} prunes inside the language model, where it draws with seed 0: leave out its seed"
            )
    tower = _find_text_tower(method, pruner, evidence, spec.siglip, cache_identity, source)
    ratio = pruner.nominal_ratio(spec.retention_ratio)
    return LatePruning(pruner, ratio, tower, evidence, spec.seed, spec.positions, code)


def describe_prunings(
    prunings: Mapping[str, LatePruning | None], cache_identity: CacheIdentity
) -> dict[str, LateIdentity | None]:
    """Describe each pruning for the identity of the answers, by label; None stays None.

    The description includes the pooling head that made the cached evidence, if the method uses such evidence.
    """
    identities: dict[str, LateIdentity | None] = {}
    for label, late in prunings.items():
        identity = None
        if late is not None:
            identity = late.describe()
            if HEAD_SOURCES & {late.pruner.sources[name] for name, _ in late.evidence}:
                identity["pooling_head"] = cache_identity["model"].get("pooling_head")
        identities[label] = identity
    return identities


def find_evidence_columns(
    method: str, pruner: Pruner, cache_identity: CacheIdentity, family: ModelFamily | type[ModelFamily]
) -> tuple[tuple[str, str], ...]:
    """Find the evidence that a method reads from a cache: pairs of its name and the cache's column, sorted by name.

    The text embedding is not among them. Neither is the image embedding if the family gives none to a method that needs
    both: the tokens themselves take its place.

    Raises:
        UsageError: the method does not say where its evidence comes from, or the family or this cache lacks it.
    """
    gives = family.gives
    needed_names = pruner.needs - {"text_embedding"}
    if "text_embedding" in pruner.needs and ("image_embedding", pruner.sources.get("image_embedding")) not in gives:
        needed_names -= {"image_embedding"}
    if unknown_names := sorted(needed_names - pruner.sources.keys()):
        raise UsageError(
            f"--pruner {method} needs {' and '.join(unknown_names)} besides the tokens, and does not say where in an "
            "encoder to get it (Pruner.sources)"
        )
    sources = {name: pruner.sources[name] for name in sorted(needed_names)}
    if missing_sources := [f"{name} ({where})" for name, where in sources.items() if (name, where) not in gives]:
        raise UsageError(
            f"--pruner {method} needs {' and '.join(missing_sources)}: {family.model_type} does not give it"
        )
    columns = {
        (get_evidence_name(column, where), where): column
        for column, where in cache_identity.get("evidence", {}).items()
    }
    if not sources.items() <= columns.keys():
        siglip = " --siglip MODEL" if HEAD_SOURCES & {*sources.values()} else ""
        raise UsageError(
            f"--pruner {method} needs {' and '.join(sources)} on {family.model_type}, which this cache does not hold: "
            f"make one with python -m jobs.prune --pruner none --evidence {method}{siglip}"
        )
    return tuple((name, columns[name, where]) for name, where in sources.items())


def _find_text_tower(
    method: str,
    pruner: Pruner,
    evidence: tuple[tuple[str, str], ...],
    siglip: str | None,
    cache_identity: CacheIdentity,
    source: ModelSource,
) -> TextTowerSource | None:
    """Return the text tower of the checkpoint ``siglip``; None if the method compares no patches with the question.

    Raises:
        UsageError: ``siglip`` is None.
        IdentityMismatch: the cached patch embeddings were made with another checkpoint.
        ModelError: there is no such checkpoint, or it does not fit the vision tower.
    """
    if not ("text_embedding" in pruner.needs and "image_embedding" in dict(evidence)):
        return None
    if siglip is None:
        raise UsageError(
            f"--pruner {method} needs the text tower of the SigLIP checkpoint that this cache was made with: name "
            "it with --siglip, for the published models google/siglip-so400m-patch14-384"
        )
    tower = family_of(source).text_tower(siglip)
    if (head := cache_identity["model"].get("pooling_head")) != tower.head.identity:
        raise IdentityMismatch(
            f"--siglip {siglip} has the pooling head {tower.head.identity}, the cache's evidence was made with {head}: "
            "words and patches can be compared where both are from one checkpoint"
        )
    return tower


def is_whole(cache_identity: CacheIdentity) -> bool:
    """Return True if a cache of this identity holds every token unchanged.

    That takes a stored ratio of 1 and a known method that is exact and does not merge.
    """
    method = get_method_declarations(cache_identity)
    keeps_all = method is not None and method.exact and not method.merges
    return keeps_all and cache_identity["retention_ratio"] >= 1.0
