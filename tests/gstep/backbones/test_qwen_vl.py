"""What the Qwen families share: memory by patches, layouts of files, settings and limits of frames, known sizes."""

import json

import pytest
import torch

from gstep.backbones import ModelSource, Runtime, family_of
from gstep.backbones.runtime import build_empty_model
from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import FLOAT32, QWEN, frames_for, load_stock, settings_file
from tests.gstep.qwen_configs import PREPROCESSOR, SIZES
from tests.gstep.reading import changed_json, changed_tensors, count_reading


@pytest.fixture(params=QWEN)
def name(request):
    return request.param


def test_memory_is_bounded_by_patches_whatever_the_size_of_frames(source):
    backbone, middle = family_of(source).load(FLOAT32), 24 if source.name == "tiny-qwen2-5-vl" else 32
    assert backbone.chunk_length(280, 448, 1) == 2  # a temporal patch
    lengths = [backbone.chunk_length(h, w, 32) for h, w in ((280, 448), (1120, 1792), (4480, 8960))]
    assert lengths == [32, middle, 2]


def test_the_attention_asked_for_is_the_towers(source):
    frames = frames_for(source, 2, (12, 17))
    backbones = [family_of(source).load(Runtime("cpu", torch.float32, attn)) for attn in ("sdpa", "eager")]
    assert [backbone.model.config._attn_implementation for backbone in backbones] == ["sdpa", "eager"]
    assert torch.allclose(*(backbone.encode(frames).tokens for backbone in backbones), atol=1e-4)


def test_static_parts_and_preprocessing_read_no_weights(source, monkeypatch):
    read = count_reading(monkeypatch)
    family_of(source).static()
    family_of(source).preprocessor()
    family_of(source).token_bytes(8, 252, 448)
    assert not read


def test_every_layout_of_files_gives_the_same_tokens(source, folder):
    """Both of keys, a flat config and one with text_config as transformers saves it, and weights in shards."""
    frames = frames_for(source, 3, (12, 17))
    expected = family_of(source).load(FLOAT32).encode(frames)
    for prefix in ("", "model."):
        with changed_tensors(folder) as tensors:
            for key in [key for key in tensors if "visual." in key]:
                tensors[f"{prefix}{key.removeprefix('model.')}"] = tensors.pop(key)
        assert family_of(ModelSource.resolve(folder)).load(FLOAT32).encode(frames) == expected
    stock = load_stock(folder, torch.float32)
    stock.config.save_pretrained(folder)
    assert "text_config" in json.loads((folder / "config.json").read_text())
    assert family_of(ModelSource.resolve(folder)).load(FLOAT32).encode(frames) == expected
    (folder / "model.safetensors").unlink()
    stock.save_pretrained(folder, max_shard_size="300KB")
    sharded = ModelSource.resolve(folder)
    assert len(sharded.weight_files) > 1 and family_of(sharded).load(FLOAT32).encode(frames) == expected


SETTINGS = {
    "patch_size": 7,
    "merge_size": 4,
    "video_processor_type": "LlavaOnevisionVideoProcessor",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_preprocessor_settings_that_do_not_fit_are_refused(folder, setting):
    with changed_json(settings_file(folder)) as content:
        content[setting] = SETTINGS[setting]
    message = f"{setting}={SETTINGS[setting]} does not fit" if setting.endswith("_size") else setting
    with pytest.raises(ModelError, match="LlavaOnevisionVideoProcessor" if "processor" in setting else message):
        family_of(ModelSource.resolve(folder)).preprocessor()


def test_limits_of_pixels_overrule_the_checkpoints(source):
    limited = family_of(source).with_limits(None, 30_000, None)
    before, now = family_of(source).preprocessor(), family_of(limited).preprocessor()
    assert (now.min_pixels, now.max_pixels) == (before.min_pixels, 30_000)
    height, width = now.target_size(2, 360, 640)
    assert height * width <= 30_000 and now.settings() != before.settings()
    assert family_of(family_of(limited).with_limits(20_000, None, None)).preprocessor().min_pixels == 20_000
    capped = family_of(family_of(source).with_limits(None, None, 1000)).preprocessor()
    assert capped.max_video_tokens == 1000
    assert limited.identity == source.identity
    with pytest.raises(ModelError, match="at least 50000 and at most 10 pixels"):
        family_of(source).with_limits(50_000, 10, None)


@pytest.mark.parametrize("size", SIZES)
def test_every_dense_size_on_the_hub_is_known_by_its_config(size):
    config, hidden, millions = SIZES[size]
    family = config["model_type"]
    source = ModelSource(
        size, "none", CheckpointFiles("folder", "/none"), (), family, config, preprocessor=PREPROCESSOR[family]
    )
    levels = 3 if family == "qwen3_vl" else 0
    static = family_of(source).static()
    assert (static.hidden_size, static.newline, static.deepstack_levels) == (hidden, None, levels)
    preprocessor = family_of(source).preprocessor()
    height, width = preprocessor.target_size(33, 720, 1280)
    T, H, W = preprocessor.grid_thw(33, height, width)
    assert T == 17
    assert family_of(source).token_bytes(33, height, width) == 17 * H * W // 4 * hidden * 2 * (1 + levels)
    tower = build_empty_model(source.parse_stock_config().vision_config, Runtime("cpu", torch.bfloat16, "sdpa"))
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in tower.parameters())
    assert tower.config.out_hidden_size == hidden
    assert round(sum(parameter.numel() for parameter in tower.parameters()) / 1e6) == millions
