"""Methods that choose anew for every question: they prune what the cache holds whole, once the question is known.

What there is to do for a method follows from what it declares (:class:`gstep.pruners.base.Pruner`): a ``layer`` has it
prune inside the language model, everything else it does before; of what it ``needs``, the text embedding is the
question's, and the rest is read from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gstep import VisualTokens, make_pruner
from gstep.backbones import ModelSource, TextTower, TextTowerSource, family_of
from gstep.evidence import HEAD_SOURCES
from gstep.language import LanguageModel, PromptBuilder, Visual
from gstep.language.layer_pruning import check_layer
from gstep.methods import OF_A_QUESTION
from gstep.pruners import method_name, read_pruner
from gstep.pruners.base import Pruner
from pipeline.cache.header import CacheIdentity
from pipeline.cache.method import declared_method, describe_method
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.generate.config import GenerateConfig


@dataclass(frozen=True)
class LatePruning:
    """A method and the share of a video's visual tokens that it keeps. Pickles.

    A method may compare the question's words with the tokens where both mean something to each other. That is where a
    family's vision encoder was trained with texts: on LLaVA-OneVision the space of SigLIP, whose text tower is not part
    of the model. Qwen's encoder has no such space, and no official code defines one: there the tokens themselves are
    compared with the language model's embeddings, both being its inputs.

    Attributes:
        text_tower: of SigLIP; None where the language model embeds the question, or nobody has to.
        evidence: what the method takes from the cache besides the tokens.
    """

    pruner: Pruner
    retention_ratio: float
    text_tower: TextTowerSource | None = None
    evidence: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        """By the method's name, not by its class: a worker that cannot import it then says so."""
        method, params = method_name(type(self.pruner)), self.pruner.params()
        return _again, (method, params, self.retention_ratio, self.text_tower, self.evidence)

    @property
    def inside(self) -> tuple[Pruner, float] | None:
        """For a language model that prunes inside itself; None where the tokens are chosen before."""
        return None if self.pruner.layer is None else (self.pruner, self.retention_ratio)

    def describe(self) -> dict[str, Any]:
        """For the identity of the answers, JSON-able."""
        tower = {} if self.text_tower is None else {"text_tower": self.text_tower.identity}
        return {**describe_method(self.pruner), **tower}

    def embedder(self, model: LanguageModel, device: str) -> LanguageModel | TextTower | None:
        """Whose ``embedding`` of a question is in the space of what it is compared with, on the device; None for a
        method that does not ask for one.

        The text to embed is that of the questions file, as in CDPruner's official code: without chat template, and
        without the choices that stand in a column of their own. One without a token is a ValueError.
        Raises ModelError where this node has another text tower than the driver.
        """
        if "text_embedding" not in self.pruner.needs:
            return None
        return model if self.text_tower is None else TextTower.load(self.text_tower, device)

    def at_most(self, n_frames: int, per_frame: int, hidden: int) -> int:
        """The most tokens of a video [T,N,D] that go into a prompt: all where the model itself prunes."""
        if self.pruner.layer is not None:
            return n_frames * per_frame
        return self.pruner.at_most(n_frames, per_frame, hidden, self.retention_ratio)

    def choose(self, visual: Visual, text_embedding: Tensor | None = None) -> Visual:
        """What the method keeps of a whole video; it is worked out where the embedding is.

        Args:
            text_embedding: [Q,De] of the question, for a method that asks for it, in the space of the cached
                ``image_embedding``; without one, in that of the visual tokens.
        """
        device = visual.tokens.device if text_embedding is None else text_embedding.device

        def whole(values: Tensor) -> Tensor:
            return values.to(device).reshape(visual.n_frames, visual.tokens_per_frame, *values.shape[1:])

        tokens = whole(visual.tokens)
        evidence = {name: whole(visual.evidence[name]).float() for name in self.evidence}
        if text_embedding is not None:
            evidence = {"text_embedding": text_embedding, "image_embedding": tokens.float(), **evidence}
        pruned = self.pruner.prune(VisualTokens(tokens, evidence), self.retention_ratio)
        index = (pruned.index[pruned.selection_order()] if self.pruner.reorders else pruned.index).cpu()
        kept = visual.tokens[index]
        if self.pruner.merges:
            kept = (pruned.tokens[pruned.selection_order()] if self.pruner.reorders else pruned.tokens).to(kept)
        levels = tuple(level[index] for level in visual.deepstack)
        return replace(visual, tokens=kept, index=visual.index[index], deepstack=levels, evidence={})


def _again(method: str, params: dict[str, Any], *rest: Any) -> LatePruning:
    return LatePruning(make_pruner(method, **params), *rest)


