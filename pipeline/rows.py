"""The typed records of videos and questions, which travel from the first stage of a run to the Parquet files.

Each stage adds keys to a record. An absent key becomes a null in Parquet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar, cast, get_type_hints

from pipeline.errors import (
    INFRASTRUCTURE_CLASSES,
    ON_THE_GPU,
    FaultClass,
    QuestionFault,
    QuestionFaultClass,
    VideoFault,
    format_count,
    make_printable,
)

Status = Literal["ok", "failed", "removed"]
#: Columns of the videos table that hold JSON.
JSON_COLUMNS: tuple[Literal["manifest", "model_extra", "runtime"], ...] = ("manifest", "model_extra", "runtime")
#: The beginning of a video's ``backend_note`` where the decoder that was asked for served all the same.
BY_DECODING = "index made by decoding"
#: The beginning of the part of it that says that the film continues in a stream that was not read.
READ_IN_PART = "only a part was read"
#: The beginning of the last part of a video's ``backend_note``, which says that its frame size changes.
SIZES_DIFFER = "frame sizes differ"
#: A JSON value, and a JSON object that is only read.
Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]
JsonObject = Mapping[str, Json]
R = TypeVar("R", bound=Mapping[str, Any])


class ManifestRow(TypedDict):
    """A video that the user named.

    Attributes:
        video_id: the id, unique in the list.
        uri: the path or URL of the video's file; ARCHIVE#NAME for a video in an archive.
        start_s, end_s: the clip in seconds; None for the start or end of the video.
        manifest: JSON of the other columns of the manifest, or of the members that an archive has beside the video.
        policy: the reason why nothing may open the file; None if it may be read.
        size: the size of the video in bytes, from a store's listing, the manifest's size_bytes, or the index of a tar
            or zip. None if none of them states it, as for files on disk and for rows of a table.
        source_offset: the position of a video in its archive: in a tar, the first byte of the member's data; in a zip,
            the first byte of the member's header; in a table, the row number. None for a separate file.
        fault: "class: message" of a known fault of the video, found before it is decoded; None without a fault.
        mark: the ``hash_mark`` of a text that changes with the content: the ETag or hash of an object, the CRC-32 of a
            zip's member, or the mark of a whole tar. None if no listing or index states one.
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
    """A video that this run will process.

    Attributes:
        attempts: the number of this attempt, counted over all runs from 1.
    """

    attempts: int


def make_todo_row(
    video_id: str,
    uri: str,
    start_s: float | None = None,
    end_s: float | None = None,
    size: int | None = None,
    attempts: int = 1,
    source_offset: int | None = None,
) -> TodoRow:
    """Create the row of a video that may be read, with None for policy, known fault, mark and carried columns."""
    row: ManifestRow = {"video_id": video_id, "uri": uri, "start_s": start_s, "end_s": end_s, "size": size}
    row |= {"manifest": None, "policy": None, "source_offset": source_offset, "fault": None, "mark": None}
    return {**row, "attempts": attempts}


class Column(NamedTuple):
    """A column of the videos table, attached to a key of ``VideoRecord`` as its annotation.

    Attributes:
        kind: the name of its Arrow type, or "list<NAME>" for a list of that type.
        meaning: the description that files of the table carry in their metadata.
        decoded: True if the decode process determines the value.
        may_be_unstated: True if the decode process may send null, because a video file need not state the value or
            because it depends on the options. The decode process always sends the other ``decoded`` values.
        since: the date from which on files have the column; "" for a column that every file has.
    """

    kind: str
    meaning: str
    decoded: bool = False
    may_be_unstated: bool = False
    nullable: bool = True
    since: str = ""


