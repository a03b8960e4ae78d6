"""Pixels of every preprocessor equal the stock video processors' exactly, and sizes those of their smart_resize.

Frames may come in chunks of any size and in any form. What is no frame, and settings that are not implemented, are
refused.
"""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gstep.backbones import fixed_size
from gstep.backbones.preprocess import FixedSizePreprocessor, PerFramePreprocessor, PerVideoPreprocessor, check_settings
from gstep.backbones.qwen2_5_vl import Qwen2_5VL
from gstep.backbones.qwen3_vl import Qwen3VL
from gstep.errors import ModelError, UnsupportedVideo
from tests.gstep.stock import stock_size
from tests.gstep.synthetic import defaults
from tests.paths import GOLDEN

META = json.loads((GOLDEN / "preprocess.json").read_text())
LLAVA, QWEN = "llava_onevision", ("qwen2_5_vl", "qwen3_vl")
CLASSES = {LLAVA: FixedSizePreprocessor, QWEN[0]: PerFramePreprocessor, QWEN[1]: PerVideoPreprocessor}
DEFAULTS = {LLAVA: fixed_size.DEFAULTS, QWEN[0]: Qwen2_5VL.pixel_defaults, QWEN[1]: Qwen3VL.pixel_defaults}
CLIP = FixedSizePreprocessor.from_settings(META["processors"][LLAVA])
STOCK = {
    "qwen2_5_vl": ("qwen2_vl/video_processing_qwen2_vl", "Qwen2VLVideoProcessor"),
    "qwen3_vl": ("qwen3_vl/video_processing_qwen3_vl", "Qwen3VLVideoProcessor"),
}
HUB = {
    "qwen2_5_vl": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    "qwen3_vl": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
}


def preprocessor_of(family, **changes):
    return CLASSES[family].from_settings({**DEFAULTS[family], **changes})


@pytest.mark.parametrize("case", META["cases"])
def test_pixels_are_the_stock_processors_bit_for_bit(case):
    family, _, name = case.partition("/")
    preprocessor = CLASSES[family].from_settings(META["processors"][family])
    golden, expected = np.load(GOLDEN / "preprocess.npz"), META["cases"][case]
    n_frames, _, shape = name.partition("x")
    frames = golden[f"frames/{shape}"][: int(n_frames)]
    size = preprocessor.target_size(*frames.shape[:3])
    make = preprocessor.normalise if family == LLAVA else preprocessor.patches
    pixels = make(preprocessor.resize(frames, size), "cpu", torch.float32).numpy()
    if family != LLAVA:
        assert list(preprocessor.grid_thw(len(frames), *size)) == expected["grid_thw"]
    assert list(pixels.shape) == expected["shape"]
    np.testing.assert_array_equal(pixels.ravel()[:: expected["sample_stride"]], golden[f"{case}/sample"])
    assert hashlib.sha256(pixels.astype("<f4").tobytes()).hexdigest() == expected["sha256_f4_le"]


