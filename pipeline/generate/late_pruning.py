"""Methods that choose anew for every question: they prune what the cache holds whole, once the question is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gstep import PRUNERS, VisualTokens, make_pruner
from gstep.backbones import ModelSource, TextTower, TextTowerSource, family_of
from gstep.language import LanguageModel, PromptBuilder, Visual
from gstep.language.layer_pruning import check_layer
from gstep.pruners.base import Pruner
from gstep.pruners.cdpruner import CDPruner
from gstep.pruners.fastv import FastV
from gstep.types import budget_for
from pipeline.cache.header import CacheIdentity
from pipeline.errors import IdentityMismatch, UsageError
from pipeline.generate.config import GenerateConfig
from pipeline.options import pruner_params


@dataclass(frozen=True)
class LatePruning:
    """A method and the share of a video's visual tokens that it keeps. Pickles.

    FastV prunes inside the language model; CDPruner before it, by the question's own words, which it compares with the
    tokens where both mean something to each other. That is where a family's vision encoder was trained with texts: on
    LLaVA-OneVision the space of SigLIP, whose text tower is not part of the model. Qwen's encoder has no such space,
    and no official code defines one: there the tokens themselves are compared with the language model's embeddings,
    both being its inputs.

    Attributes:
        text_tower: of SigLIP; None where the language model embeds the question.
    """

    pruner: Pruner
    retention_ratio: float
    text_tower: TextTowerSource | None = None

    @property
    def inside(self) -> tuple[FastV, float] | None:
        """For a language model that prunes inside itself; None where the tokens are chosen before."""
        return (self.pruner, self.retention_ratio) if isinstance(self.pruner, FastV) else None

    def describe(self) -> dict[str, Any]:
        """For the identity of the answers, JSON-able."""
        tower = {} if self.text_tower is None else {"text_tower": self.text_tower.identity}
        return {"method": self.pruner.name, "params": self.pruner.params(), **tower}

    @property
    def evidence(self) -> tuple[str, ...]:
        """What it takes from the cache besides the tokens."""
        return () if self.text_tower is None else tuple(self.pruner.sources)

    def embedder(self, model: LanguageModel, device: str) -> LanguageModel | TextTower | None:
        """Whose ``embedding`` of a question is in the space of what it is compared with, on the device; None for a
        method inside the model, which sees the prompt itself.

        The text to embed is that of the questions file, as in CDPruner's official code: without chat template, and
        without the choices that stand in a column of their own. One without a token is a ValueError.
        Raises ModelError where this node has another text tower than the driver.
        """
        if self.inside is not None:
            return None
        return model if self.text_tower is None else TextTower.load(self.text_tower, device)

    def at_most(self, n_frames: int, per_frame: int, hidden: int) -> int:
        """The most tokens of a video that go into a prompt: with FastV all, CDPruner keeps no more than ``hidden`` of
        what it chooses among at once."""
        pruner, n_total = self.pruner, n_frames * per_frame
        if isinstance(pruner, FastV):
            return n_total
        if isinstance(pruner, CDPruner) and pruner.mode == "per_frame":
            return n_frames * min(budget_for(self.retention_ratio, per_frame), hidden)
        return min(budget_for(self.retention_ratio, n_total), hidden)

    def choose(self, visual: Visual, text_embedding: Tensor) -> Visual:
        """What CDPruner keeps of a whole video for one question; it is worked out where the embedding is.

        Args:
            text_embedding: [Q,De] of the question, in the space of the cached ``image_embedding``; without one, in that
                of the visual tokens.
        """

        def whole(values: Tensor) -> Tensor:
            values = values.to(text_embedding.device)
            return values.reshape(visual.n_frames, visual.tokens_per_frame, -1)

        tokens = whole(visual.tokens)
        image = whole(visual.evidence["image_embedding"]) if visual.evidence else tokens
        evidence = {"image_embedding": image.float(), "text_embedding": text_embedding}
        index = self.pruner.prune(VisualTokens(tokens, evidence), self.retention_ratio).index.cpu()
        levels = tuple(level[index] for level in visual.deepstack)
        return replace(visual, tokens=visual.tokens[index], index=visual.index[index], deepstack=levels, evidence={})


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
    pruner = make_pruner(method, **pruner_params(config.pruner_param))
    if pruner.cacheable:
        late = ", ".join(name for name, kind in PRUNERS.items() if not kind.cacheable)
        raise UsageError(
            f"--pruner {method} does not look at the question: its tokens come from python -m jobs.prune --pruner "
            f"{method}; methods that do: {late}"
        )
    if ratio is None:
        raise UsageError(f"--pruner {method} needs --retention-ratio, the share of visual tokens that it keeps")
    if not _whole(held):
        raise UsageError(
            f"--pruner {method} chooses among all visual tokens as the encoder made them, and this cache holds what "
            f"{held['pruner']['method']} kept at {held['retention_ratio']:g}: make one with python -m jobs.prune "
            "--pruner none"
        )
    text = builder.config.get_text_config()
    if isinstance(pruner, FastV):
        check_layer(pruner.K, int(text.num_hidden_layers), builder.deepstack_levels)
    return LatePruning(pruner, ratio, _text_tower(pruner, config.siglip, held, source))


def _text_tower(pruner: Pruner, siglip: str | None, held: CacheIdentity, source: ModelSource) -> TextTowerSource | None:
    """The text tower that goes with the cache's evidence, where the family has such evidence at all."""
    asked = set(pruner.sources.items())
    if not asked or not asked <= family_of(source).gives:
        if siglip is not None:
            raise UsageError(
                f"--siglip: --pruner {pruner.name} takes nothing from a SigLIP checkpoint on {source.model_type}"
            )
        return None
    if not asked <= set(held.get("evidence", {}).items()):
        names = ",".join(pruner.sources)
        raise UsageError(
            f"--pruner {pruner.name} needs {names} of each token on {source.model_type}, which this cache does not "
            f"hold: make one with python -m jobs.prune --pruner none --evidence {names} --siglip MODEL"
        )
    if siglip is None:
        raise UsageError(
            f"--pruner {pruner.name} needs the text tower of the SigLIP checkpoint that this cache was made with: name "
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
    method = held["pruner"]["method"]
    known = method in PRUNERS and PRUNERS[method].exact and not PRUNERS[method].merges
    return bool(known and held["retention_ratio"] >= 1.0)
