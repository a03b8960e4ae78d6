"""What failed, as a list: ids with the class of the error and its message."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.cache.header import fingerprint
from pipeline.cache.live_videos import LiveVideos
from pipeline.cache.reader import TokenCache

_VIDEO = ("video_id", "uri", "error_stage", "error_class", "error_message", "attempts", "status")
_QUESTION = ("question_id", "pruning", "error_class", "error_message", "attempts")
_NAMES = {"error_class": "class", "error_message": "message", "error_stage": "stage"}
Failures = list[dict[str, str | int | None]]


def failed_videos(cache: TokenCache) -> Failures:
    """List the failed videos by id: video_id, uri, stage, class, message, attempts. Raises CorruptShard, OSError."""
    return _records(LiveVideos.open(cache.store, fingerprint(cache.identity)).live(_VIDEO), _VIDEO[:-1])


def failed_questions(answers: pa.Table) -> Failures:
    """Return a record for each failed row: question_id, pruning, class, message, attempts.

    ``answers`` holds live rows of answers.
    """
    return _records(answers, _QUESTION)


def failed_lines(failures: Failures) -> Iterator[str]:
    """Yield ``ID<TAB>class<TAB>message`` of each; with several prunings ``ID<TAB>pruning<TAB>class<TAB>message``."""
    several = any(item.get("pruning") is not None for item in failures)
    for item in failures:
        columns = [item.get("video_id", item.get("question_id"))]
        columns += [item["pruning"]] if several else []
        yield "\t".join(map(_one_line, [*columns, item["class"], item["message"]]))


def _records(rows: pa.Table, names: Sequence[str]) -> Failures:
    """Return the failed rows as dicts of these columns."""
    failed = rows.filter(pc.equal(rows["status"], "failed")).select(list(names))
    return [{_NAMES.get(name, name): value for name, value in row.items()} for row in failed.to_pylist()]


def _one_line(value: str | int | None) -> str:
    """Return the text, quoted as JSON if it holds tabs or line breaks."""
    text = str(value or "")
    return text if text.isprintable() else json.dumps(text)
