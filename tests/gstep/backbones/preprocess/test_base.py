"""What every preprocessor does with frames: resize them in chunks, normalise them, refuse what are no frames."""

import numpy as np
import pytest
import torch

from gstep.backbones.fixed_size import DEFAULTS
from gstep.backbones.preprocess import FixedSizePreprocessor, check_settings, rgb_triple
from gstep.errors import ModelError
from tests.gstep.synthetic import defaults

CLIP = FixedSizePreprocessor.from_settings(DEFAULTS)


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


def test_tensor_array_and_read_only_array_give_the_same_without_a_warning(recwarn):
    frames = random_frames(2, 50, 70, 3)
    read_only = frames.copy()
    read_only.flags.writeable = False
    results = [CLIP.resize(f, (384, 384)) for f in (frames, torch.from_numpy(frames), read_only)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not recwarn


def test_normalising_does_not_touch_its_input():
    frames = torch.from_numpy(random_frames(1, 384, 384, 3))
    before = frames.clone()
    pixels = CLIP.normalise(frames, "cpu", torch.bfloat16)
    assert pixels.dtype == torch.bfloat16 and pixels.shape == (1, 3, 384, 384) and pixels.is_contiguous()
    assert torch.equal(frames, before)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 8, 8, 3), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((2, 3, 8, 8), np.uint8)],
    ids=["float", "one frame", "channels first"],
)
def test_frames_of_another_form_are_refused(frames):
    with pytest.raises(ValueError, match=r"uint8 \[T,H,W,3\]"):
        CLIP.resize(frames, (384, 384))


def test_settings_that_are_not_there_are_the_implemented_ones():
    check_settings({})
    check_settings({"resample": None, "do_center_crop": False, "rescale_factor": 1 / 255})
    with pytest.raises(ModelError, match="do_rescale=False is not implemented; expected True"):
        check_settings({"do_rescale": False})
    assert rgb_triple({"image_mean": [0, 0.5, 1]}, "image_mean") == (0.0, 0.5, 1.0)
    for wrong in ([0.5, 0.5], [0.5, 0.5, "x"], [0.5, 0.5, None]):
        with pytest.raises(ModelError, match="not three numbers"):
            rgb_triple({"image_mean": wrong}, "image_mean")


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_default_dtype_and_device_change_no_pixel(default):
    frames = random_frames(2, 50, 70, 3)
    expected = CLIP.normalise(CLIP.resize(frames, (384, 384)), "cpu", torch.float32)
    with defaults(default, "meta"):
        assert torch.equal(CLIP.normalise(CLIP.resize(frames, (384, 384)), "cpu", torch.float32), expected)
