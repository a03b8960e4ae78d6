"""Conversations and single questions against the stock template and processor: ids, logits, positions and times."""

import dataclasses
import random
import re
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.video_utils import VideoMetadata

from gstep.backbones import ModelSource
from gstep.errors import ModelError
from gstep.language import prompt_builder
from tests.gstep.language.prompts import GRID, PER_FRAME, QWEN, builder, text_of, video
from tests.gstep.llms import FAMILIES, GREEDY, encode, ids_of, llm, stock, stock_greedy, stock_inputs
from tests.gstep.stock import stock_video_text

NAMES = FAMILIES
TOKENS = {"tiny": "<video>", "tiny-internvl": "<video>"}


def text(words):
    return {"type": "text", "text": words}


def turn(role, *parts):
    return {"role": role, "content": [text(part) if isinstance(part, str) else part for part in parts]}


VIDEO = {"type": "video"}
FIRST = [turn("user", VIDEO, "Who is it?"), turn("assistant", "Un chien, 什么?"), turn("user", "And what does it do?")]
LAST = [turn("user", "Hello."), turn("assistant", "Hi.\n"), turn("user", "Look:", VIDEO, "What is it?")]
SYSTEM = [turn("system", "Be brief."), *FIRST]
BOTH = [*FIRST[:2], turn("user", "And this one?", VIDEO, "Which is longer?")]
CONVERSATIONS = {"first": FIRST, "last": LAST, "system": SYSTEM, "both": BOTH}


def stock_video(name, visual) -> str:
    """What the stock processor writes for a video in place of its token.

    Its video processor needs torchvision; these attributes are all that writes placeholders.
    """
    inputs, grid = {"pixel_values_videos": torch.empty(1, visual.n_frames, 0)}, visual.extra.get("video_grid_thw")
    if name in ("tiny", "tiny-internvl", "tiny-qwen2-5-vl"):
        marks = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"}
        kind, attributes = {
            "tiny": (LlavaOnevisionProcessor, {"num_image_tokens": 27 * 27}),
            "tiny-internvl": (InternVLProcessor, {"image_seq_length": visual.tokens_per_frame, **marks}),
            "tiny-qwen2-5-vl": (Qwen2_5_VLProcessor, {"video_processor": SimpleNamespace(merge_size=2)}),
        }[name]
        processor = object.__new__(kind)
        vars(processor).update(video_token=TOKENS.get(name, "<|video_pad|>"), **attributes)
        return processor.replace_video_token(inputs | ({"video_grid_thw": torch.tensor([grid])} if grid else {}), 0)
    # Two frames of a patch, two frames a second: the times that ``timed`` gives the video.
    indices = list(range(2 * visual.n_frames))
    return stock_video_text(VideoMetadata(total_num_frames=len(indices), fps=2.0, frames_indices=indices), grid)


def timed(visual):
    """The video with a time for each patch that two frames a second give it."""
    if "patch_timestamps" not in visual.extra:
        return visual
    times = [t + 0.25 for t in range(visual.n_frames)]
    return dataclasses.replace(visual, extra={**visual.extra, "patch_timestamps": times})


def stock_ids(name, messages, *visuals) -> list[int]:
    """The ids of a conversation by the checkpoint's own tokenizer and chat template, and by the stock processor."""
    folder, _ = ModelSource.resolve(name).pretrained()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token = TOKENS.get(name, "<|video_pad|>")
    assert rendered.count(token) == len(visuals)
    videos = iter(visuals)
    whole = re.sub(re.escape(token), lambda _: stock_video(name, next(videos)), rendered)
    return tokenizer(whole, add_special_tokens=False).input_ids


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_ids_are_those_of_the_stock_template_and_processor(name, messages):
    visuals = [timed(video(name, n_frames=n)) for n in (2, 4)][: 1 + (messages is BOTH)]
    prompt = builder(name).build_chat(messages, visuals)
    assert prompt.input_ids.tolist() == stock_ids(name, messages, *visuals)
    assert prompt.spans == tuple(sorted(prompt.spans)) and prompt.visuals == tuple(visuals)


def test_with_all_tokens_the_logits_of_a_conversation_are_those_of_the_stock_model_on_pixels(name):
    encoded = encode(name, n_frames=2)
    prompt = prompt_builder(ModelSource.resolve(name)).build_chat(LAST, [encoded.visual])
    with torch.no_grad():
        expected = stock(name)(**stock_inputs(name, prompt, encoded)).logits[0]
    (logits,) = llm(name).logits([prompt])
    assert (logits - expected).abs().max() < 5e-5  # as of single questions


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2-5-vl"])
def test_replies_of_a_conversation_are_those_of_the_stock_model_on_pixels(name, messages):
    clips = ("bikes.mp4", "carphone_pristine.mp4")[: 1 + (messages is BOTH)]
    videos = [encode(name, clip, n_frames=2) for clip in clips]
    prompt = prompt_builder(ModelSource.resolve(name)).build_chat(messages, [one.visual for one in videos])
    (answer,) = llm(name).generate([prompt], [GREEDY])
    assert answer.token_ids == stock_greedy(name, stock_inputs(name, prompt, *videos))


