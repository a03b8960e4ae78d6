"""The Qwen families: memory, layouts, limits, positions; what other families have of their own; and a new family."""

import json
import os
import re
import shutil
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration
from transformers.vision_utils import get_vision_window_index

from gstep.backbones import ModelSource, Runtime, SampledVideo, family_of
from gstep.backbones.positions import PositionFaults, count_position_faults
from gstep.backbones.runtime import build_empty_model
from gstep.checkpoints.files import CheckpointFiles
from gstep.errors import ModelError
from gstep.language import Visual, load_language_model, prompt_builder
from tests.builders.clips import sample
from tests.gstep.backbones.encoders import BFLOAT16, FLOAT32, QWEN, frames_for, load_stock, stock_features
from tests.gstep.hub_configs import LLMS, PREPROCESSOR
from tests.gstep.quantized import CONFIGS, quantize
from tests.gstep.reading import changed_json, changed_tensors, count_reading
from tests.interpreter import run_python
from tests.paths import ROOT, python_path

#: What a video of five frames, as large as 16 x 9 tokens, has in either family.
GRID = {"grid": [9, 16], "video_grid_thw": [3, 18, 32], "spatial_merge_size": 2, "temporal_patch_size": 2}


of_each = pytest.mark.parametrize("name", QWEN)


@of_each
def test_memory_is_bounded_by_patches_whatever_the_size_of_frames(source):
    backbone, middle = family_of(source).load(FLOAT32), 24 if source.name == "tiny-qwen2-5-vl" else 32
    assert backbone.chunk_length(280, 448, 1) == 2  # a temporal patch
    lengths = [backbone.chunk_length(h, w, 32) for h, w in ((280, 448), (1120, 1792), (4480, 8960))]
    assert lengths == [32, middle, 2]


@of_each
def test_the_attention_asked_for_is_the_towers(source):
    frames = frames_for(source, 2, (12, 17))
    backbones = [family_of(source).load(Runtime("cpu", torch.float32, attn)) for attn in ("sdpa", "eager")]
    assert [backbone.model.config._attn_implementation for backbone in backbones] == ["sdpa", "eager"]
    assert torch.allclose(*(backbone.encode(frames).tokens for backbone in backbones), atol=1e-4)


@of_each
def test_static_parts_and_preprocessing_read_no_weights(source, monkeypatch):
    read = count_reading(monkeypatch)
    family_of(source).static()
    family_of(source).preprocessor()
    family_of(source).token_bytes(8, 252, 448)
    assert not read


@of_each
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


@of_each
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


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl"])
@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (3136, 117600)),  # the old spelling, at the top
        ({"max_pixels": None}, (3136, 602112)),  # the class default
        ({"min_pixels": None, "max_pixels": None}, (100352, 602112)),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}}, (3136, 117600)),  # the old spelling wins
        ({"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 9, "longest_edge": 99999}}, (9, 99999)),
        ({"size": {"min_pixels": 1, "max_pixels": 2}}, (3136, 117600)),  # as transformers 4.49 to 4.52 saved it
        ({"image_processor_type": "Qwen2_5_VLImageProcessor"}, (3136, 117600)),  # the first checkpoints
    ],
)
def test_every_spelling_of_the_pixel_bounds_of_qwen2_5(folder, settings, bounds):
    with changed_json(folder / "preprocessor_config.json") as content:
        content.update(settings)
    preprocessor = family_of(ModelSource.resolve(folder)).preprocessor()
    assert (preprocessor.min_pixels, preprocessor.max_pixels) == bounds


