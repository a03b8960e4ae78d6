"""A repair: what is damaged is marked, what is sound stays bit for bit, and nothing is lost, wherever it is ended."""

import errno
import shutil
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline import TokenCache
from pipeline.cache.live import LiveVideos
from pipeline.cache.merging import merge
from pipeline.cache.schema import write_parquet
from pipeline.cache.table import make_small_name
from pipeline.errors import RunFailed, UsageError, VideoFault
from pipeline.storage.random_access import LocalFile
from pipeline.storage.stores import LocalStore, ObjectStore
from pipeline.verify.moves import remove_videos
from pipeline.verify.repair import KEPT_IN
from tests.pipeline.caches import encoded, encoded_failure, random_tokens, write_header, write_shard
from tests.pipeline.damage import Dying, flip, rewrite_row, say_what_was_committed, shards
from tests.pipeline.verifying import SHAPE, kinds, verified

IDS = "abcdef"
NOW = timedelta(0)


def of(video_id: str, seed: int | None = None, **more):
    return encoded(video_id, random_tokens(IDS.index(video_id) if seed is None else seed, SHAPE), 0.25, "gstep", **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """a, b and c share a token shard and a videos shard; d, e have their own; bad failed; f was done twice."""
    store = write_header(tmp_path_factory.mktemp("whole") / "c", hidden_size=8)
    write_shard(store, "run", *(of(name) for name in "abc"))
    write_shard(store, "run", of("d"), encoded_failure("bad", VideoFault("corrupt", "x")))
    write_shard(store, "run", of("e"), of("f", 20))
    write_shard(store, "run2", of("f", attempts=2))
    return store.root


@pytest.fixture
def store(whole, tmp_path) -> LocalStore:
    return LocalStore(shutil.copytree(whole, tmp_path / "c"))


def token_shard(store, video_id: str) -> Path:
    return store.root / TokenCache(store.root).metadata(video_id)["token_shard"]


def damage_tokens(store, video_id: str) -> None:
    """One bit of a token of one video."""
    file, row = token_shard(store, video_id), TokenCache(store.root).metadata(video_id)
    group = pq.read_metadata(file).row_group(row["first_row_group"])
    columns = [group.column(number) for number in range(group.num_columns)]
    flip(file, next(c.data_page_offset for c in columns if c.path_in_schema == "token") + 60)


def commit_of(store, video_id: str) -> Path:
    return store.root / LiveVideos.open(store).find(video_id).shard


def tokens_of(root: Path) -> dict[str, torch.Tensor]:
    cache = TokenCache(root)
    return {name: cache.get(name, verify=True, order="selection").tokens for name in cache.video_ids}


def assert_same_without(root: Path, whole: Path, lost: set[str]) -> None:
    """All videos are there but ``lost``, bit for bit, and the cache is sound."""
    before, now = tokens_of(whole), tokens_of(root)
    assert now.keys() == before.keys() - lost
    assert all(torch.equal(now[name], before[name]) for name in now)
    assert kinds(verified(LocalStore(root))) == []


def test_one_damaged_video_is_marked_and_its_neighbours_stay_bit_for_bit(store, whole):
    damage_tokens(store, "b")
    report = verified(store, repair=True, keep=NOW)
    assert (kinds(report), [p.kind for p in report.found], report.exit_code) == ([], ["damaged"], 0)
    assert [video.video_id for video in report.repaired.marked] == ["b"] and report.repaired.moved == 2
    assert_same_without(store.root, whole, {"b"})
    row = TokenCache(store.root).metadata("b")
    assert (row["status"], row["error_class"], row["attempts"], row["uri"]) == ("failed", "io", 1, "/videos/b")
    assert "marked by a repair" in row["error_message"]
    assert len(shards(store)) == 4  # of a and c together, d, f's second, e


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_a_token_shard_that_is_gone_or_cut_costs_its_own_videos_alone(store, whole, harm):
    harm(token_shard(store, "a"))
    report = verified(store, repair=True, keep=NOW)
    assert sorted(video.video_id for video in report.repaired.marked) == ["a", "b", "c"]
    assert_same_without(store.root, whole, {"a", "b", "c"})


def test_an_earlier_attempt_at_a_damaged_video_does_not_come_back(store, whole):
    """Its tokens may be of another file."""
    token_shard(store, "f").unlink()
    verified(store, repair=True, keep=NOW)
    assert TokenCache(store.root).failed["f"] == "io"
    assert_same_without(store.root, whole, {"f"})


def test_a_row_that_contradicts_itself_is_marked(store, whole):
    rewrite_row(store, "a", lambda row: row.update(n_total=row["n_total"] + 1))
    report = verified(store, repair=True, keep=NOW)
    assert [(video.video_id, video.why) for video in report.repaired.marked] == [("a", "its row contradicts itself")]
    assert_same_without(store.root, whole, {"a"})


def test_an_earlier_attempt_does_not_come_back_for_a_row_without_a_token_shard(store, whole):
    file = commit_of(store, "f")  # of its second attempt alone
    table = pq.read_table(file)
    row = {**table.to_pylist()[0], "token_shard": None}
    data = write_parquet(table.from_pylist([row], schema=table.schema))
    file.unlink()
    store.put(make_small_name("videos", "run2", 0, data), data)
    verified(store, repair=True, keep=NOW)
    assert_same_without(store.root, whole, {"f"})


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: flip(file, 600)])
def test_the_videos_of_a_commit_that_is_lost_or_damaged_are_named_by_their_tokens(store, whole, harm):
    tokens = token_shard(store, "a")
    say_what_was_committed(store)
    harm(commit_of(store, "a"))
    report = verified(store, repair=True, keep=NOW)
    assert (kinds(report), len(report.found)) == ([], 1)
    assert sorted(video.video_id for video in report.repaired.marked) == ["a", "b", "c"]
    assert_same_without(store.root, whole, {"a", "b", "c"})
    assert tokens.exists()  # a copy of the commit may turn up
    assert [file.name for file in report.orphans] == [f"tokens/{tokens.name}"] and "--clean" in report.notes[-1]
    verified(store, clean=True, keep=NOW)
    assert not tokens.exists() and kinds(verified(store)) == []


