"""Converts requests of lmms-eval to questions of jobs.generate, and finds the cached video of a document."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from gstep.language import Decoding
from pipeline.cache.near_ids import suggest_ids
from pipeline.errors import UsageError
from pipeline.generate.questions import QUESTION_SCHEMA, AnswerMode, derive_seed
from pipeline.inputs.listings import VIDEO_SUFFIXES
from pipeline.rows import JsonObject

MAX_NEW_TOKENS = 1024  # the default of lmms-eval's llava_onevision for tasks without a setting
# lmms-eval gives this stop text to every task that has none of its own. Its models do not stop there: the simple
# classes of Qwen remove it, and the classes of LLaVA-OneVision and of chat models ignore all stop texts.
_EVERY_TASKS = "\n\n"
LMMS_SCHEMA = pa.schema([*QUESTION_SCHEMA, pa.field("task", pa.string()), pa.field("doc_id", pa.int64())])
_KNOWN_NAMES = ("max_new_tokens", "temperature", "top_p", "top_k", "do_sample", "num_beams", "until")


@dataclass(frozen=True)
class LmmsQuestion:
    """A question of a task of lmms-eval; ``key`` names its video, and the reply ends before the first of ``until``."""

    question_id: str
    task: str
    doc_id: int
    key: str
    prompt: str
    decoding: Decoding
    until: tuple[str, ...]

    @property
    def where(self) -> str:
        """The task and document number, for error messages."""
        return f"task {self.task}, document {self.doc_id}"

    def row(self, video_id: str, system: str | None) -> JsonObject:
        """Return the question about a cached video as a row of LMMS_SCHEMA."""
        return {
            "question_id": self.question_id,
            "video_ids": [video_id],
            "prompt": self.prompt,
            "decoding": AnswerMode(self.decoding, "generate", system).describe(),
            "task": self.task,
            "doc_id": self.doc_id,
        }


def cut_reply(answer: str, stops: Iterable[str]) -> str:
    """Return the part of an answer before the earliest of the stop texts in it; the whole answer if it has none."""
    return min((answer.partition(stop)[0] for stop in stops), key=len, default=answer)


def make_unique(names: Iterable[str]) -> list[str]:
    """Return the names in order, made unique: repetitions get "#1", "#2", ... appended.

    A result that an earlier name has already taken is skipped for the next free number. So a name that itself ends in
    "#1" may get a suffix without being repeated.
    """
    counts = Counter[str]()
    names_out = dict[str, None]()
    for name in names:
        unique_name = f"{name}#{counts[name]}" if counts[name] else name
        while unique_name in names_out:  # a name may itself end in a number
            counts[name] += 1
            unique_name = f"{name}#{counts[name]}"
        names_out[unique_name] = None
        counts[name] += 1
    return list(names_out)


def make_question(
    question_id: str, task: str, doc_id: int, key: str, prompt: str, settings: Mapping[str, Any], seed: int = 0
) -> LmmsQuestion:
    """Convert a request of lmms-eval to a question, with a seed derived from the run's ``seed`` and ``question_id``."""
    decoding, stops = read_settings(task, settings, derive_seed(seed, question_id))
    return LmmsQuestion(question_id, task, doc_id, key, prompt, decoding, stops)


def read_settings(task: str, settings: Mapping[str, Any], seed: int = 0) -> tuple[Decoding, tuple[str, ...]]:
    r"""Convert a task's ``generation_kwargs`` to decoding options and stop texts, without lmms-eval's default "\n\n".

    Raises:
        UsageError: a setting is unknown, or its value is not supported.
    """
    try:
        return _make_decoding(settings, seed), _list_stops(settings)
    except (TypeError, ValueError) as error:
        raise UsageError(f"task {task}: generation_kwargs {dict(settings)}: {error}") from error


def _make_decoding(settings: Mapping[str, Any], seed: int) -> Decoding:
    """Convert a task's settings to decoding options; settings that are None count as absent.

    The temperature is the given one, by default 1, if ``do_sample`` is true or, without ``do_sample``, if the given one
    is above 0. Otherwise it is 0, which is greedy decoding.

    Raises:
        ValueError: a setting is unknown or out of range, or ``num_beams`` is not 1.
        TypeError: a value is not a number.
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


def _list_stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    r"""Return the stop texts in ``until`` (a text, a list or None), without empty ones and the default "\n\n"."""
    stops = settings.get("until") or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    if not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"until must be texts, got {stops!r}")
    return tuple(stop for stop in stops if stop and stop != _EVERY_TASKS)


#: Fields that name a video, in VideoMME, LongVideoBench, MLVU, EgoSchema, and MVBench, where each task has a folder.
FIELDS = ("videoID", "video_path", "video_name", "video_idx", "video")


def find_video_key(doc: JsonObject, template: str | None = None, folder: str | None = None) -> str:
    """Return the text by which a document names its video: a path or the end of a path, with or without its suffix.

    Without a template, it is the first field of FIELDS that holds text.

    Args:
        template: the id with fields of the document in braces, such as ``data/{clip}.mp4``.
        folder: the folder of the task's videos, put before the field "video" (not others).

    Raises:
        UsageError: no field names a video, or the template is malformed or uses a field that the document lacks.
    """
    if template is not None:
        try:
            return template.format_map(doc)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
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
    """An index of a cache's video ids by the ends of their paths.

    A key matches an id that equals it or ends with "/" and the key. The key may lack the suffix of the video file.

    Attributes:
        failed: the error class of each video that failed in the cache, by id.
    """

    def __init__(self, ok: Iterable[str], failed_ids: Mapping[str, str]) -> None:
        """Index the ids of videos with tokens (``ok``) and those of failed videos, which map to their error class.

        An id in both counts as failed.
        """
        self.failed = failed_ids
        self._ids = {*ok, *failed_ids}
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for video_id in sorted(self._ids):
            for name in {PurePosixPath(path).name for path in _list_id_forms(video_id)}:
                self._by_name[name].append(video_id)

    def near(self, key: str) -> str:
        """Return ``"; did you mean A, B?"`` with up to three ids similar to a key that matches none; "" if none is."""
        return suggest_ids(key, pa.chunked_array([sorted(self._ids)], pa.string()))

    def find(self, key: str) -> str | None:
        """Return the id that a key matches, or None: an equal id, or one that ends with "/" and the key.

        The suffix of a video file may be left out.

        An id that equals the key wins, even a failed one. Otherwise failed ids count only if no id with tokens matches.

        Raises:
            UsageError: the key matches several ids.
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
        """Return the sorted ids that equal ``ending`` or end with "/" and ``ending``, with or without their suffix."""
        return [
            video_id
            for video_id in self._by_name.get(PurePosixPath(ending).name, ())
            if any(path == ending or path.endswith(f"/{ending}") for path in _list_id_forms(video_id))
        ]


def _list_id_forms(video_id: str) -> tuple[str, ...]:
    """Return the id and, if it has the suffix of a video file, also the id without the suffix."""
    bare, dot, suffix = video_id.rpartition(".")
    return (video_id, bare) if bare and f"{dot}{suffix}".lower() in VIDEO_SUFFIXES else (video_id,)