@pytest.mark.parametrize(
    ("size", "millions", "frame", "tokens"),
    [
        ("Qwen2.5-VL-7B", 677, (1092, 1932), 17 * 26 * 46),  # the size of each frame by itself
        ("Qwen3-VL-8B", 576, (640, 1152), 17 * 20 * 36),  # of all frames together, which shrinks them
    ],
)
def test_published_models_are_known_by_their_configs(size, millions, frame, tokens):
    config, hidden = LLMS[size], LLMS[size]["vision_config"]["out_hidden_size"]
    settings = PREPROCESSOR[config["model_type"]]
    source = ModelSource(size, "none", CheckpointFiles("folder", "/none"), (), config["model_type"], config, settings)
    family, levels = family_of(source), 3 if size == "Qwen3-VL-8B" else 0
    static = family.static()
    assert (static.hidden_size, static.newline, static.deepstack_levels) == (hidden, None, levels)
    assert family.preprocessor().target_size(32, 1080, 1920) == frame
    height, width = family.preprocessor().target_size(33, 720, 1280)
    assert family.token_counts(33, height, width) == (17, tokens // 17)
    assert family.token_bytes(33, height, width) == tokens * hidden * 2 * (1 + levels)
    tower = build_empty_model(source.parse_stock_config().vision_config, Runtime("cpu", torch.bfloat16, "sdpa"))
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in tower.parameters())
    assert round(sum(parameter.numel() for parameter in tower.parameters()) / 1e6) == millions


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl"])
def test_windows_are_in_the_order_of_the_stock_tower(source):
    backbone = family_of(source).load(FLOAT32)
    for rows, columns in ((4, 4), (5, 4), (8, 8), (9, 16), (3, 2), (1, 13)):
        expected, _ = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, 112, 14)
        assert torch.equal(backbone.family.tower_order(rows, columns, backbone.model.config), expected)


@pytest.mark.parametrize("name", ["tiny-qwen2-5-vl"])
def test_what_positions_of_qwen2_5_go_by(source):
    backbone = family_of(source).load(FLOAT32)
    video = SampledVideo(252, 448, [1.0, 1.7, 2.4, 3.1, 3.8], 1.0, 29.97, 98)
    assert backbone.model_extra(video) == {
        **GRID,
        "second_per_grid_ts": pytest.approx(2 * 98 / 5 / 29.97),  # 1.308: an int would be 1
        "tokens_per_second": 2,
    }


@pytest.mark.parametrize("name", ["tiny-qwen3-vl"])
def test_qwen3_without_its_video_settings_goes_by_what_the_stock_classes_do(folder):
    path = folder / "video_preprocessor_config.json"
    with changed_json(path) as content:
        content["max_pixels"] = 5
    with pytest.raises(ModelError, match=r"max_pixels is not implemented: the stock .* ignores it"):
        family_of(ModelSource.resolve(folder)).preprocessor()
    path.unlink()
    assert family_of(ModelSource.resolve(folder)).preprocessor().min_pixels == 65536  # of the image file
    with changed_json(folder / "preprocessor_config.json") as content:
        content["image_processor_type"] = "Qwen2VLImageProcessor"
    with pytest.raises(ModelError, match=r"copy video_preprocessor_config\.json"):
        family_of(ModelSource.resolve(folder)).preprocessor()


@pytest.mark.parametrize("name", ["tiny-qwen3-vl"])
def test_what_positions_of_qwen3_go_by(source):
    """Timestamps of the frames themselves; the stock formula, from indices and a constant rate, agrees where it can."""
    backbone = family_of(source).load(FLOAT32)
    indices, fps = [30, 44, 58, 72, 86], 25.0
    video = SampledVideo(288, 512, [i / fps for i in indices], 1.2, fps, 60)
    extra = backbone.model_extra(video)
    padded = [*indices, indices[-1]]
    expected = [(a + b) / 2 / fps - 1.2 for a, b in zip(padded[::2], padded[1::2], strict=True)]
    assert extra.pop("patch_timestamps") == pytest.approx(expected)
    assert extra == {**GRID, "deepstack_levels": 3}
    early = SampledVideo(288, 512, [0.98, 2.0], 1.0, fps, 60)  # on screen when the clip starts
    assert backbone.model_extra(early)["patch_timestamps"] == [0.5]


def extra_of(second_per_grid_ts, tokens_per_second=2):
    return {
        "second_per_grid_ts": second_per_grid_ts,
        "tokens_per_second": tokens_per_second,
        "temporal_patch_size": 2,
        "video_grid_thw": [0, 2, 2],
        "spatial_merge_size": 2,
    }


def test_patches_share_positions_above_tokens_per_second():
    """At 8 frames a second and 2 positions, 16 patches lie on 8."""
    assert count_position_faults({"grid": [2, 2]}, [0.0, 1.0], even=False) == PositionFaults(
        None, None
    )  # no such positions
    for fps, seconds, shared in ((1, 8, 0), (4, 8, 0), (8, 4, 8), (16, 4, 24)):
        times = np.arange(fps * seconds) / fps
        assert count_position_faults(extra_of(2 / fps), times.tolist(), even=True) == PositionFaults(0, shared)


