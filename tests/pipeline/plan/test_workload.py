"""Decoding and selection that nobody has measured: held to the tables of what was."""

import pytest

from pipeline.plan.gpus import GPU_TYPES, named_type
from pipeline.plan.workload import decoding, selecting

# Of jobs/benchmark/README.md, 32 frames at 24 a second, here at 30: seconds x 0.8 have as many pictures.
MEASURED = (
    (10, 1280, 720, 0.42), (10, 1280, 720, 0.45),
    (60, 1920, 1080, 4.87), (60, 1920, 1080, 2.19), (60, 1920, 1080, 5.42),
    (600, 1280, 720, 5.52),
)  # fmt: skip


@pytest.mark.parametrize(("seconds", "width", "height", "core_s"), MEASURED)
def test_decoding_is_in_the_range_of_what_was_measured(seconds, width, height, core_s):
    found = decoding(0.8 * seconds, width, height, 32)
    assert found.low <= core_s <= found.high


def test_a_video_with_fewer_pictures_than_frames_costs_its_frames():
    assert decoding(0.1, 640, 360, 32).expected < decoding(10, 640, 360, 32).expected < 0.3


def test_selection_grows_with_tokens_and_method():
    one = selecting("gstep", 6272, 3584)
    assert one.low <= 0.28 <= one.high  # of low rank; random numbers took 0.57
    assert selecting("gstep", 4 * 6272, 3584).expected == pytest.approx(4**1.15 * one.expected)
    assert selecting("cdpruner", 6272, 3584).expected > selecting("fastvid", 6272, 3584).expected > one.expected


def test_devices_are_found_by_the_names_that_libraries_give_them():
    names = {
        "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100-40GB", "A100": "A100", "NVIDIA_H100": "H100",
        "NVIDIA L4": "L4", "NVIDIA L40S": "L40S", "NVIDIA A10G": "A10G", "NVIDIA GeForce RTX 4090": None,
    }  # fmt: skip
    assert {name: named_type(name) for name in names} == names
    assert all(kind.price is None or kind.price.low < kind.price.high for kind in GPU_TYPES.values())
