"""Ids that a user may have meant by an id that does not exist. A million ids take half a second at most."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import describe_near, normalise_look, printable

MAX_SUGGESTIONS = 3  # likely ids that a message names
_MAX_CANDIDATES = 1000  # ids that are compared letter by letter


def did_you_mean_id(wrong: str, ids: pa.ChunkedArray) -> str:
    """Return ``"; did you mean A, B?"`` with the ids nearest to a ``wrong`` one, or "" where none is near."""
    likely = [describe_near(wrong, video_id) for video_id in near_ids(wrong, ids)]
    return f"; did you mean {printable(', '.join(likely))}?" if likely else ""


def near_ids(wrong: str, ids: pa.ChunkedArray) -> list[str]:
    """Return up to MAX_SUGGESTIONS ids similar to a ``wrong`` id, the likeliest first.

    In this order: ids that look the same, in another Unicode form for example; the only id with the base name of
    ``wrong``, with or without a suffix; ids that contain ``wrong``; else ids with similar letters.
    """
    try:
        wrong.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which no id has
        return []
    if not wrong:
        return []
    looks = pc.replace_substring(pc.utf8_trim_whitespace(pc.utf8_normalize(ids, "NFKC")), "\\", "/")
    of_same_look = _first(ids.filter(pc.equal(looks, normalise_look(wrong))))
    containing = _first(ids.filter(pc.match_substring(ids, wrong)))
    if likely := [*of_same_look, *_only_of_base_name(wrong, ids), *containing]:
        return list(dict.fromkeys(likely))[:MAX_SUGGESTIONS]
    if len(ids) > _MAX_CANDIDATES:  # one wrong letter leaves the first half of an id or the second as it is
        half = (len(wrong) - len(PurePosixPath(wrong).suffix)) // 2
        ids = ids.filter(pc.or_(pc.starts_with(ids, wrong[:half]), pc.ends_with(ids, wrong[half:])))
    return get_close_matches(wrong, _first(ids, _MAX_CANDIDATES), MAX_SUGGESTIONS)


def _first(ids: pa.ChunkedArray, limit: int = MAX_SUGGESTIONS) -> list[str]:
    """Return the first few distinct ids."""
    names: list[str] = pc.unique(ids.slice(0, 2 * limit)).to_pylist()  # an id may stand in two files of a table
    return names[:limit]


def _only_of_base_name(wrong: str, ids: pa.ChunkedArray) -> list[str]:
    """Return the one id with the base name of ``wrong``; else the one id that differs from it in the suffix only.

    The list is empty if no id fits, or several ids do.
    """
    path = PurePosixPath(wrong)
    if not path.name:
        return []
    same_name = _first(ids.filter(pc.or_(pc.equal(ids, path.name), pc.ends_with(ids, f"/{path.name}"))))
    if not same_name:
        alike = _first(ids.filter(pc.match_substring(ids, path.stem)), _MAX_CANDIDATES)
        same_name = [video_id for video_id in alike if PurePosixPath(video_id).stem == path.stem]
    return same_name if len(same_name) == 1 else []
