"""The objects that an address in a store names, brace patterns in names, and the checks of addresses."""

from __future__ import annotations

import glob as globbing
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import PurePosixPath

from pipeline.errors import ManifestError
from pipeline.inputs.left_out import APPLE_DOUBLE, OTHER_FILES, LeftOut, is_apple_double
from pipeline.storage.hub import Files
from pipeline.storage.s3 import SCHEME, ObjectInfo, check_uri, has_query, is_s3

# The suffixes of files that count as videos in a folder or glob. A file that is named itself may have any suffix.
VIDEO_SUFFIXES = frozenset(
    {".mp4", ".m4v", ".mov", ".qt", ".3gp", ".3g2", ".f4v", ".mkv", ".mk3d", ".webm", ".avi", ".divx", ".flv"}
    | {".ts", ".m2t", ".m2ts", ".mts", ".mpg", ".mpeg", ".mpe", ".m1v", ".m2v", ".vob", ".wmv", ".asf", ".ogv", ".ogm"}
    | {".gif", ".ivf", ".264", ".h264", ".avc", ".265", ".h265", ".hevc"}
)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
BAD_ADDRESS = "an object is s3://BUCKET/KEY: no user, host or query, no . or .. segment, no control character"
OUTSIDE_PREFIXES = "the object lies outside the folder that was named (add --video-root for a prefix that may be read)"
_DOTS = "a key with . or .. segments or control characters is not read; rename the object"


def list_objects(
    address: str, suffixes: frozenset[str], objects: Files, left_out: LeftOut
) -> tuple[str, list[ObjectInfo]]:
    """List the videos and archives that an address on S3 or the hub names, in the order of the store's listing.

    - ``s3://bucket/folder/`` and ``s3://bucket/folder`` name every object below it with one of ``suffixes``.
    - A glob names the matching objects with such a suffix; if an object has exactly this name, only that one. ``*``,
      ``?`` and ``[..]`` stay within a segment; a segment ``**`` stands for any number of segments.
    - Any other address names the object with this key.

    This sends one LIST per thousand keys below the folder or the literal beginning of a glob, and one HEAD for an
    address with one of ``suffixes``; both for an object without such a suffix, or a folder with one.

    Args:
        left_out: counts the other objects below the folder or that match the glob.

    Returns:
        The prefix that ids are relative to, and the objects, at least one.

    Raises:
        ManifestError: there is no video or archive, or the store fails.
    """
    try:
        folder, infos = _list_or_empty(address, suffixes, objects, left_out)
    except OSError as error:
        raise ManifestError(f"{address}: cannot be listed: {error.strerror}") from error
    if not infos:
        store = "S3" if address.startswith(SCHEME) else "the hub"
        raise ManifestError(f"{address}: no video on {store} at or below it (looked for {' '.join(sorted(suffixes))})")
    return folder, infos


def _list_or_empty(
    address: str, suffixes: frozenset[str], objects: Files, left_out: LeftOut
) -> tuple[str, list[ObjectInfo]]:
    """List the objects as ``list_objects`` does; return an empty list if there are none, and let OSError pass."""

    def list_below(prefix: str, glob: Sequence[str] | None = None) -> list[ObjectInfo]:
        """Return the objects below a prefix that have one of the suffixes and match ``glob``; count other matches."""
        named_infos = (
            info
            for info in objects.list(prefix, deep=True)
            if glob is None or info.uri == address or match_segments(info.uri.split("/"), glob)
        )
        return [info for info in named_infos if accept_or_count_file(info.uri.removeprefix(SCHEME), suffixes, left_out)]

    _, slash, key = address.removeprefix(SCHEME).partition("/")
    if not key or key.endswith("/"):
        folder = address if slash else f"{address}/"
        return folder, list_below(folder)
    if globbing.has_magic(key):
        literal = re.split(r"[*?\[]", address, maxsplit=1)[0]
        infos = list_below(literal, address.split("/"))
        return _get_parent_prefix(literal), [info for info in infos if info.uri == address] or infos
    if find_suffix(address) in suffixes:
        return _find_object(address, objects) or (f"{address}/", list_below(f"{address}/"))
    if infos := list_below(f"{address}/"):
        return f"{address}/", infos
    return _find_object(address, objects) or (address, [])


def _find_object(uri: str, objects: Files) -> tuple[str, list[ObjectInfo]] | None:
    """Return (folder, listing) of a single object, or None if it does not exist."""
    try:
        return _get_parent_prefix(uri), [objects.info(uri)]
    except FileNotFoundError:
        return None


def match_segments(parts: Sequence[str], glob: Sequence[str], *, with_hidden: bool = True) -> bool:
    """Return True if the segments of a path match those of a glob, in which ``**`` stands for any number of segments.

    Without ``with_hidden``, a segment that begins with a dot matches only a glob segment that begins with a dot.
    """
    if not glob:
        return not parts
    if glob[0] == "**":
        n_shown = next((n for n, part in enumerate(parts) if part.startswith(".") and not with_hidden), len(parts))
        return any(match_segments(parts[n:], glob[1:], with_hidden=with_hidden) for n in range(n_shown + 1))
    if not parts or not fnmatchcase(parts[0], glob[0]):
        return False
    is_shown = with_hidden or glob[0].startswith(".") or not parts[0].startswith(".")
    return is_shown and match_segments(parts[1:], glob[1:], with_hidden=with_hidden)


