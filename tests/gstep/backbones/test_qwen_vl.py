"""The vision part alone gives exactly what the stock model gives, deepstack levels included, whatever its batch."""

import json
import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from gstep.backbones import ModelSource, Runtime, SampledVideo, family_of
from gstep.checkpoints import tiny
from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError
from tests.gstep.qwen_configs import PREPROCESSOR, SIZES
from tests.gstep.reading import count_reading

FLOAT32 = Runtime("cpu", torch.float32, "sdpa")
BFLOAT16 = Runtime("cpu", torch.bfloat16, "sdpa")
STOCK = {
    "tiny-qwen2-5-vl": Qwen2_5_VLForConditionalGeneration,
    "tiny-qwen3-vl": Qwen3VLForConditionalGeneration,
}
LEVELS = {"tiny-qwen2-5-vl": 0, "tiny-qwen3-vl": 3}


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "user-cache"))


@pytest.fixture(params=STOCK)
def name(request):
    return request.param


@pytest.fixture
def source(name):
    return ModelSource.resolve(name)


@pytest.fixture
def folder(name, tmp_path):
    return Path(shutil.copytree(tiny.build(name), tmp_path / "model"))


def frames_for(source, n_frames=7):
    """[7,h,w,3] uint8 as the decoder resizes them: noise that is coarse enough for patches to differ in brightness."""
    blocks = np.random.default_rng(0).integers(0, 256, (n_frames, 12, 17, 3), dtype=np.uint8)
    preprocessor = family_of(source).preprocessor()
    frames = blocks.repeat(12, axis=1).repeat(12, axis=2)
    return preprocessor.resize(frames, preprocessor.target_size(*frames.shape[:3]))


def stock_features(source, frames, dtype):
    """([T*N,D] tokens and levels, [.,D] last_hidden_state) of the whole model by from_pretrained, in one go."""
    folder, _ = source.pretrained()
    stock = STOCK[source.name].from_pretrained(folder, dtype=dtype)
    return features_of(stock, family_of(source).preprocessor(), frames, dtype)


def features_of(stock, preprocessor, frames, dtype):
    patches = preprocessor.patches(frames, "cpu", dtype)
    grid = torch.tensor([preprocessor.grid_thw(*frames.shape[:3])])
    with torch.no_grad():
        output = stock.model.get_video_features(patches, grid, return_dict=True)
    levels = getattr(output, "deepstack_features", None) or []
    return [output.pooler_output[0], *(level[0] for level in levels)], output.last_hidden_state


def stock_features_by_patch(source, frames, dtype):
    """[T*N,D] tokens and levels of the whole model that is given one temporal patch after the other."""
    folder, _ = source.pretrained()
    stock = STOCK[source.name].from_pretrained(folder, dtype=dtype)
    preprocessor = family_of(source).preprocessor()
    parts = [features_of(stock, preprocessor, pair, dtype)[0] for pair in frames.split(2)]
    return [torch.cat(levels) for levels in zip(*parts, strict=True)]