def test_the_positions_that_are_counted_are_those_of_the_prompt():
    """Here 16 patches of one token, built into a prompt as any video is."""
    extra = {**extra_of(0.25), "video_grid_thw": [16, 2, 2], "grid": [1, 1]}
    visual = Visual(torch.zeros(16, 64), torch.arange(16), n_frames=16, tokens_per_frame=1, extra=extra)
    prompt = prompt_builder(ModelSource.resolve("tiny-qwen2-5-vl")).build("p", [visual])
    ((start, end),) = prompt.spans
    at = prompt.positions[0, start:end]
    assert len(at) == 16 and 16 - len(at.unique()) == 8
    assert count_position_faults(extra, (np.arange(32) / 8).tolist(), even=True) == PositionFaults(0, 8)


def test_uneven_frames_are_counted_where_they_are_a_position_off():
    falling = np.linspace(0, 3, 32) ** 2  # as of a file whose rate falls
    rounded = np.floor(np.linspace(0, 249, 32)) / 25  # as frames of a file at 25 a second are
    for times, even in ((np.linspace(0, 10, 32), False), (rounded, False), (falling, True), (np.zeros(32), False)):
        assert count_position_faults(extra_of(2 * 10 / 32), times.tolist(), even=even) == PositionFaults(0, 0)
    fitting = falling[::2] / falling[30] * 15 * 1.25
    uneven = sum(abs(fitting[t] - 1.25 * t) >= 1 for t in range(16))
    assert count_position_faults(extra_of(2 * 10 / 32), falling.tolist(), even=False) == PositionFaults(uneven, 0)
    assert uneven > 0


@pytest.mark.parametrize(("name", "method"), [*(("tiny", method) for method in CONFIGS), ("tiny-qwen3-vl", "fp8")])
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


def test_what_is_missing_of_a_vision_part_is_told_by_names_alone_and_a_newline_when_it_is_read(folder):
    assert family_of(ModelSource.resolve(folder)).check_tensors()
    with changed_tensors(folder) as tensors:
        gone = next(key for key in tensors if "visual" in key or "vision" in key)
        del tensors[gone]
    with pytest.raises(ModelError, match="download the whole checkpoint"):
        family_of(ModelSource.resolve(folder)).check_tensors()
    with changed_tensors(folder) as tensors:
        del tensors["image_newline"]
    with pytest.raises(ModelError, match="image_newline"):
        family_of(ModelSource.resolve(folder)).static()


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
        (LLAVA, PIXELS, "do_center_crop", True, "do_center_crop"),
        (LLAVA, PIXELS, "video_processor_type", "Some", "Some"),
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
    own = PIXELS if (folder / PIXELS).exists() else "preprocessor_config.json"
    with changed_json(folder / (filename or own)) as content:
        content[setting] = value
    with pytest.raises(ModelError, match=words):
        family_of(ModelSource.resolve(folder)).preprocessor()


SECTION = (ROOT / "gstep/README.md").read_text().split("## Add a model family\n")[1].split("\n## ")[0]
EXAMPLE = ROOT / "gstep/examples/family"
SIDE, PATCH, HIDDEN = 32, 8, 6
USE = """
import sys
import torch
import pipeline
from gstep.backbones import ModelSource, choose_runtime, family_of

model, clip, out = sys.argv[1:]
video = pipeline.encode_video(clip, model=model, num_frames=4, retention_ratio=0.25)
family = family_of(ModelSource.resolve(model))
frames = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)
tokens = family.load(choose_runtime("cpu", "float32", "auto")).encode(frames).tokens
torch.save({"frames": frames, "tokens": tokens, "kept": video.kept().shape, "n": len(video.pruned.tokens)}, out)
assert family.token_bytes(4, 32, 32) == 2 * 4 * 16 * 6 and family.flops(1, 32, 32) == 2 * 16 * 192 * 6
from gstep.language import BUILDERS, PromptBuilder
assert issubclass(BUILDERS["patches"], PromptBuilder) and not BUILDERS["patches"].__abstractmethods__
"""


