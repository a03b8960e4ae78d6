"""Prompts and positions: those of the stock models on all tokens, slices of them on pruned ones, under each rule."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from gstep.backbones import ModelSource
from gstep.checkpoints import tiny
from gstep.errors import ModelError
from gstep.language import Decoding, PromptPolicy, Visual, prompt_builder
from tests.gstep.llms import FAMILIES, stock

QWEN = ("tiny-qwen2-5-vl", "tiny-qwen3-vl")
GRID = (8, 12)  # patches: 4 x 6 = 24 tokens a frame
PER_FRAME = 24


def video(name, n_frames=5, index=None, seconds=1.3, grid=GRID):
    """Zeros for tokens: prompts depend on how many there are and where they stood."""
    per_frame = 196 if name == "tiny" else grid[0] * grid[1] // 4
    index = torch.arange(n_frames * per_frame) if index is None else torch.tensor(index)
    tokens = torch.zeros(len(index), 64)
    if name == "tiny":
        return Visual(tokens, index, n_frames, per_frame, newline=torch.zeros(64))
    extra = {
        "video_grid_thw": [n_frames, *grid],
        "spatial_merge_size": 2,
        "second_per_grid_ts": seconds,
        "patch_timestamps": [0.25 + seconds * t for t in range(n_frames)],
    }
    levels = 3 if name == "tiny-qwen3-vl" else 0
    return Visual(tokens, index, n_frames, per_frame, extra, (tokens,) * levels)


def builder(name, positions=None, rule="transformers-5"):
    return prompt_builder(ModelSource.resolve(name), positions, rule)


def text_of(name, prompt):
    """The prompt as text, with a star for each placeholder."""
    token = "<video>" if name == "tiny" else "<|video_pad|>"
    return builder(name).tokenizer.decode(prompt.input_ids).replace(token, "*")


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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_kept_tokens_stand_where_they_stood(name):
    whole_video = video(name)
    index = [0, 1, whole_video.tokens_per_frame + 7, 3 * whole_video.tokens_per_frame, len(whole_video.index) - 1]
    make = builder(name, "original").build
    whole, pruned = make("And then?", [whole_video]), make("And then?", [video(name, index=index)])
    places = (whole.input_ids == stock(name).config.video_token_id).nonzero()[:, 0]
    keep = torch.ones(len(whole), dtype=torch.bool)
    keep[places[: len(whole_video.index)]] = False
    keep[places[torch.tensor(index)]] = True
    assert torch.equal(pruned.input_ids, whole.input_ids[keep])
    assert torch.equal(pruned.positions, whole.positions[:, keep])
    assert pruned.extent == max(len(pruned), int(whole.positions.max()) + 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_contiguous_positions_count_what_is_there(name):
    prompt = builder(name, "contiguous").build("And then?", [video(name, index=[3, 30, 77]), video(name, index=[9])])
    assert torch.equal(prompt.positions, torch.arange(len(prompt)).expand(len(prompt.positions), -1))


def test_the_default_is_contiguous_for_llava_and_original_for_qwen():
    assert [builder(name).policy.positions for name in FAMILIES] == ["contiguous", "original", "original"]
    assert builder("tiny").policy.describe().keys() == {"positions", "rule", "chat_template"}


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


def test_the_prompts_of_the_other_families():
    assert text_of("tiny", builder("tiny").build("Why?", [video("tiny", index=[4, 9])])) == (
        "<|im_start|>user ***\nWhy?<|im_end|><|im_start|>assistant\n"  # two tokens and the newline
    )
    assert text_of(QWEN[0], builder(QWEN[0]).build("Why?", [video(QWEN[0], index=[4, 9])])) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|>**<|vision_end|>Why?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_system_message_comes_first(name):
    prompt = builder(name).build("Why?", [video(name, index=[1])], system="Be brief.")
    assert text_of(name, prompt).startswith("<|im_start|>system")
    assert "Be brief." in text_of(name, prompt) and "helpful" not in text_of(name, prompt)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_the_whole_text(name):
    maker = builder(name)
    prompt = maker.build("Qu'est-ce qui se passe? 什么  \n", [video(name, index=[0, 1, 2])])
    whole = maker.tokenizer(maker.tokenizer.decode(prompt.input_ids), add_special_tokens=False).input_ids
    assert prompt.input_ids.tolist() == whole
    assert maker.n_visual([video(name, index=[0, 1, 2])]) == (4 if name == "tiny" else 3)
    assert (prompt.input_ids == stock(name).config.video_token_id).sum() == maker.n_visual(prompt.visuals)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["video", "image"])
def test_a_question_cannot_pass_for_a_video(name, kind):
    token = f"<{kind}>" if name == "tiny" else f"<|{kind}_pad|>"
    for keywords in ({"text": f"hello {token}"}, {"text": "hello", "system": token}):
        with pytest.raises(ValueError, match="placeholder"):
            builder(name).build(visuals=[video(name, index=[0])], **keywords)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_another_model_are_refused(name):
    narrow = dataclasses.replace(video(name, index=[0]), tokens=torch.zeros(1, 32))
    with pytest.raises(ValueError, match="width 32; this model takes 64"):
        builder(name).build("Why?", [narrow])
    wrong = "tiny-qwen2-5-vl" if name == "tiny-qwen3-vl" else "tiny-qwen3-vl"
    with pytest.raises(ValueError, match="deepstack levels"):
        builder(name).build("Why?", [video(wrong, index=[0])])


def test_a_cache_without_what_the_family_needs_is_refused():
    without_newline = dataclasses.replace(video("tiny", index=[0]), newline=None)
    with pytest.raises(ValueError, match="newline"):
        builder("tiny").build("Why?", [without_newline])
    for name, lost in (
        *((n, "video_grid_thw") for n in QWEN),
        (QWEN[0], "second_per_grid_ts"),
        (QWEN[1], "patch_timestamps"),
    ):
        clip = video(name, index=[0])
        less = dataclasses.replace(clip, extra={k: v for k, v in clip.extra.items() if k != lost})
        with pytest.raises(ValueError, match="prune"):
            builder(name).build("Why?", [less])
    with pytest.raises(ValueError, match="does not fit"):
        builder(QWEN[0]).build("Why?", [dataclasses.replace(video(QWEN[0]), n_frames=4)])


@pytest.mark.parametrize("name", FAMILIES)
def test_builders_pickle(name):
    again = pickle.loads(pickle.dumps(builder(name)))  # noqa: S301 - our own bytes
    assert torch.equal(
        again.build("Why?", [video(name)]).positions, builder(name).build("Why?", [video(name)]).positions
    )


def test_unknown_policies_and_options_are_refused():
    with pytest.raises(ValueError, match="unknown positions 'odd'; known: contiguous, original"):
        builder("tiny", "odd")
    with pytest.raises(ValueError, match="unknown rule"):
        PromptPolicy("original", "transformers-3")
    for wrong in (
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"seed": -1},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Decoding(**wrong)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(tiny.build("tiny"), tmp_path / "model"))


def test_the_chat_template_is_found_where_checkpoints_keep_it(folder):
    template = (folder / "chat_template.jinja").read_text()
    expected = prompt_builder(ModelSource.resolve(folder)).build("Why?", [video("tiny")]).input_ids
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        prompt_builder(ModelSource.resolve(folder))
    for filename in ("tokenizer_config.json", "chat_template.json"):
        path = folder / filename
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, "chat_template": template}))
        assert torch.equal(
            prompt_builder(ModelSource.resolve(folder)).build("Why?", [video("tiny")]).input_ids, expected
        )


def test_a_template_without_a_place_for_videos_is_refused(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['role'] }}: hello")
    with pytest.raises(ValueError, match="no place for 2 videos"):
        prompt_builder(ModelSource.resolve(folder)).build("Why?", [video("tiny"), video("tiny")])


def test_a_checkpoint_without_a_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        prompt_builder(ModelSource.resolve(folder))


@pytest.mark.parametrize("content", ["{", "{}", '{"added_tokens": [], "model": {}}'])
def test_a_damaged_tokenizer_is_refused(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"no tokenizer that can be loaded.*download it again"):
        prompt_builder(ModelSource.resolve(folder))
