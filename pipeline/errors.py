"""The typed errors of the pipeline, the classes of faults with their remedies, and helpers that word messages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple
from unicodedata import is_normalized, normalize

from gstep.lazy import format_suggestion

_LOOKED_AT = 10_000  # files of a folder that are looked through for a likely one
_FORMS: tuple[Literal["NFC", "NFD"], ...] = ("NFC", "NFD")  # Unicode forms of names: of most systems, and of macOS

FaultClass = Literal[
    "unsupported", "too-short", "corrupt", "timeout", "crash", "out-of-memory", "policy", "io", "own-code", "internal"
]
QuestionFaultClass = Literal[
    "unknown-video",
    "failed-video",
    "corrupt",
    "io",
    "prompt-too-long",
    "bad-prompt",
    "out-of-memory",
    "crash",
    "own-code",
    "internal",
]


class Fault(NamedTuple):
    """The description of a fault class.

    Attributes:
        retryable: True if the machine may be at fault, not the file's content, so that another attempt may succeed.
    """

    meaning: str
    remedy: str
    retryable: bool


_BUG = Fault("a bug", "report it with its message; --retry-failed tries again", True)
_OWN_CODE = Fault(
    "a bug in a method or decoder of your own",
    "correct it at the line that the message names, then --on-changed redo, or --retry-failed where its code stays",
    False,
)
#: The classes of a video's faults; README's table is made of them.
FAULTS: Mapping[FaultClass, Fault] = {
    "unsupported": Fault(
        "no video container, codec, stream or clip that can be read here",
        "do what the message says; or leave out what is no video, correct a clip, or convert the file: "
        "ffmpeg -i IN -c:v libx264 OUT.mp4; then --retry-failed",
        False,
    ),
    "too-short": Fault(
        "the video or clip has fewer frames than the model takes, as a still has",
        "take a longer clip, raise --fps (with another --out), or leave it out; other model families take a still",
        False,
    ),
    "corrupt": Fault("the data is damaged", "fetch or re-encode the file, then --retry-failed", False),
    "timeout": Fault("decoding took longer than --decode-timeout", "raise --decode-timeout, then --retry-failed", True),
    "crash": Fault(
        "the decode process crashed, or the encode process crashed twice",
        "re-encode the file, or try another --decoder with --retry-failed",
        True,
    ),
    "out-of-memory": Fault(
        "beyond --decode-memory, --fetch-memory or the memory of the GPU",
        "raise --decode-memory or --fetch-memory, or free the GPU, then --retry-failed",
        True,
    ),
    "policy": Fault(
        "the video may not be read: its path, its name, or what it would open",
        "add --video-root for a folder or prefix that may be read, rename or leave out the file; then --retry-failed",
        False,
    ),
    "io": Fault(
        "the file is missing, unreadable or could not be fetched",
        "check that it exists and can be read on every node, then --retry-failed",
        True,
    ),
    "own-code": _OWN_CODE,
    "internal": _BUG,
}
#: Classes that count as infrastructure errors: mounts, stores, credentials, and bugs, also of the user's own code.
INFRASTRUCTURE_CLASSES: frozenset[FaultClass] = frozenset({"io", "own-code", "internal"})
#: Classes of bugs, one of which makes the exit code 1.
BUGS = frozenset({"own-code", "internal"})
#: The stages in which running out of memory is a fault of the machine, whose GPU others may fill.
ON_THE_GPU: frozenset[str] = frozenset({"encode", "prune"})
#: The classes of a question's faults. A cache may have grown since, so a missing video is worth another attempt.
QUESTION_FAULTS: Mapping[QuestionFaultClass, Fault] = {
    "unknown-video": Fault("the cache does not hold the video", "prune it into the cache, then --retry-failed", True),
    "failed-video": Fault(
        "the video failed when it was pruned",
        "python -m jobs.inspect says why it failed; mend it and prune again, then --retry-failed",
        True,
    ),
    "corrupt": Fault("a shard of the cache is damaged", "restore the shard, then --retry-failed", True),
    "io": Fault("the cache could not be read", "check that every node sees the cache, then --retry-failed", True),
    "prompt-too-long": Fault(
        "the prompt and its answer do not fit the model",
        "lower --retention-ratio or --max-new-tokens, or use --positions contiguous (each with another --out), or ask "
        "about fewer videos",
        False,
    ),
    "bad-prompt": Fault("no prompt can be made of the question", "correct the question, then --retry-failed", False),
    "out-of-memory": Fault(
        "the model ran out of memory",
        "take GPUs with more memory, then --retry-failed; or lower --retention-ratio (with another --out)",
        True,
    ),
    "crash": Fault(
        "the model's process crashed twice with the question in hand", "look at Ray's logs, then --retry-failed", True
    ),
    "own-code": _OWN_CODE,
    "internal": _BUG,
}


class UsageError(ValueError):
    """The request cannot be carried out as given. No item was processed, and a command exits with code 2."""


class ManifestError(UsageError):
    """The videos to process cannot be listed; for example, a folder is missing or a manifest cannot be read."""


class QuestionsError(UsageError):
    """The questions cannot be read; for example, the file is missing or a row lacks an id, video or prompt."""


class QuestionsChanged(UsageError):  # noqa: N818
    """A question that already has an answer now has another text, other videos, choices or decoding options."""


class NotACache(UsageError):  # noqa: N818
    """The location is not a pruned-token cache: it is missing, holds something else, or has an unknown version."""


class NotResults(UsageError):  # noqa: N818
    """The location does not hold results of jobs.evaluate in a known version."""


class NotAnswers(UsageError):  # noqa: N818
    """The location does not hold answers of jobs.generate in a known version."""


class IdentityMismatch(UsageError):  # noqa: N818
    """A cache or answers were made with another model or other settings, so no rows can be added."""


class SourceChanged(UsageError):  # noqa: N818
    """A cached video has another URI, file, clip or code of the user's decoder now than when it was encoded."""


