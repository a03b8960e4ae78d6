"""Tars for tests: honest ones, and such as nobody should trust."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

BLOCK = 512


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: object) -> bytes:
    """Return a member as bytes: its header, its data and the padding."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(data)
    for key, value in more.items():
        setattr(info, key, value)
    # A name that is no UTF-8 stays in the plain header only where the format is GNU's.
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + data + b"\0" * (-len(data) % BLOCK)


def pax(**records: str) -> bytes:
    """Return an extended header with these records."""
    data = b""
    for key, value in records.items():
        body = f" {key.replace('__', '.')}={value}\n".encode("utf-8", "surrogateescape")
        length = len(body) + 1
        while len(str(length)) + len(body) != length:
            length = len(str(length)) + len(body)
        data += str(length).encode() + body
    return member("pax", data, tarfile.XHDTYPE)


def ended(*members: bytes) -> bytes:
    """Return a whole tar of members."""
    return b"".join(members) + b"\0" * (2 * BLOCK)


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    """Write a tar as Python's library does."""
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def renumbered(header: bytes, change: Callable[[bytearray], object]) -> bytes:
    """Return a header that was changed, with the checksum that it has then."""
    block = bytearray(header[:BLOCK])
    change(block)
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + header[BLOCK:]
