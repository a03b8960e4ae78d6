"""Prompts of the Qwen families: positions of the stock model, the rules of other libraries, times as text."""

import pytest
import torch

from tests.gstep.language.prompts import PER_FRAME, QWEN, builder, text_of, video
from tests.gstep.llms import stock


def stock_positions(name, prompt, videos):
    model = stock(name).model
    ids = prompt.input_ids[None]
    positions, deltas = model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == stock(name).config.video_token_id).int() * 2,
        video_grid_thw=torch.tensor([v.extra["video_grid_thw"] for v in videos]),
        second_per_grid_ts=torch.tensor([v.extra["second_per_grid_ts"] for v in videos]),
    )
    return positions[:, 0], deltas


@pytest.mark.parametrize("name", QWEN)
@pytest.mark.parametrize("seconds", [0.5, 1.3, 2.0, 7.77])
@pytest.mark.parametrize("n_frames", [1, 5, 40])
def test_positions_of_all_tokens_are_those_of_the_stock_model(name, seconds, n_frames):
    videos = [video(name, n_frames, seconds=seconds), video(name, 2, seconds=0.4, grid=(10, 6))]
    prompt = builder(name).build("What is happening?", videos)
    expected, _ = stock_positions(name, prompt, videos)
    assert torch.equal(prompt.positions, expected)


def old_positions(prompt, video_token, video, whole_seconds):
    """As get_rope_index of transformers 4.57 has it for Qwen2.5-VL: what follows starts at the maximum plus one."""
    t, h, w = video.extra["video_grid_thw"]
    seconds = torch.tensor(video.extra["second_per_grid_ts"])
    seconds = seconds.long() if whole_seconds else seconds
    n_before = prompt.input_ids.tolist().index(video_token)
    n_after = len(prompt) - n_before - t * h * w // 4
    times = (torch.arange(t).view(-1, 1).expand(-1, h * w // 4) * seconds * 2).long().flatten()
    rows = torch.arange(h // 2).view(1, -1, 1).expand(t, -1, w // 2).flatten()
    columns = torch.arange(w // 2).view(1, 1, -1).expand(t, h // 2, -1).flatten()
    before = torch.arange(n_before).expand(3, -1)
    inside = torch.stack([times, rows, columns]) + n_before
    return torch.cat([before, inside, torch.arange(n_after).expand(3, -1) + inside.max() + 1], dim=1)


@pytest.mark.parametrize(("rule", "whole_seconds"), [("transformers-4.57", True), ("vllm", False)])
@pytest.mark.parametrize("seconds", [0.4, 1.3, 2.0, 7.77])
def test_older_rules_of_qwen2_5(rule, whole_seconds, seconds):
    assert stock(QWEN[0]).config.vision_config.tokens_per_second == 2
    clip = video(QWEN[0], 6, seconds=seconds)
    prompt = builder(QWEN[0], rule=rule).build("What is happening?", [clip])
    assert torch.equal(
        prompt.positions, old_positions(prompt, stock(QWEN[0]).config.video_token_id, clip, whole_seconds)
    )


def test_the_text_after_a_long_video_lies_where_the_rule_says():
    clip = video(QWEN[0], 30, seconds=2.0)
    new, old = (builder(QWEN[0], rule=rule).build("Why?", [clip]) for rule in ("transformers-5", "vllm"))
    start = new.positions[0, new.prefix_length - len(clip.index)]
    assert new.positions[0, new.prefix_length] == start + 6  # the larger side of the grid; the last frame is at 116
    assert old.positions[0, old.prefix_length] == start + 29 * 4 + 1


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


def test_the_prompt_of_qwen2_5():
    assert text_of(QWEN[0], builder(QWEN[0]).build("Why?", [video(QWEN[0], index=[4, 9])])) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|>**<|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
    )
