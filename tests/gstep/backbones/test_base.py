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


class SmallMemory:
    """Stands in for ``encode_chunk`` of a backbone on a GPU that has room for so many frames."""

    def __init__(self, backbone, room: int) -> None:
        self.room, self.sizes, self._encode = room, [], backbone.encode_chunk

    def __call__(self, frames, evidence):
        self.sizes.append(len(frames))
        if len(frames) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._encode(frames, evidence)


@pytest.fixture
def crowded(monkeypatch):
    """A backbone that takes itself to be on a GPU with room for so many frames."""

    def make(model: str, room: int):
        backbone = family_of(ModelSource.resolve(model)).load(FLOAT32, frame_batch=8)
        monkeypatch.setattr(type(backbone), "on_cpu", property(lambda self: room == 0))
        memory = SmallMemory(backbone, room or 99)
        monkeypatch.setattr(backbone, "encode_chunk", memory)
        return backbone, memory

    return make


@pytest.mark.parametrize(("model", "alone"), list(zip(STOCK, (1, 2, 2), strict=True)))
def test_a_cpu_takes_one_frame_or_temporal_patch_at_a_time_and_a_gpu_a_batch(crowded, model, alone):
    frames = frames_for(ModelSource.resolve(model), 12)
    for room, sizes in ((0, [alone] * (12 // alone)), (99, [8, 4])):
        backbone, memory = crowded(model, room)
        backbone.encode(frames)
        assert memory.sizes == sizes


@pytest.mark.parametrize("model", STOCK)
def test_a_full_gpu_gets_smaller_chunks_of_this_video_alone(crowded, model):
    frames = frames_for(ModelSource.resolve(model), 6)
    expected = crowded(model, 99)[0].encode(frames)
    backbone, memory = crowded(model, 3)
    tokens = backbone.encode(frames).tokens
    assert memory.sizes[0] == 6 and memory.room >= memory.sizes[-1]
    assert (tokens - expected.tokens).abs().max() < 1e-5 * expected.tokens.abs().max()
    memory.room, memory.sizes = 99, []
    backbone.encode(frames)
    assert memory.sizes == [6]
    memory.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        backbone.encode(frames)


def test_times_of_a_clip_count_from_its_start():
    video = SampledVideo(252, 448, [0.98, 2.0, 3.5], 1.0, 25.0, 75)
    assert video.n_frames == 3
    assert video.times_in_clip == [0.0, 1.0, 2.5]  # the first frame was on screen when the clip started
    assert video.sampled_fps == pytest.approx(1.0)  # 3 of 75 frames, at 25 a second
    whole = SampledVideo(252, 448, [0.0, 0.5], None, 30.0, 30)
    assert (whole.times_in_clip, whole.sampled_fps) == ([0.0, 0.5], pytest.approx(2.0))