@pytest.mark.parametrize("runtime", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_tokens_and_levels_equal_the_stock_model_exactly_in_chunks_of_any_size(source, runtime):
    """Of the stock model given one temporal patch at a time: all matrix products then have the shapes of ours."""
    frames = frames_for(source)
    expected = stock_features_by_patch(source, frames, runtime.dtype)
    for frame_batch in (32, 5, 1):
        backbone = family_of(source).load(runtime, frame_batch=frame_batch)
        visual = backbone.encode(frames)
        assert visual.tokens.shape[0] == 4 and visual.tokens.dtype == runtime.dtype
        assert len(visual.deepstack) == LEVELS[source.name] == len(expected) - 1
        for ours, stock in zip((visual.tokens, *visual.deepstack), expected, strict=True):
            assert ours.shape == visual.tokens.shape and torch.equal(ours.flatten(0, 1), stock)
    assert backbone.newline() is None is family_of(source).static().newline
    assert backbone.hidden_size == family_of(source).static().hidden_size == 64
    assert family_of(source).static().deepstack_levels == LEVELS[source.name]
    pairs = combinations((visual.tokens, *visual.deepstack), 2)
    assert not any(torch.equal(a, b) for a, b in pairs)


def test_tokens_of_the_stock_model_in_one_go_differ_by_rounding_alone(source):
    """Some CPUs sum products of other shapes in another order. Neither result is then the better one."""
    frames = frames_for(source)
    at_once, in_bfloat16 = (stock_features(source, frames, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    exact, coarse = (family_of(source).load(runtime).encode(frames) for runtime in (FLOAT32, BFLOAT16))
    for stock, ours in zip(at_once, (exact.tokens, *exact.deepstack), strict=True):
        assert (ours.flatten(0, 1) - stock).abs().max() < 1e-5 * stock.abs().max()
    for stock, theirs, ours in zip(at_once, in_bfloat16, (coarse.tokens, *coarse.deepstack), strict=True):
        noise = (theirs - stock).abs()
        assert (ours.flatten(0, 1) - stock).abs().max() < 2 * noise.max()
        assert (ours.flatten(0, 1) - theirs).abs().mean() < 2 * noise.mean()


def test_windows_put_tokens_in_another_order_than_space():
    """On these frames the trap exists: merging last_hidden_state gives the same tokens at other places."""
    source = ModelSource.resolve("tiny-qwen2-5-vl")
    frames = frames_for(source, 2)
    (tokens_MD,), hidden = stock_features(source, frames, torch.float32)
    backbone = family_of(source).load(FLOAT32)
    in_windows = backbone.model.merger(hidden)
    assert not torch.equal(in_windows, tokens_MD)
    torch.testing.assert_close(in_windows.sort(0).values, tokens_MD.sort(0).values, atol=1e-5, rtol=0)
    assert torch.equal(backbone.encode(frames).tokens.flatten(0, 1), tokens_MD)


def test_memory_is_bounded_by_patches_whatever_the_size_of_frames(source):
    backbone = family_of(source).load(FLOAT32)
    assert backbone.chunk_length(280, 448) == 2  # on a CPU, always
    backbone.device = "cuda"
    assert [backbone.chunk_length(h, w) for h, w in ((280, 448), (1120, 1792), (4480, 8960))] == [
        32,
        {"tiny-qwen2-5-vl": 24, "tiny-qwen3-vl": 32}[source.name],
        2,
    ]


def test_tokens_do_not_depend_on_other_videos_or_on_the_form_of_the_frames(source):
    frames = frames_for(source)
    backbone = family_of(source).load(BFLOAT16, frame_batch=4)
    first = backbone.encode(frames)
    backbone.encode(frames.flip(0)[:5])
    read_only = frames.numpy().copy()
    read_only.flags.writeable = False
    again = backbone.encode(read_only)
    assert all(
        torch.equal(a, b)
        for a, b in zip((first.tokens, *first.deepstack), (again.tokens, *again.deepstack), strict=True)
    )


def test_the_attention_asked_for_is_the_towers(source):
    frames = frames_for(source, 2)
    backbones = [family_of(source).load(Runtime("cpu", torch.float32, attn)) for attn in ("sdpa", "eager")]
    assert [backbone.model.config._attn_implementation for backbone in backbones] == ["sdpa", "eager"]
    assert torch.allclose(*(backbone.encode(frames).tokens for backbone in backbones), atol=1e-4)


def test_no_frames_are_refused(source):
    with pytest.raises(ValueError, match="at least one frame"):
        family_of(source).load(FLOAT32).encode(frames_for(source)[:0])


def test_nothing_of_the_language_model_is_read_or_built(source, monkeypatch):
    read = count_reading(monkeypatch)
    backbone = family_of(source).load(FLOAT32)
    assert read and all(key.removeprefix("model.").startswith("visual.") for key in read)
    assert sum(read.values()) == 4 * sum(parameter.numel() for parameter in backbone.model.parameters())
    tensors = [*backbone.model.parameters(), *backbone.model.buffers()]
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)
    assert not backbone.model.training


def test_static_parts_and_preprocessing_read_no_weights(source, monkeypatch):
    read = count_reading(monkeypatch)
    family_of(source).static()
    family_of(source).preprocessor()
    family_of(source).token_bytes(8, 252, 448)
    assert not read


@pytest.mark.parametrize("add", ["", "model."])
def test_both_layouts_of_keys_give_the_same_tokens(source, folder, add):
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        f"{add}{key.removeprefix('model.')}" if "visual." in key else key: tensor for key, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors")
    frames = frames_for(source, 2)
    tokens = family_of(ModelSource.resolve(folder)).load(FLOAT32).encode(frames).tokens
    assert torch.equal(tokens, family_of(source).load(FLOAT32).encode(frames).tokens)


def test_what_save_pretrained_writes_in_shards_loads(source, folder):
    stock = STOCK[source.name].from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    stock.save_pretrained(folder, max_shard_size="300KB")
    other = ModelSource.resolve(folder)
    assert len(other.weight_files) > 1
    frames = frames_for(source, 3)
    visual, expected = (family_of(s).load(FLOAT32).encode(frames) for s in (other, source))
    assert torch.equal(visual.tokens, expected.tokens)
    assert all(map(torch.equal, visual.deepstack, expected.deepstack))


def test_missing_weights_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    (gone,) = [key for key in tensors if key.endswith("visual.blocks.1.attn.qkv.bias")]
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"has no visual\.blocks\.1\.attn\.qkv\.bias"):
        family_of(ModelSource.resolve(folder)).load(FLOAT32)


def test_weights_of_another_shape_are_named(folder):
    change_json(folder / "config.json", lambda config: config["vision_config"].update(out_hidden_size=32))
    with pytest.raises(ModelError, match=r"does not fit the weights: visual\.\S+ \[64, 256\] instead of \[32, 256\]"):
        family_of(ModelSource.resolve(folder)).load(FLOAT32)


def change_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def settings_file(folder):
    own = folder / "video_preprocessor_config.json"
    return own if own.exists() else folder / "preprocessor_config.json"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"patch_size": 7}, "patch_size=7 does not fit"),
        ({"merge_size": 4}, "merge_size=4 does not fit"),
        ({"video_processor_type": "LlavaOnevisionVideoProcessor"}, "LlavaOnevisionVideoProcessor"),
        ({"do_rescale": False}, "do_rescale"),
    ],
)
def test_preprocessor_settings_that_do_not_fit_are_refused(folder, settings, named):
    change_json(settings_file(folder), lambda content: content.update(settings))
    with pytest.raises(ModelError, match=named):
        family_of(ModelSource.resolve(folder)).preprocessor()


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl"], indirect=True)
@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (3136, 117600)),  # the old spelling, at the top
        ({"max_pixels": None}, (3136, 602112)),  # the class default
        ({"min_pixels": None, "max_pixels": None}, (100352, 602112)),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}}, (3136, 117600)),  # the old spelling wins
        (
            {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 9, "longest_edge": 99999}},
            (9, 99999),
        ),
        ({"size": {"min_pixels": 1, "max_pixels": 2}}, (3136, 117600)),  # as transformers 4.49 to 4.52 saved it
        ({"image_processor_type": "Qwen2_5_VLImageProcessor"}, (3136, 117600)),  # the first checkpoints
    ],
)
def test_every_spelling_of_the_pixel_bounds_of_qwen2_5(folder, settings, bounds):
    change_json(folder / "preprocessor_config.json", lambda content: content.update(settings))
    preprocessor = family_of(ModelSource.resolve(folder)).preprocessor()
    assert (preprocessor.min_pixels, preprocessor.max_pixels) == bounds


