"""Verify: a sound cache passes, and each kind of damage is found, named, and blamed on the right video."""

import pytest

from pipeline.cache.header import read_fingerprint
from pipeline.cache.merging import merge_table_fully
from pipeline.errors import CacheLocked
from pipeline.runner.claim import Claim
from tests.builders.caches import write_header, write_shard
from tests.pipeline.damage import Merging, shards
from tests.pipeline.verifying import by_an_own_method, verified, video_of


def test_a_sound_cache_passes_and_every_byte_is_read(store):
    report = verified(store, jobs=3)
    assert (report.problems, report.notes, report.orphans, report.exit_code) == ([], [], [], 0)
    assert report.bytes_read == sum(
        file.stat().st_size for folder in ("tokens", "videos") for file in shards(store, folder)
    )
    assert report.counts == {
        "videos_shards": 2,
        "videos": 2,
        "failed_videos": 1,
        "removed_videos": 0,
        "token_shards": 2,
        "tokens": 18,
    }


def test_what_an_unknown_method_declares_is_left_out_with_a_note(tmp_path):
    report = verified(by_an_own_method(tmp_path))
    assert report.problems == [] and report.exit_code == 0
    assert len(report.notes) == 1 and "the method not_here:Mine is unknown here" in report.notes[0]


def test_a_row_that_is_there_twice_is_no_problem(store):
    """Two runs at once, or a commit that came late: one of them counts."""
    write_shard(store, "run2", video_of("a", 2))
    assert verified(store).problems == []


def test_a_run_that_holds_the_cache_keeps_it_from_being_cleaned(store):
    with Claim(store, "run9", print):
        with pytest.raises(CacheLocked, match="run9"):
            verified(store, clean=True)
        report = verified(store)
    assert report.exit_code == 0 and any("writes here" in note and "run9" in note for note in report.notes)


@pytest.mark.parametrize("sample", [0, 3])
def test_files_that_a_run_merges_away_meanwhile_are_no_damage(store, sample):
    """They were called unreadable, or ended the command."""
    merge_table_fully(store, read_fingerprint(store))
    for reads in range(20):
        write_shard(store, f"run{reads}", video_of("c", 2, attempts=reads + 1), video_of("d", 3, attempts=reads + 1))
        merging = Merging(store.root, reads)
        report = verified(merging, jobs=1, sample=sample)
        assert report.problems == []
        assert report.counts["tokens"] == (9 * sample or 36) and report.counts["token_shards"] <= 3
        if not merging.is_merged:
            break
    assert reads > 4


def test_an_empty_cache_is_sound(tmp_path):
    report = verified(write_header(tmp_path))
    assert report.problems == [] and report.counts["videos"] == 0


def test_the_report_counts_by_class(store):
    for file in shards(store):
        file.unlink()
    said = list(verified(store).lines())
    (missing,) = (line for line in said if line.startswith("missing, 2: "))  # the class, how many, and one of them
    assert "the shard is missing" in missing and "let --repair mark" in said[said.index(missing) + 1]
    assert said[-1] == "2 problems"
