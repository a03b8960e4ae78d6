"""The table of videos that lists and indexes produce, and the conversion of a manifest's rows to it.

The columns of a plain batch are checked as a whole. A batch with anything else is converted row by row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ManifestError, make_printable
from pipeline.inputs.listings import BAD_ADDRESS, CONTROL, OUTSIDE_PREFIXES, find_named_refusal
from pipeline.inputs.tables import TableRows, UserRow, parse_number, parse_text_cell, serialize_carried
from pipeline.keys import find_repeated, hash_column
from pipeline.rows import ManifestRow
from pipeline.storage.hub import is_remote
from pipeline.storage.s3 import is_s3

# The columns are the keys of ``pipeline.rows.ManifestRow``; its docstring describes them.
MANIFEST_SCHEMA = pa.schema(
    [
        pa.field("video_id", pa.string(), nullable=False),
        pa.field("uri", pa.string(), nullable=False),
        pa.field("start_s", pa.float64()),
        pa.field("end_s", pa.float64()),
        pa.field("manifest", pa.string()),
        pa.field("policy", pa.string()),
        pa.field("size", pa.int64()),
        pa.field("source_offset", pa.int64()),
        pa.field("fault", pa.string()),
        pa.field("mark", pa.uint64()),
    ]
)
#: A row to process: a manifest's row and the number of this attempt.
TODO_SCHEMA = MANIFEST_SCHEMA.append(pa.field("attempts", pa.int32(), nullable=False))
#: The policy of a file outside the folders; ``listings.OUTSIDE_PREFIXES`` is the policy of an object.
OUTSIDE_FOLDERS = "the path resolves outside the folder that was named (add --video-root for a folder that may be read)"
_OWN_COLUMNS = ("video_id", "uri", "start_s", "end_s", "size_bytes")
_MAX_SIZE_BYTES = 2**53  # up to here, float64 holds every whole number
_DOTS = r"//|(^|/)\.\.?(/|$)|/$"  # what abspath would change
_KEY = r"^s3://[A-Za-z0-9][A-Za-z0-9._-]*(/[^/?]+)+$"
_SEGMENT_DOTS = r"/\.\.?(/|$)"


class Roots(NamedTuple):
    """The places that may be read: files below these folders and objects below these prefixes."""

    folders: Sequence[Path] = ()
    prefixes: Sequence[str] = ()

    def contains(self, uri: str) -> bool:
        """Return True if an object, or an absolute path once its links are followed, is below one of the roots."""
        if is_remote(uri):
            return find_named_refusal(uri, self.prefixes) is None
        return uri.startswith("/") and "\0" not in uri and FolderCheck(self.folders)(uri) is None


class FolderCheck:
    """A check that local paths, once links are followed, are below given folders. It caches the result per folder."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._roots = [os.path.realpath(folder) for folder in folders]
        self._inside: dict[str, bool] = {}  # folder -> whether it is below a root; a million files have few folders

    def __call__(self, path: str) -> str | None:
        """Return None if the absolute ``path``, with links followed, is below a folder; otherwise OUTSIDE_FOLDERS."""
        folder = path.rpartition("/")[0] or "/"
        inside = self._inside.get(folder)
        if inside is None:
            if len(self._inside) >= 2**16:
                self._inside.clear()
            inside = self._inside[folder] = self._is_below(os.path.realpath(folder))
        if (inside and not os.path.islink(path)) or self._is_below(os.path.realpath(path)):  # noqa: PTH114 - a Path each
            return None
        return OUTSIDE_FOLDERS

    def _is_below(self, real: str) -> bool:
        """Return True if a path without links is one of the folders or below one."""
        return any(Path(real).is_relative_to(root) for root in self._roots)


class UriColumns(NamedTuple):
    """The resolved uris of videos, and the policy (or null) of each."""

    uris: pa.Array
    policy: pa.Array


