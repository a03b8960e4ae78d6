"""Files of the table and token shards: every byte is read, and rows are held against themselves and their tokens."""

import shutil

import numpy as np
import pytest

from pipeline import TokenCache
from pipeline.storage.stores import LocalStore, ObjectStore
from tests.builders.caches import encoded, evidence_cache, random_tokens, write_header, write_shard
from tests.pipeline.damage import flip, rewrite_row, rewrite_tokens, shards, with_column
from tests.pipeline.verifying import SHAPE, by_an_own_method, check_damage, kinds, verified, video_of


def swap(store: LocalStore) -> None:
    one, two = shards(store)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def add_bytes(store: LocalStore) -> None:
    """Behind the pages and before the footer, which stays as it was."""
    data = shards(store)[0].read_bytes()
    at = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    shards(store)[0].write_bytes(data[:at] + b"?" + data[at:])


def lengthen_footer(store: LocalStore) -> None:
    shards(store)[0].write_bytes(shards(store)[0].read_bytes()[:-8] + b"\xff\xff\xff\x7fPAR1")


def replace_video(store: LocalStore) -> None:
    """b's row names a's tokens, rightly hashed."""
    a = TokenCache(store.root).metadata("a")
    names = ("token_shard", "footer_hash", "checksum", "row_counts", "kept_per_frame")
    rewrite_row(store, "b", lambda row: row.update({name: a[name] for name in names}))
    shards(store)[1].unlink()


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
    "a shard deleted": (lambda s: shards(s)[0].unlink(), {"missing"}),
    "a shard cut off": (lambda s: shards(s)[0].write_bytes(shards(s)[0].read_bytes()[:-100]), {"footer"}),
    "a shard emptied": (lambda s: shards(s)[0].write_bytes(b""), {"footer"}),
    "a shard of a few bytes": (lambda s: shards(s)[0].write_bytes(b"PAR1"), {"footer"}),
    "a flipped bit of a footer": (lambda s: flip(shards(s)[0], shards(s)[0].stat().st_size - 30), {"footer"}),
    "a footer longer than its file": (lengthen_footer, {"footer"}),
    "shards swapped": (swap, {"footer"}),
    "bytes put in": (add_bytes, {"rows"}),
    "a flipped bit": (lambda s: flip(shards(s)[0], 600), {"damaged"}),
    "a flipped bit of the header": (lambda s: flip(s.root / "cache.json", 100), {"header"}),
    "another checksum": (lambda s: rewrite_row(s, "a", lambda r: r.update(checksum="blake2b:00")), {"checksum"}),
    "tokens of another video": (replace_video, {"rows"}),
    "a row group too far": (lambda s: rewrite_row(s, "a", lambda r: r.update(first_row_group=1)), {"rows"}),
    "ranks": (lambda s: rewrite_tokens(s, "a", with_column("rank", lambda v: v[::-1])), {"tokens"}),
    "a position twice": (lambda s: rewrite_tokens(s, "a", with_column("index", np.sort)), {"tokens"}),
    "a position outside": (lambda s: rewrite_tokens(s, "a", with_column("index", lambda v: v + 30)), {"tokens"}),
    "frames of tokens": (lambda s: rewrite_tokens(s, "a", with_column("frame", lambda v: v[::-1])), {"tokens"}),
    "a density": (lambda s: rewrite_tokens(s, "a", with_column("density", lambda v: v * np.inf)), {"tokens"}),
    "a column less": (lambda s: rewrite_tokens(s, "a", lambda t: t.drop_columns(["density"])), {"schema"}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named(store, damage):
    other = {"tokens of another video": "b", "a failed row without a class": "bad"}.get(damage)
    check_damage(store, *DAMAGE[damage], {None, "a", other})


DECLARED = {"nested": True, "merges": False, "exact": True, "reorders": False}


@pytest.mark.parametrize(
    ("other", "kind"), [({}, None), ({"nested": False}, "row"), ({"merges": True}, "tokens"), ({"exact": False}, None)]
)
def test_rows_of_a_method_from_outside_are_held_against_what_it_declared(tmp_path, other, kind):
    report = verified(by_an_own_method(tmp_path, declares={**DECLARED, **other}))
    assert (kinds(report), report.notes) == ([] if kind is None else [kind], [])


def test_evidence_is_checked_too(tmp_path):
    store = evidence_cache(tmp_path, {"v": random_tokens(0, SHAPE), "w": random_tokens(1, SHAPE)})
    assert verified(store).problems == []
    write_shard(store, "other", video_of("x", 2))
    assert kinds(verified(store)) == ["schema"]


def test_a_shard_that_may_not_be_read_is_no_end(server):
    store = ObjectStore(server.uri("d"), server.objects())
    write_header(store)
    for i in range(2):
        write_shard(store, "run", video_of(f"v{i}", i))
    server.fail("GET", f"d/{store.names('tokens', '.parquet')[0]}", 403)
    report = verified(store)
    assert kinds(report) == ["unreadable"] and "AccessDenied" in report.problems[0].what
    assert report.counts["token_shards"] == 2 and report.counts["tokens"] == 9


def test_a_sample_reads_some_videos_and_says_what_it_misses(tmp_path):
    """Of twenty videos one is damaged: samples that hold it find it, and each says what it may have missed."""
    store = write_header(tmp_path / "c", hidden_size=8)
    for number in range(20):
        write_shard(store, f"run{number:02d}", video_of(f"v{number}", number))
    assert kinds(verified(store, sample=5)) == []
    flip(sorted((store.root / "tokens").iterdir())[7], 200)
    reports = [verified(store, sample=5, seed=seed) for seed in range(6)]
    n_found = sum(report.exit_code for report in reports)
    assert 1 <= n_found <= 4  # 1.5 expected
    assert all(report.counts["token_shards"] == 5 and report.counts["videos"] == 20 for report in reports)
    (note,) = reports[0].notes
    assert note == (
        "tokens of 5 of 20 videos were read; the chance that these miss damage: to 0.1% of them 99.5%, to 1.0% of them "
        "95.1%, to 5.0% of them 77.4%"
    )
    assert verified(store, sample=20).exit_code == 1 and verified(store, sample=20).notes == []