class CacheLocked(UsageError):  # noqa: N818
    """Another run is writing to the same location."""


class RunFailed(RuntimeError):  # noqa: N818
    """The run stopped early, or too many items failed (TooManyFailed). A command exits with code 1."""


class LimitReached(RunFailed):
    """The run reached ``--max-hours``. Committed rows stay, and rerunning the command resumes."""


class TooManyFailed(RunFailed):
    """A run started from Python finished, but more items failed than allowed, one failed by a bug, or rows are lost.

    Attributes:
        summary: what the function returns when a run succeeds.
    """

    def __init__(self, message: str, summary: object = None) -> None:
        super().__init__(message)
        self.summary = summary


class OwnCodeError(Exception):
    """A user method failed for one video or question. The message names the line of the user's code."""


class MethodFails(RunFailed):
    """A user method would fail for every video, so the run ends. The message names the line of the user's code."""


ShardFault = Literal["damaged", "missing", "footer", "rows", "checksum", "schema", "commit"]


class CorruptShard(RuntimeError):  # noqa: N818
    """A Parquet file of a cache or of answers does not hold what its committed rows say.

    Attributes:
        kind: the name that jobs.verify gives to this damage.
    """

    def __init__(self, message: str, kind: ShardFault = "damaged") -> None:
        super().__init__(message)
        self.kind = kind


