"""Several cached videos as one batch of tensors, which data loaders can move, concatenate and divide."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from pipeline.cache.cached_video import CachedVideo
from pipeline.rows import VideoRow

_DEEPSTACK, _EVIDENCE = "deepstack_", "evidence_"  # prefixes of tensor names
_TOKENS, _METADATA, _FIRST_EVIDENCE = range(3)  # columns of the tensor "lengths"


class Packed(Mapping[str, Tensor]):
    """A batch of n videos whose tokens are concatenated, without padding.

    Training reads its properties. It is also a mapping of all its tensors by name, which Accelerate and the HF Trainer
    move, concatenate and send to other processes: each tensor is a concatenation over the videos. In shapes, K is the
    number of tokens of a video.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Sequence[VideoRow] | None = None) -> None:
        """Wrap the tensors of :func:`pack`, or of another batch.

        Args:
            tensors: by name. ``lengths`` [n,2+E] int64 has, per video, the number of its tokens, of its bytes in
                ``metadata``, and of its rows in each of the E ``evidence_*``. ``metadata`` uint8 has the videos' rows
                as JSON.
            metadata: the same rows if known, which saves parsing the tensor.

        Raises:
            ValueError: a loader cut every tensor at the same row instead of between videos.
        """
        self._tensors = dict(tensors)
        self._metadata = None if metadata is None else tuple(metadata)
        if self._tensors["metadata"].shape[0] < 2 * self._tensors["lengths"].shape[0]:  # {} is the shortest JSON
            raise ValueError(
                "a loader cut every tensor of a packed batch at the same row, but its videos have several rows each: "
                "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)) keeps batches whole"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of tensors; the number of videos is ``len(video_ids)``."""
        return len(self._tensors)

    def __repr__(self) -> str:
        shapes = (f"{name} {list(tensor.shape)}" for name, tensor in self.items())
        return f"Packed({len(self['lengths'])} videos: {', '.join(shapes)})"

    @property
    def video_ids(self) -> tuple[str, ...]:
        """The ids of the n videos."""
        return tuple(row["video_id"] for row in self.metadata)

    @property
    def tokens(self) -> Tensor:
        """The tokens of all videos, [sum K,D] bfloat16."""
        return self["tokens"]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[n+1] int32, the start of each video in the tokens, and the end, for attention over packed sequences."""
        return self._bounds[:, _TOKENS].to(torch.int32)

    @property
    def index(self) -> Tensor:
        """The flat index t*N + i of each token in its video, [sum K] int64."""
        return self["index"]

    @property
    def frame(self) -> Tensor:
        """The frame t of each token, [sum K] int64."""
        return self["frame"]

    @property
    def deepstack(self) -> tuple[Tensor, ...]:
        """The tokens at each deepstack level, [sum K,D] bfloat16; empty for a model without levels."""
        return tuple(tensor for name, tensor in self.items() if name.startswith(_DEEPSTACK))

    @property
    def metadata(self) -> tuple[VideoRow, ...]:
        """The row of each video in the videos table."""
        if self._metadata is None:
            text = self["metadata"].cpu().numpy().tobytes()
            bounds = self._bounds[:, _METADATA].tolist()
            self._metadata = tuple(json.loads(text[start:end]) for start, end in pairwise(bounds))
        return self._metadata

    @cached_property
    def evidence(self) -> dict[str, tuple[Tensor, ...]]:
        """The evidence by name, one tensor per video."""
        names = [name for name in self if name.startswith(_EVIDENCE)]
        lengths = self["lengths"][:, _FIRST_EVIDENCE:].T.tolist()
        return {
            name.removeprefix(_EVIDENCE): torch.split(self[name], rows_per_video)
            for name, rows_per_video in zip(names, lengths, strict=True)
        }

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Packed:
        """Return a new batch with all tensors on a device."""
        tensors = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()}
        return Packed(tensors, self._metadata)

    def pin_memory(self) -> Packed:
        """Return a new batch in pinned memory; DataLoader calls this with ``pin_memory=True``."""
        return Packed({name: tensor.pin_memory() for name, tensor in self.items()}, self._metadata)

    def select(self, videos: slice) -> Packed:
        """Return a batch of consecutive videos, which shares this one's memory; the slice's step is ignored."""
        start, end, _ = videos.indices(len(self["lengths"]))
        firsts, lasts = self._bounds[[start, max(start, end)]].tolist()
        names = [name for name in self if name.startswith(_EVIDENCE)]
        evidence_columns = {name: _FIRST_EVIDENCE + number for number, name in enumerate(names)}
        # The column of ``lengths`` that counts the rows of each tensor.
        columns = dict.fromkeys(self, _TOKENS) | {"metadata": _METADATA} | evidence_columns
        tensors = {
            name: tensor[start:end] if name == "lengths" else tensor[firsts[columns[name]] : lasts[columns[name]]]
            for name, tensor in self.items()
        }
        return Packed(tensors, None if self._metadata is None else self._metadata[start:end])

    @cached_property
    def _bounds(self) -> Tensor:
        """[n+1,2+E] int64, the start of each video in the tensors, by the columns of ``lengths``, and the ends."""
        return torch.nn.functional.pad(self["lengths"].cumsum(0), (0, 0, 1, 0))