def test_two_files_and_a_line_make_a_family(tmp_path):
    """In a copy of the checkout; tokens are those of plain loops in numpy."""
    copy = tmp_path / "copy"
    for room in ("gstep", "pipeline"):
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(EXAMPLE / "backbone.py", copy / "gstep/backbones/patches.py")
    shutil.copy(EXAMPLE / "prompts.py", copy / "gstep/language/patches.py")
    (line,) = re.findall(r'`("patches": Family.*?,)`', SECTION, re.DOTALL)
    table = copy / "gstep/families.py"
    table.write_text(table.read_text().replace("] = {\n", f"] = {{\n    {line}\n", 1))
    model = tmp_path / "model"
    model.mkdir()
    matrix = torch.randn(HIDDEN, 3 * PATCH**2, generator=torch.Generator().manual_seed(0))
    save_file({"matrix": matrix}, model / "model.safetensors")
    config = {"model_type": "patches", "patch_size": PATCH, "hidden_size": HIDDEN}
    (model / "config.json").write_text(json.dumps(config))
    pixels = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (model / "preprocessor_config.json").write_text(json.dumps(pixels))
    script = tmp_path / "use.py"
    script.write_text(USE)  # a plain script: encode_video needs no main guard
    given = model, sample("bikes.mp4"), tmp_path / "made.pt"
    done = run_python(script, *given, cwd=copy, env={**os.environ, "PYTHONPATH": python_path(copy)})
    assert done.returncode == 0, done.stderr
    made = torch.load(tmp_path / "made.pt", weights_only=True)
    assert (tuple(made["kept"]), made["n"]) == ((4, 4, 4), 16)
    pixels = (made["frames"].double().numpy() / 255 - 0.5) / 0.5
    for t, row, column in np.ndindex(2, 4, 4):
        patch = pixels[t, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
        wanted = matrix.double().numpy() @ patch.transpose(2, 0, 1).reshape(-1)
        assert np.allclose(made["tokens"][t, 4 * row + column].numpy(), wanted, atol=1e-4)


@pytest.fixture
def frames(source):
    return frames_for(source, 2, (24, 24))


def test_the_newline_and_the_grid_are_the_stock_models(source):
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(source.pretrained()[0], dtype=torch.bfloat16)
    backbone = family_of(source).load(BFLOAT16)
    assert torch.equal(backbone.newline(), stock.model.image_newline)
    assert torch.equal(family_of(source).static().newline.to(torch.bfloat16), backbone.newline())
    video = SampledVideo(384, 384, [0.0, 0.5, 1.0, 1.5], None, 30.0, 60)
    assert backbone.model_extra(video) == {"grid": [14, 14]}


def test_every_layout_of_keys_gives_the_same_tokens(source, folder, frames):
    """Those of the hub and those in memory, with the prefixes of several library versions."""
    (expected,) = stock_features(source, frames, torch.float32, at_once=1)
    stored = load_file(folder / "model.safetensors")
    for model, vision_model in product(("", "model."), ("vision_model.", "")):
        tower = f"vision_tower.{vision_model}"
        renamed = {f"{model}{k.replace('vision_tower.vision_model.', tower)}": v for k, v in stored.items()}
        save_file(renamed, folder / "model.safetensors")
        family = family_of(ModelSource.resolve(folder))
        assert torch.equal(family.load(FLOAT32).encode(frames).tokens.flatten(0, 1), expected)
        assert torch.equal(family.static().newline, family_of(source).static().newline)


@pytest.mark.parametrize(("part", "shard_size"), [("whole", "200KB"), ("without the head", "1GB")])
def test_what_save_pretrained_writes_loads(source, folder, frames, part, shard_size):
    stock = LlavaOnevisionForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    (stock if part == "whole" else stock.model).save_pretrained(folder, max_shard_size=shard_size)
    other = ModelSource.resolve(folder)
    assert (len(other.weight_files) > 1) == (shard_size == "200KB")
    tokens = family_of(other).load(FLOAT32).encode(frames).tokens
    assert torch.equal(tokens.flatten(0, 1), *stock_features(source, frames, torch.float32, at_once=1))


def test_what_a_preprocessor_file_leaves_out_is_the_class_default(folder):
    (folder / PIXELS).write_text(json.dumps({"image_mean": None}))
    preprocessor = family_of(ModelSource.resolve(folder)).preprocessor()
    assert preprocessor.image_mean == (0.48145466, 0.4578275, 0.40821073)
    assert preprocessor.target_size(32, 1080, 1920) == (384, 384)


def test_the_layer_is_the_one_that_the_tokens_come_from():
    backbone = family_of(ModelSource.resolve("tiny")).load(FLOAT32)
    layers = backbone.model.vision_tower.encoder.layers
    for index, place in ((-1, 1), (2, 1), (-2, 0), (1, 0)):
        backbone.model.config.vision_feature_layer = index
        assert backbone.layers[-1] is layers[place]
