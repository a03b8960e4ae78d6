"""The hash of a checkpoint's vision tower and projector: models that share them understand each other's tokens."""

from __future__ import annotations

import hashlib

import torch

from gstep.checkpoints.tensors import TensorSource, each_tensor

_PARTS = ("vision_tower.", "multi_modal_projector.", "image_newline", "visual.")
# What no token is made of, and what libraries may leave out where they write a checkpoint anew.
_UNUSED = ("vision_tower.head.", "vision_tower.embeddings.position_ids")


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
    return name if name.startswith(_PARTS) and not name.startswith(_UNUSED) else None