def _get_parent_prefix(uri: str) -> str:
    """Return a uri up to and including its last slash."""
    return uri[: uri.rindex("/") + 1]


def find_suffix(uri: str) -> str:
    """Return the file suffix of a name in lower case, with the dot; "" for none."""
    return PurePosixPath(uri).suffix.lower()


def accept_or_count_file(name: str, suffixes: Collection[str], left_out: LeftOut, shown_name: str = "") -> bool:
    """Return True if a file has one of ``suffixes`` and is not an AppleDouble file; otherwise count it in ``left_out``.

    It is counted as ``shown_name``, by default its name.
    """
    if is_apple_double(name):
        left_out.add(APPLE_DOUBLE, shown_name or name)
    elif find_suffix(name) in suffixes:
        return True
    else:
        left_out.add(OTHER_FILES, shown_name or name)
    return False


def find_listed_refusal(uri: str) -> str | None:
    """Return the reason why a listed object must not be read (dot segments, control characters), or None."""
    return _DOTS if CONTROL.search(uri) or {".", ".."} & set(uri.split("/")) else None


def find_named_refusal(uri: str, prefixes: Iterable[str]) -> str | None:
    """Return the reason why an object in a manifest must not be read, or None.

    It is BAD_ADDRESS for a malformed address, and OUTSIDE_PREFIXES if the object is not below one of ``prefixes``.
    """
    bucket, _, key = uri.partition("://")[2].partition("/")  # of the hub: "datasets"
    is_key = bool(key) and not key.endswith("/") and (is_s3(uri) or "//" not in key)  # only S3 allows empty segments
    if not is_key or has_query(uri) or find_listed_refusal(uri) or not _BUCKET.fullmatch(bucket):
        return BAD_ADDRESS
    return None if any(uri.startswith(prefix) for prefix in prefixes) else OUTSIDE_PREFIXES


def parse_root_prefix(root: str) -> str:
    """Return a ``--video-root`` in a store as a prefix that ends with a slash.

    Raises:
        ManifestError: it is not an S3 bucket or prefix, or a dataset on the hub.
        UsageError: an S3 address has a user, host or query, or boto3 is not installed.
    """
    if is_s3(root):
        check_uri(root)
    prefix = f"{root.rstrip('/')}/"
    if find_named_refusal(f"{prefix}x", [prefix]):
        expected = "s3://BUCKET or s3://BUCKET/PREFIX" if is_s3(root) else "hf://datasets/USER/NAME"
        raise ManifestError(f"--video-root {root}: expected {expected}")
    return prefix


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
_MAX_NAMES = 1_000_000  # names after expansion


def expand_braces(names: Sequence[str]) -> list[str]:
    """Return the names with their brace patterns expanded, in the order of a shell: {a,b}, {000..010}, also nested.

    A name that exists as a local file or folder, and braces that are not a pattern, are kept as they are.

    Raises:
        ManifestError: a pattern brings the result to a million names or more.
    """
    names_out: list[str] = []
    for name in names:
        exists = "://" not in name and os.path.exists(name)  # noqa: PTH110 - Path.exists raises for a long pattern
        if "{" not in name or exists:
            names_out.append(name)
            continue
        names_out += islice(_iter_expansions(name), _MAX_NAMES)
        if len(names_out) >= _MAX_NAMES:
            raise ManifestError(
                f"{name}: this pattern stands for too many names ({_MAX_NAMES:,}); name a folder or a glob"
            )
    return names_out


def _iter_expansions(text: str) -> Iterator[str]:
    """Yield each text that a text with brace patterns stands for; braces that are not a pattern are kept."""
    start = text.find("{")
    while start >= 0:
        parts, end = _split_brace(text, start)
        if end is not None and (alternatives := _expand_brace(parts)) is not None:
            for middle in alternatives:
                yield from (f"{text[:start]}{middle}{ending}" for ending in _iter_expansions(text[end + 1 :]))
            return
        start = text.find("{", start + 1)
    yield text


def _split_brace(text: str, start: int) -> tuple[list[str], int | None]:
    """Split at the top-level commas of the brace at ``start``; return the texts and the index of its closing brace.

    The index is None if the brace is not closed.
    """
    parts = [""]
    depth = 0
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return parts, index
        if text[index] == "," and depth == 1:
            parts.append("")
        elif index > start:
            parts[-1] += text[index]
    return parts, None


def _expand_brace(parts: list[str]) -> Iterator[str] | None:
    """Return an iterator of the texts that a pair of braces stands for, or None if it is not a pattern.

    A pattern has several ``parts``, or is a range FIRST..LAST or FIRST..LAST..STEP of integers. The sign of STEP is
    ignored, and 0 counts as 1. Zeros before an end pad all numbers.
    """
    match = _RANGE.fullmatch(parts[0])
    if len(parts) > 1 or match is None:
        return None if len(parts) == 1 else (name for part in parts for name in _iter_expansions(part))
    first = match[1]
    last = match[2]
    step = abs(int(match[3] or 1)) or 1
    is_padded = any(re.match(r"-?0\d", end) for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    way = -1 if int(last) < int(first) else 1
    return (f"{number:0{width}}" for number in range(int(first), int(last) + way, way * step))
