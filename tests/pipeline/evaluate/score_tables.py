"""Tables of scores to compute results from, the numbers of the GSTEP paper, and a page of results as read."""

from html.parser import HTMLParser
from itertools import product
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.request import write_results_header
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.storage.stores import LocalStore

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


MODEL = {"type": "llava_onevision", "weights": "hub:a/model@sha"}


def leave_results(folder, benchmark, scores, about=None, **identity):
    """Write what jobs.evaluate leaves of a benchmark; return its place."""
    store = LocalStore(folder / benchmark)
    store.make()
    held = {"benchmark": benchmark, "model": MODEL, "num_frames": 32, "protocol": "p"} | identity
    write_results_header(store, held, about or {"model": "m"})
    pq.write_table(scores, store.root / "scores.parquet")
    return str(store.root)


class Page(HTMLParser):
    """The tags and texts of a page; each tag must be closed in its place, and ``open`` are those that are not."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "path":
            assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        self.texts += [data.strip()] if data.strip() else []


class PaperRow(NamedTuple):
    """A row: its method as this package names it, its numbers as printed, and their marks."""

    method: str
    ratio: float
    numbers: tuple[str, ...]
    marks: tuple[str, ...]


#: The number columns; Rel. is last.
COLUMNS = ("Short", "Medium", "Long", "VideoMME", "LongVideoBench", "MLVU", "MVBench", "EgoSchema", "Rel.")

#: Full retention; then a block a retention ratio, of four that the paper has.
TABLE = {
    1.0: "Original 70.3 56.6 48.8 58.6 56.4 63.0 56.9 60.4 100.0",
    0.25: """
        FastV 65.0 53.8 47.0 55.3 53.3 59.6 55.5 57.5 95.2
        FastVID _69.9 _56.3 47.4 57.9 _56.3 61.3 56.5 59.5 98.7
        CDPruner 63.2 54.8 47.1 55.0 54.3 61.2 54.7 58.3 96.0
        VisionZip 61.6 53.4 47.2 54.1 51.2 58.5 53.7 *60.3 94.0
        VidCom2 69.8 *56.4 _49.4 _58.6 54.9 _62.5 *57.2 _59.7 _99.2
        GSTEP *70.0 *56.4 *50.2 *58.9 *57.2 *63.3 _56.9 59.5 *100.2
    """,
    0.1: """
        FastV 54.1 49.8 44.6 49.4 46.8 55.6 49.8 54.6 86.7
        FastVID _67.4 *56.0 *48.6 *57.2 *55.6 _60.5 _55.9 *58.6 _97.5
        CDPruner 59.4 51.7 45.4 52.2 49.7 57.7 51.1 55.8 90.2
        VisionZip 50.4 45.8 41.8 46.0 43.5 51.5 44.4 _58.0 82.3
        VidCom2 61.6 52.0 _47.7 53.7 50.3 58.1 52.6 57.5 92.1
        GSTEP *67.8 _55.3 47.1 _56.7 _55.2 *62.1 *56.1 *58.6 *97.8
    """,
}


def paper_rows() -> list[PaperRow]:
    """Return 13 rows of the table, full retention first, whose method is ``none``."""
    return [_row(ratio, line) for ratio, block in TABLE.items() for line in block.strip().splitlines()]


def _row(ratio: float, line: str) -> PaperRow:
    name, *numbers = line.split()
    mark = {"*": "best", "_": "second"}
    return PaperRow(
        "none" if name == "Original" else name.lower(),
        ratio,
        tuple(number.lstrip("*_") for number in numbers),
        tuple(mark.get(number[0], "") for number in numbers),
    )
