"""Conversations of several turns: the ids of the stock template and processor, the logits and replies of the model."""

import dataclasses
import re
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
from tests.gstep.language.prompts import builder, video
from tests.gstep.llms import FAMILIES, encode, llm, stock, stock_inputs
from tests.gstep.stock import stock_video_text

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
@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_those_of_the_stock_template_and_processor(name, messages):
    visuals = [timed(video(name, n_frames=n)) for n in (2, 4)][: 1 + (messages is BOTH)]
    prompt = builder(name).build_chat(messages, visuals)
    assert prompt.input_ids.tolist() == stock_ids(name, messages, *visuals)
    assert prompt.spans == tuple(sorted(prompt.spans)) and prompt.visuals == tuple(visuals)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_all_tokens_the_logits_of_a_conversation_are_those_of_the_stock_model_on_pixels(name):
    encoded = encode(name, n_frames=2)
    prompt = prompt_builder(ModelSource.resolve(name)).build_chat(LAST, [encoded.visual])
    with torch.no_grad():
        expected = stock(name)(**stock_inputs(name, prompt, encoded)).logits[0]
    (logits,) = llm(name).logits([prompt])
    assert (logits - expected).abs().max() < 5e-5  # as of single questions


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


@pytest.mark.parametrize("name", FAMILIES)
def test_the_placeholders_of_the_model_are_refused_by_name_and_other_texts_are_not(name):
    own = {"tiny": "<video>", "tiny-internvl": "<IMG_CONTEXT>"}.get(name, "<|video_pad|>")
    others = {"tiny": "<|video_pad|>", "tiny-internvl": "<image>"}.get(name, "<video>")
    with pytest.raises(ValueError, match=f"the text has {re.escape(own)}, which stands for"):
        builder(name).refuse_placeholders(["Why?", f"a{own}b"])
    builder(name).refuse_placeholders(["Why?", others, "< video >", own[:-1]])
    ids = builder(name).tokenizer(f"a{own}b", add_special_tokens=False).input_ids
    assert builder(name).placeholder_id in ids  # it would be taken for a video
