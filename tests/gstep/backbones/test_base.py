"""What every encoder does: the stock model's tokens, alone or with others; its work, weights, device and imports."""

import os
import re
from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
import transformers
import transformers.modeling_utils
from torch.utils.flop_counter import FlopCounterMode

from gstep.backbones import BACKBONES, ModelSource, Runtime, SampledVideo, choose_runtime, family_of
from gstep.backbones.runtime import ATTENTION, FLASH
from gstep.errors import ModelError
from gstep.evidence import POOLING_HEAD, make_label
from pipeline.options import ATTN
from tests.gstep.backbones.encoders import (
    AT_LAST,
    BFLOAT16,
    EVERY,
    FLOAT32,
    MERGED,
    QWEN,
    STOCK,
    asked_of,
    frames_for,
    parts,
    stock_features,
)
from tests.gstep.reading import changed_json, changed_tensors, count_reading
from tests.interpreter import run_python


@pytest.mark.parametrize("runtime", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", EVERY)
def test_tokens_and_levels_equal_the_stock_model_exactly_in_chunks_of_any_size(source, runtime):
    """Of the stock model given one frame (temporal patch) at a time: all products then have the shapes of ours."""
    frames, static = frames_for(source, 5), family_of(source).static()
    alone = family_of(source).preprocessor().frames_per_patch
    expected = stock_features(source, frames, runtime.dtype, at_once=alone)
    for frame_batch in (4, 1):
        backbone = family_of(source).load(runtime, frame_batch=frame_batch)
        visual = backbone.encode(frames)
        assert len(visual.tokens) == -(-5 // alone) and visual.tokens.dtype == runtime.dtype
        for ours, stock in zip((visual.tokens, *visual.deepstack), expected, strict=True):
            assert ours.shape == visual.tokens.shape and torch.equal(ours.flatten(0, 1), stock)
    assert backbone.hidden_size == static.hidden_size == 64
    assert len(visual.deepstack) == static.deepstack_levels == (3 if source.name.startswith("tiny-qwen3-vl") else 0)
    assert (backbone.newline() is None) == (static.newline is None) == (source.name != "tiny")
    assert not any(torch.equal(a, b) for a, b in combinations((visual.tokens, *visual.deepstack), 2))


def test_frames_that_cannot_be_written_are_as_good_as_others_and_none_are_refused(source):
    frames, backbone = frames_for(source, 3), family_of(source).load(BFLOAT16)
    read_only = frames.numpy().copy()
    read_only.flags.writeable = False
    assert torch.equal(backbone.encode(frames).tokens, backbone.encode(read_only).tokens)
    with pytest.raises(ValueError, match="at least one frame"):
        backbone.encode(frames[:0])


@pytest.mark.parametrize("name", STOCK)
def test_nothing_of_the_language_model_is_read_or_built(source, monkeypatch):
    read = count_reading(monkeypatch)
    backbone = family_of(source).load(FLOAT32)
    vision = ("vision_tower.", "multi_modal_projector.", "image_newline", "visual.")
    assert read and all(key.removeprefix("model.").startswith(vision) for key in read)
    assert sum(read.values()) == 4 * sum(parameter.numel() for parameter in backbone.model.parameters())
    assert not hasattr(backbone.model, "language_model")
    tensors = [*backbone.model.parameters(), *backbone.model.buffers()]
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)
    assert not backbone.model.training


def crowded(source, room):
    """Load a backbone that takes itself to be on a GPU with room for so many frames; list the sizes of its chunks."""
    backbone = family_of(source).load(FLOAT32, frame_batch=8)
    encode_chunk, sizes, backbone.on_cpu = backbone.encode_chunk, [], False

    def encode_within_room(frames, evidence):
        sizes.append(len(frames))
        if len(frames) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode_chunk(frames, evidence)

    backbone.encode_chunk = encode_within_room
    return backbone, sizes


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-vl"])
def test_a_cpu_takes_one_frame_or_temporal_patch_at_a_time_a_gpu_a_batch_and_a_full_one_less(source):
    frames, alone = frames_for(source, 12), family_of(source).preprocessor().frames_per_patch
    backbone, sizes = crowded(source, 99)
    expected = backbone.encode(frames).tokens
    assert sizes == [8, 4]
    backbone.on_cpu = True
    backbone.encode(frames)
    assert sizes[2:] == [alone] * (12 // alone)
    backbone, sizes = crowded(source, 3)
    for _ in range(2):  # the next video is tried whole again
        sizes.clear()
        tokens = backbone.encode(frames).tokens
        assert sizes[0] == 8 and sizes[-1] <= 3
        assert (tokens - expected).abs().max() < 1e-5 * expected.abs().max()
    with pytest.raises(torch.OutOfMemoryError):
        crowded(source, 0)[0].encode(frames)


def short_videos(source):
    """Videos of other lengths, on Qwen of other shapes too, one with an odd number of frames."""
    shapes = [(2, (10, 14)), (1 + (source.name != "tiny"), (8, 11)), (3, (14, 10))]
    return [frames_for(source, n, shape, seed) for seed, (n, shape) in enumerate(shapes)]


def check_same_bits(source, runtime):
    backbone, videos = family_of(source).load(runtime, frame_batch=64), short_videos(source)
    asked = asked_of(source.name)
    alone = [backbone.encode(frames, asked) for frames in videos]
    for expected, visual in zip(alone, backbone.encode_together(videos, asked), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(parts(expected), parts(visual), strict=True))


@pytest.mark.parametrize("name", STOCK)
def test_on_a_cpu_a_video_has_the_same_bits_whoever_shares_its_pass(source):
    check_same_bits(source, BFLOAT16)


OLDER = """
from tests.gstep.backbones.test_base import BFLOAT16, FLOAT32, ModelSource, check_same_bits
for model in ("tiny", "tiny-qwen2-5-vl", "tiny-qwen3-vl"):
    for runtime in (FLOAT32, BFLOAT16):
        check_same_bits(ModelSource.resolve(model), runtime)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "processor",
    [
        # Both libraries go by one processor: on one with AMX, torch's attention raises where ATen alone is held back.
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    ],
)
def test_older_processors_give_the_same_bits_too(processor):
    done = run_python("-c", OLDER, env=os.environ | processor)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", STOCK)
def test_one_pass_of_several_videos_gives_each_its_own_tokens_and_evidence(name, source):
    """As on a GPU, where rounding may differ by the size of the pass."""
    backbone, videos = family_of(source).load(FLOAT32, frame_batch=64), short_videos(source)
    asked = asked_of(name) | {make_label(kind, place): place for kind, place in asked_of(name).items()}
    alone = [backbone.encode(frames, asked) for frames in videos]
    passes = []
    backbone.model.register_forward_pre_hook(lambda module, args: passes.append(module))
    backbone.on_cpu = False
    together = backbone.encode_together(videos, asked)
    assert len(passes) <= 1  # LLaVA-OneVision's is not called by its forward
    for expected, found in zip(alone, together, strict=True):
        assert found.evidence.keys() == asked.keys()
        for a, b in zip(parts(expected), parts(found), strict=True):
            assert a.shape == b.shape and (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_a_video_takes_the_share_of_a_pass_that_its_frames_do():
    names = ("tiny", "tiny-qwen3-vl")
    llava, qwen = (family_of(ModelSource.resolve(name)).load(FLOAT32, frame_batch=32) for name in names)
    assert [llava.pass_share(n, 384, 384) for n in (1, 8, 40)] == [Fraction(1, 32), Fraction(1, 4), Fraction(5, 4)]
    assert [qwen.pass_share(n, 96, 160) for n in (3, 4)] == [Fraction(1, 8)] * 2  # an odd last frame is repeated
    assert qwen.pass_share(2, 16 * 512, 16 * 256) == 1  # as many patches as go at once


def test_times_of_a_clip_count_from_its_start():
    video = SampledVideo(252, 448, [0.98, 2.0, 3.5], 1.0, 25.0, 75)
    assert video.n_frames == 3
    assert video.times_in_clip == [0.0, 1.0, 2.5]  # the first frame was on screen when the clip started
    assert video.sampled_fps == pytest.approx(1.0)  # 3 of 75 frames, at 25 a second
    whole = SampledVideo(252, 448, [0.0, 0.5], None, 30.0, 30)
    assert (whole.times_in_clip, whole.sampled_fps) == ([0.0, 0.5], pytest.approx(2.0))


OF_HEAD = {"frame_feature": POOLING_HEAD, "token_attention": POOLING_HEAD}


@pytest.mark.parametrize("name", STOCK)
def test_what_an_encoder_cannot_give_is_refused(name, source):
    with pytest.raises(ModelError, match=f"{source.model_type} does not give llm_attention from the language model"):
        family_of(source).load(FLOAT32).encode(frames_for(source, 2), {"llm_attention": "the language model"})
    other = MERGED if name == "tiny" else AT_LAST
    with pytest.raises(ModelError, match=source.model_type):
        family_of(source).check_gives(other)


def test_who_needs_a_head_is_told_to_name_one_and_one_size_has_no_limits(source):
    with pytest.raises(ModelError, match="one size"):
        family_of(source).with_limits(None, 1000, None)
    family_of(family_of(source).with_pooling_head("tiny")).check_evidence(OF_HEAD)
    for refuse in (
        lambda: family_of(source).check_evidence(OF_HEAD),
        lambda: family_of(source).load(FLOAT32).encode(frames_for(source, 2), OF_HEAD),
    ):
        with pytest.raises(ModelError, match=r"frame_feature, token_attention from SigLIP's .* --siglip"):
            refuse()
    for family in (family_of(ModelSource.resolve(name)) for name in ("tiny-qwen2-5-vl", "tiny-qwen3-vl")):
        for take in (family.with_pooling_head, family.text_tower):
            with pytest.raises(ModelError, match="for LLaVA-OneVision"):
                take("tiny")


EAGER = Runtime("cpu", torch.float32, "eager")  # whose products are plain ones: the counter does not know CPU's sdpa

# What decides the work of the published 7B and 8B models' towers.
LLAVA = {"vision_config": {}, "text_config": {"hidden_size": 3584}}
QWEN2_5 = {"vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}}
QWEN3 = {"vision_config": {"out_hidden_size": 4096}}


@pytest.mark.parametrize("name", STOCK)
def test_the_closed_form_is_what_a_tower_computes(source):
    frames = frames_for(source, 4)
    backbone = family_of(source).load(EAGER)
    with FlopCounterMode(display=False) as counter:
        backbone.encode(frames)
    assert family_of(source).flops(*frames.shape[:3]) == counter.get_total_flops() > 1e6


@pytest.mark.parametrize(
    ("model_type", "config", "frames", "tera"),
    [
        ("llava_onevision", LLAVA, (32, 384, 384), 21.33),  # SigLIP 20.54, the projector 0.79
        ("qwen2_5_vl", QWEN2_5, (32, 26 * 14, 46 * 14), 25.22),
        ("qwen3_vl", QWEN3, (32, 22 * 16, 40 * 16), 14.30),
    ],
)
def test_the_published_models_take_what_was_counted(model_type, config, frames, tera):
    family = BACKBONES[model_type](SimpleNamespace(config=config))
    assert round(family.flops(*frames) / 1e12, 2) == tera


def load(folder):
    return family_of(ModelSource.resolve(folder)).load(FLOAT32)


@pytest.mark.parametrize("name", STOCK)
def test_missing_weights_are_named(name, folder):
    end = "visual.blocks.1.attn.qkv.bias" if name in QWEN else "multi_modal_projector.linear_1.bias"
    with changed_tensors(folder) as tensors:
        (gone,) = [key for key in tensors if key.endswith(end)]
        del tensors[gone]
    with pytest.raises(ModelError, match=f"has no {re.escape(end)}"):
        load(folder)
    if name == "tiny":
        with changed_tensors(folder) as tensors:
            for key in [key for key in tensors if "vision_tower" in key]:
                del tensors[key]
        with pytest.raises(ModelError, match=r"vision_tower\.\S+ and \d+ more"):  # not all are named
            load(folder)


@pytest.mark.parametrize("name", QWEN)
def test_weights_of_another_shape_than_the_config_says_are_named(folder):
    with changed_json(folder / "config.json") as config:
        config["vision_config"]["out_hidden_size"] = 32
    with pytest.raises(ModelError, match=r"does not fit the weights: visual\.\S+ \[64, 256\] instead of \[32, 256\]"):
        load(folder)


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this a machine with CUDA and a form of FlashAttention, or without."""

    def become(*, cuda, flash=0):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        for form in (2, 3, 4):
            # As transformers' checks: cached, and called without arguments.
            there = lambda is_there=form == flash: is_there  # noqa: E731
            monkeypatch.setattr(transformers.utils.import_utils, f"is_flash_attn_{form}_available", there)
            if hasattr(transformers.utils, f"is_flash_attn_{form}_available"):
                monkeypatch.setattr(transformers.utils, f"is_flash_attn_{form}_available", there)

    return become


def test_auto_takes_cuda_and_flash_attention_where_they_can_run(machine):
    machine(cuda=False)
    assert choose_runtime() == Runtime("cpu", torch.float32, "sdpa")
    with pytest.raises(ModelError, match="no CUDA device"):
        choose_runtime("cuda")
    machine(cuda=True)
    assert choose_runtime() == Runtime("cuda", torch.bfloat16, "sdpa")
    machine(cuda=True, flash=2)
    assert choose_runtime().attn_implementation == "flash_attention_2"
    assert choose_runtime("cuda:1", "float16").attn_implementation == "flash_attention_2"
    assert choose_runtime(dtype="float32").attn_implementation == "sdpa"
    assert choose_runtime("cpu").attn_implementation == "sdpa"
    for form in (3, 4):  # which are taken where they are asked for alone
        machine(cuda=True, flash=form)
        assert choose_runtime().attn_implementation == "sdpa"
        assert choose_runtime(attn=f"flash_attention_{form}").attn_implementation == f"flash_attention_{form}"


@pytest.mark.parametrize(
    ("form", "remedy"),
    [(2, r"pip install .*\[flash-attn\]"), (3, "folder hopper"), (4, r"pip install .*\[flash-attn-4\]")],
)
def test_flash_attention_without_its_package_on_the_cpu_or_in_float32_is_refused(machine, form, remedy):
    machine(cuda=True)
    with pytest.raises(ModelError, match=remedy):
        choose_runtime("cuda", attn=f"flash_attention_{form}")
    machine(cuda=True, flash=form)
    for device, dtype in [("cpu", "bfloat16"), ("cuda", "float32")]:
        with pytest.raises(ModelError, match="cuda in bfloat16"):
            choose_runtime(device, dtype, f"flash_attention_{form}")


def test_transformers_knows_every_name_of_attention():
    """It takes a form of flash attention by this name, and looks for its package by a check of this one."""
    known = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.keys()
    assert {*ATTENTION} - {"eager"} <= {*known} and ("auto", *ATTENTION) == ATTN
    for name in FLASH:
        assert callable(getattr(transformers.utils.import_utils, f"is_flash_attn_{name[-1]}_available"))


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"dtype": "int8"}, {"attn": "magic"}])
def test_unknown_names_are_refused(wrong, machine):
    machine(cuda=False)
    with pytest.raises(ModelError, match="known: auto"):
        choose_runtime(**wrong)


