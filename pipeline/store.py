"""Where a cache lives: whole files that appear in one step or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pyarrow as pa


class LocalStore:
    """A folder. Names are POSIX paths relative to it."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def put(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file in one atomic step: it is complete and on disk under ``name``, or absent."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:  # "No space left on device" alone would not say where
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            temporary.unlink(missing_ok=True)  # gone already where it was renamed
        _fsync_folder(path.parent)

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        return (self.root / name).read_bytes()

    def open(self, name: str) -> pa.NativeFile:
        """The file for random access. Raises FileNotFoundError."""
        return pa.memory_map(str(self.root / name), "r")

    def names(self, folder: str, suffix: str) -> list[str]:
        """The finished files of a folder, sorted; temporary ones are left out."""
        found = (self.root / folder).glob(f"*{suffix}")
        return sorted(f"{folder}/{path.name}" for path in found if not path.name.startswith(".") and path.is_file())

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def __str__(self) -> str:
        return str(self.root)


def _fsync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
