"""Brace patterns in the names of videos, expanded as shells do: {a,b}, {000..010}, one within another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from pipeline.errors import ManifestError

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_MOST = 1_000_000  # names from one pattern


def expanded(names: Sequence[str]) -> list[str]:
    """Return the names with their brace patterns expanded, in the order in which a shell would give them.

    A name that a local file or folder has stays as it is. Raises ManifestError where a pattern stands for a million
    names or more.
    """
    found: list[str] = []
    for name in names:
        if "{" not in name or ("://" not in name and Path(name).exists()):
            found.append(name)
            continue
        found += islice(_names(name), _MOST)
        if len(found) >= _MOST:
            raise ManifestError(f"{name}: this pattern stands for too many names ({_MOST:,}); name a folder or a glob")
    return found


def _names(text: str) -> Iterator[str]:
    """Yield each name that a text stands for; braces that are no pattern stay."""
    start = text.find("{")
    while start >= 0:
        parts, end = _split(text, start)
        if end is not None and (found := _alternatives(parts)) is not None:
            for middle in found:
                yield from (f"{text[:start]}{middle}{rest}" for rest in _names(text[end + 1 :]))
            return
        start = text.find("{", start + 1)
    yield text


def _split(text: str, start: int) -> tuple[list[str], int | None]:
    """Split at the commas between a brace and the one that closes it; also return that one's place, None for none."""
    parts, depth = [""], 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return parts, place
        if text[place] == "," and depth == 1:
            parts.append("")
        elif place > start:
            parts[-1] += text[place]
    return parts, None


def _alternatives(parts: list[str]) -> Iterator[str] | None:
    """Yield what the parts between a pair of braces stand for; None where that is no pattern."""
    found = _RANGE.fullmatch(parts[0])
    if len(parts) > 1 or found is None:
        return None if len(parts) == 1 else (name for part in parts for name in _names(part))
    first, last, step = found[1], found[2], abs(int(found[3] or 1)) or 1
    padded = any(re.match(r"-?0\d", end) for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    way = -1 if int(last) < int(first) else 1
    return (f"{number:0{width}}" for number in range(int(first), int(last) + way, way * step))
