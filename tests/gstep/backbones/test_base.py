"""What every encoder does: a video by itself, in chunks; and what a sampled video says of its times."""

import pytest
import torch

from gstep.backbones import ModelSource, SampledVideo, family_of
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, STOCK, frames_for


@pytest.mark.parametrize("model", STOCK)
def test_tokens_do_not_depend_on_other_videos_or_on_the_form_of_the_frames(model):
    source = ModelSource.resolve(model)
    frames = frames_for(source, 7)
    backbone = family_of(source).load(BFLOAT16, frame_batch=4)
    first = backbone.encode(frames)
    backbone.encode(frames.flip(0)[:5])
    read_only = frames.numpy().copy()
    read_only.flags.writeable = False
    again = backbone.encode(read_only)
    assert all(
        torch.equal(a, b)
        for a, b in zip((first.tokens, *first.deepstack), (again.tokens, *again.deepstack), strict=True)
    )


@pytest.mark.parametrize("model", STOCK)
def test_no_frames_are_refused(model):
    source = ModelSource.resolve(model)
    with pytest.raises(ValueError, match="at least one frame"):
        family_of(source).load(FLOAT32).encode(frames_for(source)[:0])


def test_a_cpu_takes_frames_one_by_one_and_a_gpu_a_batch():
    backbone = family_of(ModelSource.resolve("tiny")).load(FLOAT32, frame_batch=5)
    assert backbone.on_cpu and backbone.chunk_length(384, 384) == 1
    backbone.device = "cuda:1"
    assert not backbone.on_cpu and backbone.chunk_length(384, 384) == 5


def test_times_of_a_clip_count_from_its_start():
    video = SampledVideo(252, 448, [0.98, 2.0, 3.5], 1.0, 25.0, 75)
    assert video.n_frames == 3
    assert video.times_in_clip == [0.0, 1.0, 2.5]  # the first frame was on screen when the clip started
    assert video.sampled_fps == pytest.approx(1.0)  # 3 of 75 frames, at 25 a second
    whole = SampledVideo(252, 448, [0.0, 0.5], None, 30.0, 30)
    assert (whole.times_in_clip, whole.sampled_fps) == ([0.0, 0.5], pytest.approx(2.0))