class VideoRecord(TypedDict, total=False):
    """A row of the videos table, complete or still in progress: each stage adds its keys.

    ``pipeline.cache.schema.VIDEO_SCHEMA`` is made from this list, in its order.

    A reader sees every column, with None for null. In an ok row, only the columns about errors and the columns whose
    type allows None may be null. In a failed row, every column that decoding, encoding or writing adds may be null,
    whatever its type is here. ``manifest``, ``runtime`` and ``model_extra`` are JSON: text in the table, decoded in the
    rows that TokenCache returns.
    """

    # Columns for the rule of the live row, resume and the summary: adjacent, so that one read gets them all.
    video_id: Annotated[str, Column("string", "the id in the manifest", nullable=False)]
    status: Annotated[Status, Column("string", "'ok', 'failed' or 'removed'", nullable=False)]
    attempts: Annotated[int, Column("int32", "how often this video was tried, over all runs", nullable=False)]
    run_id: Annotated[str, Column("string", "the run that wrote this row: runs/<run_id>.json", nullable=False)]
    id_high: Annotated[int, Column("uint64", "the first half of the id's key (blake2b of 16 bytes)")]
    id_low: Annotated[int, Column("uint64", "its second half; the rows of sorted files are in the order of both")]
    clip_key: Annotated[int, Column("uint64", "a hash of uri, start_s and end_s")]
    rewritten: Annotated[int, Column("int32", "how often the tokens moved to another shard")]
    earlier_attempts: Annotated[int, Column("int32", "attempts on another file or clip under this id")]
    tie_break: Annotated[
        int, Column("uint64", "a hash of the run and the token shard: of rows alike, the smallest counts")
    ]
    source_size: Annotated[int | None, Column("int64", "bytes of the source file", decoded=True)]
    n_tokens: Annotated[int, Column("int32", "tokens stored, B")]
    n_total: Annotated[int, Column("int32", "tokens before pruning, M = T*N")]
    hidden_size: Annotated[int, Column("int32", "D")]
    decode_warnings: Annotated[
        int | None, Column("int32", "warnings the decoder printed: frames may be damaged", decoded=True)
    ]
    backend_note: Annotated[
        str | None,
        Column(
            "string",
            "why the decoder tried first did not serve; what was not read; whether frame sizes differ; else empty",
            decoded=True,
        ),
    ]
    color_transfer: Annotated[
        str | None,
        Column(
            "string",
            "FFmpeg's name of the source's transfer function; null: not stated",
            decoded=True,
            may_be_unstated=True,
            since="2026-11-26",
        ),
    ]
    sample_aspect_ratio: Annotated[
        str | None,
        Column(
            "string",
            "W:H of the source's pixels as shown; null: not stated",
            decoded=True,
            may_be_unstated=True,
            since="2026-11-26",
        ),
    ]
    uneven_positions: Annotated[
        int | None,
        Column("int32", "patches not where positions in time put them; null: none have times", since="2026-11-26"),
    ]
    shared_positions: Annotated[
        int | None,
        Column("int32", "patches at the position in time of the one before; null likewise", since="2026-11-26"),
    ]
    error_class: Annotated[
        FaultClass,
        Column("string", "unsupported too-short corrupt timeout crash out-of-memory policy io own-code internal"),
    ]
    error_stage: Annotated[str, Column("string", "decode, encode, prune or write")]
    decode_s: Annotated[float, Column("float64", "seconds", decoded=True)]
    encode_s: Annotated[float, Column("float64", "seconds")]
    prune_s: Annotated[float, Column("float64", "seconds")]
    write_s: Annotated[float | None, Column("float64", "seconds, the video's share of its shard")]
    frames_by_rate: Annotated[
        int | None,
        Column(
            "int32",
            "frames that the rate of --fps gives of the clip, where a limit made them fewer (--max-frames) or more "
            "(the model's least number); 0: no limit changed them; null: not sampled by --fps, or an older version",
            decoded=True,
            may_be_unstated=True,
            since="2026-11-29",
        ),
    ]
    token_shard: Annotated[str, Column("string", "file below the cache that holds the tokens")]
    # What readers of single videos need.
    uri: Annotated[str, Column("string", "where the video was read", nullable=False)]
    start_s: Annotated[float | None, Column("float64", "start of the clip in seconds; null for the beginning")]
    end_s: Annotated[float | None, Column("float64", "end of the clip in seconds; null for the end")]
    source_hash: Annotated[str | None, Column("string", "algorithm:hex of the whole source file", decoded=True)]
    error_message: Annotated[str, Column("string", "at most 1 KB, printable")]
    error_signal: Annotated[int | None, Column("int32", "the signal that ended the decode process")]
    retryable: Annotated[bool, Column("bool", "whether another attempt may succeed")]
    backend: Annotated[str | None, Column("string", "the decoder that served, or failed", decoded=True)]
    backend_version: Annotated[str | None, Column("string", "its version", decoded=True)]
    codec: Annotated[str | None, Column("string", "video codec of the source", decoded=True)]
    first_row_group: Annotated[int, Column("int32", "the video's first row group in it")]
    row_counts: Annotated[list[int], Column("list<int32>", "rows of each of the video's row groups")]
    footer_hash: Annotated[str, Column("string", "algorithm:hex of the token shard's Parquet footer")]
    checksum: Annotated[
        str, Column("string", "algorithm:hex of the video's token bytes, in order of selection, then each level's")
    ]
    retention_ratio: Annotated[float, Column("float64", "nominal share of tokens stored")]
    nested: Annotated[bool, Column("bool", "whether smaller ratios are prefixes of the stored rows")]
    n_frames: Annotated[
        int,
        Column(
            "int32",
            "T, steps in time of the tokens: sampled frames, or temporal patches of two sampled frames on Qwen; the "
            "length of frame_indices is the number of sampled frames",
        ),
    ]
    tokens_per_frame: Annotated[int, Column("int32", "N, tokens of each of the n_frames steps in time")]
    frame_indices: Annotated[
        list[int],
        Column("list<int64>", "the numbers of the sampled frames in the source; repeats where it has too few"),
    ]
    timestamps: Annotated[
        list[float], Column("list<float64>", "seconds of each sampled frame from the start of the source")
    ]
    fps: Annotated[
        float,
        Column(
            "float64",
            "frames a second of the source file, on average by its timestamps; not the rate of sampling, which is the "
            "length of frame_indices / clip_frames * (clip_fps, or fps where that is null)",
            decoded=True,
        ),
    ]
    duration_s: Annotated[float | None, Column("float64", "seconds of the source", decoded=True)]
    source_frames: Annotated[int | None, Column("int64", "frames of the source", decoded=True)]
    clip_frames: Annotated[int, Column("int64", "frames of it inside [start_s, end_s)", decoded=True)]
    n_repeated: Annotated[int, Column("int32", "sampled frames that repeat another one", decoded=True)]
    source_width: Annotated[
        int, Column("int32", "pixels stored in a row as shown; sample_aspect_ratio stretches nothing", decoded=True)
    ]
    source_height: Annotated[int, Column("int32", "rows of pixels as shown", decoded=True)]
    width: Annotated[int, Column("int32", "pixels the encoder saw")]
    height: Annotated[int, Column("int32", "pixels the encoder saw")]
    kept_per_frame: Annotated[
        list[int], Column("list<int32>", "stored tokens of each of the n_frames steps in time; 0 is legal")
    ]
    temporal_density: Annotated[list[float] | None, Column("list<float32>", "normalised temporal density, Eq. (7)")]
    manifest: Annotated[Any, Column("string", "JSON of the manifest's other columns")]
    runtime: Annotated[Any, Column("string", "JSON: device, dtype and attention kernel of the encoder")]
    model_extra: Annotated[Any, Column("string", "JSON of what this model family needs besides (grids, patch times)")]
    token_codec: Annotated[str | None, Column("string", "how the tokens are stored; null for bfloat16 numbers")]
    token_block: Annotated[int | None, Column("int32", "numbers that share a scale of that codec")]
    tower_hash: Annotated[
        str | None, Column("string", "algorithm:hex of the vision encoder's weights; null where not known")
    ]
    source_shard: Annotated[str | None, Column("string", "the archive that the video's file lies in")]
    source_offset: Annotated[int | None, Column("int64", "the file's first byte in it")]
    clip_fps: Annotated[
        float | None,
        Column(
            "float64",
            "frames a second of the source within the clip; null where an older rule took the frames",
            decoded=True,
            since="2026-11-26",
        ),
    ]
    source_mark: Annotated[
        int | None,
        Column("uint64", "a hash of the file's ETag, CRC-32 or time of change, whichever is known", since="2026-11-27"),
    ]
    source_sample: Annotated[
        int | None,
        Column(
            "uint64",
            "a hash of the file's size and of 16 KiB at its start, middle and end",
            decoded=True,
            since="2026-11-27",
        ),
    ]