def test_limits_of_pixels_overrule_the_checkpoints(source):
    limited = family_of(source).limited(None, 30_000, None)
    before, now = family_of(source).preprocessor(), family_of(limited).preprocessor()
    assert (now.min_pixels, now.max_pixels) == (before.min_pixels, 30_000)
    height, width = now.target_size(2, 360, 640)
    assert height * width <= 30_000 and now.settings() != before.settings()
    assert family_of(family_of(limited).limited(20_000, None, None)).preprocessor().min_pixels == 20_000
    capped = family_of(family_of(source).limited(None, None, 1000)).preprocessor()
    assert capped.max_video_tokens == 1000
    assert limited.identity == source.identity
    with pytest.raises(ModelError, match="at least 50000 and at most 10 pixels"):
        family_of(source).limited(50_000, 10, None)


def test_a_family_with_one_size_has_no_limits():
    with pytest.raises(ModelError, match="one size"):
        family_of(ModelSource.resolve("tiny")).limited(None, 1000, None)


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl"], indirect=True)
def test_an_image_processor_of_another_family_is_refused(folder):
    change_json(
        folder / "preprocessor_config.json",
        lambda content: content.update(image_processor_type="LlavaOnevisionImageProcessor"),
    )
    with pytest.raises(ModelError, match="LlavaOnevisionImageProcessor"):
        family_of(ModelSource.resolve(folder)).preprocessor()


