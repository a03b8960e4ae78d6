"""Reading the tensors of a checkpoint without running its code, and the hashes that identify a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError
from gstep.families import FAMILIES, GENERIC

if TYPE_CHECKING:
    from gstep.checkpoints.source import ModelSource

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_USE = (
    "its scales would be dropped here. Use the unquantized checkpoint that it was made from, in bfloat16, float16 or "
    "float32 (often the same name without -FP8, -AWQ, -GPTQ-Int4 or -bnb-4bit); it may answer from a cache of that one "
    "by vLLM (jobs.generate --engine vllm, jobs.serve)"
)
#: Quantization methods that vLLM reads in a language model; the vision tower stays unquantized.
SERVED = ("awq", "compressed-tensors", "fp8", "gptq")
_MERGE = (
    "which is not applied here: merge it into the weights (merge_and_unload of peft, then save_pretrained), and name "
    "that folder"
)
# Words in tensor names of peft: factors and vectors of adapters, and the layers under them.
_ADAPTER = re.compile(r"(^|\.)(lora_\w+|ia3_l|vera_\w+|oft_\w+|hada_\w+|base_layer|modules_to_save)(\.|$)")
_PLAIN = frozenset({"BF16", "F16", "F32", "F64"})


@dataclass(frozen=True)
class TensorSource:
    """A checkpoint with safetensors files. Picklable; it denotes the same weights on every node.

    Attributes:
        name: the user's model argument.
        weight_files: the names of the safetensors files; empty for random weights.
    """

    name: str
    identity: str
    files: CheckpointFiles
    weight_files: tuple[str, ...]

    def file(self, filename: str) -> Path:
        """Return the local path of a file, downloaded or built on this node if necessary.

        Raises:
            ModelError: there is no such file, or it cannot be downloaded.
        """
        path = self.files.find(filename, required=True)
        if path is None:
            raise ModelError(f"{self.name!r} has no file {filename}: download the whole checkpoint")
        return path


def read_tensors(
    source: TensorSource,
    rename: Callable[[str], str | None],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Read the tensors that ``rename`` selects, copied to ``device``, by their new names.

    Args:
        rename: maps the name on disk to the new name, or to None for a tensor that is not read.
        dtype: the dtype to cast to; None keeps the stored dtype.

    Raises:
        ModelError: a file is missing or damaged, a selected tensor is quantized, or an opened file has tensors of an
            adapter.
    """
    # A copy: memory-mapped tensors are unaligned, and that may decide the last bit of a GEMM.
    return {name: values.to(device=device, dtype=dtype, copy=True) for name, values in iter_tensors(source, rename)}