VIDEO_COLUMNS: Mapping[str, Column] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(VideoRecord, include_extras=True).items()
}
#: The same as a reader sees it.
VideoRow = VideoRecord


def compute_sampled_fps(row: VideoRow) -> float | None:
    """Compute the sampled frames per second of an ok video's clip; None without a frame rate or frames."""
    fps = row.get("clip_fps") or row["fps"]
    return len(row["frame_indices"]) / row["clip_frames"] * fps if fps and row["clip_frames"] else None


def format_rate(fps: float | None) -> str:
    """Format a frame rate with up to two decimals, or two significant digits below 0.1; None becomes "unknown"."""
    if fps is None:
        return "unknown"
    return f"{fps:.2g}" if fps < 0.1 else f"{fps:.2f}".rstrip("0").rstrip(".")


def describe_frames(row: VideoRow) -> str:
    """Describe the frame rates and the number of frames of an ok video in one line.

    For example: ``"source fps 25, sampled at 0.27 fps, 32 frames in 16 temporal patches"``. Patches are left out if
    each holds one frame. "on average" follows a source rate that differs from the clip's.
    """
    n_sampled, n_steps = len(row["frame_indices"]), row["n_frames"]
    # A clip of which the rate differs from that of the whole file lies in a file whose rate varies.
    varies = " on average" if row.get("clip_fps") not in (None, row["fps"]) else ""
    patches = f" in {format_count(n_steps, 'temporal patch')}" if n_sampled > n_steps else ""
    rates = f"source fps {format_rate(row['fps'])}{varies}, sampled at {format_rate(compute_sampled_fps(row))} fps"
    return f"{rates}, {format_count(n_sampled, 'frame')}{patches}"


