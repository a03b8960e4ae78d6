"""Prompts family by family: newline and policies of LLaVA-OneVision; positions, rules and times of the Qwen ones."""

import dataclasses
import random
from itertools import product

import pytest
import torch
from transformers.video_utils import VideoMetadata

from tests.gstep.language.prompts import GRID, PER_FRAME, QWEN, builder, text_of, video
from tests.gstep.llms import stock
from tests.gstep.stock import stock_video_text


def stock_positions(name, prompt, videos):
    model = stock(name).model
    ids = prompt.input_ids[None]
    positions, _ = model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == stock(name).config.video_token_id).int() * 2,
        video_grid_thw=torch.tensor([v.extra["video_grid_thw"] for v in videos]),
        second_per_grid_ts=torch.tensor([v.extra["second_per_grid_ts"] for v in videos]),
    )
    return positions[:, 0]


@pytest.mark.parametrize("name", QWEN)
def test_positions_of_all_tokens_are_those_of_the_stock_model(name):
    for n_frames, seconds in product((1, 5, 40), (0.5, 1.3, 2.0, 7.77)):
        videos = [video(name, n_frames, seconds=seconds), video(name, 2, seconds=0.4, grid=(10, 6))]
        prompt = builder(name).build("What is happening?", videos)
        assert torch.equal(prompt.positions, stock_positions(name, prompt, videos)), (n_frames, seconds)


def old_positions(prompt, video_token, video, whole_seconds):
    """As get_rope_index of transformers 4.57 has it for Qwen2.5-VL, and vLLM, which multiplies in float64.

    What follows starts at the maximum plus one.
    """
    t, h, w = video.extra["video_grid_thw"]
    seconds = torch.tensor(video.extra["second_per_grid_ts"])
    seconds = seconds.long() if whole_seconds else seconds.double()
    n_before = prompt.input_ids.tolist().index(video_token)
    n_after = len(prompt) - n_before - t * h * w // 4
    times = (torch.arange(t).view(-1, 1).expand(-1, h * w // 4) * seconds * 2).long().flatten()
    rows = torch.arange(h // 2).view(1, -1, 1).expand(t, -1, w // 2).flatten()
    columns = torch.arange(w // 2).view(1, 1, -1).expand(t, h // 2, -1).flatten()
    before = torch.arange(n_before).expand(3, -1)
    inside = torch.stack([times, rows, columns]) + n_before
    return torch.cat([before, inside, torch.arange(n_after).expand(3, -1) + inside.max() + 1], dim=1)


@pytest.mark.parametrize(("rule", "whole_seconds"), [("transformers-4.57", True), ("vllm", False)])
def test_older_rules_of_qwen2_5(rule, whole_seconds):
    config = stock(QWEN[0]).config
    assert config.vision_config.tokens_per_second == 2
    for seconds in (0.4, 1.3, 2.0, 7.77):
        clip = video(QWEN[0], 6, seconds=seconds)
        prompt = builder(QWEN[0], rule=rule).build("What is happening?", [clip])
        assert torch.equal(prompt.positions, old_positions(prompt, config.video_token_id, clip, whole_seconds))


@pytest.mark.parametrize(("rule", "outer"), [("transformers-5", True), ("transformers-4.57", False), ("vllm", False)])
def test_every_patch_of_qwen3_has_its_time_also_with_no_token_left(rule, outer):
    name, index = QWEN[1], [0, 5, 3 * PER_FRAME + 1]
    clips = [video(name, 4, index=index), video(name, 1)]
    prompt = builder(name, rule=rule).build("What is happening?", clips)
    start, end = ("<|vision_start|>", "<|vision_end|>")

    def frame(seconds, kept):
        return f"<{seconds} seconds>{start}{'*' * kept}{end}"

    first = frame("0.2", 2) + frame("1.6", 0) + frame("2.9", 0) + frame("4.2", 1)  # 0.25 is shown as 0.2
    videos = [first, frame("0.2", PER_FRAME)]
    shown = "".join(f"{start}{v}{end}" if outer else v for v in videos)
    assert text_of(name, prompt) == f"<|im_start|>user\n{shown}What is happening?<|im_end|>\n<|im_start|>assistant\n"
    # A patch without tokens still takes its place: positions go on as in the whole video.
    whole = builder(name, rule=rule).build("What is happening?", [video(name, 4), video(name, 1)])
    assert torch.equal(prompt.positions[:, -1], whole.positions[:, -1])


def sampled(indices, fps):
    """A video of Qwen3-VL whose frames are these of its source."""
    return dataclasses.replace(video(QWEN[1], -(-len(indices) // 2)), frame_indices=indices, fps=fps)


def test_stock_times_are_those_of_the_stock_processor():
    draw, stock_times = random.Random(0), builder(QWEN[1], frame_times="stock")
    cases = [([40], 25.0), ([0, 1, 1, 2, 9], 30000 / 1001), ([0, 7], 16.50943396226415)]
    cases += [(sorted(draw.choices(range(9000), k=draw.randint(1, 33))), draw.uniform(0.5, 120)) for _ in range(100)]
    for indices, fps in cases:
        clip = sampled(indices, fps)
        prompt = stock_times.build("Why?", [clip])
        metadata = VideoMetadata(total_num_frames=9000, fps=fps, frames_indices=list(indices))
        written = stock_video_text(metadata, (clip.n_frames, *GRID))
        told = f"<|im_start|>user\n<|vision_start|>{written}<|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
        assert stock_times.tokenizer.decode(prompt.input_ids) == told, (indices, fps)


@pytest.mark.parametrize(("indices", "fps"), [((), 25.0), ([0, 1], None), ([0, 1, 2], 25.0), ([0, 1], 0.0)])
def test_a_cache_that_does_not_tell_the_frames_says_what_to_do(indices, fps):
    clip = dataclasses.replace(video(QWEN[1], 1), frame_indices=indices, fps=fps)
    with pytest.raises(ValueError, match=r"lacks the indices .*: prune the video again, or use --frame-times"):
        builder(QWEN[1], frame_times="stock").build("Why?", [clip])


@pytest.mark.parametrize(
    ("positions", "visual", "after"), [("contiguous", [0, 1, 2], 3), ("original", [4, 9, 5 * 196], 5 * 196 + 1)]
)
def test_the_newline_stands_behind_the_kept_tokens_or_behind_the_whole_video(positions, visual, after):
    prompt = builder("tiny", positions).build("Why?", [video("tiny", index=[4, 9])])
    inside = slice(prompt.prefix_length - 3, prompt.prefix_length)
    start = int(prompt.positions[0, inside.start - 1]) + 1
    assert (prompt.positions[0, inside] - start).tolist() == visual
    assert int(prompt.positions[0, prompt.prefix_length]) - start == after
