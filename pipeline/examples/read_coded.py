"""Decode the tokens of a coded cache with numpy, without this package.

Run it by ``python pipeline/examples/read_coded.py CACHE``, for a cache on disk.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq


def decode_floats(rows, D, codec, column="token"):
    """Return the tokens [n, D] of the rows of a file in tokens/; a reader of this package rounds them to bfloat16."""
    bits, group = {"int8": (8, 128), "int4": (4, 32)}[codec]
    stored, scale, kept = (
        np.array([list(v) for v in np.asarray(rows[column + end])], np.uint8) for end in ("", "_scale", "_kept")
    )
    numbers = (
        stored.view(np.int8)
        if bits == 8
        else np.stack([stored >> 4, stored & 15], -1).reshape(len(stored), -1).astype(np.int8) - 8
    )
    values = numbers[:, :D] * np.repeat(scale.view(np.float16).astype(np.float32), group, axis=1)[:, :D]
    channel, raw = kept.view(np.uint16).reshape(len(kept), -1, 2).transpose(2, 0, 1)
    np.put_along_axis(values, channel.astype(np.int64), (raw.astype(np.uint32) << 16).view(np.float32), axis=1)
    return values


if __name__ == "__main__":
    cache = Path(sys.argv[1])
    header = json.loads((cache / "cache.json").read_text())
    for shard in sorted(cache.glob("tokens/*.parquet")):
        decoded = decode_floats(pq.read_table(shard), header["hidden_size"], header["identity"]["dtype"]["stored"])
        print(shard.name, decoded.shape, f"mean length {np.linalg.norm(decoded, axis=1).mean():.3f}")
