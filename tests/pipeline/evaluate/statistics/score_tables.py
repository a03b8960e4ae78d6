"""Tables of scores to compute results from."""

from __future__ import annotations

import pyarrow as pa

SCHEMA = pa.schema(
    {
        "question_id": pa.string(),
        "cluster": pa.string(),
        "splits": pa.map_(pa.string(), pa.string()),
        "method": pa.string(),
        "retention_ratio": pa.float64(),
        "status": pa.string(),
        "parsed": pa.int32(),
        "n_options": pa.int32(),
        "score": pa.float64(),
        "n_kept": pa.int32(),
        "n_total": pa.int32(),
    }
)


def score_rows(method, ratio, scores, *, clusters=None, splits=None, kept=None):
    """Make rows of one method: a question a score (None: it failed), each about its own video without ``clusters``."""
    return [
        {
            "question_id": f"q{i:05}",
            "cluster": f"v{i}" if clusters is None else clusters[i],
            "splits": {} if splits is None else splits[i],
            "method": method,
            "retention_ratio": ratio,
            "status": "failed" if score is None else "ok",
            "parsed": None if score is None else 0,
            "n_options": 4,
            "score": score,
            "n_kept": round(100 * ratio) if kept is None else kept[i],
            "n_total": 100,
        }
        for i, score in enumerate(scores)
    ]


def score_table(*arms):
    """Make a table of several score_rows."""
    return pa.Table.from_pylist([row for arm in arms for row in arm], SCHEMA)


def bits(text):
    """Read scores written as digits: "110 101"."""
    return [float(digit) for digit in text.replace(" ", "")]
