"""Verify: each kind of damage is found, named, and blamed on its video; nothing outside the cache is changed.

A video that was encoded again: what is the same, what is rounding, and what is neither.
"""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from jobs import compact, merge, remove, verify
from pipeline import TokenCache
from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.cache.writer import KeptTokens, commit_records
from pipeline.errors import CacheLocked, UsageError, VideoFault
from pipeline.inputs.named_videos import Roots
from pipeline.prune.decode_stage import DecodeSetup, VideoDecoder
from pipeline.prune.encode_again import decode_again, read_run_config
from pipeline.rewrite.compact import join_tokens
from pipeline.runner.claim import Claim
from pipeline.storage.s3 import Objects
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.live_check import LiveCheck, compare, explain_suspicion
from pipeline.video.sampling import Sampling
from tests.builders.caches import (
    encoded,
    encoded_with,
    evidence_cache,
    make_identity,
    random_tokens,
    write_header,
    write_shard,
)
from tests.builders.clips import KeepSize
from tests.paths import read_all
from tests.pipeline import verifying
from tests.pipeline.damage import cut, flip, merge_before_each_read, rewrite_row, rewrite_tokens, shards, with_column
from tests.pipeline.verifying import NOW, SHAPE, kinds, tokens_of, verified, video_of


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return verifying.two_shards(tmp_path_factory.mktemp("sound") / "c").root


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


def swap(store: LocalStore) -> None:
    one, two = shards(store)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)


def of_another_cache(store: LocalStore) -> None:
    other = write_header(store.root.parent / "other", 0.25, "topk", hidden_size=8)
    write_shard(other, "elsewhere", video_of("x", 2, "topk"))
    for folder in ("tokens", "videos"):
        shutil.copy(shards(other, folder)[0], store.root / folder)


