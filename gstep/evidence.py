"""Evidence: outputs of a vision encoder or language model, besides the tokens, that some pruning methods need.

Methods may mean different things by the same name, so a piece of evidence has a name and a source (``Pruner.sources``,
``ModelFamily.gives``). Evidence is float32, with the axes of :data:`EVIDENCE_SHAPES`. It is requested as a mapping from
label to source. The label is the name, or ``<name>_<source>`` if the same name is requested from several sources.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The axes of each kind of evidence, by name. Axes of the same name have the same length.
EVIDENCE_SHAPES = {
    "frame_feature": ("T", "Dv"),
    "token_attention": ("T", "N"),
    "token_key": ("T", "N", "Dk"),
    "image_embedding": ("T", "N", "De"),
    "text_embedding": ("Q", "De"),
    "llm_attention": ("T*N",),
    "noise": ("T*N",),
}

#: The encoder's last layer: the attention that each token receives, averaged over heads and queries, and the keys,
#: averaged over heads. Both are pooled like the tokens.
LAST_LAYER = "last_layer"
#: SigLIP's attention-pooling head on the encoder's output: the pooled feature and the attention of its probe.
POOLING_HEAD = "pooling_head"
#: The same head, applied to one patch at a time: each patch in the embedding space of SigLIP's texts.
SINGLE_PATCHES = "single_patches"
#: A coarse view of the encoder's last layer: attention of a frame's mean query to the mean keys of merged patches.
MERGED_QUERIES = "merged_queries"

#: The sources whose weights come from a SigLIP checkpoint, in addition to the model's.
HEAD_SOURCES = frozenset({POOLING_HEAD, SINGLE_PATCHES})

#: The sources as error messages describe them.
SOURCES: Mapping[str, str] = {
    LAST_LAYER: "the encoder's last layer",
    POOLING_HEAD: "SigLIP's attention-pooling head",
    SINGLE_PATCHES: "SigLIP's attention-pooling head over single patches",
    MERGED_QUERIES: "the mean queries and merged keys of the encoder's last layer",
}


#: Evidence with one value per frame instead of one per token.
PER_FRAME = frozenset({"frame_feature"})


def is_frame_evidence(label: str) -> bool:
    """Return True if evidence with this label has one value per frame instead of one per token."""
    return any(label == name or label.startswith(f"{name}_") for name in PER_FRAME)


def make_label(name: str, source: str) -> str:
    """Return the label ``<name>_<source>``."""
    return f"{name}_{source}"


def get_evidence_name(label: str, source: str) -> str:
    """Return the name of evidence: ``label`` without the suffix ``_<source>``, if it has this suffix."""
    return label.removesuffix(f"_{source}")


def make_name_source_pairs(evidence: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Convert evidence, label -> source, to a set of (name, source) pairs."""
    return frozenset((get_evidence_name(label, source), source) for label, source in evidence.items())


def describe_evidence(evidence: Mapping[str, str]) -> str:
    """Format evidence, label -> source, for a message; "" if it is empty.

    Labels become names, and sources their descriptions in SOURCES (unknown sources stay as they are). An example is
    ``frame_feature, token_attention from SigLIP's attention-pooling head``. There is a group per source, in the order
    of the sources' identifiers and separated by "; "; the names of a group are sorted.
    """
    pairs = make_name_source_pairs(evidence)
    return "; ".join(
        f"{', '.join(sorted(name for name, name_source in pairs if name_source == source))} from "
        f"{SOURCES.get(source, source)}"
        for source in sorted(set(evidence.values()))
    )
