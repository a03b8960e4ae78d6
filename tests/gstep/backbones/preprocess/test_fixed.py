"""Pixel values equal the stock video processors' exactly, in chunks of any size and of frames in any form.

What is no frame, and settings that are not implemented, are refused.
"""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch

from gstep.backbones.fixed_size import DEFAULTS
from gstep.backbones.preprocess import FixedSizePreprocessor, check_settings
from gstep.errors import ModelError
from tests.gstep.synthetic import defaults
from tests.paths import GOLDEN

META = json.loads((GOLDEN / "preprocess.json").read_text())
CLIP = FixedSizePreprocessor.from_settings(META["processors"]["llava_onevision"])


@pytest.mark.parametrize("case", [name for name in META["cases"] if name.startswith("llava_onevision/")])
def test_pixel_values_are_the_stock_processors_bit_for_bit(case):
    golden, expected = np.load(GOLDEN / "preprocess.npz"), META["cases"][case]
    n_frames, _, shape = case.partition("/")[2].partition("x")
    frames = golden[f"frames/{shape}"][: int(n_frames)]
    size = CLIP.target_size(*frames.shape[:3])
    pixels = CLIP.normalise(CLIP.resize(frames, size), "cpu", torch.float32).numpy()
    assert list(pixels.shape) == expected["shape"]
    np.testing.assert_array_equal(pixels.ravel()[:: expected["sample_stride"]], golden[f"{case}/sample"])
    assert hashlib.sha256(pixels.astype("<f4").tobytes()).hexdigest() == expected["sha256_f4_le"]


def random_frames(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("shape", [(9, 90, 160, 3), (9, 500, 420, 3), (9, 384, 384, 3)])
def test_resizing_in_chunks_equals_resizing_the_whole(shape):
    frames = random_frames(*shape)
    whole = CLIP.resize(frames, (384, 384))
    for chunk in (1, 4):
        parts = [CLIP.resize(frames[i : i + chunk], (384, 384)) for i in range(0, len(frames), chunk)]
        assert torch.equal(whole, torch.cat(parts))
    assert whole.dtype == torch.uint8 and whole.shape == (9, 384, 384, 3) and whole.is_contiguous()


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
    frames = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), np.uint8)
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


NOT_IMPLEMENTED = [("do_center_crop", True), ("do_resize", False), ("do_rescale", False), ("do_normalize", False)]
NOT_IMPLEMENTED += [("resample", 2), ("rescale_factor", 1 / 128), ("size", {"shortest_edge": 384}), ("size", 384)]


@pytest.mark.parametrize(("setting", "value"), [*NOT_IMPLEMENTED, ("image_mean", 0.5)])
def test_a_setting_that_is_not_implemented_is_refused_by_name(setting, value):
    with pytest.raises(ModelError, match=setting):
        FixedSizePreprocessor.from_settings({**DEFAULTS, setting: value})


def test_a_refusal_says_what_is_expected():
    with pytest.raises(ModelError, match="do_rescale=False is not implemented; expected True"):
        check_settings({"do_rescale": False})
    for wrong in ([0.5], [0.5, 0.5], [0.5, 0.5, "x"], [0.5, 0.5, None]):
        with pytest.raises(ModelError, match=r"image_std.*not three numbers"):
            FixedSizePreprocessor.from_settings({**DEFAULTS, "image_std": wrong})


def test_settings_that_are_not_there_are_the_stock_ones_and_all_tell_preprocessors_apart():
    stock = META["processors"]["llava_onevision"]
    assert {name: stock[name] for name in DEFAULTS} == DEFAULTS
    check_settings({})
    check_settings({"resample": None, "do_center_crop": False, "rescale_factor": 1 / 255})
    other = FixedSizePreprocessor.from_settings({**DEFAULTS, "image_mean": [0, 0.5, 1]})
    assert other.image_mean == (0.0, 0.5, 1.0)
    assert json.loads(json.dumps(CLIP.settings())) == CLIP.settings() != other.settings()
    assert pickle.loads(pickle.dumps(CLIP)) == CLIP  # noqa: S301 - our own bytes
