"""The rows that travel between the stages, one video a row.

``record`` is the JSON of the video's row in the making (keys are columns of ``schema.VIDEO_SCHEMA``), so that a stage
adds what it learnt without a schema of its own; tensors travel beside it as raw bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pipeline.errors import VideoFault

if TYPE_CHECKING:  # decoders and writers pass bytes on and start without torch
    import torch
    from torch import Tensor

    from gstep.types import PrunedTokens

Record = dict[str, Any]

DECODED = pa.schema([pa.field("record", pa.string()), pa.field("frames", pa.large_binary())])
ENCODED = pa.schema(
    [
        pa.field("record", pa.string()),
        pa.field("tokens", pa.large_binary()),  # [B,D] bfloat16 in order of selection
        pa.field("index", pa.large_binary()),  # [B] int32
        pa.field("rank", pa.large_binary()),  # [B] int32 or null
        pa.field("merged", pa.large_binary()),  # [B] uint8 or null
        pa.field("density", pa.large_binary()),  # [B] float32 or null
        pa.field("deepstack", pa.large_binary()),  # [levels,B,D] bfloat16, the rows of ``tokens``; null without levels
        pa.field("evidence", pa.large_binary()),  # [B,width] bfloat16 each, one behind the other; null without any
    ]
)
WRITTEN = pa.schema([pa.field("record", pa.string())])


def one_row(schema: pa.Schema, record: Record, payload: Mapping[str, np.ndarray | None] | None = None) -> pa.Table:
    """A table of one row; arrays are wrapped, not copied."""
    columns = [pa.array([json.dumps(record)], pa.string())]
    columns += [_wrap(None if payload is None else payload.get(name)) for name in schema.names[1:]]
    return pa.table(columns, schema=schema)


def payload(table: pa.Table, name: str, row: int, dtype: Any) -> np.ndarray | None:
    """The array that ``one_row`` wrapped, as a flat read-only view; None where there was none."""
    cell = table[name][row]
    return None if not cell.is_valid else np.frombuffer(cell.as_buffer(), dtype=dtype)


def records(table: pa.Table) -> list[Record]:
    return [json.loads(text) for text in table["record"].to_pylist()]


def failed(record: Record, fault: VideoFault) -> Record:
    """The record of a video that ends here."""
    return {
        **record,
        "status": "failed",
        "error_class": fault.fault_class,
        "error_stage": fault.stage,
        "error_message": fault.message,
        "error_signal": fault.exit_signal,
        "retryable": fault.retryable,
        "backend": fault.backend or record.get("backend"),
        "attempts": record["attempts"] + fault.attempts - 1,
    }


def pruned_columns(pruned: PrunedTokens, record: Record) -> Record:
    """The columns of the videos table that pruning decides."""
    frame = (pruned.index // record["tokens_per_frame"]).cpu()
    density = pruned.temporal_density
    return {
        "retention_ratio": pruned.retention_ratio,
        "nested": pruned.nested,
        "n_tokens": len(pruned.index),
        "n_total": pruned.n_total,
        "hidden_size": pruned.tokens.shape[1],
        "kept_per_frame": frame.bincount(minlength=record["n_frames"]).tolist(),
        "temporal_density": None if density is None else density.tolist(),
    }


def evidence_widths(evidence: Mapping[str, Tensor]) -> Record:
    """Numbers a token of each evidence [T,N,...], in the order of their bytes: no column of the videos table, but what
    the sink needs to tell them apart. Nothing where there is none."""
    widths = {name: value[0, 0].numel() for name, value in evidence.items()}
    return {"evidence": widths} if widths else {}


def pruned_arrays(
    pruned: PrunedTokens, deepstack: Sequence[Tensor] = (), evidence: Sequence[Tensor] = ()
) -> dict[str, np.ndarray | None]:
    """The kept tokens as arrays, first selected first; of each deepstack level [T,N,D] and of each evidence [T,N,...]
    the same places."""
    import torch  # noqa: PLC0415 - it made the tensors, so it is loaded

    order = pruned.selection_order()
    places = pruned.index[order]

    def ordered(values: Tensor | None, dtype: torch.dtype) -> np.ndarray | None:
        return None if values is None else np.asarray(values[order].to(dtype).cpu().numpy())

    def bits(values: Tensor) -> np.ndarray:  # numpy has no bfloat16; the bits are what counts
        return np.asarray(values.contiguous().view(torch.int16).cpu().numpy())

    return {
        "tokens": bits(pruned.tokens[order]),
        "index": ordered(pruned.index, torch.int32),
        "rank": ordered(pruned.rank, torch.int32),
        "merged": ordered(pruned.merged, torch.bool),
        "density": ordered(pruned.density, torch.float32),
        "deepstack": bits(torch.stack([level.flatten(0, 1)[places] for level in deepstack])) if deepstack else None,
        "evidence": bits(torch.cat([value.flatten(0, 1)[places].bfloat16().flatten() for value in evidence]))
        if evidence
        else None,
    }


def _wrap(array: np.ndarray | None) -> pa.Array:
    if array is None:
        return pa.nulls(1, pa.large_binary())
    data = pa.py_buffer(np.ascontiguousarray(array))
    offsets = pa.py_buffer(np.array([0, data.size], dtype=np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])
