"""Sets of a video's tokens with and without those that show the answer. A set is [T*N] bool by flat index."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluate.shapes.evidence import Evidence, coverage

TokenSet = NDArray[np.bool_]
#: What is left of a video's tokens, in the order of the table, with its column's title.
VARIANTS: Mapping[str, str] = {
    "all": "all tokens",
    "without_evidence": "without the evidence",
    "without_others": "without as many others",
    "evidence_alone": "the evidence alone",
    "none": "no tokens",
}


def touched(evidence: Evidence, grid: int) -> TokenSet:
    """The tokens that anything of a question's evidence touches, in any of its frames; a frame has grid x grid."""
    boxes = [box for part in evidence.parts for box in part.boxes]
    return (coverage(boxes, evidence.n_frames, grid) > 0).reshape(-1)


def others(shown: TokenSet, seed: int, question_id: str) -> TokenSet:
    """As many tokens that are not in ``shown``, at random by seed and question; all of them where there are fewer."""
    rest = np.flatnonzero(~shown)
    rng = np.random.default_rng([seed, zlib.crc32(question_id.encode())])
    chosen = np.zeros_like(shown)
    chosen[rng.permutation(rest)[: shown.sum()]] = True
    return chosen


def kept_by_variant(shown: TokenSet, seed: int, question_id: str) -> dict[str, TokenSet]:
    """What each of VARIANTS keeps."""
    return {
        "all": np.ones_like(shown),
        "without_evidence": ~shown,
        "without_others": ~others(shown, seed, question_id),
        "evidence_alone": shown,
        "none": np.zeros_like(shown),
    }
