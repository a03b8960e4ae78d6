"""The vision part alone gives exactly what the stock model gives, from every layout of keys on disk."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from gstep.backbones import BACKBONES, ModelSource, SampledVideo, family_of
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, frames_for
from tests.gstep.reading import changed_json, changed_tensors


@pytest.fixture
def frames(source):
    return frames_for(source, 7, (24, 24))


def stock_features(source, frames, dtype, at_once=None):
    """[T*196 (+1 for the newline, by version), D]: the whole model by from_pretrained, on the same pixel values.

    ``at_once``: it is given so many frames at a time, and what follows the last ones' tokens counts alone.
    """
    name, revision = source.pretrained()
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(name, revision=revision, dtype=dtype)
    pixels = family_of(source).preprocessor().normalise(frames, "cpu", dtype)
    with torch.no_grad():
        parts = [
            stock.model.get_video_features(part[None], return_dict=True).pooler_output[0]
            for part in pixels.split(at_once or len(pixels))
        ]
    tokens = [part[: len(pixels) // len(parts) * 196] for part in parts]
    return torch.cat([*tokens, parts[-1][len(tokens[-1]) :]])


@pytest.mark.parametrize("runtime", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("frame_batch", [32, 3, 1])
def test_tokens_and_newline_equal_the_stock_model_exactly(source, frames, runtime, frame_batch):
    """Of the stock model given one frame at a time: all matrix products then have the shapes of ours."""
    backbone = family_of(source).load(runtime, frame_batch=frame_batch)
    expected = stock_features(source, frames, runtime.dtype, at_once=1)
    tokens_TND = backbone.encode(frames).tokens
    assert tokens_TND.shape == (7, 196, 64) and tokens_TND.dtype == runtime.dtype
    assert torch.equal(tokens_TND.flatten(0, 1), expected[: 7 * 196])
    assert torch.equal(family_of(source).static().newline.to(runtime.dtype), backbone.newline())
    for row in expected[7 * 196 :]:
        assert torch.equal(backbone.newline(), row)
    assert backbone.hidden_size == family_of(source).static().hidden_size == 64


def test_tokens_of_the_stock_model_in_one_go_differ_by_rounding_alone(source, frames):
    """Some CPUs sum products of other shapes in another order. Neither result is then the better one."""
    stock, theirs = (stock_features(source, frames, dtype)[: 7 * 196] for dtype in (torch.float32, torch.bfloat16))
    exact, coarse = (family_of(source).load(r).encode(frames).tokens.flatten(0, 1) for r in (FLOAT32, BFLOAT16))
    assert (exact - stock).abs().max() < 1e-5 * stock.abs().max()
    noise = (theirs - stock).abs()
    assert (coarse - stock).abs().max() < 2 * noise.max()
    assert (coarse - theirs).abs().mean() < 2 * noise.mean()


def rename_hub(tensors):
    return tensors


def rename_without_vision_model(tensors):
    return {key.replace("vision_tower.vision_model.", "vision_tower."): tensor for key, tensor in tensors.items()}


def rename_as_in_memory(tensors):
    return {f"model.{key}": tensor for key, tensor in rename_without_vision_model(tensors).items()}


def rename_as_in_memory_with_vision_model(tensors):
    return {f"model.{key}": tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    "rename", [rename_hub, rename_without_vision_model, rename_as_in_memory, rename_as_in_memory_with_vision_model]
)
def test_every_layout_of_keys_gives_the_same_tokens(source, folder, frames, rename):
    save_file(rename(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    other = ModelSource.resolve(folder)
    tokens = family_of(other).load(FLOAT32).encode(frames[:2]).tokens
    assert torch.equal(tokens, family_of(source).load(FLOAT32).encode(frames[:2]).tokens)
    assert torch.equal(family_of(other).static().newline, family_of(source).static().newline)


@pytest.mark.parametrize("part", ["whole", "without the head"])
@pytest.mark.parametrize("shard_size", ["1GB", "200KB"])
def test_what_save_pretrained_writes_loads(source, folder, frames, part, shard_size):
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (stock if part == "whole" else stock.model).save_pretrained(folder, max_shard_size=shard_size)
    other = ModelSource.resolve(folder)
    assert (len(other.weight_files) > 1) == (shard_size == "200KB")
    tokens = family_of(other).load(FLOAT32).encode(frames[:2]).tokens
    assert torch.equal(tokens, family_of(source).load(FLOAT32).encode(frames[:2]).tokens)


def test_a_checkpoint_without_newline_is_refused(folder):
    with changed_tensors(folder) as tensors:
        del tensors["image_newline"]
    with pytest.raises(ModelError, match="image_newline"):
        family_of(ModelSource.resolve(folder)).static()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"size": {"height": 336, "width": 336}}, "size"),
        ({"video_processor_type": "SomeVideoProcessor"}, "SomeVideoProcessor"),
        ({"do_center_crop": True}, "do_center_crop"),
    ],
)
def test_preprocessor_settings_that_do_not_fit_are_refused(folder, settings, named):
    with changed_json(folder / "video_preprocessor_config.json") as content:
        content.update(settings)
    with pytest.raises(ModelError, match=named):
        family_of(ModelSource.resolve(folder)).preprocessor()


def test_what_a_preprocessor_file_leaves_out_is_the_class_default(folder):
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"image_mean": None}))
    preprocessor = family_of(ModelSource.resolve(folder)).preprocessor()
    assert preprocessor.image_mean == (0.48145466, 0.4578275, 0.40821073)
    assert preprocessor.target_size(32, 1080, 1920) == (384, 384)
    assert preprocessor.frames_per_patch == 1


def test_the_table_names_each_class_by_its_own_type():
    assert all(backbone.model_type == name for name, backbone in BACKBONES.items())


def test_readers_are_told_where_the_tokens_lie(source):
    video = SampledVideo(384, 384, [0.0, 0.5, 1.0, 1.5], None, 30.0, 60)
    assert family_of(source).load(FLOAT32).model_extra(video) == {"grid": [14, 14]}


def test_the_layer_is_the_one_that_the_tokens_come_from():
    backbone = family_of(ModelSource.resolve("tiny")).load(FLOAT32)
    layers = backbone.model.vision_tower.encoder.layers
    for index, place in ((-1, 1), (2, 1), (-2, 0), (1, 0)):
        backbone.model.config.vision_feature_layer = index
        assert backbone.layers[-1] is layers[place]