def late_pruning(
    config: GenerateConfig, held: CacheIdentity, source: ModelSource, builder: PromptBuilder
) -> LatePruning | None:
    """The method that the request names, if any, checked against the cache and the model before that is loaded.

    Args:
        held: the identity of the cache.

    Raises UsageError where the method prunes before the cache, the cache does not hold what it needs, or the model
    cannot be pruned so; ValueError for an unknown method or parameter.
    """
    if config.pruner is None:
        for name in ("pruner_param", "siglip"):
            if getattr(config, name):
                raise UsageError(f"--{name.replace('_', '-')} goes with --pruner")
        return None
    method, ratio = config.pruner, config.retention_ratio
    pruner = read_pruner(method, config.pruner_params(), family=family_of(source).variant)
    describe_method(pruner)  # it must go into the identity of the answers
    if pruner.cacheable:
        raise UsageError(
            f"--pruner {method} does not look at the question: its tokens come from python -m jobs.prune --pruner "
            f"{method}; methods that do: {', '.join(OF_A_QUESTION)}"
        )
    if ratio is None:
        raise UsageError(f"--pruner {method} needs --retention-ratio, the share of visual tokens that it keeps")
    if not _whole(held):
        raise UsageError(
            f"--pruner {method} chooses among all visual tokens as the encoder made them, and this cache holds what "
            f"{held['pruner']['method']} kept at {held['retention_ratio']:g}: make one with python -m jobs.prune "
            "--pruner none"
        )
    if pruner.layer is not None:
        layers = int(builder.config.get_text_config().num_hidden_layers)
        check_layer(pruner, layers, builder.deepstack_levels)
    evidence = () if pruner.layer is not None else _evidence(method, pruner, held, source)
    tower = _text_tower(method, pruner, evidence, config.siglip, held, source)
    return LatePruning(pruner, ratio, tower, evidence)


def _evidence(method: str, pruner: Pruner, held: CacheIdentity, source: ModelSource) -> tuple[str, ...]:
    """What the method takes from the cache. Where a family has no embedding of patches that a text's can be compared
    with, the tokens themselves stand for it."""
    gives = family_of(source).gives
    needed = pruner.needs - {"text_embedding"}
    if "text_embedding" in pruner.needs and ("image_embedding", pruner.sources.get("image_embedding")) not in gives:
        needed -= {"image_embedding"}
    if unknown := sorted(needed - pruner.sources.keys()):
        raise UsageError(
            f"--pruner {method} needs {' and '.join(unknown)} besides the tokens, and does not say where in an encoder "
            "to get it (Pruner.sources)"
        )
    wanted = {name: pruner.sources[name] for name in sorted(needed)}
    if lacking := [f"{name} ({where})" for name, where in wanted.items() if (name, where) not in gives]:
        raise UsageError(f"--pruner {method} needs {' and '.join(lacking)}: {source.model_type} does not give it")
    if not wanted.items() <= held.get("evidence", {}).items():
        several = {name for name in wanted if sum(name == given for given, _ in gives) > 1}
        names = ",".join(f"{name}={where}" if name in several else name for name, where in wanted.items())
        siglip = " --siglip MODEL" if HEAD_SOURCES & {*wanted.values()} else ""
        raise UsageError(
            f"--pruner {method} needs {' and '.join(wanted)} of each token on {source.model_type}, which this cache "
            f"does not hold: make one with python -m jobs.prune --pruner none --evidence {names}{siglip}"
        )
    return tuple(wanted)


def _text_tower(
    method: str,
    pruner: Pruner,
    evidence: tuple[str, ...],
    siglip: str | None,
    held: CacheIdentity,
    source: ModelSource,
) -> TextTowerSource | None:
    """The text tower that goes with the cached embedding of patches, where the question is compared with that."""
    if not ("text_embedding" in pruner.needs and "image_embedding" in evidence):
        if siglip is not None:
            raise UsageError(
                f"--siglip: --pruner {method} takes nothing from a SigLIP checkpoint on {source.model_type}"
            )
        return None
    if siglip is None:
        raise UsageError(
            f"--pruner {method} needs the text tower of the SigLIP checkpoint that this cache was made with: name "
            "it with --siglip, for the published models google/siglip-so400m-patch14-384"
        )
    tower = family_of(source).text_tower(siglip)
    if (ours := held["model"].get("pooling_head")) != tower.head.identity:
        raise IdentityMismatch(
            f"--siglip {siglip} has the pooling head {tower.head.identity}, the cache's evidence was made with {ours}: "
            "words and patches can be compared where both are from one checkpoint"
        )
    return tower


def _whole(held: CacheIdentity) -> bool:
    """Whether a cache of this identity holds every token unchanged: some methods drop or merge tokens at a ratio of 1
    too."""
    declared = declared_method(held)
    keeps_all = declared is not None and declared.exact and not declared.merges
    return keeps_all and held["retention_ratio"] >= 1.0
