"""The sources of videos: their current sizes, and the bytes that a decode process reads.

A remote file or a member of an archive is fetched first, into an anonymous file in memory, or into a temporary file on
systems without these; the decode process gets no credentials.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pipeline.errors import ReplacedSource, UsageError, VideoFault, make_printable
from pipeline.keys import hash_mark, hash_sample, list_sample_spans
from pipeline.rows import VideoRow
from pipeline.storage.downloads import write_download
from pipeline.storage.hub import choose_client, is_remote
from pipeline.storage.location import Location
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import request_threads
from pipeline.video.decode import DecodedVideo, DecodeRequest, convert_error
from pipeline.video.frame_folders import FileState, compute_file_sample, count_source_bytes, read_source_state
from pipeline.video.sandbox import DecodeSandbox

_MAX_REQUESTS = 32  # concurrent requests about objects
MISSING_STATE = FileState(-1, 0)
_IN_MEMORY = re.compile(r"/proc/self/fd/\d+|/memfd:\S*(?: \(deleted\))?")


#: Takes a write function and a limit in bytes; writes a video's bytes and returns their number.
Fetch = Callable[[Callable[[bytes], object], int], int]


@dataclass
class Source(AbstractContextManager["Source"]):
    """A video that is ready to be decoded, or the fault that prevents it. Close it.

    Attributes:
        location: the location of the video, with its current mark, and the size if it was fetched.
        descriptor: of the content in memory; None otherwise.
        path: of the content on disk: the video's own path, or a temporary file where the platform has no files in
            memory.
        is_copy: True if the content is a copy, which ``close`` deletes.
    """

    location: Location
    fault: VideoFault | None = None
    descriptor: int | None = None
    path: str | None = None
    is_copy: bool = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the copy of the content, if there is one."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self.path is not None and self.is_copy:
            Path(self.path).unlink(missing_ok=True)
        self.descriptor = self.path = None

    def decode(self, sandbox: DecodeSandbox, request: DecodeRequest) -> DecodedVideo:
        """Decode the video with ``request``, whose ``path`` is ignored.

        Names of a copy in messages and notes are replaced by the video's uri.

        Raises:
            VideoFault: the source's own ``fault``, or the fault that the sandbox raises.
        """
        if self.fault is not None:
            raise self.fault
        try:
            video = sandbox.decode(replace(request, path=self.path or self.location.uri), self.descriptor)
        except VideoFault as fault:
            fault.message = make_printable(self._replace_names(fault.message))
            raise
        return video.add_columns({"backend_note": self._replace_names(video.record["backend_note"] or "")})

    def _replace_names(self, text: str) -> str:
        """Replace the names of a copy's content in a message by the uri of the video."""
        if not self.is_copy:
            return text
        uri = self.location.uri
        return _IN_MEMORY.sub(lambda _: uri, text if self.path is None else text.replace(self.path, uri))


def prepare_source(location: Location, objects: Objects, limit: int, fetch: Fetch | None = None) -> Source:
    """Fetch a remote file or a member of an archive into a Source, or look up the mark of a local path.

    A local path is not opened: if it does not exist, it keeps the mark of ``location``, and the decode process raises
    the fault. A failed fetch raises nothing: any Exception becomes the source's ``fault``.

    Args:
        limit: the largest number of bytes to fetch.
        fetch: fetches a member of an archive; None for a separate file.
    """
    if not is_remote(location.file) and fetch is None:
        mark = _read_state_on_disk(location.file).mark or location.mark  # that of a listing may be older
        return Source(location._replace(mark=mark), path=location.file)
    source = Source(location, is_copy=True)
    try:
        size = _fetch(source, fetch or partial(_download, source, objects), limit)
        source.location = source.location._replace(size=size)
    except Exception as error:  # noqa: BLE001 - the error boundary of a video: anything becomes its error row
        source.close()
        source.fault = _make_fault(location.uri, error, limit)
    return source


