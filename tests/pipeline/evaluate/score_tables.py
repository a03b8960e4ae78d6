"""Tables of scores to compute results from."""

from __future__ import annotations

from itertools import product

import numpy as np
import pyarrow as pa

from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.scores import SCORE_SCHEMA

_COLUMNS = ("question_id", "cluster", "splits", "method", "retention_ratio", "status", "parsed", "n_options", "score")
SCHEMA = pa.schema(
    [SCORE_SCHEMA.field(name).with_nullable(True) for name in (*_COLUMNS, "n_kept", "n_total", "finish", "weak")]
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


def table_of(arms, **more):
    """Make a table of the scores of each (method, ratio)."""
    return score_table(*(score_rows(*arm, scores, **more) for arm, scores in arms.items()))


def bits(text):
    """Read scores written as digits: "110 101"."""
    return [float(digit) for digit in text.replace(" ", "")]


def thousand(number):
    """Make 1,000 scores of which as many are right as a printed number says."""
    right = round(10 * float(number))
    return [1.0] * right + [0.0] * (1000 - right)


def items_of(n_videos, per_video=3):
    """Make questions with four options each, in VideoMME's splits, by id."""
    items = {}
    for v, q in product(range(n_videos), range(per_video)):
        items[f"{v + 1:03}-{q + 1}"] = Item(
            question_id=f"{v + 1:03}-{q + 1}",
            video_ids=(f"data/v{v:03}.mp4",),
            question=f"What happens at {q}?",
            options=tuple(f"{letter}. It does {letter}." for letter in "ABCD"),
            answer=(v + q) % 4,
            expected="ABCD"[(v + q) % 4],
            splits={
                "duration": ("short", "medium", "long")[v % 3],
                "domain": ("Knowledge", "Sports")[v % 2],
                "task_type": ("Counting", "Reasoning")[q % 2],
            },
            cluster=f"v{v:03}",
        )
    return items


def scores_of(items, methods, ratios, *, failed=(), seed=0):
    """Make rows of ``scores.parquet``: full retention, then every method at every ratio; ``failed`` are questions."""
    random, rows = np.random.default_rng(seed), []
    for method, ratio in [("none", 1.0), *product(methods, ratios)]:
        for item in items.values():
            right, ok = bool(random.random() < 0.5 + 0.3 * ratio), item.question_id not in failed
            rows.append(
                {
                    "question_id": item.question_id,
                    "video_id": item.video_id,
                    "cluster": item.cluster,
                    "splits": dict(item.splits),
                    "method": method,
                    "retention_ratio": ratio,
                    "status": "ok" if ok else "failed",
                    "error_class": None if ok else "out-of-memory",
                    "reply": "A" if ok else None,
                    "parsed": 0 if ok else None,
                    "answer": item.answer,
                    "n_options": len(item.options),
                    "right": right and ok,
                    "score": float(right and ok),
                    "n_kept": round(6272 * ratio) if ok else None,
                    "n_total": 6272 if ok else None,
                }
            )
    return pa.Table.from_pylist(rows, SCORE_SCHEMA)