class ManifestConverter:
    """A converter of batches of a manifest to MANIFEST_SCHEMA.

    Args:
        name: the name of the manifest, for errors.
        base: the manifest's folder, or its prefix in a store. Relative uris start there, and it may name videos below
            it.
        roots: what it may also name.
    """

    def __init__(self, name: str, base: Path | str, roots: Roots) -> None:
        """Prepare the checks of paths."""
        self._name = name
        self._base = base
        local = isinstance(base, Path)
        self._prefixes = roots.prefixes if local else [str(base), *roots.prefixes]
        self._judge = FolderCheck([base, *roots.folders] if isinstance(base, Path) else roots.folders)

    @classmethod
    def from_uri(cls, uri: str, roots: Roots) -> ManifestConverter:
        """Return the converter for a manifest or table at ``uri``, with its folder or prefix as the base."""
        return cls(uri, uri[: uri.rindex("/") + 1] if is_remote(uri) else Path(uri).parent, roots)

    def locate(self, uris: pa.Array) -> UriColumns:
        """Resolve uris, and give a policy to each that must not be read."""
        if (columns := self._resolve_uris_by_columns(uris)) is not None:
            return columns
        locations, policies = zip(*map(self._resolve_uri, uris.to_pylist()), strict=True)
        return UriColumns(pa.array(locations, pa.string()), pa.array(policies, pa.string()))

    def convert(self, rows: TableRows) -> pa.RecordBatch:
        """Convert rows to MANIFEST_SCHEMA.

        Raises:
            ManifestError: the first row without ``video_id`` or ``uri``, or with an invalid time or size.
            BadRow: an id or uri cannot be read as text (``parse_text_cell``).
            ArrowInvalid, UnicodeDecodeError, OverflowError: text in an Arrow batch is not UTF-8, or Python cannot
                represent a nested time.
        """
        if (batch := self._convert_by_columns(rows)) is not None:
            return batch
        checked_rows = [self._convert_row(row, f"{self._name}, {where}") for where, row in rows]
        return pa.RecordBatch.from_pylist(checked_rows, schema=MANIFEST_SCHEMA)

    def _convert_by_columns(self, rows: TableRows) -> pa.RecordBatch | None:
        """Convert all rows by columns; return None if any cell needs ``_convert_row``."""
        ids = rows.texts("video_id")
        uris = rows.texts("uri")
        times = [rows.numbers(name) for name in ("start_s", "end_s")]
        sizes = _convert_sizes(rows.numbers("size_bytes"))
        if ids is None or uris is None or sizes is None or any(time is None for time in times):
            return None
        if _has_blank_or_control(ids) or (uri_columns := self._resolve_uris_by_columns(uris)) is None:
            return None
        columns = [ids, uri_columns.uris, *times, rows.carried(_OWN_COLUMNS), uri_columns.policy, sizes]
        columns += [pa.nulls(len(ids), kind) for kind in (pa.int64(), pa.string(), pa.uint64())]
        return pa.RecordBatch.from_arrays(columns, schema=MANIFEST_SCHEMA)

    def _resolve_uris_by_columns(self, uris: pa.Array) -> UriColumns | None:
        """Resolve all uris by columns; return None if they mix objects and files, or one needs ``_resolve_uri``."""
        return None if _has_blank_or_control(uris) else self._resolve_as_objects(uris) or self._resolve_as_files(uris)

    def _resolve_as_objects(self, uris: pa.Array) -> UriColumns | None:
        """Resolve all uris as objects on S3; return None if one needs ``_resolve_uri``.

        These are local paths, objects on the hub, and malformed addresses. An object outside the prefixes gets a
        policy.
        """
        relative = pc.invert(pc.or_(pc.match_substring(uris, "://"), pc.starts_with(uris, "/")))
        uri_column = uris
        if isinstance(self._base, str):
            uri_column = pc.if_else(relative, pc.binary_join_element_wise(self._base, uris, ""), uris)
        is_well_formed = pc.and_not(
            pc.match_substring_regex(uri_column, _KEY), pc.match_substring_regex(uri_column, _SEGMENT_DOTS)
        )
        if not pc.all(is_well_formed).as_py():
            return None
        inside = pa.repeat(False, len(uri_column))
        for prefix in self._prefixes:
            inside = pc.or_(inside, pc.starts_with(uri_column, prefix))
        return UriColumns(uri_column, pc.if_else(inside, pa.scalar(None, pa.string()), OUTSIDE_PREFIXES))

    def _resolve_as_files(self, uris: pa.Array) -> UriColumns | None:
        """Resolve all uris as local files; return None if one needs ``_resolve_uri``.

        These are uris with dot segments, "//", a slash at the end or "://", and relative uris of a manifest in a store.
        A file outside the folders gets a policy.
        """
        absolute = pc.starts_with(uris, "/")
        if pc.any(pc.match_substring_regex(uris, _DOTS)).as_py() or pc.any(pc.match_substring(uris, "://")).as_py():
            return None
        if not isinstance(self._base, Path) and not pc.all(absolute).as_py():
            return None
        folder = os.path.abspath(self._base).rstrip("/") if isinstance(self._base, Path) else ""  # noqa: PTH100
        paths = pc.if_else(absolute, uris, pc.binary_join_element_wise(folder, uris, "/"))
        return UriColumns(paths, pa.array(map(self._judge, paths.to_pylist()), pa.string()))

    def _convert_row(self, row: UserRow, where: str) -> ManifestRow:
        """Convert one row: check its cells, resolve its uri, and carry its other columns that have values as JSON.

        ``size_bytes`` becomes ``size``. A uri that must not be read gets a ``policy``.

        Args:
            where: the source line of the row, for errors.

        Raises:
            ManifestError: ``video_id`` or ``uri`` is missing or blank, a time is not a finite number, or the size is
                not a whole number below 2^53.
            BadRow: ``video_id`` or ``uri`` cannot be read as text (``parse_text_cell``).
        """
        for name in ("video_id", "uri"):
            if row.get(name) is None or not parse_text_cell(row, name, where).strip():
                raise ManifestError(f"{where}: no {name}; every row needs a video_id and a uri")
        location, policy = self._resolve_uri(parse_text_cell(row, "uri", where))
        carried = {k: v for k, v in row.items() if k not in _OWN_COLUMNS and v is not None}
        return {
            "video_id": parse_text_cell(row, "video_id", where),
            "uri": location,
            "start_s": _parse_seconds(row, "start_s", where),
            "end_s": _parse_seconds(row, "end_s", where),
            "manifest": serialize_carried(carried) if carried else None,
            "policy": policy,
            "size": _parse_size_bytes(row, where),
        }

    def _resolve_uri(self, uri: str) -> tuple[str, str | None]:
        """Resolve a uri; return its address, and the reason to refuse it or None.

        The address is an absolute path or an object's uri, also if it is refused. A malformed or unsupported uri (of
        the hub, for example) is not resolved, and is returned without its secrets.
        """
        base = self._base
        if is_s3(uri) or (isinstance(base, str) and "://" not in uri and not uri.startswith("/")):
            full_uri = uri if is_s3(uri) else f"{base}{uri}"
            refusal = find_named_refusal(full_uri, self._prefixes)
            return (make_printable(remove_secrets(full_uri)) if refusal == BAD_ADDRESS else full_uri), refusal
        if "://" in uri and not uri.startswith("file://"):
            shown = remove_secrets(uri)
            return shown, f"{shown.split('://')[0]}:// is not read from a manifest; only files and s3:// objects are"
        if uri.startswith("file://"):
            host, slash, path = uri.removeprefix("file://").partition("/")
            if host not in ("", "localhost") or "?" in path or "#" in path or "%00" in path:
                return remove_secrets(uri), "a file:// URI may hold a path only: no host, user, query, fragment or NUL"
            uri = unquote(slash + path)
        folder = base if isinstance(base, Path) else Path("/")  # a manifest on S3 names files only by absolute paths
        absolute = os.path.abspath(folder / uri)  # noqa: PTH100 - links are judged below
        return absolute, self._judge(absolute)


