"""Methods that choose anew for every question: they prune what the cache holds whole, once the question is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gstep import PRUNERS, VisualTokens, make_pruner
from gstep.language import PromptBuilder, Visual
from gstep.language.inside import check_layer
from gstep.pruners.base import Pruner
from gstep.pruners.cdpruner import CDPruner
from gstep.pruners.fastv import FastV
from gstep.types import budget_for
from pipeline.errors import UsageError


@dataclass(frozen=True)
class LatePruning:
    """A method and the share of a video's visual tokens that it keeps. Pickles.

    FastV prunes inside the language model; CDPruner before it, by the question's own words.
    """

    pruner: Pruner
    retention_ratio: float

    @property
    def inside(self) -> tuple[FastV, float] | None:
        """For a language model that prunes inside itself; None where the tokens are chosen before."""
        return (self.pruner, self.retention_ratio) if isinstance(self.pruner, FastV) else None

    def describe(self) -> dict[str, Any]:
        """For the identity of the answers, JSON-able."""
        return {"method": self.pruner.name, "params": self.pruner.params()}

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
            text_embedding: [Q,D] of the question, in the space of the visual tokens: Qwen's vision encoder has no text
                tower, and its tokens are inputs of the language model as the embeddings of words are.
        """
        tokens = visual.tokens.to(text_embedding.device)
        whole = tokens.reshape(visual.n_frames, visual.tokens_per_frame, -1)
        evidence = {"image_embedding": whole.float(), "text_embedding": text_embedding}
        index = self.pruner.prune(VisualTokens(whole, evidence), self.retention_ratio).index.cpu()
        levels = tuple(level[index] for level in visual.deepstack)
        return replace(visual, tokens=visual.tokens[index], index=visual.index[index], deepstack=levels)


def late_pruning(
    method: str, params: dict[str, Any], ratio: float | None, held: dict[str, Any], builder: PromptBuilder
) -> LatePruning:
    """The method, checked against the cache and the model before that is loaded.

    Args:
        held: the identity of the cache.

    Raises UsageError where the method prunes before the cache, the cache does not hold every token, or the model
    cannot be pruned so; ValueError for an unknown method or parameter.
    """
    pruner = make_pruner(method, **params)
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
    if isinstance(pruner, CDPruner) and builder.needs_newline:
        raise UsageError(
            "--pruner cdpruner is not there for LLaVA-OneVision yet: it compares words and patches by SigLIP's text "
            "tower, which caches do not hold"
        )
    return LatePruning(pruner, ratio)


def _whole(held: dict[str, Any]) -> bool:
    """Whether a cache of this identity holds every token unchanged: some methods drop or merge tokens at a ratio of 1
    too."""
    method = held["pruner"]["method"]
    known = method in PRUNERS and PRUNERS[method].exact and not PRUNERS[method].merges
    return bool(known and held["retention_ratio"] >= 1.0)
