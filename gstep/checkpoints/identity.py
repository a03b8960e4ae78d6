"""The identity of the weights in a local folder, computed from a few kilobytes of each tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from gstep.errors import ModelError

# A fine-tune has the same names, shapes and sizes as its parent: only content tells them apart.
SAMPLE_BYTES = 4096

# Keys of config.json about the history of the file, which change no token.
IRRELEVANT_KEYS = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


class _Entry(TypedDict):
    """The entry of a tensor in a safetensors header: data_offsets are its first byte and the one behind it."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def folder_identity(folder: Path, filenames: Iterable[str], config: Mapping[str, Any]) -> str:
    """Compute "folder:<hash>" of the config and of each safetensors file's name, size, header and a sample.

    The sample is the first 4 KiB of every tensor. Raises ModelError for a file that is no safetensors file.
    """
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for path in (folder / name for name in sorted(filenames)):
        if path.is_file():  # shards of the language model alone may have been left out
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            _update(digest, path)
    return f"folder:{digest.hexdigest()[:32]}"


def tensor_samples(path: Path, prefix: str) -> list[tuple[str, bytes]]:
    """Return name, dtype and shape of each tensor of a safetensors file, and its first 4 KiB.

    Tensors are those whose name starts with ``prefix``, sorted by name. Raises ModelError for a file that is no
    safetensors file.
    """
    header, entries = _header(path)
    chosen = sorted((name, entry) for name, entry in entries.items() if name.startswith(prefix))
    samples = _samples(path, len(header), [entry["data_offsets"] for _, entry in chosen])
    texts = [f"{name} {entry.get('dtype')} {entry.get('shape')}" for name, entry in chosen]
    return list(zip(texts, samples, strict=True))


def _update(digest: hashlib._Hash, path: Path) -> None:
    """Add a safetensors file's header and the sample of each of its tensors to the digest."""
    header, entries = _header(path)
    digest.update(header)
    for sample in _samples(path, len(header), sorted(entry["data_offsets"] for entry in entries.values())):
        digest.update(sample)


def _header(path: Path) -> tuple[bytes, dict[str, _Entry]]:
    """Read the header of a safetensors file as it is stored, and its entries of tensors by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < path.stat().st_size else b""
    try:
        tensors = json.loads(header)
        entries = {name: entry for name, entry in tensors.items() if name != "__metadata__"}
        sorted(entry["data_offsets"] for entry in entries.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{path} is no safetensors file: download it again (after a git clone: git lfs pull)"
        ) from error
    return header, entries


def _samples(path: Path, header_length: int, spans: Iterable[Sequence[int]]) -> Iterator[bytes]:
    """Yield the first bytes of each stretch [start, end) behind the header."""
    with path.open("rb") as file:
        for start, end in spans:
            file.seek(8 + header_length + start)
            yield file.read(min(SAMPLE_BYTES, end - start))
