"""Where evidence comes from: methods mean different things by one name, so that a method names a source with it.

A pruner lists its evidence from the vision encoder in ``Pruner.sources``, a model family what it can give in
``ModelFamily.gives``. Evidence is float32, its axes are those of :data:`gstep.pruners.checks.EVIDENCE_SHAPES`.
"""

from __future__ import annotations

from collections.abc import Mapping

#: The attention that tokens get in the encoder's last layer, mean over heads and queries, and the layer's keys, mean
#: over heads; pooled as the tokens are.
LAST_LAYER = "last_layer"
#: SigLIP's attention-pooling head on the encoder's output: what its probe makes of a frame, and where it looks.
POOLING_HEAD = "pooling_head"
#: The same head with one patch before its probe at a time: each patch in the space that SigLIP's texts are in.
SINGLE_PATCHES = "single_patches"
#: The encoder's last layer seen coarsely: the attention of a frame's mean query to the mean keys of merged patches.
MERGED_QUERIES = "merged_queries"

#: What must be read from a SigLIP checkpoint beside the model.
HEAD_SOURCES = frozenset({POOLING_HEAD, SINGLE_PATCHES})

#: In words, for errors.
SOURCES: Mapping[str, str] = {
    LAST_LAYER: "the encoder's last layer",
    POOLING_HEAD: "SigLIP's attention-pooling head",
    SINGLE_PATCHES: "SigLIP's attention-pooling head over single patches",
    MERGED_QUERIES: "the mean queries and merged keys of the encoder's last layer",
}


def in_words(evidence: Mapping[str, str]) -> str:
    """``frame_feature, token_attention from SigLIP's attention-pooling head``."""
    return "; ".join(
        f"{', '.join(sorted(name for name in evidence if evidence[name] == source))} from {SOURCES.get(source, source)}"
        for source in sorted(set(evidence.values()))
    )