def prepare_unchanged_source(row: VideoRow, objects: Objects, fetch: Fetch | None = None) -> Source:
    """Prepare the source of a row of the videos table if it still has the recorded size; the caller closes it.

    Raises:
        VideoFault: "io" if the source is gone or cannot be read, or the row lacks its size or hash.
        ReplacedSource: the source has another size, or fetching it failed with a fault other than "io".
    """
    is_copy = fetch is not None or is_remote(row["uri"])
    if not is_copy:
        _check_present(row)
    if row["source_size"] is None or row["source_hash"] is None:
        raise VideoFault("io", "the cache does not say which file was read")
    source = prepare_source(Location.parse(row["uri"], row["source_offset"]), objects, row["source_size"], fetch)
    if source.fault is not None and source.fault.fault_class == "io":
        raise VideoFault("io", f"the source object is not at hand: {source.fault.message}")
    if is_copy and source.location.size != row["source_size"]:  # a larger object is not fetched at all
        source.close()
        raise ReplacedSource(f"the source object has changed since: it does not have {row['source_size']:,} bytes")
    return source


def _check_present(row: VideoRow) -> None:
    """Check that the file of a row is on this machine and has the recorded size.

    Raises:
        VideoFault: "io" if ``uri`` is not an absolute path or cannot be read.
        ReplacedSource: the file or folder has another size.
    """
    path = Path(row["uri"])
    if not path.is_absolute():
        raise VideoFault("io", "the source is not a file on this machine")
    try:
        size = count_source_bytes(row["uri"])
    except (OSError, ValueError) as error:
        raise VideoFault("io", "the source file is not at hand (moved, deleted or on another machine)") from error
    if row["source_size"] is not None and size != row["source_size"]:
        raise ReplacedSource(f"the source file has changed since: it has {size:,} bytes, not {row['source_size']:,}")


