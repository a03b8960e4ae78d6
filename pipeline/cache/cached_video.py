"""Represent a video that was read from a cache: Arrow columns converted to tensors."""

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

from gstep.evidence import EVIDENCE_SHAPES, is_frame_evidence
from pipeline.cache.header import CacheHeader, get_codec, get_deepstack_levels
from pipeline.cache.token_shard import join_vectors
from pipeline.rows import VideoRow, compute_sampled_fps, describe_frames

if TYPE_CHECKING:  # opening and listing a cache and reading metadata need no torch
    from torch import Tensor

    from gstep.types import Visual

#: The beginnings of the labels of evidence with one number per token.
ONE_NUMBER = tuple(name for name, axes in EVIDENCE_SHAPES.items() if axes == ("T", "N"))


@dataclass(frozen=True)
class CachedVideo:
    """The K stored tokens of a video that a read returned, in the requested order.

    Attributes:
        tokens: [K, D] bfloat16; bit-identical to the encoder's output unless the cache has a lossy codec.
        index: [K] int64, the flat position t*N + i before pruning.
        rank: [K] int64, the order of selection; None for methods without one.
        frame: [K] int64, t.
        merged: [K] bool; None for methods that never merge.
        density: [K] float32 (Eq. 8); None for methods without one.
        metadata: the video's row of the videos table, with JSON columns parsed. ``fps`` is the rate of the source, and
            on Qwen ``n_frames`` counts temporal patches.
        deepstack: [K, D] bfloat16 per deepstack level; empty for models without levels.
        evidence: the requested evidence by the requested name, bfloat16: [K, width] per token, [K] if it is one number
            per token, or [T, width] per frame.
        header: the header of the cache, for the model and the newline row.
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
        """The row that LLaVA-OneVision appends to a video's tokens, [D] bfloat16; None for families without one."""
        return None if self.header is None else decode_newline(self.header)

    @property
    def sampled_fps(self) -> float | None:
        """The sampled frames per second; None if unknown."""
        return compute_sampled_fps(self.metadata)

    def describe_frames(self) -> str:
        """Describe rates and frames: ``"source fps 25, sampled at 0.27 fps, 32 frames in 16 temporal patches"``."""
        return describe_frames(self.metadata)

    @cached_property
    def visual(self) -> Visual:
        """The tokens in the form that prompts take (``gstep.language``), in the order in which they were read.

        The object is created once: a language model processes a video that several prompts share only once if they hold
        the same object.
        """
        from gstep.types import Visual  # noqa: PLC0415 - not needed to read tokens

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
    """Decode the newline row in a cache's header to [D] bfloat16; return None if the header has none."""
    base64_row = header.get("newline")
    return None if base64_row is None else view_as_bfloat16(bytearray(base64.b64decode(base64_row)))


def build_video(
    row: VideoRow,
    table: pa.Table,
    header: CacheHeader,
    evidence: Mapping[str, str],
    order: NDArray[np.int64] | None,
    vectors_in_order: Mapping[str, NDArray[np.int16]],
) -> CachedVideo:
    """Build a CachedVideo from the token rows of a video; ``rank``, ``merged`` and ``density`` with a null become None.

    Args:
        row: the video's row of the videos table.
        table: the token rows, with the columns of tokens and of ``evidence``, except those in ``vectors_in_order``.
        evidence: name in the result -> column.
        order: [K] the row of ``table`` for each row of the result; None keeps the order. Evidence of frames keeps its
            order.
        vectors_in_order: column -> [K, width / 2] int16 in the order of the result.
    """
    import torch  # noqa: PLC0415 - takes two seconds, and only tokens need it

    def numbers(name: str, dtype: Any) -> Tensor | None:
        """Return a column of numbers in the order of the result, or None if it has a null."""
        if table[name].null_count:
            return None
        values = table[name].to_numpy()
        return torch.from_numpy((values if order is None else values[order]).astype(dtype))

    def vectors(name: str, *, frames: bool = False) -> Tensor:
        """Return a column as [K, width / 2] bfloat16 in the order of the result.

        If ``frames``, nulls are dropped and the stored order stays, [T, width / 2].
        """
        if name in vectors_in_order:
            return torch.from_numpy(vectors_in_order[name]).view(torch.bfloat16)
        column = table[name].drop_null() if frames else table[name]
        stored_rows = view_as_bfloat16(join_vectors(column)).view(len(column), column.type.byte_width // 2)
        # index_select takes a fifth of the time of stored[order].
        return stored_rows if frames or order is None else stored_rows.index_select(0, torch.from_numpy(order))

    def read_evidence(column: str) -> Tensor:
        values = vectors(column, frames=is_frame_evidence(column))
        return values.squeeze(1) if column.startswith(ONE_NUMBER) else values  # [K] if there is one number per token

    tokens = partial(get_codec(header["identity"]).decode, hidden_size=row["hidden_size"], read_part=vectors)
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
        deepstack=tuple(tokens(f"deepstack_{i}") for i in range(get_deepstack_levels(header))),
        header=header,
        evidence={name: read_evidence(column) for name, column in evidence.items()},
    )


def view_as_bfloat16(data: Any) -> Tensor:
    """View the bytes of ``data`` as a flat bfloat16 tensor that shares their memory, which may be read-only."""
    import torch  # noqa: PLC0415 - as above

    with warnings.catch_warnings():  # the memory of Arrow is read-only, of which torch warns
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.frombuffer(data, dtype=np.int16)).view(torch.bfloat16)
