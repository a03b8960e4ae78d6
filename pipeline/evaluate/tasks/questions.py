"""A request of lmms-eval as a question of jobs.generate, and the cached video that its document is about.

The prompt stays as it came. The video follows from the document's fields alone, as no file has to be there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from gstep.language import Decoding
from pipeline.cache.near_ids import did_you_mean_id
from pipeline.errors import UsageError
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, derive_seed
from pipeline.inputs.listings import VIDEO_SUFFIXES
from pipeline.rows import JsonObject

MAX_NEW_TOKENS = 1024  # the default of lmms-eval's llava_onevision for tasks without a setting
# lmms-eval gives this stop text to every task that has none of its own. Its models do not stop there: simple classes
# of Qwen remove it, and the classes of LLaVA-OneVision and of chat models ignore all stop texts.
_EVERY_TASKS = "\n\n"
LMMS_SCHEMA = pa.schema([*QUESTION_SCHEMA, pa.field("task", pa.string()), pa.field("doc_id", pa.int64())])
_KNOWN_NAMES = ("max_new_tokens", "temperature", "top_p", "top_k", "do_sample", "num_beams", "until")


@dataclass(frozen=True)
class LmmsQuestion:
    """A question as a task asks it.

    Attributes:
        key: what its document calls the video.
        until: the reply ends before the first of these texts.
    """

    question_id: str
    task: str
    doc_id: int
    key: str
    prompt: str
    decoding: Decoding
    until: tuple[str, ...]

    @property
    def where(self) -> str:
        """The task and document, for error messages."""
        return f"task {self.task}, document {self.doc_id}"

    def row(self, video_id: str, system: str | None) -> JsonObject:
        """Return the question as a row of LMMS_SCHEMA."""
        return {
            "question_id": self.question_id,
            "video_ids": [video_id],
            "prompt": self.prompt,
            "decoding": AnswerMode(self.decoding, "generate", system).describe(),
            "task": self.task,
            "doc_id": self.doc_id,
        }


def cut_reply(answer: str, stops: Iterable[str]) -> str:
    """Return an answer up to the first of the texts that end it."""
    return min((answer.partition(stop)[0] for stop in stops), key=len, default=answer)


def make_unique(names: Iterable[str]) -> list[str]:
    """Make names unique: append a number to a repeated one, because a task may ask a question several times."""
    counts = Counter[str]()
    names_out = []
    for name in names:
        names_out.append(f"{name}#{counts[name]}" if counts[name] else name)
        counts[name] += 1
    return names_out


def make_question(
    question_id: str, task: str, doc_id: int, key: str, prompt: str, settings: Mapping[str, Any], seed: int = 0
) -> LmmsQuestion:
    """Convert a request of lmms-eval to a question.

    Args:
        key: the text by which the document names its video.
        settings: the request's ``generation_kwargs``.
        seed: of the run; the question's own seed follows from it and ``question_id``.

    Raises UsageError for settings that are not understood.
    """
    decoding, stops = read_settings(task, settings, derive_seed(seed, question_id))
    return LmmsQuestion(question_id, task, doc_id, key, prompt, decoding, stops)


def read_settings(task: str, settings: Mapping[str, Any], seed: int = 0) -> tuple[Decoding, tuple[str, ...]]:
    """Convert a task's ``generation_kwargs`` to options of decoding, with ``seed``, and the texts that end a reply.

    Raises UsageError for settings that are not understood.
    """
    try:
        return _decoding(settings, seed), _stops(settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"task {task}: generation_kwargs {dict(settings)}: {error}") from error


def _decoding(settings: Mapping[str, Any], seed: int) -> Decoding:
    """Convert a task's settings to decoding options: greedy without ``do_sample`` or a temperature above 0.

    ``do_sample`` decides if both are there; its temperature is 1 by default. Raises ValueError for an unknown setting,
    or several beams.
    """
    given_settings = {name: value for name, value in settings.items() if value is not None}
    if unknown := [name for name in given_settings if name not in _KNOWN_NAMES]:
        raise ValueError(f"{', '.join(unknown)}: not among {', '.join(_KNOWN_NAMES)}; leave it out with --gen_kwargs")
    if given_settings.get("num_beams", 1) != 1:
        raise ValueError("num_beams must be 1: say --gen_kwargs num_beams=1")
    drawn = bool(given_settings.get("do_sample", given_settings.get("temperature", 0) > 0))
    return Decoding(
        max_new_tokens=int(given_settings.get("max_new_tokens", MAX_NEW_TOKENS)),
        temperature=float(given_settings.get("temperature", 1.0)) if drawn else 0.0,
        top_p=float(given_settings.get("top_p", 1.0)),
        top_k=int(given_settings.get("top_k", 0)),
        seed=seed,
    )


def _stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a task's stop strings without the string that lmms-eval adds to every task. Raises ValueError."""
    stops = settings.get("until") or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"until must be texts, got {stops!r}")
    return tuple(stop for stop in stops if stop and stop != _EVERY_TASKS)


