"""Checks of a list of videos before a run starts, which open no video."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ManifestError, VideoFault, make_printable, suggest_unicode_form
from pipeline.inputs.forms import FORMS
from pipeline.inputs.listings import OUTSIDE_PREFIXES, VIDEO_SUFFIXES, find_suffix
from pipeline.inputs.named_videos import OUTSIDE_FOLDERS
from pipeline.inputs.tables import TABLE_SUFFIXES
from pipeline.keys import ROWS_AT_ONCE
from pipeline.rows import TodoRow
from pipeline.storage.hub import choose_client, is_remote
from pipeline.storage.s3 import SCHEME, Objects, is_s3
from pipeline.video.containers import HEAD_BYTES, recognize_container, sniff

_MAX_REASONS = 5  # reasons that a refusal lists
_MAX_ROOT_PATHS = 1000  # paths that are compared to suggest a root
_NAME_REMEDY = (
    "name a video, a folder or glob of videos, a .tar or .zip of them, or a manifest (.jsonl, .csv or .parquet with "
    "video_id and uri), and unpack an archive of another kind first"
)


class ProblemExample(NamedTuple):
    """A problem of videos in a manifest: the number of its videos, and a description of the first of them."""

    n: int
    first: str


def refuse_forbidden(manifest: pa.Table, list_name: str) -> None:
    """Raise ManifestError if videos of the manifest (MANIFEST_SCHEMA) may not be read, that is, have a ``policy``.

    The message lists the five most frequent reasons, each with a count and an example, and suggests ``--video-root``.
    """
    forbidden = manifest.filter(manifest["policy"].is_valid())
    if not len(forbidden):
        return
    counts = sorted(forbidden["policy"].value_counts().to_pylist(), key=lambda count: -count["counts"])
    reasons = []
    for count in counts[:_MAX_REASONS]:
        first = forbidden.filter(pc.equal(forbidden["policy"], count["values"])).slice(0, 1).to_pylist()[0]
        example = make_printable(f"e.g. {first['video_id']}: {first['uri']}")
        reasons.append(f"{count['counts']}: {count['values']}, {example}")
    more = [f"and {len(counts) - _MAX_REASONS} other reasons"] if len(counts) > _MAX_REASONS else []
    roots = [f"--video-root {shlex.quote(root)}" for root in _iter_suggested_roots(forbidden)]
    remedy = f"Allow that with {' '.join(roots)}, or correct" if roots else "Correct"
    raise ManifestError(
        f"{list_name}: {len(forbidden)} of {len(manifest)} videos may not be read, so nothing was started:\n  "
        + "\n  ".join(reasons + more)
        + f"\n{remedy} the list; or record them as failed and prune the others with --on-forbidden record."
    )


def _iter_suggested_roots(forbidden: pa.Table) -> Iterator[str]:
    """Yield the common folder of the forbidden local files, and the common prefix of the forbidden S3 objects.

    Only the first _MAX_ROOT_PATHS files outside of the allowed roots count. The root folder "/" is not suggested, and
    no prefix for objects of several buckets. Addresses on the hub are taken as local paths.
    """
    outside = forbidden.filter(pc.is_in(forbidden["policy"], value_set=pa.array([OUTSIDE_PREFIXES, OUTSIDE_FOLDERS])))
    paths: list[str] = outside["uri"].slice(0, _MAX_ROOT_PATHS).to_pylist()
    folders = [os.path.dirname(os.path.realpath(path)) for path in paths if not is_s3(path)]  # noqa: PTH120
    if folders and (root := os.path.commonpath(folders)) != "/":
        yield root
    prefixes = [path.removeprefix(SCHEME).rpartition("/")[0] for path in paths if is_s3(path)]
    if prefixes and (prefix := os.path.commonpath(prefixes)):
        yield f"{SCHEME}{prefix}"


def refuse_other_file(name: str) -> None:
    """Raise ManifestError if ``name`` is a local file that is not a video, a manifest or an archive.

    Only its first bytes are read. Anything else passes, such as a folder, a glob, an object or a missing file.
    """
    path = name.removeprefix("file://")
    is_file = os.path.isfile(path)  # noqa: PTH113 - Path.is_file raises for a name that is too long
    if is_file and find_suffix(name) not in TABLE_SUFFIXES | FORMS.keys():
        with _convert_faults():
            sniff(path)


def refuse_other_files(manifest: pa.Table, name: str, objects: Objects) -> None:
    """Raise ManifestError if the only name of VIDEOS is a file or an object that is not a video.

    The first bytes are read; an object with a suffix of videos passes without a request. OSError of a store passes
    unchanged.

    Args:
        manifest: the result of reading ``name``. It passes unless its first row is ``name`` itself and may be read.
    """
    path = name if is_remote(name) else os.path.abspath(name.removeprefix("file://"))  # noqa: PTH100 - links stay
    row = manifest.slice(0, 1).to_pylist()[0] if len(manifest) else None
    if row is None or row["policy"] is not None or row["uri"] != path:
        return
    with _convert_faults():
        if not is_remote(name):
            sniff(path)
        elif find_suffix(name) not in VIDEO_SUFFIXES:
            recognize_container(
                choose_client(name, objects).read_slice(name, 0, HEAD_BYTES).data if row["size"] else b"", name
            )


@contextmanager
def _convert_faults() -> Iterator[None]:
    """Convert a VideoFault inside the context to a ManifestError with advice on what to name."""
    try:
        yield
    except VideoFault as fault:
        raise ManifestError(f"{fault.message}; {_NAME_REMEDY}") from fault


class ListCheck(NamedTuple):
    """The result of ``check_not_string``.

    Attributes:
        failures: problem -> the videos that are sure to fail by it. The problem completes a sentence "3 videos ...".
        n_found: other videos whose local file exists.
        n_unseen: other videos: remote files, and members of archives.
    """

    failures: dict[str, ProblemExample]
    n_found: int
    n_unseen: int


def check_list(todo: pa.Table) -> ListCheck:
    """Check rows of TODO_SCHEMA for problems that are sure to fail, and whether local files exist.

    Opens no video, and makes no request for remote files.
    """
    examples = dict[str, ProblemExample]()
    n_found = 0
    n_unseen = 0
    for batch in todo.to_batches(max_chunksize=ROWS_AT_ONCE):
        for row in batch.to_pylist():
            if (problem := _find_sure_failure(row)) is not None:
                n, first = examples.get(problem[0], (0, f"{row['video_id']}: {problem[1]}"))
                examples[problem[0]] = ProblemExample(n + 1, first)
            elif _is_local_file(row):
                n_found += 1
            else:
                n_unseen += 1
    return ListCheck(examples, n_found, n_unseen)


def _is_local_file(row: TodoRow) -> bool:
    """Return True for a local file or folder that is not a member of an archive."""
    return not is_remote(row["uri"]) and row["source_offset"] is None


def _find_sure_failure(row: TodoRow) -> tuple[str, str] | None:
    """Return (problem, details) if a video is sure to fail; None if not.

    It fails if it has a policy or a known fault, if its clip starts before 0 or does not end after its start, or if its
    local file does not exist. The problem completes a sentence "3 videos ...".
    """
    if row["policy"] is not None:
        return "may not be read (policy)", row["policy"]
    if row["fault"] is not None:
        return "cannot be read from their archive", row["fault"]
    start, end = row["start_s"] or 0.0, row["end_s"]
    if start < 0 or (end is not None and end <= start):
        clip = f"from {start:g} s to {'the end' if end is None else f'{end:g} s'}"
        return "have a clip that starts before 0 or ends before it starts (unsupported)", clip
    if _is_local_file(row) and not os.path.exists(row["uri"]):  # noqa: PTH110 - a Path per row is slow
        return "do not exist on this machine (io)", f"{row['uri']}{suggest_unicode_form(row['uri'])}"
    return None
