"""Evidence: outputs of an encoder besides its tokens, by name and source.

Methods mean different things by the same name, so a method names a source too. A pruner lists the evidence that it
needs from the vision encoder in ``Pruner.sources``; a model family lists the evidence that it can give in
``ModelFamily.gives``. Evidence is float32 with the axes of :data:`EVIDENCE_SHAPES`.

Evidence is requested by a mapping from a label to a source. A label is the evidence's name, or ``<name>_<source>``
(:func:`make_label`) if the name is requested from several sources; :func:`name_of` gives the name of a label.
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

#: Attention to tokens in the encoder's last layer, mean over heads and queries, and the layer's keys, mean over heads;
#: both pooled like the tokens.
LAST_LAYER = "last_layer"
#: SigLIP's attention-pooling head on the encoder's output: the pooled feature and the attention of its probe.
POOLING_HEAD = "pooling_head"
#: The same head, applied to a single patch at a time: each patch in the embedding space of SigLIP's texts.
SINGLE_PATCHES = "single_patches"
#: A coarse view of the encoder's last layer: attention of a frame's mean query to the mean keys of merged patches.
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


def is_per_frame(label: str) -> bool:
    """Return True if evidence of this label has a value for each frame instead of each token."""
    return any(label == name or label.startswith(f"{name}_") for name in PER_FRAME)


def make_label(name: str, source: str) -> str:
    """Make the label ``<name>_<source>`` that tells evidence of one name from two sources apart."""
    return f"{name}_{source}"


def name_of(label: str, source: str) -> str:
    """Return the evidence's name from its label, which may be the name itself."""
    return label.removesuffix(f"_{source}")


def name_source_pairs(evidence: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Convert evidence, label -> source, to the set of (name, source)."""
    return frozenset((name_of(label, source), source) for label, source in evidence.items())


def describe_evidence(evidence: Mapping[str, str]) -> str:
    """Describe evidence for a message: ``frame_feature, token_attention from SigLIP's attention-pooling head``."""
    return "; ".join(
        f"{', '.join(sorted(name for name, name_source in name_source_pairs(evidence) if name_source == source))} from "
        f"{SOURCES.get(source, source)}"
        for source in sorted(set(evidence.values()))
    )