def remove_secrets(uri: str) -> str:
    """Remove user info, query and fragment, any of which may hold a credential, from a uri with a scheme."""
    scheme, _, address = uri.partition("://")
    address = address.split("?")[0].split("#")[0]
    host, slash, tail = address.partition("/")
    if ":" in host and "@" in tail:  # KEY:SECRET@host, where the secret holds a slash
        host, slash, tail = tail.rpartition("@")[2].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{tail}"


def require_unique_ids(table: pa.Table, list_name: str = "") -> pa.Table:
    """Return the table unchanged if no ``video_id`` repeats; ``list_name`` is for the error.

    Raises:
        ManifestError: an id repeats; the message has up to three examples.
    """
    is_repeated = find_repeated(hash_column(table["video_id"]))
    if is_repeated.any():
        shown = ", ".join(map(repr, table["video_id"].filter(pa.array(is_repeated)).slice(0, 3).to_pylist()))
        raise ManifestError(
            f"{list_name}: {is_repeated.sum()} rows repeat a video_id, e.g. {shown}; ids must be unique"
        )
    return table


def _has_blank_or_control(texts: pa.Array) -> bool:
    """Return True if any text is blank or has control characters."""
    blank = pc.equal(pc.utf8_trim_whitespace(texts), "")
    return bool(pc.any(pc.or_(pc.match_substring_regex(texts, CONTROL.pattern), blank)).as_py())


def _parse_seconds(row: UserRow, name: str, where: str) -> float | None:
    """Return a cell, a number or numeric text, as seconds; None if it is null.

    Raises:
        ManifestError: it is not a finite number.
    """
    value = row.get(name)
    if value is None:
        return None
    seconds = parse_number(value)
    if not math.isfinite(seconds):
        raise ManifestError(f"{where}: {name} is {value!r}, not a number of seconds")
    return seconds


def _convert_sizes(values: pa.Array | None) -> pa.Array | None:
    """Return sizes in bytes as int64, nulls kept; None without ``values``.

    None is also returned if a value is not a whole number from 0 to 2^53 - 1.
    """
    if values is None:
        return None
    whole = pc.and_(
        pc.equal(pc.floor(values), values), pc.and_(pc.greater_equal(values, 0), pc.less(values, _MAX_SIZE_BYTES))
    )
    return values.cast(pa.int64()) if pc.all(whole).as_py() in (True, None) else None


def _parse_size_bytes(row: UserRow, where: str) -> int | None:
    """Return the cell ``size_bytes``, a number or numeric text, as an int; None if it is null.

    Raises:
        ManifestError: it is not a whole number from 0 to 2^53 - 1.
    """
    value = row.get("size_bytes")
    if value is None:
        return None
    size = parse_number(value)
    if not (0 <= size < _MAX_SIZE_BYTES and size == math.floor(size)):
        raise ManifestError(f"{where}: size_bytes is {value!r}, not a whole number of bytes")
    return int(size)