def test_several_lost_commits_of_a_run_are_one_problem(store, whole):
    say_what_was_committed(store)
    first, second = commit_of(store, "a"), commit_of(store, "d")
    first.unlink()
    second.unlink()
    report = verified(store, repair=True, keep=NOW)
    assert sorted(video.video_id for video in report.repaired.marked) == ["a", "b", "c", "d"]
    assert_same_without(store.root, whole, {"a", "b", "c", "d"})
    assert len(shards(store, "videos")) == 3


def test_a_file_that_no_run_wrote_goes_out_of_the_way(store, whole):
    (store.root / "videos" / "notes.parquet").write_bytes(b"not ours")
    verified(store, repair=True, keep=NOW)
    assert_same_without(store.root, whole, set())
    assert (store.root / KEPT_IN / "notes.parquet").read_bytes() == b"not ours"


def test_what_was_replaced_is_kept(store):
    damage_tokens(store, "b")
    row = TokenCache(store.root).metadata("b")
    report = verified(store, repair=True, keep=NOW)
    (name,) = report.repaired.replaced
    kept = store.root / KEPT_IN / Path(name).name
    assert not store.exists(name) and row["checksum"] in pq.read_table(kept)["checksum"].to_pylist()


def test_the_same_in_a_merged_table(store, whole):
    """Rows are in sorted files, and still in the files that were merged."""
    merge(store, None, everything=True)
    damage_tokens(store, "b")
    report = verified(store, repair=True, keep=NOW)
    assert [video.video_id for video in report.repaired.marked] == ["b"]
    assert_same_without(store.root, whole, {"b"})
    merge(store, None, everything=True, keep=NOW)
    merge(store, None, everything=True, keep=NOW)
    assert len(shards(store, "videos")) == 1
    assert_same_without(store.root, whole, {"b"})
    (file,) = shards(store, "videos")
    flip(file, 600)
    report = verified(store, repair=True, keep=NOW)
    assert {problem.kind for problem in report.found} >= {"commit"} and TokenCache(store.root).video_ids == []


def test_a_sound_cache_is_only_cleaned(store, whole):
    shutil.copy(token_shard(store, "a"), store.root / "tokens" / "run0-orphan.parquet")
    report = verified(store, repair=True, keep=NOW)
    assert report.repaired is None and report.removed == ["tokens/run0-orphan.parquet"]
    assert_same_without(store.root, whole, set())


def test_a_cache_whose_tokens_are_all_away_is_left_alone(store):
    """They may be on a disk that is not mounted."""
    (store.root / "tokens").rename(store.root / "elsewhere")
    with pytest.raises(RunFailed, match="tokens/ is mounted"):
        verified(store, repair=True, keep=NOW)
    (store.root / "elsewhere").rename(store.root / "tokens")
    assert kinds(verified(store)) == []


