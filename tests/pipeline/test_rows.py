"""Records between stages are rows of the Parquet files, name by name; hashes in place of texts are found again."""

import datetime
import pickle
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pytest

from pipeline.cache.schema import VIDEO_SCHEMA
from pipeline.errors import FAULTS, QUESTION_FAULTS, FaultClass, QuestionFault, QuestionFaultClass, VideoFault
from pipeline.generate.answerer import REMAINING_SCHEMA
from pipeline.generate.answers import ANSWER_SCHEMA
from pipeline.inputs.named_videos import TODO_SCHEMA
from pipeline.keys import find, find_repeated, hash_clips, hash_column, hash_texts
from pipeline.rows import (
    AnswerRecord,
    QuestionRecord,
    TodoRow,
    VideoRecord,
    VideoRow,
    make_failed_answer,
    make_failed_video,
)
from tests.paths import ROOT

ARROW = {
    str: {pa.string()},
    int: {pa.int32(), pa.int64(), pa.uint64()},
    float: {pa.float64(), pa.float32()},
    bool: {pa.bool_()},
    Any: {pa.string()},  # JSON
    datetime.datetime: set(),
}


def accepted(hint: Any) -> set[pa.DataType]:
    """The Arrow types that hold values of a type hint."""
    if get_origin(hint) is Literal:
        return ARROW[str]
    if get_origin(hint) is list:
        return {pa.list_(kind) for kind in accepted(get_args(hint)[0])}
    if get_origin(hint) in (Union, types.UnionType):
        return accepted(next(kind for kind in get_args(hint) if kind is not type(None)))
    return ARROW[hint]


SCHEMAS = {VideoRecord: VIDEO_SCHEMA, VideoRow: VIDEO_SCHEMA, AnswerRecord: ANSWER_SCHEMA}
SCHEMAS |= {TodoRow: TODO_SCHEMA, QuestionRecord: REMAINING_SCHEMA}


@pytest.mark.parametrize("record", SCHEMAS)
def test_a_record_is_its_schema(record):
    schema = SCHEMAS[record]
    hints = get_type_hints(record)
    assert set(hints) == set(schema.names)
    for field in schema:
        assert field.type in accepted(hints[field.name]), field.name


def test_what_fails_keeps_what_was_known():
    record: VideoRecord = {"video_id": "v", "attempts": 2, "backend": "decord", "status": "ok", "codec": "h264"}
    fault = VideoFault("crash", "gone\n", exit_signal=11, attempts=2)
    failed = make_failed_video(record, fault)
    assert failed["backend"] == "decord" and failed["codec"] == "h264" and failed["error_message"] == "gone"
    assert (failed["status"], failed["error_class"], failed["error_signal"]) == ("failed", "crash", 11)
    assert failed["attempts"] == 3 and failed["retryable"] is True
    assert make_failed_video(record, VideoFault("corrupt", "", backend="pyav"))["backend"] == "pyav"
    question: QuestionRecord = {"question_id": "q", "attempts": 1}
    answer = make_failed_answer(question, QuestionFault("bad-prompt", "x" * 2000))
    assert len(answer["error_message"]) == 1024 and answer["retryable"] is False and answer["question_id"] == "q"


def test_every_class_of_fault_has_an_entry_in_the_table_the_schema_and_the_page():
    tables = (FAULTS, FaultClass, VIDEO_SCHEMA), (QUESTION_FAULTS, QuestionFaultClass, ANSWER_SCHEMA)
    for faults, classes, schema in tables:
        assert list(faults) == list(get_args(classes)) and all(x.meaning and x.remedy for x in faults.values())
        assert schema.field("error_class").metadata[b"meaning"].decode().split() == list(faults)
    text = (ROOT / "pipeline/prune/README.md").read_text()
    rows = re.findall(r"^\| ([a-z-]+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    listed = {name: (meaning, remedy) for name, meaning, remedy in rows if name in FAULTS}
    assert listed == {name: (fault.meaning, fault.remedy) for name, fault in FAULTS.items()}


def test_a_fault_survives_the_way_between_processes():
    fault = VideoFault("timeout", "too\x00slow", stage="decode", backend="pyav", exit_signal=9, attempts=2)
    again = pickle.loads(pickle.dumps(fault))  # noqa: S301 - what multiprocessing does
    assert vars(again) == vars(fault) and str(again) == "timeout: too slow"


def clip(uri: str, start: float | None = None, end: float | None = None) -> int:
    kind = {"start_s": pa.array([start], pa.float64()), "end_s": pa.array([end], pa.float64())}
    return hash_clips(pa.table({"uri": [uri], **kind})).item()


def test_texts_that_differ_have_keys_that_differ():
    texts = [*map(str, range(1000)), "a", "a\0", "\0a", "ä", "a" * 5000]
    keys = hash_texts(pa.array(texts))
    assert len({tuple(key) for key in keys.tolist()}) == len(texts)
    assert (hash_texts(pa.chunked_array([texts[:10], texts[10:]])) == keys).all()
    assert (hash_texts(pa.array(texts).slice(5)) == keys[5:]).all()


def test_a_clip_is_its_uri_and_its_times():
    clips = [("a",), ("b",), ("a", 0.0), ("a", 1.0), ("a", None, 1.0), ("a", 1.0, 1.0), ("a", None, 0.0)]
    assert len({clip(*one) for one in clips}) == len(clips)
    assert clip("a", -0.0) == clip("a", 0.0) and clip("a", 1.0) == clip("a", 1)


def test_keys_are_found_where_they_share_a_half():
    high, low = np.array([1, 5, 5, 5, 9], np.uint64), np.array([7, 1, 2, 4, 7], np.uint64)
    wanted = np.array([[5, 2], [5, 3], [5, 4], [9, 7], [9, 8], [0, 7], [1, 7], [10, 7]], np.uint64)
    assert find(wanted, high, low).tolist() == [2, -1, 3, 4, -1, -1, 0, -1]
    assert find(wanted, high[:0], low[:0]).tolist() == [-1] * 8


def test_the_first_of_equal_keys_is_not_repeated():
    keys = hash_column(pa.chunked_array([["b", "a", "c"], ["a", "d", "b"], ["a"]]))
    assert np.flatnonzero(find_repeated(keys)).tolist() == [3, 5, 6]
    last = np.array([True, True, False, False, False, True, True])
    assert np.flatnonzero(find_repeated(keys, last)).tolist() == [1, 5, 6]
    nothing = hash_column(pa.chunked_array([], pa.string()))
    assert not find_repeated(keys[:1]).any() and find_repeated(nothing).shape == (0,)