def test_a_conversation_shares_its_video_with_others_that_begin_alike():
    """Questions that follow the same turns go through the model together, and say what each says alone."""
    visual = encode("tiny", n_frames=2).visual
    prompts = [builder("tiny").build_chat([*FIRST[:2], turn("user", words)], [visual]) for words in ("What?", "Why?")]
    together = ids_of(llm("tiny").generate(prompts, [GREEDY] * 2))
    assert together == [llm("tiny").generate([p], [GREEDY])[0].token_ids for p in prompts]
    assert together[0] != together[1]


@pytest.mark.parametrize("name", ["tiny"], scope="module")
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.content[0].text }}{% endfor %}", "role system: put the"),
        ("{% for m in messages if m.role != 'assistant' %}{{ m.content[0].text }}{% endfor %}", "the role assistant"),
        ("{{ messages[-1].content[0].text }}", "leaves out the text of a message"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "does not take a message as a list of parts"),
        ("{{ raise_exception('no system message') }}", "no system message"),
    ],
)
def test_a_template_that_refuses_or_leaves_out_a_turn_is_an_error_of_the_question(folder, template, words):
    (folder / "chat_template.jinja").write_text(
        f"{{% if messages|length > 1 %}}{template}{{% else %}}{{{{ messages[0].content[0].text }}}}{{% endif %}}"
    )
    conversation = [turn("system", "Be brief."), turn("user", "Who?"), turn("assistant", "It."), turn("user", "Why?")]
    with pytest.raises(ValueError, match=words) as error:
        prompt_builder(ModelSource.resolve(folder)).build_chat(conversation, [])
    assert not isinstance(error.value, ModelError)


@pytest.mark.parametrize("name", ["tiny"], scope="module")
def test_a_template_may_move_a_text_and_leave_out_earlier_thoughts(folder):
    template = (
        "{% for m in messages if m.role != 'system' %}{% if loop.last %}{{ messages[0].content[0].text }}{% endif %}"
        "{{ m.content[0].text.split('</think>')[-1] | trim }}\n{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    maker = prompt_builder(ModelSource.resolve(folder))
    asked = turn("system", "Be brief."), turn("user", "Who?")
    talk = [*asked, turn("assistant", "<think>Hm</think> It."), turn("user", "Why?")]
    assert maker.tokenizer.decode(maker.build_chat(talk, []).input_ids) == "Who?\nIt.\nBe brief.Why?\n"


def test_the_placeholders_of_the_model_are_refused_by_name_and_other_texts_are_not(name):
    own = {"tiny": "<video>", "tiny-internvl": "<IMG_CONTEXT>"}.get(name, "<|video_pad|>")
    others = {"tiny": "<|video_pad|>", "tiny-internvl": "<image>"}.get(name, "<video>")
    with pytest.raises(ValueError, match=f"the text has {re.escape(own)}, which stands for"):
        builder(name).refuse_placeholders(["Why?", f"a{own}b"])
    builder(name).refuse_placeholders(["Why?", others, "< video >", own[:-1]])
    ids = builder(name).tokenizer(f"a{own}b", add_special_tokens=False).input_ids
    assert builder(name).placeholder_id in ids  # it would be taken for a video


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
def test_positions_of_all_tokens_and_of_several_turns_are_those_of_the_stock_model(name):
    for n_frames, seconds in product((1, 5, 40), (0.5, 1.3, 2.0, 7.77)):
        videos = [video(name, n_frames, seconds=seconds), video(name, 2, seconds=0.4, grid=(10, 6))]
        prompt = builder(name).build("What is happening?", videos)
        assert torch.equal(prompt.positions, stock_positions(name, prompt, videos)), (n_frames, seconds)
    prompt = builder(name).build_chat(BOTH, videos)
    assert torch.equal(prompt.positions, stock_positions(name, prompt, videos))
    (first, second) = prompt.spans
    assert first[1] < second[0]  # the reply stands between the two


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


def test_true_times_come_from_the_cache_under_every_rule():
    clip = sampled([0, 50, 99], 10.0)
    for rule in ("transformers-5", "transformers-4.57", "vllm"):
        makers = [builder(QWEN[1], None, rule, times) for times in ("true", "stock")]
        true, other = (text_of(QWEN[1], maker.build("Why?", [clip])) for maker in makers)
        assert "<0.2 seconds>" in true and "<1.6 seconds>" in true
        assert other == true.replace("<0.2 seconds>", "<2.5 seconds>").replace("<1.6 seconds>", "<9.9 seconds>")


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
