"""Short videos, odd frames and clips in the generic family: tokens that fit the prompt, or a fault with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata

from gstep.backbones import ModelSource, Runtime, SampledVideo, family_of
from gstep.errors import TooFewFrames, UnsupportedVideo
from gstep.generic.family import describe_untimed_video
from gstep.generic.processor import load_processor, make_metadata, render_conversation, run_processor
from gstep.language import Visual, prompt_builder
from tests.builders.checkpoints import FAMILIES

RUNTIME = Runtime("cpu", torch.float32, "sdpa")
#: (frames, height, width): few and odd numbers of frames, frames below a patch, extreme and ordinary shapes.
SHAPES = [(1, 112, 168), (2, 112, 168), (3, 112, 168), (7, 56, 56), (5, 360, 640), (4, 8, 8), (4, 1, 99), (2, 20, 3000)]
#: Families that always run: a refusal, frames cut into slices, a processor that resizes on request, a tail, whole ms.
QUICK = ("qwen3_vl", "minicpmv4_6", "minimax_m3_vl", "llava_onevision", "nemotron_h_omni")

every_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)


@pytest.fixture
def folder(name, tiny_checkpoint) -> Path:
    """The tiny checkpoint of a family."""
    return tiny_checkpoint(name)


def make_noise(n_frames: int, height: int, width: int) -> Tensor:
    """Make frames [F,H,W,3] uint8 of fixed noise."""
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n_frames, height, width, 3), generator=seeded, dtype=torch.uint8)


@every_family
def test_short_videos_and_odd_frames_give_tokens_that_fit_the_prompt_or_a_fault(name, folder):
    source = ModelSource.resolve(str(folder), family="generic")
    family, builder = family_of(source), prompt_builder(source)
    backbone = family.load(RUNTIME)
    clips = {shape: make_noise(*shape) for shape in SHAPES}
    clips |= {(6, 60, 90): torch.zeros(6, 60, 90, 3, dtype=torch.uint8)}
    shapes = {}
    for shape, frames in clips.items():
        try:
            visual = backbone.encode(frames, video=describe_untimed_video(*shape))
        except (TooFewFrames, UnsupportedVideo) as fault:
            assert "own processor refuses the video" in str(fault)
            with pytest.raises(type(fault)):
                family.token_counts(*shape)
            continue
        T, N, _ = shapes[shape] = visual.tokens.shape
        assert visual.tokens.isfinite().all()
        assert shape[0] >= T and family.token_counts(*shape) == (T, N)
        deepstack = tuple(level.flatten(0, 1) for level in visual.deepstack)
        kept = Visual(visual.tokens.flatten(0, 1), torch.arange(T * N), T, N, visual.extra, deepstack)
        assert len(builder.build("What moves?", [kept]).visuals) == 1  # raises if the placeholders do not fit
    assert {(7, 56, 56), (5, 360, 640), (6, 60, 90)} <= shapes.keys()
    if name.startswith("minicpm"):  # a frame and its slices are one step of time
        assert [shapes[shape][0] for shape in SHAPES] == [n for n, _, _ in SHAPES]


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_a_video_with_too_few_frames_names_the_processor_s_reason_and_the_remedy(folder):
    backbone = family_of(ModelSource.resolve(str(folder), family="generic")).load(RUNTIME)
    with pytest.raises(TooFewFrames, match=r"temporal_factor:2\); 1 frame sampled: sample more"):
        backbone.encode(make_noise(1, 112, 168))


@every_family
def test_a_clip_s_times_in_the_prompt_are_those_of_its_frames(name, folder):
    """A clip of 5 s from 10 s on, 24 frames a second in a file of 25 on average; the stock processor counts frames.

    The first frame appeared before the clip, and one is repeated.
    """
    sampled = SampledVideo(112, 168, [9.99, 10.5, 10.5, 11.75, 13.0, 14.25], 10.0, 25.0, 120, 24.0)
    stock = VideoMetadata(120, 24.0, 168, 112, 5.0, frames_indices=[0, 12, 12, 42, 72, 102])
    source = ModelSource.resolve(str(folder), family="generic", gate=False)
    processor = load_processor(source)
    content = [{"type": "video"}, {"type": "text", "text": "?"}]
    text = render_conversation(source, processor, [{"role": "user", "content": content}])
    frames = make_noise(6, 112, 168).permute(0, 3, 1, 2)
    ids, expected = (
        run_processor(processor, text, frames, metadata)["input_ids"] for metadata in (make_metadata(sampled), stock)
    )
    assert torch.equal(ids, expected)
