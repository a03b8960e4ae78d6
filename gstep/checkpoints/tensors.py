"""Single tensors of a checkpoint's safetensors files, and which files those are; quantized ones are refused.

Nothing here unpickles, or runs code that comes with a checkpoint. No model here applies the scales without which
quantized weights mean nothing, but vLLM does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_USE = (
    "its scales would be dropped here. Use the unquantized checkpoint that it was made from, in bfloat16, float16 or "
    "float32 (often the same name without -FP8, -AWQ, -GPTQ-Int4 or -bnb-4bit); it may answer from a cache of that one "
    "by vLLM (jobs.generate --engine vllm, jobs.serve)"
)
#: Methods by which vLLM reads a language model's weights; the vision tower is stored as it was.
SERVED = ("awq", "compressed-tensors", "fp8", "gptq")
_PLAIN = frozenset({"BF16", "F16", "F32", "F64"})


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint whose safetensors files were found. Pickles; means the same weights on every node.

    Attributes:
        name: the argument as given.
        identity: says which weights these are.
        files: where its files are; ``files.revision`` is the commit sha of a Hugging Face id.
        weight_files: the names of the safetensors files; none where the weights are random.
    """

    name: str
    identity: str
    files: CheckpointFiles
    weight_files: tuple[str, ...]

    def file(self, filename: str) -> Path:
        """Return the local path of a file of the checkpoint, downloaded or built on this node if need be.

        Raises ModelError where there is no such file.
        """
        path = self.files.find(filename)
        if path is None:
            raise ModelError(f"{self.name!r} has no file {filename}: download the whole checkpoint")
        return path


def read_tensors(
    source: TensorSource,
    wanted: Callable[[str], str | None],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Read only the tensors that ``wanted`` gives a name to; only shards that hold one are opened (or downloaded).

    Args:
        wanted: the name on disk -> the name in the result, or None for a tensor to leave alone.
        dtype: cast to it; None keeps what is stored.

    Raises ModelError where a file is missing or is no safetensors file, or a tensor is quantized.
    """
    # A copy: memory-mapped tensors are unaligned, and that may decide the last bit of a GEMM.
    return {name: values.to(device=device, dtype=dtype, copy=True) for name, values in each_tensor(source, wanted)}


def each_tensor(source: TensorSource, wanted: Callable[[str], str | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the new name and the memory-mapped values of each tensor, chosen and refused as by ``read_tensors``."""
    for filename in files_with(source, wanted):
        path = source.file(filename)
        try:
            with safe_open(path, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    if (name := wanted(key)) is not None:
                        refuse_stored(source.name, key, opened.get_slice(key).get_dtype())
                        yield name, opened.get_tensor(key)
        except SafetensorError as error:
            raise ModelError(f"{path} is no complete safetensors file ({error}): download it again") from error


def files_with(source: TensorSource, wanted: Callable[[str], str | None]) -> list[str]:
    """List the safetensors files that may hold a tensor which ``wanted`` gives a name to."""
    index = None if source.weight_files == (SINGLE,) else source.files.read_json(INDEX)
    if index is None:
        return list(source.weight_files)
    return sorted({filename for key, filename in index["weight_map"].items() if wanted(key) is not None})


def find_weight_files(name: str, files: CheckpointFiles) -> tuple[str, ...]:
    """Find the weight files in the order of precedence of from_pretrained: one file, an index, or a folder's shards.

    Raises ModelError where there are no safetensors files.
    """
    if files.has(SINGLE):
        return (SINGLE,)
    index = files.read_json(INDEX)
    names = files.names(".safetensors") if index is None else sorted(set(index.get("weight_map", {}).values()))
    if not names:
        pickles = ", ".join(files.names(".bin", ".pt", ".pth")) or "pytorch_model.bin, *.pt, *.pth"
        raise ModelError(
            f"{name!r} has no safetensors weights. Pickled weights ({pickles}) are refused, because loading them can "
            "run code: convert them where you trust them, with from_pretrained and then save_pretrained of transformers"
        )
    if any(Path(filename).name != filename for filename in names):
        raise ModelError(f"{name!r}: {INDEX} names files outside its folder: download the checkpoint again")
    return tuple(names)


def refuse_quantized(name: str, config: Mapping[str, Any], served: Collection[str] = ()) -> None:
    """Raise ModelError where config.json, or a part of it such as text_config, has a ``quantization_config``.

    Methods in ``served`` are let through.
    """
    for part, settings in {"": config, **config}.items():
        found = settings.get("quantization_config") if isinstance(settings, dict) else None
        method = found.get("quant_method") if isinstance(found, dict) else None
        if found and method not in served:
            where = f"{part}.quantization_config" if part else "quantization_config"
            raise ModelError(f"{name!r} is quantized ({where} in config.json: {method or 'an unnamed method'}): {_USE}")


def refuse_stored(name: str, tensor: str, dtype: str) -> None:
    """Raise ModelError where a needed tensor is stored in another ``dtype`` than a float of 16 bits or more.

    ``dtype`` is in the words of safetensors: "BF16", "F8_E4M3", "I8".
    """
    if dtype not in _PLAIN:
        raise ModelError(f"{name!r} is quantized ({tensor} is stored as {dtype}): {_USE}")
