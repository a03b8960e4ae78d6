"""The job end to end on real files: real decoders, real Ray, real models, a real cache, and files that change."""

import json
import os
import shutil
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file, save_file

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.checkpoints import tiny
from gstep.language import Decoding, prompt_builder
from jobs import generate, inspect, prune, verify
from pipeline import TokenCache
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.answers import answers_by_id, write_questions
from tests.builders.archives import ended, member
from tests.builders.clips import sample, write_clip
from tests.builders.runs import clips, document_of, forbid_ray, run, said_by
from tests.builders.stores import S3Server
from tests.gstep.llms import llm

pytestmark = pytest.mark.slow

FRAMES = 4
GOOD = ["av1.mp4", "bigbuckbunny.mp4", "bikes.mp4", "carphone_distorted.mp4", "carphone_pristine.mp4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The four sample clips, an AV1 file, a corrupt file and a text file named .mp4."""
    folder = tmp_path_factory.mktemp("videos")
    for clip in clips():
        shutil.copy(clip, folder)
    write_clip(folder / "av1.mp4", codec="libsvtav1")
    data = (folder / "bikes.mp4").read_bytes()
    (folder / "corrupt.mp4").write_bytes(data[: len(data) // 2])
    (folder / "text.mp4").write_text("this is not a video\n" * 50)
    return folder


@pytest.fixture(scope="module")
def first(folder, tmp_path_factory):
    """One finished run of a user who has set nothing up: (cache, its completed process)."""
    out = tmp_path_factory.mktemp("out")
    (out / "home").mkdir()
    (out / "tmp").mkdir()
    clean = {"HOME": str(out / "home"), "TMPDIR": str(out / "tmp"), "XDG_CACHE_HOME": None, "RAY_AUTH_MODE": None}
    return out / "cache", run("jobs.prune", str(folder), "--out", str(out / "cache"), f"--num-frames={FRAMES}", **clean)


def test_good_videos_are_cached_and_bad_ones_have_a_row(first):
    path, done = first
    assert done.returncode == 0, done.stdout
    assert list((path.parent / "home").rglob("*")) == []  # above all no token, for which a ``ray start`` would ask
    cache = TokenCache(path)
    assert cache.video_ids == GOOD
    assert cache.failed == {"corrupt.mp4": "corrupt", "text.mp4": "unsupported"}
    for video_id in GOOD:
        row = cache.metadata(video_id)
        assert (row["n_frames"], row["tokens_per_frame"], row["n_tokens"]) == (FRAMES, 196, FRAMES * 49)
        assert row["backend"] == "pyav"
        assert sum(row["kept_per_frame"]) == row["n_tokens"]
        assert len(row["timestamps"]) == len(row["temporal_density"]) == FRAMES
        assert all(row[f"{stage}_s"] > 0 for stage in ("decode", "encode", "prune", "write"))
    assert "5 ok, 2 failed, 0 without a row" in done.stdout
    assert "text.mp4" in done.stdout and "unsupported" in done.stdout
    assert "7/7 videos, 2 failed" in done.stdout  # the log's progress line
    (record,) = [json.loads(file.read_text()) for file in (path / "runs").iterdir()]
    assert record["status"] == "finished"
    assert (record["summary"]["n_ok"], record["summary"]["failures"]) == (5, {"corrupt": 1, "unsupported": 1})
    assert record["summary"]["tokens_kept"] == 5 * FRAMES * 49
    assert record["versions"]["ray"] and record["config"]["num_frames"] == FRAMES


def test_the_stored_selection_is_the_readable_form_on_the_same_encoder_output(first, folder):
    family, cache = family_of(ModelSource.resolve("tiny")), TokenCache(first[0])
    preprocessor, backbone = family.preprocessor(), family.load(choose_runtime("cpu", "float32"))
    for video_id in ("bikes.mp4", "av1.mp4"):
        frames = decode_video(DecodeRequest(folder / video_id, Sampling(FRAMES), preprocessor)).frames
        tokens = backbone.encode(frames).tokens.to(torch.bfloat16)
        for ratio in (0.10, 0.15, 0.20, 0.25):
            expected, video = gstep.prune(tokens, ratio), cache.get(video_id, retention_ratio=ratio)
            assert torch.equal(video.index, expected.index) and torch.equal(video.rank, expected.rank)
            assert torch.equal(video.tokens.view(torch.int16), expected.tokens.view(torch.int16))
    assert torch.equal(cache.newline, backbone.newline().to(torch.bfloat16))


def test_a_second_run_does_nothing_and_another_identity_is_refused_by_name(first, folder, monkeypatch):
    """With Ray forbidden: it neither connects nor loads a model."""
    forbid_ray(monkeypatch)
    before = sorted(first[0].rglob("*"))

    frames = f"--num-frames {FRAMES}"
    for code, options, said in (
        (0, frames, "7 of 7 videos are in the cache already"),
        (0, f"{frames} --retention-ratio 0.1", "stores retention ratio 0.25, which serves 0.1 too"),
        (2, f"{frames} --pruner-param alpha=0.3", "pruner.params.alpha: the cache has 0.5, this run 0.3"),
        (2, f"{frames} --pruner topk", "pruner.method: the cache has 'gstep', this run 'topk'"),
        (2, f"{frames} --retention-ratio 0.5", "retention_ratio: the cache has 0.25, this run 0.5"),
        (2, f"{frames} --dtype bfloat16", "dtype.compute: the cache has 'float32', this run 'bfloat16'"),
        (2, f"{frames} --model tiny-qwen3-vl", "model.type: the cache has 'llava_onevision', this run 'qwen3_vl'"),
        (2, "--fps 1", "sampling.fps: the cache has None, this run 1.0"),
    ):
        assert said in said_by(prune, folder, "--out", first[0], *options.split(), code=code)
    assert sorted(first[0].rglob("*")) == before


def test_whatever_a_decoder_does_costs_its_own_video_only(one_ray, tmp_path):
    """The decoder dies in two ways, hangs and eats memory; the actor that holds its process stays the same."""
    names = [f"{name}.mp4" for name in ("abort", "bomb", "crash", "fine", "hang", "well")]
    for name in names:
        shutil.copy(clips()[1], tmp_path / name)
    limits = ["--decode-timeout", "12", "--decode-memory", "1024", "--decode-workers", "1", "--max-failed", "4"]
    argv = [str(tmp_path), "--out", str(tmp_path / "c"), "--num-frames", "4", *limits]
    assert prune.main([*argv, "--decoder", "tests.jobs.hostile:HostileReader"]) == 0
    cache = TokenCache(tmp_path / "c")
    assert cache.video_ids == ["fine.mp4", "well.mp4"]
    failed = {"abort.mp4": "crash", "bomb.mp4": "out-of-memory", "crash.mp4": "crash", "hang.mp4": "timeout"}
    assert cache.failed == failed
    assert cache.metadata("crash.mp4")["error_signal"] == signal.SIGSEGV
    assert cache.metadata("abort.mp4")["error_signal"] == signal.SIGABRT
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(name for name, _ in calls) == names  # once each
    assert len({parent for _, parent in calls}) == 1


def test_a_broken_checkpoint_ends_the_run_with_its_reason(one_ray, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny.build("tiny"), model)
    weights = load_file(model / "model.safetensors")
    missing = "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight"
    save_file({name: tensor for name, tensor in weights.items() if name != missing}, model / "model.safetensors")
    said = said_by(prune, "--model", model, "--out", tmp_path / "c", "--num-frames", 2, code=1)
    last = said.partition("failed: the run stopped after 0 of 4 videos")[2]
    assert "encoder.layers.1.mlp.fc1.weight" in last
    (record,) = [json.loads(file.read_text()) for file in (tmp_path / "c" / "runs").iterdir()]
    assert record["status"] == "failed"


def test_a_manifest_with_clips_by_time_and_a_model_folder(one_ray, tmp_path):
    shutil.copytree(tiny.build("tiny"), tmp_path / "model")
    shutil.copy(clips()[1], tmp_path / "bikes.mp4")
    rows = [
        {"video_id": "clip/é[red]x", "uri": "bikes.mp4", "start_s": 2.0, "end_s": 4.5, "label": "[bold]a"},
        {"video_id": "beyond", "uri": "bikes.mp4", "start_s": 100},
        {"video_id": "evil", "uri": "/etc/hostname"},
        {"video_id": "gone", "uri": "gone.mp4"},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--fps", "2", "--max-frames", "4", "--pruner", "none", "--model", str(tmp_path / "model")]
    options += ["--on-forbidden", "record"]
    argv = [str(tmp_path / "m.jsonl"), "--out", str(tmp_path / "c[/b]"), *options]
    assert prune.main(argv) == 0
    cache = TokenCache(tmp_path / "c[/b]")
    video = cache.get("clip/é[red]x")
    assert video.rank is None and len(video.index) == video.metadata["n_total"] == 4 * 196
    assert video.metadata["frame_indices"] == [50, 70, 91, 112]  # 2.5 s at 2 a second are 5, so 4 spread evenly
    assert video.metadata["timestamps"] == [2.0, 2.8, 3.64, 4.48]
    assert video.metadata["manifest"] == {"label": "[bold]a"}
    assert cache.failed == {"beyond": "unsupported", "evil": "policy", "gone": "io"}
    shutil.copy(clips()[2], tmp_path / "gone.mp4")  # the remedy, then the retry
    assert prune.main([*argv, "--retry-failed"]) == 0
    again = TokenCache(tmp_path / "c[/b]")
    assert again.video_ids == ["clip/é[red]x", "gone"]
    assert [again.metadata(name)["attempts"] for name in ("beyond", "gone", "clip/é[red]x")] == [2, 2, 1]
    (tmp_path / "bikes.mp4").write_bytes(b"broken since")
    assert "1 videos (1 failed)" in said_by(prune, *argv, "--on-changed", "redo", "--max-failed", "3")
    assert len(TokenCache(tmp_path / "c[/b]").get("clip/é[red]x").index) == 4 * 196  # the earlier tokens stay


SAMPLED = 5
CLIPS = ["bikes.mp4", "carphone_pristine.mp4"]


@pytest.fixture(scope="module", params=["tiny-qwen2-5-vl", "tiny-qwen3-vl"])
def model(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def of_family(one_ray, model, tmp_path_factory):
    """One finished run: (its command line, its folder of videos, its cache, what it printed)."""
    folder, out = tmp_path_factory.mktemp("videos"), tmp_path_factory.mktemp("out") / "c"
    for clip in CLIPS:
        shutil.copy(sample(clip), folder)
    argv = [str(folder), "--out", str(out), "--model", model, "--num-frames", str(SAMPLED)]
    return argv, folder, out, said_by(prune, *argv)


def test_the_stored_tokens_are_the_readable_form_on_the_same_encoder_output(of_family, monkeypatch, model):
    argv, folder, out, printed = of_family
    cache = TokenCache(out)
    assert cache.video_ids == CLIPS
    assert cache.newline is None and cache.header["hidden_size"] == 64

    source = ModelSource.resolve(model)
    preprocessor, backbone = family_of(source).preprocessor(), family_of(source).load(choose_runtime("cpu", "float32"))
    n_bytes = 0
    for clip in CLIPS:
        frames = decode_video(DecodeRequest(folder / clip, Sampling(SAMPLED), preprocessor)).frames
        visual = backbone.encode(frames)
        expected = gstep.prune(visual.tokens.to(torch.bfloat16), 0.25)
        video = cache.get(clip)
        assert torch.equal(video.index, expected.index) and torch.equal(video.rank, expected.rank)
        assert torch.equal(video.tokens.view(torch.int16), expected.tokens.view(torch.int16))
        assert len(video.deepstack) == cache.deepstack_levels == len(visual.deepstack)
        for ours, level in zip(video.deepstack, visual.deepstack, strict=True):
            assert torch.equal(ours, level.to(torch.bfloat16).flatten(0, 1)[video.index])
        row = video.metadata
        assert (row["n_frames"], len(row["timestamps"])) == (3, SAMPLED)
        sides = [side // preprocessor.patch_size for side in frames.shape[1:3]]
        assert row["model_extra"]["video_grid_thw"] == [3, *sides]
        n_bytes += row["n_tokens"] * 64 * 2 * (1 + cache.deepstack_levels)
    assert f"{n_bytes:,} of tokens" in printed  # levels counted
    extra = cache.metadata("bikes.mp4")["model_extra"]
    if model == "tiny-qwen3-vl":
        assert extra["patch_timestamps"] == pytest.approx([1.24, 6.2, 9.96])  # frames 0, 62, 124, 186 and 249 at 25/s
    else:
        assert extra["second_per_grid_ts"] == 2 / (SAMPLED / 250 * 25.0)
    assert "0, 62" in said_by(inspect, out, "bikes.mp4")
    forbid_ray(monkeypatch)
    assert "2 of 2 videos are in the cache already" in said_by(prune, *argv)


def test_they_answer_from_their_caches(of_family, model, tmp_path, monkeypatch):
    cache, out, questions = of_family[2], tmp_path / "o", tmp_path / "q.jsonl"
    rows = [{"question_id": i, "video_id": ["bikes.mp4"] * (1 + i), "prompt": "What is special?"} for i in range(2)]
    rows += [{"question_id": 2, "video_id": "bikes.mp4", "prompt": "Which?", "choices": ["a dog", "a bike"]}]
    write_questions(questions, rows)
    argv = [str(cache), "--questions", str(questions), "--out", str(out), "--retention-ratio", "0.10"]
    argv += ["--max-new-tokens", "6"]
    said_by(generate, *argv)
    opened, answers = TokenCache(cache), answers_by_id(out)
    visual = opened.get("bikes.mp4", 0.10).visual
    assert len(visual.deepstack) == (3 if model == "tiny-qwen3-vl" else 0)
    build = prompt_builder(ModelSource.resolve(model)).build
    prompts = [build("What is special?", [visual] * count) for count in (1, 2)]
    expected = llm(model).generate(prompts, [Decoding(max_new_tokens=6)] * 2)
    assert [answers[name]["answer"] for name in ("0", "1")] == [answer.text for answer in expected]
    assert [answers[name]["n_visual_tokens"] for name in ("0", "1")] == [len(visual.index), 2 * len(visual.index)]
    assert answers["2"]["answer"] in ("A", "B")
    forbid_ray(monkeypatch)
    said_by(generate, *argv, "--rule", "vllm", code=2)  # another policy, other answers


IDS = ("file", "object", "t.tar/a", "t.tar/b", "s.tar/a", "s.tar/b", "z.zip/a", "z.zip/b")
FORMS = ("file", "object", "t.tar/a", "s.tar/a", "z.zip/a")  # the id of a video of each form


def clips_of_one_size(folder: Path) -> list[bytes]:
    """Three clips of other lengths, with as many bytes: a box that players pass over fills them up."""
    clips = [write_clip(folder / f"{count}.mp4", count=count).read_bytes() for count in (40, 20, 30)]
    size = max(map(len, clips)) + 8
    return [clip + (size - len(clip)).to_bytes(4, "big") + b"free" + bytes(size - len(clip) - 8) for clip in clips]


class Corpus:
    """A video of each form: a file, an object of a manifest, and members of a tar here, of one on S3 and of a zip."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        self.folder, self.server = folder, server
        self.roots = ["--video-root", str(folder), "--video-root", server.uri()]
        self.cache = folder / "cache"
        folder.mkdir()
        rows = [{"video_id": "file", "uri": "f.mp4"}, {"video_id": "object", "uri": server.uri("o.mp4")}]
        (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def write(self, a: bytes, b: bytes, first: dict[str, bytes] | None = None, mtime: float = 0) -> None:
        """Write ``a`` as a video of each form, and ``b`` beside it in archives, which begin with other members."""
        (self.folder / "f.mp4").write_bytes(a)
        os.utime(self.folder / "f.mp4", (mtime, mtime))
        self.server.upload("o.mp4", a)
        members = {**(first or {}), "a": a, "b": b}
        files = {f"{name}.mp4": content for name, content in members.items()}
        tar = ended(*(member(name, content, mtime=int(mtime)) for name, content in files.items()))
        (self.folder / "t.tar").write_bytes(tar)
        self.server.upload("s.tar", tar)
        with zipfile.ZipFile(self.folder / "z.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)

    def upload_in_parts(self, data: bytes) -> None:
        client, place = self.server.client, {"Bucket": self.server.bucket, "Key": "o.mp4"}
        upload = client.create_multipart_upload(**place)["UploadId"]
        tag = client.upload_part(**place, UploadId=upload, PartNumber=1, Body=data)["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        assert client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)["ETag"] != tag

    def prune(self, *more: str, code: int = 0) -> str:
        places = (self.folder / "m.jsonl", self.folder / "t.tar", self.server.uri("s.tar"), self.folder / "z.zip")
        options = ("--video-root", self.server.uri(), "--out", self.cache, "--num-frames", "2", *more)
        return said_by(prune, *places, *options, code=code)

    def values(self, column: str) -> dict[str, Any]:
        """A column of the rows of the cache, by video."""
        cache = TokenCache(self.cache)
        return {video_id.removesuffix(".mp4"): cache.metadata(video_id)[column] for video_id in cache.video_ids}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    with S3Server() as server:
        server.reach(monkeypatch)
        yield Corpus(tmp_path / "corpus", server)


def test_other_content_of_the_same_size_is_noticed_and_the_same_content_is_kept(one_ray, corpus, tmp_path):
    a, b, other = clips_of_one_size(tmp_path)
    corpus.write(a, b)
    corpus.prune()
    before = corpus.values("source_hash")
    assert sorted(before) == sorted(IDS)

    corpus.write(a, b, mtime=1e9)  # a copy with other times, and another mark of each tar
    corpus.upload_in_parts(a)  # with an ETag that is no hash of the content
    again = corpus.prune()
    assert "8 of 8 videos are in the cache already" in again and "nothing to do" in again

    corpus.write(a, b, {"new": other}, mtime=2e9)  # packed anew, with another member in front
    assert "8 of 11 videos are in the cache already" in corpus.prune()
    assert {name: value for name, value in corpus.values("source_hash").items() if name in IDS} == before

    corpus.write(other, b, {"new": other, "newer": b}, mtime=3e9)  # as many bytes
    text = corpus.prune(code=2)
    assert "5 videos of the cache" in text and "--on-changed skip processes" in text
    assert all(f"{name}" in text for name in FORMS)
    assert f"still has {len(a)} bytes, but other content" in text

    code, record, said = document_of(verify, [str(corpus.cache), "--live", "11", *corpus.roots])
    changed = {item["video_id"].removesuffix(".mp4") for item in record["live"] if item["state"] == "source-changed"}
    assert code == 1 and changed == {*FORMS} and "nothing is wrong" not in said
    assert {problem["class"] for problem in record["problems"]} == {"source-changed"}

    corpus.prune("--on-changed", "skip")
    assert {name: value for name, value in corpus.values("source_hash").items() if name in IDS} == before
    assert "t.tar/newer" in corpus.values("source_hash")
    corpus.prune("--on-changed", "redo")
    after = corpus.values("source_hash")
    assert {name for name in IDS if after[name] != before[name]} == {*FORMS}
    assert {after[name] for name in FORMS} == {after["t.tar/new"]}
    assert {name for name, attempts in corpus.values("attempts").items() if attempts == 2} == {*FORMS}
    assert verify.main([str(corpus.cache), "--live", "14", *corpus.roots]) == 0

    ids = tmp_path / "ids.txt"
    ids.write_text("t.tar/b.mp4\nfile\n")
    corpus.prune("--redo", str(ids))
    assert corpus.values("attempts")["t.tar/b"] == 2 and corpus.values("attempts")["file"] == 3
    assert sum(corpus.values("attempts").values()) == 14 + 5 + 2
    for named, why in (("typo.mp4\n", "1 of its ids have no row"), ("file\nx", "e.g. x")):
        ids.write_text(named)
        assert why in corpus.prune("--redo", str(ids), code=2)
