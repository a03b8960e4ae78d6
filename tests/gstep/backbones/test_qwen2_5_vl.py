"""Qwen2.5-VL's own: windows, spellings of the limits of pixels, seconds of a patch."""

import pytest
import torch
from transformers.vision_utils import get_vision_window_index

from gstep.backbones import ModelSource, SampledVideo, family_of
from tests.gstep.backbones.encoders import FLOAT32, frames_for, stock_features
from tests.gstep.reading import changed_json


@pytest.fixture
def name():
    return "tiny-qwen2-5-vl"


def test_windows_are_in_the_order_of_the_stock_tower(source):
    backbone = family_of(source).load(FLOAT32)
    for rows, columns in ((4, 4), (5, 4), (8, 8), (9, 16), (3, 2), (1, 13)):
        expected, _ = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * columns]]), 2, 112, 14)
        assert torch.equal(backbone.family.tower_order(rows, columns, backbone.model.config), expected)


def test_windows_put_tokens_in_another_order_than_space(source):
    """On these frames the trap exists: merging last_hidden_state gives the same tokens at other places."""
    frames = frames_for(source, 2, (12, 17))
    (tokens_MD,) = stock_features(source, frames, torch.float32)
    backbone = family_of(source).load(FLOAT32)
    patches = backbone.preprocessor.patches(frames, "cpu", torch.float32)
    grid = torch.tensor([backbone.preprocessor.grid_thw(*frames.shape[:3])])
    in_windows = backbone.model.merger(backbone.model(patches, grid_thw=grid, return_dict=True).last_hidden_state)
    assert not torch.equal(in_windows, tokens_MD)
    torch.testing.assert_close(in_windows.sort(0).values, tokens_MD.sort(0).values, atol=1e-5, rtol=0)
    assert torch.equal(backbone.encode(frames).tokens.flatten(0, 1), tokens_MD)


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


def test_what_positions_of_qwen2_5_go_by(source):
    backbone = family_of(source).load(FLOAT32)
    video = SampledVideo(252, 448, [1.0, 1.7, 2.4, 3.1, 3.8], 1.0, 29.97, 98)
    assert backbone.model_extra(video) == {
        "grid": [9, 16],
        "video_grid_thw": [3, 18, 32],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "second_per_grid_ts": pytest.approx(2 * 98 / 5 / 29.97),  # 1.308: an int would be 1
        "tokens_per_second": 2,
    }