class QuestionRecord(TypedDict, total=False):
    """A question to be answered: the row of the questions file, its pruning and method code, and the attempt."""

    question_id: str
    video_ids: list[str]
    prompt: str
    conversation: str
    choices: list[str]
    target: str
    decoding: str
    pruning: str
    method_code: str
    attempts: int


class AnswerRecord(QuestionRecord, total=False):
    """A row of the answers table, complete or still in progress: each step adds its keys."""

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


def drop_nulls(row: Mapping[str, Any], kind: type[R]) -> R:
    """Copy a row as a record of type ``kind``, without None values."""
    return cast(R, {name: value for name, value in row.items() if value is not None})


def make_failed_video(record: VideoRecord, fault: VideoFault) -> VideoRecord:
    """Create the error row of a video: a copy of its record so far, with the class, stage and message of the fault.

    ``fault.attempts`` counts the attempts of this run, the first of which is already in ``record["attempts"]``; the
    others are added.
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
    """Return True if the video failed with a retryable fault, which may be its machine's."""
    return record["status"] == "failed" and record["retryable"]


def is_infrastructure_error(record: VideoRecord) -> bool:
    """Return True if the video failed as io, own-code or internal, or as out-of-memory on a GPU."""
    if record["status"] == "ok":
        return False
    on_the_gpu = record["error_class"] == "out-of-memory" and record["error_stage"] in ON_THE_GPU
    return record["error_class"] in INFRASTRUCTURE_CLASSES or on_the_gpu


def make_removed_answer(question: QuestionRecord | AnswerRecord, reason: str) -> AnswerRecord:
    """Create the row that replaces a question about a removed video: its keys and the reason, without its texts."""
    row: AnswerRecord = {
        "question_id": question["question_id"],
        "video_ids": question["video_ids"],
        "prompt": "",
        "status": "removed",
        "error_message": make_printable(reason),
        "attempts": question["attempts"],
    }
    for name in ("pruning", "method_code"):
        if name in question:
            row[name] = question[name]
    return row


def make_failed_answer(question: QuestionRecord | AnswerRecord, fault: QuestionFault) -> AnswerRecord:
    """Create the error row of a question: a copy of ``question`` with the fault's class, message and retryability."""
    return {
        **cast(AnswerRecord, question),
        "status": "failed",
        "error_class": fault.fault_class,
        "error_message": fault.message,
        "retryable": fault.retryable,
    }
