"""What a manifest, a file or a method of one's own may do wrong costs its own video, and nothing is read or asked."""

import json
import shutil
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jobs import generate, prune
from pipeline import TokenCache
from pipeline.generate.answers import read_answers
from tests.builders.answers import SHAPE, tiny_cache, write_questions
from tests.builders.caches import encoded, random_tokens, write_shard
from tests.builders.clips import write_clip
from tests.builders.runs import document_of, said_by
from tests.builders.stores import serving
from tests.jobs import poison
from tests.jobs.faults import tiny_videos
from tests.jobs.poison import BREAKS_THE_GPU

pytestmark = pytest.mark.slow


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """The address of an HTTP server of one's own, and the requests that it gets."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_PUT = do_GET  # noqa: N815 - names of the base class

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url.removeprefix("http://"), asked


def test_what_a_manifest_may_not_name_is_neither_read_nor_asked_for(one_ray, listener, tmp_path, monkeypatch):
    host, asked = listener
    for name, value in {"ENDPOINT_URL": f"http://{host}", "ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    outside = write_clip(tmp_path / "outside.mp4", count=2)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "link.mp4").symlink_to(outside)
    (folder / "deep").symlink_to(tmp_path)
    write_clip(folder / "good.mp4", count=2)
    playlist = f"#EXTM3U\n#EXTINF:1,\nfile://{outside}\n#EXTINF:1,\nhttp://{host}/a.ts\n"
    (folder / "playlist.mp4").write_text(playlist)
    (folder / "script.mp4").write_text(f"ffconcat version 1.0\nfile 'http://{host}/b.mp4'\n")
    uris = {"absolute": str(outside), "up": "../outside.mp4", "link": "link.mp4", "linked folder": "deep/outside.mp4"}
    uris |= {"file": f"file://{outside}", "http": f"http://{host}/c.mp4", "s3": "s3://bucket/e.mp4"}
    uris |= {"playlist": "playlist.mp4", "script": "script.mp4"}
    rows = {**uris, "good": "good.mp4"}
    (folder / "m.jsonl").write_text("\n".join(json.dumps({"video_id": v, "uri": uri}) for v, uri in rows.items()))
    argv = (folder / "m.jsonl", "--out", tmp_path / "c", "--num-frames", 2, "--max-failed", 12)
    said_by(prune, *argv, "--on-forbidden", "record")
    cache = TokenCache(tmp_path / "c")
    assert cache.video_ids == ["good"]
    assert cache.failed == dict.fromkeys(sorted(uris), "policy")
    assert asked == []
    read = {v for v in uris if cache.metadata(v)["source_size"] is not None}
    assert read <= {"playlist", "script"}  # which lie in the folder: their first bytes were looked at


def test_a_bug_in_a_method_of_ones_own_is_one_error_row(one_ray, tmp_path):
    ids = tiny_videos(tmp_path / "videos", 14)  # 2 to 8 frames, two videos of each length
    (tmp_path / "videos" / ids[10]).unlink()
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--pruner", "tests.jobs.poison:Buggy"]
    said_by(prune, *argv, "--fps", "25", code=1)  # a bug of the program's, whatever --max-failed says
    cache = TokenCache(tmp_path / "c")
    assert cache.failed == {ids[3]: "own-code"}
    assert cache.video_ids == sorted({*ids} - {ids[3], ids[10]})
    row = cache.metadata(ids[3])
    assert (row["error_stage"], row["attempts"]) == ("prune", 1)
    assert f"{poison.__file__}:" in row["error_message"]
    assert "RuntimeError: no idea what to do with five frames" in row["error_message"]


def test_a_video_that_kills_its_encoder_twice_is_an_error_row_and_the_run_goes_on(one_ray, tmp_path):
    """One by a signal, its neighbour by an error after which the GPU is of no use to the process."""
    ids = tiny_videos(tmp_path / "videos", 10)  # the fourth has five frames, the fifth six
    argv = [str(tmp_path / "videos"), "--out", str(tmp_path / "c"), "--pruner", "tests.jobs.poison:Poison"]
    code, document, _ = document_of(prune, [*argv, "--fps", "25", "--encode-workers", "1"])
    assert code == 0 and document["failures"] == {"crash": 2}
    cache = TokenCache(tmp_path / "c")
    assert cache.failed == {ids[3]: "crash", ids[4]: "crash"}
    assert cache.video_ids == sorted({*ids} - {*cache.failed})
    for video_id in cache.failed:
        row = cache.metadata(video_id)
        assert (row["error_stage"], row["attempts"], row["retryable"]) == ("encode", 1, True)
        why = "Ray's logs say how" if video_id == ids[3] else "CUDA error: an illegal memory access was encountered"
        # The other video may have been in hand at the first crash, whichever of them that was.
        assert f"crashed 2 times with this video in hand, on {socket.gethostname()}; " in row["error_message"]
        assert why in row["error_message"]
    log = Path(document["log"]).read_text()
    assert log.count(" a worker of encode on ") >= 3  # two videos, each tried twice; the last crash may come late


def test_a_video_that_kills_its_encoder_costs_none_of_those_that_share_its_bundle_and_pass(one_ray, tmp_path):
    folder, cache = tmp_path / "videos", tmp_path / "c"
    ids = tiny_videos(folder, 70)
    poison = ids[31]  # of five frames, as every seventh: the others become harmless
    for name in (name for number, name in enumerate(ids) if number % 7 in (3, 4) and name != poison):
        shutil.copy(folder / ids[0], folder / name)
    argv = [str(folder), "--out", str(cache), "--pruner", "tests.jobs.poison:Poison", "--fps", "25"]
    said_by(prune, *argv, "--max-frames", "8", "--encode-batch-frames", "64")
    (record,) = [json.loads(file.read_text()) for file in (cache / "runs").glob("*.json")]
    assert record["resources"]["plan"]["videos_per_bundle"] == 2
    found = TokenCache(cache)
    assert found.failed == {poison: "crash"} and found.video_ids == sorted({*ids} - {poison})
    assert "crashed 2 times with this video in hand" in found.metadata(poison)["error_message"]


def test_a_question_that_kills_its_model_twice_is_an_error_row_and_the_others_are_answered(one_ray, tmp_path):
    """In the model, with seven others beside it."""
    store = tiny_cache(tmp_path / "c", ("good",), ratio=1.0, method="none")
    _, per_frame, hidden = SHAPE
    tokens = random_tokens(9, (BREAKS_THE_GPU, per_frame, hidden))
    write_shard(store, "later", encoded("poison", tokens, 1.0, "none"))
    videos = ["poison" if n == 4 else "good" for n in range(8)]
    rows = [{"question_id": f"q{n}", "video_id": v, "prompt": f"What is thing {n}?"} for n, v in enumerate(videos)]
    questions = write_questions(tmp_path / "q.jsonl", rows)
    argv = [str(tmp_path / "c"), "--questions", str(questions), "--out", str(tmp_path / "answers")]
    argv += ["--pruner", "tests.jobs.poison:PoisonInside", "--pruner-param", f"per_frame={per_frame}"]
    argv += ["--retention-ratio", "0.5", "--max-new-tokens", "2"]
    said_by(generate, *argv)
    answers = {row["question_id"]: row for row in read_answers(tmp_path / "answers").to_pylist()}
    assert {name: row["error_class"] for name, row in answers.items() if row["status"] != "ok"} == {"q4": "crash"}
    assert len(answers) == 8
    message = f"crashed 2 times with this question in hand, on {socket.gethostname()}; CUDA error: an illegal memory"
    assert message in answers["q4"]["error_message"]


def test_files_that_many_videos_miss_are_a_failed_run(one_ray, tmp_path):
    """A mount that is away on some nodes looks like this; files that are broken themselves may be many."""
    (tmp_path / "in").mkdir()
    write_clip(tmp_path / "in" / "good.mp4", count=2)
    rows = [{"video_id": f"v{n}", "uri": "good.mp4" if n % 2 else f"away{n}.mp4"} for n in range(22)]
    (tmp_path / "in" / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    argv = [str(tmp_path / "in" / "m.jsonl"), "--out", str(tmp_path / "c"), "--num-frames", "2"]
    said = said_by(prune, *argv, code=1)
    assert "failed: 11 of 22 videos failed for infrastructure reasons (I/O, bugs, GPU memory)" in said
    assert said.endswith("more than 10. Check nodes, mounts, credentials and GPUs, then rerun with --retry-failed")
    assert set(TokenCache(tmp_path / "c").failed.values()) == {"io"}
    said_by(prune, *argv, "--max-failed", "11")
