"""Archives for tests: honest ones, and tars such as nobody should trust."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 512
FILES = {f"{number:02}.mp4": random.Random(number).randbytes(20_000 * (number % 3) + number) for number in range(12)}


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


def write_tars(folder: Path) -> Path:
    """Write three tars of 3, 2 and 1 videos, and return their folder."""
    folder.mkdir()
    for number in range(3):
        write_tar(folder / f"{number}.tar", {f"{part}.mp4": bytes(100) for part in range(3 - number)})
    return folder


def write_doubled_tars(folder: Path) -> list[str]:
    """Write two tars of one name, with an id in common that is neither's only one, and one more; return their paths."""
    places = [folder / name / "0.tar" for name in "pq"]
    for place, names in zip(places, ("ab", "ca"), strict=True):
        place.parent.mkdir()
        write_tar(place, {f"{name}.mp4": name.encode() for name in names})
    return [*map(str, places), str(write_tar(folder / "1.tar", {"a.mp4": b"a"}))]


def renumbered(header: bytes, change: Callable[[bytearray], object]) -> bytes:
    """Return a header that was changed, with the checksum that it has then."""
    block = bytearray(header[:BLOCK])
    change(block)
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + header[BLOCK:]


def write_zip(path: Path, files: Mapping[str, bytes | str] = FILES, **facts: object) -> Path:
    """Write a zip of stored and deflated members, of whose entries ``facts`` are true."""
    with zipfile.ZipFile(path, "w") as file:
        for number, (name, data) in enumerate(files.items()):
            info = zipfile.ZipInfo(name)
            for fact, value in facts.items():
                setattr(info, fact, value)
            file.writestr(info, data, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])
    return path


def write_parquet(path: Path, files: Mapping[str, bytes] = FILES) -> Path:
    """Write a table of videos with ids and labels, in groups of five rows."""
    columns = {"video": list(files.values()), "video_id": list(files), "label": list(range(len(files)))}
    pq.write_table(pa.table(columns), path, row_group_size=5)
    return path
