"""The page of an exported cache: a dataset card as the Hugging Face Hub shows it."""

from __future__ import annotations

import json

import yaml

from pipeline.cache.header import CacheIdentity
from pipeline.cache.method import declared_method
from pipeline.cache.reader import TokenCache
from pipeline.cache.schema import digest

_PAGE = """\
---
{front}---

# {title}

Visual tokens of {videos:,} videos, pruned with {method}, for a language model that answers questions about the videos
without the videos or the vision encoder. Made with gstep-cache.

| | |
|---|---|
| model | {model}, weights {weights} |
| pruning | {method}, {ratio:g} of the tokens{nested} |
| sampling | {sampling} |
| stored as | {stored} |
| videos | {videos:,} with tokens, {failed:,} that could not be read |
| tokens | {bytes:,} bytes |

## Licence and origin

Licence: {licence}. Fill in: where the videos are from, who owns them, what may be done with tokens made of them, and
whether people can be recognised in them. `videos/` holds the address that each video was read from, and its manifest's
columns.

## How to load it

```python
from pipeline import TokenCache  # pip install gstep-cache

cache = TokenCache("FOLDER")
video = cache.get(cache.video_ids[0])  # .tokens [B, D], .index [B], .metadata
```

```python
from datasets import load_dataset

videos = load_dataset("FOLDER", "videos", split="train")
tokens = load_dataset("FOLDER", "tokens", split="train", streaming=True)  # a row a token
```

```python
import pandas, polars, pyarrow.dataset

pandas.read_parquet("FOLDER/videos")
polars.scan_parquet("FOLDER/videos/*.parquet").filter(polars.col("status") == "ok")
pyarrow.dataset.dataset("FOLDER/tokens").head(10)
```

```sql
select video_id, n_tokens, n_total from read_parquet('FOLDER/videos/*.parquet') where status = 'ok'; -- DuckDB
```

`cache.json` says what all videos were made with:

```json
{identity}
```
"""


_SEAL = "<!-- as it was written: "  # before a hash of all above it


def card_of(cache: TokenCache, videos: int, failed: int, n_bytes: int, licence: str) -> str:
    """Return the card of a cache with so many videos; an empty ``licence`` leaves it to be filled in."""
    identity: CacheIdentity = cache.identity
    parts, declared = ("videos", "tokens"), declared_method(identity)
    front = {
        "license": licence or "other",
        "tags": ["video", "visual-tokens", identity["pruner"]["method"]],
        "configs": [{"config_name": name, "data_files": f"{name}/*.parquet"} for name in parts],
    }
    sampling = ", ".join(f"{name} {value}" for name, value in identity["sampling"].items() if value is not None)
    return _sealed(
        _PAGE.format(
            front=yaml.safe_dump(front, sort_keys=False),
            title=f"{identity['model']['type']} tokens",
            videos=videos,
            failed=failed,
            bytes=n_bytes,
            method=identity["pruner"]["method"],
            ratio=identity["retention_ratio"],
            nested=" (smaller shares are read from the same rows)" if declared is not None and declared.nested else "",
            model=identity["model"]["type"],
            weights=identity["model"]["weights"],
            sampling=sampling or "as the header says",
            stored=identity["dtype"]["stored"],
            licence=licence or "to be filled in",
            identity=json.dumps(identity, indent=2),
        )
    )


def is_as_written(card: str) -> bool:
    """Return whether nobody has changed a card since it was written."""
    return _sealed(card.rpartition(_SEAL)[0]) == card


def _sealed(text: str) -> str:
    """Return a card with the hash of its text."""
    return f"{text}{_SEAL}{digest(text.encode())} -->\n"
