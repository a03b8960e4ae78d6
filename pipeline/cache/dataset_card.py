"""The README.md of a cache, by whose ``configs`` Hugging Face datasets loads its two tables by name."""

from __future__ import annotations

from typing import Final

from pipeline.cache.header import HEADER, CacheHeader, serialise_header
from pipeline.storage.stores import CARD, Store

# drop_tokens deletes the file only with exactly this content: whatever a user changed is the user's.
_TEXT: Final = """\
---
configs:
- config_name: videos
  data_files: videos/*.parquet
  default: true
- config_name: tokens
  data_files: tokens/*.parquet
---

# Pruned visual tokens

This is a cache of gstep-cache. The table `videos` has a row for each video, and the table `tokens` a row for each
stored token. With PLACE as the folder or the name of this dataset:

```python
from datasets import load_dataset

videos = load_dataset("PLACE", split="train")
tokens = load_dataset("PLACE", "tokens", split="train")
```

**Superseded rows are included.** If `videos` has several rows for a video, its live row is the first by: `status`
removed before ok before failed, most `attempts`, most `rewritten`, smallest `tie_break`. Only the tokens in the file
that the live row names in `token_shard` count. `python -m jobs.compact` and then `python -m jobs.verify --clean` delete
what is superseded.
"""


def write_new_header(store: Store, header: CacheHeader) -> None:
    """Write the header of a new cache, and its README.md unless there is such a file. Raises OSError."""
    store.put(HEADER, serialise_header(header))
    if not store.exists(CARD):
        store.put(CARD, _TEXT.encode())


def has_own_card(store: Store) -> bool:
    """Return True if the README.md is as ``write_new_header`` wrote it. Raises OSError."""
    return store.exists(CARD) and store.read(CARD) == _TEXT.encode()
