"""A benchmark's questions as ``jobs.generate`` asks them, and answers given there as a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from gstep.language import Decoding
from pipeline.evaluate.benchmarks.items import Item
from pipeline.evaluate.benchmarks.own import is_unpublished, item_of
from pipeline.evaluate.protocols import Protocol
from pipeline.generate.questions import QUESTION_SCHEMA, Way
from pipeline.rows import AnswerRecord, QuestionRecord


def way_of(protocol: Protocol, model_type: str) -> Way:
    """Return the protocol's way of answering: choices method, system message and decoding, for all questions."""
    decoding = Decoding(max_new_tokens=protocol.max_new_tokens, temperature=protocol.temperature)
    return Way(decoding, protocol.choices, protocol.rules(model_type).system)


def question_table(items: Sequence[Item], protocol: Protocol, model_type: str) -> pa.Table:
    """Return the items as a table of QUESTION_SCHEMA, a row a question.

    Where a reply is generated the prompt is the protocol's whole text, which goes through untouched.
    """
    way = way_of(protocol, model_type)
    rows = [_question(item, protocol, model_type, way) for item in items]
    return pa.Table.from_pylist(rows, schema=QUESTION_SCHEMA)


def _question(item: Item, protocol: Protocol, model_type: str, way: Way) -> QuestionRecord:
    """Return an item as a row of QUESTION_SCHEMA."""
    scored = bool(item.options) and protocol.choices != "generate"
    question: QuestionRecord = {
        "question_id": item.question_id,
        "video_ids": list(item.video_ids),
        "prompt": item.question if scored else protocol.text(item, model_type),
        "decoding": (way if scored else replace(way, method="generate")).describe(),
    }
    if scored:
        question["choices"] = list(item.options)
    if item.expected is not None:
        question["target"] = item.expected
    return question


def answered_item(row: AnswerRecord) -> Item | None:
    """Return the item of a question that jobs.generate answered, or None if it has no published right answer."""
    if "target" not in row:
        return None
    item = item_of(row, f"question {row['question_id']}")
    return None if is_unpublished(item) else item
