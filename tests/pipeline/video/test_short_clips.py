"""Clips that give few frames by time: the least that the stock processors sample, at the places where they sample."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from pipeline.errors import FAULTS, VideoFault
from pipeline.prune.config import PruneConfig
from pipeline.prune.recipe import make_sampling
from pipeline.video.decode import DecodeRequest, decode_video
from pipeline.video.sampling import Sampling, choose_frames
from tests.builders.clips import write_clip, write_jpegs
from tests.gstep.stock import stock_frames

STOCK = {
    "tiny-qwen2-5-vl": ("qwen2_vl/video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
    "tiny-qwen3-vl": ("qwen3_vl/video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
}
FAMILIES = ["tiny", *STOCK]


def sampling_for(model: str, **options) -> Sampling:
    family = family_of(ModelSource.resolve(model))
    return make_sampling(PruneConfig(**options), family.default_max_frames, family.min_frames(), family.min_rule)


def with_least(model: str, min_frames: int | None) -> ModelSource:
    source = ModelSource.resolve(model)
    return replace(source, preprocessor={**source.preprocessor, "min_frames": min_frames})


def request(path: Path, model: str, *clip: float | None, **options) -> DecodeRequest:
    return DecodeRequest(
        path, sampling_for(model, **options), family_of(ModelSource.resolve(model)).preprocessor(), *clip
    )


@pytest.mark.parametrize("model", STOCK)
@pytest.mark.parametrize("min_frames", [4, 7])
def test_the_least_frames_are_where_the_stock_processor_puts_them(model, min_frames):
    family = family_of(ModelSource.resolve(model))
    sampling = Sampling(None, 1.0, 768, min_frames=min_frames, min_rule=family.min_rule)
    for total in range(2, 76, 1 if min_frames == 4 else 3):  # up to 3 s: fewer by time than the least
        expected = stock_frames(*STOCK[model], total, 25.0, 1.0, min_frames)
        assert choose_frames(np.arange(total) / 25, sampling).tolist() == expected, total


def test_the_least_is_the_checkpoints_own_and_llava_has_none():
    for model, least in (("tiny", 1), ("tiny-qwen2-5-vl", 4), ("tiny-qwen3-vl", 4)):
        assert family_of(ModelSource.resolve(model)).min_frames() == least
        assert sampling_for(model, fps=1.0).min_frames == least
        assert sampling_for(model, num_frames=2).min_frames == 1  # as many as are asked for
    for given, expected in ((8, 8), (None, 4)):
        assert family_of(with_least("tiny-qwen3-vl", given)).min_frames() == expected
    with pytest.raises(ModelError, match="min_frames=0"):
        family_of(with_least("tiny-qwen2-5-vl", 0)).min_frames()


@pytest.mark.parametrize("name", ["a.mp4", "a.avi"])
@pytest.mark.parametrize("model", FAMILIES)
def test_a_short_clip_gets_the_least_in_every_container(tmp_path, name, model):
    path = write_clip(tmp_path / name, codec="mpeg4" if name == "a.avi" else "libx264", count=50)
    for clip, count in (((1.0, 1.52), 13), ((0.0, 1.0), 25), ((0.0, 1.1), 28), ((None, None), 50)):
        first = round(25 * (clip[0] or 0))
        if model == "tiny":
            expected = [first, first + 25] if count > 25 else [first]
        else:
            expected = [first + place for place in stock_frames(*STOCK[model], count, 25.0, 1.0, 4)]
        assert decode_video(request(path, model, *clip, fps=1.0)).frame_indices.tolist() == expected


def test_fewer_frames_than_the_least_are_taken_all_or_in_pairs(tmp_path):
    path = write_clip(tmp_path / "a.mp4", count=50)
    for model, clip, more, frames in (
        ("tiny-qwen3-vl", (0.4, 0.52), {}, [10, 11, 12]),
        ("tiny-qwen2-5-vl", (0.4, 0.52), {}, [10, 11]),
        ("tiny-qwen3-vl", (), {"max_frames": 2}, [0, 25]),
    ):
        assert decode_video(request(path, model, *clip, fps=1.0, **more)).frame_indices.tolist() == frames


def test_a_still_is_too_short_for_qwen3_vl_alone(tmp_path):
    folder = write_jpegs(tmp_path / "frames_fps3" / "still", 1)
    video = write_clip(tmp_path / "still.mp4", count=1)
    for path in (folder, video):
        for model in ("tiny", "tiny-qwen2-5-vl"):
            assert decode_video(request(path, model, fps=1.0)).frame_indices.tolist() == [0]
        with pytest.raises(VideoFault, match="no video of fewer than 2 sampled frames, this one has 1") as caught:
            decode_video(request(path, "tiny-qwen3-vl", fps=1.0))
        assert (caught.value.fault_class, caught.value.retryable) == ("too-short", False)
    assert "longer clip" in FAULTS["too-short"].remedy and "no video" not in FAULTS["too-short"].remedy
