"""Qwen3-VL's own: settings files that other classes would read, and the time of every patch."""

import pytest

from gstep.backbones import ModelSource, SampledVideo, family_of
from gstep.errors import ModelError
from tests.gstep.backbones.encoders import FLOAT32
from tests.gstep.reading import changed_json


@pytest.fixture
def name():
    return "tiny-qwen3-vl"


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
