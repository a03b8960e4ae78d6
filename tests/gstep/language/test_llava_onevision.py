"""Prompts of LLaVA-OneVision: the kept tokens and their newline, under both policies of positions."""

import pytest

from tests.gstep.language.prompts import builder, text_of, video


def test_the_prompt_of_llava_onevision():
    assert text_of("tiny", builder("tiny").build("Why?", [video("tiny", index=[4, 9])])) == (
        "<|im_start|>user ***\nWhy?<|im_end|><|im_start|>assistant\n"  # two tokens and the newline
    )


@pytest.mark.parametrize(
    ("positions", "visual", "after"), [("contiguous", [0, 1, 2], 3), ("original", [4, 9, 5 * 196], 5 * 196 + 1)]
)
def test_the_newline_stands_behind_the_kept_tokens_or_behind_the_whole_video(positions, visual, after):
    prompt = builder("tiny", positions).build("Why?", [video("tiny", index=[4, 9])])
    inside = slice(prompt.prefix_length - 3, prompt.prefix_length)
    start = int(prompt.positions[0, inside.start - 1]) + 1
    assert (prompt.positions[0, inside] - start).tolist() == visual
    assert int(prompt.positions[0, prompt.prefix_length]) - start == after
