"""Made-up scores of a benchmark on a model, seeded, for the page of results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.evaluate.benchmarks import BENCHMARKS
from pipeline.evaluate.benchmarks.items import AnnotationFault, Item, LoadedQuestions
from pipeline.evaluate.protocols import LMMS_EVAL_0_7, Prompt, Protocol
from pipeline.evaluate.report.page import Presentation, Report
from pipeline.evaluate.scores import SCORE_SCHEMA
from pipeline.evaluate.statistics.results import Column
from pipeline.evaluate.statistics.tables import ScoredBenchmark, results_table

TITLE = "VideoMME, llava-hf/llava-onevision-qwen2-7b-ov-hf"
METHODS = ("fastv,K=3", "fastvid", "cdpruner", "visionzip", "vidcom2", "gstep")
RATIOS = (0.25, 0.2, 0.15, 0.1)
HOSTILE = "</script><script>x()</script> {{ 7 * 7 }} <!-- &amp; 'a' \"b\""
LETTERS = "ABCD"
_LENGTHS = {"short": "Short", "medium": "Medium", "long": "Long"}
_DOMAINS = ("Knowledge", "Film & Television", "Sports Competition", "Artistic Performance", "Life Record")
_TASKS = ("Action Recognition", "Counting Problem", "Information Synopsis", "OCR Problems", "Object Reasoning")
_WORDS = ("the", "man", "in", "a", "red", "coat", "who", "is", "seen", "near", "one", "of", "two", "small", "boxes")


def items_of(n_videos: int, per_video: int = 3, *, free: bool = False, seed: int = 0) -> dict[str, Item]:
    """Make questions with four options each, or free ones."""
    random = np.random.default_rng([seed, 1])
    items = {}
    for v in range(n_videos):
        for q in range(per_video):
            question_id = f"{v + 1:03}-{q + 1}"
            options = () if free else tuple(f"{letter}. {_text(random, 3, 9)}." for letter in LETTERS)
            answer = int(random.integers(4))
            items[question_id] = Item(
                question_id=question_id,
                video_ids=(f"data/{_name(v)}.mp4",),
                question=f"What happens when {_text(random, 6, 14)}?",
                options=options,
                answer=None if free else answer,
                expected=_text(random, 1, 3) if free else LETTERS[answer],
                splits={
                    "duration": list(_LENGTHS)[v % 3],
                    "domain": _DOMAINS[v % len(_DOMAINS)],
                    "task_type": _TASKS[int(random.integers(len(_TASKS)))],
                },
                cluster=_name(v),
            )
    return items


def scores_of(
    items: Mapping[str, Item],
    methods: Sequence[str] = METHODS,
    ratios: Sequence[float] = RATIOS,
    *,
    n_frames: int = 32,
    failures: float = 0.0005,
    cluster: str | None = None,
    seed: int = 0,
) -> pa.Table:
    """Make rows of ``scores.parquet``: full retention, then every method at every ratio.

    A question has a difficulty that all methods share, so that answers agree mostly. FastV does not say what it kept of
    each frame, CDPruner keeps other tokens for other questions.
    """
    random = np.random.default_rng([seed, 2])
    ease = {question: random.normal() for question in items}
    rows: list[dict[str, Any]] = []
    for method, ratio in [("none", 1.0), *((m, r) for m in methods for r in ratios)]:
        loss = 0.0 if method == "none" else (1 - ratio) ** 4 * _weakness(method)
        per_video: dict[str, list[int]] = {}
        for item in items.values():
            wrong_part = {"short": 0.0, "medium": 0.5, "long": 0.8}[item.splits["duration"]]
            right = bool(ease[item.question_id] + random.normal(0, 0.4) > wrong_part - 0.7 + loss)
            kept = per_video.get(item.video_id)
            if kept is None or method == "cdpruner":
                kept = per_video[item.video_id] = _kept(random, method, ratio, n_frames)
            failed = random.random() < failures
            reply, parsed = (None, None) if failed else _reply(random, item, right=right)
            rows.append(
                {
                    "question_id": item.question_id,
                    "video_id": item.video_id,
                    "cluster": cluster or item.cluster,
                    "splits": dict(item.splits),
                    "method": method,
                    "retention_ratio": ratio,
                    "status": "failed" if failed else "ok",
                    "error_class": "out-of-memory" if failed else None,
                    "reply": reply,
                    "parsed": parsed,
                    "answer": item.answer,
                    "n_options": len(item.options),
                    "right": right and not failed,
                    "score": float(right and not failed),
                    "n_kept": None if failed else sum(kept),
                    "n_total": None if failed else 196 * n_frames,
                    "kept_per_frame": None if failed or method.startswith("fastv,") else kept,
                }
            )
    return pa.Table.from_pylist(rows, SCORE_SCHEMA)


def report_of(items: Mapping[str, Item], scores: pa.Table, *, draws: int = 200, **more: Any) -> Report:
    """Make a report with all that there can be; ``more`` replaces fields, those of its questions and settings too."""
    durations = [Column(f"duration={part}", title) for part, title in _LENGTHS.items()]
    table = results_table(f"{TITLE}: Duration", [ScoredBenchmark("VideoMME", scores, durations)], draws=draws)
    splits = tuple(
        results_table(
            f"{TITLE}: {title}",
            [
                ScoredBenchmark(
                    "VideoMME",
                    scores,
                    [Column(f"{name}={part}", part) for part in sorted({i.splits[name] for i in items.values()})],
                )
            ],
            draws=draws,
        )
        for name, title in (("domain", "Domain"), ("task_type", "Task"))
    )
    pages = {
        video: [("kept tokens", f"videos/{v}.html"), ("without pruning", f"videos/{v}-full.html")]
        for v, video in enumerate(dict.fromkeys(item.video_id for item in items.values()))
    }
    described = PROTOCOL.describe("llava_onevision")
    shown = Presentation(title=TITLE, benchmark=BENCHMARKS["videomme"], described=described, facts=FACTS, pages=pages)
    loaded = LoadedQuestions(tuple(items.values()), FAULTS, len(items) + 2)
    report = Report(shown=shown, table=table, splits=splits, scores=scores, loaded=loaded)
    return replaced(report, **more)


def replaced(report: Report, **more: Any) -> Report:
    """Replace fields of a report, of its questions or of its settings, whichever has one of this name."""
    for part in ("loaded", "shown"):
        whole = getattr(report, part)
        given = {name: more.pop(name) for name in list(more) if name in vars(whole)}
        report = replace(report, **{part: replace(whole, **given)})
    return replace(report, **more)


def data_of(html: str) -> dict[str, Any]:
    """Return what a page gives its script."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(data)


