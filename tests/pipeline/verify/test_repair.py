"""A repair: what is damaged is marked, what is sound stays bit for bit, and nothing is lost, wherever it is ended."""

import errno
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import TokenCache
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge_table_files, merge_table_fully
from pipeline.cache.table import serialize_small
from pipeline.errors import RunFailed, UsageError
from pipeline.rewrite.remove import remove_videos
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.report import KEPT_IN
from tests.builders.caches import encoded, random_tokens, write_header, write_shard
from tests.pipeline.damage import Dying, flip, rewrite_row, say_what_was_committed, shards
from tests.pipeline.verifying import SHAPE, assert_tokens, kinds, six_videos, tokens_of, verified, video_of

NOW = timedelta(0)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return six_videos(tmp_path_factory.mktemp("sound") / "c").root


@pytest.fixture(scope="module")
def tokens(sound):
    return tokens_of(sound)


def token_shard(store, video_id: str) -> Path:
    return store.root / TokenCache(store.root).metadata(video_id)["token_shard"]


def commit_of(store, video_id: str) -> Path:
    return store.root / LiveVideos.open(store).find(video_id).file


def damage_tokens(store, video_id: str) -> None:
    """One bit of a token of one video."""
    file, row = token_shard(store, video_id), TokenCache(store.root).metadata(video_id)
    group = pq.read_metadata(file).row_group(row["first_row_group"])
    columns = [group.column(number) for number in range(group.num_columns)]
    flip(file, next(c.data_page_offset for c in columns if c.path_in_schema == "token") + 60)


def damage_after_a_merge(store) -> None:
    """Rows are in sorted files, and still in the files that were merged."""
    merge_table_files(store, None, everything=True)
    damage_tokens(store, "b")


def forget_the_shard(store) -> None:
    """The second attempt at f, alone in its file, is an ok row that names no tokens."""
    file = commit_of(store, "f")
    table = pq.read_table(file)
    (row,) = table.to_pylist()
    file.unlink()
    store.put(*serialize_small("run2", 0, table.from_pylist([{**row, "token_shard": None}], table.schema), None))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lose_commits(store) -> None:
    for file in (commit_of(store, "a"), commit_of(store, "d")):
        file.unlink()


HARM = {  # and the videos that it costs
    "a token": (lambda s: damage_tokens(s, "b"), "b"),
    "a token of a merged table": (damage_after_a_merge, "b"),
    "a token shard gone": (lambda s: token_shard(s, "a").unlink(), "abc"),
    "a token shard cut": (lambda s: cut(token_shard(s, "a")), "abc"),
    "tokens of which an earlier attempt is there": (lambda s: token_shard(s, "f").unlink(), "f"),
    "a row without tokens of which an earlier attempt is there": (forget_the_shard, "f"),
    "a row that contradicts itself": (lambda s: rewrite_row(s, "a", lambda r: r.update(n_total=r["n_total"] + 1)), "a"),
    "a commit gone": (lambda s: commit_of(s, "a").unlink(), "abc"),
    "a commit damaged": (lambda s: flip(commit_of(s, "a"), 600), "abc"),
    "several commits of a run gone": (lose_commits, "abcd"),
    "a file that no run wrote": (lambda s: s.put("videos/notes.parquet", b"not ours"), ""),
}


@pytest.mark.parametrize("harm", HARM)
def test_what_is_harmed_is_marked_and_its_neighbours_stay_bit_for_bit(store, tokens, harm):
    """An earlier attempt at a harmed video does not come back: its tokens may be of another file."""
    act, lost = HARM[harm]
    say_what_was_committed(store)
    act(store)
    report = verified(store, repair=True, keep=NOW)
    assert (kinds(report), report.exit_code) == ([], 0)
    assert_tokens(store.root, {name: values for name, values in tokens.items() if name not in lost})
    cache = TokenCache(store.root)
    assert {name: fault for name, fault in cache.failed.items() if name != "bad"} == dict.fromkeys(lost, "io")
    assert all("marked by a repair" in cache.metadata(name)["error_message"] for name in lost)
    for name in report.repaired.replaced:
        assert not store.exists(name) and (store.root / KEPT_IN / Path(name).name).exists()
    merge_table_fully(store, None)
    assert TokenCache(store.root).failed == cache.failed and len(shards(store, "videos")) == 1


