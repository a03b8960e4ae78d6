"""Suggest ids that a user may have meant by an unknown id; a million ids take at most half a second."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import describe_similar_name, make_printable, normalize_look

MAX_SUGGESTIONS = 3  # ids that a message suggests
_MAX_CANDIDATES = 1000  # ids that are compared letter by letter


def suggest_ids(wrong: str, ids: pa.ChunkedArray) -> str:
    """Return ``"; did you mean A, B?"`` with up to three ids similar to ``wrong``, or "" if none is similar."""
    likely = [describe_similar_name(wrong, video_id) for video_id in find_similar_ids(wrong, ids)]
    return f"; did you mean {make_printable(', '.join(likely))}?" if likely else ""


def find_similar_ids(wrong: str, ids: pa.ChunkedArray) -> list[str]:
    """Return up to MAX_SUGGESTIONS distinct ids that are similar to ``wrong``, the likeliest first.

    The order is: ids that look the same (after Unicode normalization, trimming, and with / for each backslash); the
    only id with the same base name, with or without its suffix; ids that contain ``wrong``. Only if there are none of
    these, ``difflib`` compares the letters of up to 1,000 ids; if there are more ids, of those that begin with the
    first half of ``wrong`` or end with its second half. The result is [] for an empty text and for a text that is not
    valid Unicode.
    """
    try:
        wrong.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no id has
        return []
    if not wrong:
        return []
    looks = pc.replace_substring(pc.utf8_trim_whitespace(pc.utf8_normalize(ids, "NFKC")), "\\", "/")
    of_same_look = _list_first_ids(ids.filter(pc.equal(looks, normalize_look(wrong))))
    containing = _list_first_ids(ids.filter(pc.match_substring(ids, wrong)))
    if likely := [*of_same_look, *_find_same_base_name(wrong, ids), *containing]:
        return list(dict.fromkeys(likely))[:MAX_SUGGESTIONS]
    if len(ids) > _MAX_CANDIDATES:  # one wrong letter leaves one half of an id unchanged
        half = (len(wrong) - len(PurePosixPath(wrong).suffix)) // 2
        ids = ids.filter(pc.or_(pc.starts_with(ids, wrong[:half]), pc.ends_with(ids, wrong[half:])))
    return get_close_matches(wrong, _list_first_ids(ids, _MAX_CANDIDATES), MAX_SUGGESTIONS)


def _list_first_ids(ids: pa.ChunkedArray, limit: int = MAX_SUGGESTIONS) -> list[str]:
    """Return up to ``limit`` distinct ids among the first 2 * ``limit``, in their order."""
    names: list[str] = pc.unique(ids.slice(0, 2 * limit)).to_pylist()  # an id may be in two files of the table
    return names[:limit]


def _find_same_base_name(wrong: str, ids: pa.ChunkedArray) -> list[str]:
    """Return the id whose base name is that of ``wrong``, in a list; [] if there is none or if several match.

    If none is equal, the base name may differ in the suffix, among the first 1,000 ids that contain the stem.
    """
    path = PurePosixPath(wrong)
    if not path.name:
        return []
    same_name = _list_first_ids(ids.filter(pc.or_(pc.equal(ids, path.name), pc.ends_with(ids, f"/{path.name}"))))
    if not same_name:
        alike = _list_first_ids(ids.filter(pc.match_substring(ids, path.stem)), _MAX_CANDIDATES)
        same_name = [video_id for video_id in alike if PurePosixPath(video_id).stem == path.stem]
    return same_name if len(same_name) == 1 else []
