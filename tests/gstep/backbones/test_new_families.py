"""What newer families add: experts in each form of the hub, quantized language models, a tower without questions."""

import pytest
import torch

from gstep.backbones import ModelSource, family_of
from gstep.errors import ModelError
from gstep.language import load_language_model, prompt_builder
from tests.gstep.backbones.encoders import FLOAT32, QWEN, frames_for, settings_file
from tests.gstep.quantized import CONFIGS, quantize
from tests.gstep.reading import changed_json, changed_tensors


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3-vl"])
def test_a_quantized_checkpoint_gives_the_tokens_of_its_plain_tower_and_no_answers(name, method, tmp_path):
    source = ModelSource.resolve(quantize(name, method, tmp_path / "q"), quantized=True)
    frames = frames_for(source, 2)
    assert family_of(source).check_tensors()
    ours, plain = (family_of(s).load(FLOAT32).encode(frames).tokens for s in (source, ModelSource.resolve(name)))
    assert torch.equal(ours, plain) and source.identity != ModelSource.resolve(name).identity
    with pytest.raises(ModelError, match="is quantized"):
        load_language_model(source, FLOAT32)
    with pytest.raises(ModelError, match="is quantized"):
        ModelSource.resolve(source.name)


@pytest.mark.parametrize("name", ["tiny-qwen3-5"])
def test_a_tower_whose_weights_have_scales_is_refused(folder):
    """Also where the weights themselves are plain numbers."""
    with changed_tensors(folder) as tensors:
        tensors["model.visual.blocks.0.attn.qkv.weight_scale"] = torch.ones(1)
    family = family_of(ModelSource.resolve(folder))
    for call in (lambda: family.load(FLOAT32), family.check_tensors):
        with pytest.raises(ModelError, match=r"blocks\.0\.attn\.qkv\.weight is stored as a product with .*_scale"):
            call()


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2-5-vl", "tiny-internvl"])
def test_what_is_missing_of_a_vision_part_is_told_by_names_alone(folder):
    assert family_of(ModelSource.resolve(folder)).check_tensors()
    with changed_tensors(folder) as tensors:
        gone = next(key for key in tensors if "visual" in key or "vision" in key)
        del tensors[gone]
    with pytest.raises(ModelError, match="download the whole checkpoint"):
        family_of(ModelSource.resolve(folder)).check_tensors()


@pytest.mark.parametrize("name", ["tiny-qwen3-5"])
def test_qwen4_is_encoded_by_the_tower_of_qwen3_5_and_not_asked(folder):
    with changed_json(folder / "config.json") as config:
        config.update({"model_type": "qwen4_exp", "text_config": {"model_type": "qwen4_exp_text", "hidden_size": 64}})
        config["vision_config"]["model_type"] = "qwen4_exp"
    source = ModelSource.resolve(folder)
    frames = frames_for(source, 3)
    ours, others = (family_of(s).load(FLOAT32).encode(frames) for s in (source, ModelSource.resolve("tiny-qwen3-5")))
    assert torch.equal(ours.tokens, others.tokens) and not ours.deepstack
    for ask in (lambda: prompt_builder(source), lambda: load_language_model(source, FLOAT32)):
        with pytest.raises(ModelError, match=r"qwen4_exp cannot answer questions, .*: prune with --family generic"):
            ask()


@pytest.mark.parametrize("name", ["tiny-qwen3-5"])
def test_a_tower_of_qwen3_5_has_no_levels_whatever_its_file_lists(folder):
    with changed_json(folder / "config.json") as config:
        assert config["vision_config"]["deepstack_visual_indexes"] == []  # as on the hub
        config["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    family = family_of(ModelSource.resolve(folder))
    assert family.static().deepstack_levels == 0
    assert family.load(FLOAT32).encode(frames_for(family.source, 2)).deepstack == ()


LLAVA, INTERNVL = "tiny", "tiny-internvl"
FAST, PIXELS = "LlavaOnevisionVideoProcessor", "video_preprocessor_config.json"


@pytest.mark.parametrize(
    ("name", "filename", "setting", "value", "words"),
    [
        (LLAVA, PIXELS, "size", {"height": 336, "width": 336}, "size"),
        (LLAVA, PIXELS, "video_processor_type", "Some", "Some"),
        (LLAVA, PIXELS, "do_center_crop", True, "do_center_crop"),
        (LLAVA, "config.json", "vision_feature_layer", [-2, -1], r"vision_feature_layer .* \[-2, -1\]; only a single"),
        (INTERNVL, PIXELS, "size", {"height": 384, "width": 384}, "384 x 384, does not fit the vision tower of 224"),
        (INTERNVL, PIXELS, "video_processor_type", "Other", "'Other', which is not implemented"),
        (INTERNVL, "config.json", "vision_feature_layer", -2, "vision_feature_layer=-2"),
        *((name, None, "patch_size", 7, "patch_size=7 does not fit") for name in QWEN),
        *((name, None, "merge_size", 4, "merge_size=4 does not fit") for name in QWEN),
        *((name, None, "video_processor_type", FAST, FAST) for name in QWEN),
    ],
)
def test_settings_that_would_change_the_pixels_are_refused(name, folder, filename, setting, value, words):
    with changed_json(folder / filename if filename else settings_file(folder)) as content:
        content[setting] = value
    with pytest.raises(ModelError, match=words):
        family_of(ModelSource.resolve(folder)).preprocessor()