@pytest.mark.parametrize("name", ["tiny-qwen3-vl"], indirect=True)
def test_qwen3_without_its_video_settings_goes_by_what_the_stock_classes_do(folder):
    path = folder / "video_preprocessor_config.json"
    change_json(path, lambda content: content.update(max_pixels=5))
    with pytest.raises(ModelError, match=r"max_pixels is not implemented: the stock .* ignores it"):
        family_of(ModelSource.resolve(folder)).preprocessor()
    path.unlink()
    assert family_of(ModelSource.resolve(folder)).preprocessor().min_pixels == 65536  # of the image file
    change_json(
        folder / "preprocessor_config.json",
        lambda content: content.update(image_processor_type="Qwen2VLImageProcessor"),
    )
    with pytest.raises(ModelError, match=r"copy video_preprocessor_config\.json"):
        family_of(ModelSource.resolve(folder)).preprocessor()


@pytest.mark.parametrize("size", SIZES)
def test_every_dense_size_on_the_hub_is_known_by_its_config(size):
    config, hidden, millions = SIZES[size]
    family = config["model_type"]
    source = ModelSource(
        size, family, "none", CheckpointFiles("folder", "/none"), (), config, preprocessor=PREPROCESSOR[family]
    )
    levels = 3 if family == "qwen3_vl" else 0
    static = family_of(source).static()
    assert (static.hidden_size, static.newline, static.deepstack_levels) == (hidden, None, levels)
    preprocessor = family_of(source).preprocessor()
    height, width = preprocessor.target_size(33, 720, 1280)
    T, H, W = preprocessor.grid_thw(33, height, width)
    assert T == 17
    assert family_of(source).token_bytes(33, height, width) == 17 * H * W // 4 * hidden * 2 * (1 + levels)
    tower = family_of(source)._tower("sdpa", torch.bfloat16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in tower.parameters())
    assert tower.config.out_hidden_size == hidden
    assert round(sum(parameter.numel() for parameter in tower.parameters()) / 1e6) == millions


def test_a_config_without_text_config_and_one_with_it_give_the_same(source, folder):
    """As transformers saves Qwen2.5-VL today; the hub's file is flat."""
    STOCK[source.name].from_pretrained(folder).config.save_pretrained(folder)
    assert "text_config" in json.loads((folder / "config.json").read_text())
    frames = frames_for(source, 2)
    tokens = family_of(ModelSource.resolve(folder)).load(FLOAT32).encode(frames).tokens
    assert torch.equal(tokens, family_of(source).load(FLOAT32).encode(frames).tokens)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "qwen2_vl", "qwen3_omni_moe", "qwen3_5", "qwen2_5_omni"])
def test_other_qwen_families_are_refused_with_what_to_use(tmp_path, model_type):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=f"{model_type}.*use a dense Qwen2.5-VL .* or Qwen3-VL .*mixtures of experts"):
        ModelSource.resolve(tmp_path)


def test_what_positions_of_qwen2_5_go_by():
    backbone = family_of(ModelSource.resolve("tiny-qwen2-5-vl")).load(FLOAT32)
    video = SampledVideo(252, 448, [1.0, 1.7, 2.4, 3.1, 3.8], 1.0, 29.97, 98)
    assert backbone.model_extra(video) == {
        "grid": [9, 16],
        "video_grid_thw": [3, 18, 32],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "second_per_grid_ts": pytest.approx(2 * 98 / 5 / 29.97),  # 1.308: an int would be 1
        "tokens_per_second": 2,
    }


def test_what_positions_of_qwen3_go_by():
    """Timestamps of the frames themselves; the stock formula, from indices and a constant rate, agrees where it can."""
    backbone = family_of(ModelSource.resolve("tiny-qwen3-vl")).load(FLOAT32)
    indices, fps = [30, 44, 58, 72, 86], 25.0
    video = SampledVideo(288, 512, [i / fps for i in indices], 1.2, fps, 60)
    extra = backbone.model_extra(video)
    padded = [*indices, indices[-1]]
    expected = [(a + b) / 2 / fps - 1.2 for a, b in zip(padded[::2], padded[1::2], strict=True)]
    assert extra.pop("patch_timestamps") == pytest.approx(expected)
    assert extra == {
        "grid": [9, 16],
        "video_grid_thw": [3, 18, 32],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_levels": 3,
    }
    early = SampledVideo(288, 512, [0.98, 2.0], 1.0, fps, 60)  # on screen when the clip starts
    assert backbone.model_extra(early)["patch_timestamps"] == [0.5]