ROWS = {  # changes of a's row, and the problem that each is
    "fewer tokens": ({"n_tokens": 5}, "row"),
    "another ratio": ({"retention_ratio": 0.5}, "row"),
    "another size": ({"hidden_size": 4}, "row"),
    "times backwards": ({"timestamps": [0.75, 0.5, 0.25, 0.0]}, "row"),
    "frames backwards": ({"frame_indices": [3, 2, 1, 0]}, "row"),
    "an ok row without tokens": ({"token_shard": None}, "row"),
    "no JSON": ({"runtime": "{"}, "row"),
    "another checksum": ({"checksum": "blake2b:00"}, "checksum"),
    "a row group too far": ({"first_row_group": 1}, "rows"),
}
TOKENS = {  # changes of the columns of a's tokens
    "ranks": with_column("rank", lambda values: values[::-1]),
    "a position outside": with_column("index", lambda values: values + 30),
    "frames of tokens": with_column("frame", lambda values: values[::-1]),
    "a position twice": with_column("index", np.sort),
    "a density": with_column("density", lambda values: values * np.inf),
}
DAMAGE = {
    "a flipped bit in a commit": (lambda s: flip(shards(s, "videos")[0], 600), "commit"),
    "a shard of other settings": (of_another_cache, "fingerprint"),
    "a failed row without a class": (lambda s: rewrite_row(s, "bad", lambda r: r.update(error_class=None)), "row"),
    "a shard deleted": (lambda s: shards(s)[0].unlink(), "missing"),
    "a shard cut off": (lambda s: cut(shards(s)[0], 100), "footer"),
    "a flipped bit of a footer": (lambda s: flip(shards(s)[0], shards(s)[0].stat().st_size - 30), "footer"),
    "shards swapped": (swap, "footer"),
    "a shard of a few bytes": (lambda s: shards(s)[0].write_bytes(b"PAR1"), "footer"),
    "a footer longer than its file": (lengthen_footer, "footer"),
    "bytes put in": (add_bytes, "rows"),
    "a flipped bit": (lambda s: flip(shards(s)[0], 600), "damaged"),
    "a flipped bit of the header": (lambda s: flip(s.root / "cache.json", 100), "header"),
    "tokens of another video": (replace_video, "rows"),
    "a column less": (lambda s: rewrite_tokens(s, "a", lambda t: t.drop_columns(["density"])), "schema"),
    **{
        name: (partial(rewrite_row, video_id="a", change=lambda row, change=change: row.update(change)), kind)
        for name, (change, kind) in ROWS.items()
    },
    **{name: (partial(rewrite_tokens, video_id="a", change=change), "tokens") for name, change in TOKENS.items()},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_named_and_blames_no_other_video(store, damage):
    act, kind = DAMAGE[damage]
    act(store)
    report = verified(store)
    assert {*kinds(report)} == {kind} and report.exit_code == 1
    other = {"tokens of another video": "b", "a failed row without a class": "bad"}.get(damage)
    for problem in report.problems:
        record = problem.as_record()
        assert record["class"] == problem.kind and record["what"] and record["shard"] and record["remedy"]
        assert problem.video_id in {None, "a", other}


def by_an_own_method(out: Path, **pruner: object) -> LocalStore:
    """Write a cache of random tokens that names a method whose module is not importable here."""
    identity = make_identity(pruner={"method": "not_here:Mine", **pruner})
    store = write_header(out, hidden_size=8, identity=identity)
    write_shard(store, "run", video_of("a", 0, "random"))
    return store


DECLARED = {"nested": True, "merges": False, "exact": True, "reorders": False}


@pytest.mark.parametrize(
    ("other", "kind"), [({}, None), ({"nested": False}, "row"), ({"merges": True}, "tokens"), ({"exact": False}, None)]
)
def test_rows_of_a_method_from_outside_are_held_against_what_it_declared(tmp_path, other, kind):
    report = verified(by_an_own_method(tmp_path / "own", declares={**DECLARED, **other}))
    assert (kinds(report), report.notes) == ([] if kind is None else [kind], [])
    report = verified(by_an_own_method(tmp_path / "silent"))
    assert kinds(report) == [] and "the method not_here:Mine is unknown here" in "".join(report.notes)


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


def test_a_sound_cache_passes_every_byte_is_read_and_a_run_keeps_it_from_being_cleaned(store, tmp_path):
    report = verified(store, jobs=3)
    assert (report.problems, report.notes, report.orphans, report.exit_code) == ([], [], [], 0)
    files = [*shards(store), *shards(store, "videos")]
    assert report.bytes_read == sum(file.stat().st_size for file in files)
    counts = {"videos_shards": 2, "videos": 2, "failed_videos": 1, "removed_videos": 0, "token_shards": 2, "tokens": 18}
    assert report.counts == counts
    write_shard(store, "run2", video_of("a", 2))  # two runs at once, or a commit that came late: one of them counts
    assert verified(store).problems == []
    with Claim(store, "run9", print):
        with pytest.raises(CacheLocked, match="run9"):
            verified(store, clean=True)
        report = verified(store)
    assert report.exit_code == 0 and any("writes here" in note and "run9" in note for note in report.notes)
    report = verified(write_header(tmp_path / "empty"))
    assert report.problems == [] and report.counts["videos"] == 0


def test_the_report_counts_by_class(store):
    for file in shards(store):
        file.unlink()
    said = list(verified(store).lines())
    (missing,) = (line for line in said if line.startswith("missing, 2: "))  # the class, how many, and one of them
    assert "the shard is missing" in missing and "let --repair mark" in said[said.index(missing) + 1]
    assert said[-1] == "2 problems"


@pytest.mark.parametrize("sample", [0, 3])
def test_files_that_a_run_merges_away_meanwhile_are_no_damage(store, sample):
    """They were called unreadable, or ended the command."""
    merge_table_fully(store, read_fingerprint(store))
    for merging in merge_before_each_read(
        store.root,
        lambda reads: write_shard(
            store, f"run{reads}", *(video_of(name, seed, attempts=reads + 1) for name, seed in (("c", 2), ("d", 3)))
        ),
    ):
        report = verified(merging, jobs=1, sample=sample)
        assert report.problems == []
        assert report.counts["tokens"] == (9 * sample or 36) and report.counts["token_shards"] <= 3


def test_a_sample_reads_some_videos_and_says_what_it_misses(tmp_path):
    """Of ten videos one is damaged: samples that hold it find it, and each says what it may have missed."""
    store = write_header(tmp_path / "c", hidden_size=8)
    for number in range(10):
        write_shard(store, f"run{number}", video_of(f"v{number}", number))
    assert kinds(verified(store, sample=3)) == []
    flip(sorted((store.root / "tokens").iterdir())[7], 200)
    reports = [verified(store, sample=3, seed=seed) for seed in range(5)]
    assert 1 <= sum(report.exit_code for report in reports) <= 4  # 1.5 expected
    assert all(report.counts["token_shards"] == 3 and report.counts["videos"] == 10 for report in reports)
    (note,) = reports[0].notes
    assert "tokens of 3 of 10 videos were read" in note
    assert all(f"to {share:.1%} of them {(1 - share) ** 3:.1%}" in note for share in (0.001, 0.01, 0.05))
    assert verified(store, sample=10).exit_code == 1 and verified(store, sample=10).notes == []


def link_folder(store: LocalStore, folder: str, place: Path) -> None:
    """Move a folder of the cache to a place outside, with files of somebody else, and leave a link to it."""
    (store.root / folder).mkdir(exist_ok=True)
    shutil.move(store.root / folder, place)
    others = ("run-other.parquet",) if folder == "tokens" else ()
    for name in (*others, ".tmp-other.parquet", "other.json", "other.log"):
        (place / name).write_bytes(b"a of somebody else")
    (store.root / folder).symlink_to(place)


COMMANDS = {
    "clean": (verify, "{0}/c --clean --keep-minutes 0"),
    "repair": (verify, "{0}/c --repair --keep-minutes 0"),
    "remove": (remove, "{0}/c --ids {0}/ids --reason x"),
    "join": (compact, "{0}/c --tokens --keep-minutes 0"),
    "compact": (compact, "{0}/c --keep-minutes 0"),
    "merge": (merge, "{0}/c {0}/other --out {0}/c"),
}


@pytest.mark.parametrize("folder", ["tokens", "videos", "runs", "repaired"])
def test_a_linked_folder_is_refused_by_commands_that_write_or_delete(store, tmp_path, capsys, folder):
    """jobs.verify --clean deleted the Parquet files of the folder that tokens/ linked to."""
    shutil.copytree(store.root, tmp_path / "other")
    (tmp_path / "ids").write_text("a\n")
    link_folder(store, folder, tmp_path / "elsewhere")
    before = read_all(tmp_path / "elsewhere"), read_all(store.root)
    for name, (command, arguments) in COMMANDS.items():
        assert command.main(arguments.format(tmp_path).split()) == 2, name
        assert f"{store.root}/{folder} is a symbolic link" in capsys.readouterr().err, name
        assert (read_all(tmp_path / "elsewhere"), read_all(store.root)) == before, name
    assert tokens_of(store.root).keys() == {"a", "b"}  # reading goes on


def test_the_store_itself_writes_and_deletes_nothing_there(store, tmp_path):
    link_folder(store, "tokens", tmp_path / "elsewhere")
    before = read_all(tmp_path / "elsewhere")
    for attempt in (store.delete, lambda name: store.put(name, b""), lambda name: store.link(name, tmp_path / "x")):
        with pytest.raises(OSError, match="symbolic link"):
            attempt("tokens/run-other.parquet")
    assert read_all(tmp_path / "elsewhere") == before


def test_a_linked_root_is_the_user_s_choice_and_of_a_linked_file_only_the_link_is_removed(store, tmp_path):
    (tmp_path / "link").symlink_to(store.root)
    secret, orphan = tmp_path / "secret.parquet", store.root / "tokens" / "run0-orphan.parquet"
    shutil.copy(shards(store)[0], secret)
    orphan.symlink_to(secret)
    assert verified(LocalStore(tmp_path / "link"), clean=True).removed == ["tokens/run0-orphan.parquet"]
    assert secret.exists() and not orphan.is_symlink()


def test_no_file_outside_a_source_is_linked_into_a_merged_cache(store, tmp_path):
    """A token shard of the source was a link to a file of this machine, which became a part of the result."""
    secret = tmp_path / "secret.parquet"
    secret.write_bytes(b"not the cache's")
    (file, _) = shards(store)
    file.unlink()
    file.symlink_to(secret)
    shutil.copytree(store.root, tmp_path / "other", symlinks=True)
    assert merge.main([str(store.root), str(tmp_path / "other"), "--out", str(tmp_path / "c2")]) == 1
    assert b"not the cache's" not in b"".join(read_all(tmp_path / "c2").values())


@pytest.mark.parametrize("name", ["cache.json", "videos/x.parquet", "../x.parquet", 5])
def test_names_in_rows_and_records_delete_no_file_but_token_shards(store, tmp_path, name):
    """A removed row of someone's cache could name cache.json as its token shard."""
    (tmp_path / "x.parquet").write_bytes(b"x")
    row = {"video_id": "gone", "uri": "", "status": "removed", "attempts": 0, "error_message": "x"}
    row["model_extra"] = json.dumps({"token_shards": [name]})
    commit_records(store, "run9", 0, [row], made_with=read_fingerprint(store))
    store.put("runs/evil0.json", json.dumps({"run_id": "evil0", "emptied": 5}).encode())
    store.put("runs/evil.json", json.dumps({"run_id": "evil", "emptied": [name]}).encode())
    verifying.remove(store, "gone")
    join_tokens(store, print, NOW)
    assert store.exists("cache.json") and (tmp_path / "x.parquet").exists()
    assert TokenCache(store.root).video_ids == ["a", "b"] and kinds(verified(store)) == []


ENCODED = random_tokens(0)


@pytest.fixture
def stored(tmp_path):
    write_shard(write_header(tmp_path), "run", encoded("v", ENCODED, 0.25, "gstep"))
    return TokenCache(tmp_path).get("v", order="selection")


def again(tokens: torch.Tensor = ENCODED, ratio: float = 0.25, method: str = "gstep") -> KeptTokens:
    kept = encoded("v", tokens, ratio, method).kept
    assert kept is not None
    return kept


def test_what_is_the_same_to_the_bit_what_other_versions_explain_and_what_nothing_does(stored):
    kept = again()
    same = compare(stored, kept)
    assert (same.state, same.same_indices, same.max_difference, same.relative_difference) == ("same", 1.0, 0.0, 0.0)
    bits = kept.tokens.copy()
    bits[3, 5] ^= 1
    rounded = compare(stored, replace(kept, tokens=bits))
    assert (rounded.state, rounded.same_indices) == ("different", 1.0) and 0 < rounded.relative_difference < 0.01
    opposite = compare(stored, replace(kept, tokens=kept.tokens ^ -(2**15)))
    assert opposite.relative_difference == pytest.approx(2.0)
    other_versions = {"versions": {"torch": ("1", "2")}}
    assert explain_suspicion(same) == explain_suspicion(replace(rounded, **other_versions)) == ""
    assert "by the same versions, it is not the same" in explain_suspicion(rounded)
    assert "beyond rounding" in explain_suspicion(replace(opposite, **other_versions))


def test_positions_are_compared_by_what_both_have(stored):
    fewer = compare(stored, again(ratio=0.10))
    assert (fewer.state, fewer.max_difference) == ("different", 0.0)  # a prefix: the tokens that both have agree
    assert fewer.same_indices == 10 / 25
    kept, others = again(), sorted(set(range(100)) - set(stored.index.tolist()))
    moved = compare(stored, replace(kept, index=np.array(others[: len(kept.index)], np.int32)))
    assert (moved.same_indices, moved.max_difference) == (0.0, None)
    wide = compare(stored, again(random_tokens(0, (4, 25, 32))))
    assert (wide.state, wide.note, wide.same_indices) == ("different", "tokens of another size", 0.0)
    assert all("beyond rounding" in explain_suspicion(result) for result in (fewer, moved, wide))


def test_evidence_of_another_number_of_frames_is_a_difference(tmp_path):
    short, long = (
        encoded_with("v", random_tokens(n, (n, 25, 16)), 1.0, "none", {"frame_feature": torch.ones(n, 2)})
        for n in (4, 5)
    )
    identity = make_identity(1.0, "none", evidence={"frame_feature": "last_layer"})
    write_shard(write_header(tmp_path, identity=identity), "run", short)
    result = compare(TokenCache(tmp_path).get("v", order="selection", evidence=["frame_feature"]), long.kept)
    assert result.state == "different" and result.relative_difference > 0


def test_options_of_a_run_that_are_none_here_are_left_out(tmp_path, stored):
    cache = TokenCache(tmp_path)
    run = {"config": {"pruner": "uniform", "decoder": "not_here:Mine", "device": "cuda", "of_later": 1}}
    config = read_run_config(cache, run, "tiny")
    assert (config.pruner, config.decoder, config.device, config.model) == ("uniform", "auto", "auto", "tiny")
    assert config.out == str(tmp_path)


def test_a_source_that_does_not_decode_keeps_the_class_of_its_fault(tmp_path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"no video")
    of_source = {"source_size": 8, "source_hash": "blake2b:00", "source_offset": None}
    row = {"video_id": "v", "uri": str(path), "start_s": None, "end_s": None, "attempts": 1, **of_source}
    with closing(VideoDecoder(DecodeSetup(Sampling(2), KeepSize()))) as decoder, pytest.raises(VideoFault) as caught:
        decode_again(row, decoder, Objects.from_environment(), Roots([tmp_path]))
    assert caught.value.fault_class == "unsupported"


def test_a_cache_that_does_not_say_how_it_was_made_is_refused(tmp_path, stored):
    with pytest.raises(UsageError, match="no record of a run says which model"):
        LiveCheck(TokenCache(tmp_path), None, Objects.from_environment())
    store = TokenCache(tmp_path).store
    store.put("runs/r1.json", b'{"run_id": "r1", "config": {"pruner": "not_here:Mine"}}')
    store.put("runs/r2.json", b"torn")  # the newest that can be read counts
    with pytest.raises(UsageError, match="what a cache says chooses no code"):
        LiveCheck(TokenCache(tmp_path), None, Objects.from_environment())
