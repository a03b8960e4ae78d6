"""What videos take now: one look at each file, one HEAD for each object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from pipeline.errors import UsageError
from pipeline.storage.s3 import Objects, is_object
from pipeline.video.frame_folders import source_bytes

_ASKED = 32  # requests at a time


class Sizes:
    """Asks for sizes, and notices a store that never answers: "unchanged" would be a guess then."""

    def __init__(self, objects: Objects | None = None) -> None:
        self._objects = objects
        self._asked = self._refused = 0  # requests; those in a row, up to the last one, that were refused
        self._refusal: OSError | None = None

    def of(self, paths: Sequence[str]) -> list[int]:
        """Bytes of each file or object; -1 where it is gone or this one cannot be asked about.

        Raises UsageError once the store has refused as many in a row as are asked at a time.
        """
        found = self._on_s3([path for path in paths if is_object(path)])
        return [next(found) if is_object(path) else _on_disk(path) for path in paths]

    def finish(self) -> None:
        """Raises UsageError where the store has refused all that was asked, however few."""
        if self._refusal is not None and self._refused == self._asked:
            raise _no_answer(self._refusal)

    def _on_s3(self, uris: Sequence[str]) -> Iterator[int]:
        if not uris:
            return
        pool = ThreadPoolExecutor(_ASKED)
        try:
            for start in range(0, len(uris), 8 * _ASKED):  # not all at once: they would all be asked before an end
                yield from self._counted(pool.map(self._head, uris[start : start + 8 * _ASKED]))
        finally:
            pool.shutdown(cancel_futures=True)

    def _counted(self, answers: Iterable[int | OSError]) -> Iterator[int]:
        for answer in answers:
            refusal = answer if isinstance(answer, OSError) else None
            self._asked += 1
            self._refused = self._refused + 1 if refusal else 0
            self._refusal = refusal
            if refusal and self._refused == _ASKED:
                raise _no_answer(refusal)
            yield -1 if isinstance(answer, OSError) else answer

    def _head(self, uri: str) -> int | OSError:
        if self._objects is None:
            self._objects = Objects.from_environment()
        try:
            return self._objects.size(uri)
        except FileNotFoundError:
            return -1
        except OSError as error:
            return error


def _no_answer(refusal: OSError) -> UsageError:
    return UsageError(
        f"{refusal.filename}: whether cached videos have changed cannot be asked: {refusal.strerror}; "
        "--on-changed skip keeps them unasked"
    )


def _on_disk(path: str) -> int:
    try:
        return source_bytes(path)
    except (OSError, ValueError):
        return -1