def pack(videos: Sequence[CachedVideo]) -> Packed:
    """Concatenate one or more videos into a batch without padding; use it as the ``collate_fn`` of a DataLoader.

    Evidence that the first video lacks is dropped.

    Raises:
        KeyError: a video lacks evidence that the first video has.
        ValueError: videos have different numbers of deepstack levels.
    """
    names = list(videos[0].evidence)
    rows = [json.dumps(video.metadata).encode() for video in videos]
    lengths = [
        [len(video.index), len(row), *(len(video.evidence[name]) for name in names)]
        for video, row in zip(videos, rows, strict=True)
    ]
    levels = zip(*(video.deepstack for video in videos), strict=True)
    return Packed(
        {
            "lengths": torch.tensor(
                lengths
            ),  # first, because Accelerate takes the length of the first tensor as the batch size
            "tokens": _concatenate_tensors([video.tokens for video in videos]),
            "index": _concatenate_tensors([video.index for video in videos]),
            "frame": _concatenate_tensors([video.frame for video in videos]),
            **{f"{_DEEPSTACK}{number}": _concatenate_tensors(level) for number, level in enumerate(levels)},
            **{
                f"{_EVIDENCE}{name}": _concatenate_tensors([video.evidence[name] for video in videos]) for name in names
            },
            "metadata": torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8),
        },
        [video.metadata for video in videos],
    )


def select_videos(batch: Any, videos: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Return a slice of a batch; Accelerate calls this to divide a batch among processes.

    Packed batches are sliced by videos, also inside tuples, lists and mappings, whose types are kept; other tensors are
    sliced by rows. Other objects are returned as they are. The last two arguments are ignored.
    """
    if isinstance(batch, Packed):
        return batch.select(videos)
    if isinstance(batch, Tensor):
        return batch[videos]
    kind: Any = type(batch)
    if isinstance(batch, Mapping):
        return kind({name: select_videos(part, videos) for name, part in batch.items()})
    if isinstance(batch, tuple | list):
        parts = [select_videos(part, videos) for part in batch]
        return kind(*parts) if hasattr(batch, "_fields") else kind(parts)
    return batch


def _concatenate_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors along the first axis; in a worker into shared memory, which saves a copy."""
    first = parts[0]
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    n_bytes = math.prod(shape) * first.itemsize
    if get_worker_info() is None:  # unlike torch, numpy requests huge pages: a quarter of the time
        out = torch.from_numpy(np.empty(n_bytes, np.uint8)).view(first.dtype)
    else:
        out = first.new(first.untyped_storage()._new_shared(n_bytes, device=first.device))  # type: ignore[no-untyped-call]
    return torch.cat(list(parts), out=out.view(shape))