def iter_tensors(source: TensorSource, rename: Callable[[str], str | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield (new name, memory-mapped values) of the tensors that ``rename`` selects.

    Only the files that may contain them are opened or downloaded.

    Args:
        rename: maps the name on disk to the new name, or to None for a tensor that is left out.

    Raises:
        ModelError: a file is missing or not a safetensors file, a selected tensor is quantized, or an opened file has
            tensors of an adapter.
    """
    for filename in list_files_to_read(source, rename):
        path = source.file(filename)
        try:
            with safe_open(path, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    _refuse_adapter_tensor(source.name, key)
                    if (name := rename(key)) is not None:
                        refuse_quantized_tensor(source.name, key, opened.get_slice(key).get_dtype())
                        yield name, opened.get_tensor(key)
        except SafetensorError as error:
            raise ModelError(f"{path} is not a complete safetensors file ({error}): download it again") from error


def list_files_to_read(source: TensorSource, rename: Callable[[str], str | None]) -> list[str]:
    """List the safetensors files that may contain a tensor selected by ``rename``; all files if there is no index."""
    index = {} if source.weight_files == (SINGLE,) else _read_index(source.name, source.files)
    if not index:
        return list(source.weight_files)
    return sorted({filename for key, filename in index.items() if rename(key) is not None})


def _read_index(name: str, files: CheckpointFiles) -> dict[str, str]:
    """Read the index of the shards, tensor name -> file name; empty without an index.

    Raises:
        ModelError: the index has no such mapping, or names anything but safetensors files in its folder.
    """
    content = files.read_json(INDEX)
    index = {} if content is None else content.get("weight_map")
    if not isinstance(index, dict) or (content is not None and not index):
        raise ModelError(f"{name!r}: {INDEX} has no weight_map from tensors to files: download the checkpoint again")
    for key, filename in index.items():
        if not isinstance(filename, str) or not filename.endswith(".safetensors"):
            raise ModelError(
                f"{name!r}: {INDEX} says that {key} is in {filename!r}, which names no safetensors file: download the "
                "checkpoint again"
            )
        if Path(filename).name != filename:
            raise ModelError(f"{name!r}: {INDEX} names files outside its folder: download the checkpoint again")
    return index


def read_tensor_types(source: TensorSource) -> dict[str, str | None] | None:
    """Read the names of all tensors, name -> safetensors type, without downloading weights.

    For a local checkpoint, they come from the headers of the files that exist. On the Hub, they come from the index,
    and the types are None; without an index, the result is None.

    Raises:
        ModelError: a file or the index is damaged.
    """
    if source.files.kind != "hub":
        folder = source.file("config.json").parent
        headers = [_read_header(folder / name)[1] for name in source.weight_files if (folder / name).is_file()]
        return {key: entry["dtype"] for entries in headers for key, entry in entries.items()}
    index = {} if source.weight_files == (SINGLE,) else _read_index(source.name, source.files)
    return dict.fromkeys(index) if index else None


def find_weight_files(name: str, files: CheckpointFiles) -> tuple[str, ...]:
    """Find the weight files with the precedence of from_pretrained: the single file, the index, or a folder's shards.

    Raises:
        ModelError: there are no safetensors files, the index is not valid, or there are tensors of an adapter in the
            weight files, or of an adapter or vision part in another file of the folder.
    """
    is_single = files.has(SINGLE)
    index = {} if is_single else _read_index(name, files)
    names = [SINGLE] if is_single else sorted(set(index.values())) or files.names(".safetensors")
    if not names:
        files.require_any(SINGLE, INDEX)
        pickles = ", ".join(files.names(".bin", ".pt", ".pth")) or "pytorch_model.bin, *.pt, *.pth"
        raise ModelError(
            f"{name!r} has no safetensors weights. Pickled weights ({pickles}) are refused, because loading them can "
            "run code: convert them where you trust them, with from_pretrained and then save_pretrained of transformers"
        )
    _refuse_adapter_tensors(name, files, names, index)
    return tuple(names)


def refuse_adapter_files(name: str, files: CheckpointFiles) -> None:
    """Raise ModelError if the checkpoint has files of an adapter, which transformers would apply but this project not.

    They are adapter_config.json and non_lora_trainables.bin. Errors of the Hub are ignored; if it is unreachable, its
    cache decides.
    """
    for filename in ("adapter_config.json", "non_lora_trainables.bin"):
        try:
            is_present = files.has(filename)
        except ModelError:
            return
        if is_present:
            raise ModelError(f"{name!r} has an adapter ({filename}), {_MERGE}")


def _refuse_adapter_tensors(
    name: str, files: CheckpointFiles, weight_files: Sequence[str], index_names: Iterable[str]
) -> None:
    """Raise ModelError for tensors of an adapter, and for tensors of the vision part that only a stray file has.

    A stray file is a safetensors file in the folder that is not in ``weight_files``. Damaged files, and tensors of
    files on the Hub that are not in ``index_names``, are not checked here.
    """
    keys = {*index_names}
    stray_files = dict[str, str]()
    for filename in files.names(".safetensors"):
        with suppress(ModelError):  # a damaged weight file is refused where it is read
            entries = _read_header(files.folder() / filename)[1]
            if filename in weight_files:
                keys |= entries.keys()
            else:
                stray_files |= dict.fromkeys(entries, filename)
    for key in keys:
        _refuse_adapter_tensor(name, key)
    for key, filename in stray_files.items():
        if key not in keys and (_map_tower_name(key) or _ADAPTER.search(key)):
            raise ModelError(
                f"{name!r}: {filename} holds {key}, which no weight file has: merge it into the weights, or remove the "
                "file"
            )


def _refuse_adapter_tensor(name: str, key: str) -> None:
    """Raise ModelError if the tensor name ``key`` belongs to an adapter, or to a layer under one."""
    if _ADAPTER.search(key):
        raise ModelError(f"{name!r} holds an adapter ({key}), {_MERGE}")


def refuse_quantized(name: str, config: Mapping[str, Any], served_methods: Collection[str] = ()) -> None:
    """Raise ModelError if config.json, or a part such as text_config, has a ``quantization_config``.

    Methods in ``served_methods`` are allowed.
    """
    for key, quantization in iter_quantizations(config):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        if method not in served_methods:
            raise ModelError(f"{name!r} is quantized ({key} in config.json: {method or 'an unnamed method'}): {_USE}")


def iter_quantizations(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each ``quantization_config`` in config.json and its parts that is not empty.

    For a part, the key is "text_config.quantization_config", for example.
    """
    for part, settings in {"": config, **config}.items():
        if isinstance(settings, dict) and (quantization := settings.get("quantization_config")):
            yield (f"{part}.quantization_config" if part else "quantization_config"), quantization


def refuse_quantized_tensor(name: str, tensor: str, dtype: str) -> None:
    """Raise ModelError unless ``dtype``, a safetensors type such as "F8_E4M3", is a float of 16 bits or more."""
    if dtype not in _PLAIN:
        raise ModelError(f"{name!r} is quantized ({tensor} is stored as {dtype}): {_USE}")


_MAX_HEADER_BYTES = 10**8  # the limit of the safetensors library
# A fine-tune has the same names, shapes and sizes as its parent: only content tells them apart.
SAMPLE_BYTES = 4096

# Keys of config.json that describe the file's history and change no token.
IRRELEVANT_KEYS = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")

_TOWER = ("vision_tower.", "multi_modal_projector.", "image_newline", "visual.")
# Tensors of language models, of text decoders at the top level, and of the audio modules of Omni models.
_LLM = re.compile(
    r"(^|\.)(language_model|text_model\.(layers|embed_tokens)|lm_head)\."
    r"|^(thinker\.)?(model\.)?(layers|embed_tokens|norm)\.|^(talker|token2wav|code2wav|(thinker\.)?audio_tower)\."
)
# Tensors that no token depends on; libraries may leave them out when they rewrite a checkpoint.
_UNUSED = ("vision_tower.head.", "vision_tower.embeddings.position_ids")


class _TensorEntry(TypedDict):
    """The entry of a tensor in a safetensors header; data_offsets are [start, end) in bytes after the header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


def compute_folder_identity(folder: Path, filenames: Iterable[str], config: Mapping[str, Any]) -> str:
    """Compute "folder:<hash>" of the config and of each safetensors file's name, size, header and samples.

    The samples are the first 4 KiB of every tensor. Missing files, and keys of the config that change no token, are
    left out.

    Raises:
        ModelError: a file is not a safetensors file.
    """
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT_KEYS}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True).encode())
    for path in (folder / name for name in sorted(filenames)):
        if path.is_file():  # shards of only the language model may be missing
            digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
            _hash_file(digest, path)
    return f"folder:{digest.hexdigest()[:32]}"


def read_tensor_samples(path: Path, prefix: str) -> list[tuple[str, bytes]]:
    """Read ("name dtype shape", first 4 KiB) of each tensor whose name starts with ``prefix``, sorted by name."""
    header, entries = _read_header(path)
    entries_of_prefix = sorted((name, entry) for name, entry in entries.items() if name.startswith(prefix))
    samples = _read_samples(path, len(header), [entry["data_offsets"] for _, entry in entries_of_prefix])
    texts = [f"{name} {entry.get('dtype')} {entry.get('shape')}" for name, entry in entries_of_prefix]
    return list(zip(texts, samples, strict=True))


def _hash_file(digest: hashlib._Hash, path: Path) -> None:
    """Add a safetensors file's header and the first 4 KiB of each tensor, in the order of the file, to the digest."""
    header, entries = _read_header(path)
    digest.update(header)
    for sample in _read_samples(path, len(header), sorted(entry["data_offsets"] for entry in entries.values())):
        digest.update(sample)


def _read_header(path: Path) -> tuple[bytes, dict[str, _TensorEntry]]:
    """Read the header of a safetensors file: (raw bytes, tensor name -> entry).

    Raises:
        ModelError: the header is damaged or truncated; the data after it is not checked.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length < min(path.stat().st_size, _MAX_HEADER_BYTES) else b""
    try:
        tensors = json.loads(header)
        entries = {name: entry for name, entry in tensors.items() if name != "__metadata__"}
        for entry in entries.values():
            start, end = entry["data_offsets"]
            if not (type(start) is type(end) is int and 0 <= start <= end and isinstance(entry["dtype"], str)):
                raise ValueError(f"{entry} describes no tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} is no safetensors file: download it again (after a git clone: git lfs pull)"
        ) from error
    return header, entries


def _read_samples(path: Path, header_length: int, spans: Iterable[Sequence[int]]) -> Iterator[bytes]:
    """Yield at most the first SAMPLE_BYTES of each span [start, end) after the header."""
    with path.open("rb") as file:
        for start, end in spans:
            file.seek(8 + header_length + start)
            yield file.read(min(SAMPLE_BYTES, end - start))


def compute_tower_hash(source: ModelSource) -> str | None:
    """Hash all weights that visual tokens depend on: "blake2b-f16:<hex>"; None for random weights.

    These tensors are read completely, a gigabyte or two, and cast to float16. For the families of the table, the
    tensors of the tower are known; for ``generic`` and user families, all tensors count except those whose names belong
    to a language model.

    Raises:
        ModelError: such a tensor is quantized, or a file is missing or damaged.
    """
    if not source.weight_files:
        return None
    digests = {}
    is_known = source.family in FAMILIES and source.family != GENERIC
    for name, values in iter_tensors(source, _map_tower_name if is_known else _map_non_llm_name):
        digest = hashlib.blake2b(f"{name} {list(values.shape)} ".encode(), digest_size=16)
        digest.update(values.to(torch.float16).contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digests[name] = digest.hexdigest()
    return f"blake2b-f16:{hashlib.blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()}"


def _map_tower_name(key: str) -> str | None:
    """Map a name on disk to the name in memory of a tensor that visual tokens depend on; None for others."""
    name = key.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.", 1)
    return name if name.startswith(_TOWER) and not name.startswith(_UNUSED) else None


def _map_non_llm_name(key: str) -> str | None:
    """Remove "model." from the beginning of a tensor's name; None for a tensor of a language model."""
    return None if _LLM.search(key) else key.removeprefix("model.")
