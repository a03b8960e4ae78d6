"""The sources of evidence: methods mean different things by one name, so that a method names a source with it.

A pruner lists its evidence from the vision encoder in ``Pruner.sources``, a model family what it can give in
``ModelFamily.gives``. Evidence is float32, its axes are those of :data:`EVIDENCE_SHAPES`.

Evidence is requested by a mapping from a label to a source. A label is the evidence's name, or ``<name>_<source>``
(:func:`label`) where one name is requested from several sources; :func:`name_of` gives the name of a label.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Evidence that encoders and language models give, by name, and its axes; equal names are equal lengths.
EVIDENCE_SHAPES = {
    "frame_feature": ("T", "Dv"),
    "token_attention": ("T", "N"),
    "token_key": ("T", "N", "Dk"),
    "image_embedding": ("T", "N", "De"),
    "text_embedding": ("Q", "De"),
    "llm_attention": ("T*N",),
    "noise": ("T*N",),
}

#: The attention that tokens get in the encoder's last layer, mean over heads and queries, and the layer's keys, mean
#: over heads; pooled as the tokens are.
LAST_LAYER = "last_layer"
#: SigLIP's attention-pooling head on the encoder's output: the pooled feature and the attention of its probe.
POOLING_HEAD = "pooling_head"
#: The same head with one patch before its probe at a time: each patch in the space that SigLIP's texts are in.
SINGLE_PATCHES = "single_patches"
#: The encoder's last layer seen coarsely: the attention of a frame's mean query to the mean keys of merged patches.
MERGED_QUERIES = "merged_queries"

#: The sources that must be read from a SigLIP checkpoint beside the model.
HEAD_SOURCES = frozenset({POOLING_HEAD, SINGLE_PATCHES})

#: The sources as errors describe them.
SOURCES: Mapping[str, str] = {
    LAST_LAYER: "the encoder's last layer",
    POOLING_HEAD: "SigLIP's attention-pooling head",
    SINGLE_PATCHES: "SigLIP's attention-pooling head over single patches",
    MERGED_QUERIES: "the mean queries and merged keys of the encoder's last layer",
}


#: Evidence of a frame, not of each token.
PER_FRAME = frozenset({"frame_feature"})


def is_per_frame(labelled: str) -> bool:
    """Return whether evidence of this label has a value for each frame instead of each token."""
    return any(labelled == name or labelled.startswith(f"{name}_") for name in PER_FRAME)


def label(name: str, source: str) -> str:
    """Make the label ``<name>_<source>`` that tells evidence of one name from two sources apart."""
    return f"{name}_{source}"


def name_of(labelled: str, source: str) -> str:
    """Return the name of evidence from its label, which may be the name itself."""
    return labelled.removesuffix(f"_{source}")


def pairs(evidence: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return (name, source) of evidence, label -> source."""
    return frozenset((name_of(labelled, source), source) for labelled, source in evidence.items())


def describe_evidence(evidence: Mapping[str, str]) -> str:
    """Describe evidence: ``frame_feature, token_attention from SigLIP's attention-pooling head``."""
    return "; ".join(
        f"{', '.join(sorted(name for name, other in pairs(evidence) if other == source))} from "
        f"{SOURCES.get(source, source)}"
        for source in sorted(set(evidence.values()))
    )