PROTOCOL = Protocol(
    name="lmms-eval-0.7.3",
    prompt=Prompt("Select the best answer.\n{question}\n{options}\n\nAnswer with the letter directly."),
    models=LMMS_EVAL_0_7,
    parser="extract-mcq-answer",
)
FAULTS = (
    AnnotationFault("missing-video", "901-1", "test.parquet, row 2701: data/gone.mp4 is not there", True),
    AnnotationFault("bad-row", None, "test.parquet, row 2702: question_id must be a text, got null", True),
    AnnotationFault("repeated-candidate", "001-1", "test.parquet, row 1: the option 'a dog' is there 2 times", False),
)
FACTS = (
    ("model", "llava-hf/llava-onevision-qwen2-7b-ov-hf"),
    ("weights", "revision 0d50680527681998e456c7b78950205bedd8a068"),
    ("cache", "/data/caches/videomme-llava, 5.4 MB a video"),
    ("machine", "1 x NVIDIA A100-SXM4-80GB"),
    ("versions", "torch 2.9.0, transformers 5.18.1, Ray 2.55.0"),
    ("run time", "3 h 12 min"),
)


def _weakness(method: str) -> float:
    return {"gstep": 0.2, "vidcom2": 0.5, "fastvid": 0.35, "cdpruner": 0.8, "visionzip": 1.1}.get(method, 0.9)


def _name(v: int) -> str:
    return f"v{np.random.default_rng([v, 7]).integers(16**9):09x}"


def _text(random: np.random.Generator, low: int, high: int) -> str:
    start = int(random.integers(len(_WORDS)))
    return " ".join((_WORDS * 2)[start : start + int(random.integers(low, high))])


def _kept(random: np.random.Generator, method: str, ratio: float, n_frames: int) -> list[int]:
    """Share tokens out evenly, or by what a frame shows: never more than its 196 tokens."""
    if method in ("none", "visionzip", "fastv,K=3"):
        return [int(196 * ratio)] * n_frames
    shape = random.gamma(2.0, size=n_frames) + 0.3 * (method != "gstep")
    return np.minimum(196, shape / shape.mean() * 196 * ratio).astype(int).tolist()


def _reply(random: np.random.Generator, item: Item, *, right: bool) -> tuple[str, int | None]:
    if not item.options:
        return (item.expected if right else "I cannot say"), None
    if not right and random.random() < 0.02:
        return "I am not sure.", None
    wrong = [choice for choice in range(4) if choice != item.answer]
    named = item.answer if right and item.answer is not None else int(random.choice(wrong))
    return (item.options[named] if random.random() < 0.1 else LETTERS[named]), named
