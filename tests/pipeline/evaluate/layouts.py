"""What the fixtures of benchmarks share: small real videos, annotations as published, and replies that are scored."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from pipeline.errors import QuestionFault
from pipeline.evaluate.benchmarks.base import Benchmark
from pipeline.evaluate.benchmarks.items import Item, LoadedQuestions
from pipeline.evaluate.config import EvaluateConfig
from pipeline.evaluate.request import EvaluateRequest, prepare, write_results_header
from pipeline.evaluate.results import Presentation, make_tables
from pipeline.evaluate.run import ScoredQuestions
from pipeline.evaluate.scores import AnsweredItems, make_score_table
from pipeline.evaluate.statistics import ORIGINAL, MethodAtRatio
from pipeline.generate.answers import ANSWER_SCHEMA, commit_answers, write_answers_header
from pipeline.rows import make_failed_answer
from pipeline.storage.stores import LocalStore
from tests.builders.answers import request_about, tiny_cache, write_questions
from tests.builders.clips import write_clip

QUIET = Console(quiet=True)
_CODECS = {".webm": "libvpx-vp9", ".avi": "mpeg4"}


def write_videos(folder: Path, paths: Iterable[str], *, count: int = 8, fps: int = 4) -> None:
    """Write a real video of ``count`` numbered frames at each of these paths."""
    for path in dict.fromkeys(paths):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        codec = _CODECS.get(place.suffix, "libx264")
        write_clip(place, codec=codec, count=count, fps=fps, size=(48, 64))


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def faulty(loaded: LoadedQuestions, kind: str) -> list[str | None]:
    """Return the questions with a fault of this kind."""
    return [fault.question_id for fault in loaded.faults if fault.kind == kind]


def by_id(loaded: LoadedQuestions) -> dict[str, Item]:
    return {item.question_id: item for item in loaded.items}


def answers_of(replies: Mapping[str, str | None], arms: Iterable[str]) -> pa.Table:
    """Return answers to questions by their ids, the same under every arm; None failed."""
    common = {"prompt": "p", "run_id": "r", "attempts": 1, "video_ids": ["v"]}
    failed = {"status": "failed", "error_class": "io", "error_message": "why"}
    rows = [
        {**common, "question_id": name, "pruning": arm}
        | (failed if reply is None else {"status": "ok", "answer": reply})
        for arm in arms
        for name, reply in replies.items()
    ]
    return pa.Table.from_pylist(rows, schema=ANSWER_SCHEMA)


def replied(
    benchmark: Benchmark,
    loaded: LoadedQuestions,
    replies: Mapping[str, str],
    arms: Mapping[str, MethodAtRatio] | None = None,
) -> ScoredQuestions:
    """Score the questions by the rule of its protocol; one without a reply failed. Every arm says the same."""
    arms = arms or {"none@1": ORIGINAL}
    answered = AnsweredItems.select(loaded.items, arms, answers_of(replies, arms))
    scores = make_score_table(answered, benchmark.protocol())
    return ScoredQuestions(loaded=loaded, scores=scores)


def whole(folder: Path, **header: Any) -> Path:
    """Write a cache of all tokens of the videos a and b."""
    tiny_cache(folder / "c", ("a", "b"), ratio=1.0, method="none", **header)
    return folder / "c"


def own_request(folder: Path, rows: Sequence[Mapping[str, Any]], **options: Any) -> EvaluateRequest:
    """Return a checked request to ask rows of the cache in the folder, which is made where there is none."""
    if not (folder / "c").exists():
        whole(folder)
    file = write_questions(folder / "q.jsonl", [*map(dict, rows)])
    given = {"method": ["gstep"], "retention_ratio": [0.25], "cache": str(folder / "c"), "out": str(folder / "r")}
    return prepare(EvaluateConfig(**{"benchmark": str(file), **given, **options}), QUIET)


def commit_replies(
    request: EvaluateRequest,
    replies: Mapping[Any, str] = MappingProxyType({}),
    faults: Mapping[str, Any] = MappingProxyType({}),
) -> LocalStore:
    """Commit an answer to every question under the whole grid, "B" where ``replies`` has none.

    Replies are those of a question, or of a question under one arm; ``faults`` are the error classes of questions.
    """
    write_results_header(request.store, request.identity)
    answers = LocalStore(f"{request.config.out}/answers")
    write_answers_header(answers, {})
    good = {"status": "ok", "n_visual_tokens": 1, "n_prompt_tokens": 2}
    rows = []
    for arm, row in product(request.grid, request.questions.to_pylist()):
        name, asked = row["question_id"], {**row, "pruning": arm, "attempts": 1}
        reply = replies.get((name, arm), replies.get(name, "B"))
        fault = faults.get(name)
        rows.append(
            make_failed_answer(asked, QuestionFault(fault, "why")) if fault else {**asked, **good, "answer": reply}
        )
    commit_answers(answers, "run", 0, rows)
    return answers


def generated(cache: Path, out: Path, rows: Sequence[Mapping[str, Any]], replies: str, **options: Any) -> str:
    """Commit answers as jobs.generate gives them to the rows of a question file: a letter each, "-" for a failure."""
    job, store = request_about(cache, rows, **options), LocalStore(out)
    write_answers_header(store, job.identity)
    asked = [{**question, "attempts": 1} for question in job.questions.to_pylist()]
    answers = [
        make_failed_answer(one, QuestionFault("io", "why"))
        if reply == "-"
        else {**one, "status": "ok", "answer": reply}
        for one, reply in zip(asked, replies, strict=True)
    ]
    commit_answers(store, "run", 0, answers, questions=job.questions)
    return str(out)


def schema_of(texts: str, **others: pa.DataType) -> pa.Schema:
    """Return a schema of the other columns and of columns of text, which are named in one string."""
    return pa.schema([*others.items(), *((name, pa.string()) for name in texts.split())])


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path)


def printed(benchmark: Benchmark, done: ScoredQuestions) -> dict[str, str]:
    """Return the main table's row of full retention: title of the column -> number."""
    metric = benchmark.protocol().metric
    shown = Presentation(title="T", benchmark=benchmark, described={"metric": metric}, draws=100)
    table = make_tables(done, shown)[0]
    cells = zip(table.columns, table.original.cells, strict=True)
    return {column.title: cell.printed for column, cell in cells if cell}
