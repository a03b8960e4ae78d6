"""The methods of a study: every one that the model can run, or those that were named."""

from __future__ import annotations

from collections.abc import Sequence

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from gstep.evidence import in_words, label
from gstep.language import PromptBuilder
from gstep.methods import METHODS
from gstep.pruners import make_pruner, read_pruner
from pipeline.cache.header import CacheIdentity
from pipeline.cache.method import describe_method
from pipeline.errors import UsageError
from pipeline.evaluate.config import FULL, EvaluateConfig
from pipeline.evaluate.statistics.score_matrix import Arm
from pipeline.execution.request import refusing
from pipeline.generate.late_pruning import LateAsked, LatePruning, late_pruning
from pipeline.prune.evidence import needed_by


class NotGiven(UsageError):  # noqa: N818 - beside the pipeline's own
    """A method needs evidence that a study does not have of the model."""


def prunings_of(
    source: ModelSource, builder: PromptBuilder, methods: Sequence[str], ratios: Sequence[float], seed: int
) -> dict[Arm, LatePruning]:
    """Each method at each ratio, as jobs.evaluate has them, from the largest ratio.

    Args:
        methods: with parameters behind commas; none are all that the model can run.

    Raises UsageError that names the method and the remedy for an unknown one and for one that needs other evidence.
    """
    if not methods:
        methods = able(source, builder)
    config = EvaluateConfig(benchmark="shapes", method=list(methods), retention_ratio=list(ratios), seed=seed)
    asked = [one for one in config.grid().values() if one is not None]
    try:
        return {Arm(one.method_label, one.retention_ratio): _late(one, source, builder) for one in asked}
    except NotGiven as error:
        raise UsageError(f"{error}; leave it out: those that run are {', '.join(able(source, builder))}") from error


def able(source: ModelSource, builder: PromptBuilder) -> list[str]:
    """The names of the methods that the model can run, but for the one that keeps everything."""
    found = []
    for name in METHODS:
        try:
            if name != FULL:
                _late(LateAsked(name, 1.0), source, builder)
                found.append(name)
        except UsageError:
            continue
    return found


def _late(asked: LateAsked, source: ModelSource, builder: PromptBuilder) -> LatePruning:
    """Raises UsageError; NotGiven for evidence alone."""
    with refusing():
        needed = needed_by(asked.method, source.model_type, asked.params)
        pruner = read_pruner(asked.method, asked.params, family=family_of(source).variant)
        evidence = {label(name, where): where for name, where in needed}
        try:
            family_of(source).check_evidence(evidence)
        except ModelError as error:
            raise NotGiven(
                f"--method {asked.method} needs {in_words(evidence)}, which a study of {source.name} does not have"
            ) from error
        if "text_embedding" in pruner.needs:
            raise NotGiven(f"--method {asked.method} chooses anew for every question, which a study does not do")
        return late_pruning(asked, _whole(source, evidence), source, builder)


def _whole(source: ModelSource, evidence: dict[str, str]) -> CacheIdentity:
    """A cache of all tokens with what the method needs: what a study has in memory."""
    return {
        "model": {"type": source.model_type, "weights": source.identity},
        "preprocessing": {},
        "sampling": {},
        "pruner": describe_method(make_pruner(FULL)),
        "retention_ratio": 1.0,
        "dtype": {},
        "evidence": evidence,
    }
