"""Pixel values equal the stock video processors' exactly; settings that are not implemented are refused."""

import hashlib
import json
import pickle

import numpy as np
import pytest
import torch

from gstep.backbones.fixed_size import DEFAULTS
from gstep.backbones.preprocess import FixedSizePreprocessor
from gstep.errors import ModelError
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


def test_class_defaults_are_those_of_the_stock_processor():
    stock = META["processors"]["llava_onevision"]
    assert {name: stock[name] for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("do_center_crop", True),
        ("do_resize", False),
        ("do_rescale", False),
        ("do_normalize", False),
        ("resample", 2),
        ("rescale_factor", 1 / 128),
        ("size", {"shortest_edge": 384}),
        ("size", 384),
        ("image_mean", 0.5),
        ("image_std", [0.5]),
    ],
)
def test_a_setting_that_is_not_implemented_is_refused_by_name(setting, value):
    with pytest.raises(ModelError, match=setting):
        FixedSizePreprocessor.from_settings({**DEFAULTS, setting: value})


def test_settings_are_json_and_tell_preprocessors_apart():
    other = FixedSizePreprocessor.from_settings({**DEFAULTS, "image_mean": [0.5, 0.5, 0.5]})
    assert json.loads(json.dumps(CLIP.settings())) == CLIP.settings() != other.settings()
    assert pickle.loads(pickle.dumps(CLIP)) == CLIP  # noqa: S301 - our own bytes
