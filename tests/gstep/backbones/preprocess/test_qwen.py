"""Qwen patches equal the stock video processors' exactly, and sizes those of their smart_resize."""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gstep.backbones.preprocess import PerFramePreprocessor, PerVideoPreprocessor
from gstep.backbones.qwen2_5_vl import Qwen2_5VL
from gstep.backbones.qwen3_vl import Qwen3VL
from gstep.errors import ModelError, UnsupportedVideo
from tests.gstep.stock import stock_size
from tests.paths import GOLDEN

META = json.loads((GOLDEN / "preprocess.json").read_text())
CLASSES = {"qwen2_5_vl": PerFramePreprocessor, "qwen3_vl": PerVideoPreprocessor}
STOCK = {
    "qwen2_5_vl": ("qwen2_vl/video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("qwen3_vl/video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
}
DEFAULTS = {"qwen2_5_vl": Qwen2_5VL.pixel_defaults, "qwen3_vl": Qwen3VL.pixel_defaults}
HUB = {
    "qwen2_5_vl": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    "qwen3_vl": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
}
FAMILIES = list(CLASSES)


@pytest.mark.parametrize("case", [name for name in META["cases"] if name.startswith("qwen")])
def test_patches_are_the_stock_processors_bit_for_bit(case):
    family = case.partition("/")[0]
    preprocessor = CLASSES[family].from_settings(META["processors"][family])
    golden, expected = np.load(GOLDEN / "preprocess.npz"), META["cases"][case]
    n_frames, _, shape = case.partition("/")[2].partition("x")
    frames = golden[f"frames/{shape}"][: int(n_frames)]
    size = preprocessor.target_size(*frames.shape[:3])
    patches = preprocessor.patches(preprocessor.resize(frames, size), "cpu", torch.float32).numpy()
    assert list(preprocessor.grid_thw(len(frames), *size)) == expected["grid_thw"]
    assert list(patches.shape) == expected["shape"]
    np.testing.assert_array_equal(patches.ravel()[:: expected["sample_stride"]], golden[f"{case}/sample"])
    assert hashlib.sha256(patches.astype("<f4").tobytes()).hexdigest() == expected["sha256_f4_le"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("more", ["defaults", "hub", "cap", "tight cap"])
@settings(max_examples=40)
@given(st.integers(1, 900), st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_those_of_the_stock_resize(family, more, n_frames, height, width):
    changes = {
        "defaults": {},
        "hub": HUB[family],
        "cap": {**HUB[family], "cap_pixels_per_frame": True},
        "tight cap": {"cap_pixels_per_frame": True, "max_video_tokens": 200},
    }
    chosen = {**DEFAULTS[family], **changes[more]}
    preprocessor = CLASSES[family].from_settings(chosen)
    try:
        expected = stock_size(*STOCK[family], chosen, (n_frames, height, width))
    except ValueError:
        with pytest.raises(UnsupportedVideo):
            preprocessor.target_size(n_frames, height, width)
        return
    assert preprocessor.target_size(n_frames, height, width) == expected


@pytest.mark.parametrize(
    ("family", "shape", "size"),
    [
        ("qwen2_5_vl", (32, 1080, 1920), (1092, 1932)),  # each frame by itself
        ("qwen2_5_vl", (768, 1080, 1920), (1092, 1932)),
        ("qwen2_5_vl", (1, 10, 10), (56, 56)),
        ("qwen3_vl", (32, 1080, 1920), (640, 1152)),  # all frames together
        ("qwen3_vl", (768, 1080, 1920), (128, 224)),
        ("qwen3_vl", (2, 10, 1900), (32, 6080)),
        ("qwen3_vl", (3, 48, 80), (64, 64)),  # halves round to even
    ],
)
def test_sizes_at_the_settings_of_the_hub(family, shape, size):
    """By hand from the stock smart_resize, in case its file moves."""
    assert CLASSES[family].from_settings({**DEFAULTS[family], **HUB[family]}).target_size(*shape) == size


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("qwen2_5_vl", (8, 9, 2000), "2000x9 pixels have an aspect ratio of 222"),
        ("qwen3_vl", (8, 3000, 10), "aspect ratio of 300"),
        ("qwen3_vl", (1, 360, 640), "fewer than 2 sampled frames, this one has 1"),
    ],
)
def test_what_the_model_does_not_take_is_said(family, shape, message):
    with pytest.raises(UnsupportedVideo, match=message):
        CLASSES[family].from_settings(DEFAULTS[family]).target_size(*shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_lie_in_the_order_of_tokens(family):
    """Row by row of tokens, the four patches of a token together, the frames of a patch side by side."""
    preprocessor = CLASSES[family].from_settings({**DEFAULTS[family], "image_mean": [0] * 3, "image_std": [1] * 3})
    side, patch = preprocessor.factor, preprocessor.patch_size
    token_HW = torch.arange(2 * 3, dtype=torch.uint8).view(2, 3)
    frame_HW = token_HW.repeat_interleave(side, 0).repeat_interleave(side, 1)
    frames = torch.stack([frame_HW, frame_HW + 100]).unsqueeze(-1).expand(-1, -1, -1, 3)
    patches = preprocessor.patches(frames.contiguous(), "cpu", torch.float32) * 255
    assert patches.shape == (2 * 3 * 4, 3 * 2 * patch * patch)
    expected = torch.arange(6).repeat_interleave(4)[:, None] + torch.tensor([0, 100]).repeat_interleave(patch**2)
    assert torch.equal(patches.round().long(), expected.repeat(1, 3))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_odd_last_frame_is_repeated(family):
    preprocessor = CLASSES[family].from_settings(DEFAULTS[family])
    frames = np.random.default_rng(0).integers(0, 256, (3, 64 * 7, 64 * 7, 3), dtype=np.uint8)
    odd = preprocessor.patches(frames, "cpu", torch.bfloat16)
    even = preprocessor.patches(np.concatenate([frames, frames[-1:]]), "cpu", torch.bfloat16)
    assert torch.equal(odd, even) and odd.dtype == torch.bfloat16
    assert preprocessor.grid_thw(3, 448, 448)[0] == 2 == preprocessor.frames_per_patch


SIZES = [{"height": 384, "width": 384}, {"shortest_edge": 3136}, 384]
SIZES += [{"min_pixels": 3136, "max_pixels": 12845056}]  # the stock classes raise too
OTHERS = [("patch_size", 14.5), ("resample", 2), ("do_normalize", False), ("do_center_crop", True), ("image_mean", 0.5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_setting_that_is_not_implemented_is_refused_by_name(family):
    for setting, value in (*(("size", size) for size in SIZES), *OTHERS):
        with pytest.raises(ModelError, match=setting):
            CLASSES[family].from_settings({**DEFAULTS[family], setting: value})
    with pytest.raises(ModelError, match="longest_edge"):
        CLASSES[family].from_settings({**DEFAULTS[family], "size": {"shortest_edge": 3136, "longest_edge": 0}})


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_are_json_and_tell_preprocessors_apart(family):
    def described(**changes):
        return CLASSES[family].from_settings({**DEFAULTS[family], **changes}).settings()

    preprocessor = CLASSES[family].from_settings(DEFAULTS[family])
    assert pickle.loads(pickle.dumps(preprocessor)) == preprocessor  # noqa: S301 - our own bytes
    base = described()
    assert json.loads(json.dumps(base)) == base
    for changes in (HUB[family], {"cap_pixels_per_frame": True}, {"patch_size": 8}, {"image_std": [0.1, 0.2, 0.3]}):
        assert described(**changes) != base
    assert described(max_video_tokens=5) == base  # decides nothing without the cap