#: Fields that name a video: of VideoME, LongVideoBench, MLVU, EgoSchema, and MVBench, whose tasks have a folder each.
FIELDS = ("videoID", "video_path", "video_name", "video_idx", "video")


def video_key(doc: JsonObject, template: str | None = None, folder: str | None = None) -> str:
    """Return the video that a document names: a path or the end of a path, with or without the suffix.

    Args:
        template: the id with fields of the document in braces, for tasks that name videos in another way.
        folder: the task's folder of videos, for the field "video" alone; file names repeat between folders.

    Raises UsageError if the document has no field that names a video, or not the fields of the template.
    """
    if template is not None:
        try:
            return template.format_map(doc)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UsageError(
                f"video_id={template} is not made of fields of the document ({error}): it has {', '.join(doc)}"
            ) from error
    for name in FIELDS:
        value = doc.get(name)
        if isinstance(value, str) and value:
            return f"{folder}/{value}" if folder and name == "video" else value
    raise UsageError(
        f"no field names a video ({', '.join(FIELDS)} were looked for, it has {', '.join(doc)}): say how with "
        "video_id=TEMPLATE in --model_args, e.g. video_id={clip}.mp4"
    )


class CachedIds:
    """The ids of a cache, by the ends of their paths; ``failed`` has the error class of those that failed there.

    An id is a path below the folder that was pruned, which may be the one that a task's paths start from or any above
    it. So a key means the id that equals it, or ends with "/" and it; either without its suffix.
    """

    def __init__(self, ok: Iterable[str], failed_ids: Mapping[str, str]) -> None:
        """Index the ids by file name: ``ok``, the ids with tokens, and ``failed_ids``, with their error class."""
        self.failed = failed_ids
        self._ids = {*ok, *failed_ids}
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for video_id in sorted(self._ids):
            for name in {PurePosixPath(path).name for path in _paths(video_id)}:
                self._by_name[name].append(video_id)

    def near(self, key: str) -> str:
        """Return ``"; did you mean A?"`` with the ids nearest to a key that means none, or ""."""
        return did_you_mean_id(key, pa.chunked_array([sorted(self._ids)], pa.string()))

    def find(self, key: str) -> str | None:
        """Return the id of the cached video that a key means, or None. Raise UsageError if it may be several.

        A failed id counts only if no id with tokens fits.
        """
        path = str(PurePosixPath(key))
        ids = [key] if key in self._ids else self._find_by_ending(path)
        good = [video_id for video_id in ids if video_id not in self.failed] or ids
        if len(good) > 1:
            raise UsageError(
                f"{key!r} may be {' or '.join(map(repr, good[:3]))}: say which with video_id=TEMPLATE in --model_args, "
                "e.g. video_id=data/{videoID}.mp4"
            )
        return good[0] if good else None

    def _find_by_ending(self, ending: str) -> list[str]:
        """Return the ids of which a path ends with ``ending``."""
        return [
            video_id
            for video_id in self._by_name.get(PurePosixPath(ending).name, ())
            if any(path == ending or path.endswith(f"/{ending}") for path in _paths(video_id))
        ]


def _paths(video_id: str) -> tuple[str, ...]:
    """Return the id, and the id without the suffix of a video file."""
    bare, dot, suffix = video_id.rpartition(".")
    return (video_id, bare) if bare and f"{dot}{suffix}".lower() in VIDEO_SUFFIXES else (video_id,)