def test_tables_need_no_torch_selections_no_triton_preprocessing_no_transformers_and_live_pruning_those_alone():
    code = """
import pickle, sys

def block(*names):  # what is loaded from here on needs none of them
    assert not {*names} & {*sys.modules}
    sys.modules.update(dict.fromkeys(names))

import gstep.methods, gstep.families
assert "torch" not in sys.modules
import gstep.pruners
block("triton", "ray", "av", "decord", "torchvision", "num2words")
assert not {"transformers", "pyarrow"} & {*sys.modules}
import gstep.selection.gpu.launch
gstep.make_pruner("gstep")
import gstep.backbones
assert not {"transformers", "safetensors", "huggingface_hub", "pyarrow"} & {*sys.modules}
import pipeline.cache.reader
assert "transformers" not in sys.modules
sys.modules.update(dict.fromkeys([name for name in sys.modules if name.partition(".")[0] == "pyarrow"]))
from gstep.backbones import ModelSource, choose_runtime, family_of
source = ModelSource.resolve("tiny")
preprocessor = pickle.loads(pickle.dumps(family_of(source).preprocessor()))
assert family_of(source).static().newline.shape == (64,)
assert choose_runtime("cpu").attn_implementation == "sdpa"
assert "transformers" not in sys.modules
gstep.pruning
"""
    run_python("-c", code, check=True)
