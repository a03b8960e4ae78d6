"""One video as it comes out of a cache: Arrow's columns as tensors."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gstep.evidence import EVIDENCE_SHAPES, is_per_frame
from pipeline.cache.header import CacheHeader, deepstack_levels, find_codec
from pipeline.cache.token_shard import join_vectors
from pipeline.rows import VideoRow, describe_frames, sampled_fps

if TYPE_CHECKING:  # a cache is opened, listed and asked for metadata without torch
    from torch import Tensor

    from gstep.types import Visual

#: Evidence of one number a token, by the beginning of its labels.
ONE_NUMBER = tuple(name for name, axes in EVIDENCE_SHAPES.items() if axes == ("T", "N"))


@dataclass(frozen=True)
class CachedVideo:
    """The stored tokens of one video; K rows.

    Attributes:
        video_id: the id in the manifest.
        tokens: [K,D] bfloat16, bit for bit what the encoder gave where the cache stores that.
        index: [K] int64, flat position t*N + i before pruning.
        rank: [K] int64, order of selection; None for a method without one.
        frame: [K] int64, t.
        merged: [K] bool, or None where the method never merges.
        density: [K] float32 (Eq. 8), or None for a method without one.
        metadata: the video's row of the videos table (see pipeline.rows.VideoRecord), JSON columns decoded. Its ``fps``
            is the rate of the source, and its ``n_frames`` counts temporal patches on Qwen: see ``describe_frames``.
        deepstack: [K,D] bfloat16 each, the same rows at each deepstack level; none where the model has no levels.
        evidence: what was asked for besides, as it was asked for, bfloat16: [K,width], [K] where it is one number a
            token, [T,width] where it is of frames.
        header: of the cache that it is from: the model, and the newline row where that has one.
    """

    video_id: str
    tokens: Tensor
    index: Tensor
    rank: Tensor | None
    frame: Tensor
    merged: Tensor | None
    density: Tensor | None
    metadata: VideoRow
    deepstack: tuple[Tensor, ...] = ()
    evidence: Mapping[str, Tensor] = field(default_factory=dict)
    header: CacheHeader | None = field(default=None, repr=False)

    @property
    def newline(self) -> Tensor | None:
        """LLaVA-OneVision's row after all tokens of a video, [D] bfloat16; None for families without one."""
        return None if self.header is None else decode_newline(self.header)

    @property
    def sampled_fps(self) -> float | None:
        """How many frames a second were sampled; ``metadata["fps"]`` is the rate of the source."""
        return sampled_fps(self.metadata)

    def describe_frames(self) -> str:
        """Describe rates and frames: ``"source fps 25, sampled at 0.27 fps, 32 frames in 16 temporal patches"``."""
        return describe_frames(self.metadata)

    @cached_property
    def visual(self) -> Visual:
        """The tokens as prompts take them (``gstep.language``), in the order in which they were read.

        The result is kept: a language model computes a video that several prompts share only once if all of them have
        the same object.
        """
        from gstep.types import Visual  # noqa: PLC0415 - who only reads tokens does without

        row = self.metadata
        return Visual(
            tokens=self.tokens,
            index=self.index,
            n_frames=row["n_frames"],
            tokens_per_frame=row["tokens_per_frame"],
            extra=row["model_extra"] or {},
            deepstack=self.deepstack,
            newline=self.newline,
            evidence=self.evidence,
            frame_indices=row.get("frame_indices") or (),
            fps=row.get("fps"),
            timestamps=row.get("timestamps") or (),
        )


def decode_newline(header: CacheHeader) -> Tensor | None:
    """Decode the newline row that a cache's header holds, [D] bfloat16; None without one."""
    base64_row = header.get("newline")
    return None if base64_row is None else bfloat16(bytearray(base64.b64decode(base64_row)))


def build_video(
    row: VideoRow,
    table: pa.Table,
    header: CacheHeader,
    evidence: Mapping[str, str],
    order: NDArray[np.int64] | None,
    vectors_in_order: Mapping[str, NDArray[np.int16]],
) -> CachedVideo:
    """Build a CachedVideo from a video's token rows; ``row`` is its row of the videos table.

    Args:
        table: the token rows, with the columns of tokens and of ``evidence``.
        header: the cache's header.
        evidence: name in the result -> column.
        order: [K] the row of ``table`` for each row of the result; None keeps the order. Evidence of frames stays as it
            is stored.
        vectors_in_order: [K,width] columns that have the order of the result already, and need not be in ``table``.
    """
    import torch  # noqa: PLC0415 - two seconds, for whoever wants tokens

    def numbers(name: str, dtype: Any) -> Tensor | None:
        """Return a column of numbers in ``order``; None if it has nulls."""
        if table[name].null_count:
            return None
        values = table[name].to_numpy()
        return torch.from_numpy((values if order is None else values[order]).astype(dtype))

    def vectors(name: str, *, frames: bool = False) -> Tensor:
        """Return a column as [K,width] bfloat16 in ``order``; with ``frames`` its values without nulls, as stored."""
        if name in vectors_in_order:
            return torch.from_numpy(vectors_in_order[name]).view(torch.bfloat16)
        column = table[name].drop_null() if frames else table[name]
        stored_rows = bfloat16(join_vectors(column)).view(len(column), column.type.byte_width // 2)
        # index_select takes a fifth of the time of stored[order].
        return stored_rows if frames or order is None else stored_rows.index_select(0, torch.from_numpy(order))

    def evidence_of(column: str) -> Tensor:
        values = vectors(column, frames=is_per_frame(column))
        return values.squeeze(1) if column.startswith(ONE_NUMBER) else values  # one number a token is [K]

    tokens = partial(find_codec(header["identity"]).decode, hidden_size=row["hidden_size"], read_part=vectors)
    index, frame = numbers("index", np.int64), numbers("frame", np.int64)
    assert index is not None and frame is not None
    return CachedVideo(
        video_id=row["video_id"],
        tokens=tokens("token"),
        index=index,
        rank=numbers("rank", np.int64),
        frame=frame,
        merged=numbers("merged", np.bool_),
        density=numbers("density", np.float32),
        metadata=row,
        deepstack=tuple(tokens(f"deepstack_{i}") for i in range(deepstack_levels(header))),
        header=header,
        evidence={name: evidence_of(column) for name, column in evidence.items()},
    )


def bfloat16(data: Any) -> Tensor:
    """View the bytes of ``data`` as bfloat16 numbers, without a copy."""
    import torch  # noqa: PLC0415 - as above

    with warnings.catch_warnings():  # Arrow gives its memory for reading only, which torch cannot express
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.frombuffer(data, dtype=np.int16)).view(torch.bfloat16)
