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
        end = _closing(text, start)
        if end is not None and (parts := _alternatives(text[start + 1 : end])) is not None:
            for middle in parts:
                yield from (f"{text[:start]}{middle}{rest}" for rest in _names(text[end + 1 :]))
            return
        start = text.find("{", start + 1)
    yield text


def _closing(text: str, start: int) -> int | None:
    """Return the place of the brace that closes the one at ``start``, or None."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return place
    return None


def _alternatives(inside: str) -> Iterator[str] | None:
    """Yield what the inside of a pair of braces stands for; None where that is no pattern."""
    if found := _RANGE.fullmatch(inside):
        first, last, step = found[1], found[2], abs(int(found[3] or 1)) or 1
        padded = any(re.match(r"-?0\d", end) for end in (first, last))
        width = max(len(first), len(last)) if padded else 0
        down = int(last) < int(first)
        numbers = range(int(first), int(last) - 1, -step) if down else range(int(first), int(last) + 1, step)
        return (f"{number:0{width}}" for number in numbers)
    parts = _split(inside)
    return None if len(parts) == 1 else (name for part in parts for name in _names(part))


def _split(inside: str) -> list[str]:
    """Split at the commas that stand in no inner braces."""
    parts, depth = [""], 0
    for character in inside:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts
