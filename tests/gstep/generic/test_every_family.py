"""Each family in the generic family: its check, logits of the stock model, odd videos, live pruning; its records."""

from __future__ import annotations

import base64
import copy
import inspect
import json
import pickle
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.video_utils import VideoMetadata

import gstep
from gstep import make_pruner
from gstep.backbones import BACKBONES, ModelSource, SampledVideo, family_of
from gstep.errors import ModelError, TooFewFrames, UnsupportedVideo
from gstep.generic.family import GenericBackbone, describe_untimed_video
from gstep.generic.layout import Layout
from gstep.generic.processor import (
    decode_record,
    encode_record,
    load_processor,
    make_metadata,
    render_conversation,
    run_processor,
)
from gstep.language import Decoding, LanguageModel, Prompt, PromptBuilder, Visual, load_language_model, prompt_builder
from gstep.language.types import ChatMessage
from gstep.types import VisualTokens
from tests.builders.checkpoints import FAMILIES
from tests.gstep.generic import live
from tests.gstep.llms import FLOAT32, visual_of

QUESTION = "What moves?"
ASKED: list[ChatMessage] = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}]
#: Three turns, the video in the last one.
CONVERSATION: list[ChatMessage] = [
    {"role": "user", "content": [{"type": "text", "text": "I show you a video."}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Bien, 什么?"}]},
    {"role": "user", "content": [{"type": "text", "text": "Here:"}, *ASKED[0]["content"]]},
]
N_FRAMES, FPS = 8, 1.3
#: (frames, height, width): few and odd numbers of frames, frames below a patch, extreme and ordinary shapes.
BLACK = torch.zeros(6, 60, 90, 3, dtype=torch.uint8)
SHAPES = [(1, 56, 84), (2, 56, 84), (7, 56, 56), (5, 90, 160), (4, 1, 99), (2, 10, 1500)]
#: Families with layers that hand a state from token to token, or that choose blocks of tokens: a mask does not take a
#: token out of these, so the stock model gives no logits to compare pruned videos with.
STATEFUL = {
    *("glm5_next", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni", "qwen3_5", "qwen3_5_moe"),
    "qwen4_exp",
}
#: Families that always run: deepstack and M-RoPE, a tail, token types, slices of frames and states.
QUICK = ("qwen3_vl", "llava_onevision", "gemma4", "minicpmv4_6")


@dataclass(frozen=True)
class Case:
    """A family's checkpoint and what is loaded of it, each part once and when it is first used."""

    name: str
    source: ModelSource

    @cached_property
    def stock(self) -> Any:
        """The stock model."""
        # The whole of an Omni model speaks too, and asks for files about its voices.
        reader = "ThinkerForConditional" if "thinker_config" in FAMILIES[self.name].config else "ForConditional"
        stock_class = getattr(transformers, FAMILIES[self.name].model.replace("ForConditional", reader))
        return stock_class.from_pretrained(self.source.name, dtype=torch.float32).eval()

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The inputs of the stock model for the clip and QUESTION, by its own processor."""
        return read_by_stock(self.source.name)

    @cached_property
    def backbone(self) -> GenericBackbone:
        return family_of(self.source).load(FLOAT32)

    @cached_property
    def language_model(self) -> LanguageModel:
        return load_language_model(self.source, FLOAT32)

    @cached_property
    def video(self) -> VisualTokens:
        """The tokens of the clip."""
        return encode_clip(self.backbone)

    @cached_property
    def index(self) -> Tensor:
        """The flat index of the quarter of the tokens that GSTEP keeps."""
        return gstep.prune(self.video.tokens, retention_ratio=0.25).index

    @cached_property
    def builders(self) -> dict[str, PromptBuilder]:
        return {positions: prompt_builder(self.source, positions) for positions in ("original", "contiguous")}

    def build_prompt(self, index=None, positions="original", text=QUESTION) -> Prompt:
        """Build the prompt of a text about the tokens at flat ``index``, or about all tokens."""
        return self.builders[positions].build(text, [visual_of(self.video, index)])


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES],
)
def case(request, tiny_checkpoint, tmp_path_factory) -> Iterator[Case]:
    """A family, all tests of which run one after another; the check of its model runs once, for these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))
        yield Case(request.param, ModelSource.resolve(str(tiny_checkpoint(request.param)), family="generic"))


def encode_clip(backbone: GenericBackbone) -> VisualTokens:
    """Encode the clip by the generic family."""
    frames, sampled = live.make_video(N_FRAMES, FPS)
    return backbone.encode(frames, video=sampled)


def read_by_stock(folder: str, messages: list[ChatMessage] = ASKED) -> dict[str, Any]:
    """Prepare a conversation about the clip with the checkpoint's own processor."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    if hasattr(processor.video_processor, "use_token_compression"):
        processor.video_processor.use_token_compression = False  # in favor of the pruning method
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    metadata = VideoMetadata(N_FRAMES, FPS, live.W, live.H, N_FRAMES / FPS, frames_indices=list(range(N_FRAMES)))
    options = {"video_metadata": [metadata], "fps": FPS, "return_metadata": True, "return_mm_token_type_ids": True}
    options |= {"do_sample_frames": False, "return_tensors": "pt"}
    return dict(processor(text=[text], videos=[live.make_video(N_FRAMES)[0].permute(0, 3, 1, 2)], **options))


@torch.no_grad()
def run_stock(stock: Any, inputs: dict[str, Any], **changes: Tensor) -> Tensor:
    """Return the logits [L,V] of a stock model on pixels, with changed inputs."""
    names = inspect.signature(stock.forward).parameters  # the processor returns more
    return stock(**{key: inputs[key] for key in inputs if key in names} | changes).logits[0]


def test_the_check_passes_and_notices_all_that_the_layers_depend_on(case):
    parity = Layout.of(case.source).parity
    assert parity["difference"] <= 0.01 * parity["scale"]
    without_positions = {"glm5_next", "nemotron_h_omni"}  # no rotary positions in their layers
    assert (parity["notices"]["shifted position"] == 0) == (case.name in without_positions)


def test_with_all_tokens_the_logits_of_a_question_and_a_conversation_are_those_of_the_stock_model(case):
    in_one = copy.copy(case.backbone)
    in_one.layout = replace(in_one.layout, in_pieces=False)
    talk = read_by_stock(case.source.name, CONVERSATION)
    # A video in pieces differs in the last digits, for some models and on some CPUs.
    for inputs, messages, video, tolerance in (
        (case.inputs, ASKED, encode_clip(in_one), 0.0),
        (talk, CONVERSATION, case.video, 2e-5),
    ):
        expected = run_stock(case.stock, inputs)
        prompt = case.builders["original"].build_chat(messages, [visual_of(video)])
        assert prompt.input_ids.tolist() == inputs["input_ids"][0].tolist()
        difference = (case.language_model.logits([prompt])[0] - expected).abs().max()
        assert difference <= tolerance * max(1.0, float(expected.std()))


@pytest.mark.parametrize("positions", ["original", "contiguous"])
def test_with_a_quarter_of_the_tokens_the_logits_are_those_of_a_masked_stock_model(case, positions):
    index = case.index
    prompt = case.build_prompt(index, positions)
    logits = case.language_model.logits([prompt])[0]
    T, N, _ = case.video.tokens.shape
    ids = case.inputs["input_ids"]
    assert len(index) == T * N // 4 and len(prompt) == ids.shape[1] - T * N + len(index)
    assert logits.isfinite().all()
    if case.name in STATEFUL:
        return
    placeholder = prompt.input_ids[prompt.spans[0][0]]
    keep = torch.ones(ids.shape[1], dtype=torch.bool)
    dropped = torch.ones(T * N, dtype=torch.bool)
    dropped[index] = False
    keep[(ids[0] == placeholder).nonzero()[: T * N, 0][dropped]] = False
    whole = {key: value for key, value in case.inputs.items() if key != "input_ids"}
    place = case.stock._prepare_position_ids_for_generation(ids, whole)
    place = place[-3:].clone() if place.ndim == 3 else place.clone()
    assert torch.equal(prompt.positions, place[..., keep].reshape(prompt.positions.shape)) == (positions == "original")
    place[..., keep] = prompt.positions.reshape(place[..., keep].shape).to(place.dtype)  # Qwen3-Omni counts in floats
    expected = run_stock(case.stock, case.inputs, attention_mask=keep.long()[None], position_ids=place)[keep]
    assert (logits - expected).abs().max() < 1e-4 * max(1.0, float(expected.std()))


def test_a_batch_gives_the_logits_of_its_prompts(case):
    prompts = [case.build_prompt(case.index), case.build_prompt(text="A longer question: what moves, and where?")]
    for prompt, logits in zip(prompts, case.language_model.logits(prompts), strict=True):
        (single,) = case.language_model.logits([prompt])
        assert logits.shape == single.shape
        assert (logits - single).abs().max() < 1e-3 * max(1.0, float(single.std()))


def make_noise(n_frames: int, height: int, width: int) -> Tensor:
    """Make frames [F,H,W,3] uint8 of fixed noise."""
    seeded = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n_frames, height, width, 3), generator=seeded, dtype=torch.uint8)


def test_short_videos_and_odd_frames_give_tokens_that_fit_the_prompt_or_a_fault(case):
    name, family, shapes = case.name, family_of(case.source), {}
    for shape, frames in {**{shape: make_noise(*shape) for shape in SHAPES}, (6, 60, 90): BLACK}.items():
        try:
            visual = case.backbone.encode(frames, video=describe_untimed_video(*shape))
        except (TooFewFrames, UnsupportedVideo) as fault:
            assert "own processor refuses the video" in str(fault)
            if name == "qwen3_vl":
                assert re.search(r"temporal_factor:2\); 1 frame sampled: sample more", str(fault))
            with pytest.raises(type(fault)):
                family.token_counts(*shape)
            continue
        T, N, _ = shapes[shape] = visual.tokens.shape
        assert visual.tokens.isfinite().all()
        assert shape[0] >= T and family.token_counts(*shape) == (T, N)
        assert (
            len(case.builders["original"].build("?", [visual_of(visual)]).visuals) == 1
        )  # raises if the placeholders do not fit
    assert {(7, 56, 56), (5, 90, 160), (6, 60, 90)} <= shapes.keys() and (name != "qwen3_vl" or SHAPES[0] not in shapes)
    if name.startswith("minicpm"):  # a frame and its slices are one step of time
        assert [shapes[shape][0] for shape in SHAPES] == [n for n, _, _ in SHAPES]


def test_a_clip_s_times_in_the_prompt_are_those_of_its_frames(case):
    """A clip of 5 s from 10 s on, 24 frames a second in a file of 25 on average; the stock processor counts frames.

    The first frame appeared before the clip, and one is repeated.
    """
    sampled = SampledVideo(56, 84, [9.99, 10.5, 10.5, 11.75, 13.0, 14.25], 10.0, 25.0, 120, 24.0)
    stock = VideoMetadata(120, 24.0, 84, 56, 5.0, frames_indices=[0, 12, 12, 42, 72, 102])
    processor = load_processor(case.source)
    text = render_conversation(case.source, processor, ASKED)
    frames = make_noise(6, 56, 84).permute(0, 3, 1, 2)
    ids, expected = (
        run_processor(processor, text, frames, metadata)["input_ids"] for metadata in (make_metadata(sampled), stock)
    )
    assert torch.equal(ids, expected)


@pytest.mark.slow  # test_live.py has some that always run
def test_a_live_model_answers_as_from_its_cache(case):
    whole = live.Live(case.stock, load_processor(case.source))
    live.check_parity(whole, case.backbone, case.language_model)
    if case.name in BACKBONES and case.name != "qwen4_exp" and case.name not in live.QUICK:
        own = ModelSource.resolve(case.source.name)
        live.check_parity(whole, family_of(own).load(FLOAT32), load_language_model(own, FLOAT32))


#: Families with their own code that answer questions.
FAST = ("llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
#: A file from its start, and a clip of a file whose frame rate varies.
VIDEOS = (
    SampledVideo(60, 100, [0.1 + i * 99 / 29.97 / 7 for i in range(7)], None, 29.97, 99),
    SampledVideo(60, 100, [3.24, 3.3, 4.0, 4.0, 5.5, 6.1], 3.25, 29.97, 80, clip_fps=24.0),
)


def encode(backbone, video) -> Visual:
    """Encode a video, and keep every third token."""
    shape = video.n_frames, video.height, video.width
    height, width = size = backbone.preprocessor.target_size(*shape)
    encoded = backbone.encode(backbone.preprocessor.resize(make_noise(*shape), size), video=video)
    kept = torch.arange(0, encoded.tokens[..., 0].numel(), 3)
    extra = backbone.model_extra(replace(video, height=height, width=width))
    return visual_of(encoded, kept, torch.bfloat16, backbone.newline(), **extra)


@pytest.mark.parametrize("name", FAST)
def test_a_generic_model_has_the_tokens_prompts_and_positions_of_the_family_with_its_own_code(name, tiny_checkpoint):
    sources = [ModelSource.resolve(tiny_checkpoint(name), family=family) for family in (None, "generic")]
    backbones = [family_of(source).load(FLOAT32) for source in sources]
    for video in VIDEOS:
        a, b = visuals = [encode(backbone, video) for backbone in backbones]
        assert all(map(torch.equal, (a.tokens, *a.deepstack), (b.tokens, *b.deepstack)))
        assert len(a.deepstack) == len(b.deepstack)
        for positions in ("original", "contiguous"):
            builders = [prompt_builder(source, positions) for source in sources]
            assert len({builder.n_visual([visual]) for builder, visual in zip(builders, visuals, strict=True)}) == 1
            for text in ("Is it red?", "What is <|video_pad|> or <image> or <video>, Käse and 一?"):
                p, q = (builder.build(text, [visual]) for builder, visual in zip(builders, visuals, strict=True))
                assert torch.equal(p.input_ids, q.input_ids) and torch.equal(p.positions, q.positions)
            p, q = (builder.build("Is it red?", []) for builder in builders)
            assert torch.equal(p.input_ids, q.input_ids) and torch.equal(p.positions, q.positions)
    models = [load_language_model(source, FLOAT32) for source in sources]
    prompts = [prompt_builder(source).build("?", [visual]) for source, visual in zip(sources, visuals, strict=True)]
    logits = [model.logits([prompt], 1)[0] for model, prompt in zip(models, prompts, strict=True)]
    torch.testing.assert_close(*logits, rtol=0, atol=2e-4 if name == "llava_onevision" else 1e-5)
    scores = [model.score([prompt], [["A", " blue"]])[0] for model, prompt in zip(models, prompts, strict=True)]
    for one, two in zip(*scores, strict=True):
        assert one.n_tokens == two.n_tokens and one.logprob == pytest.approx(two.logprob, abs=2e-3)
    answers = [m.generate([p], [Decoding(4)])[0].token_ids for m, p in zip(models, prompts, strict=True)]
    assert answers[0] == answers[1]


@pytest.fixture
def source(tiny_checkpoint) -> ModelSource:
    """A tiny Qwen3-VL of the generic family."""
    return ModelSource.resolve(tiny_checkpoint("qwen3_vl"), family="generic")


def test_no_method_prunes_inside_a_generic_model(source):
    model, prompt = load_language_model(source, FLOAT32), prompt_builder(source).build("Is it red?", [])
    for answer, more in ((model.generate, [Decoding(1)] * 2), (model.score, [["A"]] * 2)):
        with pytest.raises(ValueError, match="fastv prunes inside a model, which models of the generic family"):
            answer([prompt] * 2, more, inside=(make_pruner("fastv"), 0.5))


@pytest.fixture
def visual(source) -> Visual:
    return encode(family_of(source).load(FLOAT32), VIDEOS[0])


def test_a_pickled_builder_takes_a_system_message_through_the_checkpoint_s_template(source, visual):
    builder = pickle.loads(pickle.dumps(prompt_builder(source)))  # noqa: S301 - made here
    text = builder.tokenizer.decode(builder.build("Why?", [visual], system="Be <|video_pad|> brief.").input_ids)
    assert "Be <|video_pad|> brief." in text and text.index("Be ") < text.index("Why?")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": {}}, "lacks the processor's record"),
        ({"extra": {"record": "abc"}}, "record of this video is damaged"),
        ({"n_frames": 7}, "do not fit the prompt"),
        ({"deepstack": ()}, "0 deepstack levels in the cache; this model takes 2"),
        ({"tokens": torch.zeros(27, 32)}, "visual tokens of width 32; this model takes 64"),
        ({"index": torch.arange(27).flip(0)}, 'order="index"'),
    ],
)
def test_cached_tokens_that_do_not_fit_the_model_are_refused(source, visual, change, message):
    with pytest.raises(ValueError, match=message):
        prompt_builder(source).build("Why?", [replace(visual, **change)])


def test_what_a_generic_prompt_does_not_have_is_refused_by_name(source, visual):
    builder = prompt_builder(source)
    with pytest.raises(ValueError, match="at most one video, not 2"):
        builder.build("Why?", [visual, visual])
    with pytest.raises(ValueError, match="the rule 'vllm' is for families with their own code"):
        prompt_builder(source, rule="vllm")
    with pytest.raises(ValueError, match="frame times 'stock' is for families"):
        prompt_builder(source, frame_times="stock")
    with pytest.raises(ValueError, match="U\\+10FFFE"):
        builder.build("a\U0010fffeb", [visual])
    with pytest.raises(ModelError, match="resolved without its check"):
        prompt_builder(ModelSource.resolve(source.name, family="generic", gate=False))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma4", "llava_onevision"])
def test_a_record_has_all_that_the_processor_returned_but_pixels_and_paths(name, tiny_checkpoint):
    source = ModelSource.resolve(tiny_checkpoint(name), family="generic")
    record = encode(family_of(source).load(FLOAT32), VIDEOS[0]).extra["record"]
    assert len(record) < 4096
    output, version = decode_record(record)
    content = zlib.decompress(base64.b64decode(record)).decode()
    assert version in content and str(source.name) not in content and "/" not in content
    assert encode_record(output) == record
    pixels = [value for key, value in output.items() if key.startswith("pixel_values")]
    assert pixels and all(value.untyped_storage().nbytes() <= 8 and not value.any() for value in pixels)


def test_a_record_that_lacks_what_the_processor_reads_names_the_version_that_wrote_it(source, visual):
    content = json.loads(zlib.decompress(base64.b64decode(visual.extra["record"])))
    content["transformers"] = "5.18.1"
    del content["output"]["video_grid_thw"]
    record = base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()
    with pytest.raises(ValueError, match=r"written by transformers 5\.18\.1, .*reads more .*prune the video again"):
        prompt_builder(source).build("Why?", [replace(visual, extra={"record": record})])


def test_a_value_of_an_unknown_type_is_not_dropped_silently():
    with pytest.raises(ModelError, match="returns a set in shapes, which cannot be recorded"):
        encode_record({"shapes": {1, 2}})


def test_loading_a_half_of_a_model_logs_nothing_about_the_other_half(tiny_checkpoint, caplog):
    source = ModelSource.resolve(str(tiny_checkpoint("internvl")), family="generic")
    family_of(source).load(FLOAT32)
    load_language_model(source, FLOAT32)
    assert "UNEXPECTED" not in caplog.text
