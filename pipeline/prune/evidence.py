"""``--evidence`` and ``--evidence-for``: what a cache holds besides the tokens, for methods that look at it later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from gstep.backbones import BACKBONES
from gstep.evidence import EVIDENCE_SHAPES, PER_FRAME, SOURCES, label
from gstep.methods import METHODS
from gstep.pruners import read_pruner
from gstep.pruners.base import Pruner
from pipeline.errors import UsageError

#: The evidence that an encoder gives: of each token, [T,N] or [T,N,width], or of each frame.
STORED = tuple(name for name, axes in EVIDENCE_SHAPES.items() if axes[:2] == ("T", "N") or name in PER_FRAME)
_NOT_NEEDED = {
    "image_embedding": "none is needed there: methods compare the tokens themselves with the language model's own "
    "embedding of the question"
}


def evidence_sources(asked: Sequence[str], methods: Sequence[str], model_type: str, pruner: Pruner) -> dict[str, str]:
    """The evidence to store, label -> where in the encoder (gstep.evidence).

    Args:
        asked: NAME or NAME=SOURCE each, or several of them with commas between.
        methods: names of methods, whose evidence is stored; several with commas between, too.
        pruner: the method of the cache itself.

    Raises UsageError where the model's encoder does not give one, or the method does not keep what it belongs to.
    """
    pairs = {_pair(item, model_type) for item in _split(asked)}
    for method in _split(methods):
        pairs |= needed_by(method, model_type)
    _check_kept({name for name, _ in pairs}, pruner)
    return {label(name, source): source for name, source in sorted(pairs)}


def needed_by(method: str, model_type: str, params: Mapping[str, str] = MappingProxyType({})) -> set[tuple[str, str]]:
    """(name, source) of what a method with these parameters asks the vision encoder for on a family. Raises UsageError
    where that does not give it, ValueError for an unknown method or parameter.
    """
    family = BACKBONES[model_type]
    pruner = read_pruner(method, params, family=family.variant)
    pairs = set(pruner.sources.items())
    if "text_embedding" in pruner.needs:  # where a family has no embedding of patches, tokens stand for it
        pairs = {pair for pair in pairs if pair[0] != "image_embedding" or pair in family.gives}
    if missing := sorted(pairs - family.gives):
        names = " and ".join(f"{name} from {SOURCES.get(source, source)}" for name, source in missing)
        raise UsageError(f"--evidence-for {method}: the encoder of {model_type} does not give {names}")
    return pairs


def _split(listed: Sequence[str]) -> Iterator[str]:
    return (item.strip() for items in listed for item in items.split(","))


def _check_kept(names: set[str], pruner: Pruner) -> None:
    if names and pruner.merges:
        raise UsageError(
            f"--evidence {', '.join(sorted(names))}: --pruner {pruner.name} merges tokens, and a merged one has no "
            "evidence of its own; use a method that keeps tokens as they are, or --pruner none for all"
        )
    if names & PER_FRAME and pruner.name != "none":
        raise UsageError(
            f"--evidence {', '.join(sorted(names & PER_FRAME))} is of frames and stored with all tokens alone, since "
            f"--pruner {pruner.name} may keep none of a frame: use --pruner none"
        )


def _pair(item: str, model_type: str) -> tuple[str, str]:
    name, _, chosen = item.partition("=")
    if name not in STORED:
        why = "comes from no vision encoder" if name in EVIDENCE_SHAPES else "is no evidence"
        also = f" (methods go with --evidence-for {name})" if name in METHODS else ""
        raise UsageError(f"--evidence: {name!r} {why}; known: {', '.join(STORED)}{also}")
    given = sorted(source for evidence, source in BACKBONES[model_type].gives if evidence == name)
    if not given:
        able = [kind for kind in BACKBONES if any(name == evidence for evidence, _ in BACKBONES[kind].gives)]
        instead = _NOT_NEEDED.get(name, f"models of type {' or '.join(able)} do" if able else "no model does")
        raise UsageError(f"--evidence {name}: the encoder of {model_type} does not give it; {instead}")
    if chosen and chosen not in given:
        raise UsageError(f"--evidence {name}={chosen}: {model_type} gives it from {' or '.join(given)}")
    if not chosen and len(given) > 1:
        listed = " or ".join(f"{source} ({SOURCES[source]})" for source in given)
        raise UsageError(f"--evidence {name} may be from {listed}: name one, --evidence {name}={given[0]}")
    return name, chosen or given[0]