def test_what_was_replaced_is_kept_and_named(store):
    damage_tokens(store, "b")
    row = TokenCache(store.root).metadata("b")
    report = verified(store, repair=True, keep=NOW)
    assert [problem.kind for problem in report.found] == ["damaged"] and report.repaired.moved == 2
    assert [(video.video_id, video.uri) for video in report.repaired.marked] == [("b", "/videos/b")]
    (name,) = report.repaired.replaced
    assert row["checksum"] in pq.read_table(store.root / KEPT_IN / Path(name).name)["checksum"].to_pylist()
    now = TokenCache(store.root).metadata("b")
    assert (now["status"], now["attempts"], now["uri"]) == ("failed", 1, "/videos/b")
    assert len(shards(store)) == 4  # of a and c together, d, f's second, e


def test_tokens_of_a_lost_commit_stay_until_they_are_cleaned(store):
    """A copy of the commit may turn up."""
    file = token_shard(store, "a")
    say_what_was_committed(store)
    commit_of(store, "a").unlink()
    report = verified(store, repair=True, keep=NOW)
    assert file.exists() and [orphan.name for orphan in report.orphans] == [f"tokens/{file.name}"]
    assert "--clean" in report.notes[-1]
    verified(store, clean=True, keep=NOW)
    assert not file.exists() and kinds(verified(store)) == []


def test_a_damaged_table_of_one_file_costs_all_videos(store):
    merge_table_fully(store, None)
    (file,) = shards(store, "videos")
    flip(file, 600)
    report = verified(store, repair=True, keep=NOW)
    assert {problem.kind for problem in report.found} >= {"commit"} and TokenCache(store.root).video_ids == []


def test_a_sound_cache_is_only_cleaned(store, tokens):
    shutil.copy(token_shard(store, "a"), store.root / "tokens" / "run0-orphan.parquet")
    report = verified(store, repair=True, keep=NOW)
    assert report.repaired is None and report.removed == ["tokens/run0-orphan.parquet"]
    assert_tokens(store.root, tokens)


def test_a_cache_of_which_nothing_would_stay_is_left_alone(store):
    """Its tokens may be on a disk that is not mounted, or its header is that of another one."""
    (store.root / "tokens").rename(store.root / "elsewhere")
    with pytest.raises(RunFailed, match="tokens/ is mounted"):
        verified(store, repair=True, keep=NOW)
    (store.root / "elsewhere").rename(store.root / "tokens")
    assert kinds(verified(store)) == []
    before = {file: file.read_bytes() for file in (store.root / "videos").iterdir()}
    write_header(store.root, ratio=0.5, hidden_size=8)
    with pytest.raises(RunFailed, match="belongs to this cache"):
        verified(store, repair=True, keep=NOW)
    assert {file: file.read_bytes() for file in (store.root / "videos").iterdir()} == before


def test_files_of_other_settings_are_left_out_and_set_aside(store, tokens, tmp_path):
    """As a run leaves them whose cache was moved away, and another one begun in its place."""
    other = write_header(tmp_path / "other", ratio=0.25, method="topk", hidden_size=8)
    name = write_shard(other, "run3", *(encoded(v, random_tokens(9, SHAPE), 0.25, "topk", attempts=5) for v in "ax"))
    (shard,) = other.names("tokens", ".parquet")
    for moved in (name, shard):
        shutil.copy(other.root / moved, store.root / moved)
    damage_tokens(store, "b")
    report = verified(store)
    assert sorted(kinds(report)) == ["damaged", "fingerprint"] and [file.name for file in report.orphans] == [shard]
    assert verified(store, clean=True, keep=NOW).removed == []
    report = verified(store, repair=True, keep=NOW)
    assert report.repaired.replaced[0] == name and (store.root / KEPT_IN / Path(name).name).exists()
    assert_tokens(store.root, {video_id: values for video_id, values in tokens.items() if video_id != "b"})
    assert store.exists(shard) and shard in verified(store, clean=True, keep=NOW).removed


