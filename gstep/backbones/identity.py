"""Which weights a local folder holds, told from a few kilobytes of each tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gstep.errors import ModelError

# A fine-tune has the same names, shapes and sizes as its parent: only content tells them apart.
SAMPLE_BYTES = 4096

# What a config.json says about its own history, and nothing about the tokens.
_NO_MATTER = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


def folder_identity(folder: Path, filenames: Iterable[str], config: Mapping[str, Any]) -> str:
    """ "folder:<hash>" of the config and, for each safetensors file that is there, its name, size, header and a sample.

    The sample is the first 4 KiB of every tensor. Raises ModelError for a file that is no safetensors file.
    """
    relevant = {key: value for key, value in config.items() if key not in _NO_MATTER}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for path in (folder / name for name in sorted(filenames)):
        if path.is_file():  # shards of the language model alone may have been left out
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            _update(digest, path)
    return f"folder:{digest.hexdigest()[:32]}"


def _update(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < path.stat().st_size else b""
        try:
            tensors = json.loads(header)
            spans = sorted(entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"{path} is no safetensors file: download it again (after a git clone: git lfs pull)"
            ) from error
        digest.update(header)
        for start, end in spans:
            file.seek(8 + length + start)
            digest.update(file.read(min(SAMPLE_BYTES, end - start)))