def test_a_cache_under_the_header_of_another_one_is_left_alone(store):
    before = {file: file.read_bytes() for file in (store.root / "videos").iterdir()}
    write_header(store.root, ratio=0.5, hidden_size=8)
    with pytest.raises(RunFailed, match="is its own"):
        verified(store, repair=True, keep=NOW)
    assert {file: file.read_bytes() for file in (store.root / "videos").iterdir()} == before


def test_files_of_other_settings_are_left_out_and_set_aside(store, whole, tmp_path):
    """As a run leaves them whose cache was moved away, and another one begun in its place."""
    other = write_header(tmp_path / "other", ratio=0.25, method="topk", hidden_size=8)
    name = write_shard(other, "run3", *(encoded(v, random_tokens(9, SHAPE), 0.25, "topk", attempts=5) for v in "ax"))
    (tokens,) = other.names("tokens", ".parquet")
    for moved in (name, tokens):
        shutil.copy(other.root / moved, store.root / moved)
    damage_tokens(store, "b")
    report = verified(store)
    assert sorted(kinds(report)) == ["damaged", "fingerprint"] and [file.name for file in report.orphans] == [tokens]
    assert verified(store, clean=True, keep=NOW).removed == []
    report = verified(store, repair=True, keep=NOW)
    assert report.repaired.replaced[0] == name and (store.root / KEPT_IN / Path(name).name).exists()
    assert_same_without(store.root, whole, {"b"})
    assert store.exists(tokens) and tokens in verified(store, clean=True, keep=NOW).removed


class BadCable(LocalStore):
    """A token shard is damaged when it is read for the first time."""

    def __init__(self, root: Path, name: str, damaged: bytes) -> None:
        super().__init__(root)
        self._damaged = {name: damaged}

    def open(self, name):
        data = self._damaged.pop(name, None)
        return super().open(name) if data is None else LocalFile(pa.BufferReader(data))


def test_damage_that_another_look_does_not_find_is_let_be(store, whole):
    name = f"tokens/{token_shard(store, 'a').name}"
    sound = store.read(name)
    damage_tokens(store, "a")
    cable = BadCable(store.root, name, store.read(name))
    store.put(name, sound)
    report = verified(cable, repair=True, keep=NOW)
    assert kinds(report) == [] and any("sound when it was read again" in note for note in report.notes)
    assert [(problem.kind, problem.video_id) for problem in report.found] == [("damaged", "a")]
    assert (report.repaired.marked, report.repaired.moved, report.repaired.replaced) == ([], 0, [])
    assert_same_without(store.root, whole, set())


def test_a_removed_video_stays_so(store):
    remove_videos(store, ["a"], "takedown", print, NOW)
    damage_tokens(store, "b")
    verified(store, repair=True, keep=NOW)
    assert TokenCache(store.root).metadata("a")["status"] == "removed"


def damage_all(store) -> None:
    commit = commit_of(store, "d")
    damage_tokens(store, "b")
    commit.write_bytes(b"PAR1")


def test_a_repair_that_is_ended_anywhere_is_ended_by_the_next(whole, tmp_path):
    ended = 0
    for steps in range(40):
        folder = shutil.copytree(whole, tmp_path / str(steps))
        store = Dying(folder, OSError(errno.EIO, "the machine went down", "a file"))
        damage_all(store)
        store.left = steps
        try:
            verified(store, repair=True, keep=NOW)
        except (OSError, UsageError):  # which it is where no note of the repair could be written
            ended += 1
        else:
            break
        finally:
            store.left = 10**9
        report = verified(store, repair=True, keep=NOW)
        assert kinds(report) == [], steps
        assert TokenCache(store.root).failed == {"b": "io", "d": "io"}
        assert_same_without(store.root, whole, {"b", "d"})
    assert 8 < ended < 39


def test_the_same_on_s3(server, whole):
    store = ObjectStore(server.uri("repair"), server.objects())
    local = LocalStore(whole)
    for folder in ("", "tokens", "videos"):
        for file in local.list_files(folder):
            store.put(file.name, local.read(file.name))
    name = TokenCache(str(store), store=store).metadata("a")["token_shard"]
    store.put(name, store.read(name)[:-20])
    report = verified(store, repair=True, keep=NOW)
    assert (kinds(report), report.repaired.moved) == ([], 0)
    cache = TokenCache(str(store), store=store)
    assert sorted(cache.failed) == ["a", "b", "bad", "c"] and cache.video_ids == ["d", "e", "f"]
