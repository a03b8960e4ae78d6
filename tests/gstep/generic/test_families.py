"""The generic family beside families with their own code, its prompts and its records."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gstep import make_pruner
from gstep.backbones import ModelSource, SampledVideo, family_of
from gstep.errors import ModelError
from gstep.generic.processor import decode_record, encode_record
from gstep.language import Decoding, Visual, load_language_model, prompt_builder
from tests.gstep.llms import FLOAT32, visual_of

#: Families with their own code that answer questions.
FAST = ("llava_onevision", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
#: A file from its start, and a clip of a file whose frame rate varies.
VIDEOS = (
    SampledVideo(60, 100, [0.1 + i * 99 / 29.97 / 7 for i in range(7)], None, 29.97, 99),
    SampledVideo(60, 100, [3.24, 3.3, 4.0, 4.0, 5.5, 6.1], 3.25, 29.97, 80, clip_fps=24.0),
)


def make_frames(video: SampledVideo) -> Tensor:
    """Make frames [F,H,W,3] uint8 of fixed noise."""
    seeded = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (video.n_frames, video.height, video.width, 3), generator=seeded, dtype=torch.uint8)


def encode(source, video) -> Visual:
    """Encode a video, and keep every third token."""
    family = family_of(source)
    size = family.preprocessor().target_size(video.n_frames, video.height, video.width)
    backbone = family.load(FLOAT32)
    encoded = backbone.encode(family.preprocessor().resize(make_frames(video), size), video=video)
    kept = torch.arange(0, encoded.tokens[..., 0].numel(), 3)
    extra = backbone.model_extra(replace(video, height=size[0], width=size[1]))
    return visual_of(encoded, kept, torch.bfloat16, backbone.newline(), **extra)


@pytest.mark.parametrize("name", FAST)
def test_a_generic_model_has_the_tokens_prompts_and_positions_of_the_family_with_its_own_code(name, tiny_checkpoint):
    sources = [ModelSource.resolve(tiny_checkpoint(name), family=family) for family in (None, "generic")]
    for video in VIDEOS:
        a, b = visuals = [encode(source, video) for source in sources]
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
    return encode(source, VIDEOS[0])


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
    record = encode(source, VIDEOS[0]).extra["record"]
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
