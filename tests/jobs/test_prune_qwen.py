"""The job end to end with the Qwen families: odd frame counts, deepstack levels, what positions need."""

import shutil

import pytest
import torch

import gstep
from gstep.backbones import ModelSource, choose_runtime, load_backbone, preprocessor_for
from jobs import inspect, prune
from pipeline import TokenCache
from pipeline.decode import DecodeRequest, decode_video
from pipeline.frames import Sampling
from tests.jobs.jobs import forbid_ray, run
from tests.pipeline.videos import sample

pytestmark = pytest.mark.slow

FRAMES = 5
CLIPS = ["bikes.mp4", "carphone_pristine.mp4"]


@pytest.mark.parametrize("model", ["tiny-qwen2-5-vl", "tiny-qwen3-vl"])
def test_the_stored_tokens_are_the_readable_form_on_the_same_encoder_output(tmp_path, capsys, monkeypatch, model):
    folder = tmp_path / "videos"
    folder.mkdir()
    for clip in CLIPS:
        shutil.copy(sample(clip), folder)
    argv = [str(folder), "--out", str(tmp_path / "c"), "--model", model, "--num-frames", str(FRAMES)]
    done = run("jobs.prune", *argv)
    assert done.returncode == 0, done.stdout
    cache = TokenCache(tmp_path / "c")
    assert cache.video_ids == CLIPS
    assert cache.newline is None and cache.header["hidden_size"] == 64

    source = ModelSource.resolve(model)
    preprocessor, backbone = preprocessor_for(source), load_backbone(source, choose_runtime("cpu", "float32"))
    n_bytes = 0
    for clip in CLIPS:
        frames = decode_video(DecodeRequest(folder / clip, Sampling(FRAMES), preprocessor)).frames
        visual = backbone.encode(frames)
        expected = gstep.prune(visual.tokens.to(torch.bfloat16), 0.25)
        video = cache.get(clip)
        assert torch.equal(video.index, expected.index) and torch.equal(video.rank, expected.rank)
        assert torch.equal(video.tokens.view(torch.int16), expected.tokens.view(torch.int16))
        assert len(video.deepstack) == cache.deepstack_levels == len(visual.deepstack)
        for ours, level in zip(video.deepstack, visual.deepstack, strict=True):
            assert torch.equal(ours, level.to(torch.bfloat16).flatten(0, 1)[video.index])
        row = video.metadata
        assert (row["n_frames"], len(row["timestamps"])) == (3, FRAMES)
        assert row["model_extra"]["video_grid_thw"] == [
            3,
            *(side // preprocessor.patch_size for side in frames.shape[1:3]),
        ]
        n_bytes += row["n_tokens"] * 64 * 2 * (1 + cache.deepstack_levels)
    assert f"{n_bytes:,} of tokens" in done.stdout  # levels counted
    extra = cache.metadata("bikes.mp4")["model_extra"]
    if model == "tiny-qwen3-vl":
        assert extra["patch_timestamps"] == pytest.approx([1.24, 6.2, 9.96])  # frames 0, 62, 124, 186 and 249 at 25/s
    else:
        assert extra["second_per_grid_ts"] == 2 / (FRAMES / 250 * 25.0)
    assert inspect.main([str(tmp_path / "c"), "bikes.mp4"]) == 0
    assert "0, 62" in capsys.readouterr().out
    forbid_ray(monkeypatch)
    assert prune.main(argv) == 0
    assert "2 of 2 videos are in the cache already" in capsys.readouterr().err