def random_frames(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_resizing_in_chunks_equals_resizing_the_whole():
    frames = random_frames(5, 90, 160, 3)
    whole = CLIP.resize(frames, (384, 384))
    for chunk in (1, 4):
        parts = [CLIP.resize(frames[i : i + chunk], (384, 384)) for i in range(0, len(frames), chunk)]
        assert torch.equal(whole, torch.cat(parts))
    assert whole.dtype == torch.uint8 and whole.shape == (5, 384, 384, 3) and whole.is_contiguous()


def test_neither_the_form_of_frames_nor_default_dtype_and_device_change_a_pixel_or_a_frame(recwarn):
    frames = random_frames(2, 50, 70, 3)
    read_only = frames.copy()
    read_only.flags.writeable = False
    resized = CLIP.resize(frames, (384, 384))
    assert all(torch.equal(CLIP.resize(same, (384, 384)), resized) for same in (torch.from_numpy(frames), read_only))
    assert not recwarn
    before, expected = resized.clone(), CLIP.normalise(resized, "cpu", torch.float32)
    assert torch.equal(resized, before) and np.array_equal(frames, read_only)
    for default in (torch.float64, torch.bfloat16):
        with defaults(default, "meta"):
            pixels = CLIP.normalise(CLIP.resize(frames, (384, 384)), "cpu", torch.float32)
        assert torch.equal(pixels, expected) and pixels.is_contiguous()


@pytest.mark.parametrize("flip", [np.s_[..., ::-1], np.s_[:, :, ::-1], np.s_[::-1]])
def test_a_flipped_array_is_as_good_as_its_copy(flip):
    """BGR as OpenCV reads it becomes RGB by a flip, which is a view with a negative stride."""
    frames = random_frames(3, 20, 30, 3)
    got, expected = (CLIP.resize(array, (16, 16)) for array in (frames[flip], frames[flip].copy()))
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((2, 3, 8, 8), np.uint8), []],
    ids=["float", "one frame", "channels first", "list"],
)
def test_frames_of_another_form_are_refused(frames):
    with pytest.raises(ValueError, match=r"uint8 \[T,H,W,3\]"):
        CLIP.resize(frames, (384, 384))


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("more", ["defaults", "hub", "cap", "tight cap"])
@settings(max_examples=15)
@given(st.integers(1, 900), st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_those_of_the_stock_resize(family, more, n_frames, height, width):
    changes = {
        "defaults": {},
        "hub": HUB[family],
        "cap": {**HUB[family], "cap_pixels_per_frame": True},
        "tight cap": {"cap_pixels_per_frame": True, "max_video_tokens": 200},
    }
    chosen = {**DEFAULTS[family], **changes[more]}
    preprocessor = preprocessor_of(family, **changes[more])
    try:
        expected = stock_size(*STOCK[family], chosen, (n_frames, height, width))
    except ValueError:
        with pytest.raises(UnsupportedVideo):
            preprocessor.target_size(n_frames, height, width)
        return
    assert preprocessor.target_size(n_frames, height, width) == expected


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
        preprocessor_of(family).target_size(*shape)


NOT_IMPLEMENTED = (
    ("resample", 2),
    ("do_normalize", False),
    ("do_center_crop", True),
    ("image_mean", 0.5),
    ("size", 384),
)
LLAVA_ALONE = (
    *(("do_resize", False), ("do_rescale", False), ("rescale_factor", 1 / 128), ("size", {"shortest_edge": 384})),
    *(("image_std", wrong) for wrong in ([0.5], [0.5, 0.5], [0.5, 0.5, "x"], [0.5, 0.5, None])),
)
QWEN_ALONE = (
    *(("size", {"height": 384, "width": 384}), ("size", {"shortest_edge": 3136}), ("patch_size", 14.5)),
    ("size", {"min_pixels": 3136, "max_pixels": 12845056}),  # the stock classes raise too
)


@pytest.mark.parametrize("family", CLASSES)
def test_a_setting_that_is_not_implemented_is_refused_by_name(family):
    for setting, value in (*NOT_IMPLEMENTED, *(LLAVA_ALONE if family == LLAVA else QWEN_ALONE)):
        with pytest.raises(ModelError, match=setting):
            preprocessor_of(family, **{setting: value})
    if family != LLAVA:
        with pytest.raises(ModelError, match="longest_edge"):
            preprocessor_of(family, size={"shortest_edge": 3136, "longest_edge": 0})


def test_a_setting_that_is_not_there_is_the_stock_one_and_a_refusal_says_what_is_expected():
    stock = META["processors"][LLAVA]
    assert {name: stock[name] for name in DEFAULTS[LLAVA]} == DEFAULTS[LLAVA]
    check_settings({})
    check_settings({"resample": None, "do_center_crop": False, "rescale_factor": 1 / 255})
    with pytest.raises(ModelError, match="do_rescale=False is not implemented; expected True"):
        check_settings({"do_rescale": False})


@pytest.mark.parametrize("family", CLASSES)
def test_settings_are_json_and_tell_preprocessors_apart(family):
    preprocessor = preprocessor_of(family)
    assert pickle.loads(pickle.dumps(preprocessor)) == preprocessor  # noqa: S301 - our own bytes
    base = preprocessor.settings()
    assert json.loads(json.dumps(base)) == base
    assert preprocessor_of(family, image_mean=[0, 0.5, 1]).image_mean == (0.0, 0.5, 1.0)
    qwen = (HUB[family], {"cap_pixels_per_frame": True}, {"patch_size": 8}) if family in HUB else ()
    for changes in ({"image_mean": [0, 0.5, 1]}, {"image_std": [0.1, 0.2, 0.3]}, *qwen):
        assert preprocessor_of(family, **changes).settings() != base
    if qwen:
        assert preprocessor_of(family, max_video_tokens=5).settings() == base  # decides nothing without the cap
