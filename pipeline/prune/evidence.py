"""``--evidence``: what a cache holds of each token besides the token, for methods that look at it later."""

from __future__ import annotations

from collections.abc import Sequence

from gstep.backbones import BACKBONES
from gstep.evidence import SOURCES
from gstep.pruners.base import Pruner
from gstep.pruners.checks import EVIDENCE_SHAPES
from pipeline.errors import UsageError

#: The evidence that is given for each token: [T,N] or [T,N,width].
PER_TOKEN = tuple(name for name, axes in EVIDENCE_SHAPES.items() if axes[:2] == ("T", "N"))
_NOT_NEEDED = {
    "image_embedding": "none is needed there: methods compare the tokens themselves with the language model's own "
    "embedding of the question"
}


def evidence_sources(asked: Sequence[str], model_type: str, pruner: Pruner) -> dict[str, str]:
    """The evidence to store, name -> where in the encoder (gstep.evidence).

    Args:
        asked: NAME or NAME=SOURCE each, or several of them with commas between.

    Raises UsageError where the model's encoder does not give one, or the method keeps no token as it was.
    """
    found: dict[str, str] = {}
    for item in (item.strip() for listed in asked for item in listed.split(",")):
        name, _, chosen = item.partition("=")
        source = _source(name, chosen, model_type)
        if found.setdefault(name, source) != source:
            raise UsageError(f"--evidence {name} is asked for from {found[name]} and {source}: a cache holds one")
    if found and pruner.merges:
        raise UsageError(
            f"--evidence {', '.join(found)}: --pruner {pruner.name} merges tokens, and a merged one has no evidence of "
            "its own; use a method that keeps tokens as they are, or --pruner none for all"
        )
    return found


def _source(name: str, chosen: str, model_type: str) -> str:
    if name not in PER_TOKEN:
        why = "is not given for each token" if name in EVIDENCE_SHAPES else "is no evidence"
        raise UsageError(f"--evidence: {name!r} {why}; known: {', '.join(PER_TOKEN)}")
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
    return chosen or given[0]