class UnknownVideo(KeyError):  # noqa: N818
    """The cache has no tokens of this video_id."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class RemovedVideo(UnknownVideo):
    """The video was removed from the cache for good by ``python -m jobs.remove``."""


class FailedVideo(UnknownVideo):
    """The video failed when it was pruned, so the cache has an error row and no tokens."""

    def __init__(self, message: str, fault_class: str) -> None:
        super().__init__(message, fault_class)
        self.fault_class = fault_class


class RatioNotCached(ValueError):  # noqa: N818
    """The cache cannot serve this retention ratio: it is above the stored ratio, or the method is not nested."""


class EvidenceNotCached(ValueError):  # noqa: N818
    """The cache was made without the requested evidence."""


class VideoFault(Exception):  # noqa: N818
    """A fault of a single video. It becomes the error row of this video, and the run continues.

    Attributes:
        message: printable text of at most 1 KB.
        stage: "decode", "encode", "prune" or "write".
        backend: the decoder that was reading the video, or None.
        exit_signal: the signal that ended the decode process, or None.
        attempts: the number of attempts in this run.
    """

    def __init__(
        self,
        fault_class: FaultClass,
        message: str,
        *,
        stage: str = "decode",
        backend: str | None = None,
        exit_signal: int | None = None,
        attempts: int = 1,
    ) -> None:
        """Create the fault. Control characters of ``message`` become spaces, and a message above 1 KB is cut."""
        super().__init__(fault_class, message)
        self.fault_class: FaultClass = fault_class
        self.message = make_printable(message)
        self.stage = stage
        self.backend = backend
        self.exit_signal = exit_signal
        self.attempts = attempts

    @property
    def retryable(self) -> bool:
        """True if another attempt may succeed."""
        return FAULTS[self.fault_class].retryable

    def __str__(self) -> str:
        return f"{self.fault_class}: {self.message}"

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only fields must survive the way between processes
        fields = {name: getattr(self, name) for name in ("stage", "backend", "exit_signal", "attempts")}
        return partial(VideoFault, **fields), (self.fault_class, self.message)


class ReplacedSource(VideoFault):
    """The source of a cached video is no longer the file that its row was made from. The fault class is "io"."""

    def __init__(self, message: str) -> None:
        super().__init__("io", message)


class QuestionFault(Exception):  # noqa: N818
    """A fault of a single question. It becomes the error row of this question, and the run continues.

    Attributes:
        message: printable text of at most 1 KB.
    """

    def __init__(self, fault_class: QuestionFaultClass, message: str) -> None:
        super().__init__(fault_class, message)
        self.fault_class: QuestionFaultClass = fault_class
        self.message = make_printable(message)

    @property
    def retryable(self) -> bool:
        """True if another attempt may succeed."""
        return QUESTION_FAULTS[self.fault_class].retryable

    def __str__(self) -> str:
        return f"{self.fault_class}: {self.message}"


def suggest_file(path: Path) -> str:
    """Suggest an existing file for a path that does not exist, among the first 10,000 names of its folder.

    A name that looks the same, but differs in its Unicode form or blanks, is preferred to a similar name.

    Returns:
        ``" (did you mean NAME?)"``; "" without a suggestion or if the folder cannot be read.
    """
    try:
        names = [entry.name for entry in islice(path.parent.iterdir(), _LOOKED_AT)]
    except OSError:
        return ""
    look = normalize_look(path.name)
    twin = next((name for name in names if normalize_look(name) == look), None)
    return (
        format_suggestion(path.name, names)
        if twin is None
        else f" (did you mean {describe_similar_name(path.name, twin)}?)"
    )


def suggest_unicode_form(path: str) -> str:
    """Suggest the file that exists under another Unicode form (NFC or NFD) of a path that does not exist.

    An ASCII path costs no access to the disk; any other path costs up to four.

    Returns:
        ``" (did you mean PATH ...?)"``, or "" if there is no such file.
    """
    folder, name = os.path.split(path)
    for form in () if path.isascii() else _FORMS:
        for other in (os.path.join(folder, normalize(form, name)), normalize(form, path)):  # noqa: PTH118
            if other != path and os.path.exists(other):  # noqa: PTH110 - as above
                return f" (did you mean {describe_similar_name(path, other)}?)"
    return ""


def normalize_look(name: str) -> str:
    """Normalize a file name (NFKC, stripped, "/" for a backslash), so that names that look the same become equal."""
    return normalize("NFKC", name).strip().replace("\\", "/")


def describe_similar_name(wrong: str, near: str) -> str:
    """Return the name ``near``, with an explanation of the invisible difference if it looks the same as ``wrong``."""
    if normalize_look(wrong) != normalize_look(near):
        return near
    if normalize("NFC", wrong) != normalize("NFC", near):
        return f"{near} (it differs only by blanks, slashes or characters that look alike: {near!a})"
    form = next((form for form in _FORMS if is_normalized(form, near)), "mixed")
    return f"{near} (it differs only by its Unicode form, {form}: {near!a})"


def format_count(n: int, noun: str) -> str:
    """Format a number with its noun: ``"1 video"``, ``"2,000 videos"``."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{n:,} {noun if n == 1 else plural}"


def list_first_names(names: Sequence[str], total: int, limit: int = 3) -> str:
    """List the first ``limit`` names and the number of names left out of ``total``: ``"a, b, c and 2 more"``.

    Control characters become spaces, and the list of names is cut after 1 KB.
    """
    examples = names[:limit]
    more = total - len(examples)
    return make_printable(", ".join(examples)) + (f" and {more:,} more" if more else "")


def make_printable(message: str, limit: int = 1024) -> str:
    """Replace control characters of a message by spaces, strip it, and cut it to ``limit`` bytes of UTF-8.

    A message that is cut ends with "...".
    """
    clean = "".join(c if c.isprintable() else " " for c in message).strip()
    data = clean.encode("utf-8", "replace")
    return clean if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


@contextmanager
def convert_usage_errors() -> Iterator[None]:
    """Convert a ValueError (such as ModelError) inside this context into a UsageError with the same message.

    A UsageError passes unchanged.
    """
    try:
        yield
    except UsageError:  # it is a ValueError too, and its class says more
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def convert_store_usage_errors() -> Iterator[None]:
    """Convert an OSError inside this context into a UsageError that names the file or the store."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or 'the store'}: {error.strerror or error}") from error
