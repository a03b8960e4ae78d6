"""Which cached video a document of a task is about: from its fields alone, as no file has to be there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from pipeline.errors import UsageError
from pipeline.inputs.listings import VIDEO_SUFFIXES
from pipeline.rows import JsonObject

#: Fields that name a video: of VideoME, LongVideoBench, MLVU, EgoSchema, and MVBench, whose tasks have a folder each.
FIELDS = ("videoID", "video_path", "video_name", "video_idx", "video")


def video_key(doc: JsonObject, template: str | None = None, folder: str | None = None) -> str:
    """Return the video that a document names: a path or the end of one, with or without the suffix.

    Args:
        template: the id with fields of the document in braces, for tasks that name videos in another way.
        folder: the one that the task has its videos in, where two have a video of one name.

    Raises UsageError where there is no such field.
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

    def __init__(self, ok: Iterable[str], failed: Mapping[str, str]) -> None:
        self.failed = failed
        self._ids = {*ok, *failed}
        self._by_name: dict[str, list[str]] = defaultdict(list)
        for video_id in sorted(self._ids):
            for name in {PurePosixPath(path).name for path in _paths(video_id)}:
                self._by_name[name].append(video_id)

    def find(self, key: str) -> str | None:
        """Return the id of the cached video that a key means, or None. Raise UsageError if it may be several."""
        wanted = str(PurePosixPath(key))
        ids = [key] if key in self._ids else self._ending(wanted)
        good = [video_id for video_id in ids if video_id not in self.failed] or ids
        if len(good) > 1:
            raise UsageError(
                f"{key!r} may be {' or '.join(map(repr, good[:3]))}: say which with video_id=TEMPLATE in --model_args, "
                "e.g. video_id=data/{videoID}.mp4"
            )
        return good[0] if good else None

    def _ending(self, wanted: str) -> list[str]:
        """Return the ids whose path ends with ``wanted``."""
        return [
            video_id
            for video_id in self._by_name.get(PurePosixPath(wanted).name, ())
            if any(path == wanted or path.endswith(f"/{wanted}") for path in _paths(video_id))
        ]


def _paths(video_id: str) -> tuple[str, ...]:
    """Return the id, and the id without the suffix of a video file."""
    bare, dot, suffix = video_id.rpartition(".")
    return (video_id, bare) if bare and f"{dot}{suffix}".lower() in VIDEO_SUFFIXES else (video_id,)
