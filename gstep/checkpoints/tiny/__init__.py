"""The tiny models: seeded random checkpoints of a megabyte in published layouts, for runs without a download.

Their files have the same bytes on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import save_file

from gstep.checkpoints.tiny import tokenizer
from gstep.checkpoints.tiny.internvl import INTERNVL
from gstep.checkpoints.tiny.llava_onevision import LLAVA_ONEVISION, SIGLIP
from gstep.checkpoints.tiny.parts import TinyModel
from gstep.checkpoints.tiny.qwen import QWEN2_5_VL, QWEN3_5, QWEN3_5_MOE, QWEN3_VL, QWEN3_VL_MOE
from gstep.checkpoints.tiny.weights import draw_weights
from gstep.errors import ModelError

VERSION = "2"  # increase it with any change to the files: cached tokens of another version are refused

TINY: Mapping[str, TinyModel] = {
    "tiny": LLAVA_ONEVISION,
    "tiny-qwen2-5-vl": QWEN2_5_VL,
    "tiny-qwen3-vl": QWEN3_VL,
    "tiny-qwen3-vl-moe": QWEN3_VL_MOE,
    "tiny-qwen3-5": QWEN3_5,
    "tiny-qwen3-5-moe": QWEN3_5_MOE,
    "tiny-internvl": INTERNVL,
}
#: Checkpoints from which single tensors are taken; they are not video models.
PARTS: Mapping[str, TinyModel] = {"tiny-siglip": SIGLIP}
_ALL = {**TINY, **PARTS}


def build(name: str) -> Path:
    """Return the folder of a tiny model, which is built if it is missing, below XDG_CACHE_HOME or the temporary folder.

    Several processes may build it at the same time: the folder appears complete, by one rename.

    Raises:
        ModelError: the folder cannot be written, or belongs to another user.
    """
    folder = _choose_cache_root() / compute_tiny_identity(name).replace(":", "-")
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
        try:
            write_tiny_model(name, scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if not folder.is_dir():  # otherwise another process built the same bytes first
            raise ModelError(
                f"cannot write to {folder.parent} ({error}): set XDG_CACHE_HOME to a writable folder with free space"
            ) from error
    return folder


def write_tiny_model(name: str, folder: Path) -> None:
    """Write all files of the tiny model ``name`` into an existing folder, over existing ones."""
    model = _ALL[name]
    save_file(draw_weights(model.tensors, model.config), folder / "model.safetensors", metadata={"format": "pt"})
    for filename, content in {"config.json": model.config, **model.processor_files}.items():
        (folder / filename).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.write_trained_tokenizer(folder, model.tokenizer)


@cache
def compute_tiny_identity(name: str) -> str:
    """Compute "<name>:<version>-<hash>"; the hash covers the config and every weight, so that nodes can be compared.

    The first call for a name in a process draws all its weights.
    """
    model = _ALL[name]
    digest = hashlib.sha256(json.dumps(model.config, sort_keys=True).encode())
    for key, array in sorted(draw_weights(model.tensors, model.config).items()):
        digest.update(f"\n{key} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return f"{name}:{VERSION}-{digest.hexdigest()[:12]}"


def _choose_cache_root() -> Path:
    """Return the parent folder of tiny models: $XDG_CACHE_HOME/gstep, or gstep-<uid> in the temporary folder.

    Raises:
        ModelError: the folder in the temporary folder belongs to another user.
    """
    if cache_home := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache_home).expanduser() / "gstep"
    root = Path(tempfile.gettempdir()) / f"gstep-{os.getuid()}"
    if root.exists() and root.stat().st_uid != os.getuid():
        raise ModelError(f"{root} belongs to another user: set XDG_CACHE_HOME to a folder of your own")
    return root
