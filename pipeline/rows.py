"""The typed datum: one record a video, one a question, from the first stage to the Parquet file.

A record gains keys on its way. An absent key is a null in Parquet; the columns and their meaning are in
``pipeline.cache.schema.VIDEO_SCHEMA`` and ``pipeline.generate.answers.ANSWER_SCHEMA``, which a test holds against these
types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, TypeVar, cast

from pipeline.errors import (
    INFRASTRUCTURE_CLASSES,
    ON_THE_GPU,
    FaultClass,
    QuestionFault,
    QuestionFaultClass,
    VideoFault,
    printable,
)

Status = Literal["ok", "failed", "removed"]
#: Columns of the videos table that hold JSON.
JSON_COLUMNS: tuple[Literal["manifest", "model_extra", "runtime"], ...] = ("manifest", "model_extra", "runtime")
#: The beginning of a video's ``backend_note`` where the decoder that was asked for served all the same.
BY_DECODING = "index made by decoding"
#: The beginning of the part of it that says that the film continues in a stream that was not read.
PARTLY_READ = "only a part was read"
#: The beginning of the last part of a video's ``backend_note``, which says that its frame size changes.
SIZES_DIFFER = "frame sizes differ"
#: A JSON value, and a JSON object that is only read.
Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]
R = TypeVar("R", bound=Mapping[str, Any])


class ManifestRow(TypedDict):
    """A video that a user named, as ``pipeline.inputs`` found it: the row of the manifest.

    ``uri`` is where the file is read; ``policy`` says why it must not be, and then nothing opens it. ``size`` is what
    a listing on S3 or the manifest's size_bytes said; ``manifest`` is JSON of the columns that are only carried
    along. A video in an archive has the uri ARCHIVE#NAME, and ``source_offset`` is where the archive's form finds
    it. ``fault`` ("class: message") says what is known to be wrong with it. ``mark`` is the ``mark_key`` by which a
    listing or an index tells another content; each of an archive's videos has its own, or the archive's.
    """

    video_id: str
    uri: str
    start_s: NotRequired[float | None]
    end_s: NotRequired[float | None]
    manifest: NotRequired[str | None]
    policy: NotRequired[str | None]
    size: NotRequired[int | None]
    source_offset: NotRequired[int | None]
    fault: NotRequired[str | None]
    mark: NotRequired[int | None]


class TodoRow(ManifestRow):
    """A video that is to be processed, and which attempt this is."""

    attempts: int


def todo_row(
    video_id: str,
    uri: str,
    start_s: float | None = None,
    end_s: float | None = None,
    size: int | None = None,
    attempts: int = 1,
    source_offset: int | None = None,
) -> TodoRow:
    """Return the row of a video that may be read: without a policy, a known fault, a mark and carried columns."""
    row: ManifestRow = {"video_id": video_id, "uri": uri, "start_s": start_s, "end_s": end_s, "size": size}
    row |= {"manifest": None, "policy": None, "source_offset": source_offset, "fault": None, "mark": None}
    return {**row, "attempts": attempts}


class VideoRecord(TypedDict, total=False):
    """A row of the videos table, complete or on its way there: each stage adds its keys.

    A reader sees every column, None where it is null: of a failed video everything from ``token_shard`` on, whatever
    its type says here, and of an ok one what the source or the method does not have. ``manifest``, ``runtime`` and
    ``model_extra`` are JSON, text in the table and decoded in what TokenCache gives.
    """

    video_id: str
    run_id: str
    uri: str
    start_s: float | None
    end_s: float | None
    source_size: int | None
    source_hash: str | None
    status: Status
    error_class: FaultClass
    error_stage: str
    error_message: str
    error_signal: int | None
    retryable: bool
    attempts: int
    backend: str | None
    backend_version: str | None
    backend_note: str | None
    codec: str | None
    decode_warnings: int | None
    color_transfer: str | None
    sample_aspect_ratio: str | None
    uneven_positions: int | None
    shared_positions: int | None
    token_shard: str
    first_row_group: int
    row_counts: list[int]
    footer_hash: str
    checksum: str
    retention_ratio: float
    nested: bool
    n_tokens: int
    n_total: int
    n_frames: int
    tokens_per_frame: int
    hidden_size: int
    frame_indices: list[int]
    timestamps: list[float]
    fps: float
    duration_s: float | None
    source_frames: int | None
    clip_frames: int
    n_repeated: int
    source_width: int
    source_height: int
    width: int
    height: int
    kept_per_frame: list[int]
    temporal_density: list[float] | None
    decode_s: float
    encode_s: float
    prune_s: float
    write_s: float | None
    manifest: Any
    runtime: Any
    model_extra: Any
    id_high: int
    id_low: int
    clip_key: int
    rewritten: int
    earlier_attempts: int
    tie_break: int
    token_codec: str | None
    token_block: int | None
    tower_hash: str | None
    source_shard: str | None
    source_offset: int | None
    clip_fps: float | None
    source_mark: int | None
    source_sample: int | None


#: The same as a reader sees it.
VideoRow = VideoRecord


class QuestionRecord(TypedDict, total=False):
    """A question to be asked: what a row of the questions file asks, under which pruning and code, and the attempt."""

    question_id: str
    video_ids: list[str]
    prompt: str
    choices: list[str]
    target: str
    decoding: str
    pruning: str
    method_code: str
    attempts: int


class AnswerRecord(QuestionRecord, total=False):
    """A row of the answers, complete or on its way there: each step adds its keys."""

    run_id: str
    status: Status
    error_class: QuestionFaultClass
    error_message: str
    retryable: bool
    answer: str
    choice: int
    choice_scores: list[float]
    choice_tokens: list[int]
    choice_normalised: int
    finish: str
    n_prompt_tokens: int
    n_visual_tokens: int
    n_total: int
    n_kept: int
    kept_per_frame: list[int]
    n_new_tokens: int
    retention_ratio: float
    decode_warnings: int
    load_s: float
    prefill_s: float
    decode_s: float
    batch_size: int


def without_nulls(row: Mapping[str, Any], kind: type[R]) -> R:
    """Convert a row that Arrow read to a record of type ``kind``: nulls become absent keys."""
    return cast(R, {name: value for name, value in row.items() if value is not None})


def failed_video(record: VideoRecord, fault: VideoFault) -> VideoRecord:
    """Return the error row of a video: a copy of its record so far, with the fault.

    The attempts of the fault in this run are added to the attempts before it.
    """
    row: VideoRecord = {
        **record,
        "status": "failed",
        "error_class": fault.fault_class,
        "error_stage": fault.stage,
        "error_message": fault.message,
        "retryable": fault.retryable,
        "attempts": record["attempts"] + fault.attempts - 1,
    }
    if fault.exit_signal is not None:
        row["error_signal"] = fault.exit_signal
    if fault.backend is not None:
        row["backend"] = fault.backend
    return row


def may_succeed_elsewhere(record: VideoRecord) -> bool:
    """Return True if the video failed in a way that may be the fault of the machine it was on."""
    return record["status"] == "failed" and record["retryable"]


def is_infrastructure_error(record: VideoRecord) -> bool:
    """Return True if the video failed by an infrastructure error: a mount, a store, a bug, a GPU full of other work."""
    if record["status"] == "ok":
        return False
    on_the_gpu = record["error_class"] == "out-of-memory" and record["error_stage"] in ON_THE_GPU
    return record["error_class"] in INFRASTRUCTURE_CLASSES or on_the_gpu


def removed_answer(question: QuestionRecord | AnswerRecord, reason: str) -> AnswerRecord:
    """Return the row that stands for a question about a removed video: its keys and the reason, and none of its texts.

    ``attempts`` stays, since it decides between the rows of a question.
    """
    row: AnswerRecord = {
        "question_id": question["question_id"],
        "video_ids": question["video_ids"],
        "prompt": "",
        "status": "removed",
        "error_message": printable(reason),
        "attempts": question["attempts"],
    }
    for name in ("pruning", "method_code"):
        if name in question:
            row[name] = question[name]
    return row


def failed_answer(question: QuestionRecord | AnswerRecord, fault: QuestionFault) -> AnswerRecord:
    """Return the error row of a question: a copy with the fault."""
    return {
        **cast(AnswerRecord, question),
        "status": "failed",
        "error_class": fault.fault_class,
        "error_message": fault.message,
        "retryable": fault.retryable,
    }
