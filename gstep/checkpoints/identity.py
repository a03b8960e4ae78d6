"""The identity of weights: of a folder, by a few kilobytes of each tensor, and of a vision tower, by all bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from gstep.checkpoints.tensors import TensorSource, each_tensor
from gstep.errors import ModelError

# A fine-tune has the same names, shapes and sizes as its parent: only content tells them apart.
SAMPLE_BYTES = 4096

# Keys of config.json about the history of the file, which change no token.
IRRELEVANT_KEYS = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")

_TOWER = ("vision_tower.", "multi_modal_projector.", "image_newline", "visual.")
# What no token is made of, and what libraries may leave out where they write a checkpoint anew.
_UNUSED = ("vision_tower.head.", "vision_tower.embeddings.position_ids")


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


def tower_hash(source: TensorSource) -> str | None:
    """Return "blake2b-f16:<hex>" of all weights that visual tokens are made with; None where weights are random.

    Values count as float16, in which quantized checkpoints hold what was bfloat16, and names as in memory, which differ
    on disk by library version. It reads these tensors whole, a gigabyte or two, and no others.

    Raises ModelError where one of them is quantized itself, or a file is missing or damaged.
    """
    if not source.weight_files:
        return None
    digests = {}
    for name, values in each_tensor(source, _used):
        digest = hashlib.blake2b(f"{name} {list(values.shape)} ".encode(), digest_size=16)
        digest.update(values.to(torch.float16).contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests[name] = digest.hexdigest()
    return f"blake2b-f16:{hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()}"


def _used(key: str) -> str | None:
    """Return the name in memory of a tensor that visual tokens are made with; None for any other tensor."""
    name = key.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(_TOWER) and not name.startswith(_UNUSED) else None
