"""Videos shards: the file, and rows that contradict themselves or the header."""

import shutil

import pytest

from pipeline.storage.stores import LocalStore
from tests.pipeline.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.damage import flip, rewrite_row, shards
from tests.pipeline.verifying import SHAPE, check_damage


def of_another_cache(store: LocalStore) -> None:
    other = write_header(store.root.parent / "other", 0.25, "topk", hidden_size=8)
    write_shard(other, "elsewhere", encoded("x", random_tokens(2, SHAPE), 0.25, "topk"))
    for folder in ("tokens", "videos"):
        shutil.copy(shards(other, folder)[0], store.root / folder)


DAMAGE = {
    "a flipped bit in a commit": (lambda s: flip(shards(s, "videos")[0], 600), {"commit"}),
    "a commit that is no Parquet": (lambda s: shards(s, "videos")[0].write_bytes(b"PAR1"), {"commit"}),
    "a shard of other settings": (of_another_cache, {"fingerprint"}),
    "fewer tokens": (lambda s: rewrite_row(s, "a", lambda r: r.update(n_tokens=5)), {"row"}),
    "another ratio": (lambda s: rewrite_row(s, "a", lambda r: r.update(retention_ratio=0.5)), {"row"}),
    "another size": (lambda s: rewrite_row(s, "a", lambda r: r.update(hidden_size=4)), {"row"}),
    "frames backwards": (lambda s: rewrite_row(s, "a", lambda r: r["frame_indices"].reverse()), {"row"}),
    "times backwards": (lambda s: rewrite_row(s, "a", lambda r: r["timestamps"].reverse()), {"row"}),
    "an ok row without tokens": (lambda s: rewrite_row(s, "a", lambda r: r.update(token_shard=None)), {"row"}),
    "a failed row without a class": (lambda s: rewrite_row(s, "bad", lambda r: r.update(error_class=None)), {"row"}),
    "no JSON": (lambda s: rewrite_row(s, "a", lambda r: r.update(runtime="{")), {"row"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(store, damage):
    check_damage(store, *DAMAGE[damage], (None, "a", "bad"))
