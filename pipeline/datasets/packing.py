"""Several cached videos as one batch of tensors, which loaders can move, join and divide."""

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

_DEEPSTACK, _EVIDENCE = "deepstack_", "evidence_"  # how the names of these tensors begin
_TOKENS, _METADATA, _FIRST_EVIDENCE = range(3)  # columns of the tensor "lengths"


class Packed(Mapping[str, Tensor]):
    """A batch of n videos whose tokens are concatenated, without padding.

    Its properties are what training reads. It is also a mapping of all its tensors by name, which Accelerate and the
    HF Trainer move, concatenate and send to other processes. Each of these tensors is a concatenation over the videos,
    so batches can be joined name by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: Sequence[VideoRow] | None = None) -> None:
        """Take the tensors of :func:`pack`, or of another batch.

        Args:
            tensors: by name: ``lengths`` [n,2+E] int64 has the number of tokens, of bytes in ``metadata`` and of rows
                in each ``evidence_*`` of each video; ``metadata`` has the videos' rows as JSON, uint8.
            metadata: the same rows where they are known, which saves reading them from the tensor.

        Raises ValueError if the tensors were divided by their own rows and not by videos.
        """
        self._tensors, self._metadata = dict(tensors), None if metadata is None else tuple(metadata)
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
        """Count the tensors; a batch has ``len(video_ids)`` videos."""
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
        """[sum K,D] bfloat16."""
        return self["tokens"]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[n+1] int32, where each video begins, and the end: what attention over packed sequences takes."""
        return self._bounds[:, _TOKENS].to(torch.int32)

    @property
    def index(self) -> Tensor:
        """[sum K] int64, flat position t*N + i in each one's video."""
        return self["index"]

    @property
    def frame(self) -> Tensor:
        """[sum K] int64, t."""
        return self["frame"]

    @property
    def deepstack(self) -> tuple[Tensor, ...]:
        """[sum K,D] bfloat16 each; none where the model has no levels."""
        return tuple(tensor for name, tensor in self.items() if name.startswith(_DEEPSTACK))

    @property
    def metadata(self) -> tuple[VideoRow, ...]:
        """Each video's row of the videos table."""
        if self._metadata is None:
            text = self["metadata"].cpu().numpy().tobytes()
            bounds = self._bounds[:, _METADATA].tolist()
            self._metadata = tuple(json.loads(text[start:end]) for start, end in pairwise(bounds))
        return self._metadata

    @cached_property
    def evidence(self) -> dict[str, tuple[Tensor, ...]]:
        """Each video's evidence by name, as it was asked for."""
        names = [name for name in self if name.startswith(_EVIDENCE)]
        lengths = self["lengths"][:, _FIRST_EVIDENCE:].T.tolist()
        return {
            name.removeprefix(_EVIDENCE): torch.split(self[name], of_videos)
            for name, of_videos in zip(names, lengths, strict=True)
        }

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Packed:
        """Return the batch with its tensors on a device."""
        tensors = {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()}
        return Packed(tensors, self._metadata)

    def pin_memory(self) -> Packed:
        """Return the batch with its tensors in pinned memory, for DataLoader's ``pin_memory=True``."""
        return Packed({name: tensor.pin_memory() for name, tensor in self.items()}, self._metadata)

    def select(self, videos: slice) -> Packed:
        """Return the batch of some of its videos, which shares its memory."""
        start, end, _ = videos.indices(len(self["lengths"]))
        firsts, lasts = self._bounds[[start, max(start, end)]].tolist()
        names = [name for name in self if name.startswith(_EVIDENCE)]
        of_evidence = {name: _FIRST_EVIDENCE + number for number, name in enumerate(names)}
        # The column of ``lengths`` that counts the rows of each tensor.
        columns = dict.fromkeys(self, _TOKENS) | {"metadata": _METADATA} | of_evidence
        tensors = {
            name: tensor[start:end] if name == "lengths" else tensor[firsts[columns[name]] : lasts[columns[name]]]
            for name, tensor in self.items()
        }
        return Packed(tensors, None if self._metadata is None else self._metadata[start:end])

    @cached_property
    def _bounds(self) -> Tensor:
        """[n+1,2+E] int64: where each video begins in the tensors, by the columns of ``lengths``, and the ends."""
        return torch.nn.functional.pad(self["lengths"].cumsum(0), (0, 0, 1, 0))


def pack(videos: Sequence[CachedVideo]) -> Packed:
    """Concatenate the tokens of a batch of one or more videos without padding: a ``collate_fn`` for DataLoader."""
    names = list(videos[0].evidence)
    rows = [json.dumps(video.metadata).encode() for video in videos]
    lengths = [
        [len(video.index), len(row), *(len(video.evidence[name]) for name in names)]
        for video, row in zip(videos, rows, strict=True)
    ]
    levels = zip(*(video.deepstack for video in videos), strict=True)
    return Packed(
        {
            "lengths": torch.tensor(lengths),  # the first one: Accelerate counts the videos of a batch by it
            "tokens": _joined([video.tokens for video in videos]),
            "index": _joined([video.index for video in videos]),
            "frame": _joined([video.frame for video in videos]),
            **{f"{_DEEPSTACK}{number}": _joined(level) for number, level in enumerate(levels)},
            **{f"{_EVIDENCE}{name}": _joined([video.evidence[name] for video in videos]) for name in names},
            "metadata": torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8),
        },
        [video.metadata for video in videos],
    )


def select_videos(batch: Any, videos: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Return the part of a batch for one process: what Accelerate calls to divide the batch that it sent to all.

    Packed batches are divided by videos, also inside of tuples, lists and mappings; other tensors by their rows.
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


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; in a worker into shared memory, which saves the copy to the main process."""
    first, shape = parts[0], (sum(len(part) for part in parts), *parts[0].shape[1:])
    n_bytes = math.prod(shape) * first.itemsize
    if get_worker_info() is None:  # numpy asks for huge pages, which torch does not: a quarter of the time
        out = torch.from_numpy(np.empty(n_bytes, np.uint8)).view(first.dtype)
    else:
        out = first.new(first.untyped_storage()._new_shared(n_bytes, device=first.device))  # type: ignore[no-untyped-call]
    return torch.cat(list(parts), out=out.view(shape))
