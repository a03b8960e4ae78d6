"""What a run is bounded by: shares of it, runs that are only foretold, attempts, and failures with their remedies."""

import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

import pipeline
from jobs import prune
from pipeline import Summary, TokenCache
from pipeline.cache.table import parse_file_name, read_file
from pipeline.runner import watchdog
from pipeline.runner.claim import Claim
from pipeline.storage.stores import LocalStore
from tests.builders.clips import write_clip
from tests.builders.runs import document_of, family, forbid_models, forbid_ray, said_by
from tests.jobs.hostile import let_through
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SMALL = ["--num-frames", "2"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip") / "v.mp4", size=(64, 64), count=4)


def copies(folder: Path, clip: Path, names: Iterable[str]) -> Path:
    """``names`` as .mp4 below videos/."""
    (folder / "videos").mkdir()
    for name in names:
        shutil.copy(clip, folder / "videos" / f"{name}.mp4")
    return folder


@pytest.fixture
def folder(tmp_path, clip):
    return copies(tmp_path, clip, "ab")


def pruned(folder: Path, *options: str, videos: str = "videos", code: int = 0) -> str:
    """Run jobs.prune on the folder, which must end with this code; return what it says, without a table's rules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "300")
        said = said_by(prune, folder / videos, "--out", folder / "cache", *SMALL, *options, code=code)
    return " ".join(said.replace("│", " ").split())


@pytest.fixture(scope="module")
def half(one_ray, clip, tmp_path_factory) -> Path:
    """A folder of a.mp4, which is no video, to f.mp4, of which the first three are done in two shares."""
    folder = copies(tmp_path_factory.mktemp("half"), clip, "abcdef")
    (folder / "videos/a.mp4").write_text("no video" * 100)
    first, second = (pruned(folder, "--limit", share, code=code) for share, code in (("1", 1), ("2", 0)))
    assert "1 of 6 videos still to do (--limit 1)" in first  # the exit code speaks of the share alone
    assert "0 ok, 1 failed, 0 without a row, 5 wait for another run" in first
    assert "2 ok, 1 failed, 0 without a row, 3 wait for another run" in second
    return folder


def tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def marks(folder: Path) -> set[str]:
    """The videos that were opened since the last look."""
    found = {path.name.removesuffix(".opened"): path for path in folder.rglob("*.opened")}
    for path in found.values():
        path.unlink()
    return set(found)


def test_a_dry_run_on_nothing_leaves_nothing(folder, idle):
    (folder / "videos/b.mp4").write_text("no video" * 100)
    before = tree(folder)
    text = pruned(folder, "--dry-run", "--limit", "1")
    assert tree(folder) == before and "first a.mp4, ..." not in text
    for said in (
        "1 to do, 1 more wait (--limit), 0 done, 0 failed before",
        f"2 x 196 = 392 tokens, 98 kept in {98 * 64 * 2:,} bytes; {98 * 64 * 2:,} bytes for 1 video",
        "first a.mp4 identity",
        "dtype.compute auto",
    ):
        assert said in text


def test_a_dry_run_says_what_a_run_would_do(half, idle):
    folder = half
    rows = [{"video_id": f"{name}.mp4", "uri": f"videos/{name}.mp4"} for name in "abd"]
    rows += [{"video_id": "evil", "uri": "/etc/hostname"}, {"video_id": "far", "uri": "https://user:pw@host/v.mp4"}]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    before = tree(folder)
    text = pruned(folder, "--dry-run", videos="m.jsonl", code=2)
    assert "2 of 5 videos may not be read" in text and "pw" not in text
    recorded = ("--dry-run", "--on-forbidden", "record")
    text = pruned(folder, *recorded, "--retry-failed", videos="m.jsonl")
    assert tree(folder) == before
    assert "4 to do, 1 done, 0 failed before and left alone" in text
    assert "3 new, 1 failed before, 0 changed" in text and "2 of the 4 may not be read (policy)" in text
    assert "dtype.compute float32" in text and "pw" not in text
    assert "3 to do, 1 done, 1 failed before and left alone" in pruned(folder, *recorded, videos="m.jsonl")


def test_a_dry_run_refuses_a_place_and_a_changed_file_likewise(half, idle, clip):
    folder = half
    with Claim(LocalStore(folder / "cache"), "first", print):
        text = pruned(folder, "--dry-run", code=2)
    assert "another run writes here" in text and "first" in text
    said_by(prune, "--out", clip / "cache", "--dry-run", code=2)
    (folder / "videos/b.mp4").write_bytes(b"other")
    assert "b.mp4: the file had" in pruned(folder, "--dry-run", code=2)
    assert "0 failed before, 1 changed" in pruned(folder, "--dry-run", "--on-changed", "redo")
    shutil.copy(clip, folder / "videos/b.mp4")


def test_the_next_run_goes_on_from_a_share(half):
    assert TokenCache(half / "cache").video_ids == ["b.mp4", "c.mp4"]
    assert "5 ok, 1 failed, 0 without a row tokens" in pruned(half, "--limit", "9")
    assert [row["video_id"] for row in rows_of(half)] == [f"{name}.mp4" for name in "abcdef"]
    records = [json.loads(file.read_text()) for file in (half / "cache/runs").iterdir()]
    assert sorted((record["videos"], record["summary"]["n_waiting"]) for record in records) == [(1, 5), (2, 3), (3, 0)]


def test_a_run_ends_at_its_limit_goes_on_and_records_what_it_took(one_ray, folder, monkeypatch):
    cache = folder / "cache"
    argv = [str(folder / "videos"), "--out", str(cache), *SMALL, "--device", "cpu"]
    argv += ["--decoder", "tests.jobs.hostile:StuckDecoder"]

    def last_record() -> dict:
        return json.loads(max((cache / "runs").iterdir()).read_text())

    let_through(folder / "videos", 0)  # no video is done
    monkeypatch.setattr(watchdog, "_MAX_LOOK_S", 1.0)
    code, stopped, _ = document_of(prune, [*argv, "--max-hours", "1e-6"])
    assert code == 1 and (stopped["n_ok"], stopped["n_missing"], stopped["n_waiting"]) == (0, 0, 2)
    assert last_record()["ended_by"] == "--max-hours 1e-06 is reached"
    let_through(folder / "videos", 2)
    code, done, _ = document_of(prune, argv)
    assert code == 0 and done["n_ok"] == done["n_new"] == len(TokenCache(cache).video_ids) == 2
    for key in ("wall_s", "decode_core_s", "output_bytes", "encoder_busy"):
        assert last_record()["summary"][key] == done[key] > 0
    size = sum(file.stat().st_size for file in (cache / "tokens").iterdir())
    assert done["output_bytes"] < size < done["output_bytes"] + 2 * 8192  # and the footer of each shard
    assert done["encoder_busy"] < 1


def test_two_threads_fill_two_caches_on_the_ray_of_this_process_and_leave_no_process(one_ray, folder):
    before = Counter(family(os.getpid()).values())

    def filled(name: str) -> Summary:
        return pipeline.prune_videos(folder / "videos", out=folder / name, num_frames=2, progress=False)

    with ThreadPoolExecutor(2) as pool:
        summaries = list(pool.map(filled, ("one", "other")))
    assert [summary.n_ok for summary in summaries] == [2, 2]
    assert TokenCache(folder / "one").video_ids == TokenCache(folder / "other").video_ids == ["a.mp4", "b.mp4"]
    left = "ray::Heartbeats", "ray::Writer", "ray::MapWorker"
    wait_until(
        lambda: not [title for title in Counter(family(os.getpid()).values()) - before if title.startswith(left)],
        lambda: family(os.getpid()),
    )
    assert ray.is_initialized()


ODD = ("new\nline", "tab\t", "ümläut😀", "u\u0308", "[bold]x[bold]", "{id}", "-n", "'quote\"", "a%20b", "q?x=1#f")
ODD += (" lead", "x" * 240, "A", "a", "\u202ertl", "back\\slash", "*")


def test_odd_names_are_ids_like_any_other_and_files_that_come_later_are_for_the_next_run(one_ray, tmp_path, clip):
    copies(tmp_path, clip, ODD)

    def add() -> None:
        wait_until(lambda: [*(tmp_path / "cache/videos").glob("*.parquet")], "the first commit")
        shutil.copy(clip, tmp_path / "videos/later.mp4")

    with ThreadPoolExecutor(1) as pool:
        added = pool.submit(add)
        pruned(tmp_path, "--videos-per-shard", "1")
        added.result()
    cache = TokenCache(tmp_path / "cache")
    assert cache.video_ids == sorted(f"{name}.mp4" for name in ODD)
    assert all(len(cache.get(video_id).tokens) for video_id in cache.video_ids)
    assert f"{len(cache)} of {len(cache) + 1} videos are in the cache already" in pruned(tmp_path)


def rows_of(folder: Path) -> list[dict]:
    """All rows of the videos table, by video and attempt."""
    store = LocalStore(folder / "cache")
    shards = [read_file(store, parse_file_name(name)).to_pylist() for name in store.names("videos", ".parquet")]
    return sorted((row for shard in shards for row in shard), key=lambda row: (row["video_id"], row["attempts"]))


def test_failed_videos_alone_are_tried_again_until_they_are_mended_or_spent(one_ray, folder, clip):
    """Faults 18 and 19: no model is loaded and no video opened where nothing is to be done."""
    videos, decoder = folder / "videos", ["--decoder", "tests.jobs.hostile:MarkingDecoder"]
    (videos / "b.mp4").write_text("no video" * 100)
    rows = [{"video_id": name, "uri": f"videos/{name}.mp4"} for name in ("a", "b", "gone")]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def opened(*options: str) -> set[str]:
        pruned(folder, *decoder, *options, "--max-attempts", "2", videos="m.jsonl")
        return marks(folder)

    def tried() -> dict[str, list[int]]:
        return {v: [row["attempts"] for row in rows_of(folder) if row["video_id"] == v] for v in ("a", "b", "gone")}

    def nothing_is_done(*options: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            forbid_ray(patch)
            forbid_models(patch)
            text = pruned(folder, *decoder, *options, "--max-attempts", "2", videos="m.jsonl")
        assert marks(folder) == set()
        return text

    assert opened() == {"a.mp4"}
    assert TokenCache(folder / "cache").failed == {"b": "unsupported", "gone": "io"}
    assert "3 of 3 videos are in the cache already, 2 of them as errors" in nothing_is_done()

    assert opened("--retry-failed") == set() and tried() == {"a": [1], "b": [1, 2], "gone": [1, 2]}
    assert "used their 2 attempts; --max-attempts" in nothing_is_done("--retry-failed")

    shutil.copy(clip, videos / "gone.mp4")  # the remedy
    (videos / "b.mp4").write_text("another text")  # no remedy, but another file: its attempts are counted anew
    assert opened("--retry-failed") == {"gone.mp4"} and tried() == {"a": [1], "b": [1, 2, 3], "gone": [1, 2, 3]}
    cache = TokenCache(folder / "cache")
    assert cache.video_ids == ["a", "gone"] and len(cache.get("gone").index) == 98


def test_a_run_says_what_the_table_has_lost_until_it_is_there_again(one_ray, folder, clip):
    shutil.copy(clip, folder / "videos/b.mp4")
    for name in "ab":
        row = {"video_id": name, "uri": f"videos/{name}.mp4"}
        (folder / f"{name}.jsonl").write_text(json.dumps(row))
        pruned(folder, videos=f"{name}.jsonl")
    (folder / "cache" / sorted(LocalStore(folder / "cache").names("videos", ".parquet"))[-1]).unlink()
    with pytest.MonkeyPatch.context() as patch:
        forbid_ray(patch)
        text = pruned(folder, videos="a.jsonl", code=1)
    assert "1 committed video without a row in any file of videos/ (b)" in text and "--repair" in text
    text = pruned(folder, videos="b.jsonl")
    assert text.count("without a row in any file") == 1  # at the start; the row is there in the end
    pruned(folder, videos="a.jsonl")
    assert TokenCache(folder / "cache").video_ids == ["a", "b"]


def test_failures_are_grouped_with_remedies_and_secrets_show_nowhere(one_ray, folder, clip, monkeypatch):
    keys = {name: f"planted-{name}" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")}
    for name, value in {**keys, "ENDPOINT_URL": "http://127.0.0.1:9/planted-path"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    (folder / "videos/b.mp4").write_bytes(clip.read_bytes()[:900])
    shutil.copy(clip, folder / "videos/crash.mp4")
    uris = {
        **{"a": "videos/a.mp4", "crash": "videos/crash.mp4", "cut": "videos/b.mp4"},
        **{"broken": "/proc/self/mem", "gone": "videos/gone.mp4"},
        "user": "https://planted-user-04:planted-pass-05@host/v.mp4?X-Amz-Signature=planted-sign-06",
        "query": "s3://bucket/v.mp4?X-Amz-Signature=planted-sign-06",
        "info": "s3://planted-user-04:planted-pass-05@bucket/v.mp4",
        "far": "s3://bucket/v.mp4",
    }
    (folder / "m.jsonl").write_text("\n".join(json.dumps({"video_id": v, "uri": uri}) for v, uri in uris.items()))
    endpoint = "http://planted-user-04:planted-pass-05@127.0.0.1:9/?key=planted-sign-06"
    options = ["--video-root", "s3://bucket", "--video-root", "/proc", "--s3-endpoint", endpoint]
    options += ["--on-forbidden", "record"]
    text = pruned(folder, *options, "--decoder", "tests.jobs.hostile:HostileReader", videos="m.jsonl")
    cache = TokenCache(folder / "cache")
    assert cache.failed == {
        **dict.fromkeys(("broken", "gone", "far"), "io"),
        **dict.fromkeys(("user", "query", "info"), "policy"),
        "cut": "corrupt",
        "crash": "crash",
    }
    table = text.partition("failed videos")[2]
    told = ("io 3 broken:", "Input/output error", "policy 3 user:", "crash 1 crash:", "corrupt 1 cut: the file is")
    for shown in told:
        assert shown in table, table
    assert "--video-root" in table and "re-encode" in table and table.index("io 3") < table.index("corrupt 1")
    assert cache.metadata("user")["uri"] == "https://host/v.mp4"

    (folder / "m.jsonl").unlink()  # what the user wrote; all else is the job's
    assert "planted-" not in text and "planted-" not in str(rows_of(folder))
    assert [path for path in folder.rglob("*") if path.is_file() and b"planted-" in path.read_bytes()] == []

    row = cache.metadata("crash")
    assert (row["error_stage"], row["attempts"], row["retryable"]) == ("decode", 1, True)
    assert row["error_signal"] == signal.SIGSEGV and row["source_size"] == clip.stat().st_size
    assert row["backend"] == "tests.jobs.hostile:HostileReader" and row["backend_version"]
    assert row["run_id"] and row["uri"].endswith("crash.mp4") and row["error_message"] and row["decode_s"] > 0


CAPPED = "1 video was capped at 6 frames (lowest rate 0.3 frames per second, of long.mp4); --max-frames raises it"
FILLED = "1 short video got more frames than --fps 1 gives, since this model takes at least 4"


def test_capped_and_filled_videos_are_in_the_summary_and_in_the_record(one_ray, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "videos").mkdir()
    write_clip(tmp_path / "videos/long.mp4", count=100, fps=5)
    write_clip(tmp_path / "videos/half.mp4", count=12, fps=24)
    (tmp_path / "videos/notes.txt").write_text("no video")
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--model", "tiny-qwen3-vl", "--fps", "1"]
    argv += ["--max-frames", "6"]
    said = said_by(prune, *argv)
    assert said.count(CAPPED) == said.count(FILLED) == 1
    assert f"left out 1 other file ({tmp_path}/videos/notes.txt)" in said
    (file,) = (tmp_path / "c/runs").glob("*.json")
    limits = json.loads(file.read_text())["summary"]["frame_limits"]
    assert (limits["n_capped"], limits["lowest_fps"], limits["longest"]) == (1, pytest.approx(0.3), "long.mp4")
    assert (limits["n_filled"], limits["filled"]) == (1, ["half.mp4"])
    code, document, _ = document_of(prune, argv)
    assert code == 0 and document["n_new"] == 0 and document["frame_limits"] == limits
