"""The job end to end on real files: real decoders, real Ray, a real model, a real cache."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

import gstep
from gstep.backbones import ModelSource, choose_runtime, family_of
from gstep.checkpoints import tiny
from jobs import prune
from pipeline import TokenCache
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling
from tests.builders.clips import write_clip
from tests.builders.runs import clips, forbid_ray, run, said_by

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