class BadCable(LocalStore):
    """A token shard is damaged when it is read for the first time."""

    def __init__(self, root: Path, name: str, damaged: bytes) -> None:
        super().__init__(root)
        self._damaged = {name: damaged}

    def open(self, name):
        data = self._damaged.pop(name, None)
        return super().open(name) if data is None else LocalFile(pa.BufferReader(data))


def test_damage_that_another_look_does_not_find_is_let_be(store, tokens):
    name = f"tokens/{token_shard(store, 'a').name}"
    whole = store.read(name)
    damage_tokens(store, "a")
    cable = BadCable(store.root, name, store.read(name))
    store.put(name, whole)
    report = verified(cable, repair=True, keep=NOW)
    assert kinds(report) == [] and any("sound when it was read again" in note for note in report.notes)
    assert [(problem.kind, problem.video_id) for problem in report.found] == [("damaged", "a")]
    assert (report.repaired.marked, report.repaired.moved, report.repaired.replaced) == ([], 0, [])
    assert_tokens(store.root, tokens)


class Ahead(LocalStore):
    """A folder of another machine, whose clock is ahead of this one."""

    def compute_age(self, name):
        return super().compute_age(name) - timedelta(seconds=5)


def test_a_clock_that_is_ahead_keeps_no_replaced_row(store, tokens):
    """The sources of the merge stayed, and one of them was written as a file that no reader takes."""
    damage_tokens(store, "b")
    report = verified(Ahead(store.root), repair=True, keep=NOW)
    assert kinds(report) == [] and TokenCache(store.root).failed == {"b": "io", "bad": "corrupt"}
    assert_tokens(store.root, {name: tokens[name] for name in tokens if name != "b"})


def test_a_row_that_comes_during_a_repair_leaves_a_table_that_opens(store, monkeypatch):
    """A driver that was stopped commits the damaged video again, after the merge."""

    def merge_and_be_late(place, made_with):
        merge_table_fully(place, made_with)
        write_shard(place, "late", video_of("b", 9, attempts=2))

    monkeypatch.setattr("pipeline.verify.repair.merge_table_fully", merge_and_be_late)
    damage_tokens(store, "b")
    verified(store, repair=True, keep=NOW)
    monkeypatch.undo()
    assert TokenCache(store.root).failed == {"b": "io", "bad": "corrupt"} and kinds(verified(store)) == []


def test_a_removed_video_stays_so(store):
    remove_videos(store, ["a"], "takedown", print, NOW)
    damage_tokens(store, "b")
    verified(store, repair=True, keep=NOW)
    assert TokenCache(store.root).metadata("a")["status"] == "removed"


def test_a_repair_that_is_ended_anywhere_is_ended_by_the_next(sound, tokens, tmp_path):
    n_ended = 0
    for steps in range(40):
        store = Dying(
            shutil.copytree(sound, tmp_path / str(steps)), OSError(errno.EIO, "the machine went down", "a file")
        )
        commit = commit_of(store, "d")
        damage_tokens(store, "b")
        commit.write_bytes(b"PAR1")
        store.left = steps
        try:
            verified(store, repair=True, keep=NOW)
        except (OSError, UsageError):  # which it is where no note of the repair could be written
            n_ended += 1
        else:
            break
        finally:
            store.left = 10**9
        assert kinds(verified(store, repair=True, keep=NOW)) == [], steps
        assert TokenCache(store.root).failed == {"b": "io", "d": "io"}
        assert_tokens(store.root, {name: values for name, values in tokens.items() if name not in "bd"})
    assert 8 < n_ended < 39


def test_the_same_on_s3(server, sound):
    store, local = ObjectStore(server.uri("repair"), server.objects()), LocalStore(sound)
    for file in (file for folder in ("", "tokens", "videos") for file in local.list_files(folder)):
        store.put(file.name, local.read(file.name))
    name = TokenCache(str(store), store=store).metadata("a")["token_shard"]
    store.put(name, store.read(name)[:-20])
    report = verified(store, repair=True, keep=NOW)
    assert (kinds(report), report.repaired.moved) == ([], 0)
    cache = TokenCache(str(store), store=store)
    assert sorted(cache.failed) == ["a", "b", "bad", "c"] and cache.video_ids == ["d", "e", "f"]