def _fetch(source: Source, fetch: Fetch, limit: int) -> int:
    """Fetch the bytes into memory, or into a temporary file on systems without files in memory; return their number.

    Sets ``source.descriptor`` or ``source.path``, also before ``fetch`` raises. The file in memory is sealed
    afterwards.
    """
    if hasattr(os, "memfd_create"):
        source.descriptor = os.memfd_create("video", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(source.descriptor, "wb", closefd=False) as file:
            size = fetch(file.write, limit)
        # Sealed, so that a decoder taken over by an attacker cannot change the bytes for the next one.
        with suppress(OSError):  # not every kernel has seals
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(source.descriptor, fcntl.F_ADD_SEALS, seals)
        return size
    descriptor, source.path = tempfile.mkstemp(prefix="video-")
    with os.fdopen(descriptor, "wb") as file:
        return fetch(file.write, limit)


def _download(source: Source, objects: Objects, write: Callable[[bytes], object], limit: int) -> int:
    """Write a remote file to ``write``, set the mark in ``source.location``, and return the file's size.

    Raises:
        OSError: the download failed, or the file has more than ``limit`` bytes (EFBIG).
    """
    uri = source.location.file
    mark = source.location.mark
    with closing(choose_client(uri, objects).download(uri)) as download:
        source.location = source.location._replace(mark=hash_mark(download.mark or "") or mark)
        return write_download(download, write, limit, uri)


def _make_fault(uri: str, error: Exception, limit: int) -> VideoFault:
    """Convert an exception from fetching ``uri`` to a fault; a VideoFault is returned unchanged.

    EFBIG (more than ``limit`` bytes) becomes "out-of-memory", another OSError except ENOMEM "io", and the rest what
    ``convert_error`` makes of it.
    """
    if isinstance(error, VideoFault):
        return error
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        remedy = f"--fetch-memory allows {limit / 2**20:g} MiB"
        return VideoFault("out-of-memory", f"{uri} is not fetched: {error.strerror} ({remedy})")
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        return VideoFault("io", f"{uri} cannot be read: {error.strerror or error}")
    return convert_error(error, None)


class SourceStates:
    """Looks up current sizes and marks of files and objects; call ``finish`` at the end.

    A request is refused if it fails with an OSError other than FileNotFoundError. Without ``objects``, the client is
    created from the environment when it is needed.
    """

    def __init__(self, objects: Objects | None = None) -> None:
        self._objects = objects
        self._n_requests = self._n_refused = 0  # all requests; refused requests in a row, up to the latest
        self._refusal: OSError | None = None

    @property
    def objects(self) -> Objects:
        """The client for remote files."""
        if self._objects is None:
            self._objects = Objects.from_environment()
        return self._objects

    def of(self, paths: Sequence[str]) -> list[int]:
        """Return the ``size`` of each of ``look_up_states``: -1 if a file is gone or the request was refused."""
        return [state.size for state in self.look_up_states(paths)]

    def look_up_states(self, paths: Sequence[str]) -> list[FileState]:
        """Look up each file or object; return its state, or MISSING_STATE if it is gone or the request was refused.

        Each object costs one request.

        Raises:
            UsageError: the store refused 32 requests in a row, also over several calls.
        """
        remote_states = self._request_states([path for path in paths if is_remote(path)])
        return [next(remote_states) if is_remote(path) else _read_state_on_disk(path) for path in paths]

    def finish(self) -> None:
        """Raise UsageError if the store has refused all requests, even if there were only a few."""
        if self._refusal is not None and self._n_refused == self._n_requests:
            raise make_no_answer_error(self._refusal)

    def _request_states(self, uris: Sequence[str]) -> Iterator[FileState]:
        """Yield the state of each remote file in order, MISSING_STATE if it is gone or the request was refused.

        Requests and refusals are counted in ``self``; refusals in a row also across calls.

        Raises:
            UsageError: the store refused 32 requests in a row.
        """
        if not uris:
            return
        with request_threads(_MAX_REQUESTS) as pool:
            for start in range(0, len(uris), 8 * _MAX_REQUESTS):  # a map sends all its requests even after an error
                for answer in pool.map(self._head, uris[start : start + 8 * _MAX_REQUESTS]):
                    self._n_requests += 1
                    if isinstance(answer, OSError):
                        self._n_refused, self._refusal = self._n_refused + 1, answer
                        if self._n_refused == _MAX_REQUESTS:
                            raise make_no_answer_error(answer)
                        yield MISSING_STATE
                    else:
                        self._n_refused, self._refusal = 0, None
                        yield answer

    def _head(self, uri: str) -> FileState | OSError:
        """Return a remote file's state, MISSING_STATE if it is gone, or any other OSError, which is not raised."""
        try:
            _, size, mark = choose_client(uri, self.objects).info(uri)
        except FileNotFoundError:
            return MISSING_STATE
        except OSError as error:
            return error
        return FileState(size, hash_mark(mark) or 0)


def make_no_answer_error(refusal: OSError) -> UsageError:
    """Return the error for a store that does not answer; the message has the refused address and the remedy."""
    return UsageError(
        f"{refusal.filename}: cannot check whether cached videos have changed: {refusal.strerror}; "
        "--on-changed skip keeps them without this check"
    )


def _read_state_on_disk(path: str) -> FileState:
    """Return the state of a local video; MISSING_STATE if it is gone or cannot be read."""
    try:
        return read_source_state(path)
    except (OSError, ValueError):
        return MISSING_STATE


def compute_source_sample(uri: str, size: int, objects: Objects) -> int | None:
    """Return the ``hash_sample`` of a file or object of ``size`` bytes, in up to three requests.

    Returns:
        None if it is gone, or if a local file cannot be opened or a folder of frames is not complete.

    Raises:
        UsageError: the store fails or refuses the request, or reading a local file failed.
    """
    try:
        if not is_remote(uri):
            return compute_file_sample(uri)
        return hash_sample(
            size, [choose_client(uri, objects).read_slice(uri, *span).data for span in list_sample_spans(size)]
        )
    except (FileNotFoundError, VideoFault):
        return None
    except OSError as error:
        raise make_no_answer_error(error) from error
